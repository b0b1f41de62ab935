"""Load balancing: segment boundaries for banded execution, and band heights of equal cost.

**Cuts.** Inside a segment the halo of a band is computed by both neighbours, and grows with the depth of the segment. At a cut the
neighbours exchange rows instead, and each band stores its rows of the cut. So a run is divided at some of its cut positions, to minimize

    (FLOPs computed twice) + (a fixed cost of each segment) + price * (bytes stored at cuts).

The division of least cost is a shortest path from the start of the run to its end. The price trades time for memory: at 0, runs
are divided wherever that saves more than a segment costs; as it grows, cuts in shallow, large images disappear first.

**Bounds.** Bands of equal rows have different costs: the first and the last recompute the rows of one neighbour, inner bands
those of two, and with bounds at multiples of the network's stride some bands get more rows. The cost of a band is modelled as a constant
(its halo rows, and work that all ranks do) plus a price per row, the same for all. Bounds that level these costs are tried; their exact
cost decides if they are taken, and gives the constants of the next correction.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.graph_cuts import cut_positions
from sft.analysis.tiling.bands import BandPartition, row_band_of
from sft.planner.problem import PlanningProblem
from sft.planner.projection import plain_programs

__all__ = ["RunCuts", "balance_bands", "balanced_bounds", "run_divisions"]

#: For each divided phase the number of operators of its run before each cut.
RunCuts = dict[int, tuple[int, ...]]

#: An additional segment has to save this fraction of the step's FLOPs.
_SEGMENT_SHARE = 2e-4
#: Most candidate positions of a run.
_MAX_POSITIONS = 32
#: Prices of a byte, as fractions of the step's FLOPs for the bytes of all candidate cuts.
_BYTE_PRICES = (0.0, 0.1, 1.0)


def run_divisions(problem: PlanningProblem, partition: BandPartition) -> Iterator[RunCuts]:
    """Divisions of all runs, from the one with the fewest redundant FLOPs to none; each once."""
    runs = {
        number: _RunPartitioner(problem, phase.streamed, partition)
        for number, phase in enumerate(problem.sized.phases.phases)
        if len(phase.streamed) > 1
    }
    total_flops = max(1, sum(program.flops for program in plain_programs(problem)))
    total_bytes = max(1, sum(sum(run.stored_bytes) for run in runs.values()))
    rows_seen = []
    for price in (*_BYTE_PRICES, None):
        if price is None:
            division: RunCuts = {}
        else:
            segment_cost, byte_cost = _SEGMENT_SHARE * total_flops, price * total_flops / total_bytes
            cuts_by_run = {number: run.cheapest_cuts(segment_cost, byte_cost) for number, run in runs.items()}
            division = {number: cuts for number, cuts in cuts_by_run.items() if cuts}
        if division not in rows_seen:
            rows_seen.append(division)
            yield division


class _RunPartitioner:
    """Costs of dividing one run: bytes stored at each position, and redundant FLOPs of the middle band between two positions."""

    def __init__(self, problem: PlanningProblem, names: Sequence[str], partition: BandPartition) -> None:
        graph, phases = problem.sized.graph, problem.sized.phases
        self.problem, self.names, self.partition = problem, names, partition
        candidates = cut_positions(graph, names, phases.streamed)
        inner = [position for position in candidates if 0 < position < len(names)]
        step = -(-len(inner) // _MAX_POSITIONS) or 1
        self.positions = [0, *inner[::step], len(names)]
        self._extents = problem.sized.extents(ROWS)
        self._flops = _operator_flops(problem)
        self.stored_bytes = [0] * len(self.positions)
        for index, position in enumerate(self.positions[1:-1], start=1):
            crossing = set(graph.live_out(names[:position])) & set(graph.sources(names[position:], phases.streamed))
            self.stored_bytes[index] = (
                sum(problem.sized.value_bytes(name) + problem.sized.grad_bytes(name) for name in crossing) // partition.num_bands
            )

    def cheapest_cuts(self, segment_cost: float, byte_cost: float) -> tuple[int, ...]:
        """Inner positions of the cheapest division."""
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for stop in range(1, len(self.positions)):
            options = []
            for start in range(stop):
                cost, cuts = best[start]
                total = cost + byte_cost * self.stored_bytes[start] + segment_cost + self._redundant_flops(start, stop)
                options.append((total, (*cuts, self.positions[start]) if start else cuts))
            best.append(min(options, key=lambda option: option[0]))
        return best[-1][1]

    def _redundant_flops(self, start: int, stop: int) -> float:
        """FLOPs of all bands beyond those of the image, between two positions."""
        if self.partition.num_bands == 1:
            return 0.0
        first, last = self.positions[start], self.positions[stop]
        return self.problem.memo.memoize(
            ("computed twice", self.partition, self.names[first], last), lambda: self._count_redundant_flops(first, last)
        )

    def _count_redundant_flops(self, first: int, last: int) -> float:
        """Redundant FLOPs of the middle band between two positions, times the number of bands."""
        problem, partition, names = self.problem, self.partition, self.names[first:last]
        phases, middle = problem.sized.phases, partition.num_bands // 2
        row_band = row_band_of(phases.run(names), self._extents, partition, middle)
        total = 0.0
        for name in names:
            if name in phases.streamed:
                extent = self._extents[name]
                extra_rows = len(row_band.computed[name]) - len(partition.rows(middle, extent))
                total += self._flops.get(name, 0) * max(0, extra_rows) / extent
        return total * partition.num_bands


def _operator_flops(problem: PlanningProblem) -> dict[str, int]:
    """FLOPs of each operator, forward and backward; the forward counts twice in training, where strips are recomputed."""

    def count() -> dict[str, int]:
        flops: dict[str, int] = {}
        for turn, program in enumerate(plain_programs(problem)):
            for instruction in program.instructions:
                weight = 2 if not turn and problem.sized.training else 1
                flops[instruction.owner] = flops.get(instruction.owner, 0) + weight * instruction.flops
        return flops

    return problem.memo.memoize("FLOPs of operators", count)


#: Corrections of the bounds that are tried in turn.
_NUM_CORRECTIONS = 2


class _BandCosts(Protocol):
    """Projected costs of decisions for all bands."""

    @property
    def partition(self) -> BandPartition: ...
    @property
    def flops_by_band(self) -> Sequence[int]: ...
    @property
    def row_flops(self) -> float: ...
    @property
    def peak_bytes(self) -> int: ...


Candidate = TypeVar("Candidate", bound=_BandCosts)


def balance_bands(candidate: Candidate, project: Callable[[BandPartition], Candidate], multiple: int, room_bytes: int) -> Candidate:
    """Replace the bounds of bands by ones with a smaller largest cost, if such bounds fit.

    Args:
        candidate: decisions with their costs under the present bounds.
        project: costs of the same decisions under other bounds.
        multiple: rows that bands are multiples of.
        room_bytes: most bytes of each band.
    """
    for _ in range(_NUM_CORRECTIONS):
        bounds = balanced_bounds(candidate.partition.bounds, candidate.flops_by_band, candidate.row_flops, multiple)
        if bounds == candidate.partition.bounds:
            break
        rebalanced = project(BandPartition(bounds))
        if max(rebalanced.flops_by_band) >= max(candidate.flops_by_band) or rebalanced.peak_bytes > room_bytes:
            break
        candidate = rebalanced
    return candidate


def balanced_bounds(bounds: Sequence[int], costs: Sequence[float], row_cost: float, multiple: int = 1) -> tuple[int, ...]:
    """Bounds of bands of at least ``multiple`` rows each, with the least largest cost.

    >>> balanced_bounds((0, 30, 60, 90), (33, 36, 33), 1)
    (0, 31, 59, 90)
    >>> balanced_bounds((0, 32, 64, 90), (33, 36, 27), 1, 4)
    (0, 32, 60, 90)

    Args:
        bounds: present bounds; band ``b`` has the rows from ``bounds[b]`` to ``bounds[b + 1]``.
        costs: present costs of the bands.
        row_cost: cost of one more row.
        multiple: unit of rows of a band; the last band also has the remainder.
    """
    num_units, remainder = divmod(bounds[-1], multiple)
    unit = row_cost * multiple
    if num_units <= len(costs) or unit <= 0:
        return tuple(bounds)
    constants = [cost - row_cost * (stop - start) for cost, (start, stop) in zip(costs, pairwise(bounds), strict=True)]
    constants[-1] += row_cost * remainder
    # The common cost if rows were divisible. Bands get units that surely stay below it; remaining units go where they cost least.
    level = (sum(constants) + unit * num_units) / len(constants)
    units = [max(1, int((level - constant) // unit)) for constant in constants]
    while sum(units) > num_units:
        units[
            max(
                (constant + unit * number, band) for band, (constant, number) in enumerate(zip(constants, units, strict=True)) if number > 1
            )[1]
        ] -= 1
    heap = [(constant + unit * (number + 1), band) for band, (constant, number) in enumerate(zip(constants, units, strict=True))]
    heapq.heapify(heap)
    for _ in range(num_units - sum(units)):
        cost, band = heap[0]
        units[band] += 1
        heapq.heapreplace(heap, (cost + unit, band))
    return (*accumulate((number * multiple for number in units[:-1]), initial=0), bounds[-1])
