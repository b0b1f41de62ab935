"""Plans with stages behind strips, or without any strips: run again, waiting on the host, or both.

What the solvers propose is carried out, which says what it needs exactly, and their budget is corrected by what they were off by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sft.errors import BudgetError
from sft.options import OFFLOADING
from sft.plan.build import build_region
from sft.plan.carried import CERTAIN_SHARE, MAX_PROJECTIONS, WORTH_ANOTHER_LOOK, Planned, carry_out
from sft.plan.chain.bound import stage_bound_bytes, turn_bound_seconds
from sft.plan.chain.chain import Chain
from sft.plan.chain.schedule import Schedule
from sft.plan.mixed import Mixed
from sft.plan.problem import Problem
from sft.plan.stages import StagedModel
from sft.plan.strategy_chain import JOINT, RECOMPUTING, Scheduled, least, solve
from sft.plan.tails import Tail, TailPlan, least_schedule, smallest_tails, tails

__all__ = [
    "WORTH_RECOMPUTING",
    "cheapest_mixed",
    "offloaded",
    "published",
    "scheduled_plan",
    "smallest_of_stages",
    "smallest_with_tails",
    "with_tails",
]

#: A plan that costs at most so much more than plain PyTorch is not worth looking for stages to run again.
WORTH_RECOMPUTING = 1.02
#: The solver that recomputes and copies takes seconds where there are more stages.
_MOST_JOINT_STAGES = 32
#: Schedules that are looked at of one solver for one head; and heads for which both recomputation and copies are.
_MAX_TAILS, _MOST_JOINT_TAILS = 4, 1
#: The chain's schedule of least memory is not quite the model's: another may need less than this share of it, but not by much.
_LEAST_OF_OPTIMAL = 1.2
#: What a chain needs at least by its accounts, which count a skip at each cut that it crosses, may be too much by so far and still fit.
_LEAST_OF_CHAIN = 1.5


def cheapest_mixed(problem: Problem, mixed: Mixed, room_bytes: int, worse_than: float) -> tuple[float, Planned] | None:
    """The cheapest mixed plan that fits and costs less than one that is known, as far as a few exact projections tell."""
    error, best = 0.0, None
    for _ in range(MAX_PROJECTIONS):
        proposal = mixed.cheapest(room_bytes - error, worse_than if best is None else WORTH_ANOTHER_LOOK * best[0])
        if proposal is None:
            break
        planned = carry_out(problem, proposal.choices, proposal.order)
        if planned.projection.peak_bytes <= room_bytes:
            best = (proposal.cost, planned)
        error += planned.projection.peak_bytes - room_bytes
    return best


def published(staged: StagedModel, room_bytes: int) -> Iterator[tuple[float, Planned]]:
    """What the published schedules make of the stages, where they fit, so that no plan is worse than theirs."""
    if _is_too_large(staged, room_bytes):
        return
    optimal = least(staged, "optimal").projection.peak_bytes
    if optimal > _LEAST_OF_OPTIMAL * room_bytes:
        return  # no other needs so much less
    for name in RECOMPUTING:
        found, fits = solve(staged, name, room_bytes)
        if fits:
            yield found.seconds * staged.rates.flops_per_second, scheduled_plan(staged, found)


def offloaded(staged: StagedModel, room_bytes: int, worse_than: float) -> Iterator[tuple[float, Planned]]:
    """The same of what the schedules make that copy to the host, alone and together with recomputation, and may cost less."""
    if staged.problem.host_budget_bytes == 0 or _is_too_large(staged, room_bytes):
        return
    may_copy = _cost_of_copies(staged, staged.chain, room_bytes - staged.base_bytes) < worse_than
    for name in (*(OFFLOADING if may_copy else ()), *([JOINT] if len(staged.stages) <= _MOST_JOINT_STAGES else [])):
        found, fits = solve(staged, name, room_bytes)
        if fits:
            yield found.seconds * staged.rates.flops_per_second, scheduled_plan(staged, found)


def with_tails(mixed: Mixed, room_bytes: int, worse_than: float) -> Iterator[tuple[float, Planned]]:
    """Plans with strips in front whose other stages wait on the host, alone and together with recomputation, that may cost less."""
    staged = mixed.staged
    if staged.problem.host_budget_bytes == 0:
        return
    num_joint = 0
    for tail in tails(staged, mixed.surveys, room_bytes):
        if tail.least_cost >= worse_than:
            return
        if stage_bound_bytes(tail.chain) > _LEAST_OF_CHAIN * (room_bytes - tail.base_bytes):
            continue  # what a solver's search for its least budget would find out
        copies = _cost_of_copies(staged, tail.chain, room_bytes - tail.base_bytes)
        if copies < worse_than:
            found = _cheapest_tail(tail, "offload-dp", room_bytes)
            if found is None:
                continue
            yield found
            copies = found[0]
            worse_than = min(worse_than, copies)
        # The solver of both takes seconds, and has nothing to gain where copies are hidden.
        is_slow = copies > WORTH_RECOMPUTING * tail.least_cost
        if is_slow and num_joint < _MOST_JOINT_TAILS and tail.chain.num_stages <= _MOST_JOINT_STAGES:
            num_joint += 1
            both = _cheapest_tail(tail, JOINT, room_bytes)
            if both is not None:
                yield both
                worse_than = min(worse_than, both[0])


def _is_too_large(staged: StagedModel, room_bytes: int) -> bool:
    """Whether a stage alone surely needs more."""
    return CERTAIN_SHARE * stage_bound_bytes(staged.chain) > room_bytes


def _cost_of_copies(staged: StagedModel, chain: Chain, room_bytes: int) -> float:
    """What copying to the host costs at least where nothing runs again, in FLOPs."""
    return turn_bound_seconds(chain, budget_bytes=room_bytes, link=staged.problem.link) * staged.rates.flops_per_second


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
            if budget_bytes > _LEAST_OF_CHAIN * (room_bytes - tail.base_bytes):
                break
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
    return None if proposal is None or replace(region, order=proposal.order).lifetimes.misplaced() is not None else proposal


def _fits(problem: Problem, planned: Planned, room_bytes: int) -> bool:
    return planned.projection.peak_bytes <= room_bytes and problem.fits_host(planned.projection.host_bytes)


def smallest_with_tails(mixed: Mixed, best_bytes: int) -> Iterator[Planned]:
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


def smallest_of_stages(mixed: Mixed, best_bytes: int) -> Iterator[Planned]:
    """The smallest plans that recompute stages, where they come near the smallest of strips."""
    proposal = mixed.smallest()
    if proposal is None or proposal.peak_bytes > _LEAST_OF_OPTIMAL * best_bytes:
        return
    yield carry_out(mixed.staged.problem, proposal.choices, proposal.order)
    for name in (*RECOMPUTING, *(OFFLOADING if mixed.staged.problem.host_budget_bytes != 0 else ())):
        found = scheduled_plan(mixed.staged, least(mixed.staged, name))
        if mixed.staged.problem.fits_host(found.projection.host_bytes):
            yield found


def scheduled_plan(staged: StagedModel, found: Scheduled) -> Planned:
    return Planned(staged.choices, staged.ordered(found.order), found.projection)
