"""Projected bytes and FLOPs of a step: the region's own code on the phantom machine.

Tiled segments are replaced by their profile (``sft.walk.profile``), which is the same walk summed up in arrays; ``exactly`` walks them
strip by strip instead and is what the profile is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sft.lower.context import SegmentInfo
from sft.lower.program import Program
from sft.plan.build import build_region
from sft.plan.laps import ScheduleOpRecord, TracingMachine
from sft.plan.problem import PlanningProblem
from sft.plan.types import SegmentChoice
from sft.walk.machine import Machine, SimulatedBuffer, SimulatedMachine
from sft.walk.profile import SweepProfiles
from sft.walk.region import Region
from sft.walk.segments import TiledSegment
from sft.walk.values import Gradients, ValueBindings
from sft.walk.whole import WholeSegment

__all__ = ["Projection", "plain_programs", "project_step", "run_step"]


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
        overhead_bytes: what the device takes besides, where that has been found out (``sft.execute.overhead``).
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
        exactly: whether to walk tiled segments strip by strip.
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
        flops=machine.meter.flops,
        laps=tuple(machine.laps),
        host_bytes=machine.space.num_bytes + machine.host.peak_bytes,
        slab_bytes=machine.space.num_bytes,
        weights_peak_bytes=machine.weights_peak_bytes,
    )


def run_step(problem: PlanningProblem, region: Region, machine: SimulatedMachine, *, retains: bool = False) -> None:
    """Take a step on a machine of byte counts, forward and, in training, back; ``retains`` as of :func:`project_step`."""
    meter = machine.meter
    inputs = set(problem.resident_inputs)
    given = {
        node.name: SimulatedBuffer(meter, problem.value_bytes(node.name) if node.name in inputs else 0)
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

    def buffers(self, machine: Machine, stores: list[SimulatedBuffer]) -> list[SimulatedBuffer]:
        return stores

    def hands_on(self, keep: bool) -> frozenset[str]:
        return self.segment.hands_on(keep)

    def reads_back(self, reads: Sequence[str]) -> Sequence[str]:
        return self.segment.reads_back(reads)

    def forward(self, machine: Machine, values: ValueBindings, *, keep: bool) -> list[SimulatedBuffer]:
        assert isinstance(machine, TracingMachine)
        stores = []
        shared = self.segment.open_reductions(machine, None)
        for chunk in self.segment.chunks:
            partial = {**shared, **self.segment.open_reductions(machine, chunk)}
            for walk in (walk for walk in self.segment.walks if walk.chunk == chunk):
                profile = self.profiles[keep][walk]
                machine.meter.spike(profile.forward_peak_bytes)
                machine.meter.flops += profile.forward_flops
                machine.note(profile.forward_runs)
                stores.append(SimulatedBuffer(machine.meter, profile.store_bytes))
            self.segment.close_reductions(machine, values, partial, chunk)
            del partial
        self.segment.close_reductions(machine, values, shared, None)
        return stores

    def backward(
        self, machine: Machine, values: ValueBindings, stores: list[SimulatedBuffer], grads: Gradients, *, consume: bool = True
    ) -> None:
        assert isinstance(machine, TracingMachine)
        if not consume:
            stores = list(stores)  # they last; a walk that hands on rows of its own copy counts them twice
        for walk in reversed(self.segment.walks):
            del stores[-1]
            profile = self.profiles[True][walk]
            machine.meter.spike(profile.backward_peak_bytes)
            machine.meter.flops += profile.backward_flops
            machine.note(profile.backward_runs)
