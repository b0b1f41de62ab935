"""What no schedule can go below: its largest stage in bytes and, where nothing runs twice, the link in time.

Source of ``offload_bound_seconds``:
Beaumont, Eyraud-Dubois and Shilova, Euro-Par 2020, Propositions 2 and 3: whatever is offloaded, the operation of the peak has to
run, so at least ``M_peak - M`` bytes leave and come back. On a half-duplex link both ways add up; on a full-duplex one the slower way
counts. ``turn_bound_seconds`` looks at the turn instead: whatever the backward pass reads and the device has no room for then has left
before, and comes back afterwards.
"""

from __future__ import annotations

import math

from sft.solvers.chain import HostLink, StageChain
from sft.solvers.offloading import plain_peak_bytes

__all__ = ["offload_bound_seconds", "stage_bound_bytes", "turn_bound_seconds"]


def offload_bound_seconds(chain: StageChain, *, budget_bytes: int, link: HostLink) -> float:
    """The lower bound on the time of a step that keeps or offloads everything."""
    excess = max(0, plain_peak_bytes(chain) - budget_bytes)
    return max(chain.compute_seconds, link.streamed_seconds(excess, excess))


def turn_bound_seconds(chain: StageChain, *, budget_bytes: int, link: HostLink) -> float:
    """The same from what is read behind the turn and has no room there: it has left by then, and comes back afterwards."""
    read = chain.resident_bytes + sum(chain.activation_bytes(i - 1) + chain.stage(i).saved_bytes for i in range(1, chain.num_stages + 1))
    excess = max(0, read - budget_bytes)
    forward = math.fsum(stage.forward_seconds for stage in chain.stages)
    backward = math.fsum(stage.backward_seconds for stage in chain.stages)
    return max(forward, link.down_seconds(excess)) + max(backward, link.up_seconds(excess))


def stage_bound_bytes(chain: StageChain) -> int:
    """What the stage that needs most holds when it has run, or while it runs back: schedules without alternatives hold no less.

    Workspaces of the forward pass are left out: a stage may need its own only where it saves nothing.
    """
    return max(stage.saved_bytes + max(stage.output_bytes, stage.backward_workspace_bytes) for stage in chain.stages)
