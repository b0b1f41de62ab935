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

from sft.errors import BudgetError, UnsupportedError
from sft.options import Options
from sft.plan.behind import published
from sft.plan.carried import Planned, carry_out
from sft.plan.planner import plan_segments
from sft.plan.problem import Problem
from sft.plan.rates import Rates
from sft.plan.stages import StagedModel
from sft.plan.strategy_auto import surveys_of
from sft.plan.survey import Candidate, Survey

__all__ = ["rivals"]

#: FLOPs over those of the planner's choice up to which a plan may be faster.
_MOST_FLOPS = 1.5
#: Other strips that are looked at.
_NUM_HEIGHTS = 4


def rivals(problem: Problem, best: Planned, budget_bytes: int, options: Options, device_type: str) -> tuple[Planned, ...]:
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
    found: dict[object, Planned] = {}
    for planned in _all(problem, room_bytes, budget_bytes, options, device_type):
        projection = planned.projection
        fits = projection.peak_bytes <= room_bytes and problem.fits_host(projection.host_bytes)
        if fits and projection.flops <= _MOST_FLOPS * best.projection.flops and _key(planned) != _key(best):
            found.setdefault(_key(planned), planned)
    return tuple(sorted(found.values(), key=lambda planned: planned.projection.flops))


def _key(planned: Planned) -> object:
    """What makes two plans the same."""
    return planned.choices, planned.region.moves


def _all(problem: Problem, room_bytes: int, budget_bytes: int, options: Options, device_type: str) -> Iterator[Planned]:
    for survey, candidate in _of_other_heights(problem, room_bytes, options, device_type):
        yield carry_out(problem, survey.choices(candidate))
    if options.halo == "recompute":
        return
    if problem.training:
        staged = StagedModel(problem, Rates(device_type))
        if len(staged.stages) > 1:
            yield from (planned for _, planned in published(staged, room_bytes))
    if options.halo == "auto":
        try:
            yield plan_segments(problem, budget_bytes, replace(options, strategy="sft"), device_type)
        except (BudgetError, UnsupportedError):
            return


def _of_other_heights(problem: Problem, room_bytes: int, options: Options, device_type: str) -> list[tuple[Survey, Candidate]]:
    """For each height of strips the cheapest candidate that should fit; of these the cheapest few."""
    found: list[tuple[Survey, Candidate]] = []
    for survey in surveys_of(problem, options, device_type):
        for height in range(survey.cost.shape[1]):
            others = np.ones(survey.cost.shape, dtype=bool)
            others[:, height] = False
            candidate = survey.cheapest(room_bytes, others)
            if candidate is not None and candidate.position:
                found.append((survey, candidate))
        least = min((candidate.cost for _, candidate in found), default=float("inf"))
        if survey.least_cost_in(2 * survey.num_panels) > least:
            break
    return sorted(found, key=lambda pair: pair[1].cost)[:_NUM_HEIGHTS]
