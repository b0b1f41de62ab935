"""Lower bound of a step's peak: the step with one strip of each tiled segment.

Lowering all strips takes most of the time of a projection: hundreds of programs at the ends of a sweep. The values between segments,
gradients, streamed weights and untiled segments take little of it, and where images cross a barrier they are most of the peak. So
decisions with a bound above a known peak are left out::

    bound <= peak of the projection

It is the same step on the same simulated machine. Of a tiled segment the middle strip runs, without the rows that strips carry.
"""

from __future__ import annotations

from dataclasses import replace

from sft.lower.lower_strip import StripKind
from sft.planner.problem import PlanningProblem
from sft.planner.projection import AnalyticSegment, TracingMachine, run_step, without_repeats
from sft.runtime.machine import Gradients, Machine, ValueBindings
from sft.runtime.region import Region
from sft.runtime.simulated_machine import SimulatedBuffer
from sft.runtime.tiled_segment import TiledSegment

__all__ = ["bound_peak_bytes"]


def bound_peak_bytes(problem: PlanningProblem, region: Region) -> int:
    """Lower bound of the peak bytes of a region's step."""
    segments = [
        _OneStripSegment(segment, problem) if isinstance(segment, TiledSegment) else without_repeats(segment, problem)
        for segment in region.segments
    ]
    machine = TracingMachine(on_host=problem.resources.on_host)
    run_step(problem, replace(region, segments=segments), machine)
    return machine.peak_bytes


class _OneStripSegment(AnalyticSegment):
    """Tiled segment of which one strip runs."""

    def forward(self, machine: Machine, values: ValueBindings, *, keep: bool) -> list[SimulatedBuffer]:
        assert isinstance(machine, TracingMachine)
        self._run(machine, "forward")
        return [SimulatedBuffer(machine.memory, 0) for _ in self.segment.sweeps]

    def backward(
        self, machine: Machine, values: ValueBindings, stores: list[SimulatedBuffer], grads: Gradients, *, consume: bool = True
    ) -> None:
        assert isinstance(machine, TracingMachine)
        self._run(machine, "joint")

    def _run(self, machine: TracingMachine, kind: StripKind) -> None:
        for sweep in self.segment.sweeps[:1]:
            machine.memory.record_peak(self.segment.program(kind, self.segment.schedule.num_steps // 2, sweep).peak_bytes)
