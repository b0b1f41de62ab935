"""Offloading strategies that keep all values: ``offload-dp``, ``offload-greedy`` and ``vdnn``.

No stage is recomputed; each stage's input and saved values stay on the device or leave for the host together. A strategy proposes *offload
sets* of stages. `offload_placement` turns a set into a schedule, and the fastest that fits is taken. The chain as edges of the fluid model
(`kept_edge`, `loss_edge`) is shared with the joint search.

``offload-dp``: dynamic programming over the stages. DYNPROG of Beaumont, Eyraud-Dubois and Shilova, "Optimal GPU-CPU offloading strategies
for deep neural network training", Euro-Par 2020, section 5, with two corrections (see `label_search`, which has the recurrence and states
its optimality). The best few sets of the fluid model are simulated with complete copies. Labels are triples of slots, so O(n S^3) in the
worst case for S slots; without dominated ones, a few hundred at a cut.

``offload-greedy``: offload the first activations, as many as the peak exceeds the budget. The same paper, section 4. If parts of
activations could leave, offloading the first ``M_peak - M`` bytes would be optimal (Theorem 2); GREEDY rounds up to complete ones. Where
complete copies need more memory, more of the first activations leave. O(n) schedules.

``vdnn``: the heuristic that the paper compares with. vDNN++ offloads the inputs of all convolutions, or of every other one, because these
compute long for their size. Without layer types this becomes (section 6.1): for every threshold of forward time over input bytes, offload
all stages above it, or every second of them. 2 n schedules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate

from sft.solvers.chain import HostLink, StageChain
from sft.solvers.edges import Edge
from sft.solvers.label_search import FluidPath, search_paths
from sft.solvers.offload_placement import operation_costs, place_offloads
from sft.solvers.reversal import keep_all, reversal
from sft.solvers.schedule import Operation, OperationCost, Schedule, activation_name, saved_name
from sft.solvers.simulate import simulate
from sft.solvers.solver import budget_error

__all__ = [
    "best_offload",
    "fluid_optima",
    "kept_edge",
    "loss_edge",
    "min_offload_bytes",
    "num_offloaded",
    "offload_schedule",
    "offload_values",
    "plain_peak_bytes",
    "solve_offload_dp",
    "solve_offload_greedy",
    "solve_vdnn",
]


def kept_edge(chain: StageChain, i: int) -> Edge:
    """Edge of stage ``i`` with all values kept."""
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
    """The loss, as the last edge of a path. A streamed output has no bytes on the device."""
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
    """Values that leave with the stages: their inputs and saved values."""
    values: set[str] = set()
    for i in stages:
        values |= {activation_name(i - 1), saved_name(i)} if chain.stage(i).saved_bytes else {activation_name(i - 1)}
    return values


@lru_cache(maxsize=4)
def _store_all_operations(chain: StageChain) -> tuple[tuple[Operation, ...], tuple[OperationCost | None, ...]]:
    """Operations that keep all values, with their costs. Hundreds of offload sets of a chain share them."""
    operations = reversal(chain, keep_all)
    return operations, operation_costs(chain, operations)


def offload_schedule(chain: StageChain, strategy: str, stages: Collection[int], budget_bytes: int) -> tuple[Schedule, int]:
    """Schedule in which the inputs and saved values of the ``stages`` may leave, and its peak bytes."""
    operations, costs = _store_all_operations(chain)
    placement = place_offloads(chain, operations, offload_values(chain, stages), budget_bytes, costs=costs)
    return Schedule(strategy=strategy, operations=placement.operations), placement.peak_bytes


def plain_peak_bytes(chain: StageChain) -> int:
    """Peak bytes of plain training: all values kept."""
    return offload_schedule(chain, "none", (), 0)[1]


def min_offload_bytes(chain: StageChain) -> int:
    """Peak bytes if all inputs and saved values may leave."""
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
    """Fastest schedule of several offload sets (of stages) within the budgets.

    Raises:
        BudgetError: no set fits.
    """
    best: tuple[float, Schedule] | None = None
    for stages in sets:
        schedule, peak = offload_schedule(chain, strategy, stages, budget_bytes)
        if peak > budget_bytes:
            continue
        simulation = simulate(chain, schedule, link=link)
        if host_budget_bytes is not None and simulation.host_peak_bytes > host_budget_bytes:
            continue
        if best is None or simulation.seconds < best[0]:
            best = (simulation.seconds, schedule)
    if best is None:
        raise budget_error(strategy, budget_bytes, plain_peak_bytes(chain) if host_budget_bytes is not None else min_offload_bytes(chain))
    return best[1]


_NUM_SLOTS = 500
_NUM_PATHS = 12


def fluid_optima(
    chain: StageChain,
    *,
    budget_bytes: int,
    link: HostLink,
    host_budget_bytes: int | None = None,
    slot_bytes: int | None = None,
    num_paths: int = 1,
) -> list[FluidPath]:
    """Fastest offload sets of the fluid model, best first; empty if none fits.

    Args:
        chain: the chain.
        budget_bytes: most bytes on the device, including resident weights.
        link: the link.
        host_budget_bytes: most bytes on the host. Default: `None`, no limit
        slot_bytes: unit of memory. Default: `None`, a 500th of the budget
        num_paths: number of sets.
    """
    n, room_bytes = chain.num_stages, budget_bytes - chain.resident_bytes
    if room_bytes < chain.input_bytes:
        return []
    edges = [*(kept_edge(chain, i) for i in range(1, n + 1)), loss_edge(chain, n, n + 1)]
    return search_paths(
        edges,
        start=0,
        end=n + 1,
        start_bytes=chain.input_bytes,
        budget_bytes=room_bytes,
        link=link,
        host_budget_bytes=host_budget_bytes,
        slot_bytes=slot_bytes or max(1, room_bytes // _NUM_SLOTS),
        num_paths=num_paths,
    )


def solve_offload_dp(
    chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None
) -> Schedule:
    """Fastest schedule found that offloads and never recomputes.

    Raises:
        BudgetError: the chain exceeds the budget even if all values leave, or the host has no room.
    """
    link = link or HostLink()
    if plain_peak_bytes(chain) <= budget_bytes:
        return best_offload(chain, "offload-dp", [()], budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes, link=link)
    if min_offload_bytes(chain) > budget_bytes:
        raise budget_error("offload-dp", budget_bytes, min_offload_bytes(chain))
    paths = fluid_optima(chain, budget_bytes=budget_bytes, link=link, host_budget_bytes=host_budget_bytes, num_paths=_NUM_PATHS)
    sets: list[tuple[int, ...]] = [tuple(i for i, step in enumerate(path.steps, start=1) if step.leaves) for path in paths]
    sets.append(tuple(range(1, chain.num_stages + 1)))  # fits if any set does, which rounding may hide
    return best_offload(chain, "offload-dp", sets, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes, link=link)


def num_offloaded(chain: StageChain, budget_bytes: int) -> int:
    """Least number of first stages with inputs and saved values that cover the excess over the budget."""
    excess_bytes = plain_peak_bytes(chain) - budget_bytes
    sizes = accumulate(chain.activation_bytes(i - 1) + chain.stage(i).saved_bytes for i in range(1, chain.num_stages + 1))
    return next((k for k, total in enumerate([0, *sizes]) if total >= excess_bytes), chain.num_stages)


def solve_offload_greedy(
    chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None
) -> Schedule:
    """The greedy schedule.

    Raises:
        BudgetError: the chain exceeds the budget even if all values leave, or the host has no room.
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


def solve_vdnn(chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None) -> Schedule:
    """Fastest fitting schedule of the thresholds.

    Raises:
        BudgetError: no threshold fits.
    """
    sets = _vdnn_offload_sets(chain)
    return best_offload(chain, "vdnn", sets, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes, link=link or HostLink())


def _vdnn_offload_sets(chain: StageChain) -> Iterator[tuple[int, ...]]:
    """For each threshold of forward time over input bytes the stages above it, and every second of these."""
    ratios = {i: chain.stage(i).forward_seconds / max(1, chain.activation_bytes(i - 1)) for i in range(1, chain.num_stages + 1)}
    yield ()
    for threshold in sorted(set(ratios.values()), reverse=True):
        above = tuple(i for i, ratio in ratios.items() if ratio >= threshold)
        yield above
        yield above[::2]
