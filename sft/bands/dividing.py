"""Where runs are divided for bands: exchange rows of a cut, or compute its halo again.

Inside a segment the halo of a band is computed by both neighbours, and grows with the segment's depth; at a cut the neighbours' rows are
exchanged instead, and the cut is held whole (a band of it). So a run is divided into segments at some of its cut positions, for

    (FLOPs computed twice) + (a fixed cost of each segment) + price * (bytes held at cuts),

the least of which over all divisions is a shortest path from the run's begin to its end. The price is the trade-off between time and
memory: at 0 runs are divided wherever that saves more than a segment costs; as it grows, cuts in shallow, large images go first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sft.analysis.axes import ROWS
from sft.analysis.bands import BandPartition, row_band_of
from sft.analysis.segment import cut_positions
from sft.plan.problem import PlanningProblem
from sft.plan.project import plain_programs

__all__ = ["RunCuts", "run_divisions"]

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
            crossing = set(graph.handed_on(names[:position])) & set(graph.sources(names[position:], phases.streamed))
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
        return self.problem.remembered(("computed twice", self.shares, self.names[first], last), lambda: self._count(first, last))

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

    return problem.remembered("FLOPs of operators", count)
