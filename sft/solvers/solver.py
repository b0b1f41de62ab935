"""Solver protocol, and the choice of the fastest fitting schedule among a few candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice
from typing import Protocol

from sft.common.byte_units import format_bytes, size_at_least
from sft.common.errors import BudgetError
from sft.solvers.chain import HostLink, StageChain
from sft.solvers.schedule import Operation, Schedule
from sft.solvers.simulate import simulate

__all__ = ["CandidatePlans", "Solver", "budget_error", "evaluate_plans", "fastest_fitting", "pick_plan"]

#: Candidate schedules of a chain. Each is a function that builds the list of operations, so that one long list exists at a time.
CandidatePlans = Callable[[StageChain], Iterable[Callable[[], tuple[Operation, ...]]]]


class Solver(Protocol):
    """A strategy: a chain and budgets in, a schedule out.

    The schedule is valid for the chain. Simulated, it needs at most ``budget_bytes`` on the device and ``host_budget_bytes`` on the host
    (None is no limit). Without such a schedule the solver raises a :class:`BudgetError`, with a working budget in ``needed_bytes``.
    """

    def __call__(
        self, chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None
    ) -> Schedule:
        """Find a schedule."""
        ...


def fastest_fitting(chain: StageChain, strategy: str, plans: CandidatePlans, budget_bytes: int, link: HostLink | None) -> Schedule:
    """Return the candidate that simulates fastest within the budget; of equally fast ones the smallest.

    Args:
        chain: times and bytes.
        strategy: name of the strategy.
        plans: builds the candidates; they do not depend on the budget.
        budget_bytes: most bytes on the device.
        link: the link to the host. Default: `None`, a default :class:`HostLink`

    Raises:
        BudgetError: no candidate fits.
    """
    costs = evaluate_plans(chain, strategy, plans, link)
    fitting = [number for number, (_, peak_bytes) in enumerate(costs) if peak_bytes <= budget_bytes]
    if not fitting:
        raise budget_error(strategy, budget_bytes, min(peak_bytes for _, peak_bytes in costs))
    return pick_plan(chain, strategy, plans, min(fitting, key=lambda number: costs[number]))


# Callers correct a budget by the needs of a materialized plan, so a chain is solved several times.
@lru_cache(maxsize=32)
def evaluate_plans(chain: StageChain, strategy: str, plans: CandidatePlans, link: HostLink | None) -> tuple[tuple[float, int], ...]:
    """Simulated seconds and peak bytes of all candidates, in order."""
    simulations = (simulate(chain, Schedule(strategy=strategy, operations=build()), link=link) for build in plans(chain))
    return tuple((simulation.seconds, simulation.peak_bytes) for simulation in simulations)


def pick_plan(chain: StageChain, strategy: str, plans: CandidatePlans, number: int) -> Schedule:
    """Build one of the candidates."""
    build = next(islice(plans(chain), number, None))
    return Schedule(strategy=strategy, operations=build())


def budget_error(strategy: str, budget_bytes: int, needed_bytes: int) -> BudgetError:
    """The error of a strategy with no schedule within the budget."""
    return BudgetError(
        f"strategy {strategy!r} needs {format_bytes(needed_bytes)} at least, the budget is {format_bytes(budget_bytes)}. "
        f"Raise the budget to {size_at_least(needed_bytes)} ({needed_bytes} bytes), or choose another strategy ('auto' tries them all).",
        needed_bytes=needed_bytes,
    )
