"""Strategy ``offload-greedy``: offload the first activations, as many as the peak exceeds the budget.

Source: Beaumont, Eyraud-Dubois and Shilova, "Optimal GPU-CPU offloading strategies for deep neural network training", Euro-Par 2020,
section 4. If activations could leave in part, offloading the first ``M_peak - M`` bytes would be optimal (Theorem 2); GREEDY rounds up to
whole ones. Where whole copies need more room than that, more of the first are taken. With a stage leaves what it saved. Complexity: O(n)
schedules.
"""

from __future__ import annotations

from itertools import accumulate

from sft.plan.chain.chain import StageChain
from sft.plan.chain.link import HostLink
from sft.plan.chain.offloading import best_offload, offload_schedule, plain_peak_bytes
from sft.plan.chain.schedule import Schedule

__all__ = ["num_offloaded", "solve_offload_greedy"]


def num_offloaded(chain: StageChain, budget_bytes: int) -> int:
    """The smallest number of first stages whose inputs and saved values are as large as what exceeds the budget."""
    excess = plain_peak_bytes(chain) - budget_bytes
    sizes = accumulate(chain.activation_bytes(i - 1) + chain.stage(i).saved_bytes for i in range(1, chain.num_stages + 1))
    return next((k for k, total in enumerate([0, *sizes]) if total >= excess), chain.num_stages)


def solve_offload_greedy(
    chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None
) -> Schedule:
    """The greedy schedule.

    Raises:
        BudgetError: it does not fit even if everything leaves, or the host has no room.
    """
    n = chain.num_stages
    first = num_offloaded(chain, budget_bytes)
    k = next((k for k in range(first, n) if offload_schedule(chain, "offload-greedy", range(1, k + 1), budget_bytes)[1] <= budget_bytes), n)
    return best_offload(
        chain,
        "offload-greedy",
        [range(1, k + 1)],
        budget_bytes=budget_bytes,
        host_budget_bytes=host_budget_bytes,
        link=link or HostLink(),
    )
