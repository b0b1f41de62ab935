"""Strategies that recompute stages, or copy to the host: the published schedules (``sft.solvers``) on a model in stages
(``sft.planner.stages``).

A solver sees the chain and a budget for it. Its schedule is projected exactly; what the chain was wrong by (gradients of parameters that do
not exist yet, skips counted twice) is what the next round's budget is corrected by. The fastest schedule that fits is the plan. When none
does, the smallest that was seen is named, and its budget will work: it is the first that every round tries.
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

__all__ = ["JOINT_STRATEGY", "RECOMPUTE_STRATEGIES", "ProjectedSchedule", "smallest_schedule", "solve_staged"]

#: The strategies that run stages again, by name.
RECOMPUTE_STRATEGIES = ("sqrt", "revolve", "bisect", "optimal", "acg")
#: The solver of the chain that does both.
JOINT_STRATEGY = "auto"

_MAX_ROUNDS = 10
_MAX_JOINT_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedSchedule:
    """A schedule and what it costs.

    Attributes:
        schedule: for the chain.
        order: for the segments.
        seconds: of the chain.
        projection: exact bytes and FLOPs.
    """

    schedule: Schedule
    order: SegmentSchedule
    seconds: float
    projection: Projection


def solve_staged(staged: StagedModel, name: str, room_bytes: int) -> tuple[ProjectedSchedule, bool]:
    """The fastest schedule found whose step fits in ``room_bytes`` and on the host, and that it does; else the smallest found, and that it
    does not."""
    plain = _project_schedule(staged, Schedule(strategy=name, operations=reversal(staged.chain, keep_all)))
    if plain.projection.peak_bytes <= room_bytes:
        return plain, True
    # The joint solver's smallest is one of these, or hardly smaller; asking it would take as long as all the rest.
    names = ("optimal", "offload-dp") if name == JOINT_STRATEGY else (name,)
    smallest = min(plain, *(smallest_schedule(staged, other) for other in names), key=lambda found: found.projection.peak_bytes)
    if smallest.projection.peak_bytes > room_bytes:
        return smallest, False
    best = smallest if staged.problem.fits_host(smallest.projection.host_bytes) else None
    for found in _correction_rounds(staged, name, room_bytes):
        fits = found.projection.peak_bytes <= room_bytes and staged.problem.fits_host(found.projection.host_bytes)
        if fits and (best is None or found.seconds < best.seconds):
            best = found
    return (smallest, False) if best is None else (best, True)


def _correction_rounds(staged: StagedModel, name: str, room_bytes: int) -> Iterator[ProjectedSchedule]:
    """Schedules for budgets that are corrected by what the last one was off by, then halfway between what fits and what does not."""
    low, high, tried = 0, 0, set[int]()
    budget_bytes = room_bytes - staged.base_bytes
    for _ in range(_MAX_JOINT_ROUNDS if name == JOINT_STRATEGY else _MAX_ROUNDS):
        if budget_bytes in tried or budget_bytes < 1:
            return
        tried.add(budget_bytes)
        try:
            problem = staged.problem
            schedule = get_solver(name)(
                staged.chain, budget_bytes=budget_bytes, host_budget_bytes=problem.host_budget_bytes, link=problem.link
            )
        except BudgetError as refusal:
            low, budget_bytes = budget_bytes, refusal.needed_bytes
            continue
        found = _project_schedule(staged, schedule)
        yield found
        excess_bytes = found.projection.peak_bytes - room_bytes
        low, high = (low, budget_bytes) if excess_bytes > 0 else (budget_bytes, high)
        budget_bytes = simulate(staged.chain, schedule, link=problem.link).peak_bytes - excess_bytes
        if high and not low < budget_bytes < high:
            budget_bytes = (low + high) // 2


def smallest_schedule(staged: StagedModel, name: str) -> ProjectedSchedule:
    """The schedule of least memory that the solver knows, on a host of any size."""
    link = staged.problem.link
    try:
        schedule = get_solver(name)(staged.chain, budget_bytes=1, link=link)
    except BudgetError as refusal:
        schedule = get_solver(name)(staged.chain, budget_bytes=refusal.needed_bytes, link=link)
    return _project_schedule(staged, schedule)


def _project_schedule(staged: StagedModel, schedule: Schedule) -> ProjectedSchedule:
    order = drop_idle_copies(staged.region, staged.order(schedule.operations))
    return ProjectedSchedule(
        schedule=schedule,
        order=order,
        seconds=simulate(staged.chain, schedule, link=staged.problem.link).seconds,
        projection=project_step(staged.problem, staged.ordered(order)),
    )
