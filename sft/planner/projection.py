"""Projected bytes and FLOPs of a step: the region's own code on the phantom machine.

Tiled segments are replaced by their profile (``sft.runtime.analytic_profile``), which is the same sweep summed up in arrays; ``exactly``
sweeps them strip by strip instead and is what the profile is tested against.

What a step does between one move of its order and the next, noted by the machine that projects it.

A lap is a move with all that belongs to it: making room for what the segment hands on, running it, and dropping what nobody reads again.
The laps of a projection are the projection, taken apart: the highest of their peaks is the step's peak, and their FLOPs sum to the step's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sft.lower.context import SegmentInfo
from sft.lower.program import Port, Program
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import build_region
from sft.runtime.analytic_profile import ProgramRuns, SweepProfiles
from sft.runtime.machine import Buffer, Gradients, Machine, ProgramOps, Residuals, ValueBindings
from sft.runtime.moves import ScheduleOp
from sft.runtime.offload import OffloadedValue
from sft.runtime.region import Region
from sft.runtime.simulated_machine import SimulatedBuffer, SimulatedMachine
from sft.runtime.tiled_segment import TiledSegment
from sft.runtime.weight_prefetch import GradientTransfer
from sft.runtime.whole_segment import WholeSegment

__all__ = ["Projection", "ScheduleOpRecord", "TracingMachine", "plain_programs", "project_step", "run_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOpRecord:
    """One move of a step.

    Attributes:
        move: what is done.
        begin_bytes: held when it begins.
        peak_bytes: most that is held while it lasts.
        end_bytes: held when it is through.
        flops: what it computes.
        runs: the programs that it runs, and how often.
        copied_bytes: what it begins to copy to the host, or back.
        waits_for: what is on its way back and has to be there, as targets of moves.
        up_bytes: of streamed weights, and of what their updates read, what it brings to the device.
        down_bytes: of their gradients and updates what leaves it.
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
    """A machine of byte counts that takes down laps.

    Attributes:
        laps: those that are through.
        peak_bytes: most bytes so far, as of the end of the last lap.
        weights_peak_bytes: most bytes of streamed weights at once.
    """

    laps: list[ScheduleOpRecord] = field(default_factory=list)
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
        """Close the lap that is open; what was held before the first one counts as its own."""
        memory = self.memory
        self.peak_bytes = max(self.peak_bytes, memory.peak_bytes)
        if self._move is not None:
            lap = ScheduleOpRecord(
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
            self.laps.append(lap)
            self._move = None
            memory.peak_bytes = memory.live_bytes
        self._runs, self._copied_bytes, self._waits_for = {}, 0, []
        self._up_bytes = self._down_bytes = 0

    def note(self, runs: ProgramRuns) -> None:
        """Take down programs that ran, as often as they did."""
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
    """What a step costs.

    Attributes:
        peak_bytes: most bytes alive: inputs, outputs and their gradients, cuts, states, strips, new parameter gradients.
        flops: counted floating-point operations.
        laps: the same, taken apart: one for each move of the step.
        host_bytes: most bytes on the host, for what leaves the device meanwhile.
        slab_bytes: those of the slab, for copies; the others are streamed cuts.
        weights_peak_bytes: most bytes of streamed weights at once; they are in ``peak_bytes``.
        overhead_bytes: what the device takes besides, where that has been found out (``sft.planner.measured.allocator_overhead``).
    """

    peak_bytes: int
    flops: int
    laps: tuple[ScheduleOpRecord, ...] = field(repr=False)
    host_bytes: int = 0
    slab_bytes: int = 0
    weights_peak_bytes: int = 0
    overhead_bytes: int = 0


def project_step(
    problem: PlanningProblem, region: Region, *, exactly: bool = False, machine: TracingMachine | None = None, retains: bool = False
) -> Projection:
    """Run a step of byte counts: inputs arrive, outputs and their gradients exist, gradients of inputs and parameters come out.

    Inputs that are not resident are read while it runs; outputs on the host have no bytes here, only their strips have.

    Args:
        problem: what is planned.
        region: the decisions.
        exactly: whether to sweep tiled segments strip by strip.
        machine: what counts, where it is not the plain machine of byte counts.
        retains: whether what the forward pass kept outlasts the backward pass (``retain_graph=True``).
    """
    if not exactly:
        segments = [_AnalyticSegment(s, problem) if isinstance(s, TiledSegment) else s for s in region.segments]
        region = replace(region, segments=segments)
    machine = machine or TracingMachine(on_host=problem.on_host)
    run_step(problem, region, machine, retains=retains)
    return Projection(
        peak_bytes=machine.peak_bytes,
        flops=machine.memory.flops,
        laps=tuple(machine.laps),
        host_bytes=machine.host_arena.num_bytes + machine.host_memory.peak_bytes,
        slab_bytes=machine.host_arena.num_bytes,
        weights_peak_bytes=machine.weights_peak_bytes,
    )


def run_step(problem: PlanningProblem, region: Region, machine: SimulatedMachine, *, retains: bool = False) -> None:
    """Take a step on a machine of byte counts, forward and, in training, back; ``retains`` as of :func:`project_step`."""
    memory = machine.memory
    inputs = set(problem.resident_inputs)
    given = {
        node.name: SimulatedBuffer(memory, problem.value_bytes(node.name) if node.name in inputs else 0)
        for node in problem.graph.nodes
        if node.kind != "operator"
    }
    outputs, tape = region.forward(machine, given, keep=problem.training, hosts=dict.fromkeys(problem.host_outputs))
    # Running statistics are copied into their buffers and gone before the backward pass begins.
    outputs = {name: handle for name, handle in outputs.items() if name in problem.graph.outputs}
    if problem.training:
        wanted = [name for name in region.outputs if name in problem.requires_grad]
        hosts = problem.host_outputs
        arriving = {n: None if n in hosts else machine.allocate(region.output_shape(n), problem.dtypes[n], zero=False) for n in wanted}
        # That of an input that the model returns does not pass through the region: autograd adds it to what the region finds, or copies it.
        grads = {name: grad for name, grad in arriving.items() if name not in given}
        around = {name: grad for name, grad in arriving.items() if name in given}
        arriving.clear()
        sinks = dict.fromkeys(problem.from_source & problem.requires_grad)
        found = region.backward(machine, tape, grads, sinks=sinks, consume=not retains) if grads else {}
        sums = [machine.allocate(problem.shapes[name], problem.dtypes[name], zero=False) for name in around]
        del found, around, sums
    machine.end()
    del outputs, given


def plain_programs(problem: PlanningProblem) -> tuple[Program, ...]:
    """The model as plain PyTorch runs it: the forward program and, in training, the backward program."""
    return problem.remembered("plain programs", lambda: _plain_programs(problem))


def _plain_programs(problem: PlanningProblem) -> tuple[Program, ...]:
    if not problem.operators:
        return ()
    (segment,) = build_region(problem, (SegmentChoice(nodes=problem.operators, mode="whole"),)).segments
    assert isinstance(segment, WholeSegment)
    return tuple(program for program in segment.programs(problem.training) if program is not None)


class _AnalyticSegment:
    """A tiled segment that is only added up."""

    accumulates = True
    saves = True

    def __init__(self, segment: TiledSegment, problem: PlanningProblem) -> None:
        self.segment = segment
        differentiate = problem.training and any(name in problem.requires_grad for name in segment.scope.names)
        # Of a segment that is not differentiated the forward pass keeps nothing; the region says so when it runs it.
        self.profiles = {
            keep: SweepProfiles(segment, keep=keep, differentiate=keep and differentiate, on_host=problem.on_host) for keep in (False, True)
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
                machine.memory.record_peak(profile.forward_peak_bytes)
                machine.memory.flops += profile.forward_flops
                machine.note(profile.forward_runs)
                stores.append(SimulatedBuffer(machine.memory, profile.store_bytes))
            self.segment.close_reductions(machine, values, partial, chunk)
            del partial
        self.segment.close_reductions(machine, values, shared, None)
        return stores

    def backward(
        self, machine: Machine, values: ValueBindings, stores: list[SimulatedBuffer], grads: Gradients, *, consume: bool = True
    ) -> None:
        assert isinstance(machine, TracingMachine)
        if not consume:
            stores = list(stores)  # they last; a sweep that hands on rows of its own copy counts them twice
        for sweep in reversed(self.segment.sweeps):
            del stores[-1]
            profile = self.profiles[True][sweep]
            machine.memory.record_peak(profile.backward_peak_bytes)
            machine.memory.flops += profile.backward_flops
            machine.note(profile.backward_runs)
