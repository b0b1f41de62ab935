"""Executor of a chain of equal blocks: runs the operations of a schedule in order.

An `Environment` has all live tensors under the schedule's names: activations, saved values and gradients. A *free* removes a tensor from
it. The tensor's memory is then free, since no other reference exists: the executor passes no views on, and autograd sees only the input and
the output.

`WeightAccess` provides the weights of a block. `StackedWeightAccess` takes them from stacked tensors on the device: one for each parameter
of the block, with the block's number as first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sft.common.errors import InternalError
from sft.kernels.rng.philox import KeyWord
from sft.lower.program import Port, Program
from sft.repeat.lowering import DRAW, GRAD_INPUT, GRAD_OUTPUT, INPUT, OUTPUT, BlockPrograms
from sft.runtime.machine import Residuals
from sft.solvers.schedule import Operation, activation_name, grad_name, saved_name
from sft.torch_runtime.machine import TorchMachine

__all__ = ["Environment", "Executor", "StackedWeightAccess", "WeightAccess"]


class WeightAccess(Protocol):
    """Source of the blocks' parameters and buffers, and destination of their gradients and next values."""

    def acquire(self, block: int) -> Mapping[str, Tensor]:
        """The parameters and buffers of a block (from 0), on the device until :meth:`release`."""
        ...

    def release(self, block: int) -> None:
        """The block's tensors are no longer used."""
        ...

    def update(self, block: int, values: Mapping[str, Tensor]) -> None:
        """Store the next values of a block's buffers."""
        ...

    def gradients(self, block: int, grads: dict[str, Tensor]) -> None:
        """Store the gradients of a block's parameters, between :meth:`acquire` and :meth:`release`. The callee may overwrite them."""
        ...


@dataclass(slots=True)
class Environment:
    """Live tensors: activations and gradients by the schedule's names, and the blocks' residuals."""

    values: dict[str, Tensor] = field(default_factory=dict)
    saved: dict[str, Residuals] = field(default_factory=dict)

    def copy(self) -> Environment:
        """A shallow copy, for a backward pass that must leave this one unchanged."""
        return Environment(dict(self.values), {name: Residuals(dict(residuals.values)) for name, residuals in self.saved.items()})


@dataclass(slots=True, kw_only=True)
class Executor:
    """Runs operations of a schedule.

    Attributes:
        programs: programs of a block.
        machine: runs the programs.
        access: provides the weights.
        seed: seed of random masks.
        wants_input_grad: True if the first block's input needs a gradient.
        trace: called with each operation that has run, for tests.
    """

    programs: BlockPrograms
    machine: TorchMachine
    access: WeightAccess
    seed: KeyWord = 0
    wants_input_grad: bool = True
    trace: Callable[[str], None] | None = None

    def run(self, operations: Sequence[Operation], environment: Environment, *, is_first: bool) -> None:
        """Run operations; ``is_first`` if each forward is the first one of its block."""
        for operation in operations:
            match operation.kind:
                case "forward":
                    self._forward(operation, environment, is_first)
                case "backward":
                    self._backward(operation, environment)
                case "free":
                    name = operation.value
                    if name[0] == "s":
                        environment.saved.pop(name, None)
                    else:
                        environment.values.pop(name, None)  # the gradient of an input may not exist
                case _:
                    raise InternalError(f"a chain of repeated blocks has no operation {operation}")
            if self.trace is not None:
                self.trace(str(operation))

    def infer(self, x: Tensor, num_blocks: int) -> Tensor:
        """Run all blocks in turn with no activations kept."""
        for block in range(num_blocks):
            results, _ = self._run(self.programs.first, block, {INPUT: x}, None)
            x = results[OUTPUT]
        return x

    def _forward(self, operation: Operation, environment: Environment, is_first: bool) -> None:
        stage, programs = operation.first, self.programs
        if operation.save:
            program = programs.first_save if is_first else programs.again_save
        else:
            program = programs.first if is_first else programs.again
        results, residuals = self._run(program, stage - 1, {INPUT: environment.values[activation_name(stage - 1)]}, None)
        environment.values[activation_name(stage)] = results[OUTPUT]
        if operation.save:
            environment.saved[saved_name(stage)] = residuals

    def _backward(self, operation: Operation, environment: Environment) -> None:
        stage = operation.first
        program = self.programs.backward if stage > 1 or self.wants_input_grad else self.programs.backward_last
        bindings = {INPUT: environment.values[activation_name(stage - 1)], GRAD_OUTPUT: environment.values[grad_name(stage)]}
        results, _ = self._run(program, stage - 1, bindings, environment.saved.get(saved_name(stage), Residuals({})))
        if GRAD_INPUT in results:
            environment.values[grad_name(stage - 1)] = results[GRAD_INPUT]

    def _run(
        self, program: Program, block: int, inputs: dict[Port, Tensor], residuals: Residuals | None
    ) -> tuple[dict[Port, Tensor], Residuals]:
        """Run a program of a block with its weights."""
        bindings: dict[Port, object] = {**inputs, **self.programs.constants, DRAW: (self.seed, block)}
        weights = self.access.acquire(block)
        try:
            for port in program.ports:
                if port.role == "side":
                    bindings[port] = weights[port.name]
            results, new_residuals = self.machine.run(program, bindings, residuals)
            updates = {port.name: results.pop(port) for port in [*results] if port.role == "update"}
            if updates:
                self.access.update(block, updates)
            if GRAD_OUTPUT in inputs:
                self.access.gradients(block, {port.name: results.pop(port) for port in [*results] if port.role == "grad_side"})
        finally:
            self.access.release(block)
        return results, new_residuals


class StackedWeightAccess:
    """Parameters, buffers and gradients as stacked tensors on the device.

    The caller's tensors are written only by :meth:`commit`: next values of buffers and gradients are separate tensors.

    Args:
        params: each parameter of the block, ``[n, ...]``.
        buffers: each buffer, ``[n, ...]``.
        shared: buffers that all blocks share.
        updated: names of the buffers that change.
        with_gradient: names of the parameters that get a gradient; none in a forward pass.
        sums: tensors to add gradients to, by parameter. Default: `None`, new tensors
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

    def acquire(self, block: int) -> dict[str, Tensor]:
        """Views of one block."""
        return {**{name: stack[block] for name, stack in self._stacked.items()}, **self._shared}

    def release(self, block: int) -> None:
        """No action: the tensors stay on the device."""

    def update(self, block: int, values: Mapping[str, Tensor]) -> None:
        """Store the next values in the separate tensors."""
        for name, value in values.items():
            self.next_values[name][block].copy_(value)

    def gradients(self, block: int, grads: dict[str, Tensor]) -> None:
        """Copy or add the gradients; each block's backward runs once."""
        for name, value in grads.items():
            if self.sums is None:
                self.grads[name][block].copy_(value)
            else:
                self.sums[name][block].add_(value)

    def collect(self) -> dict[str, Tensor]:
        """The gradients; the caller owns them."""
        grads, self.grads = self.grads, {}
        return grads

    def commit(self) -> None:
        """Store the next values in the buffers."""
        for name, value in self.next_values.items():
            self._buffers[name].copy_(value)
