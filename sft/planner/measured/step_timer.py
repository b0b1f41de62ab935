"""Step timer: seconds of a step, from timing each distinct program on the device and counting its runs in the schedule.

The region's own code runs on a machine with byte counts for buffers. When that machine would run a program without a cached time, the
program runs for real, on numbers of its own, and its seconds are cached (``sft.torch_runtime.profiling``). Strips of equal signature share
their program, and equal blocks of a network share times. So a step of thousands of strips is timed by running some dozen programs, and only
the first time.

On a CPU programs are timed in memory that has been written before, but in a step the first strip of a cut, of its gradient, of a state is
written to fresh pages. Allocators return memory that a step has freed, so each step pays again for the growth of its live bytes, and for
each buffer that is too large to be recycled. The price of a page is measured, too; on a GPU, which keeps its memory, it is zero. Small
times are neglected: autograd and caller using the results, and host work that overlaps with programs: reading inputs that are not resident,
and loading streamed weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, overload

import torch

from sft.common.terminal.progress_display import steps
from sft.lower.program import Port, Program
from sft.planner.cost.device_rates import LARGE_BUFFER_BYTES
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

#: Timed runs of a short program; their median counts.
_NUM_RUNS = 3
#: A program of at least these seconds runs only twice: once to warm up (kernels are selected, memory is mapped), once to be timed.
_LONG_SECONDS = 0.25
#: Size of the buffer on which the price of pages is measured.
_PAGES_BYTES = 64 * 2**20


def _no_advance() -> None:
    pass


@dataclass(slots=True)
class TimingMachine(SimulatedMachine):
    """Simulated machine that adds up the seconds of its programs.

    Attributes:
        device: device on which programs are timed.
        costs: cached times.
        advance: callback at each program that this step has not run yet.
        seconds: seconds of all programs so far.
        max_seconds: limit at which the step is aborted.
        num_timed: programs that were run to be timed.
        start_seconds: seconds at the begin of each schedule op, and at the end.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    costs: TimingCache = field(default_factory=TimingCache)
    advance: Callable[[], None] = _no_advance
    seconds: float = 0.0
    max_seconds: float = math.inf
    num_timed: int = 0
    start_seconds: list[float] = field(default_factory=list)
    _touched_bytes: int = 0
    _fresh_byte_seconds: float | None = None
    _keys: dict[int, tuple[Program, str, bool]] = field(default_factory=dict)

    def start_op(self, move: ScheduleOp) -> None:
        self.start_seconds.append(self.seconds)

    def end(self) -> None:
        self.start_seconds.append(self.seconds)
        if self.seconds >= self.max_seconds:
            raise _TimeLimitError

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, *, zero: bool, contiguous: bool = False) -> SimulatedBuffer:
        buffer = SimulatedMachine.allocate(self, shape, dtype, zero=zero, contiguous=contiguous)
        if zero:
            allocate_real = partial(self._real.allocate, shape, dtype, zero=True, contiguous=contiguous)
            self.seconds += self._cached_seconds(f"fill {shape} {dtype} {contiguous}", lambda: allocate_real().zero_)
        self._touch([buffer.num_bytes])
        return buffer

    def _touch(self, sizes: Iterable[int], *, recycled_only: bool = False) -> None:
        """Add the seconds of fresh pages: for small buffers as far as the live bytes have grown, for large ones always.

        Args:
            sizes: bytes of the buffers.
            recycled_only: true if large buffers are included in the time of a program.
        """
        grown = max(0, self.memory.live_bytes - self._touched_bytes)
        self._touched_bytes += grown
        sizes = list(sizes)
        fresh = min(grown, sum(size for size in sizes if size < LARGE_BUFFER_BYTES))
        fresh += 0 if recycled_only else sum(size for size in sizes if size >= LARGE_BUFFER_BYTES)
        if fresh and self._fresh_byte_seconds is None:
            self._fresh_byte_seconds = self._time_fresh_byte()
        self.seconds += fresh * (self._fresh_byte_seconds or 0.0)

    def _time_fresh_byte(self) -> float:
        """Seconds per byte for pages that are written for the first time."""
        make = partial(self._real.allocate, (_PAGES_BYTES,), torch.uint8, zero=True)
        fresh = self._cached_seconds("zeros of new pages", lambda: make)
        recycled = self._cached_seconds("zeros of old pages", lambda: make().zero_)
        return max(0.0, fresh - recycled) / _PAGES_BYTES

    def _cached_seconds(self, key: str, prepare: Callable[[], Callable[[], object]]) -> float:
        """Seconds of the call that ``prepare`` returns, timed if its key is new."""
        seconds = self.costs.get(key)
        if seconds is None:
            call = prepare()
            call()
            synchronize_device(self.device)
            started = time.perf_counter()
            call()
            synchronize_device(self.device)
            seconds = time.perf_counter() - started
            self.costs.add(key, seconds)
        return seconds

    def offload(self, target: str, handles: Sequence[Buffer]) -> OffloadedValue:
        copy = SimulatedMachine.offload(self, target, handles)
        self.seconds += self._copy_seconds(copy.num_bytes, to_host=True)
        return copy

    def prefetch(self, copy: OffloadedValue) -> None:
        SimulatedMachine.prefetch(self, copy)
        self.seconds += self._copy_seconds(copy.num_bytes, to_host=False)

    def _copy_seconds(self, num_bytes: int, *, to_host: bool) -> float:
        """Seconds of a copy between the device and page-locked memory."""

        def prepare() -> Callable[[], object]:
            on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
            on_host = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda")
            return partial(on_host.copy_, on_device) if to_host else partial(on_device.copy_, on_host)

        return self._cached_seconds(f"copy {num_bytes} {'down' if to_host else 'up'}", prepare)

    @property
    def _real(self) -> TorchMachine:
        return TorchMachine(self.device)

    def run(self, program: Program, bindings: Any, saved: Residuals | None = None) -> tuple[dict[Port, Buffer], Residuals]:
        first = producer_program(saved)
        results, left = SimulatedMachine.run(self, program, bindings, saved)
        self.seconds += self._program_seconds(program, first)
        # Large results were fresh in every timed run, too.
        self._touch((buffer.num_bytes for buffer in results.values() if isinstance(buffer, SimulatedBuffer)), recycled_only=True)
        if self.seconds >= self.max_seconds:
            raise _TimeLimitError
        return results, SimulatedResiduals(left.values, left.inputs, first=program if program.residuals else None)

    def _program_seconds(self, program: Program, first: Program | None) -> float:
        """Seconds of a program; a second half is timed on the residuals of its first half."""
        if id(program) not in self._keys:
            self._keys[id(program)] = (program, *timing_key(program, first))  # the reference keeps the id unique
            self.advance()
        _, key, lasting = self._keys[id(program)]
        seconds = self.costs.get(key)
        if seconds is None:
            seconds = self._time_program(program, first)
            self.num_timed += 1
            self.costs.add(key, seconds, lasting=lasting)
        return seconds

    def _time_program(self, program: Program, first: Program | None) -> float:
        """Run a program and time it."""
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
    """A step exceeds its time limit."""


