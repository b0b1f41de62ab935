"""Gradient groups: copies of the parameters' gradients out of memory that the next step overwrites, some at a time.

A replayed backward pass (:mod:`sft.torch_runtime.pass_graphs`) leaves gradients in memory of its recording. Autograd adds a gradient to
``.grad``, or keeps it where there is none. Copies of all gradients at once would take the bytes of the parameters in addition to ``.grad``.

So the parameters enter the region through identity functions, one for each group. Its backward pass copies the gradients of the group.
Autograd runs the nodes of leaves before all others, so it has accumulated these copies, and freed them, before the next group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sft.common.torch_internals import apply_function, copy_tensors
from sft.runtime.region import Region

__all__ = ["GradientGroups", "copy_lasting_grads", "group_gradients"]

#: Groups have this share of the bytes of all gradients, or the bytes of the largest gradient.
_GROUP_SHARE = 8


def group_gradients(sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Names of gradients in groups, in order.

    Args:
        sizes: bytes by name.
    """
    most_bytes = max([*sizes.values(), -(-sum(sizes.values()) // _GROUP_SHARE)], default=0)
    groups: list[list[str]] = []
    left_bytes = 0
    for name, num_bytes in sizes.items():
        if not groups or num_bytes > left_bytes:
            groups.append([])
            left_bytes = most_bytes
        groups[-1].append(name)
        left_bytes -= num_bytes
    return tuple(map(tuple, groups))


@dataclass(slots=True, eq=False)
class GradientGroups:
    """Groups of the parameters of one call that needs gradients.

    Attributes:
        groups: names of the parameters.
        names: all of them.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    names: frozenset[str] = frozenset()
    _is_copied: bool = False
    _num_left: int = 0
    _finish: Callable[[], None] | None = field(default=None, repr=False)

    def aliases(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The leaves, the parameters among them as results of their group's function."""
        results = dict(leaves)
        for group in self.groups:
            results.update(zip(group, apply_function(_GroupFunction, self, *map(leaves.__getitem__, group)), strict=True))
        return results

    def copy_next(self, unneeded: Iterable[str], finish: Callable[[], None] = lambda: None) -> None:
        """Copy the gradients that the groups get next.

        Args:
            unneeded: parameters without a gradient in the running backward pass.
            finish: called when all groups have their copies.
        """
        skipped = frozenset(unneeded)
        self._num_left = sum(not skipped.issuperset(group) for group in self.groups)
        self._is_copied, self._finish = True, finish
        if not self._num_left:
            self._end()

    def take(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Gradients of a group, in memory of their own."""
        if not self._is_copied:
            return tuple(grads)
        copies = _copied(grads)
        self._num_left -= 1
        if not self._num_left:
            self._end()
        return copies

    def _end(self) -> None:
        finish, self._finish, self._is_copied = self._finish, None, False
        if finish is not None:
            finish()


class _GroupFunction(torch.autograd.Function):
    """Identity on the parameters of a group."""

    @staticmethod
    def forward(ctx: Any, groups: GradientGroups, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.groups = groups
        ctx.set_materialize_grads(False)
        return tuple(map(Tensor.detach, parameters))  # each shares the version of its parameter

    @staticmethod
    def jvp(ctx: Any, _groups: None, *tangents: Any) -> Any:
        return tangents

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, *ctx.groups.take(grads))


def _copied(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Copies of gradients; with ``create_graph`` they are functions of these."""
    if torch.is_grad_enabled():
        return tuple(None if grad is None else grad.clone() for grad in grads)
    present = [grad for grad in grads if grad is not None]
    copies = [*map(torch.empty_like, present)]
    if copies:
        copy_tensors(copies, present)
    if len(copies) == len(grads):
        return tuple(copies)
    remaining = iter(copies)
    return tuple(None if grad is None else next(remaining) for grad in grads)


def copy_lasting_grads(region: Region, leaves: Mapping[str, Tensor], grads: dict[str, Any], device: torch.device) -> None:
    """Copy the parameters' gradients that outlast a pass out of its memory pool, one after another.

    Autograd keeps the gradient of a leaf that has none yet. In the pool it would occupy a segment of the next step. Gradients of streamed
    weights are on the host.
    """
    for name, leaf in leaves.items():
        grad = grads.get(name)
        is_kept = leaf.is_leaf and leaf.grad is None and region.graph[name].kind == "parameter"
        if is_kept and grad is not None and grad.device.type == device.type:
            grads[name] = grad.clone()
