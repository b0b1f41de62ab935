"""The planner: from a byte budget to segments, strip heights and kept states.

The survey says what every candidate would cost and need, roughly. The planner takes the cheapest that should fit, projects it exactly,
learns from the difference how far the survey is off, and looks again. What it returns has always been projected exactly; when nothing
fits, it says what the smallest plan it knows needs, and that budget will work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sft.errors import BudgetError, UnsupportedError
from sft.options import Options
from sft.plan.build import build_region
from sft.plan.problem import Problem
from sft.plan.project import Projection, project
from sft.plan.strategy_sft import grids, partition_choices
from sft.plan.survey import Candidate, Survey, panel_cols
from sft.plan.types import SegmentChoice
from sft.units import format_bytes
from sft.walk.region import Region

__all__ = ["Planned", "carry_out", "plan_segments"]

_MAX_PROJECTIONS = 8
_WORTH_ANOTHER_LOOK = 0.98
_NUM_SMALLEST = 3
#: A plan that costs at most so much more than running each strip once more is not worth looking further.
_WORTH_MORE_PANELS = 1.05
#: More panels must need less than this share of what fewer need, and a panel narrower than this is all halo.
_WORTH_ANOTHER_PANEL = 0.95
_LEAST_PANEL_COLS = 64


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
    if options.strategy == "sft":
        return _fused_tiled(problem, budget_bytes, options)
    surveys: list[Survey] = []
    fitting: list[tuple[float, Planned]] = []
    for survey in _surveys(problem, options, device_type):
        surveys.append(survey)
        found = _cheapest(problem, survey, room_bytes)
        if found is not None:
            fitting.append(found)
            if found[0] <= _WORTH_MORE_PANELS * survey.least_cost:
                break  # what is left to gain are strips that run once more to restore states
    if fitting:
        return min(fitting, key=lambda costed: costed[0])[1]
    small = sorted(((candidate, survey) for survey in surveys for candidate in _smallest(survey)), key=lambda pair: pair[0].peak_bytes)
    planned = [carry_out(problem, survey.choices(candidate)) for candidate, survey in small[:_NUM_SMALLEST]]
    best = min(planned, key=lambda planned: planned.projection.peak_bytes)
    if best.projection.peak_bytes <= room_bytes:
        return best
    raise _too_small(problem, best, budget_bytes)


def _fused_tiled(problem: Problem, budget_bytes: int, options: Options) -> Planned:
    """The plan with the fewest FLOPs among the SFT paper's that fit."""
    room_bytes = budget_bytes - problem.resident_bytes
    best: Planned | None = None
    smallest: Planned | None = None
    for partitioned in partition_choices(problem, options):
        for grid in grids(options):
            if smallest is not None and _least_bytes(problem, partitioned(grid)) > max(room_bytes, smallest.projection.peak_bytes):
                break
            planned = carry_out(problem, partitioned(grid))
            if best is not None and planned.projection.flops >= best.projection.flops:
                break  # finer grids only compute more
            if smallest is None or planned.projection.peak_bytes < smallest.projection.peak_bytes:
                smallest = planned
            if planned.projection.peak_bytes <= room_bytes:
                best = planned
                break
    if best is not None:
        return best
    if smallest is None:
        raise UnsupportedError(["strategy 'sft': no segment of the model can run in tiles; choose strategy 'auto'"])
    raise _too_small(problem, smallest, budget_bytes)


def _least_bytes(problem: Problem, choices: Sequence[SegmentChoice]) -> int:
    """Bytes that any plan with these segments needs: the values between them, which the backward pass reads again."""
    handed_on = {name for choice in choices if choice.mode == "tiled" for name in problem.graph.handed_on(choice.nodes)}
    handed_on -= problem.host_outputs
    return sum(problem.value_bytes(name) for name in handed_on) if problem.training else 0


def _surveys(problem: Problem, options: Options, device_type: str) -> Iterator[Survey]:
    """Surveys for the numbers of panels that may be worth it: 1, 2, 4, ... while more panels need less, whatever the budget."""
    least = float("inf")
    num_panels = 1
    while True:
        if num_panels > 1 and options.halo != "recompute":
            yield Survey(problem, options, device_type, num_panels, restart=False)
        survey = Survey(problem, options, device_type, num_panels)
        yield survey
        smallest = float(survey.peak_bytes.min())
        if options.tile is not None or options.strategy == "none" or smallest > _WORTH_ANOTHER_PANEL * least:
            return
        least = min(least, smallest)
        if survey.panel_cols <= max(_LEAST_PANEL_COLS, panel_cols(problem, options, survey.width, survey.width)):
            return
        num_panels *= 2


def _cheapest(problem: Problem, survey: Survey, room_bytes: int) -> tuple[float, Planned] | None:
    """The cheapest plan that fits and what it costs, as far as the survey and a few exact projections tell."""
    tried = np.zeros(survey.cost.shape, dtype=bool)
    error = 0.0  # how many bytes more than the survey says are needed
    best: tuple[float, Planned] | None = None
    for _ in range(_MAX_PROJECTIONS):
        candidate = survey.cheapest(room_bytes - error, tried)
        if candidate is None or (best is not None and candidate.cost > _WORTH_ANOTHER_LOOK * best[0]):
            break
        tried[candidate.position, candidate.height, candidate.policy] = True
        planned = carry_out(problem, survey.choices(candidate))
        error = planned.projection.peak_bytes - candidate.peak_bytes
        if planned.projection.peak_bytes <= room_bytes:
            best = (candidate.cost, planned)
    return best


def _smallest(survey: Survey) -> list[Candidate]:
    """The candidates that should need least, whatever has been tried before: the answer must not depend on the budget."""
    taken = np.zeros(survey.cost.shape, dtype=bool)
    found: list[Candidate] = []
    while len(found) < _NUM_SMALLEST and (candidate := survey.smallest(taken)) is not None:
        found.append(candidate)
        taken[candidate.position, candidate.height, candidate.policy] = True
    return found


def _too_small(problem: Problem, smallest: Planned, budget_bytes: int) -> BudgetError:
    needed = problem.resident_bytes + smallest.projection.peak_bytes
    worst = max(smallest.region.segments, key=lambda s: sum(problem.value_bytes(n) for n in s.scope.outputs + s.scope.sources))
    first, last = worst.scope.names[0], worst.scope.names[-1]
    return BudgetError(
        f"the budget is {format_bytes(budget_bytes)}, but a step needs {format_bytes(needed)} at least "
        f"({format_bytes(problem.resident_bytes)} resident, {format_bytes(smallest.projection.peak_bytes)} for inputs, cuts and strips; "
        f"segment {problem.graph[first].label} .. {problem.graph[last].label}). "
        f"Raise the budget to {needed} bytes, give a smaller image, {_without_outputs(problem, smallest)}"
        "or leave out options that force tile, state_every or state_slots.",
        needed_bytes=needed,
    )


def _without_outputs(problem: Problem, smallest: Planned) -> str:
    """A remedy where most of what a step needs are its outputs and their gradients."""
    outputs = [name for name in problem.graph.results if name not in problem.host_outputs and problem.graph[name].kind == "operator"]
    held = sum(map(problem.value_bytes, outputs)) + sum(problem.value_bytes(name) for name in outputs if name in problem.requires_grad)
    if 2 * held < smallest.projection.peak_bytes:
        return ""
    return f"keep the outputs on the host ({format_bytes(held)} with their gradients) with output='host', "
