"""Plans with untiled stages, alone or after a tiled head: recomputed, offloaded to the host, or both.

Each proposal of a solver is materialized; the difference of its exact projection from the estimate corrects the budget of the next
proposal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sft.common.errors import BudgetError
from sft.planner.materialize import CERTAIN_SHARE, MAX_PROJECTIONS, WORTH_ANOTHER_LOOK, ProjectedPlan, materialize
from sft.planner.options import OFFLOAD_STRATEGIES
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import build_region
from sft.planner.search.published import JOINT_STRATEGY, RECOMPUTE_STRATEGIES, ProjectedSchedule, smallest_schedule, solve_staged
from sft.planner.search.tiled import CandidateGrid
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

#: Recomputation is searched only if the best plan costs more than this multiple of plain PyTorch's FLOPs.
WORTH_RECOMPUTING = 1.02
#: Most stages for the joint solver, which takes seconds on longer chains.
_MAX_JOINT_STAGES = 32
#: Schedules per solver and head; and heads for which the joint solver runs.
_MAX_TAILS, _MAX_JOINT_TAILS = 4, 1
#: The chain's schedule of least memory is not exactly the model's: another may need less, but at least its bytes over this factor.
_MIN_OF_OPTIMAL = 1.2
#: The chain counts a skip once per crossed cut, so its lower bound may exceed the room by this factor and a plan still fits.
_MIN_OF_CHAIN = 1.5


def cheapest_tiled_head(
    problem: PlanningProblem, heads: TiledHeadRecompute, room_bytes: int, worse_than: float
) -> tuple[float, ProjectedPlan] | None:
    """The cheapest fitting plan with a tiled head and recomputed stages that costs less than ``worse_than``, with its cost."""
    error, best = 0.0, None
    for _ in range(MAX_PROJECTIONS):
        proposal = heads.cheapest(room_bytes - error, worse_than if best is None else WORTH_ANOTHER_LOOK * best[0])
        if proposal is None:
            break
        planned = materialize(problem, proposal.choices, proposal.order)
        if planned.projection.peak_bytes <= room_bytes:
            best = (proposal.cost, planned)
        error += planned.projection.peak_bytes - room_bytes
    return best


def published_plans(staged: StagedModel, room_bytes: int) -> Iterator[tuple[float, ProjectedPlan]]:
    """Fitting plans of the published recomputation schedules, with their costs."""
    if _is_too_large(staged, room_bytes):
        return
    smallest_bytes = smallest_schedule(staged, "optimal").projection.peak_bytes
    if smallest_bytes > _MIN_OF_OPTIMAL * room_bytes:
        return  # no other solver needs so much less
    for name in RECOMPUTE_STRATEGIES:
        schedule, fits = solve_staged(staged, name, room_bytes)
        if fits:
            yield schedule.seconds * staged.rates.flops_per_second, scheduled_plan(staged, schedule)


def offloaded_plans(staged: StagedModel, room_bytes: int, worse_than: float) -> Iterator[tuple[float, ProjectedPlan]]:
    """Fitting plans of the offload schedules, alone and with recomputation, that may cost less than ``worse_than``, with their costs."""
    if staged.problem.host_budget_bytes == 0 or _is_too_large(staged, room_bytes):
        return
    may_copy = _offload_cost(staged, staged.chain, room_bytes - staged.base_bytes) < worse_than
    for name in (*(OFFLOAD_STRATEGIES if may_copy else ()), *([JOINT_STRATEGY] if len(staged.stages) <= _MAX_JOINT_STAGES else [])):
        schedule, fits = solve_staged(staged, name, room_bytes)
        if fits:
            yield schedule.seconds * staged.rates.flops_per_second, scheduled_plan(staged, schedule)


def offloaded_tail_plans(
    staged: StagedModel, grids: Sequence[CandidateGrid], room_bytes: int, worse_than: float
) -> Iterator[tuple[float, ProjectedPlan]]:
    """Fitting plans with a tiled head and an offloaded tail, alone and with recomputation, that may cost less than ``worse_than``."""
    if staged.problem.host_budget_bytes == 0:
        return
    num_joint = 0
    for tail in tiled_head_offloads(staged, grids, room_bytes):
        if tail.min_cost >= worse_than:
            return
        if stage_bound_bytes(tail.chain) > _MIN_OF_CHAIN * (room_bytes - tail.base_bytes):
            continue  # cheaper than a solver's search for its smallest budget
        cost = _offload_cost(staged, tail.chain, room_bytes - tail.base_bytes)
        if cost < worse_than:
            plan = _cheapest_tail(tail, "offload-dp", room_bytes)
            if plan is None:
                continue
            yield plan
            cost = plan[0]
            worse_than = min(worse_than, cost)
        # The joint solver takes seconds, and cannot gain where copies are hidden.
        is_slow = cost > WORTH_RECOMPUTING * tail.min_cost
        if is_slow and num_joint < _MAX_JOINT_TAILS and tail.chain.num_stages <= _MAX_JOINT_STAGES:
            num_joint += 1
            joint_plan = _cheapest_tail(tail, JOINT_STRATEGY, room_bytes)
            if joint_plan is not None:
                yield joint_plan
                worse_than = min(worse_than, joint_plan[0])


def _is_too_large(staged: StagedModel, room_bytes: int) -> bool:
    """True if a single stage surely needs more."""
    return CERTAIN_SHARE * stage_bound_bytes(staged.chain) > room_bytes


def _offload_cost(staged: StagedModel, chain: StageChain, room_bytes: int) -> float:
    """Lower bound of the cost of offloading without recomputation, in FLOPs."""
    return turn_bound_seconds(chain, budget_bytes=room_bytes, link=staged.problem.link) * staged.rates.flops_per_second


def _cheapest_tail(tail: TiledHeadOffload, name: str, room_bytes: int) -> tuple[float, ProjectedPlan] | None:
    """The cheapest fitting schedule of a solver for a tail, after a few exact projections, with its cost."""
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
    """A tail's schedule as schedule ops; ``None`` if the region cannot run it."""
    region = build_region(tail.staged.problem, tail.choices)
    proposal = tail.plan(schedule, region)
    return None if proposal is None or replace(region, custom_schedule=proposal.order).liveness.copy_error() is not None else proposal


