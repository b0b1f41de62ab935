"""Strategy ``revolve``: binomial checkpointing with a number of slots.

Source: Griewank and Walther, "Algorithm 799: Revolve", ACM TOMS 26(1), 2000. With ``s`` slots (the input's among them) and no step run
forward more than ``r`` times, ``binomial(s + r, s)`` equal steps can be reversed; ``n`` steps need ``r n - binomial(s + r, s + 1)``
forwards beside those that belong to their backwards, with the smallest such ``r``, and no schedule needs fewer.

The method knows slots, not bytes: all stages count alike. The most slots whose schedule fits the budget are taken. Complexity:
O(n log n) operations for a number of slots, of which there are n.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache, partial
from math import comb

from sft.plan.chain.chain import StageChain
from sft.plan.chain.link import HostLink
from sft.plan.chain.reversal import DecisionFunction, reversal
from sft.plan.chain.schedule import Operation, Schedule
from sft.plan.chain.solver import fastest_fitting

__all__ = ["num_advances", "revolve_operations", "solve_revolve", "revolve_split"]


def num_advances(num_steps: int, slots: int) -> int:
    """The fewest forwards to reverse so many equal steps, without the one that belongs to each backward.

    >>> [num_advances(n, s) for n, s in ((10, 3), (100, 10), (1000, 20), (5, 1), (5, 5))]
    [15, 222, 2747, 10, 4]
    """
    repetitions = 0
    while comb(slots + repetitions, slots) < num_steps:
        repetitions += 1
    return repetitions * num_steps - comb(slots + repetitions, slots + 1)


@cache
def revolve_split(num_steps: int, slots: int) -> int:
    """How far to advance before the next slot is filled: the nearest place of least cost.

    The advances are convex in the number of steps (their increments are the repetitions, which only grow), so their sum is convex in the
    place, and bisection finds where it stops to fall.
    """
    if slots == 1:
        return num_steps - 1

    def cost(k: int) -> int:
        return k + num_advances(num_steps - k, slots - 1) + num_advances(k, slots)

    return 1 + bisect_left(range(1, num_steps - 1), True, key=lambda k: cost(k + 1) >= cost(k))


def _revolve_decide(i: int, j: int, pending: bool, slots: int) -> tuple[int, int, int]:
    if j == i + 1:
        return i, slots, slots
    return i + revolve_split(j - i, slots), max(1, slots - 1), slots


def revolve_operations(chain: StageChain, slots: int) -> tuple[Operation, ...]:
    """The schedule with so many slots."""
    decide: DecisionFunction = _revolve_decide
    return reversal(chain, decide, slots)


def solve_revolve(chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None) -> Schedule:
    """The fastest of the binomial schedules with 1..n slots that fits.

    Raises:
        BudgetError: none does.
    """
    return fastest_fitting(chain, "revolve", _revolve_plans, budget_bytes, link)


def _revolve_plans(chain: StageChain) -> Iterator[Callable[[], tuple[Operation, ...]]]:
    return (partial(revolve_operations, chain, slots) for slots in _slot_counts(chain.num_stages))


def _slot_counts(num_stages: int) -> list[int]:
    """All numbers of slots of a short chain; of a long one in steps of a 16th."""
    found = [1]
    while found[-1] < num_stages:
        found.append(min(num_stages, max(found[-1] + 1, found[-1] * 17 // 16)))
    return found
