"""No schedule that never recomputes can be faster than this.

Source: Beaumont, Eyraud-Dubois and Shilova, Euro-Par 2020, Propositions 2 and 3: whatever is offloaded, the operation of the peak has to
run, so at least ``M_peak - M`` bytes leave and come back. On a half-duplex link both ways add up; on a full-duplex one the slower way
counts.
"""

from __future__ import annotations

from sft.plan.chain.chain import Chain
from sft.plan.chain.link import Link
from sft.plan.chain.offloading import plain_peak_bytes

__all__ = ["offload_bound_seconds"]


def offload_bound_seconds(chain: Chain, *, budget_bytes: int, link: Link) -> float:
    """The lower bound on the time of a step that keeps or offloads everything."""
    excess = max(0, plain_peak_bytes(chain) - budget_bytes)
    return max(chain.compute_seconds, link.streamed_seconds(excess, excess))