@overload
def time_step(problem: PlanningProblem, region: Region, device: torch.device, *, progress: bool = False) -> tuple[float, ...]:
    """Seconds without a limit."""


@overload
def time_step(
    problem: PlanningProblem, region: Region, device: torch.device, *, max_seconds: float, progress: bool = False
) -> tuple[float, ...] | None:
    """Seconds with a limit."""


def time_step(
    problem: PlanningProblem, region: Region, device: torch.device, *, max_seconds: float = math.inf, progress: bool = False
) -> tuple[float, ...] | None:
    """Seconds of each schedule op of a step on this device; `None` if the step takes ``max_seconds`` or more.

    Takes about three runs of each distinct program without a cached time, and the memory of the plan.

    Args:
        problem: the planning problem.
        region: the plan's region.
        device: device on which programs are timed.
        max_seconds: limit at which timing stops.
        progress: true to show a bar on the terminal.
    """
    # Scheduling itself takes time, too: looking up programs and binding their arguments. On byte counts a step consists only of that.
    scheduling = _TimestampMachine(on_host=problem.resources.on_host)
    run_step(problem, region, scheduling)
    with steps("timing programs", len(scheduling.programs)) if progress else nullcontext(_no_advance) as advance:
        timing = TimingMachine(on_host=problem.resources.on_host, device=device, costs=open_timing_cache(device), advance=advance)
        timing.max_seconds = max_seconds - sum(_durations(scheduling.timestamps))
        try:
            run_step(problem, region, timing)
        except _TimeLimitError:
            return None
    # The time of a fresh buffer is a difference of two measurements, which may be negative.
    return tuple(max(0.0, sum(both)) for both in zip(_durations(timing.start_seconds), _durations(scheduling.timestamps), strict=True))


def _durations(timestamps: Sequence[float]) -> tuple[float, ...]:
    return tuple(stop - start for start, stop in pairwise(timestamps))


@dataclass(slots=True)
class _TimestampMachine(SimulatedMachine):
    """Simulated machine that records the clock between schedule ops, and the programs that it runs."""

    timestamps: list[float] = field(default_factory=list)
    programs: dict[int, Program] = field(default_factory=dict)

    def start_op(self, move: ScheduleOp) -> None:
        self.timestamps.append(time.perf_counter())

    def end(self) -> None:
        self.timestamps.append(time.perf_counter())

    def run(self, program: Program, bindings: Any, saved: Residuals | None = None) -> tuple[dict[Port, Buffer], Residuals]:
        self.programs[id(program)] = program
        return SimulatedMachine.run(self, program, bindings, saved)
