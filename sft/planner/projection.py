"""Projected peak memory: bytes, FLOPs and host traffic of a step, computed by running its region on simulated buffers.

The projection runs the region's own code on a machine with byte counts for buffers. So the bytes that a plan promises and the bytes that
its execution allocates come from one piece of code. The machine records one entry per schedule op: allocating the segment's outputs,
running it, and freeing values after their last use. The peak of a step is the largest peak of its records, and its FLOPs are their sum.

Tiled segments are replaced by their profile (``sft.runtime.analytic_profile``), which sums up the same sweep in arrays, and of the chunks
of samples only those of different sizes run. With ``exactly`` all strips and chunks run instead, and both are tested against that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from sft.lower.context import SegmentInfo
from sft.lower.program import Port, Program
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import build_region
from sft.planner.resources import Resources
from sft.runtime.analytic_profile import ProgramRuns, SweepProfiles
from sft.runtime.liveness import Segment
from sft.runtime.machine import Buffer, Gradients, Machine, ProgramOps, Residuals, ValueBindings
from sft.runtime.moves import ScheduleOp
from sft.runtime.offload import OffloadedValue
from sft.runtime.region import Region
from sft.runtime.sample_segment import Chunk, SampleSegment
from sft.runtime.simulated_machine import SimulatedBuffer, SimulatedMachine
from sft.runtime.streamed_inputs import SweepDirection, input_staging_bytes, largest_input_grad_bytes
from sft.runtime.tiled_layout import Sweep
from sft.runtime.tiled_segment import TiledSegment
from sft.runtime.weight_prefetch import GradientTransfer
from sft.runtime.whole_segment import WholeSegment

__all__ = [
    "AnalyticSegment",
    "Projection",
    "ScheduleOpRecord",
    "TracingMachine",
    "plain_programs",
    "project_step",
    "run_step",
    "without_repeats",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOpRecord:
    """Projected bytes and FLOPs of one schedule op.

    Attributes:
        move: the schedule op.
        begin_bytes: bytes alive when it begins.
        peak_bytes: peak bytes while it runs.
        end_bytes: bytes alive when it has completed.
        flops: its FLOPs.
        runs: its programs, with the number of runs of each.
        copied_bytes: bytes that it begins to copy to the host, or back.
        waits_for: prefetched values that must have arrived before it begins, as targets of schedule ops.
        up_bytes: bytes that it loads to the device: streamed weights, and the inputs of their updates.
        down_bytes: bytes that it sends to the host: gradients and updates of streamed weights.
    """

    move: ScheduleOp
    begin_bytes: int
    peak_bytes: int
    end_bytes: int
    flops: int
    runs: ProgramRuns = field(compare=False, repr=False)
    copied_bytes: int = 0
    waits_for: tuple[str, ...] = ()
    up_bytes: int = 0
    down_bytes: int = 0


@dataclass(slots=True)
class TracingMachine(SimulatedMachine):
    """Simulated machine that records every schedule op.

    Attributes:
        op_records: records of completed schedule ops.
        peak_bytes: peak bytes up to the end of the last record.
        weights_peak_bytes: peak bytes of streamed weights.
    """

    op_records: list[ScheduleOpRecord] = field(default_factory=list)
    peak_bytes: int = 0
    weights_peak_bytes: int = 0
    _weights_bytes: int = 0
    _up_bytes: int = 0
    _down_bytes: int = 0
    _move: ScheduleOp | None = None
    _begin_bytes: int = 0
    _begin_flops: int = 0
    _runs: dict[int, tuple[Program, int]] = field(default_factory=dict)
    _copied_bytes: int = 0
    _waits_for: list[str] = field(default_factory=list)

    def start_op(self, move: ScheduleOp) -> None:
        self.end()
        self._move, self._begin_bytes, self._begin_flops = move, self.memory.live_bytes, self.memory.flops

    def end(self) -> None:
        """Close the open record; bytes allocated before the first schedule op count towards it."""
        memory = self.memory
        self.peak_bytes = max(self.peak_bytes, memory.peak_bytes)
        if self._move is not None:
            record = ScheduleOpRecord(
                move=self._move,
                begin_bytes=self._begin_bytes,
                peak_bytes=memory.peak_bytes,
                end_bytes=memory.live_bytes,
                flops=memory.flops - self._begin_flops,
                runs=tuple(self._runs.values()),
                copied_bytes=self._copied_bytes,
                waits_for=tuple(self._waits_for),
                up_bytes=self._up_bytes,
                down_bytes=self._down_bytes,
            )
            self.op_records.append(record)
            self._move = None
            memory.peak_bytes = memory.live_bytes
        self._runs, self._copied_bytes, self._waits_for = {}, 0, []
        self._up_bytes = self._down_bytes = 0

    @contextmanager
    def repeated(self, count: int) -> Iterator[None]:
        """Count the FLOPs and the programs of a block ``count`` times. Its bytes are the same each time, and none remain."""
        flops, runs = self.memory.flops, {key: total for key, (_, total) in self._runs.items()}
        yield
        self.memory.flops += (count - 1) * (self.memory.flops - flops)
        for key, (program, total) in self._runs.items():
            self._runs[key] = (program, total + (count - 1) * (total - runs.get(key, 0)))

    def note(self, runs: ProgramRuns) -> None:
        """Count runs of programs."""
        for program, count in runs:
            self._runs[id(program)] = (program, count + self._runs.get(id(program), (program, 0))[1])

    def run(self, program: Program, bindings: Any, saved: Residuals | None = None) -> tuple[dict[Port, Buffer], Residuals]:
        self.note(((program, 1),))
        return SimulatedMachine.run(self, program, bindings, saved)

    def offload(self, target: str, handles: Sequence[Buffer]) -> OffloadedValue:
        copy = SimulatedMachine.offload(self, target, handles)
        self._copied_bytes += copy.num_bytes
        return copy

    def prefetch(self, copy: OffloadedValue) -> None:
        self._copied_bytes += copy.num_bytes
        SimulatedMachine.prefetch(self, copy)

    def wait_prefetch(self, copy: OffloadedValue) -> None:
        self._waits_for.append(copy.target)
        SimulatedMachine.wait_prefetch(self, copy)

    def load_weight(
        self, name: str, num_bytes: int, shape: tuple[int, ...], dtype: Any, handle: SimulatedBuffer | None, *, ahead: bool
    ) -> SimulatedBuffer:
        self._up_bytes += num_bytes
        self._weights_bytes += num_bytes
        self.weights_peak_bytes = max(self.weights_peak_bytes, self._weights_bytes)
        return SimulatedMachine.load_weight(self, name, num_bytes, shape, dtype, handle, ahead=ahead)

    def free_weight(self, name: str, handle: SimulatedBuffer) -> None:
        self._weights_bytes -= handle.num_bytes
        SimulatedMachine.free_weight(self, name, handle)

    def send_weight_grad(self, name: str, gradient: Buffer, weight: Buffer, taking: GradientTransfer) -> None:
        self._up_bytes += taking.up_bytes
        self._down_bytes += taking.down_bytes
        SimulatedMachine.send_weight_grad(self, name, gradient, weight, taking)


@dataclass(frozen=True, slots=True)
class Projection:
    """Projected cost of a step.

    Attributes:
        peak_bytes: peak bytes: inputs, outputs and their gradients, segment boundary tensors, states, strips, new parameter gradients.
        flops: counted floating-point operations.
        op_records: the same numbers for each schedule op of the step.
        host_bytes: peak bytes of host memory for values that leave the device.
        slab_bytes: part of ``host_bytes`` in the slab, for copies and direct cuts; the remainder holds other streamed segment boundary
            tensors.
        weights_peak_bytes: peak bytes of streamed weights; included in ``peak_bytes``.
        overhead_bytes: on a GPU, bytes that the device takes in addition (``sft.planner.measured.allocator_overhead``).
        segments: on a GPU, bytes of the segments of the step's memory pool; ``None`` for a step without a pool.
        staging_bytes: page-locked bytes on the host through which copies between the devices pass; not included in ``host_bytes``.
        records_passes: true if the overhead has room for recording both passes as CUDA graphs (``sft.torch_runtime.pass_graphs``).
        multiplies: false if no program uses cuBLAS, so that the overhead has no workspaces of it.
        input_segment_bytes: segment for the largest input of recorded passes, with room for copies of gradients; 0 for none.
    """

    peak_bytes: int
    flops: int
    op_records: tuple[ScheduleOpRecord, ...] = field(repr=False)
    host_bytes: int = 0
    slab_bytes: int = 0
    weights_peak_bytes: int = 0
    overhead_bytes: int = 0
    segments: tuple[int, ...] | None = None
    staging_bytes: int = 0
    records_passes: bool = False
    multiplies: bool = True
    input_segment_bytes: int = 0

    def fits(self, resources: Resources, room_bytes: int) -> bool:
        """True if the peak fits into a room of the device, and the bytes on the host into the host's budget."""
        return self.peak_bytes <= room_bytes and resources.fits_host(self.host_bytes)


