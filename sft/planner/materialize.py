"""Materialization: decisions become a region with an exact projection.

Where weights are streamed, untiled segments are split into stages first (``sft.planner.stages``). While a segment runs, all of its weights
are on the device, and when it has run back, so are the gradients of all of them. Splitting an untiled segment costs no memory: it is cut
where few values cross, and these are kept in either case. So with streamed weights every untiled segment is as small as a stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sft.common.errors import InputError
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.cost.peak_bound import bound_peak_bytes
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.projection import Projection, project_step
from sft.planner.region_builder import build_region
from sft.planner.stages import StagedModel
from sft.runtime.moves import SegmentSchedule
from sft.runtime.region import Region

__all__ = ["ProjectedPlan", "least_peak_bytes", "materialize", "split_into_stages"]


@dataclass(frozen=True, slots=True)
class ProjectedPlan:
    """Decisions with the region that executes them and its projection.

    Attributes:
        choices: the decisions, one per segment.
        region: the region of these segments, with its schedule.
        projection: exact bytes and FLOPs of a step.
    """

    choices: tuple[SegmentChoice, ...]
    region: Region
    projection: Projection

    @property
    def key(self) -> object:
        """Key of equal plans."""
        return self.choices, self.region.schedule


def materialize(problem: PlanningProblem, choices: Sequence[SegmentChoice], order: SegmentSchedule | None = None) -> ProjectedPlan:
    """Build the region of these decisions and project it, once for a problem: searches in several rooms propose the same decisions.

    If weights are streamed and no order is given, untiled segments are split into stages.

    Raises:
        InputError: the order runs a segment back without its residuals, or a copy of it cannot run.
    """
    if problem.resources.weights is not None and order is None:
        choices = split_into_stages(problem, choices)
    decisions = tuple(choices)
    return problem.memo.memoize(("projected plan", decisions, order), lambda: _project(problem, decisions, order))


def _project(problem: PlanningProblem, choices: tuple[SegmentChoice, ...], order: SegmentSchedule | None) -> ProjectedPlan:
    region = _region(problem, choices, order)
    return ProjectedPlan(choices, region, project_step(problem, region))


def least_peak_bytes(problem: PlanningProblem, choices: Sequence[SegmentChoice], order: SegmentSchedule | None = None) -> int:
    """Lower bound of the peak of these decisions, for which one strip of each tiled segment is lowered.

    Raises:
        InputError: as :func:`materialize`.
    """
    if problem.resources.weights is not None and order is None:
        choices = split_into_stages(problem, choices)
    return bound_peak_bytes(problem, _region(problem, choices, order))


def _region(problem: PlanningProblem, choices: Sequence[SegmentChoice], order: SegmentSchedule | None) -> Region:
    """The region of these decisions; errors as of :func:`materialize`."""
    region = replace(build_region(problem, choices), custom_schedule=order)
    if any(move.is_copy for move in region.schedule):
        region = region.without_skipping()
    unsaved_segments = region.liveness.unsaved_segments() if order is not None and problem.sized.training else ()
    copy_error = region.liveness.copy_error() if order is not None and problem.sized.training else None
    if unsaved_segments:
        raise InputError(
            f"the plan's order runs segments {list(unsaved_segments)} back without F{unsaved_segments[0]}+ before; "
            "make a new one with sft.plan(...)"
        )
    if copy_error is not None:
        raise InputError(f"the plan's order cannot run: {copy_error}; make a new one with sft.plan(...)")
    return region


def split_into_stages(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> tuple[SegmentChoice, ...]:
    """Split untiled segments into stages; tiled segments, those of some samples at a time and single stages stay as they are."""
    num_batch = problem.sized.num_batch
    groups = (
        _stage_groups(problem, choice)
        if choice.mode == "whole" and choice.batch_tile in (0, num_batch) and not choice.strip_rows
        else (choice,)
        for choice in choices
    )
    return tuple(segment for group in groups for segment in group)


def _stage_groups(problem: PlanningProblem, choice: SegmentChoice) -> Iterator[SegmentChoice]:
    # The stages do not depend on the rates.
    staged = StagedModel.of(problem, DeviceRates("cpu"))
    stages_with_updates = (group for pair in zip(staged.stages, staged.buffer_updates, strict=True) for group in pair)
    inside = set(choice.nodes)
    for group in (problem.sized.phases.prologue, *stages_with_updates):
        nodes = tuple(name for name in group if name in inside)
        if nodes:
            yield SegmentChoice(nodes=nodes, mode="whole")
