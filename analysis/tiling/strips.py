"""Strip schedules: the rows of every value that each strip of a run computes, reads and carries.

A run of streamed operators is swept in strips of rows of its tallest input. After the input has advanced to row ``R``, every value ``v``
has grown to its frontier ``F_v(R)``: all rows that can be computed from the rows available. Frontiers follow the access maps
(:mod:`sft.analysis.ir.access`) with the image's borders ignored, and are clipped to ``[0, extent]`` only when rows are counted. ``R`` can
therefore run past the last row: rows held back by the operators' halos are computed in further strips of the same size instead of one tall
last strip, and rows beyond the border are padding, known in advance.

After a strip the rows of ``v`` from ``K_v = min(lo(F_w))`` over its readers ``w`` up to ``F_v`` are *carried*: later rows still read them
(the halo). Each row of each value is thus computed exactly once::

    3x3 convolution y of x, padding 1, strips of 4 rows
    strip   rows of x read     rows of y computed     rows of x carried
    0       [-1, 4)            [0, 3)                 [2, 4)
    1       [2, 8)             [3, 7)                 [6, 8)

Positions are integer arrays over the strips, so a schedule of thousands of strips takes as many NumPy operations as a short one. All rows
are global: they count in the full image at that layer, independent of the strip or band that computes them.
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

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.frontier_walk import FrontierOperator, operand_reads, propagate_frontiers, swept_rows
from sft.analysis.tiling.operator_run import OperatorRun
from sft.common.interval import Interval

__all__ = [
    "NodeRows",
    "OperandRead",
    "RowBand",
    "RowsChange",
    "StripSchedule",
    "StripStep",
    "build_schedule",
    "row_rates",
    "source_rates",
    "total_stride",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBand:
    """The share of an image that one rank's sweep computes, halo above and below included.

    Attributes:
        computed: for each value the rows that the sweep computes (of a source: reads); empty for values that it does not need.
        owned: for each result, and for each operand of a reduction, the rows that belong to this sweep only.
    """

    computed: Mapping[str, Interval]
    owned: Mapping[str, Interval]


@dataclass(frozen=True, slots=True)
class OperandRead:
    """The rows of one operand that one operator reads in one strip.

    Attributes:
        operand: the value read.
        rows: its rows, inside the image.
        pad_low: border rows above them.
        pad_high: border rows below them.
        phase: index of the first computed row among the output rows of one operand row, for phased operators; otherwise 0.
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
        OperandRead(operand='x', rows=Interval(start=0, stop=6), pad_low=1, pad_high=2, phase=0)
        """
        rows = span.clip(extent)
        pad_low = min(max(0, -span.start), len(span))
        return cls(operand=operand, rows=rows, pad_low=pad_low, pad_high=len(span) - pad_low - len(rows), phase=phase)


@dataclass(frozen=True, slots=True)
class NodeRows:
    """The rows of one value in one strip.

    Attributes:
        name: the value.
        new: rows computed in this strip (of a source: rows that arrive).
        available: rows in memory during the strip: carried ones, then new ones.
        kept: rows carried into the next strip.
        owned: the rows of ``new`` that belong to this strip only: all of them, unless neighbouring tiles compute them too. Only these rows
            are written out, receive a gradient from outside, and are reduced.
        reads: the operator's reads, one entry for each streamed operand.
    """

    name: str
    new: Interval
    available: Interval
    kept: Interval
    owned: Interval
    reads: tuple[OperandRead, ...]

    @property
    def carried(self) -> Interval:
        """Rows carried in from earlier strips."""
        return Interval(self.available.start, self.new.start)

    @property
    def appended(self) -> Interval:
        """New rows that later strips need: the growth of the row store."""
        return Interval(max(self.kept.start, self.new.start), self.kept.stop)


@dataclass(frozen=True)
class StripStep:
    """One strip: the rows of every value, in global rows."""

    index: int
    nodes: tuple[NodeRows, ...]

    def __getitem__(self, name: str) -> NodeRows:
        return self._by_name[name]

    @cached_property
    def signature(self) -> tuple[Hashable, ...]:
        """For each value the geometry that the strip's program depends on; positions count from each value's first available row."""
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
#: A value, and the bounds (start, stop) of its carried rows in a state and in the next one.
RowsChange = tuple[str, tuple[int, int], tuple[int, int]]

_EMPTY = Interval(0, 0)


@dataclass(frozen=True, kw_only=True)
class StripSchedule:
    """All strips of one run, as arrays over the strips.

    Attributes:
        sources: the values that enter the run from outside, untiled.
        names: sources, then the run's operators in order.
        extents: each value's rows in the full image (0 for global values).
        frontier: for each value its rows available before strip ``i`` (index ``num_steps`` is the end).
        kept: for each value the first row still needed at that point.
        reads: for each operator its streamed operands with the access maps' first and end rows, before clipping.
        phases: for each phased operator the phase of its first new row in each strip; see :class:`OperandRead`.
        strip_rows: rows of the tallest source that one strip advances by.
        owned: for a band (:class:`RowBand`) the rows of each result that belong to it.
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
        """Strip ``index``."""
        return StripStep(index=index, nodes=tuple(self.node_rows(name, index) for name in self.names))

    def node_rows(self, name: str, index: int) -> NodeRows:
        """Rows of one value in strip ``index``."""
        frontier, kept, end = self.frontier[name], self.kept[name], index + 1
        new = Interval(int(frontier[index]), int(frontier[end]))
        phase = int(self.phases[name][index]) if name in self.phases else 0
        spans = [(operand, int(low[index]), int(high[index])) for operand, low, high in self.reads.get(name, ())]
        return NodeRows(
            name=name,
            new=new,
            available=Interval(int(kept[index]), new.stop),
            kept=Interval(int(kept[end]), new.stop),
            owned=(new.intersect(self.owned[name]) or _EMPTY) if name in self.owned else new,
            reads=tuple(
                OperandRead.clipped(operand, Interval(low, high), self.extents[operand], phase)
                for operand, low, high in spans
                if high > low
            ),
        )

    def first_row(self, name: str, index: int) -> int:
        """First available row of a value in strip ``index``."""
        return int(self.kept[name][index])

    @cached_property
    def _signatures(self) -> Rows:
        """Geometry of each strip, the input of its program; positions count from each value's first available row."""
        return np.stack([column for name in self.names for column in self._columns(name)], axis=1)

    def _columns(self, name: str) -> list[Rows]:
        """Columns of the signature matrix for one value."""
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
    def _signature_spans(self) -> tuple[tuple[int, int], ...]:
        """For each value the byte range of its columns in a signature."""
        counts = (3 + 2 * (name in self.owned) + (name in self.phases) + 4 * len(self.reads.get(name, ())) for name in self.names)
        ends = [0, *accumulate(8 * count for count in counts)]
        return tuple(pairwise(ends))

    def signatures(self, index: int) -> Sequence[Hashable]:
        """The signature of a strip split by value: the geometry of the value's rows and reads."""
        signature = self.signature(index)
        return [signature[start:stop] for start, stop in self._signature_spans]

    def signature(self, index: int) -> bytes:
        """The geometry of a strip, which determines its program."""
        return bytes(self._signatures[index].tobytes())

    def geometry(self, index: int) -> bytes:
        """The information of :meth:`signature` for a single strip, computed without the signatures of all strips."""
        entries: list[int] = []
        ends = {name: self._ends(name, index) for name in self.names}
        for name in self.names:
            start, stop, base, keeps = ends[name]
            entries += (stop - start, start - base, stop - keeps)
            if name in self.owned:
                entries += (self.owned[name].start - start, self.owned[name].stop - start)
            if name in self.phases:
                entries.append(int(self.phases[name][index]))
            for operand, low, high in self.reads.get(name, ()):
                first, end, extent = low.item(index), high.item(index), self.extents[operand]
                if end > first:
                    base_row = ends[operand][2]
                    entries += (max(0, min(first, extent)) - base_row, max(0, min(end, extent)) - base_row, end - first, max(0, -first))
        return np.array(entries, dtype=np.int64).tobytes()

    def _ends(self, name: str, index: int) -> tuple[int, int, int, int]:
        """Start and stop of a value's new rows in a strip, and its first kept row before and after it."""
        frontier, kept = self.frontier[name], self.kept[name]
        return frontier.item(index), frontier.item(index + 1), kept.item(index), kept.item(index + 1)

    def structural_hash(self) -> bytes:
        """Hash of the geometry of all strips, which determines their cost; independent of the position in the image."""
        return hashlib.sha256(self._signatures.tobytes()).digest()

    @cached_property
    def kinds(self) -> tuple[Rows, Rows]:
        """Indices of strips with pairwise different signatures, and for each strip the position of its own among them."""
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
        """First and end row of a value that some operators read in each strip; both 0 if they read none."""
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
        """The rows carried into strip ``index``: the state of the sweep, a checkpoint from which it can restart."""
        names, rows = self._rows_in_memory
        starts, stops = rows[:, index].tolist()
        return {name: Interval(start, stop) for name, start, stop in zip(names, starts, stops, strict=True) if start < stop}

    def row_changes(self, index: int) -> list[RowsChange]:
        """Changes of the carried rows from state ``index`` to ``index + 1``."""
        names, rows = self._rows_in_memory
        before, after = rows[:, index], rows[:, index + 1]
        changed = (before != after).any(0).nonzero()[0].tolist()
        before, after = before.T.tolist(), after.T.tolist()
        return [(names[number], before[number], after[number]) for number in changed]

    @cached_property
    def _rows_in_memory(self) -> tuple[tuple[str, ...], Rows]:
        """Operators of the run; the bounds (start, stop) of their rows in memory, by strip and operator."""
        names = tuple(name for name in self.names if name not in self.sources)
        bounds = [[rows[name] for name in names] for rows in (self.kept, self.frontier)]
        return names, np.array(bounds, dtype=np.int64).reshape(2, len(names), self.num_steps + 1).transpose(0, 2, 1)


