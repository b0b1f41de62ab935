"""Strategy ``sqrt``: segments of about equal memory, each recomputed once.

Source: Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost", arXiv:1604.06174, 2016. For n equal layers sqrt(n)
segments hold sqrt(n) checkpoints and sqrt(n) recomputed layers at a time, for one more forward. For unequal layers Chen's Algorithm 3 walks
along the chain, adds up what the layers hold, and cuts when a bound is passed; the bound is searched.

Here the bounds are all sizes from the largest stage to the whole chain in 64 steps of equal ratio, and the plan is the fastest that fits,
so that a budget with room recomputes less. The last segment is kept as it is made. Complexity: O(n) for each bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from sft.plan.chain.chain import StageChain
from sft.plan.chain.link import HostLink
from sft.plan.chain.reversal import one_level, reversal
from sft.plan.chain.schedule import Operation, Schedule
from sft.plan.chain.solver import fastest_fitting

__all__ = ["segments_within", "solve_sqrt"]

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
