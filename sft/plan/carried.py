"""Decisions carried out: the region that runs them, and what it costs exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sft.errors import InputError
from sft.plan.build import build_region
from sft.plan.finer import split_into_stages
from sft.plan.problem import PlanningProblem
from sft.plan.project import Projection, project_step
from sft.plan.types import SegmentChoice
from sft.walk.order import SegmentSchedule
from sft.walk.region import Region

__all__ = ["CERTAIN_SHARE", "MAX_PROJECTIONS", "WORTH_ANOTHER_LOOK", "ProjectedPlan", "materialize"]

#: Exact projections of one search at most; and the share of the best one's cost that another proposal must not exceed to be looked at.
MAX_PROJECTIONS = 8
WORTH_ANOTHER_LOOK = 0.98
#: Of what operators that are kept whole should need, this they surely do.
CERTAIN_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class ProjectedPlan:
    """Decisions, the region that carries them out (in its order), and what it costs."""

    choices: tuple[SegmentChoice, ...]
    region: Region
    projection: Projection


def materialize(problem: PlanningProblem, choices: Sequence[SegmentChoice], order: SegmentSchedule | None = None) -> ProjectedPlan:
    """Build the region for given decisions and project it. Where weights are streamed and no order is given, whole segments run in stages.

    Raises:
        InputError: the order runs a segment back that has not kept what it needs for that.
    """
    if problem.weights is not None and order is None:
        choices = split_into_stages(problem, choices)
    region = replace(build_region(problem, choices), order=order)
    if any(move.is_copy for move in region.moves):
        region = region.run_in_full()
    unkept = region.lifetimes.unkept() if order is not None and problem.training else ()
    misplaced = region.lifetimes.misplaced() if order is not None and problem.training else None
    if unkept:
        raise InputError(
            f"the plan's order runs segments {list(unkept)} back without F{unkept[0]}+ before; make a new one with sft.plan(...)"
        )
    if misplaced is not None:
        raise InputError(f"the plan's order cannot run: {misplaced}; make a new one with sft.plan(...)")
    return ProjectedPlan(tuple(choices), region, project_step(problem, region))
