"""Lower bounds of any schedule: bytes of the largest stage and, without recomputation, seconds on the link.

``offload_bound_seconds``: Beaumont, Eyraud-Dubois and Shilova, Euro-Par 2020, Propositions 2 and 3. The operation at the peak has to run,
so at least ``M_peak - M`` bytes leave and come back. On a half-duplex link both directions add up; on a full-duplex link the slower one
counts. ``turn_bound_seconds`` considers the turn from forward to backward: values that the backward pass reads and that do not fit at the
turn have left before it and come back after it.
"""

from __future__ import annotations

import math

from sft.solvers.chain import HostLink, StageChain
from sft.solvers.offloading import plain_peak_bytes

__all__ = ["offload_bound_seconds", "stage_bound_bytes", "turn_bound_seconds"]


def offload_bound_seconds(chain: StageChain, *, budget_bytes: int, link: HostLink) -> float:
    """Lower bound on the time of a step that keeps or offloads all values."""
    excess = max(0, plain_peak_bytes(chain) - budget_bytes)
    return max(chain.compute_seconds, link.streamed_seconds(excess, excess))


def turn_bound_seconds(chain: StageChain, *, budget_bytes: int, link: HostLink) -> float:
    """Lower bound on the time of a step, from the values that the backward pass reads but that do not fit at the turn."""
    read_bytes = chain.resident_bytes + sum(
        chain.activation_bytes(i - 1) + chain.stage(i).saved_bytes for i in range(1, chain.num_stages + 1)
    )
    excess_bytes = max(0, read_bytes - budget_bytes)
    forward_seconds = math.fsum(stage.forward_seconds for stage in chain.stages)
    backward_seconds = math.fsum(stage.backward_seconds for stage in chain.stages)
    return max(forward_seconds, link.down_seconds(excess_bytes)) + max(backward_seconds, link.up_seconds(excess_bytes))


def stage_bound_bytes(chain: StageChain) -> int:
    """Bytes of the largest stage, after its forward or during its backward: schedules without alternatives need at least these.

    Workspaces of the forward pass are excluded: a stage may need its own only where it saves no values.
    """
    return max(stage.saved_bytes + max(stage.output_bytes, stage.backward_workspace_bytes) for stage in chain.stages)
