"""Checkpointing by fixed rules: ``revolve``, ``sqrt`` and ``bisect``.

Each strategy has a small family of schedules; the fastest member within the budget is taken.

``revolve``: binomial checkpointing. Griewank and Walther, "Algorithm 799: Revolve", ACM TOMS 26(1), 2000. With ``s`` slots (including the
input's) and at most ``r`` forwards of any step, ``binomial(s + r, s)`` equal steps can be reversed. With the smallest such ``r``, ``n``
steps need ``r n - binomial(s + r, s + 1)`` forwards in addition to those that belong to their backwards; no schedule needs fewer. The
method counts slots, not bytes: all stages count alike. The family has one schedule for each number of slots, with O(n log n) operations.

``sqrt``: segments of about equal memory, each recomputed once. Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory
cost", arXiv:1604.06174, 2016. For n equal layers, sqrt(n) segments hold sqrt(n) checkpoints and sqrt(n) recomputed layers at a time, for
one more forward. For unequal layers Chen's Algorithm 3 adds up the layers along the chain and cuts where the sum exceeds a bound; the bound
is searched. The family has 64 bounds in equal ratios, from the largest stage to the whole chain, so a larger budget recomputes less. The
last segment is kept as it is computed. O(n) for each bound.

``bisect``: divide and conquer at the midpoint. Siskind and Pearlmutter, "Divide-and-conquer checkpointing for arbitrary programs with no
user annotation", 2018, as used for networks in the Scorch thesis: run to the middle, keep that state, reverse the second half, then the
first. A span no longer than the *base case* runs once with all values kept. Whatever the sizes, log2(n / base) states exist at once; with
base 1 and n = 2^p, n log2(n) / 2 forwards run in addition to those that belong to the backwards. The family has the base cases n, n/2, n/4,
..., 1, each with O(n log n) operations.
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
    """Fewest forwards to reverse so many equal steps, without the one that belongs to each backward.

    >>> [num_advances(n, s) for n, s in ((10, 3), (100, 10), (1000, 20), (5, 1), (5, 5))]
    [15, 222, 2747, 10, 4]
    """
    repetitions = 0
    while comb(slots + repetitions, slots) < num_steps:
        repetitions += 1
    return repetitions * num_steps - comb(slots + repetitions, slots + 1)


@cache
def revolve_split(num_steps: int, slots: int) -> int:
    """Number of steps to advance before the next slot is filled: the first of least cost.

    The advances are convex in the number of steps (their increments are the repetitions, which only grow), so their sum is convex in the
    split, and bisection finds its minimum.
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
    """The binomial schedule with so many slots."""
    decide: DecisionFunction = _revolve_decide
    return reversal(chain, decide, slots)


def solve_revolve(chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None) -> Schedule:
    """Fastest fitting binomial schedule with 1..n slots.

    Raises:
        BudgetError: no schedule fits.
    """
    return fastest_fitting(chain, "revolve", _revolve_plans, budget_bytes, link)


def _revolve_plans(chain: StageChain) -> Iterator[Callable[[], tuple[Operation, ...]]]:
    return (partial(revolve_operations, chain, slots) for slots in _slot_counts(chain.num_stages))


def _slot_counts(num_stages: int) -> list[int]:
    """All slot counts of a short chain; for a long one in steps of a 16th."""
    counts = [1]
    while counts[-1] < num_stages:
        counts.append(min(num_stages, max(counts[-1] + 1, counts[-1] * 17 // 16)))
    return counts


_NUM_BOUNDS = 64


def segments_within(chain: StageChain, bound_bytes: float) -> tuple[int, ...]:
    """Chen's Algorithm 3: checkpoints such that each segment holds ``bound_bytes`` or, through its last stage, little more."""
    checkpoints, segment_bytes = [], 0
    for i in range(1, chain.num_stages):
        segment_bytes += chain.activation_bytes(i) + chain.stage(i).saved_bytes
        if segment_bytes > bound_bytes:
            checkpoints.append(i)
            segment_bytes = 0
    return tuple(checkpoints)


def solve_sqrt(chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None) -> Schedule:
    """Fastest fitting segmentation.

    Raises:
        BudgetError: no segmentation fits.
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
    """The bisection with a base case of so many stages."""

    def decide(i: int, j: int, pending: bool, state: int) -> tuple[int, int, int]:
        return (i if j - i <= base_stages else (i + j) // 2), 0, 0

    return reversal(chain, decide)


def solve_bisect(chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None) -> Schedule:
    """Fastest fitting bisection.

    Raises:
        BudgetError: no bisection fits.
    """
    return fastest_fitting(chain, "bisect", _bisect_plans, budget_bytes, link)


def _bisect_plans(chain: StageChain) -> Iterator[Callable[[], tuple[Operation, ...]]]:
    n = chain.num_stages
    return (partial(bisect_operations, chain, base) for base in sorted({-(-n // 2**power) for power in range(n.bit_length() + 1)}))
