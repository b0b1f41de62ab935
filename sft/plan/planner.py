"""The planner: from a byte budget to segments, strip heights and kept states.

The survey says what every candidate would cost and need, roughly. The planner takes the cheapest that should fit, projects it exactly,
learns from the difference how far the survey is off, and looks again. What it returns has always been projected exactly; when nothing
fits, it says what the smallest plan it knows needs, and that budget will work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sft.errors import BudgetError, InputError
from sft.options import Options
from sft.plan.build import build_region
from sft.plan.problem import Problem
from sft.plan.project import Projection, project
from sft.plan.survey import Candidate, Survey
from sft.plan.types import SegmentChoice
from sft.units import format_bytes
from sft.walk.region import Region

__all__ = ["Planned", "carry_out", "check_tile", "plan_segments"]

_MAX_PROJECTIONS = 8
_WORTH_ANOTHER_LOOK = 0.98
_NUM_SMALLEST = 3


@dataclass(frozen=True, slots=True)
class Planned:
    """Decisions, the region that carries them out, and what it costs."""

    choices: tuple[SegmentChoice, ...]
    region: Region
    projection: Projection


def carry_out(problem: Problem, choices: Sequence[SegmentChoice]) -> Planned:
    """Build the region for given decisions and project it."""
    region = build_region(problem, choices)
    return Planned(tuple(choices), region, project(problem, region))


def plan_segments(problem: Problem, budget_bytes: int, options: Options, device_type: str) -> Planned:
    """Choose segments for a budget.

    Raises:
        BudgetError: nothing found fits; names the segment that needs most and the smallest budget found to work.
    """
    room_bytes = budget_bytes - problem.resident_bytes
    survey = Survey(problem, options, device_type)
    tried = np.zeros(survey.cost.shape, dtype=bool)
    found = _cheapest(problem, survey, room_bytes, tried)
    if found is not None:
        return found
    small = [_project(problem, survey, candidate, tried) for candidate in _smallest(survey)]
    best = min(small, key=lambda planned: planned.projection.peak_bytes)
    if best.projection.peak_bytes <= room_bytes:
        return best
    raise _too_small(problem, best, budget_bytes)


def _cheapest(problem: Problem, survey: Survey, room_bytes: int, tried: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Planned | None:
    """The cheapest plan that fits, as far as the survey and a few exact projections tell."""
    error = 0.0  # how many bytes more than the survey says are needed
    best: tuple[float, Planned] | None = None
    for _ in range(_MAX_PROJECTIONS):
        candidate = survey.cheapest(room_bytes - error, tried)
        if candidate is None or (best is not None and candidate.cost > _WORTH_ANOTHER_LOOK * best[0]):
            break
        planned = _project(problem, survey, candidate, tried)
        error = planned.projection.peak_bytes - candidate.peak_bytes
        if planned.projection.peak_bytes <= room_bytes:
            best = (candidate.cost, planned)
    return None if best is None else best[1]


def _project(problem: Problem, survey: Survey, candidate: Candidate, tried: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Planned:
    tried[candidate.position, candidate.height, candidate.every] = True
    return carry_out(problem, survey.choices(candidate))


def _smallest(survey: Survey) -> list[Candidate]:
    """The candidates that should need least, whatever has been tried before: the answer must not depend on the budget."""
    taken = np.zeros(survey.cost.shape, dtype=bool)
    found: list[Candidate] = []
    while len(found) < _NUM_SMALLEST and (candidate := survey.smallest(taken)) is not None:
        found.append(candidate)
        taken[candidate.position, candidate.height, candidate.every] = True
    return found


def _too_small(problem: Problem, smallest: Planned, budget_bytes: int) -> BudgetError:
    needed = problem.resident_bytes + smallest.projection.peak_bytes
    worst = max(smallest.region.segments, key=lambda s: sum(problem.value_bytes(n) for n in s.scope.outputs + s.scope.sources))
    first, last = worst.scope.names[0], worst.scope.names[-1]
    return BudgetError(
        f"the budget is {format_bytes(budget_bytes)}, but a step needs {format_bytes(needed)} at least "
        f"({format_bytes(problem.resident_bytes)} resident, {format_bytes(smallest.projection.peak_bytes)} for inputs, cuts and strips; "
        f"segment {problem.graph[first].label} .. {problem.graph[last].label}). "
        f"Raise the budget to {needed} bytes, give a smaller image, or leave out options that force tile or state_every.",
        needed_bytes=needed,
    )


def check_tile(options: Options, width: int) -> None:
    """Refuse panels, which are not there yet.

    Raises:
        InputError: the tile asks for panels narrower than the image.
    """
    if options.tile is not None and options.tile[1] is not None and options.tile[1] < width:
        raise InputError(
            f"tile {options.tile}: panels of {options.tile[1]} columns of a {width} px wide image are not supported yet; "
            f"give (rows, None) or at least {width} columns"
        )
