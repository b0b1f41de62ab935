"""Strategy ``vdnn``: the rule of thumb that optimal offloading is compared with.

vDNN++ offloads the inputs of all convolutions, or of every other one, because these compute long for their size. Without layer types this
becomes, as in Beaumont, Eyraud-Dubois and Shilova (Euro-Par 2020, section 6.1): for every threshold of forward time over input bytes,
offload all above it, or every second of them; the best of these schedules. Complexity: 2 n schedules.
"""

from __future__ import annotations

from collections.abc import Iterator

from sft.plan.chain.chain import StageChain
from sft.plan.chain.link import HostLink
from sft.plan.chain.offloading import best_offload
from sft.plan.chain.schedule import Schedule

__all__ = ["solve_vdnn"]


def solve_vdnn(chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None) -> Schedule:
    """The fastest of the thresholds' schedules that fits.

    Raises:
        BudgetError: none does.
    """
    sets = _vdnn_offload_sets(chain)
    return best_offload(chain, "vdnn", sets, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes, link=link or HostLink())


def _vdnn_offload_sets(chain: StageChain) -> Iterator[tuple[int, ...]]:
    ratios = {i: chain.stage(i).forward_seconds / max(1, chain.activation_bytes(i - 1)) for i in range(1, chain.num_stages + 1)}
    yield ()
    for threshold in sorted(set(ratios.values()), reverse=True):
        above = tuple(i for i, ratio in ratios.items() if ratio >= threshold)
        yield above
        yield above[::2]
