"""What torch calls while a function runs forward and backward, as a list.

A dispatch mode sees every call below autograd, those of the derivative included. It stands in front of fake tensors, so nothing is
computed. ``make_fx`` sees the same, but makes a proxy, a name and a line of code of each call, for a module that nobody runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sft.common.torch_internals import FakeTensorMode, TorchDispatchMode

__all__ = ["OpRecording", "RecordedOp", "record_ops"]

#: Questions that fake tensors answer by a call.
_METADATA_OPS = frozenset({torch.ops.prim.device.default})


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """One call, with its tensors as they are.

    Attributes:
        function: the overload.
        arguments: positional arguments.
        keywords: keyword arguments.
        made: a tensor, a list of tensors, or ``None``.
        first_argument_shape: of the first argument, where that is a tensor. Calls in place may change shapes later, so they are noted here.
        result_shapes: of what is made, likewise.
    """

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    made: Any
    first_argument_shape: tuple[int, ...]
    result_shapes: tuple[tuple[int, ...], ...]

    @property
    def has_many(self) -> bool:
        """Whether a list is returned."""
        return isinstance(self.made, (list, tuple))

    @property
    def listed(self) -> tuple[torch.Tensor | None, ...]:
        """What is made, as a list."""
        return _as_tuple(self.made)


@dataclass(frozen=True, slots=True)
class OpRecording:
    """A function's calls.

    Attributes:
        inputs: what it was given.
        grad: the gradient of its output.
        calls: in order.
        output: what it returned.
        gradients: of each input; ``None`` where it needs none, or the output does not depend on it.
    """

    inputs: tuple[torch.Tensor, ...]
    grad: torch.Tensor
    calls: tuple[RecordedOp, ...]
    output: torch.Tensor
    gradients: tuple[torch.Tensor | None, ...]


class _OpRecorder(TorchDispatchMode):
    """Notes calls; autograd has taken apart those that are compositions of others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[RecordedOp] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        given = tuple(args[0].shape) if args and isinstance(args[0], torch.Tensor) else ()
        made = func(*args, **keywords)
        if func not in _METADATA_OPS:
            shapes = tuple(() if tensor is None else tuple(tensor.shape) for tensor in _as_tuple(made))
            self.calls.append(RecordedOp(func, tuple(args), keywords, made, given, shapes))
        return made


def _as_tuple(made: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(made) if isinstance(made, (list, tuple)) else () if made is None else (made,)


def record_ops(
    function: Callable[..., torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    needs_grad: Sequence[bool],
    *,
    by_shape: bool = False,
) -> OpRecording:
    """What a function calls for contiguous tensors of these shapes, and its derivative by those that need a gradient.

    Whole numbers have no gradient, and what is cut off from its operands has none either.

    Args:
        function: makes one tensor of tensors.
        shapes: of its tensors.
        dtypes: likewise.
        needs_grad: likewise.
        by_shape: whether it calls the same on all devices. Then plain tensors without numbers do, which take a fraction of the time of
            fake ones, which know that they stand for a CPU's.
    """
    with contextlib.nullcontext() if by_shape else FakeTensorMode(allow_non_fake_inputs=True):
        device = "meta" if by_shape else "cpu"
        inputs = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True))
        wanted = []
        for leaf, need in zip(inputs, needs_grad, strict=True):
            if need and (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
                wanted.append(leaf.requires_grad_())
        recorder = _OpRecorder()
        with recorder, torch.enable_grad():
            output = function(*inputs)
        grad = torch.empty_like(output, requires_grad=False)
        found: dict[int, torch.Tensor | None] = {}
        if wanted and output.requires_grad:
            with recorder:
                found = dict(zip(map(id, wanted), torch.autograd.grad(output, wanted, grad, allow_unused=True), strict=True))
    return OpRecording(inputs, grad, tuple(recorder.calls), output, tuple(found.get(id(leaf)) for leaf in inputs))
