"""Decisions carried out: the region that runs them, and what it costs exactly.

Whole segments in stages, where weights are streamed.

A segment has all of its weights on the device while it runs, and the gradients of all of them when it has run back. Of operators that are
kept whole nothing is lost by running them in more segments, cut where few values cross (``sft.planner.stages``): what crosses is kept
either way. So wherever weights are streamed, whole segments are as small as these stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sft.common.errors import InputError
from sft.planner.cost.roofline import DeviceRates
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.projection import Projection, project_step
from sft.planner.region_builder import build_region
from sft.planner.stages import StagedModel
from sft.runtime.moves import SegmentSchedule
from sft.runtime.region import Region

__all__ = ["CERTAIN_SHARE", "MAX_PROJECTIONS", "WORTH_ANOTHER_LOOK", "ProjectedPlan", "materialize", "split_into_stages"]


def split_into_stages(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> tuple[SegmentChoice, ...]:
    """The same decisions, with whole segments cut into stages; those that are stages already stay as they are."""
    return tuple(part for choice in choices for part in (_stage_groups(problem, choice) if choice.mode == "whole" else (choice,)))


def _stage_groups(problem: PlanningProblem, choice: SegmentChoice) -> Iterator[SegmentChoice]:
    staged = problem.remembered(
        "stages of whole segments", lambda: StagedModel(problem, DeviceRates("cpu"))
    )  # the rates do not matter here
    behind = (group for pair in zip(staged.stages, staged.asides, strict=True) for group in pair)
    inside = set(choice.nodes)
    for group in (problem.phases.prologue, *behind):
        nodes = tuple(name for name in group if name in inside)
        if nodes:
            yield SegmentChoice(nodes=nodes, mode="whole")


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
    region = replace(build_region(problem, choices), custom_schedule=order)
    if any(move.is_copy for move in region.schedule):
        region = region.without_skipping()
    unsaved_segments = region.liveness.unsaved_segments() if order is not None and problem.training else ()
    misplaced = region.liveness.copy_error() if order is not None and problem.training else None
    if unsaved_segments:
        raise InputError(
            f"the plan's order runs segments {list(unsaved_segments)} back without F{unsaved_segments[0]}+ before; "
            "make a new one with sft.plan(...)"
        )
    if misplaced is not None:
        raise InputError(f"the plan's order cannot run: {misplaced}; make a new one with sft.plan(...)")
    return ProjectedPlan(tuple(choices), region, project_step(problem, region))
