"""Fitted plan: a plan with the problem that it solves, which a search may have changed.

With measured kernels (``Options(backend="auto")``) a plan is searched for with PyTorch's operators alone. Its decisions are then lowered
with kernels (:meth:`FittedPlan.with_backend`), and the faster of both plans runs. So kernels never make a plan slower by the time model,
and most often only one plan's kernels are compiled and tried for their workspaces. A search with kernels follows where these take much
less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sft.lower.context import Backend
from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.plan_builder import plain_flops
from sft.planner.problem import PlanningProblem
from sft.runtime.whole_segment import WholeSegment

__all__ = ["FittedPlan"]

#: FLOPs over plain's of a plan with one more forward pass, and some.
_MOST_FLOPS = 1.4


@dataclass(frozen=True, slots=True)
class FittedPlan:
    """A plan that fits, and the problem that it solves.

    Attributes:
        problem: the problem, possibly with streamed weights or smaller budgets of repeated blocks.
        projected: the decisions, their region and its projection.
        seconds: measured time of each operation of the schedule; ``None`` if the plan was not timed.
        transferred_from: shapes of the inputs for which the decisions were made, if for another number of samples.
    """

    problem: PlanningProblem
    projected: ProjectedPlan
    seconds: Sequence[float] | None = None
    transferred_from: tuple[tuple[int, ...], ...] = ()

    @property
    def needed_bytes(self) -> int:
        """The smallest budget that the plan fits."""
        projection = self.projected.projection
        return self.problem.resources.resident_bytes + projection.peak_bytes + projection.overhead_bytes

    @property
    def computes_little_again(self) -> bool:
        """True if the plan has all on the device, and computes no more than one more forward pass."""
        projection = self.projected.projection
        is_resident = self.problem.resources.weights is None and not projection.host_bytes
        return is_resident and projection.flops <= _MOST_FLOPS * plain_flops(self.problem)

    @property
    def is_untiled(self) -> bool:
        """True if the plan has no strips or chunks, and computes nothing again."""
        region = self.projected.region
        is_whole = all(isinstance(segment, WholeSegment) for segment in region.segments)
        return is_whole and len(region.schedule) == 2 * len(region.segments) + 1

    def with_backend(self, backend: Backend) -> FittedPlan:
        """The plan with the same segments, schedule and placements, and with programs of another backend; its overhead is unknown."""
        problem = replace(self.problem, resources=replace(self.problem.resources, backend=backend))
        projected = materialize(problem, self.projected.choices, self.projected.region.custom_schedule)
        return replace(self, problem=problem, projected=projected)
