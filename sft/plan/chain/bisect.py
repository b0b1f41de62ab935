"""Strategy ``bisect``: divide and conquer at the midpoint.

Source: Siskind and Pearlmutter, "Divide-and-conquer checkpointing for arbitrary programs with no user annotation", 2018, as used for
networks in the Scorch thesis: run to the middle, keep that one state, reverse the second half, then the first. A part no longer than the
*base case* is run once, with everything kept. Whatever the sizes, log2(n / base) states are held, and with base 1 and n = 2^p, n log2(n) /
2 forwards are run beside those that belong to the backwards.

Base cases are n, n/2, n/4, ..., 1; the fastest that fits is taken. Complexity: O(n log n) operations for each of log2(n) base cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from sft.plan.chain.chain import StageChain
from sft.plan.chain.link import HostLink
from sft.plan.chain.reversal import reversal
from sft.plan.chain.schedule import Operation, Schedule
from sft.plan.chain.solver import fastest_fitting

__all__ = ["bisect_operations", "solve_bisect"]


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
