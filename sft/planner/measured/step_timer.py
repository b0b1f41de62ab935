"""How long a step takes: every distinct program is run for a moment on the device, and the schedule says how often each runs.

The walk is the one that executes and projects (``sft.walk``), on a machine whose buffers are byte counts. Only where that machine would run
a program that nobody has timed it runs it for real, on numbers of its own, and remembers the seconds (``sft.torch_runtime.profiling``).
Strips of one signature share their program, and equal blocks of a network share the times, so a step of thousands of strips is timed by
running some dozen programs, and only the first time.

On a CPU programs are timed in memory that has been written before, but in a step the first strip of a cut, of its gradient, of a state is
written to pages that the system hands out one by one. Allocators give back what a step has freed, so each step pays anew for the growth of
what is alive, and for each buffer that is too large to be recycled. A page's price is measured, too; on a GPU, whose memory is kept, it is
nothing. What is left out is small: what autograd and the caller do with the results, and what happens while programs run: reading inputs
that are not resident, and bringing weights that are streamed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, overload

import torch
from rich.console import Console
from rich.progress import Progress

from sft.lower.program import Port, Program
from sft.planner.cost.roofline import LARGE_BUFFER_BYTES
from sft.planner.problem import PlanningProblem
from sft.planner.projection import run_step
from sft.runtime.machine import Buffer, Residuals
from sft.runtime.moves import ScheduleOp
from sft.runtime.offload import OffloadedValue
from sft.runtime.region import Region
from sft.runtime.simulated_machine import SimulatedBuffer, SimulatedMachine
from sft.torch_runtime.machine import TorchMachine
from sft.torch_runtime.profiling import (
    ProgramBenchmark,
    SimulatedResiduals,
    TimingCache,
    open_timing_cache,
    producer_program,
    synchronize_device,
    timing_key,
)

__all__ = ["TimingMachine", "time_step"]

_NUM_RUNS = 3
#: A program that takes so long is run no more than twice: once to warm up (kernels are chosen, memory is mapped), once to be timed.
_LONG_SECONDS = 0.25
#: What pages cost is measured on so many bytes.
_PAGES_BYTES = 64 * 2**20


def _no_advance() -> None:
    pass


@dataclass(slots=True)
class TimingMachine(SimulatedMachine):
    """A machine of byte counts that adds up the seconds of what it is asked to run.

    Attributes:
        device: where programs are timed.
        costs: the times that are known.
        advance: is called at each program that this step has not run yet.
        seconds: of all programs so far.
        max_seconds: so long it runs at most.
        num_timed: programs that were run to be timed.
        laps: the seconds at the begin of each move, and at the end.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    costs: TimingCache = field(default_factory=TimingCache)
    advance: Callable[[], None] = _no_advance
    seconds: float = 0.0
    max_seconds: float = math.inf
    num_timed: int = 0
    laps: list[float] = field(default_factory=list)
    _touched_bytes: int = 0
    _fresh_byte_seconds: float | None = None
    _keys: dict[int, tuple[Program, str, bool]] = field(default_factory=dict)

    def start_op(self, move: ScheduleOp) -> None:
        self.laps.append(self.seconds)

    def end(self) -> None:
        self.laps.append(self.seconds)
        if self.seconds >= self.max_seconds:
            raise _TimeLimitError

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, *, zero: bool, contiguous: bool = False) -> SimulatedBuffer:
        handle = SimulatedMachine.allocate(self, shape, dtype, zero=zero, contiguous=contiguous)
        if zero:
            buffer = partial(self._real.allocate, shape, dtype, zero=True, contiguous=contiguous)
            self.seconds += self._once(f"fill {shape} {dtype} {contiguous}", lambda: buffer().zero_)
        self._touch([handle.num_bytes])
        return handle

    def _touch(self, sizes: Iterable[int], *, recycled_only: bool = False) -> None:
        """Add what the pages of new buffers cost: of small ones those by which what is alive has grown.

        Args:
            sizes: of the buffers, in bytes.
            recycled_only: whether large ones are paid for already.
        """
        grown = max(0, self.memory.live_bytes - self._touched_bytes)
        self._touched_bytes += grown
        sizes = list(sizes)
        fresh = min(grown, sum(size for size in sizes if size < LARGE_BUFFER_BYTES))
        fresh += 0 if recycled_only else sum(size for size in sizes if size >= LARGE_BUFFER_BYTES)
        if fresh and self._fresh_byte_seconds is None:
            self._fresh_byte_seconds = self._new_pages()
        self.seconds += fresh * (self._fresh_byte_seconds or 0.0)

    def _new_pages(self) -> float:
        """Seconds of a byte's share of a page that is written for the first time."""
        make = partial(self._real.allocate, (_PAGES_BYTES,), torch.uint8, zero=True)
        anew, again = self._once("zeros of new pages", lambda: make), self._once("zeros of old pages", lambda: make().zero_)
        return max(0.0, anew - again) / _PAGES_BYTES

    def _once(self, key: str, prepare: Callable[[], Callable[[], object]]) -> float:
        """Seconds of the call that ``prepare`` returns, timed when its key is new."""
        known = self.costs.get(key)
        if known is None:
            call = prepare()
            call()
            synchronize_device(self.device)
            started = time.perf_counter()
            call()
            synchronize_device(self.device)
            known = time.perf_counter() - started
            self.costs.add(key, known)
        return known

    def offload(self, target: str, handles: Sequence[Buffer]) -> OffloadedValue:
        copy = SimulatedMachine.offload(self, target, handles)
        self.seconds += self._copying(copy.num_bytes, to_host=True)
        return copy

    def prefetch(self, copy: OffloadedValue) -> None:
        SimulatedMachine.prefetch(self, copy)
        self.seconds += self._copying(copy.num_bytes, to_host=False)

    def _copying(self, num_bytes: int, *, to_host: bool) -> float:
        """Seconds of a copy between the device and page-locked memory."""

        def prepare() -> Callable[[], object]:
            there = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
            here = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda")
            return partial(here.copy_, there) if to_host else partial(there.copy_, here)

        return self._once(f"copy {num_bytes} {'down' if to_host else 'up'}", prepare)

    @property
    def _real(self) -> TorchMachine:
        return TorchMachine(self.device)

    def run(self, program: Program, bindings: Any, saved: Residuals | None = None) -> tuple[dict[Port, Buffer], Residuals]:
        first = producer_program(saved)
        results, left = SimulatedMachine.run(self, program, bindings, saved)
        self.seconds += self._seconds(program, first)
        # What is large was new whenever the program was timed.
        self._touch((handle.num_bytes for handle in results.values() if isinstance(handle, SimulatedBuffer)), recycled_only=True)
        if self.seconds >= self.max_seconds:
            raise _TimeLimitError
        return results, SimulatedResiduals(left.values, left.inputs, first=program if program.saved else None)

    def _seconds(self, program: Program, first: Program | None) -> float:
        """Seconds of a program; a second half is timed on what its first half leaves."""
        if id(program) not in self._keys:
            self._keys[id(program)] = (program, *timing_key(program, first))  # held, so that no other program gets its identity
            self.advance()
        _, key, lasting = self._keys[id(program)]
        known = self.costs.get(key)
        if known is None:
            known = self._time(program, first)
            self.num_timed += 1
            self.costs.add(key, known, lasting=lasting)
        return known

    def _time(self, program: Program, first: Program | None) -> float:
        """Seconds of a program."""
        trial = ProgramBenchmark(program, first, self.device)

        def once(*, is_last: bool = False) -> float:
            synchronize_device(self.device)
            started = time.perf_counter()
            trial.run(is_last=is_last)
            return time.perf_counter() - started

        if once() >= _LONG_SECONDS:
            return once(is_last=True)
        return median([once(is_last=run == _NUM_RUNS - 1) for run in range(_NUM_RUNS)])