def project_step(
    problem: PlanningProblem, region: Region, *, exactly: bool = False, machine: TracingMachine | None = None, retains: bool = False
) -> Projection:
    """Project one step: inputs arrive, outputs and their gradients exist, gradients of inputs and parameters come out.

    Inputs that are not resident are read during the step; outputs on the host have no bytes here, only their strips do.

    Args:
        problem: the planning problem.
        region: the decisions as a region.
        exactly: run every strip of tiled segments, and every chunk of samples.
        machine: the machine that records, instead of a new :class:`TracingMachine`.
        retains: true if the residuals of the forward pass outlast the backward pass (``retain_graph=True``).
    """
    if not exactly:
        region = replace(region, segments=[without_repeats(segment, problem) for segment in region.segments])
    machine = machine or TracingMachine(on_host=problem.resources.on_host)
    run_step(problem, region, machine, retains=retains)
    return Projection(
        peak_bytes=machine.peak_bytes,
        flops=machine.memory.flops,
        op_records=tuple(machine.op_records),
        host_bytes=machine.host_arena.num_bytes + machine.host_memory.peak_bytes,
        slab_bytes=machine.host_arena.num_bytes,
        weights_peak_bytes=machine.weights_peak_bytes,
        staging_bytes=machine.staging_bytes,
    )


