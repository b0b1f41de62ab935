"""The planner: from a byte budget to segments, strip heights and kept states.

The survey says what every candidate would cost and need, roughly. The planner takes the cheapest that should fit, projects it exactly,
learns from the difference how far the survey is off, and looks again. What it returns has always been projected exactly; when nothing
fits, it says what the smallest plan it knows needs, and that budget will work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sft.analysis.repeated import REPEAT
from sft.errors import BudgetError, UnsupportedError
from sft.options import Options
from sft.plan.behind import (
    WORTH_RECOMPUTING,
    cheapest_mixed,
    offloaded,
    published,
    scheduled_plan,
    smallest_of_stages,
    smallest_with_tails,
    with_tails,
)
from sft.plan.boundaries import keep_what_fits, stream_seconds, streamable
from sft.plan.carried import MAX_PROJECTIONS, WORTH_ANOTHER_LOOK, Planned, carry_out
from sft.plan.clock import timeline_of
from sft.plan.mixed import Mixed
from sft.plan.problem import Problem
from sft.plan.rates import Rates
from sft.plan.stages import StagedModel
from sft.plan.strategy_chain import OFFLOADING, RECOMPUTING, solve
from sft.plan.strategy_sft import grids, least_bytes, partition_choices
from sft.plan.survey import Survey
from sft.plan.tiles import cheaper_tiles, smallest_tiles
from sft.plan.tiling import panel_cols
from sft.plan.types import SegmentChoice
from sft.units import format_bytes

__all__ = ["check_device", "check_host", "plan_segments", "surveys_of"]

#: How many candidates for the smallest plan are projected at most: of networks with few operators that takes no time.
_NUM_SMALLEST, _NUM_SMALLEST_OF_FEW, _FEW_OPERATORS = 3, 12, 64
#: Of what the smallest plan needs that is known another should need less than this share, by surveys that are as exact.
_WORTH_PROJECTING = 0.95
#: A plan that costs at most so much more than running each strip once more is not worth looking further.
_WORTH_MORE_PANELS = 1.05
#: More panels must need less than this share of what fewer need, and a panel narrower than this is all halo.
_WORTH_ANOTHER_PANEL = 0.95
_LEAST_PANEL_COLS = 64
#: The same before cuts are streamed over the host.
_WORTH_STREAMING = 1.05


def plan_segments(problem: Problem, budget_bytes: int, options: Options, device_type: str) -> Planned:
    """Choose segments for a budget.

    Raises:
        BudgetError: nothing found fits; names the segment that needs most and the smallest budget found to work.
    """
    room_bytes = budget_bytes - problem.resident_bytes
    if options.strategy == "sft":
        return _fused_tiled(problem, budget_bytes, options)
    if options.strategy in (*RECOMPUTING, *OFFLOADING):
        return _scheduled(problem, budget_bytes, options.strategy, Rates(device_type))
    surveys: list[Survey] = []
    fitting: list[tuple[float, Planned]] = []
    may_tile = options.strategy == "auto" and options.tile is None and options.halo == "auto"
    for survey in surveys_of(problem, options, device_type):
        found = _cheapest(problem, survey, room_bytes, _least_cost(fitting))
        if found is not None:
            fitting.append(found)
        if may_tile and not surveys:
            fitting += cheaper_tiles(problem, survey, room_bytes, Rates(device_type), _least_cost(fitting))
        surveys.append(survey)
        if found is not None and found[0] <= _WORTH_MORE_PANELS * survey.least_cost:
            break  # what is left to gain are strips that run once more to restore states
        if fitting and survey.least_cost_in(2 * survey.num_panels) > _least_cost(fitting):
            break  # what more panels compute twice is more than that
    mixed = _mixed(problem, surveys, room_bytes, options, Rates(device_type))
    if mixed is not None and not (_least_cost(fitting) <= WORTH_RECOMPUTING * surveys[0].plain_flops):
        found = cheapest_mixed(problem, mixed, room_bytes, _least_cost(fitting))
        fitting += [*([found] if found is not None else []), *published(mixed.staged, room_bytes)]
        fitting += offloaded(mixed.staged, room_bytes, _least_cost(fitting))
        fitting += with_tails(mixed, room_bytes, _least_cost(fitting))
    over_host: list[Survey] = []
    if not (_least_cost(fitting) <= _WORTH_STREAMING * surveys[0].least_cost):
        for survey in _over_host(problem, surveys, options, device_type):
            over_host.append(survey)
            found = _cheapest_streamed(problem, survey, room_bytes)
            if found is not None:
                fitting.append(found)
                if found[0] <= _WORTH_MORE_PANELS * survey.least_cost:
                    break
    if fitting:
        return _fastest(problem, fitting, Rates(device_type))
    planned = [*_smallest_planned(problem, surveys), *_smallest_planned(problem, over_host)]
    if mixed is not None:
        planned += smallest_of_stages(mixed, min(each.projection.peak_bytes for each in planned))
        planned += smallest_with_tails(mixed, min(each.projection.peak_bytes for each in planned))
    if may_tile:
        planned += smallest_tiles(problem, surveys[0], min(each.projection.peak_bytes for each in planned))
    best = min(planned, key=lambda planned: planned.projection.peak_bytes)
    if best.projection.peak_bytes <= room_bytes:
        return best
    raise _too_small(problem, best, budget_bytes)


def _least_cost(fitting: Sequence[tuple[float, Planned]]) -> float:
    """Of plans that fit, infinity where there are none."""
    return min((cost for cost, _ in fitting), default=float("inf"))


def _fastest(problem: Problem, fitting: Sequence[tuple[float, Planned]], rates: Rates) -> Planned:
    """The plan that costs least; where the host is used, too, the one that takes least time on the clock of its timeline."""
    at_home = [costed for costed in fitting if not costed[1].projection.host_bytes]
    found = [min(at_home, key=lambda costed: costed[0])[1]] if at_home else []
    found += [planned for _, planned in fitting if planned.projection.host_bytes]
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda planned: timeline_of(problem, planned.choices, planned.projection, rates).estimated_seconds)


def _smallest_planned(problem: Problem, surveys: Sequence[Survey]) -> Iterator[Planned]:
    """What should need least of all surveys; where it needs more than it should, others that may need less."""
    small = sorted(((candidate, survey) for survey in surveys for candidate in survey.smallest()), key=lambda pair: pair[0].peak_bytes)
    num_tried = _NUM_SMALLEST_OF_FEW if len(problem.graph.operators) <= _FEW_OPERATORS else _NUM_SMALLEST
    best_bytes, error = float("inf"), 0.0
    for candidate, survey in small[:num_tried]:
        if candidate.peak_bytes > (1 + error) * _WORTH_PROJECTING * best_bytes:
            return
        planned = carry_out(problem, survey.choices(candidate))
        needed = planned.projection.peak_bytes
        error = max(error, abs(needed / max(1.0, candidate.peak_bytes) - 1))
        if problem.fits_host(planned.projection.host_bytes):
            best_bytes = min(best_bytes, needed)
            yield planned


def _over_host(problem: Problem, surveys: Sequence[Survey], options: Options, device_type: str) -> Iterator[Survey]:
    """The same surveys with cuts that are streamed, where that is allowed and there are any."""
    if problem.host_budget_bytes == 0 or options.strategy != "auto" or not streamable(problem, surveys[0].choices(surveys[0].last)):
        return
    for survey in surveys:
        yield Survey(problem, options, device_type, survey.num_panels, restart=survey.is_restarting, streams=True)


def _cheapest_streamed(problem: Problem, survey: Survey, room_bytes: int) -> tuple[float, Planned] | None:
    """The cheapest plan with streamed cuts that fits; what fits besides is kept."""
    found = _cheapest(problem, survey, room_bytes)
    if found is None:
        return None
    cost, planned = found

    def fitting(choices: Sequence[SegmentChoice]) -> Planned | None:
        other = carry_out(problem, choices)
        return other if other.projection.peak_bytes <= room_bytes else None

    best = keep_what_fits(problem, planned.choices, fitting) or planned
    if not problem.fits_host(best.projection.host_bytes):
        return None
    saved_seconds = stream_seconds(problem, planned.choices) - stream_seconds(problem, best.choices)
    return cost - saved_seconds * survey.flops_per_second, best


def _mixed(problem: Problem, surveys: Sequence[Survey], room_bytes: int, options: Options, rates: Rates) -> Mixed | None:
    """The plans that recompute stages, where there may be any."""
    if not problem.training or options.tile is not None or options.strategy != "auto" or options.halo == "recompute":
        return None
    staged = StagedModel(problem, rates)
    return Mixed(staged, surveys, max(1, room_bytes)) if len(staged.stages) > 1 else None


def _fused_tiled(problem: Problem, budget_bytes: int, options: Options) -> Planned:
    """The plan with the fewest FLOPs among the SFT paper's that fit."""
    room_bytes = budget_bytes - problem.resident_bytes
    best: Planned | None = None
    smallest: Planned | None = None
    for partitioned in partition_choices(problem, options):
        for grid in grids(options):
            if smallest is not None and least_bytes(problem, partitioned(grid)) > max(room_bytes, smallest.projection.peak_bytes):
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


