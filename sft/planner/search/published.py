"""Published schedules: recomputation and offload solvers (``sft.solvers``) on a staged model (``sft.planner.stages``).

A solver gets the chain and a byte budget for it. Its schedule is projected exactly. The chain's error (gradients of parameters that do not
exist yet, skips counted twice) corrects the budget of the next round. The fastest schedule that fits is the plan. If none does, the
smallest one is reported, and its peak is a budget that works: every search tries that schedule first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sft.common.errors import BudgetError
from sft.planner.offload_moves import drop_idle_copies
from sft.planner.projection import Projection, project_step
from sft.planner.stages import StagedModel
from sft.runtime.moves import SegmentSchedule
from sft.solvers.registry import get_solver
from sft.solvers.reversal import keep_all, reversal
from sft.solvers.schedule import Schedule
from sft.solvers.simulate import simulate

__all__ = ["JOINT_SOLVER", "RECOMPUTE_STRATEGIES", "ProjectedSchedule", "smallest_schedule", "solve_staged"]

#: Names of the recomputation strategies.
RECOMPUTE_STRATEGIES = ("sqrt", "revolve", "bisect", "optimal", "acg")
#: Registry name of the solver that combines recomputation and offloading.
JOINT_SOLVER = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedSchedule:
    """A chain schedule with its projection.

    Attributes:
        schedule: schedule of the chain.
        order: schedule of the segments.
        seconds: simulated seconds of the chain.
        projection: exact bytes and FLOPs.
    """

    schedule: Schedule
    order: SegmentSchedule
    seconds: float
    projection: Projection


def solve_staged(staged: StagedModel, name: str, room_bytes: int) -> tuple[ProjectedSchedule, bool]:
    """Find the fastest schedule of a solver that fits.

    Returns:
        The schedule and true; if none fits into ``room_bytes`` and the host budget, the smallest schedule and false.
    """
    plain = _project_schedule(staged, Schedule(strategy=name, operations=reversal(staged.chain, keep_all)))
    if plain.projection.peak_bytes <= room_bytes:
        return plain, True
    # The smallest schedule of the joint solver is one of these, or hardly smaller; computing it would take as long as all other rounds.
    names = ("optimal", "offload-dp") if name == JOINT_SOLVER else (name,)
    candidates = (plain, *(smallest_schedule(staged, solver) for solver in names))
    smallest = min(candidates, key=lambda candidate: candidate.projection.peak_bytes)
    if smallest.projection.peak_bytes > room_bytes:
        return smallest, False
    best = smallest if staged.problem.resources.fits_host(smallest.projection.host_bytes) else None
    for candidate in _correction_rounds(staged, name, room_bytes):
        if candidate.projection.fits(staged.problem.resources, room_bytes) and (best is None or candidate.seconds < best.seconds):
            best = candidate
    return (smallest, False) if best is None else (best, True)


def _correction_rounds(staged: StagedModel, name: str, room_bytes: int) -> Iterator[ProjectedSchedule]:
    """Schedules for corrected budgets: shifted by the last projection error, then bisected between fitting and failing budgets."""
    low, high, tried_budgets = 0, 0, set[int]()
    budget_bytes, limits = room_bytes - staged.base_bytes, staged.problem.limits
    for _ in range(limits.max_joint_rounds if name == JOINT_SOLVER else limits.max_rounds):
        if budget_bytes in tried_budgets or budget_bytes < 1:
            return
        tried_budgets.add(budget_bytes)
        try:
            problem = staged.problem
            schedule = get_solver(name)(
                staged.chain, budget_bytes=budget_bytes, host_budget_bytes=problem.resources.host_budget_bytes, link=problem.resources.link
            )
        except BudgetError as refusal:
            low, budget_bytes = budget_bytes, refusal.needed_bytes
            continue
        candidate = _project_schedule(staged, schedule)
        yield candidate
        excess_bytes = candidate.projection.peak_bytes - room_bytes
        low, high = (low, budget_bytes) if excess_bytes > 0 else (budget_bytes, high)
        budget_bytes = simulate(staged.chain, schedule, link=problem.resources.link).peak_bytes - excess_bytes
        if high and not low < budget_bytes < high:
            budget_bytes = (low + high) // 2


def smallest_schedule(staged: StagedModel, name: str) -> ProjectedSchedule:
    """The solver's schedule of least memory, with an unlimited host; once for a problem."""
    return staged.problem.memo.memoize(("smallest schedule", name, staged.rates), lambda: _smallest_schedule(staged, name))


def _smallest_schedule(staged: StagedModel, name: str) -> ProjectedSchedule:
    link = staged.problem.resources.link
    try:
        schedule = get_solver(name)(staged.chain, budget_bytes=1, link=link)
    except BudgetError as refusal:
        schedule = get_solver(name)(staged.chain, budget_bytes=refusal.needed_bytes, link=link)
    return _project_schedule(staged, schedule)


def _project_schedule(staged: StagedModel, schedule: Schedule) -> ProjectedSchedule:
    order = drop_idle_copies(staged.region, staged.segment_schedule(schedule.operations))
    return ProjectedSchedule(
        schedule=schedule,
        order=order,
        seconds=simulate(staged.chain, schedule, link=staged.problem.resources.link).seconds,
        projection=project_step(staged.problem, staged.with_schedule(order)),
    )