def run_step(problem: PlanningProblem, region: Region, machine: SimulatedMachine, *, retains: bool = False) -> None:
    """Run a step on a simulated machine, forward and, in training, backward; ``retains`` as in :func:`project_step`."""
    memory = machine.memory
    inputs = set(problem.resources.resident_inputs)
    with machine.caller():
        leaves = {
            node.name: SimulatedBuffer(memory, problem.sized.value_bytes(node.name) if node.name in inputs else 0)
            for node in problem.sized.graph.nodes
            if node.kind != "operator"
        }
    outputs, tape = region.forward(machine, leaves, keep=problem.sized.training, hosts=dict.fromkeys(problem.resources.host_outputs))
    # Running statistics are copied into their buffers and freed before the backward pass begins.
    outputs = {name: handle for name, handle in outputs.items() if name in problem.sized.graph.outputs}
    if problem.sized.training:
        hosts = problem.resources.host_outputs
        with machine.caller():
            output_grads = {
                name: None if name in hosts else machine.allocate(region.output_shape(name), problem.sized.dtypes[name], zero=False)
                for name in region.outputs
                if name in problem.sized.requires_grad
            }
        # The gradient of an input that the model returns bypasses the region: autograd adds it to the region's gradient, or copies it.
        grads = {name: grad for name, grad in output_grads.items() if name not in leaves}
        bypassing = {name: grad for name, grad in output_grads.items() if name in leaves}
        output_grads.clear()
        sinks = dict.fromkeys(problem.resources.from_source & problem.sized.requires_grad)
        leaf_grads = region.backward(machine, tape, grads, sinks=sinks, consume=not retains) if grads else {}
        with machine.caller():
            sums = [machine.allocate(problem.sized.shapes[name], problem.sized.dtypes[name], zero=False) for name in bypassing]
        del leaf_grads, bypassing, sums
    machine.end()
    del outputs, leaves


def plain_programs(problem: PlanningProblem) -> tuple[Program, ...]:
    """Programs of the untiled model as plain PyTorch runs it: forward and, in training, backward."""
    return problem.memo.memoize("plain programs", lambda: _plain_programs(problem))


def _plain_programs(problem: PlanningProblem) -> tuple[Program, ...]:
    if not problem.sized.operators:
        return ()
    (segment,) = build_region(problem, (SegmentChoice(nodes=problem.sized.operators, mode="whole"),)).segments
    assert isinstance(segment, WholeSegment)
    return tuple(program for program in segment.programs(problem.sized.training) if program is not None)


def without_repeats(segment: Segment, problem: PlanningProblem) -> Segment:
    """The segment without repeated work in its projection."""
    if isinstance(segment, TiledSegment):
        return AnalyticSegment(segment, problem)
    if isinstance(segment, SampleSegment):
        return _DistinctChunks(**{each.name: getattr(segment, each.name) for each in fields(segment)})
    return segment


class _DistinctChunks(SampleSegment):
    """Segment of samples of which one chunk of each size runs, as often as there are chunks of this size."""

    def _distinct_groups(self) -> Iterator[tuple[int, Chunk, tuple[Chunk, ...]]]:
        """One group of chunks of each combination of sizes, and the number of such groups."""
        read, inner = self.levels[: self.num_read_levels], self.levels[self.num_read_levels :]
        rest = tuple(product(*(level.chunks for level in inner)))
        for combination in product(*(level.distinct_chunks for level in read)):
            first = tuple(chunk for chunk, _ in combination)
            yield math.prod(count for _, count in combination), first, tuple((*first, *each) for each in rest)

    def forward(self, machine: Machine, values: ValueBindings, *, keep: bool) -> None:
        assert isinstance(machine, TracingMachine)
        for count, first, chunks in self._distinct_groups():
            with machine.repeated(count):
                self.run_group_forward(machine, values, first, chunks)

    def backward(self, machine: Machine, values: ValueBindings, saved: Any, grads: Gradients, *, consume: bool = True) -> None:
        assert isinstance(machine, TracingMachine)
        for count, first, chunks in self._distinct_groups():
            with machine.repeated(count):
                self.run_group_backward(machine, values, grads, first, chunks)


