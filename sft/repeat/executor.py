"""The executor of a chain of equal blocks: one operation of the schedule after the other, and nothing else.

What exists is what the schedule says: activations, what blocks saved, and gradients are in one table by the schedule's own names, and a
*free* takes them out. The tensors of a free are gone with it, since nobody else holds them: the executor hands views to no one, and
autograd sees only what comes in and goes out.

Weights that are on the device as stacked tensors, one for each parameter of the block, with the block's number as first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sft.common.errors import InternalError
from sft.lower.program import Port, Program
from sft.repeat.lowering import DRAW, GRAD_INPUT, GRAD_OUTPUT, INPUT, OUTPUT, BlockPrograms
from sft.runtime.machine import Residuals
from sft.solvers.schedule import Operation, activation_name, grad_name, saved_name
from sft.torch_runtime.machine import TorchMachine

__all__ = ["Environment", "Executor", "StackedWeightAccess", "WeightAccess"]


class WeightAccess(Protocol):
    """Where blocks' parameters and buffers come from, and their gradients and next values go to."""

    def take(self, block: int) -> Mapping[str, Tensor]:
        """The parameters and buffers of a block (from 0), on the device, until :meth:`give`."""
        ...

    def give(self, block: int) -> None:
        """They are not used any more."""
        ...

    def update(self, block: int, values: Mapping[str, Tensor]) -> None:
        """The next values of a block's buffers."""
        ...

    def gradients(self, block: int, grads: dict[str, Tensor]) -> None:
        """The gradients of a block's parameters, between :meth:`take` and :meth:`give`; they are the callee's to change."""
        ...


@dataclass(slots=True)
class Environment:
    """What is there: tensors by the schedule's names, and what blocks saved."""

    values: dict[str, Tensor] = field(default_factory=dict)
    saved: dict[str, Residuals] = field(default_factory=dict)

    def copy(self) -> Environment:
        """The same tensors in a table of their own, for a backward pass that is to leave this one as it is."""
        return Environment(dict(self.values), {name: Residuals(dict(kept.values)) for name, kept in self.saved.items()})


@dataclass(slots=True, kw_only=True)
class Executor:
    """Runs operations.

    Attributes:
        programs: of every block.
        machine: runs them.
        access: has the weights.
        seed: of random masks.
        wants_input_grad: whether the first block's input wants a gradient.
        trace: called with each operation that was run, for tests.
    """

    programs: BlockPrograms
    machine: TorchMachine
    access: WeightAccess
    seed: int = 0
    wants_input_grad: bool = True
    trace: Callable[[str], None] | None = None

    def run(self, operations: Sequence[Operation], table: Environment, *, is_first: bool) -> None:
        """Run operations; ``is_first`` says that each forward is the block's first one."""
        for operation in operations:
            match operation.kind:
                case "forward":
                    self._forward(operation, table, is_first)
                case "backward":
                    self._backward(operation, table)
                case "free":
                    name = operation.value
                    if name[0] == "s":
                        table.saved.pop(name, None)
                    else:
                        table.values.pop(name, None)  # the gradient of an input that wants none was never there
                case _:
                    raise InternalError(f"a chain of repeated blocks has no operation {operation}")
            if self.trace is not None:
                self.trace(str(operation))

    def infer(self, x: Tensor, num_blocks: int) -> Tensor:
        """All blocks one after the other, with nothing kept."""
        for block in range(num_blocks):
            results, _ = self._run(self.programs.first, block, {INPUT: x}, None)
            x = results[OUTPUT]
        return x

    def _forward(self, operation: Operation, table: Environment, is_first: bool) -> None:
        stage, programs = operation.first, self.programs
        if operation.save:
            program = programs.first_save if is_first else programs.again_save
        else:
            program = programs.first if is_first else programs.again
        results, kept = self._run(program, stage - 1, {INPUT: table.values[activation_name(stage - 1)]}, None)
        table.values[activation_name(stage)] = results[OUTPUT]
        if operation.save:
            table.saved[saved_name(stage)] = kept

    def _backward(self, operation: Operation, table: Environment) -> None:
        stage = operation.first
        program = self.programs.backward if stage > 1 or self.wants_input_grad else self.programs.backward_last
        bindings = {INPUT: table.values[activation_name(stage - 1)], GRAD_OUTPUT: table.values[grad_name(stage)]}
        results, _ = self._run(program, stage - 1, bindings, table.saved.get(saved_name(stage), Residuals({})))
        if GRAD_INPUT in results:
            table.values[grad_name(stage - 1)] = results[GRAD_INPUT]

    def _run(self, program: Program, block: int, given: dict[Port, Tensor], kept: Residuals | None) -> tuple[dict[Port, Tensor], Residuals]:
        """Run a program of a block with its weights."""
        bindings: dict[Port, object] = {**given, **self.programs.constants, DRAW: (self.seed, block)}
        weights = self.access.take(block)
        try:
            for port in program.ports:
                if port.role == "side":
                    bindings[port] = weights[port.name]
            results, left = self.machine.run(program, bindings, kept)
            updates = {port.name: results.pop(port) for port in [*results] if port.role == "update"}
            if updates:
                self.access.update(block, updates)
            if GRAD_OUTPUT in given:
                self.access.gradients(block, {port.name: results.pop(port) for port in [*results] if port.role == "grad_side"})
        finally:
            self.access.give(block)
        return results, left


class StackedWeightAccess:
    """Parameters, buffers and gradients stacked on the device.

    Nothing of the caller's is written before :meth:`commit`: the buffers' next values and the gradients are in tensors of their own.

    Args:
        params: each parameter of the block, ``[n, ...]``.
        buffers: each buffer, likewise.
        shared: buffers that all blocks share.
        updated: the buffers that change.
        with_gradient: the parameters that get a gradient; none in a forward pass.
        sums: what gradients are added to, by parameter, where they are not to be new tensors. Default: `None`
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        shared: Mapping[str, Tensor],
        *,
        updated: tuple[str, ...] = (),
        with_gradient: tuple[str, ...] = (),
        sums: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._stacked = {**params, **buffers}
        self._shared = dict(shared)
        self._buffers = buffers
        self.next_values = {name: torch.empty_like(buffers[name]) for name in updated}
        self.sums = sums
        self.grads = {name: torch.empty_like(params[name], memory_format=torch.contiguous_format) for name in with_gradient}

    def take(self, block: int) -> dict[str, Tensor]:
        """Views of one block."""
        return {**{name: stack[block] for name, stack in self._stacked.items()}, **self._shared}

    def give(self, block: int) -> None:
        """Nothing to do."""

    def update(self, block: int, values: Mapping[str, Tensor]) -> None:
        """Set the next values aside."""
        for name, value in values.items():
            self.next_values[name][block].copy_(value)

    def gradients(self, block: int, grads: dict[str, Tensor]) -> None:
        """Put the gradients where they belong: each block's backward runs once."""
        for name, value in grads.items():
            if self.sums is None:
                self.grads[name][block].copy_(value)
            else:
                self.sums[name][block].add_(value)

    def collect(self) -> dict[str, Tensor]:
        """The gradients, which are the caller's from then on."""
        grads, self.grads = self.grads, {}
        return grads

    def commit(self) -> None:
        """Give the buffers their next values."""
        for name, value in self.next_values.items():
            self._buffers[name].copy_(value)
