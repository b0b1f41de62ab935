"""What the programs of a compiled model call where blocks are repeated (``sft.deep.repetition``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sft.deep.access import StackedAccess
from sft.deep.repetition import CallKind, RepeatedCall
from sft.deep.run import Executor, Table
from sft.execute.machine import TorchMachine
from sft.kernels.philox import key_of, philox4x32
from sft.plan.chain.schedule import activation, grad

__all__ = ["BackwardHalf", "ChainState", "ForwardHalf", "Inference", "function_of", "seed_of_site"]

Tensors = Sequence[Tensor]


@dataclass(slots=True)
class ChainState:
    """What repeated blocks hold between their forward and their backward pass.

    Attributes:
        table: activations and what blocks saved, without the input and the output of all blocks.
        outside: the storages of these two, which blocks may have saved views of.
    """

    table: Table
    outside: tuple[int, ...]

    def fork(self) -> ChainState:
        """The same tensors, for a backward pass that is not the last."""
        return ChainState(self.table.copy(), self.outside)

    @property
    def buffers(self) -> list[Tensor]:
        """One tensor for each storage."""
        values = [*self.table.values.values(), *(value for kept in self.table.saved.values() for value in kept.values.values())]
        tensors = [value for value in values if isinstance(value, Tensor)]
        found = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        return [tensor for storage, tensor in found.items() if storage not in self.outside]


@dataclass(frozen=True, eq=False, slots=True)
class _Function:
    """Something to call; parameters, buffers and so on come as lists, in the order of the blocks' own names."""

    call: RepeatedCall

    def _executor(self, access: StackedAccess, seed: Tensor | None) -> Executor:
        repeated = self.call.repeated
        return Executor(
            programs=self.call.programs,
            machine=TorchMachine(repeated.device),
            access=access,
            seed=0 if seed is None else seed_of_site(int(seed), self.call.site),
            wants_input_grad=self.call.wants_input_grad,
            trace=repeated.trace,
        )

    def _forward_access(self, params: Tensors, fixed: Tensors, shared: Tensors, updated: Tensors) -> StackedAccess:
        own = self.call.repeated
        buffers = dict(zip((*own.fixed, *own.updated), (*fixed, *updated), strict=True))
        return StackedAccess(
            dict(zip(own.params, params, strict=True)), buffers, dict(zip(own.shared, shared, strict=True)), updated=own.updated
        )


class Inference(_Function):
    """All blocks one after the other, with nothing kept: returns the output, and the buffers' next values if there are any."""

    def __call__(self, x: Tensor, params: Tensors, fixed: Tensors, shared: Tensors, updated: Tensors, seed: Tensor | None) -> Any:
        access = self._forward_access(params, fixed, shared, updated)
        out = self._executor(access, seed).infer(x, self.call.plan.num_blocks)
        nexts = [access.next_values[name] for name in self.call.repeated.updated]
        return (out, *nexts) if nexts else out


class ForwardHalf(_Function):
    """The schedule up to the loss: returns the output, a :class:`ChainState`, and the buffers' next values."""

    def __call__(
        self, x: Tensor, params: Tensors, fixed: Tensors, shared: Tensors, updated: Tensors, seed: Tensor | None
    ) -> tuple[Any, ...]:
        plan, access = self.call.plan, self._forward_access(params, fixed, shared, updated)
        table = Table({activation(0): x})
        self._executor(access, seed).run(plan.operations[: plan.turn], table, is_first=True)
        out = table.values.pop(activation(plan.num_blocks))
        table.values.pop(activation(0), None)
        state = ChainState(table, (x.untyped_storage()._cdata, out.untyped_storage()._cdata))
        return (out, state, *(access.next_values[name] for name in self.call.repeated.updated))


class BackwardHalf(_Function):
    """The rest of the schedule: returns the gradient of the input, if it wants one, and adds to those of parameters (``sums``)."""

    def __call__(
        self,
        gradient: Tensor,
        x: Tensor,
        out: Tensor | None,
        state: ChainState,
        params: Tensors,
        fixed: Tensors,
        shared: Tensors,
        sums: Tensors,
        seed: Tensor | None,
    ) -> Tensor | None:
        own, plan = self.call.repeated, self.call.plan
        access = StackedAccess(
            dict(zip(own.params, params, strict=True)),
            dict(zip(own.fixed, fixed, strict=True)),
            dict(zip(own.shared, shared, strict=True)),
            sums=dict(zip(self.call.programs.with_gradient, sums, strict=True)),
        )
        table = state.table
        table.values |= {activation(0): x, grad(plan.num_blocks): gradient}
        if out is not None:
            table.values[activation(plan.num_blocks)] = out
        self._executor(access, seed).run(plan.operations[plan.turn + 1 :], table, is_first=False)
        return table.values.pop(grad(0), None)


def function_of(call: RepeatedCall, kind: CallKind) -> Callable[..., Any]:
    """What runs a call."""
    kinds: dict[CallKind, type[Any]] = {"inference": Inference, "forward": ForwardHalf, "backward": BackwardHalf}
    found: Callable[..., Any] = kinds[kind](call)
    return found


def seed_of_site(seed: int, site: int) -> int:
    """A seed of a repetition's own, so that the masks in its blocks have nothing to do with others of the model."""
    words = [torch.tensor(word, dtype=torch.int64, device="cpu") for word in (site, 0, 0, 0x5F7)]
    low, high, _, _ = philox4x32((words[0], words[1], words[2], words[3]), key_of(seed))
    return int(high) << 32 | int(low)