def _fits(problem: PlanningProblem, planned: ProjectedPlan, room_bytes: int) -> bool:
    return planned.projection.peak_bytes <= room_bytes and problem.fits_host(planned.projection.host_bytes)


def smallest_offloaded_tails(staged: StagedModel, grids: Sequence[CandidateGrid], best_bytes: int) -> Iterator[ProjectedPlan]:
    """Plans with a tiled head and an offloaded tail that should need fewer bytes than ``best_bytes``."""
    problem = staged.problem
    if problem.host_budget_bytes == 0:
        return
    for tail in smallest_tiled_head_offloads(staged, grids):
        schedule = smallest_tail_schedule(tail, "offload-dp")
        proposal = _tail_proposal(tail, schedule)
        if proposal is None or tail.base_bytes + proposal.peak_bytes > best_bytes:
            continue
        planned = materialize(problem, proposal.choices, proposal.order)
        if problem.fits_host(planned.projection.host_bytes):
            best_bytes = min(best_bytes, planned.projection.peak_bytes)
            yield planned


def smallest_staged_plans(heads: TiledHeadRecompute, best_bytes: int) -> Iterator[ProjectedPlan]:
    """Plans of least memory with recomputed or offloaded stages, if these come near ``best_bytes``."""
    staged, proposal = heads.staged, heads.smallest()
    if proposal is None or proposal.peak_bytes > _MIN_OF_OPTIMAL * best_bytes:
        return
    yield materialize(staged.problem, proposal.choices, proposal.order)
    for name in (*RECOMPUTE_STRATEGIES, *(OFFLOAD_STRATEGIES if staged.problem.host_budget_bytes != 0 else ())):
        plan = scheduled_plan(staged, smallest_schedule(staged, name))
        if staged.problem.fits_host(plan.projection.host_bytes):
            yield plan


def scheduled_plan(staged: StagedModel, schedule: ProjectedSchedule) -> ProjectedPlan:
    """The plan that runs the stages by a schedule."""
    return ProjectedPlan(staged.choices, staged.with_schedule(schedule.order), schedule.projection)