def _scheduled(problem: Problem, budget_bytes: int, name: str, rates: Rates) -> Planned:
    """The published schedule of that name."""
    room_bytes = budget_bytes - problem.resident_bytes
    staged = StagedModel(problem, rates)
    if not problem.training or len(staged.stages) < 2:  # there is nothing to recompute
        planned = carry_out(problem, staged.choices)
        fits = planned.projection.peak_bytes <= room_bytes
    else:
        found, fits = solve(staged, name, room_bytes)
        planned = scheduled_plan(staged, found)
    if not fits:
        check_host(planned, problem.host_budget_bytes)
        raise _too_small(problem, planned, budget_bytes)
    return planned


def check_host(planned: Planned, host_budget_bytes: int | None) -> None:
    """Refuse a plan that takes more of the host than it may; ``None`` is no limit.

    Raises:
        BudgetError: it does.
    """
    needed = planned.projection.host_bytes
    if host_budget_bytes is not None and needed > host_budget_bytes:
        raise BudgetError(
            f"host_budget is {format_bytes(host_budget_bytes)}, but what leaves the device during a step takes "
            f"{format_bytes(needed)} of the host's memory. Raise host_budget to {needed} bytes, or the device's budget, or choose a "
            "strategy that recomputes.",
            needed_bytes=needed,
        )


