"""Strategy ``revolve``: binomial checkpointing with a number of slots.

Source: Griewank and Walther, "Algorithm 799: Revolve", ACM TOMS 26(1), 2000. With ``s`` slots (the input's among them) and no step run
forward more than ``r`` times, ``binomial(s + r, s)`` equal steps can be reversed; ``n`` steps need ``r n - binomial(s + r, s + 1)``
forwards beside those that belong to their backwards, with the smallest such ``r``, and no schedule needs fewer.

The method knows slots, not bytes: all stages count alike. The most slots whose schedule fits the budget are taken. Complexity:
O(n log n) operations for a number of slots, of which there are n.

Strategy ``sqrt``: segments of about equal memory, each recomputed once.

Source: Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost", arXiv:1604.06174, 2016. For n equal layers sqrt(n)
segments hold sqrt(n) checkpoints and sqrt(n) recomputed layers at a time, for one more forward. For unequal layers Chen's Algorithm 3 walks
along the chain, adds up what the layers hold, and cuts when a bound is passed; the bound is searched.

Here the bounds are all sizes from the largest stage to the whole chain in 64 steps of equal ratio, and the plan is the fastest that fits,
so that a budget with room recomputes less. The last segment is kept as it is made. Complexity: O(n) for each bound.

Strategy ``bisect``: divide and conquer at the midpoint.

Source: Siskind and Pearlmutter, "Divide-and-conquer checkpointing for arbitrary programs with no user annotation", 2018, as used for
networks in the Scorch thesis: run to the middle, keep that one state, reverse the second half, then the first. A part no longer than the
*base case* is run once, with everything kept. Whatever the sizes, log2(n / base) states are held, and with base 1 and n = 2^p, n log2(n) /
2 forwards are run beside those that belong to the backwards.

Base cases are n, n/2, n/4, ..., 1; the fastest that fits is taken. Complexity: O(n log n) operations for each of log2(n) base cases.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache, partial
from math import comb

from sft.solvers.chain import HostLink, StageChain
from sft.solvers.reversal import DecisionFunction, one_level, reversal
from sft.solvers.schedule import Operation, Schedule
from sft.solvers.solver import fastest_fitting

__all__ = [
    "bisect_operations",
    "num_advances",
    "revolve_operations",
    "revolve_split",
    "segments_within",
    "solve_bisect",
    "solve_revolve",
    "solve_sqrt",
]


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


_NUM_BOUNDS = 64


def segments_within(chain: StageChain, bound_bytes: float) -> tuple[int, ...]:
    """Chen's Algorithm 3: the checkpoints of segments that each hold ``bound_bytes`` or, by their last stage, little more."""
    found, held = [], 0
    for i in range(1, chain.num_stages):
        held += chain.activation_bytes(i) + chain.stage(i).saved_bytes
        if held > bound_bytes:
            found.append(i)
            held = 0
    return tuple(found)


def solve_sqrt(chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None) -> Schedule:
    """The fastest of Chen's segmentations that fits.

    Raises:
        BudgetError: none does.
    """
    return fastest_fitting(chain, "sqrt", _sqrt_plans, budget_bytes, link)


def _sqrt_plans(chain: StageChain) -> Iterator[Callable[[], tuple[Operation, ...]]]:
    return (partial(reversal, chain, one_level(checkpoints)) for checkpoints in _segmentations(chain))


def _segmentations(chain: StageChain) -> Iterator[tuple[int, ...]]:
    sizes = [chain.activation_bytes(i) + chain.stage(i).saved_bytes for i in range(1, chain.num_stages + 1)]
    low, high = max(1, min(sizes)), max(1, sum(sizes))
    seen: set[tuple[int, ...]] = set()
    for step in range(_NUM_BOUNDS + 1):
        checkpoints = segments_within(chain, low * (high / low) ** (step / _NUM_BOUNDS) - 1)
        if checkpoints not in seen:
            seen.add(checkpoints)
            yield checkpoints


def bisect_operations(chain: StageChain, base_stages: int) -> tuple[Operation, ...]:
    """The schedule with a base case of so many stages."""

    def decide(i: int, j: int, pending: bool, state: int) -> tuple[int, int, int]:
        return (i if j - i <= base_stages else (i + j) // 2), 0, 0

    return reversal(chain, decide)


def solve_bisect(chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None) -> Schedule:
    """The fastest of the bisections that fits.

    Raises:
        BudgetError: none does.
    """
    return fastest_fitting(chain, "bisect", _bisect_plans, budget_bytes, link)


def _bisect_plans(chain: StageChain) -> Iterator[Callable[[], tuple[Operation, ...]]]:
    n = chain.num_stages
    return (partial(bisect_operations, chain, base) for base in sorted({-(-n // 2**power) for power in range(n.bit_length() + 1)}))
