"""The planner: from a byte budget to segments, strip heights and kept states.

The survey says what every candidate would cost and need, roughly. The planner takes the cheapest that should fit, projects it exactly,
learns from the difference how far the survey is off, and looks again. What it returns has always been projected exactly; when nothing
fits, it says what the smallest plan it knows needs, and that budget will work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sft.analysis.repeated import REPEAT
from sft.errors import BudgetError, InputError, UnsupportedError
from sft.options import Options
from sft.plan.boundaries import keep_what_fits, stream_seconds, streamable
from sft.plan.build import build_region
from sft.plan.chain.schedule import Schedule
from sft.plan.clock import timeline_of
from sft.plan.mixed import Mixed
from sft.plan.problem import Problem
from sft.plan.project import Projection, project
from sft.plan.rates import Rates
from sft.plan.stages import StagedModel
from sft.plan.strategy_chain import JOINT, OFFLOADING, RECOMPUTING, Scheduled, least, solve
from sft.plan.strategy_sft import grids, partition_choices
from sft.plan.survey import Candidate, Survey
from sft.plan.tails import Tail, TailPlan, least_schedule, smallest_tails, tails
from sft.plan.tiling import panel_cols
from sft.plan.types import SegmentChoice
from sft.units import format_bytes
from sft.walk.order import Order
from sft.walk.region import Region

__all__ = ["Planned", "carry_out", "check_host", "plan_segments"]

_MAX_PROJECTIONS = 8
_WORTH_ANOTHER_LOOK = 0.98
_NUM_SMALLEST = 3
#: A plan that costs at most so much more than running each strip once more is not worth looking further.
_WORTH_MORE_PANELS = 1.05
#: More panels must need less than this share of what fewer need, and a panel narrower than this is all halo.
_WORTH_ANOTHER_PANEL = 0.95
_LEAST_PANEL_COLS = 64
#: The same before cuts are streamed over the host.
_WORTH_STREAMING = 1.05
#: A plan that costs at most so much more than plain PyTorch is not worth looking for stages to run again.
_WORTH_RECOMPUTING = 1.02
#: The solver that recomputes and copies takes seconds where there are more stages.
_MOST_JOINT_STAGES = 32
#: Schedules that are looked at of one solver for one head; and heads for which both recomputation and copies are.
_MAX_TAILS, _MOST_JOINT_TAILS = 4, 1
#: The chain's schedule of least memory is not quite the model's: another may need less than this share of it, but not by much.
_LEAST_OF_OPTIMAL = 1.2


@dataclass(frozen=True, slots=True)
class Planned:
    """Decisions, the region that carries them out (in its order), and what it costs."""

    choices: tuple[SegmentChoice, ...]
    region: Region
    projection: Projection


def carry_out(problem: Problem, choices: Sequence[SegmentChoice], order: Order | None = None) -> Planned:
    """Build the region for given decisions and project it.

    Raises:
        InputError: the order runs a segment back that has not kept what it needs for that.
    """
    region = replace(build_region(problem, choices), order=order)
    if any(move.is_copy for move in region.moves):
        region = region.run_in_full()
    unkept = region.unkept() if order is not None and problem.training else ()
    misplaced = region.misplaced() if order is not None and problem.training else None
    if unkept:
        raise InputError(
            f"the plan's order runs segments {list(unkept)} back without F{unkept[0]}+ before; make a new one with sft.plan(...)"
        )
    if misplaced is not None:
        raise InputError(f"the plan's order cannot run: {misplaced}; make a new one with sft.plan(...)")
    return Planned(tuple(choices), region, project(problem, region))


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
    for survey in _surveys(problem, options, device_type):
        surveys.append(survey)
        found = _cheapest(problem, survey, room_bytes, min((cost for cost, _ in fitting), default=float("inf")))
        if found is not None:
            fitting.append(found)
            if found[0] <= _WORTH_MORE_PANELS * survey.least_cost:
                break  # what is left to gain are strips that run once more to restore states
        if fitting and survey.least_cost_in(2 * survey.num_panels) > min(cost for cost, _ in fitting):
            break  # what more panels compute twice is more than that
    mixed = _mixed(problem, surveys, room_bytes, options, Rates(device_type))
    if mixed is not None and not (fitting and min(cost for cost, _ in fitting) <= _WORTH_RECOMPUTING * surveys[0].plain_flops):
        found = _cheapest_mixed(problem, mixed, room_bytes, min(cost for cost, _ in fitting) if fitting else float("inf"))
        fitting += [*([found] if found is not None else []), *_published(mixed.staged, room_bytes), *_offloaded(mixed.staged, room_bytes)]
        fitting += _with_tails(mixed, room_bytes, min(cost for cost, _ in fitting) if fitting else float("inf"))
    over_host: list[Survey] = []
    if not (fitting and min(cost for cost, _ in fitting) <= _WORTH_STREAMING * surveys[0].least_cost):
        for survey in _over_host(problem, surveys, options, device_type):
            over_host.append(survey)
            found = _cheapest_streamed(problem, survey, room_bytes)
            if found is not None:
                fitting.append(found)
                if found[0] <= _WORTH_MORE_PANELS * survey.least_cost:
                    break
    if fitting:
        return _fastest(problem, fitting, Rates(device_type))
    planned = [carry_out(problem, choices) for choices in _smallest_choices(surveys)]
    streamed = (carry_out(problem, choices) for choices in _smallest_choices(over_host))
    planned += [found for found in streamed if problem.fits_host(found.projection.host_bytes)]
    if mixed is not None:
        planned += _smallest_of_stages(mixed, min(each.projection.peak_bytes for each in planned))
        planned += _smallest_with_tails(mixed, min(each.projection.peak_bytes for each in planned))
    best = min(planned, key=lambda planned: planned.projection.peak_bytes)
    if best.projection.peak_bytes <= room_bytes:
        return best
    raise _too_small(problem, best, budget_bytes)


def _fastest(problem: Problem, fitting: Sequence[tuple[float, Planned]], rates: Rates) -> Planned:
    """The plan that costs least; where the host is used, too, the one that takes least time on the clock of its timeline."""
    at_home = [costed for costed in fitting if not costed[1].projection.host_bytes]
    found = [min(at_home, key=lambda costed: costed[0])[1]] if at_home else []
    found += [planned for _, planned in fitting if planned.projection.host_bytes]
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda planned: timeline_of(problem, planned.choices, planned.projection, rates).estimated_seconds)


def _smallest_choices(surveys: Sequence[Survey]) -> Iterator[tuple[SegmentChoice, ...]]:
    """The decisions that should need least, of all surveys."""
    small = sorted(((candidate, survey) for survey in surveys for candidate in _smallest(survey)), key=lambda pair: pair[0].peak_bytes)
    return (survey.choices(candidate) for candidate, survey in small[:_NUM_SMALLEST])


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


def _cheapest_mixed(problem: Problem, mixed: Mixed, room_bytes: int, worse_than: float) -> tuple[float, Planned] | None:
    """The cheapest mixed plan that fits and costs less than one that is known, as far as a few exact projections tell."""
    error, best = 0.0, None
    for _ in range(_MAX_PROJECTIONS):
        proposal = mixed.cheapest(room_bytes - error, worse_than if best is None else _WORTH_ANOTHER_LOOK * best[0])
        if proposal is None:
            break
        planned = carry_out(problem, proposal.choices, proposal.order)
        if planned.projection.peak_bytes <= room_bytes:
            best = (proposal.cost, planned)
        error += planned.projection.peak_bytes - room_bytes
    return best


def _published(staged: StagedModel, room_bytes: int) -> Iterator[tuple[float, Planned]]:
    """What the published schedules make of the stages, where they fit, so that no plan is worse than theirs."""
    optimal = least(staged, "optimal").projection.peak_bytes
    if optimal > _LEAST_OF_OPTIMAL * room_bytes:
        return  # no other needs so much less
    for name in RECOMPUTING:
        found, fits = solve(staged, name, room_bytes)
        if fits:
            yield found.seconds * staged.rates.flops_per_second, _planned(staged, found)


def _offloaded(staged: StagedModel, room_bytes: int) -> Iterator[tuple[float, Planned]]:
    """The same of what the schedules make that copy to the host, alone and together with recomputation."""
    if staged.problem.host_budget_bytes == 0:
        return
    for name in (*OFFLOADING, *([JOINT] if len(staged.stages) <= _MOST_JOINT_STAGES else [])):
        found, fits = solve(staged, name, room_bytes)
        if fits:
            yield found.seconds * staged.rates.flops_per_second, _planned(staged, found)


def _with_tails(mixed: Mixed, room_bytes: int, worse_than: float) -> Iterator[tuple[float, Planned]]:
    """Plans with strips in front whose other stages wait on the host, alone and together with recomputation, that may cost less."""
    staged = mixed.staged
    if staged.problem.host_budget_bytes == 0:
        return
    num_joint = 0
    for tail in tails(staged, mixed.surveys, room_bytes):
        if tail.least_cost >= worse_than:
            return
        found = _cheapest_tail(tail, "offload-dp", room_bytes)
        if found is None:
            continue
        yield found
        worse_than = min(worse_than, found[0])
        # The solver of both takes seconds, and has nothing to gain where copies are hidden.
        is_slow = found[0] > _WORTH_RECOMPUTING * tail.least_cost
        if is_slow and num_joint < _MOST_JOINT_TAILS and tail.chain.num_stages <= _MOST_JOINT_STAGES:
            num_joint += 1
            both = _cheapest_tail(tail, JOINT, room_bytes)
            if both is not None:
                yield both
                worse_than = min(worse_than, both[0])


def _cheapest_tail(tail: Tail, name: str, room_bytes: int) -> tuple[float, Planned] | None:
    """The cheapest schedule of a solver that fits, as far as a few exact projections tell."""
    best: tuple[float, Planned] | None = None
    budget_bytes, tried = room_bytes - tail.base_bytes, set[int]()
    for _ in range(_MAX_TAILS):
        if budget_bytes < 1 or budget_bytes in tried:
            break
        tried.add(budget_bytes)
        try:
            schedule = tail.schedule(name, budget_bytes)
        except BudgetError as refusal:
            budget_bytes = refusal.needed_bytes
            continue
        proposal = _proposal(tail, schedule)
        if proposal is None:
            break
        planned = carry_out(tail.staged.problem, proposal.choices, proposal.order)
        if _fits(tail.staged.problem, planned, room_bytes) and (best is None or proposal.cost < best[0]):
            best = (proposal.cost, planned)
        budget_bytes = proposal.peak_bytes - (planned.projection.peak_bytes - room_bytes)
    return best


def _proposal(tail: Tail, schedule: Schedule) -> TailPlan | None:
    """A schedule of a tail as moves; ``None`` if the region cannot run it."""
    region = build_region(tail.staged.problem, tail.choices)
    proposal = tail.plan(schedule, region)
    return None if proposal is None or replace(region, order=proposal.order).misplaced() is not None else proposal


def _fits(problem: Problem, planned: Planned, room_bytes: int) -> bool:
    return planned.projection.peak_bytes <= room_bytes and problem.fits_host(planned.projection.host_bytes)


def _smallest_with_tails(mixed: Mixed, best_bytes: int) -> Iterator[Planned]:
    """Of the same plans those that should need less than the smallest that is known."""
    problem = mixed.staged.problem
    if problem.host_budget_bytes == 0:
        return
    for tail in smallest_tails(mixed.staged, mixed.surveys):
        schedule = least_schedule(tail, "offload-dp")
        proposal = _proposal(tail, schedule)
        if proposal is None or tail.base_bytes + proposal.peak_bytes > best_bytes:
            continue
        planned = carry_out(problem, proposal.choices, proposal.order)
        if problem.fits_host(planned.projection.host_bytes):
            best_bytes = min(best_bytes, planned.projection.peak_bytes)
            yield planned


def _smallest_of_stages(mixed: Mixed, best_bytes: int) -> Iterator[Planned]:
    """The smallest plans that recompute stages, where they come near the smallest of strips."""
    proposal = mixed.smallest()
    if proposal is None or proposal.peak_bytes > _LEAST_OF_OPTIMAL * best_bytes:
        return
    yield carry_out(mixed.staged.problem, proposal.choices, proposal.order)
    for name in (*RECOMPUTING, *(OFFLOADING if mixed.staged.problem.host_budget_bytes != 0 else ())):
        found = _planned(mixed.staged, least(mixed.staged, name))
        if mixed.staged.problem.fits_host(found.projection.host_bytes):
            yield found


def _planned(staged: StagedModel, found: Scheduled) -> Planned:
    return Planned(staged.choices, staged.ordered(found.order), found.projection)


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


def _scheduled(problem: Problem, budget_bytes: int, name: str, rates: Rates) -> Planned:
    """The published schedule of that name."""
    room_bytes = budget_bytes - problem.resident_bytes
    staged = StagedModel(problem, rates)
    if not problem.training or len(staged.stages) < 2:  # there is nothing to recompute
        planned = carry_out(problem, staged.choices)
        fits = planned.projection.peak_bytes <= room_bytes
    else:
        found, fits = solve(staged, name, room_bytes)
        planned = _planned(staged, found)
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
        if survey.tiling.panel_cols <= max(_LEAST_PANEL_COLS, panel_cols(problem, options, survey.tiling.width, survey.tiling.width)):
            return
        num_panels *= 2


def _cheapest(problem: Problem, survey: Survey, room_bytes: int, known: float = float("inf")) -> tuple[float, Planned] | None:
    """The cheapest plan that fits and what it costs, as far as the survey and a few exact projections tell.

    What does not cost less than a plan that is known already (``known``) is not looked at: projecting a deep network takes seconds.
    """
    tried = np.zeros(survey.cost.shape, dtype=bool)
    error = 0.0  # how many bytes more than the survey says are needed
    best: tuple[float, Planned] | None = None
    for _ in range(_MAX_PROJECTIONS):
        candidate = survey.cheapest(room_bytes - error, tried)
        if candidate is None or candidate.cost > (known if best is None else _WORTH_ANOTHER_LOOK * best[0]):
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
        f"Raise the budget to {needed} bytes, give a smaller image, "
        f"{_without_outputs(problem, smallest)}{_over_the_host(problem)}{_of_repeats(problem)}"
        "or leave out options that force strategy, tile, state_every or state_slots.",
        needed_bytes=needed,
    )


def _over_the_host(problem: Problem) -> str:
    """A remedy where values could wait on the host for their backward pass, and may not."""
    if problem.host_budget_bytes != 0 or not problem.training:
        return ""
    return "let values wait on the host with Options(host_budget=...), "


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
