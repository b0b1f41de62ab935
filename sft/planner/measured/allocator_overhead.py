"""Device memory of a plan on a GPU: its tensors, the workspaces of libraries, and the segments of the allocator.

The projection counts tensors. A GPU takes more for three reasons:

- an operator may take a *workspace* while it runs, as most of cuDNN's convolutions do, of a size that the library chooses;
- cuBLAS has a workspace for each thread and stream that has multiplied matrices, and keeps it;
- PyTorch's allocator reserves memory in *segments*, and divides them into blocks (:mod:`sft.planner.measured.reserved_memory`).

No formula gives the first two. So each distinct program of a plan is run for a moment on the device, on dummy numbers. The allocator's peak
shows the bytes of each instruction in excess of its tensors. Libraries select algorithms per thread, so programs run on this thread, and on
the thread of backward passes. The result is cached in the file of measured times (`sft.torch_runtime.profiling`). A plan made without the
GPU has no workspaces.

The first run of a convolution in a process takes more: cuDNN tries algorithms, with workspaces of their own, until one runs. So the
programs of the plan that is used run once in any case, before the memory of its steps is reserved
(:meth:`OverheadEstimator.select_algorithms`).

The step with its workspaces is then replayed through a simulation of the allocator. On a CPU there is no overhead: budgets refer to the
bytes that PyTorch's dispatcher shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError
from sft.common.memory import measure_peak
from sft.common.torch_internals import cuda_allocator_backend
from sft.lower.program import Program
from sft.lower.steps import Step
from sft.planner.materialize import ProjectedPlan
from sft.planner.measured.allocation_trace import record_program, record_step
from sft.planner.measured.cublas_workspace import CublasDetector, blas_workspace_bytes, lt_workspace_bytes, uses_products
from sft.planner.measured.event_sequence import AllocationTrace
from sft.planner.measured.reserved_memory import recorded_tensors, reserved_bytes, resident_sizes, simulate_reserved_memory
from sft.planner.measured.segment_search import choose_segments
from sft.planner.measured.step_replay import RecordedTensors
from sft.planner.problem import PlanningProblem
from sft.runtime.caching_allocator import AllocatorSettings, CachingAllocator
from sft.torch_runtime.device_pool import prepare_cublas
from sft.torch_runtime.machine import TorchMachine
from sft.torch_runtime.pass_graphs import can_record_passes
from sft.torch_runtime.profiling import ProgramBenchmark, TimingCache, kernel_settings, run_on_autograd_thread, timing_key

__all__ = ["GraphScope", "OverheadEstimator", "warn_about_allocator"]

#: Unit that is recorded as a CUDA graph.
GraphScope = Literal["passes", "strips"]
#: Places of resumed predictions that are simulated: at least so many, and as many as have these events of a full step.
_LEAST_STARTS, _RESUMED_EVENTS = 4, 40_000
#: Dimension of rows in the shape of an image.
_ROWS_DIM = 2
#: Segment of the state of the random number generator, which a CUDA graph has on the stream that it is recorded on.
_GENERATOR_BYTES = 2 * 2**20
#: Largest block of a segment for small ones.
_SMALL_BYTES = 2**20
#: Keys of the programs that ran in this process: libraries have selected their algorithms.
_SELECTED: set[tuple[Hashable, ...]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workspaces:
    """Measured workspaces of a program.

    Attributes:
        num_bytes: bytes by position of the instruction.
        multiplies: true if matrices are multiplied.
    """

    num_bytes: Mapping[int, int]
    multiplies: bool


@dataclass(slots=True)
class OverheadEstimator:
    """Estimates the overhead of plans on one GPU.

    Attributes:
        device: the GPU; ``None`` if it is in another machine.
        costs: cached measurements of programs.
        weights: the model's weights, by the names of the graph.
        is_training: true if backward passes follow, which run on a thread of their own.
        cuda_graphs: what is recorded as CUDA graphs: whole passes where that is possible, strips, or nothing.
        allocator: settings of the allocator.
    """

    device: torch.device | None
    costs: TimingCache = field(default_factory=TimingCache)
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    is_training: bool = False
    cuda_graphs: GraphScope | None = None
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings.of_environment)
    _keys: dict[int, tuple[Program, str, bool]] = field(default_factory=dict)
    _known: dict[int, _Workspaces] = field(default_factory=dict)
    _multiplies: bool = False
    _has_scratch: bool = False

    def least_bytes(self, problem: PlanningProblem) -> int:
        """Bytes that every plan takes in addition to its projection."""
        return sum(recorded_tensors(problem).sizes) if self.cuda_graphs == "passes" else 0

    def with_overhead(self, problem: PlanningProblem, projected: ProjectedPlan) -> ProjectedPlan:
        """The plan with its overhead: bytes of a step and of everything resident that exceed the bytes of their tensors.

        Raises:
            BudgetError: a program does not fit into the free memory of the device.
        """
        self._multiplies = self._has_scratch = False
        trace = record_step(problem, projected.region, self._workspaces)
        resident = resident_sizes(problem)
        records_passes = self.cuda_graphs == "passes" and can_record_passes(
            projected.region, copies_to_files=problem.resources.host_is_files
        )
        # While a strip is recorded, allocations go to the graph's pool.
        has_pool = (records_passes or self.cuda_graphs is None) and self.allocator.is_native
        traces = [trace]
        if self._has_scratch:  # a function of several calls may allocate it before its result or after it
            traces.append(record_step(problem, projected.region, self._workspaces, scratch_first=True))
        segments = self._choose_segments(traces, None if records_passes else resident) if has_pool else None
        library_bytes = 0
        if self._multiplies and self.device is not None:
            num_threads, num_streams = 2 if self.is_training else 1, 1 if self.cuda_graphs is None else 2
            resident += [blas_workspace_bytes(self.device)] * (num_threads * num_streams)
            library_bytes = num_streams * self._segment_bytes([lt_workspace_bytes()] * num_threads)
        # A resumed prediction has other blocks at a time: it reserves more in rare cases, although its tensors have fewer bytes.
        traces += self._resumed_traces(problem, projected, trace.sequence.num_events)

        def most_bytes(recorded: RecordedTensors | None) -> int:
            return max(reserved_bytes(each, self.allocator, segments=segments, resident=resident, recorded=recorded) for each in traces)

        recorded = min(recorded_tensors(problem).variants(), key=most_bytes) if records_passes else None
        total_bytes = most_bytes(recorded) + library_bytes
        if self.cuda_graphs is not None and self.device is not None:
            total_bytes += _GENERATOR_BYTES
        projection = projected.projection
        overhead_bytes = max(0, total_bytes - problem.resources.resident_bytes - projection.peak_bytes)
        projection = replace(
            projection,
            overhead_bytes=overhead_bytes,
            segments=segments,
            records_passes=records_passes,
            multiplies=self._multiplies,
            input_segment_bytes=0 if recorded is None else recorded.input_segment_bytes,
        )
        return replace(projected, projection=projection)

    def _segment_bytes(self, sizes: Sequence[int]) -> int:
        """Bytes of the segments of some tensors, which share them with no other ones."""
        allocator = CachingAllocator(settings=self.allocator)
        for num_bytes in filter(None, sizes):
            allocator.allocate(num_bytes)
        return allocator.reserved_bytes

    def _choose_segments(self, traces: Sequence[AllocationTrace], resident: Sequence[int] | None) -> tuple[int, ...] | None:
        """Segments with which none of the traces reserves more than with those chosen for another one; of a recording if ``resident`` is
        ``None``, which has a pool in any case.
        """
        chosen = {choose_segments(trace, self.allocator, resident) for trace in traces}
        if len(chosen) == 1:
            return chosen.pop()

        def most_bytes(segments: tuple[int, ...] | None) -> int:
            return max(reserved_bytes(each, self.allocator, segments=segments, resident=resident or ()) for each in traces)

        return min(sorted(chosen, key=str), key=most_bytes)

    def _resumed_traces(self, problem: PlanningProblem, projected: ProjectedPlan, num_events: int) -> Iterator[AllocationTrace]:
        """Traces of the step as interrupted predictions are resumed, for rows spaced evenly over the image and for the last one."""
        sized = problem.sized
        heights = [sized.shapes[name][_ROWS_DIM] for name in problem.resources.host_outputs if len(sized.shapes[name]) > _ROWS_DIM]
        if sized.training or not heights:
            return
        num_rows = max(heights)
        num_starts = min(max(_LEAST_STARTS, _RESUMED_EVENTS // max(1, num_events)), num_rows)
        counts = {num_rows * number // num_starts for number in range(1, num_starts)} | {num_rows - 1}
        for count in sorted(counts):
            yield record_step(problem, projected.region, self._workspaces, num_known_rows=count)

    def working_bytes(self, program: Program) -> int:
        """Bytes of the blocks of a program above its bindings, including results."""
        trace = record_program(program, self._workspaces(program, None))
        return simulate_reserved_memory(trace, self.allocator).allocated_bytes

    def select_algorithms(self, problem: PlanningProblem, projected: ProjectedPlan) -> None:
        """Run each program of a plan once, unless it ran in this process: libraries then select algorithms outside of the plan's pool.

        Raises:
            BudgetError: a program does not fit into the free memory of the device.
        """
        if self.device is not None:
            record_step(problem, projected.region, self._run_once)

    def _run_once(self, program: Program, first: Program | None) -> Mapping[int, int]:
        assert self.device is not None
        if self._process_key(program, first) not in _SELECTED:
            self._measure(self.device, program, first)
            self._note_selected(program, first)
        return {}

    def _workspaces(self, program: Program, first: Program | None) -> Mapping[int, int]:
        """Workspace bytes of the instructions of a program, by position."""
        self._has_scratch = self._has_scratch or any(i.scratch_bytes > _SMALL_BYTES and i.outputs for i in program.instructions)
        if self.device is None:
            return {}
        if id(program) not in self._known:
            _, key, is_named = self._key_of(program, first)
            # With cudnn.benchmark each process searches for the fastest algorithm again, and uses the memory that is free at that moment.
            is_lasting = is_named and not torch.backends.cudnn.benchmark
            measured = _read_workspaces(self.costs, key)
            if measured is None:
                measured = self._measure(self.device, program, first)
                self._note_selected(program, first)
                _write_workspaces(self.costs, key, measured, is_lasting=is_lasting)
            self._known[id(program)] = measured
        measured = self._known[id(program)]
        self._multiplies = self._multiplies or measured.multiplies
        return measured.num_bytes

    def _note_selected(self, program: Program, first: Program | None) -> None:
        """Note that a program has run; not one without a name, as another program may get its key."""
        if self._key_of(program, first)[2]:
            _SELECTED.add(self._process_key(program, first))

    def _process_key(self, program: Program, first: Program | None) -> tuple[Hashable, ...]:
        """Key of a program in this process: libraries select again under other settings."""
        return (self.device, self._key_of(program, first)[1], *kernel_settings().items())

    def _key_of(self, program: Program, first: Program | None) -> tuple[Program, str, bool]:
        """The program, its key in the cache of measurements, and whether the key names no other program."""
        if id(program) not in self._keys:
            name, is_named = timing_key(program, first)
            threads = "two threads" if self.is_training else "one thread"
            search = "search " if torch.backends.cudnn.benchmark else ""
            self._keys[id(program)] = (program, f"{threads} {search}{name}", is_named)  # the reference keeps the id unique
        return self._keys[id(program)]

    def _measure(self, device: torch.device, program: Program, first: Program | None) -> _Workspaces:
        """Workspaces over all threads that run the program: libraries select per thread."""
        try:
            if device.type == "cuda" and any(each is not None and uses_products(each) for each in (program, first)):
                self._prepare_cublas(device)
            trial = ProgramBenchmark(program, first, device, self.weights)
            measurements = [_measure_here(trial)] if first is None else []
            if self.is_training:
                run_on_autograd_thread(device, lambda: measurements.append(_measure_here(trial)))
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"the plan fits the budget, but {device} has less free: one of its programs, with {format_bytes(program.peak_bytes)} of "
                f"tensors, ran out of memory ({error}). Free other tensors and models on the device, or lower the budget to what is free.",
                needed_bytes=program.peak_bytes,
            ) from error
        positions = sorted({position for each in measurements for position in each.num_bytes})
        return _Workspaces(
            num_bytes={position: max(each.num_bytes.get(position, 0) for each in measurements) for position in positions},
            multiplies=any(each.multiplies for each in measurements),
        )

    def _prepare_cublas(self, device: torch.device) -> None:
        """Allocate the workspaces of the threads that run programs, before the tensors of a trial leave blocks of other sizes."""
        prepare_cublas(device)
        if self.is_training:
            run_on_autograd_thread(device, lambda: prepare_cublas(device))


@dataclass(slots=True)
class _MeteredMachine(TorchMachine):
    """Machine that measures the workspace of each instruction.

    Attributes:
        num_bytes: bytes above the tensors of an instruction while it runs, by its position; only those above zero.
    """

    num_bytes: dict[int, int] = field(default_factory=dict)
    _position: int = 0

    def _execute(self, step: Step, tensors: dict[int, Any]) -> None:
        with measure_peak(self.device) as peak:
            super(_MeteredMachine, self)._execute(step, tensors)
        excess_bytes = peak.requested_bytes - step.instruction.num_bytes - step.instruction.scratch_bytes
        if excess_bytes > 0:
            self.num_bytes[self._position] = excess_bytes
        self._position += 1


def _measure_here(trial: ProgramBenchmark) -> _Workspaces:
    """Measure on this thread. The first run allocates lasting workspaces, and selects algorithms."""
    with CublasDetector(trial.device) as products:
        trial.run()
    products.note_growth()
    machine = _MeteredMachine(trial.device)
    trial.run(is_last=True, machine=machine)
    return _Workspaces(num_bytes=machine.num_bytes, multiplies=products.detected)


def _read_workspaces(costs: TimingCache, key: str) -> _Workspaces | None:
    """Measurement of an earlier trial; ``None`` if it is not complete."""
    multiplies, count = costs.get(f"products {key}"), costs.get(f"workspaces {key}")
    if multiplies is None or count is None:
        return None
    pairs = [(costs.get(f"workspace position {n} {key}"), costs.get(f"workspace bytes {n} {key}")) for n in range(int(count))]
    known = {int(position): int(num_bytes) for position, num_bytes in pairs if position is not None and num_bytes is not None}
    return _Workspaces(num_bytes=known, multiplies=multiplies > 0) if len(known) == count else None


def _write_workspaces(costs: TimingCache, key: str, measured: _Workspaces, *, is_lasting: bool) -> None:
    for number, (position, num_bytes) in enumerate(measured.num_bytes.items()):
        costs.add(f"workspace position {number} {key}", position, lasting=is_lasting)
        costs.add(f"workspace bytes {number} {key}", num_bytes, lasting=is_lasting)
    costs.add(f"workspaces {key}", len(measured.num_bytes), lasting=is_lasting)
    costs.add(f"products {key}", float(measured.multiplies), lasting=is_lasting)


def warn_about_allocator() -> None:
    """Warn if this process allocates device memory by other rules than the simulated ones."""
    backend, settings = cuda_allocator_backend(), AllocatorSettings.of_environment().undescribed
    if backend != "native" and not any(setting.startswith("backend:") for setting in settings):
        settings = (*settings, f"backend:{backend}")
    if settings:
        warnings.warn(
            f"the allocator settings {', '.join(settings)} (PYTORCH_ALLOC_CONF) are not simulated: the bytes that a plan projects to be "
            "reserved are those without them, so the device may run out of memory within the budget. Remove them, or leave room in the "
            "budget.",
            RuntimeWarning,
            stacklevel=2,
        )
