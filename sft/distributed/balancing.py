"""Where runs are divided for bands: exchange rows of a cut, or compute its halo again.

Inside a segment the halo of a band is computed by both neighbours, and grows with the segment's depth; at a cut the neighbours' rows are
exchanged instead, and the cut is held whole (a band of it). So a run is divided into segments at some of its cut positions, for

    (FLOPs computed twice) + (a fixed cost of each segment) + price * (bytes held at cuts),

the least of which over all divisions is a shortest path from the run's begin to its end. The price is the trade-off between time and
memory: at 0 runs are divided wherever that saves more than a segment costs; as it grows, cuts in shallow, large images go first.

Where bands begin and end, so that the rank that computes most computes as little as possible.

Bands of equal rows do not cost the same: the first and the last have one neighbour whose rows they compute again, the others have two, and
where bands begin at multiples of the network's stride some get more rows than others. A band's cost is taken to be a part of its own (those
rows, and what all ranks compute) and a price for each row, the same for all; the bounds that level this are tried, and what they cost
exactly says whether they are taken, and what to level next.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.bands import BandPartition, row_band_of
from sft.analysis.tiling.segments import cut_positions
from sft.planner.problem import PlanningProblem
from sft.planner.projection import plain_programs

__all__ = ["RunCuts", "balance_bands", "balanced_bounds", "run_divisions"]

#: For each phase that is divided, where: numbers of operators of its run before each cut.
RunCuts = dict[int, tuple[int, ...]]

#: A segment more has to save this share of the step's FLOPs.
_SEGMENT_SHARE = 2e-4
#: Positions of one run that are looked at.
_MAX_POSITIONS = 32
#: Prices of a byte, in shares of the step's FLOPs for all bytes that could be held.
_BYTE_PRICES = (0.0, 0.1, 1.0)


def run_divisions(problem: PlanningProblem, shares: BandPartition) -> Iterator[RunCuts]:
    """Divisions of all runs, from that which computes least twice to none; each once."""
    runs = {
        number: _RunPartitioner(problem, phase.streamed, shares)
        for number, phase in enumerate(problem.phases.phases)
        if len(phase.streamed) > 1
    }
    total_flops = max(1, sum(program.flops for program in plain_programs(problem)))
    total_bytes = max(1, sum(sum(run.held_bytes) for run in runs.values()))
    seen = []
    for price in (*_BYTE_PRICES, None):
        if price is None:
            found: RunCuts = {}
        else:
            found = {number: run.divided(_SEGMENT_SHARE * total_flops, price * total_flops / total_bytes) for number, run in runs.items()}
            found = {number: cuts for number, cuts in found.items() if cuts}
        if found not in seen:
            seen.append(found)
            yield found


class _RunPartitioner:
    """One run: at its positions the bytes held there, and between any two of them what the middle band computes beyond its share."""

    def __init__(self, problem: PlanningProblem, names: Sequence[str], shares: BandPartition) -> None:
        graph, phases = problem.graph, problem.phases
        self.problem, self.names, self.shares = problem, names, shares
        known = cut_positions(graph, names, phases.streamed)
        inner = [position for position in known if 0 < position < len(names)]
        step = -(-len(inner) // _MAX_POSITIONS) or 1
        self.positions = [0, *inner[::step], len(names)]
        self._extents = problem.extents(ROWS)
        self._flops = _operator_flops(problem)
        self.held_bytes = [0] * len(self.positions)
        for index, position in enumerate(self.positions[1:-1], start=1):
            crossing = set(graph.live_out(names[:position])) & set(graph.sources(names[position:], phases.streamed))
            self.held_bytes[index] = sum(problem.value_bytes(name) + problem.grad_bytes(name) for name in crossing) // shares.num_bands

    def divided(self, segment_cost: float, byte_cost: float) -> tuple[int, ...]:
        """The inner positions of the cheapest division."""
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for stop in range(1, len(self.positions)):
            options = []
            for start in range(stop):
                cost, cuts = best[start]
                held = byte_cost * self.held_bytes[start]
                total = cost + held + segment_cost + self._twice(start, stop)
                options.append((total, (*cuts, self.positions[start]) if start else cuts))
            best.append(min(options, key=lambda option: option[0]))
        return best[-1][1]

    def _twice(self, start: int, stop: int) -> float:
        """FLOPs that all bands together compute beyond the image's own, between two positions."""
        if self.shares.num_bands == 1:
            return 0.0
        first, last = self.positions[start], self.positions[stop]
        return self.problem.memoize(("computed twice", self.shares, self.names[first], last), lambda: self._count(first, last))

    def _count(self, first: int, last: int) -> float:
        problem, shares, names = self.problem, self.shares, self.names[first:last]
        phases, middle = problem.phases, shares.num_bands // 2
        part = row_band_of(problem.graph, names, phases.rows, phases.streamed, self._extents, shares, middle)
        total = 0.0
        for name in names:
            if name in phases.streamed:
                extent = self._extents[name]
                more = len(part.computed[name]) - len(shares.rows(middle, extent))
                total += self._flops.get(name, 0) * max(0, more) / extent
        return total * shares.num_bands


