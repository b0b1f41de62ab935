"""What the programs of a compiled model call where blocks are repeated (``sft.repeat.costs``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sft.common.torch_internals import storage_id
from sft.kernels.rng.philox import key_of, philox4x32
from sft.repeat.costs import PassKind, RepeatSite
from sft.repeat.executor import Environment, Executor, StackedWeightAccess
from sft.solvers.schedule import activation_name, grad_name
from sft.torch_runtime.machine import TorchMachine

__all__ = ["BackwardPass", "ForwardPass", "InferencePass", "RepeatResiduals", "pass_function", "site_seed"]

Tensors = Sequence[Tensor]


@dataclass(slots=True)
class RepeatResiduals:
    """What repeated blocks hold between their forward and their backward pass.

    Attributes:
        table: activations and what blocks saved, without the input and the output of all blocks.
        outside: the storages of these two, which blocks may have saved views of.
    """

    table: Environment
    outside: tuple[int, ...]

    def fork(self) -> RepeatResiduals:
        """The same tensors, for a backward pass that is not the last."""
        return RepeatResiduals(self.table.copy(), self.outside)

    @property
    def buffers(self) -> list[Tensor]:
        """One tensor for each storage."""
        values = [*self.table.values.values(), *(value for kept in self.table.saved.values() for value in kept.values.values())]
        tensors = [value for value in values if isinstance(value, Tensor)]
        found = {storage_id(tensor): tensor for tensor in tensors}
        return [tensor for storage, tensor in found.items() if storage not in self.outside]


@dataclass(frozen=True, eq=False, slots=True)
class _PassFunction:
    """Something to call; parameters, buffers and so on come as lists, in the order of the blocks' own names."""

    call: RepeatSite

    def _executor(self, access: StackedWeightAccess, seed: Tensor | None) -> Executor:
        repeated = self.call.repeated
        return Executor(
            programs=self.call.programs,
            machine=TorchMachine(repeated.device),
            access=access,
            seed=0 if seed is None else site_seed(int(seed), self.call.site),
            wants_input_grad=self.call.wants_input_grad,
            trace=repeated.trace,
        )

    def _forward_access(self, params: Tensors, fixed: Tensors, shared: Tensors, updated: Tensors) -> StackedWeightAccess:
        own = self.call.repeated
        buffers = dict(zip((*own.fixed, *own.updated), (*fixed, *updated), strict=True))
        return StackedWeightAccess(
            dict(zip(own.params, params, strict=True)), buffers, dict(zip(own.shared, shared, strict=True)), updated=own.updated
        )


class InferencePass(_PassFunction):
    """All blocks one after the other, with nothing kept: returns the output, and the buffers' next values if there are any."""

    def __call__(self, x: Tensor, params: Tensors, fixed: Tensors, shared: Tensors, updated: Tensors, seed: Tensor | None) -> Any:
        access = self._forward_access(params, fixed, shared, updated)
        out = self._executor(access, seed).infer(x, self.call.plan.num_blocks)
        nexts = [access.next_values[name] for name in self.call.repeated.updated]
        return (out, *nexts) if nexts else out


class ForwardPass(_PassFunction):
    """The schedule up to the loss: returns the output, a :class:`RepeatResiduals`, and the buffers' next values."""

    def __call__(
        self, x: Tensor, params: Tensors, fixed: Tensors, shared: Tensors, updated: Tensors, seed: Tensor | None
    ) -> tuple[Any, ...]:
        plan, access = self.call.plan, self._forward_access(params, fixed, shared, updated)
        table = Environment({activation_name(0): x})
        self._executor(access, seed).run(plan.operations[: plan.turn], table, is_first=True)
        out = table.values.pop(activation_name(plan.num_blocks))
        table.values.pop(activation_name(0), None)
        state = RepeatResiduals(table, (storage_id(x), storage_id(out)))
        return (out, state, *(access.next_values[name] for name in self.call.repeated.updated))


class BackwardPass(_PassFunction):
    """The rest of the schedule: returns the gradient of the input, if it wants one, and adds to those of parameters (``sums``)."""

    def __call__(
        self,
        gradient: Tensor,
        x: Tensor,
        out: Tensor | None,
        state: RepeatResiduals,
        params: Tensors,
        fixed: Tensors,
        shared: Tensors,
        sums: Tensors,
        seed: Tensor | None,
    ) -> Tensor | None:
        own, plan = self.call.repeated, self.call.plan
        access = StackedWeightAccess(
            dict(zip(own.params, params, strict=True)),
            dict(zip(own.fixed, fixed, strict=True)),
            dict(zip(own.shared, shared, strict=True)),
            sums=dict(zip(self.call.programs.with_gradient, sums, strict=True)),
        )
        table = state.table
        table.values |= {activation_name(0): x, grad_name(plan.num_blocks): gradient}
        if out is not None:
            table.values[activation_name(plan.num_blocks)] = out
        self._executor(access, seed).run(plan.operations[plan.turn + 1 :], table, is_first=False)
        return table.values.pop(grad_name(0), None)


def pass_function(call: RepeatSite, kind: PassKind) -> Callable[..., Any]:
    """What runs a call."""
    kinds: dict[PassKind, type[Any]] = {"inference": InferencePass, "forward": ForwardPass, "backward": BackwardPass}
    found: Callable[..., Any] = kinds[kind](call)
    return found


def site_seed(seed: int, site: int) -> int:
    """A seed of a repetition's own, so that the masks in its blocks have nothing to do with others of the model."""
    words = [torch.tensor(word, dtype=torch.int64, device="cpu") for word in (site, 0, 0, 0x5F7)]
    low, high, _, _ = philox4x32((words[0], words[1], words[2], words[3]), key_of(seed))
    return int(high) << 32 | int(low)
