"""What every strategy is to its callers, and what strategies that try a few schedules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice
from typing import Protocol

from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError
from sft.solvers.chain import HostLink, StageChain
from sft.solvers.schedule import Operation, Schedule
from sft.solvers.simulate import simulate

__all__ = ["CandidatePlans", "Solver", "budget_error", "evaluate_plans", "fastest_fitting", "pick_plan"]

#: For a chain, what makes its lists of operations: of long ones no more than one is held at a time.
CandidatePlans = Callable[[StageChain], Iterable[Callable[[], tuple[Operation, ...]]]]


class Solver(Protocol):
    """A strategy: a chain and budgets in, a schedule out.

    Every solver promises: the schedule is valid; what the simulator says that it holds is at most ``budget_bytes`` on the device and
    ``host_budget_bytes`` on the host (None is no limit); if it finds none, it raises a :class:`BudgetError` whose ``needed_bytes`` is a
    budget with which it does.
    """

    def __call__(
        self, chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None
    ) -> Schedule:
        """Solve."""
        ...


def fastest_fitting(chain: StageChain, strategy: str, plans: CandidatePlans, budget_bytes: int, link: HostLink | None) -> Schedule:
    """Of several lists of operations the one that the simulator finds fastest inside the budget (then the smallest).

    Args:
        chain: times and bytes.
        strategy: whose they are.
        plans: makes the lists, whatever the budget is.
        budget_bytes: what the device may hold.
        link: the link to the host; the default of :class:`HostLink` if none is given.

    Raises:
        BudgetError: none fits.
    """
    every = evaluate_plans(chain, strategy, plans, link)
    fitting = [number for number, (_, peak_bytes) in enumerate(every) if peak_bytes <= budget_bytes]
    if not fitting:
        raise budget_error(strategy, budget_bytes, min(peak_bytes for _, peak_bytes in every))
    return pick_plan(chain, strategy, plans, min(fitting, key=lambda number: every[number]))


# Budgets are corrected by what a plan turns out to need, so the same chain is asked about several times.
@lru_cache(maxsize=32)
def evaluate_plans(chain: StageChain, strategy: str, plans: CandidatePlans, link: HostLink | None) -> tuple[tuple[float, int], ...]:
    """Seconds and peak bytes of all plans, in order."""
    simulated = (simulate(chain, Schedule(strategy=strategy, operations=make()), link=link) for make in plans(chain))
    return tuple((found.seconds, found.peak_bytes) for found in simulated)


def pick_plan(chain: StageChain, strategy: str, plans: CandidatePlans, number: int) -> Schedule:
    """One of the plans."""
    make = next(islice(plans(chain), number, None))
    return Schedule(strategy=strategy, operations=make())


def budget_error(strategy: str, budget_bytes: int, needed_bytes: int) -> BudgetError:
    """The error of a strategy whose smallest schedule does not fit."""
    return BudgetError(
        f"strategy {strategy!r} needs {format_bytes(needed_bytes)} at least, the budget is {format_bytes(budget_bytes)}. "
        f"Raise the budget to {needed_bytes} bytes, or choose another strategy ('auto' tries them all).",
        needed_bytes=needed_bytes,
    )