def check_device(problem: Problem, planned: Planned, budget_bytes: int) -> None:
    """Refuse a plan that takes more of the device than it may.

    Raises:
        BudgetError: it does.
    """
    needed = problem.resident_bytes + planned.projection.peak_bytes
    if needed > budget_bytes:
        raise BudgetError(
            f"the budget is {format_bytes(budget_bytes)}, but the plan that was given needs {format_bytes(needed)} here "
            f"({format_bytes(problem.resident_bytes)} resident). Raise the budget to {needed} bytes, or leave plan out and have "
            "one made for this budget.",
            needed_bytes=needed,
        )


def surveys_of(problem: Problem, options: Options, device_type: str) -> Iterator[Survey]:
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
        if survey.tiling.panel_cols <= max(_LEAST_PANEL_COLS, panel_cols(problem, options, survey.tiling.width, survey.tiling.width)):
            return
        num_panels *= 2


def _cheapest(problem: Problem, survey: Survey, room_bytes: int, known: float = float("inf")) -> tuple[float, Planned] | None:
    """The cheapest plan that fits and what it costs, as far as the survey and a few exact projections tell.

    What does not cost less than a plan that is known already (``known``) is not looked at: projecting a deep network takes seconds.
    """
    tried = np.zeros(survey.cost.shape, dtype=bool)
    # How many bytes more than the survey says are needed; it counts gradients of whole segments that leave where weights are streamed.
    error = -float(problem.streamed_grad_bytes)
    best: tuple[float, Planned] | None = None
    for _ in range(MAX_PROJECTIONS):
        candidate = survey.cheapest(room_bytes - error, tried)
        if candidate is None or candidate.cost > (known if best is None else WORTH_ANOTHER_LOOK * best[0]):
            break
        tried[candidate.position, candidate.height, candidate.policy] = True
        planned = carry_out(problem, survey.choices(candidate))
        error = planned.projection.peak_bytes - candidate.peak_bytes
        if planned.projection.peak_bytes <= room_bytes:
            best = (candidate.cost, planned)
    return best


def _too_small(problem: Problem, smallest: Planned, budget_bytes: int) -> BudgetError:
    needed = problem.resident_bytes + smallest.projection.peak_bytes
    scopes = [segment.scope for segment in smallest.region.segments]
    worst = max(scopes, key=lambda s: sum(problem.value_bytes(n) for n in s.outputs + s.sources), default=None)
    between = f"; segment {problem.graph[worst.names[0]].label} .. {problem.graph[worst.names[-1]].label}" if worst else ""
    return BudgetError(
        f"the budget is {format_bytes(budget_bytes)}, but a step needs {format_bytes(needed)} at least "
        f"({format_bytes(problem.resident_bytes)} resident, {format_bytes(smallest.projection.peak_bytes)} for inputs, cuts and "
        f"strips{between}). "
        f"Raise the budget to {needed} bytes, give a smaller input, "
        f"{_without_outputs(problem, smallest)}{_over_the_host(problem)}{_of_repeats(problem)}{_of_weights(problem, needed)}"
        "or leave out options that force strategy, tile, state_every or state_slots.",
        needed_bytes=needed,
    )


def _over_the_host(problem: Problem) -> str:
    """A remedy where values could wait on the host for their backward pass, and may not."""
    if problem.host_budget_bytes != 0 or not problem.training:
        return ""
    return "let values wait on the host with Options(host_budget=...), "


def _of_weights(problem: Problem, needed_bytes: int) -> str:
    """A remedy where most of what a step needs are weights and what belongs to them."""
    if problem.weights is not None or 2 * problem.resident_bytes < needed_bytes:
        return ""
    return "stream the weights with Options(weights='stream'), "


def _of_repeats(problem: Problem) -> str:
    """A remedy where repeated blocks have budgets of their own."""
    if problem.training and any(node.target == REPEAT and node.argument("which").given_bytes for node in problem.graph.operators):
        return "leave out the budget of repeated blocks, so that it follows this one, "
    return ""


def _without_outputs(problem: Problem, smallest: Planned) -> str:
    """A remedy where most of what a step needs are its outputs and their gradients."""
    outputs = [name for name in problem.graph.results if name not in problem.host_outputs and problem.graph[name].kind == "operator"]
    held = sum(map(problem.value_bytes, outputs)) + sum(problem.value_bytes(name) for name in outputs if name in problem.requires_grad)
    if 2 * held < smallest.projection.peak_bytes:
        return ""
    return f"keep the outputs on the host ({format_bytes(held)} with their gradients) with output='host', "