def _operator_flops(problem: PlanningProblem) -> dict[str, int]:
    """FLOPs of each operator, forward and back, once more forward where strips are recomputed."""

    def count() -> dict[str, int]:
        found: dict[str, int] = {}
        for turn, program in enumerate(plain_programs(problem)):
            for instruction in program.instructions:
                weight = 2 if not turn and problem.training else 1
                found[instruction.owner] = found.get(instruction.owner, 0) + weight * instruction.flops
        return found

    return problem.memoize("FLOPs of operators", count)


#: Corrections of the bounds that are tried, one after the other.
_NUM_CORRECTIONS = 2


class _BandCosts(Protocol):
    """Decisions for all bands, projected."""

    @property
    def shares(self) -> BandPartition: ...
    @property
    def flops_by_band(self) -> Sequence[int]: ...
    @property
    def row_flops(self) -> float: ...
    @property
    def peak_bytes(self) -> int: ...


Found = TypeVar("Found", bound=_BandCosts)


def balance_bands(found: Found, project: Callable[[BandPartition], Found], multiple: int, room_bytes: int) -> Found:
    """The same decisions on bands whose largest cost is smaller, where there are such that fit; or what was found.

    Args:
        found: the decisions on bands of some bounds.
        project: what they cost on bands of others.
        multiple: rows that bands are multiples of.
        room_bytes: what each band may hold.
    """
    for _ in range(_NUM_CORRECTIONS):
        bounds = balanced_bounds(found.shares.bounds, found.flops_by_band, found.row_flops, multiple)
        if bounds == found.shares.bounds:
            break
        other = project(BandPartition(bounds))
        if max(other.flops_by_band) >= max(found.flops_by_band) or other.peak_bytes > room_bytes:
            break
        found = other
    return found


def balanced_bounds(bounds: Sequence[int], costs: Sequence[float], row_cost: float, multiple: int = 1) -> tuple[int, ...]:
    """Bounds of bands, each of at least ``multiple`` rows, with the least largest cost.

    >>> balanced_bounds((0, 30, 60, 90), (33, 36, 33), 1)
    (0, 31, 59, 90)
    >>> balanced_bounds((0, 32, 64, 90), (33, 36, 27), 1, 4)
    (0, 32, 60, 90)

    Args:
        bounds: as they are: what lies between two of them is a band.
        costs: of the bands as they are.
        row_cost: what a row more costs.
        multiple: rows that bands are multiples of; the last one has the rest, too.
    """
    num_units, rest = divmod(bounds[-1], multiple)
    unit = row_cost * multiple
    if num_units <= len(costs) or unit <= 0:
        return tuple(bounds)
    own = [cost - row_cost * (stop - start) for cost, (start, stop) in zip(costs, pairwise(bounds), strict=True)]
    own[-1] += row_cost * rest
    # What all would cost if rows could be divided; bands get what is surely below, and the rows that are left go where they cost least.
    level = (sum(own) + unit * num_units) / len(own)
    units = [max(1, int((level - each) // unit)) for each in own]
    while sum(units) > num_units:
        units[max((each + unit * number, band) for band, (each, number) in enumerate(zip(own, units, strict=True)) if number > 1)[1]] -= 1
    heap = [(each + unit * (number + 1), band) for band, (each, number) in enumerate(zip(own, units, strict=True))]
    heapq.heapify(heap)
    for _ in range(num_units - sum(units)):
        cost, band = heap[0]
        units[band] += 1
        heapq.heapreplace(heap, (cost + unit, band))
    return (*accumulate((number * multiple for number in units[:-1]), initial=0), bounds[-1])