class _TimeLimitError(Exception):
    """A step takes longer than anybody wants to know."""


@overload
def time_step(problem: PlanningProblem, region: Region, device: torch.device, *, progress: bool = False) -> tuple[float, ...]: ...
@overload
def time_step(
    problem: PlanningProblem, region: Region, device: torch.device, *, max_seconds: float, progress: bool = False
) -> tuple[float, ...] | None: ...
def time_step(
    problem: PlanningProblem, region: Region, device: torch.device, *, max_seconds: float = math.inf, progress: bool = False
) -> tuple[float, ...] | None:
    """Seconds of each move of a step on this device, as far as its programs tell; `None` where they are ``max_seconds`` or more.

    Takes about as long as each distinct program three times, where nobody has timed it before, and the memory of the plan.

    Args:
        problem: the model at one size.
        region: the plan's.
        device: where programs are timed.
        max_seconds: a step that takes as long is not timed to its end.
        progress: whether to show a bar on the terminal meanwhile.
    """
    # The walk itself takes time, too: looking up programs and binding what they run on. Byte counts make it do nothing else.
    walk = _TimestampMachine(on_host=problem.on_host)
    run_step(problem, region, walk)
    with _progress_bar(len(walk.programs), progress) as advance:
        stopwatch = TimingMachine(on_host=problem.on_host, device=device, costs=open_timing_cache(device), advance=advance)
        stopwatch.max_seconds = max_seconds - sum(_durations(walk.moments))
        try:
            run_step(problem, region, stopwatch)
        except _TimeLimitError:
            return None
    # The time of a new buffer is a difference of two measured ones, which may fall below nothing.
    return tuple(max(0.0, sum(both)) for both in zip(_durations(stopwatch.laps), _durations(walk.moments), strict=True))


def _durations(moments: Sequence[float]) -> tuple[float, ...]:
    return tuple(stop - start for start, stop in pairwise(moments))


@dataclass(slots=True)
class _TimestampMachine(SimulatedMachine):
    """A machine of byte counts that looks at the clock between moves, and remembers the programs that it ran."""

    moments: list[float] = field(default_factory=list)
    programs: dict[int, Program] = field(default_factory=dict)

    def start_op(self, move: ScheduleOp) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        self.moments.append(time.perf_counter())

    def run(self, program: Program, bindings: Any, saved: Residuals | None = None) -> tuple[dict[Port, Buffer], Residuals]:
        self.programs[id(program)] = program
        return SimulatedMachine.run(self, program, bindings, saved)


@contextmanager
def _progress_bar(num_programs: int, is_shown: bool) -> Iterator[Callable[[], None]]:
    """A bar on the terminal, if there is one."""
    console = Console(stderr=True)
    if not is_shown or not console.is_terminal:
        yield _no_advance
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("timing programs", total=num_programs)
        yield lambda: bar.advance(task)
