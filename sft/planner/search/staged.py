"""Plans with untiled stages, alone or after a tiled head: recomputed, offloaded to the host, or both.

Each proposal of a solver is materialized; the difference of its exact projection from the estimate corrects the budget of the next
proposal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sft.common.errors import BudgetError
from sft.planner.materialize import ProjectedPlan, least_peak_bytes, materialize
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import build_region
from sft.planner.search.published import JOINT_SOLVER, ProjectedSchedule, smallest_schedule, solve_staged
from sft.planner.search.tiled import CandidateGrid
from sft.planner.search.tiled_head import (
    TiledHeadOffload,
    TiledHeadOffloadPlan,
    TiledHeadRecompute,
    head_and_tail_peaks,
    smallest_tail_schedule,
    smallest_tiled_head_offloads,
    tiled_head_offloads,
)
from sft.planner.stages import StagedModel
from sft.solvers.chain import StageChain
from sft.solvers.lower_bounds import stage_bound_bytes, turn_bound_seconds
from sft.solvers.schedule import Schedule

__all__ = [
    "cheapest_tiled_head",
    "offloaded_plans",
    "offloaded_tail_plans",
    "published_plans",
    "scheduled_plan",
    "smallest_offloaded_tails",
    "smallest_staged_plans",
]


def cheapest_tiled_head(
    problem: PlanningProblem, heads: TiledHeadRecompute, room_bytes: int, worse_than: float
) -> tuple[float, ProjectedPlan] | None:
    """The cheapest fitting plan with a tiled head and recomputed stages that costs less than ``worse_than``, with its cost.

    The exact projection of a proposal corrects the rooms of the next one: that of its tail by the difference, and that of its head by the
    least ratio of an estimate to it. With one room for both, a head that does not fit is proposed again with one tail after the other.
    """
    tail_error, ratios, best = 0.0, list[float](), None
    for _ in range(problem.limits.max_projections):
        proposal = heads.cheapest(
            room_bytes - tail_error,
            worse_than if best is None else problem.limits.further_cost_share * best[0],
            head_room_bytes=room_bytes * min(ratios, default=1.0),
        )
        if proposal is None:
            break
        plan = materialize(problem, proposal.choices, proposal.order)
        if plan.projection.peak_bytes <= room_bytes:
            best = (proposal.cost, plan)
        head_bytes, tail_bytes = head_and_tail_peaks(plan)
        ratios += [proposal.head_peak_bytes / head_bytes] if head_bytes else []
        tail_error += max(tail_bytes, min(head_bytes, room_bytes)) - room_bytes
    return best


def published_plans(staged: StagedModel, room_bytes: int) -> Iterator[tuple[float, ProjectedPlan]]:
    """Fitting plans of the published recomputation schedules, with their costs."""
    if _is_too_large(staged, room_bytes):
        return
    smallest_bytes = smallest_schedule(staged, "optimal").projection.peak_bytes
    if smallest_bytes > staged.problem.limits.optimal_bytes_factor * room_bytes:
        return  # no other solver needs so much less
    for name in staged.problem.limits.recompute_solvers:
        schedule, fits = solve_staged(staged, name, room_bytes)
        if fits:
            yield schedule.seconds * staged.rates.flops_per_second, scheduled_plan(staged, schedule)


def offloaded_plans(staged: StagedModel, room_bytes: int, worse_than: float) -> Iterator[tuple[float, ProjectedPlan]]:
    """Fitting plans of the offload schedules that may cost less than ``worse_than``, with their costs."""
    if staged.problem.resources.host_budget_bytes == 0 or _is_too_large(staged, room_bytes):
        return
    may_copy = _offload_cost(staged, staged.chain, room_bytes - staged.base_bytes) < worse_than
    limits = staged.problem.limits
    tries_joint = len(staged.stages) <= limits.max_joint_stages
    for name in (*(limits.offload_solvers if may_copy else ()), *([JOINT_SOLVER] if tries_joint else [])):
        schedule, fits = solve_staged(staged, name, room_bytes)
        if fits:
            yield schedule.seconds * staged.rates.flops_per_second, scheduled_plan(staged, schedule)


def offloaded_tail_plans(
    staged: StagedModel, grids: Sequence[CandidateGrid], room_bytes: int, worse_than: float
) -> Iterator[tuple[float, ProjectedPlan]]:
    """Fitting plans with a tiled head and an offloaded tail that may cost less than ``worse_than``."""
    if staged.problem.resources.host_budget_bytes == 0:
        return
    num_joint, limits = 0, staged.problem.limits
    for tail in tiled_head_offloads(staged, grids, room_bytes):
        if tail.min_cost >= worse_than:
            return
        if stage_bound_bytes(tail.chain) > limits.chain_bytes_factor * (room_bytes - tail.base_bytes):
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
        is_slow = cost > limits.recompute_cost * tail.min_cost
        if is_slow and num_joint < limits.max_joint_heads and tail.chain.num_stages <= limits.max_joint_stages:
            num_joint += 1
            joint_plan = _cheapest_tail(tail, JOINT_SOLVER, room_bytes)
            if joint_plan is not None:
                yield joint_plan
                worse_than = min(worse_than, joint_plan[0])


def _is_too_large(staged: StagedModel, room_bytes: int) -> bool:
    """True if a single stage surely needs more."""
    return staged.problem.limits.certain_bytes_share * stage_bound_bytes(staged.chain) > room_bytes


def _offload_cost(staged: StagedModel, chain: StageChain, room_bytes: int) -> float:
    """Lower bound of the cost of offloading without recomputation, in FLOPs."""
    return turn_bound_seconds(chain, budget_bytes=room_bytes, link=staged.problem.resources.link) * staged.rates.flops_per_second


def _cheapest_tail(tail: TiledHeadOffload, name: str, room_bytes: int) -> tuple[float, ProjectedPlan] | None:
    """The cheapest fitting schedule of a solver for a tail, after a few exact projections, with its cost."""
    best: tuple[float, ProjectedPlan] | None = None
    budget_bytes, tried, limits = room_bytes - tail.base_bytes, set[int](), tail.staged.problem.limits
    for _ in range(limits.max_tail_rounds):
        if budget_bytes < 1 or budget_bytes in tried:
            break
        tried.add(budget_bytes)
        try:
            schedule = tail.schedule(name, budget_bytes)
        except BudgetError as refusal:
            budget_bytes = refusal.needed_bytes
            if budget_bytes > limits.chain_bytes_factor * (room_bytes - tail.base_bytes):
                break
            continue
        proposal = _tail_proposal(tail, schedule)
        if proposal is None:
            break
        plan = materialize(tail.staged.problem, proposal.choices, proposal.order)
        if plan.projection.fits(tail.staged.problem.resources, room_bytes) and (best is None or proposal.cost < best[0]):
            best = (proposal.cost, plan)
        budget_bytes = proposal.peak_bytes - (plan.projection.peak_bytes - room_bytes)
    return best


def _tail_proposal(tail: TiledHeadOffload, schedule: Schedule) -> TiledHeadOffloadPlan | None:
    """A tail's schedule as schedule ops; ``None`` if the region cannot run it."""
    region = build_region(tail.staged.problem, tail.choices)
    proposal = tail.plan(schedule, region)
    return None if proposal is None or replace(region, custom_schedule=proposal.order).liveness.copy_error() is not None else proposal


