"""How long a step takes: every distinct program is run for a moment on the device, and the schedule says how often each runs.

The walk is the one that executes and projects (``sft.walk``), on a machine whose buffers are byte counts. Only where that machine would run
a program it runs it once for real, on numbers of its own, and remembers the seconds. Strips of one signature share their program, so a step
of thousands of strips is timed by running some dozen programs.

New buffers (cuts, their gradients) are timed likewise. What is left out is small: what autograd and the caller do with the results, and
reading inputs that are not resident, which happens while programs run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from sft.analysis.interval import Interval
from sft.execute.machine import TorchMachine
from sft.lower.program import Port, Program, Slot, load_rows
from sft.plan.problem import Problem
from sft.plan.project import run_step
from sft.walk.machine import Handle, Phantom, PhantomMachine, Saved
from sft.walk.region import Region

__all__ = ["Stopwatch", "time_step"]

_NUM_RUNS = 3
#: A program that takes so long is run no more than twice: once to warm up (kernels are chosen, memory is mapped), once to be timed.
_LONG_SECONDS = 0.25


@dataclass(slots=True)
class _TimedSaved(Saved):
    """What a first half leaves: its byte count, and the tensors that the second half is timed on."""

    tensors: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Stopwatch(PhantomMachine):
    """A machine of byte counts that adds up the seconds of what it is asked to run.

    Attributes:
        device: where programs are timed.
        seconds: of all programs so far.
        num_timed: distinct programs among them.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seconds: float = 0.0
    num_timed: int = 0
    _known: dict[int, tuple[Program, float]] = field(default_factory=dict)
    _calls: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, *, zero: bool, contiguous: bool = False) -> Phantom:
        # Whoever writes a new buffer first waits for its pages; to the programs we bind buffers that are old.
        self.seconds += self._once(("zeros", shape, dtype), lambda: self._real.allocate(shape, dtype, zero=True, contiguous=contiguous))
        if not zero:
            self.seconds -= self._once(("fill", shape, dtype), self._real.allocate(shape, dtype, zero=True, contiguous=contiguous).zero_)
        return PhantomMachine.allocate(self, shape, dtype, zero=zero, contiguous=contiguous)

    def _once(self, key: tuple[Any, ...], call: Callable[[], object]) -> float:
        """Seconds of a call, timed when its key is new."""
        if key not in self._calls:
            call()
            self._wait()
            started = time.perf_counter()
            call()
            self._wait()
            self._calls[key] = time.perf_counter() - started
        return self._calls[key]

    @property
    def _real(self) -> TorchMachine:
        return TorchMachine(self.device)

    def run(self, program: Program, bindings: Any, saved: Saved | None = None) -> tuple[dict[Port, Handle], Saved]:
        tensors = dict(saved.tensors) if isinstance(saved, _TimedSaved) else {}
        if isinstance(saved, _TimedSaved):
            saved.tensors.clear()
        results, left = PhantomMachine.run(self, program, bindings, saved)
        timed = _TimedSaved(left.values, left.loaded)
        if id(program) not in self._known or program.saved:
            seconds, timed.tensors = self._time(program, tensors)
            if id(program) not in self._known:
                self.num_timed += 1
            self._known[id(program)] = (program, seconds)  # held, so that no other program gets its identity
        self.seconds += self._known[id(program)][1]
        return results, timed

    def _time(self, program: Program, saved: dict[int, Any]) -> tuple[float, dict[int, Any]]:
        """Seconds of a program, and what it leaves for its second half."""
        machine = self._real
        bindings = {port: self._made(program, port, slot) for port, slot in program.ports.items()}

        def once() -> tuple[float, dict[int, Any]]:
            held = Saved(dict(saved)) if saved else None
            self._wait()
            started = time.perf_counter()
            _, left = machine.run(program, bindings, held)
            self._wait()
            return time.perf_counter() - started, left.values

        with torch.no_grad():
            once()
            first, left = once()
            del left  # what a program saves is large
            seconds = [first, *(once()[0] for _ in range(_NUM_RUNS - 1) if first < _LONG_SECONDS)]
            return median(seconds), once()[1] if program.saved else {}

    def _made(self, program: Program, port: Port, slot: Slot) -> Any:
        """Something to bind: numbers between 0 and 1, of whole numbers zeros."""
        if port.role == "origin":
            return (0, 0, 0)
        tensor = self._real.allocate(slot.shape, slot.dtype, zero=True)
        if slot.dtype.is_floating_point:
            tensor.uniform_(generator=torch.Generator(self.device).manual_seed(0))  # the caller's random state stays as it is
        dim = _carried_dim(program, slot)
        return tensor if dim is None else [(0, Interval(0, slot.shape[dim]), tensor)]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _carried_dim(program: Program, slot: Slot) -> int | None:
    """The dimension along which rows come in pieces; ``None`` where a port is one tensor."""
    loads: Callable[..., Any] = load_rows
    for instruction in program.instructions:
        if instruction.function is loads and instruction.arguments[2] == slot:
            return int(instruction.arguments[1])
    return None


def time_step(problem: Problem, region: Region, device: torch.device) -> float:
    """Seconds that a step takes on this device, as far as its programs tell.

    Takes about as long as each distinct program three times, and the memory of the plan.
    """
    stopwatch = Stopwatch(on_host=problem.on_host, device=device)
    run_step(problem, region, stopwatch)
    # The walk itself takes time, too: looking up programs and binding what they run on. Byte counts make it do nothing else.
    started = time.perf_counter()
    run_step(problem, region, PhantomMachine(on_host=problem.on_host))
    return stopwatch.seconds + time.perf_counter() - started
