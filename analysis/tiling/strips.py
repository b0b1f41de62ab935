"""A run of streamed operators + a size + a strip height -> Steps.

The run is walked in strips of rows of its tallest input. After the input has advanced to row ``R`` every value ``v`` has
grown to its frontier ``F_v(R)``: all rows that can be computed from what is there. Frontiers follow the access maps with the
image's borders ignored, and are clipped to ``[0, extent]`` only when rows are counted. That lets ``R`` run past the last row:
the rows that the operators' delays hold back come out in further steps of the same size instead of one tall last step, and
what lies beyond the border is padding, which is known in advance.

After a step the rows of ``v`` from ``K_v = min(lo(F_w))`` over its readers ``w`` up to ``F_v`` are *carried*: later rows still
read them. A step thus computes each row of each value exactly once. All positions are kept as integer arrays over the steps,
so that a schedule of thousands of steps costs as many NumPy operations as there are operators.

One strip of a run: which rows every value gains, holds, reads and keeps.

All rows are global: those of the whole image at that layer, whatever strip or band they are computed in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm

import numpy as np
import numpy.typing as npt

from sft.analysis.ir.graph import Graph
from sft.analysis.ir.ops import Operator
from sft.analysis.tiling.frontier_walk import FrontierOperator, operand_reads, propagate_frontiers, walked_rows
from sft.common.interval import Interval

__all__ = [
    "NodeRows",
    "OperandRead",
    "RowBand",
    "StripSchedule",
    "StripStep",
    "build_schedule",
    "row_rates",
    "source_rates",
    "total_stride",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBand:
    """The part of an image that one of several walks is for, its halo above and below included.

    Attributes:
        computed: for each value the rows that the walk computes (of a source: reads); values that it has nothing to do with have none.
        own: for each result, and for each value that a reduction takes, the rows that are this walk's and no other's.
    """

    computed: Mapping[str, Interval]
    owned: Mapping[str, Interval]


@dataclass(frozen=True, slots=True)
class OperandRead:
    """What one operator reads of one operand in one step.

    Attributes:
        operand: the value read.
        rows: its rows, inside the image.
        pad_low: border rows above them.
        pad_high: border rows below them.
        phase: where the first row computed stands among those that one row of the operand is spread to, for operators that ask for it.
    """

    operand: str
    rows: Interval
    pad_low: int
    pad_high: int
    phase: int = 0

    @classmethod
    def clipped(cls, operand: str, span: Interval, extent: int, phase: int = 0) -> OperandRead:
        """The read of ``span``, borders ignored, of a value of ``extent`` rows.

        >>> OperandRead.clipped("x", Interval(-1, 8), 6)
        Read(operand='x', rows=Interval(start=0, stop=6), pad_low=1, pad_high=2, phase=0)
        """
        rows = span.clip(extent)
        pad_low = min(max(0, -span.start), len(span))
        return cls(operand=operand, rows=rows, pad_low=pad_low, pad_high=len(span) - pad_low - len(rows), phase=phase)


@dataclass(frozen=True, slots=True)
class NodeRows:
    """One value in one step.

    Attributes:
        name: the value.
        new: rows computed in this step (for an input of the run: rows that arrive).
        held: rows that are at hand during the step: carried ones, then new ones.
        kept: rows carried into the next step.
        wanted: the part of ``new`` that is this step's own: all of it, unless neighbouring steps compute it too. Only this part is
            written out, takes a gradient from outside, and is reduced.
        reads: what the operator reads, one entry for each streamed operand.
    """

    name: str
    new: Interval
    available: Interval
    kept: Interval
    owned: Interval
    reads: tuple[OperandRead, ...]

    @property
    def carried(self) -> Interval:
        """Rows that earlier steps left."""
        return Interval(self.available.start, self.new.start)

    @property
    def appended(self) -> Interval:
        """Rows of this step that later steps need: what the row store gains."""
        return Interval(max(self.kept.start, self.new.start), self.kept.stop)


@dataclass(frozen=True)
class StripStep:
    """One strip: what every value gains, holds and keeps, in global rows."""

    index: int
    nodes: tuple[NodeRows, ...]

    def __getitem__(self, name: str) -> NodeRows:
        return self._by_name[name]

    @cached_property
    def signature(self) -> tuple[Hashable, ...]:
        """For each value what the program depends on of it: positions count from each value's own first row."""
        first = {node.name: node.available.start for node in self.nodes}
        return tuple(
            (
                (len(node.new), len(node.available), len(node.kept)),
                node.owned.shift(-node.new.start) if node.owned else None,
                tuple((read.rows.shift(-first[read.operand]), read.pad_low, read.pad_high, read.phase) for read in node.reads),
            )
            for node in self.nodes
        )

    @cached_property
    def _by_name(self) -> dict[str, NodeRows]:
        return {node.name: node for node in self.nodes}


