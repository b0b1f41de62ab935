"""Plans with stages behind strips, or without any strips: run again, waiting on the host, or both.

What the solvers propose is carried out, which says what it needs exactly, and their budget is corrected by what they were off by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sft.common.errors import BudgetError
from sft.planner.materialize import CERTAIN_SHARE, MAX_PROJECTIONS, WORTH_ANOTHER_LOOK, ProjectedPlan, materialize
from sft.planner.options import OFFLOAD_STRATEGIES
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import build_region
from sft.planner.search.published import JOINT_STRATEGY, RECOMPUTE_STRATEGIES, ProjectedSchedule, smallest_schedule, solve_staged
from sft.planner.search.tiled_head import (
    TiledHeadOffload,
    TiledHeadOffloadPlan,
    TiledHeadRecompute,
    smallest_tail_schedule,
    smallest_tiled_head_offloads,
    tiled_head_offloads,
)
from sft.planner.stages import StagedModel
from sft.solvers.chain import StageChain
from sft.solvers.lower_bounds import stage_bound_bytes, turn_bound_seconds
from sft.solvers.schedule import Schedule

__all__ = [
    "WORTH_RECOMPUTING",
    "cheapest_tiled_head",
    "offloaded_plans",
    "offloaded_tail_plans",
    "published_plans",
    "scheduled_plan",
    "smallest_offloaded_tails",
    "smallest_staged_plans",
]

#: A plan that costs at most so much more than plain PyTorch is not worth looking for stages to run again.
WORTH_RECOMPUTING = 1.02
#: The solver that recomputes and copies takes seconds where there are more stages.
_MAX_JOINT_STAGES = 32
#: Schedules that are looked at of one solver for one head; and heads for which both recomputation and copies are.
_MAX_TAILS, _MAX_JOINT_TAILS = 4, 1
#: The chain's schedule of least memory is not quite the model's: another may need less than this share of it, but not by much.
_MIN_OF_OPTIMAL = 1.2
#: What a chain needs at least by its accounts, which count a skip at each cut that it crosses, may be too much by so far and still fit.
_MIN_OF_CHAIN = 1.5


def cheapest_tiled_head(
    problem: PlanningProblem, mixed: TiledHeadRecompute, room_bytes: int, worse_than: float
) -> tuple[float, ProjectedPlan] | None:
    """The cheapest mixed plan that fits and costs less than one that is known, as far as a few exact projections tell."""
    error, best = 0.0, None
    for _ in range(MAX_PROJECTIONS):
        proposal = mixed.cheapest(room_bytes - error, worse_than if best is None else WORTH_ANOTHER_LOOK * best[0])
        if proposal is None:
            break
        planned = materialize(problem, proposal.choices, proposal.order)
        if planned.projection.peak_bytes <= room_bytes:
            best = (proposal.cost, planned)
        error += planned.projection.peak_bytes - room_bytes
    return best


def published_plans(staged: StagedModel, room_bytes: int) -> Iterator[tuple[float, ProjectedPlan]]:
    """What the published schedules make of the stages, where they fit, so that no plan is worse than theirs."""
    if _is_too_large(staged, room_bytes):
        return
    optimal = smallest_schedule(staged, "optimal").projection.peak_bytes
    if optimal > _MIN_OF_OPTIMAL * room_bytes:
        return  # no other needs so much less
    for name in RECOMPUTE_STRATEGIES:
        found, fits = solve_staged(staged, name, room_bytes)
        if fits:
            yield found.seconds * staged.rates.flops_per_second, scheduled_plan(staged, found)


def offloaded_plans(staged: StagedModel, room_bytes: int, worse_than: float) -> Iterator[tuple[float, ProjectedPlan]]:
    """The same of what the schedules make that copy to the host, alone and together with recomputation, and may cost less."""
    if staged.problem.host_budget_bytes == 0 or _is_too_large(staged, room_bytes):
        return
    may_copy = _offload_cost(staged, staged.chain, room_bytes - staged.base_bytes) < worse_than
    for name in (*(OFFLOAD_STRATEGIES if may_copy else ()), *([JOINT_STRATEGY] if len(staged.stages) <= _MAX_JOINT_STAGES else [])):
        found, fits = solve_staged(staged, name, room_bytes)
        if fits:
            yield found.seconds * staged.rates.flops_per_second, scheduled_plan(staged, found)


def offloaded_tail_plans(mixed: TiledHeadRecompute, room_bytes: int, worse_than: float) -> Iterator[tuple[float, ProjectedPlan]]:
    """Plans with strips in front whose other stages wait on the host, alone and together with recomputation, that may cost less."""
    staged = mixed.staged
    if staged.problem.host_budget_bytes == 0:
        return
    num_joint = 0
    for tail in tiled_head_offloads(staged, mixed.surveys, room_bytes):
        if tail.min_cost >= worse_than:
            return
        if stage_bound_bytes(tail.chain) > _MIN_OF_CHAIN * (room_bytes - tail.base_bytes):
            continue  # what a solver's search for its least budget would find out
        copies = _offload_cost(staged, tail.chain, room_bytes - tail.base_bytes)
        if copies < worse_than:
            found = _cheapest_tail(tail, "offload-dp", room_bytes)
            if found is None:
                continue
            yield found
            copies = found[0]
            worse_than = min(worse_than, copies)
        # The solver of both takes seconds, and has nothing to gain where copies are hidden.
        is_slow = copies > WORTH_RECOMPUTING * tail.min_cost
        if is_slow and num_joint < _MAX_JOINT_TAILS and tail.chain.num_stages <= _MAX_JOINT_STAGES:
            num_joint += 1
            both = _cheapest_tail(tail, JOINT_STRATEGY, room_bytes)
            if both is not None:
                yield both
                worse_than = min(worse_than, both[0])


def _is_too_large(staged: StagedModel, room_bytes: int) -> bool:
    """Whether a stage alone surely needs more."""
    return CERTAIN_SHARE * stage_bound_bytes(staged.chain) > room_bytes


def _offload_cost(staged: StagedModel, chain: StageChain, room_bytes: int) -> float:
    """What copying to the host costs at least where nothing runs again, in FLOPs."""
    return turn_bound_seconds(chain, budget_bytes=room_bytes, link=staged.problem.link) * staged.rates.flops_per_second


def _cheapest_tail(tail: TiledHeadOffload, name: str, room_bytes: int) -> tuple[float, ProjectedPlan] | None:
    """The cheapest schedule of a solver that fits, as far as a few exact projections tell."""
    best: tuple[float, ProjectedPlan] | None = None
    budget_bytes, tried = room_bytes - tail.base_bytes, set[int]()
    for _ in range(_MAX_TAILS):
        if budget_bytes < 1 or budget_bytes in tried:
            break
        tried.add(budget_bytes)
        try:
            schedule = tail.schedule(name, budget_bytes)
        except BudgetError as refusal:
            budget_bytes = refusal.needed_bytes
            if budget_bytes > _MIN_OF_CHAIN * (room_bytes - tail.base_bytes):
                break
            continue
        proposal = _tail_proposal(tail, schedule)
        if proposal is None:
            break
        planned = materialize(tail.staged.problem, proposal.choices, proposal.order)
        if _fits(tail.staged.problem, planned, room_bytes) and (best is None or proposal.cost < best[0]):
            best = (proposal.cost, planned)
        budget_bytes = proposal.peak_bytes - (planned.projection.peak_bytes - room_bytes)
    return best


def _tail_proposal(tail: TiledHeadOffload, schedule: Schedule) -> TiledHeadOffloadPlan | None:
    """A schedule of a tail as moves; ``None`` if the region cannot run it."""
    region = build_region(tail.staged.problem, tail.choices)
    proposal = tail.plan(schedule, region)
    return None if proposal is None or replace(region, custom_schedule=proposal.order).liveness.copy_error() is not None else proposal


def _fits(problem: PlanningProblem, planned: ProjectedPlan, room_bytes: int) -> bool:
    return planned.projection.peak_bytes <= room_bytes and problem.fits_host(planned.projection.host_bytes)


def smallest_offloaded_tails(mixed: TiledHeadRecompute, best_bytes: int) -> Iterator[ProjectedPlan]:
    """Of the same plans those that should need less than the smallest that is known."""
    problem = mixed.staged.problem
    if problem.host_budget_bytes == 0:
        return
    for tail in smallest_tiled_head_offloads(mixed.staged, mixed.surveys):
        schedule = smallest_tail_schedule(tail, "offload-dp")
        proposal = _tail_proposal(tail, schedule)
        if proposal is None or tail.base_bytes + proposal.peak_bytes > best_bytes:
            continue
        planned = materialize(problem, proposal.choices, proposal.order)
        if problem.fits_host(planned.projection.host_bytes):
            best_bytes = min(best_bytes, planned.projection.peak_bytes)
            yield planned


def smallest_staged_plans(mixed: TiledHeadRecompute, best_bytes: int) -> Iterator[ProjectedPlan]:
    """The smallest plans that recompute stages, where they come near the smallest of strips."""
    proposal = mixed.smallest()
    if proposal is None or proposal.peak_bytes > _MIN_OF_OPTIMAL * best_bytes:
        return
    yield materialize(mixed.staged.problem, proposal.choices, proposal.order)
    for name in (*RECOMPUTE_STRATEGIES, *(OFFLOAD_STRATEGIES if mixed.staged.problem.host_budget_bytes != 0 else ())):
        found = scheduled_plan(mixed.staged, smallest_schedule(mixed.staged, name))
        if mixed.staged.problem.fits_host(found.projection.host_bytes):
            yield found


def scheduled_plan(staged: StagedModel, found: ProjectedSchedule) -> ProjectedPlan:
    return ProjectedPlan(staged.choices, staged.ordered(found.order), found.projection)
