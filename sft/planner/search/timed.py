"""Plans for the same budget that a clock may find faster than the one of fewest FLOPs.

Plans are compared by FLOPs, and how many of them a second gets differs: with the height of strips, between strips and whole values, between
one program and many small ones. So where times are measured (``Options(profile="measure")``) the planner's choice has to stand against
others that fit: strips of other heights, stages that run again by the published schedules, and the independent tiles of strategy
``sft``. None is looked at that computes so much more than the choice that no device makes up for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from sft.common.errors import BudgetError, UnsupportedError
from sft.planner.cost.roofline import DeviceRates
from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.options import Options
from sft.planner.planner import plan_segments
from sft.planner.problem import PlanningProblem
from sft.planner.search.auto import candidate_grids
from sft.planner.search.staged import published_plans
from sft.planner.search.tiled import Candidate, CandidateGrid
from sft.planner.stages import StagedModel

__all__ = ["timing_candidates"]

#: FLOPs over those of the planner's choice up to which a plan may be faster.
_MAX_FLOPS = 1.5
#: Other strips that are looked at.
_NUM_HEIGHTS = 4


def timing_candidates(
    problem: PlanningProblem, best: ProjectedPlan, budget_bytes: int, options: Options, device_type: str
) -> tuple[ProjectedPlan, ...]:
    """Plans that fit as well, other than the planner's choice, none twice, the fewest FLOPs first.

    Args:
        problem: the model at one size.
        best: the planner's choice.
        budget_bytes: what the device may hold.
        options: wishes; those that name a strategy or a tile leave nothing to choose.
        device_type: ``"cpu"``, ``"cuda"``.
    """
    if options.strategy != "auto" or options.tile is not None:
        return ()
    room_bytes = budget_bytes - problem.occupied_bytes
    found: dict[object, ProjectedPlan] = {}
    for planned in _candidate_plans(problem, room_bytes, budget_bytes, options, device_type):
        projection = planned.projection
        fits = projection.peak_bytes <= room_bytes and problem.fits_host(projection.host_bytes)
        if fits and projection.flops <= _MAX_FLOPS * best.projection.flops and _plan_key(planned) != _plan_key(best):
            found.setdefault(_plan_key(planned), planned)
    return tuple(sorted(found.values(), key=lambda planned: planned.projection.flops))


def _plan_key(planned: ProjectedPlan) -> object:
    """What makes two plans the same."""
    return planned.choices, planned.region.schedule


def _candidate_plans(
    problem: PlanningProblem, room_bytes: int, budget_bytes: int, options: Options, device_type: str
) -> Iterator[ProjectedPlan]:
    for survey, candidate in _other_height_plans(problem, room_bytes, options, device_type):
        yield materialize(problem, survey.choices(candidate))
    if options.halo == "recompute":
        return
    if problem.training:
        staged = StagedModel(problem, DeviceRates(device_type))
        if len(staged.stages) > 1:
            yield from (planned for _, planned in published_plans(staged, room_bytes))
    if options.halo == "auto":
        try:
            yield plan_segments(problem, budget_bytes, replace(options, strategy="sft"), device_type)
        except (BudgetError, UnsupportedError):
            return


def _other_height_plans(
    problem: PlanningProblem, room_bytes: int, options: Options, device_type: str
) -> list[tuple[CandidateGrid, Candidate]]:
    """For each height of strips the cheapest candidate that should fit; of these the cheapest few."""
    found: list[tuple[CandidateGrid, Candidate]] = []
    for survey in candidate_grids(problem, options, device_type):
        for height in range(survey.cost.shape[1]):
            others = np.ones(survey.cost.shape, dtype=bool)
            others[:, height] = False
            candidate = survey.cheapest(room_bytes, others)
            if candidate is not None and candidate.position:
                found.append((survey, candidate))
        least = min((candidate.cost for _, candidate in found), default=float("inf"))
        if survey.min_cost_in(2 * survey.num_panels) > least:
            break
    return sorted(found, key=lambda pair: pair[1].cost)[:_NUM_HEIGHTS]