Rows = npt.NDArray[np.int64]

_NOTHING = Interval(0, 0)


@dataclass(frozen=True, kw_only=True)
class StripSchedule:
    """All steps of one run, as arrays over the steps.

    Attributes:
        sources: the values that enter the run from outside, whole.
        names: sources, then the run's operators in order.
        extents: each value's rows in the whole image (0 for global values).
        frontier: for each value its rows at hand before step ``i`` (index ``num_steps`` is the end).
        kept: for each value the first row still needed at that point.
        reads: for each operator its streamed operands with access maps' first and last rows, before clipping.
        phases: for each operator that asks for it the phase of its first new row in each step; see :class:`OperandRead`.
        strip_rows: rows of the tallest source that one step advances by.
        own: of a band (:class:`RowBand`), for each result the rows that are its own.
    """

    sources: tuple[str, ...]
    names: tuple[str, ...]
    extents: Mapping[str, int]
    frontier: Mapping[str, Rows]
    kept: Mapping[str, Rows]
    reads: Mapping[str, tuple[tuple[str, Rows, Rows], ...]]
    phases: Mapping[str, Rows]
    strip_rows: int
    owned: Mapping[str, Interval] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Number of strips."""
        return len(next(iter(self.frontier.values()))) - 1

    def step(self, index: int) -> StripStep:
        """Step ``index``."""
        return StripStep(index=index, nodes=tuple(self.node_rows(name, index) for name in self.names))

    def node_rows(self, name: str, index: int) -> NodeRows:
        """One value in step ``index``."""
        frontier, kept, end = self.frontier[name], self.kept[name], index + 1
        new = Interval(int(frontier[index]), int(frontier[end]))
        phase = int(self.phases[name][index]) if name in self.phases else 0
        spans = [(operand, int(low[index]), int(high[index])) for operand, low, high in self.reads.get(name, ())]
        return NodeRows(
            name=name,
            new=new,
            available=Interval(int(kept[index]), new.stop),
            kept=Interval(int(kept[end]), new.stop),
            owned=(new.intersect(self.owned[name]) or _NOTHING) if name in self.owned else new,
            reads=tuple(
                OperandRead.clipped(operand, Interval(low, high), self.extents[operand], phase)
                for operand, low, high in spans
                if high > low
            ),
        )

    def first_row(self, name: str, index: int) -> int:
        """The first row that is held of a value in step ``index``."""
        return int(self.kept[name][index])

    @cached_property
    def _signatures(self) -> Rows:
        """For each step its geometry, counted from each value's own first row: all that its program depends on."""
        return np.stack([column for name in self.names for column in self._columns(name)], axis=1)

    def _columns(self, name: str) -> list[Rows]:
        """Those of one value."""
        frontier, kept = self.frontier[name], self.kept[name]
        new = frontier[1:] - frontier[:-1]
        columns = [new, frontier[:-1] - kept[:-1], frontier[1:] - kept[1:]]
        if name in self.owned:
            columns += [np.clip(end - frontier[:-1], 0, new) for end in (self.owned[name].start, self.owned[name].stop)]
        if name in self.phases:
            columns.append(np.where(new > 0, self.phases[name], 0))
        for operand, low, high in self.reads.get(name, ()):
            extent, base = self.extents[operand], self.kept[operand][:-1]
            clipped = np.clip(low, 0, extent)
            columns += [
                np.where(high > low, column, 0) for column in (clipped - base, np.clip(high, 0, extent) - base, high - low, clipped - low)
            ]
        return columns

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        """For each value where its part of a signature begins and ends, in bytes."""
        counts = (3 + 2 * (name in self.owned) + (name in self.phases) + 4 * len(self.reads.get(name, ())) for name in self.names)
        ends = [0, *accumulate(8 * count for count in counts)]
        return tuple(pairwise(ends))

    def signatures(self, index: int) -> Sequence[Hashable]:
        """The signature of a step taken apart: for each value, in order, what the program depends on of its own rows and reads."""
        whole = self.signature(index)
        return [whole[start:stop] for start, stop in self._places]

    def signature(self, index: int) -> bytes:
        """All of a step that its program depends on."""
        return bytes(self._signatures[index].tobytes())

    def geometry(self, index: int) -> bytes:
        """What the signature of one step says, without those of the others."""
        found: list[int] = []
        ends = {name: self._ends(name, index) for name in self.names}
        for name in self.names:
            start, stop, base, keeps = ends[name]
            found += (stop - start, start - base, stop - keeps)
            if name in self.owned:
                found += (self.owned[name].start - start, self.owned[name].stop - start)
            if name in self.phases:
                found.append(int(self.phases[name][index]))
            for operand, low, high in self.reads.get(name, ()):
                first, end, extent = low.item(index), high.item(index), self.extents[operand]
                if end > first:
                    held = ends[operand][2]
                    found += (max(0, min(first, extent)) - held, max(0, min(end, extent)) - held, end - first, max(0, -first))
        return np.array(found, dtype=np.int64).tobytes()

    def _ends(self, name: str, index: int) -> tuple[int, int, int, int]:
        """Where a value's new rows begin and end in a step, and where those that it holds begin before and after."""
        frontier, kept = self.frontier[name], self.kept[name]
        return frontier.item(index), frontier.item(index + 1), kept.item(index), kept.item(index + 1)

    def structural_hash(self) -> bytes:
        """All of the steps that their cost depends on: equal for walks that compute the same elsewhere in an image."""
        return hashlib.sha256(self._signatures.tobytes()).digest()

    @cached_property
    def kinds(self) -> tuple[Rows, Rows]:
        """Step indices with pairwise different signatures, and for each step which of them it equals."""
        first: list[int] = []
        numbers: dict[bytes, int] = {}
        kinds = np.empty(self.num_steps, dtype=np.int64)
        for index, row in enumerate(self._signatures):
            number = numbers.setdefault(row.tobytes(), len(first))
            if number == len(first):
                first.append(index)
            kinds[index] = number
        return np.array(first, dtype=np.int64), kinds

    def rows_read(self, name: str, readers: Collection[str]) -> tuple[Rows, Rows]:
        """First row, and the one behind the last, that some operators read of a value in each step; both 0 where they read none."""
        extent = self.extents[name]
        start = np.full(self.num_steps, extent, dtype=np.int64)
        stop = np.zeros(self.num_steps, dtype=np.int64)
        for reader in readers:
            for operand, low, high in self.reads.get(reader, ()):
                if operand == name:
                    first, end = np.clip(low, 0, extent), np.clip(high, 0, extent)
                    is_read = (high > low) & (end > first)
                    start = np.where(is_read, np.minimum(start, first), start)
                    stop = np.where(is_read, np.maximum(stop, end), stop)
        return np.where(stop > start, start, 0), stop

    def carried_rows(self, index: int) -> dict[str, Interval]:
        """The rows carried into step ``index``: the state of the walk, a checkpoint from which it can restart."""
        return {
            name: Interval(int(self.kept[name][index]), int(self.frontier[name][index]))
            for name in self.names
            if name not in self.sources and self.kept[name][index] < self.frontier[name][index]
        }


