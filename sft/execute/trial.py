"""Programs run by themselves on numbers of their own, to be timed or measured before there is a step.

What a program reads is made up. Where the model's weights are given they are read instead of copies of them, so that a trial takes no more
of the device than the program takes in its step. A second half (of a segment on whole tensors) runs on what its first half leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sft.analysis.interval import Interval
from sft.execute.machine import TorchMachine
from sft.execute.signature import program_hash
from sft.lower.program import Port, Program, Slot, carried_dim
from sft.walk.machine import Residuals

__all__ = ["SimulatedResiduals", "ProgramBenchmark", "producer_program", "timing_key", "run_on_autograd_thread", "synchronize_device"]


@dataclass(slots=True)
class SimulatedResiduals(Residuals):
    """What a first half leaves on a machine of byte counts: its bytes, and the program, as trials of the second half begin with it."""

    first: Program | None = None


def producer_program(saved: Residuals | None) -> Program | None:
    """The program that left this."""
    return saved.first if isinstance(saved, SimulatedResiduals) else None


def timing_key(program: Program, first: Program | None) -> tuple[str, bool]:
    """A name for what is found out about a program, and whether it means the same in another process."""
    names = [program_hash(one) for one in (program, first) if one is not None]
    return (f"program {id(program)}", False) if None in names else (" ".join(map(str, names)), True)


def synchronize_device(device: torch.device) -> None:
    """Wait until a device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _WorkInBackward(torch.autograd.Function):
    """Does some work in its backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, work: Callable[[], None]) -> torch.Tensor:
        ctx.work = work
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.work()
        return grad, None


def run_on_autograd_thread(device: torch.device, work: Callable[[], None]) -> None:
    """Do some work where backward passes of a device run: what libraries remember for a thread is then there when a step comes."""
    with torch.enable_grad():
        _WorkInBackward.apply(torch.zeros((), device=device, requires_grad=True), work).backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated


@dataclass(slots=True)
class ProgramBenchmark:
    """One program and what it runs on.

    Attributes:
        program: the program.
        first: its first half, where it has one.
        device: where it runs.
        weights: of the model, by the operators' names for them.
    """

    program: Program
    first: Program | None
    device: torch.device
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _bindings: dict[Port, Any] = field(init=False)
    _saved: dict[int, Any] = field(init=False)

    def __post_init__(self) -> None:
        with torch.no_grad():
            self._saved = {} if self.first is None else self._machine.run(self.first, self._bound(self.first))[1].values
            self._bindings = self._bound(self.program)

    @property
    def _machine(self) -> TorchMachine:
        return TorchMachine(self.device)

    def run(self, *, is_last: bool = False) -> None:
        """Run it, and wait for the device. The last time what the first half left goes while it is read, as it does in a step."""
        held = None if not self._saved else Residuals(self._saved) if is_last else Residuals(self._saved).fork()
        with torch.no_grad():
            self._machine.run(self.program, self._bindings, held)
        synchronize_device(self.device)

    def _bound(self, program: Program) -> dict[Port, Any]:
        return {port: self._made(program, port, slot) for port, slot in program.ports.items()}

    def _made(self, program: Program, port: Port, slot: Slot) -> Any:
        """Something to bind: a weight that is there, or numbers between 0 and 1, of whole numbers zeros."""
        if port.role == "origin":
            return (0, 0, 0)
        weight = self.weights.get(port.name) if port.role == "side" else None
        if weight is not None and weight.shape == slot.shape and weight.dtype == slot.dtype and weight.device == self.device:
            return weight.detach()
        # Weights and their gradients are laid out as the model has them, images as we have them.
        tensor = self._machine.allocate(slot.shape, slot.dtype, zero=True, contiguous=port.role in ("side", "grad_side"))
        if slot.dtype.is_floating_point:
            tensor.uniform_(generator=torch.Generator(self.device).manual_seed(0))  # the caller's random state stays as it is
        dim = carried_dim(program, slot) if port.role == "carry" else None
        return tensor if dim is None else [(0, Interval(0, slot.shape[dim]), tensor)]