def source_rates(heights: Mapping[str, int]) -> dict[str, Fraction]:
    """Rows of each source per row of the tallest. Sources of one image have integer ratios, up to rounding at the border."""
    tallest = max(heights.values(), default=1)
    return {name: Fraction(1, max(1, round(tallest / height))) for name, height in heights.items()}


def row_rates(run: OperatorRun, sources: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """Rows of each value per row of the swept input, given the sources' rates; global values have none."""
    rates = dict(sources)
    for name in run.names:
        row = run.rows[name]
        operands = [operand for operand in run.graph[name].operands if operand in rates]
        if row.role == "reduce" or not operands:
            continue
        access = row.access(run.graph[name], ROWS)
        rates[name] = rates[operands[0]] * access.divisor / access.scale
    return rates


def total_stride(rates: Mapping[str, Fraction]) -> int:
    """Rows of the swept input after which the pattern of every value repeats."""
    return lcm(*(rate.denominator for rate in rates.values()))


def build_schedule(run: OperatorRun, extents: Mapping[str, int], strip_rows: int, band: RowBand | None = None) -> StripSchedule:
    """Sweep a run in strips of ``strip_rows`` rows of its tallest source.

    Args:
        run: the operators.
        extents: rows of every streamed value.
        strip_rows: at least 1; clipped to the image.
        band: the share of the image to sweep; all of it by default. A band without rows has no strips.
    """
    names, sources, streamed = run.names, run.sources, run.streamed
    height = max(extents[name] for name in sources)
    computed = {
        name: Interval(0, extents[name]) if band is None else band.computed[name] for name in (*sources, *names) if name in streamed
    }
    owned = computed if band is None else band.owned
    swept = swept_rows(sources, computed, extents, height)
    strip = max(1, min(strip_rows, len(swept)))
    operators = [FrontierOperator.of(run.graph[name], run.rows[name], streamed) for name in names]
    unclipped = propagate_frontiers(operators, extents, sources, computed, swept, strip)
    frontier: dict[str, Rows] = {}
    clipped: dict[tuple[int, Interval], Rows] = {}
    for name in (*sources, *names):
        if name in streamed:
            # A per-pixel operator has the frontier of its operand, and shares its array.
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
            low, high, floor_row = operand_reads(operator, window, frontier, operand, computed, owned)
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
        owned={} if band is None else {name: owned[name] for name in names if name in owned and name in streamed},
    )
