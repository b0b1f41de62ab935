"""What every strategy is to its callers, and what strategies that try a few schedules share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from sft.errors import BudgetError
from sft.plan.chain.chain import Chain
from sft.plan.chain.link import Link
from sft.plan.chain.schedule import Operation, Schedule
from sft.plan.chain.simulate import simulate
from sft.units import format_bytes

__all__ = ["Solver", "fastest_that_fits", "too_small"]


class Solver(Protocol):
    """A strategy: a chain and budgets in, a schedule out.

    Every solver promises: the schedule is valid; what the simulator says that it holds is at most ``budget_bytes`` on the device and
    ``host_budget_bytes`` on the host (None is no limit); if it finds none, it raises a :class:`BudgetError` whose ``needed_bytes`` is a
    budget with which it does.
    """

    def __call__(self, chain: Chain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: Link | None = None) -> Schedule:
        """Solve."""
        ...


def fastest_that_fits(
    chain: Chain, strategy: str, plans: Iterable[tuple[Operation, ...]], budget_bytes: int, link: Link | None
) -> Schedule:
    """Of several lists of operations the one that the simulator finds fastest inside the budget (then the smallest).

    Raises:
        BudgetError: none fits.
    """
    best: tuple[float, int, Schedule] | None = None
    least_bytes = -1
    for operations in plans:
        schedule = Schedule(strategy=strategy, operations=operations)
        found = simulate(chain, schedule, link=link)
        least_bytes = found.peak_bytes if least_bytes < 0 else min(least_bytes, found.peak_bytes)
        if found.peak_bytes <= budget_bytes and (best is None or (found.seconds, found.peak_bytes) < best[:2]):
            best = (found.seconds, found.peak_bytes, schedule)
    if best is None:
        raise too_small(strategy, budget_bytes, least_bytes)
    return best[2]


def too_small(strategy: str, budget_bytes: int, needed_bytes: int) -> BudgetError:
    """The error of a strategy whose smallest schedule does not fit."""
    return BudgetError(
        f"strategy {strategy!r} needs {format_bytes(needed_bytes)} at least, the budget is {format_bytes(budget_bytes)}. "
        f"Raise the budget to {needed_bytes} bytes, or choose another strategy ('auto' tries them all).",
        needed_bytes=needed_bytes,
    )
