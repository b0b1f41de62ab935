"""What the offloading strategies share: a chain on which everything is kept, as edges of the fluid model, and schedules of offload sets."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache

from sft.plan.chain.chain import StageChain
from sft.plan.chain.edges import Edge
from sft.plan.chain.link import HostLink
from sft.plan.chain.place import place_offloads, operation_costs
from sft.plan.chain.reversal import keep_all, reversal
from sft.plan.chain.schedule import Operation, Schedule, activation_name, saved_name
from sft.plan.chain.simulate import simulate
from sft.plan.chain.solver import budget_error
from sft.plan.chain.work import OperationCost

__all__ = ["best_offload", "kept_edge", "min_offload_bytes", "loss_edge", "offload_values", "offload_schedule", "plain_peak_bytes"]


def kept_edge(chain: StageChain, i: int) -> Edge:
    """Stage ``i`` with everything kept."""
    stage = chain.stage(i)
    output = stage.output_bytes if stage.reads_output else 0
    return Edge(
        source=i - 1,
        target=i,
        forward_seconds=stage.forward_seconds,
        backward_seconds=stage.backward_seconds,
        forward_need_bytes=stage.output_bytes + stage.saved_bytes + stage.forward_workspace_bytes,
        backward_need_bytes=stage.grad_bytes + chain.grad_bytes(i - 1) + stage.saved_bytes + output + stage.backward_workspace_bytes,
        input_bytes=chain.activation_bytes(i - 1),
        saved_bytes=stage.saved_bytes,
        output_bytes=stage.output_bytes,
    )


def loss_edge(chain: StageChain, source: int, target: int, *, streamed: bool = False) -> Edge:
    """The caller's turn, as the last edge; of a streamed output nothing is on the device."""
    n = chain.num_stages
    input_bytes, grad_bytes = (0, 0) if streamed else (chain.activation_bytes(n), chain.grad_bytes(n))
    return Edge(
        source=source,
        target=target,
        forward_seconds=0.0,
        backward_seconds=0.0,
        forward_need_bytes=grad_bytes,
        backward_need_bytes=grad_bytes,
        input_bytes=input_bytes,
        saved_bytes=0,
        output_bytes=0,
        movable=False,
    )


def offload_values(chain: StageChain, stages: Iterable[int]) -> set[str]:
    """What leaves with the stages: their inputs, and what they save."""
    found: set[str] = set()
    for i in stages:
        found |= {activation_name(i - 1), saved_name(i)} if chain.stage(i).saved_bytes else {activation_name(i - 1)}
    return found


@lru_cache(maxsize=4)
def _store_all_operations(chain: StageChain) -> tuple[tuple[Operation, ...], tuple[OperationCost | None, ...]]:
    """The operations that keep everything, which hundreds of offload sets of a chain have in common."""
    operations = reversal(chain, keep_all)
    return operations, operation_costs(chain, operations)


def offload_schedule(chain: StageChain, strategy: str, stages: Collection[int], budget_bytes: int) -> tuple[Schedule, int]:
    """The schedule that keeps everything, with what leaves for the host with the ``stages``; and the bytes that it holds at its peak."""
    operations, works = _store_all_operations(chain)
    placed = place_offloads(chain, operations, offload_values(chain, stages), budget_bytes, works=works)
    return Schedule(strategy=strategy, operations=placed.operations), placed.peak_bytes


def plain_peak_bytes(chain: StageChain) -> int:
    """What plain training holds: everything kept."""
    return offload_schedule(chain, "none", (), 0)[1]


def min_offload_bytes(chain: StageChain) -> int:
    """What offloading everything holds."""
    return offload_schedule(chain, "none", range(1, chain.num_stages + 1), 0)[1]


def best_offload(
    chain: StageChain,
    strategy: str,
    sets: Iterable[Collection[int]],
    *,
    budget_bytes: int,
    host_budget_bytes: int | None,
    link: HostLink,
) -> Schedule:
    """Of several offload sets (by stage) the one whose schedule is fastest and inside the budgets.

    Raises:
        BudgetError: none is.
    """
    best: tuple[float, Schedule] | None = None
    for stages in sets:
        schedule, peak = offload_schedule(chain, strategy, stages, budget_bytes)
        if peak > budget_bytes:
            continue
        found = simulate(chain, schedule, link=link)
        if host_budget_bytes is not None and found.host_peak_bytes > host_budget_bytes:
            continue
        if best is None or found.seconds < best[0]:
            best = (found.seconds, schedule)
    if best is None:
        raise budget_error(strategy, budget_bytes, plain_peak_bytes(chain) if host_budget_bytes is not None else min_offload_bytes(chain))
    return best[1]