def source_rates(heights: Mapping[str, int]) -> dict[str, Fraction]:
    """Rows of each source per row of the tallest; sources of one image stand in whole ratios up to rounding at the border."""
    tallest = max(heights.values(), default=1)
    return {name: Fraction(1, max(1, round(tallest / height))) for name, height in heights.items()}


def row_rates(graph: Graph, names: Sequence[str], sources: Mapping[str, Fraction], rows: Mapping[str, Operator]) -> dict[str, Fraction]:
    """Rows of each value per row of the walked input, given the sources' rates (global values have none)."""
    rates = dict(sources)
    for name in names:
        row = rows[name]
        operands = [operand for operand in graph[name].operands if operand in rates]
        if row.role == "reduce" or not operands:
            continue
        access = row.access(graph[name], 0)
        rates[name] = rates[operands[0]] * access.divisor / access.scale
    return rates


def total_stride(rates: Mapping[str, Fraction]) -> int:
    """Rows of the walked input after which the pattern of every value repeats."""
    return lcm(*(rate.denominator for rate in rates.values()))


def build_schedule(
    graph: Graph,
    names: Sequence[str],
    rows: Mapping[str, Operator],
    streamed: frozenset[str],
    extents: Mapping[str, int],
    strip_rows: int,
    band: RowBand | None = None,
) -> StripSchedule:
    """Walk the operators ``names`` in strips of ``strip_rows`` rows of their tallest source.

    Args:
        graph: the graph, ``names`` in its order.
        names: the operators of the run: streamed ones and reductions.
        rows: the operator table's row of each operator.
        streamed: the values that come in strips.
        extents: rows of every streamed value.
        strip_rows: at least 1; clipped to the image.
        band: the part of the image that the walk is for; all of it by default. A band of no rows has no steps.
    """
    sources = graph.sources(names, streamed)
    height = max(extents[name] for name in sources)
    computed = {
        name: Interval(0, extents[name]) if band is None else band.computed[name] for name in (*sources, *names) if name in streamed
    }
    own = computed if band is None else band.owned
    walked = walked_rows(sources, computed, extents, height)
    strip = max(1, min(strip_rows, len(walked)))
    operators = [FrontierOperator.of(graph[name], rows[name], streamed) for name in names]
    unclipped = propagate_frontiers(operators, streamed, extents, sources, computed, walked, strip)
    frontier: dict[str, Rows] = {}
    clipped: dict[tuple[int, Interval], Rows] = {}
    for name in (*sources, *names):
        if name in streamed:
            # What is computed pixel by pixel is as far as what it is computed of, and shares its array.
            key = (id(unclipped[name]), computed[name])
            if key not in clipped:
                clipped[key] = np.minimum(np.maximum(unclipped[name], computed[name].start), computed[name].stop)
                clipped[key][0] = computed[name].start
            frontier[name] = clipped[key]
        else:
            frontier[name] = np.zeros_like(unclipped[sources[0]])
    reads: dict[str, tuple[tuple[str, Rows, Rows], ...]] = {}
    phases: dict[str, Rows] = {}
    kept = dict(frontier)
    for operator in operators:
        name = operator.name
        entries = []
        window = operator.window(frontier)
        for operand in operator.operands:
            low, high, floor_row = operand_reads(operator, window, frontier, operand, computed, own)
            entries.append((operand, low, high))
            if floor_row is not frontier[operand]:
                kept[operand] = np.minimum(kept[operand], floor_row)
        reads[name] = tuple(entries)
        if operator.is_phased:
            access = operator.access
            phases[name] = (access.scale * frontier[name][:-1] + access.first) % access.divisor
    return StripSchedule(
        sources=sources,
        names=(*sources, *names),
        extents={name: extents.get(name, 0) for name in (*sources, *names)},
        frontier=frontier,
        kept=kept,
        reads=reads,
        phases=phases,
        strip_rows=strip,
        owned={} if band is None else {name: own[name] for name in names if name in own and name in streamed},
    )