class AnalyticSegment:
    """Tiled segment that adds the numbers of its profile instead of running strips."""

    accumulates = True
    saves = True

    def __init__(self, segment: TiledSegment, problem: PlanningProblem) -> None:
        self.segment = segment
        differentiate = problem.sized.training and any(name in problem.sized.requires_grad for name in segment.scope.names)
        # The forward pass of a segment that is not differentiated keeps no states; the region passes keep=False then.
        self.profiles = {
            keep: SweepProfiles(segment, keep=keep, differentiate=keep and differentiate, on_host=problem.resources.on_host)
            for keep in (False, True)
        }

    @property
    def scope(self) -> SegmentInfo:
        return self.segment.scope

    @property
    def sides(self) -> tuple[str, ...]:
        return self.segment.sides

    @property
    def to_host(self) -> frozenset[str]:
        return self.segment.to_host

    @property
    def views(self) -> frozenset[str]:
        return self.segment.views

    @property
    def keeps_buffers(self) -> bool:
        return self.segment.keeps_buffers

    @property
    def reusable_sources(self) -> Mapping[str, tuple[str, ...]]:
        return self.segment.reusable_sources

    def buffers(self, machine: ProgramOps, stores: list[SimulatedBuffer]) -> list[SimulatedBuffer]:
        return stores

    def self_allocated(self, keep: bool) -> frozenset[str]:
        return self.segment.self_allocated(keep)

    def backward_reads(self, reads: Sequence[str]) -> Sequence[str]:
        return self.segment.backward_reads(reads)

    def forward(self, machine: Machine, values: ValueBindings, *, keep: bool) -> list[SimulatedBuffer]:
        assert isinstance(machine, TracingMachine)
        stores = []
        shared = self.segment.open_reductions(machine, None)
        for chunk in self.segment.chunks:
            partial = {**shared, **self.segment.open_reductions(machine, chunk)}
            for sweep in (sweep for sweep in self.segment.sweeps if sweep.chunk == chunk):
                profile = self.profiles[keep][sweep]
                self._stage(machine, "forward", sweep, profile.forward_runs)
                machine.memory.record_peak(profile.forward_peak_bytes)
                machine.memory.flops += profile.forward_flops
                machine.note(profile.forward_runs)
                stores.append(SimulatedBuffer(machine.memory, profile.store_bytes))
            self.segment.close_reductions(machine, values, partial, chunk)
            del partial
        self.segment.close_reductions(machine, values, shared, None)
        return stores

    def _stage(self, machine: TracingMachine, direction: SweepDirection, sweep: Sweep, runs: ProgramRuns) -> None:
        """Count the page-locked buffers of a sweep: those of its loaders, and of the strips that its programs exchange with the host."""
        segment = self.segment
        if machine.on_host:
            return
        if not segment.from_source <= segment.direct:
            for start in [machine.staging.allocate(size) for size in input_staging_bytes(segment, direction, sweep)]:
                machine.staging.free(start)
        for program, _ in runs:
            for port, slot in program.ports.items():
                if segment.is_exchanged(port) and port.name not in segment.direct:
                    machine.note_transfer(slot.num_bytes)
        if direction == "backward":
            machine.note_transfer(largest_input_grad_bytes(segment, sweep, segment.from_source - segment.direct))

    def backward(
        self, machine: Machine, values: ValueBindings, stores: list[SimulatedBuffer], grads: Gradients, *, consume: bool = True
    ) -> None:
        assert isinstance(machine, TracingMachine)
        if not consume:
            stores = list(stores)  # the caller's list stays; a sweep that passes rows on from its own copy counts them twice
        for sweep in reversed(self.segment.sweeps):
            del stores[-1]
            profile = self.profiles[True][sweep]
            if not self.segment.keeps_states(sweep):
                self._stage(machine, "restore", sweep, ())
            self._stage(machine, "backward", sweep, profile.backward_runs)
            machine.memory.record_peak(profile.backward_peak_bytes)
            machine.memory.flops += profile.backward_flops
            machine.note(profile.backward_runs)
