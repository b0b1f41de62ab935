"""Strategy ``auto``: keeping, recomputing, tiling, offloading and streaming, decided together.

A label search (`label_search`) over the graph of cuts (`joint_paths`): each path groups the stages and chooses how they run, each step
decides if its values leave for the host; cuts and weights may be streamed. The published methods are restrictions of this search: one mode,
or no offloading, or a fixed rule for the cuts. Beaumont, Eyraud-Dubois and Shilova's POFO (NeurIPS 2021) combines keeping, recomputing and
offloading in one dynamic program; tiles, streamed cuts and streamed weights are added here.

The search uses a fluid model with rounded sizes and a limited number of labels, so it only proposes: the best few paths become schedules
with complete copies, and the simulator gives their time and memory. If all exceed the budget, the search runs again with a budget reduced
by the excess. The schedules of all named strategies are candidates as well, so `auto` is never slower than any of them on the same chain.
If all values can be kept, no search runs. Complexity: that of `optimal` with a few hundred buckets, and O(n L) edges for nested segments of
at most L stages, each a few vector operations on the labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf

from sft.common.errors import BudgetError
from sft.solvers.acg import solve_acg
from sft.solvers.chain import HostLink, StageChain
from sft.solvers.joint_paths import build_edges, path_operations, path_values, streamed_cuts
from sft.solvers.label_search import FluidPath, search_paths
from sft.solvers.offload_placement import place_offloads
from sft.solvers.offloading import solve_offload_dp, solve_offload_greedy, solve_vdnn
from sft.solvers.optimal import CostTable, solve_optimal
from sft.solvers.reversal import keep_all, reversal
from sft.solvers.schedule import Schedule
from sft.solvers.simple import solve_bisect, solve_revolve, solve_sqrt
from sft.solvers.simulate import Simulation, simulate
from sft.solvers.solver import Solver, budget_error

__all__ = ["RESTRICTED_SOLVERS", "JointSearch", "solve_joint"]

#: The strategies that give candidates next to the search.
RESTRICTED_SOLVERS: dict[str, Solver] = {
    "sqrt": solve_sqrt,
    "revolve": solve_revolve,
    "bisect": solve_bisect,
    "optimal": solve_optimal,
    "acg": solve_acg,
    "offload-greedy": solve_offload_greedy,
    "offload-dp": solve_offload_dp,
    "vdnn": solve_vdnn,
}

_NUM_BUCKETS = 300
_NUM_SLOTS = 400
_MAX_EDGE_LABELS = 2_000_000
_NUM_PATHS = 8
_NUM_TIGHTENINGS = 3


def solve_joint(chain: StageChain, *, budget_bytes: int, host_budget_bytes: int | None = None, link: HostLink | None = None) -> Schedule:
    """Fastest schedule found by any means.

    Raises:
        BudgetError: no schedule fits.
    """
    link = link or HostLink()
    plain = Schedule(strategy="auto", operations=reversal(chain, keep_all))
    if simulate(chain, plain, link=link).peak_bytes <= budget_bytes:
        return plain
    best: tuple[tuple[float, int], Schedule] | None = None
    needed_bytes: list[int] = []

    def offer(candidate: Schedule) -> float:
        """Record a candidate; returns the time of the best one so far."""
        nonlocal best
        simulation = simulate(chain, candidate, link=link)
        rank = (simulation.seconds, simulation.peak_bytes)
        if _fits(simulation, budget_bytes, host_budget_bytes) and (best is None or rank < best[0]):
            best = (rank, candidate)
        return inf if best is None else best[0][0]

    incumbent_seconds = inf
    for solver in RESTRICTED_SOLVERS.values():
        try:
            schedule = solver(chain, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes, link=link)
        except BudgetError as refusal:
            needed_bytes.append(refusal.needed_bytes)
            continue
        incumbent_seconds = offer(schedule)
    for weights in _weight_choices(chain):
        if incumbent_seconds > chain.compute_seconds * (1 + 1e-12) or chain.alternatives:
            search = JointSearch(chain, link=link, streamed_weights=weights)
            for schedule in search.schedules(budget_bytes, host_budget_bytes, incumbent_seconds):
                incumbent_seconds = offer(schedule)
    if best is None:
        raise budget_error("auto", budget_bytes, _min_budget(chain, host_budget_bytes, link, min(needed_bytes), budget_bytes))
    return replace(best[1], strategy="auto")


def _fits(simulation: Simulation, budget_bytes: int, host_budget_bytes: int | None) -> bool:
    """True if a simulation stays within both budgets."""
    return simulation.peak_bytes <= budget_bytes and (host_budget_bytes is None or simulation.host_peak_bytes <= host_budget_bytes)


def _weight_choices(chain: StageChain) -> Iterable[tuple[int, ...]]:
    """Sets of stages with streamed weights: none, and the stages that compute longest per byte, by quarters of all weights."""
    heavy = [i for i in range(1, chain.num_stages + 1) if chain.stage(i).weight_bytes]
    heavy.sort(key=lambda i: (chain.stage(i).forward_seconds + chain.stage(i).backward_seconds) / chain.stage(i).weight_bytes, reverse=True)
    choices: set[tuple[int, ...]] = {()}
    total, streamed, goal = sum(chain.stage(i).weight_bytes for i in heavy), 0, 1
    for count, i in enumerate(heavy, start=1):
        streamed += chain.stage(i).weight_bytes
        while 4 * streamed >= goal * total:
            choices.add(tuple(sorted(heavy[:count])))
            goal += 1
    return sorted(choices, key=len)


def _min_budget(chain: StageChain, host_budget_bytes: int | None, link: HostLink, working_bytes: int, budget_bytes: int) -> int:
    """Smallest working budget, by bisection between one that failed and one that works."""
    low, high = budget_bytes, working_bytes
    while high - low > max(1, high // 200):
        middle = (low + high) // 2
        schedules = (
            schedule
            for weights in _weight_choices(chain)
            for schedule in JointSearch(chain, link=link, streamed_weights=weights).schedules(middle, host_budget_bytes)
        )
        peaks = [
            simulation.peak_bytes
            for simulation in (simulate(chain, schedule, link=link) for schedule in schedules)
            if _fits(simulation, middle, host_budget_bytes)
        ]
        if peaks:
            high = min(peaks)
        else:
            low = middle
    return high


class JointSearch:
    """The search for one chain, link and set of streamed weights.

    Args:
        chain: the chain.
        link: the link.
        streamed_weights: stages with streamed weights.
        slot_bytes: unit of memory of labels. Default: `None`, a 400th of the budget
        bucket_bytes: unit of memory of nested backwards. Default: `None`, a 300th of the budget
        max_labels: most labels at a node. Default: `None`, by the number of edges
        adaptive: True to allow backwards that take the free memory.
    """

    def __init__(
        self,
        chain: StageChain,
        *,
        link: HostLink,
        streamed_weights: tuple[int, ...] = (),
        slot_bytes: int | None = None,
        bucket_bytes: int | None = None,
        max_labels: int | None = None,
        adaptive: bool = True,
    ) -> None:
        self.chain, self.link, self.streamed_weights = chain, link, streamed_weights
        self._slot_bytes, self._bucket_bytes, self._max_labels, self._adaptive = slot_bytes, bucket_bytes, max_labels, adaptive
        self._resident_bytes = chain.resident_bytes - 2 * sum(chain.stage(i).weight_bytes for i in streamed_weights)
        self.table: CostTable | None = None

    def paths(
        self, budget_bytes: int, host_budget_bytes: int | None = None, num_paths: int = 1, incumbent_seconds: float = inf
    ) -> list[FluidPath]:
        """Fastest paths of the fluid model, best first."""
        chain, n = self.chain, self.chain.num_stages
        room_bytes = budget_bytes - self._resident_bytes
        if room_bytes < 1:
            return []
        bucket = self._bucket_bytes or max(1, -(-room_bytes // _NUM_BUCKETS))
        if self.table is None or self.table.bucket_bytes * self.table.num_buckets < room_bytes - bucket:
            self.table = CostTable(chain, num_buckets=room_bytes // bucket, bucket_bytes=bucket)
        edges = build_edges(chain, self.table, longest=max(8, 4096 // n), adaptive=self._adaptive, streamed_weights=self.streamed_weights)
        max_labels = self._max_labels or min(2000, max(100, _MAX_EDGE_LABELS // len(edges)))
        paths: list[FluidPath] = []
        starts = {0: chain.input_bytes, 1: 0} if any(edge.source == 1 for edge in edges) else {0: chain.input_bytes}
        for start, start_bytes in starts.items():
            paths += search_paths(
                edges,
                start=start,
                end=2 * n + 2,
                start_bytes=start_bytes,
                budget_bytes=room_bytes,
                link=self.link,
                host_budget_bytes=host_budget_bytes,
                slot_bytes=self._slot_bytes or max(1, room_bytes // _NUM_SLOTS),
                max_labels=max_labels,
                num_paths=num_paths,
                incumbent_seconds=incumbent_seconds,
                estimates={2 * i: (self.table.first_pass_row(i), self.table.bucket_bytes) for i in range(n)},
            )
        return sorted(paths, key=lambda path: path.seconds)[:num_paths]

    def schedule(self, path: FluidPath, budget_bytes: int) -> tuple[Schedule, int]:
        """Schedule of a path, and its peak bytes."""
        assert self.table is not None  # a path comes from it
        cuts = streamed_cuts(path.steps)
        placement = place_offloads(
            self.chain,
            path_operations(self.chain, self.table, path.steps),
            path_values(path.steps),
            budget_bytes,
            streamed_cuts=cuts,
            streamed_weights=self.streamed_weights,
        )
        return Schedule(
            strategy="auto", operations=placement.operations, streamed_cuts=cuts, streamed_weights=self.streamed_weights
        ), placement.peak_bytes

    def schedules(self, budget_bytes: int, host_budget_bytes: int | None = None, incumbent_seconds: float = inf) -> Iterator[Schedule]:
        """Fitting schedules of the best few paths. If none fits, the search is repeated with less memory."""
        reduced_bytes = budget_bytes
        for _ in range(_NUM_TIGHTENINGS):
            least_excess = None
            for path in self.paths(reduced_bytes, host_budget_bytes, _NUM_PATHS, incumbent_seconds):
                schedule, peak = self.schedule(path, budget_bytes)
                if peak <= budget_bytes:
                    yield schedule
                    least_excess = 0
                elif least_excess is None or peak - budget_bytes < least_excess:
                    least_excess = peak - budget_bytes
            if not least_excess:
                return
            reduced_bytes -= least_excess