def smallest_offloaded_tails(staged: StagedModel, grids: Sequence[CandidateGrid], best_bytes: float) -> Iterator[ProjectedPlan]:
    """Plans with a tiled head and an offloaded tail that should need fewer bytes than ``best_bytes``."""
    problem = staged.problem
    if problem.resources.host_budget_bytes == 0:
        return
    for tail in smallest_tiled_head_offloads(staged, grids):
        schedule = smallest_tail_schedule(tail)
        proposal = _tail_proposal(tail, schedule)
        if proposal is None or tail.base_bytes + proposal.peak_bytes > best_bytes:
            continue
        if least_peak_bytes(problem, proposal.choices, proposal.order) >= best_bytes:
            continue
        plan = materialize(problem, proposal.choices, proposal.order)
        if problem.resources.fits_host(plan.projection.host_bytes):
            best_bytes = min(best_bytes, plan.projection.peak_bytes)
            yield plan


def smallest_staged_plans(heads: TiledHeadRecompute, best_bytes: float) -> Iterator[ProjectedPlan]:
    """Plans of least memory with recomputed or offloaded stages, if these come near ``best_bytes``."""
    staged, proposal = heads.staged, heads.smallest()
    if proposal is None or proposal.peak_bytes > staged.problem.limits.optimal_bytes_factor * best_bytes:
        return
    if least_peak_bytes(staged.problem, proposal.choices, proposal.order) < best_bytes:
        yield materialize(staged.problem, proposal.choices, proposal.order)
    limits, may_copy = staged.problem.limits, staged.problem.resources.host_budget_bytes != 0
    for name in (*limits.smallest_solvers, *(limits.offload_solvers if may_copy else ())):
        plan = scheduled_plan(staged, smallest_schedule(staged, name))
        if staged.problem.resources.fits_host(plan.projection.host_bytes):
            yield plan


def scheduled_plan(staged: StagedModel, schedule: ProjectedSchedule) -> ProjectedPlan:
    """The plan that runs the stages by a schedule."""
    return ProjectedPlan(staged.choices, staged.with_schedule(schedule.order), schedule.projection)
