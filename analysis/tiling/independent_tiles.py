"""Independent (overlapped) tiles: from the rows requested of a segment's results back to the rows that every operator needs, halo included.

Source: Xu et al., CC 2022, section 4.3 and Listing 4. The reverse traversal is the listing's: a value is needed where any of its readers
reads it, and an operator reads the rows of its access map. The listing propagates *sizes* (``sigma * T + delta``, largest over the
readers), which holds for tiles of equal size far from the border. Here *positions* are propagated, so a tile anywhere gets exactly its
halo, clipped at the image, and its amount of padding. The backward pass needs no wider halo: a tile's gradient with respect to a row that
neighbouring tiles read too is a summand, and the sum over the tiles is the full gradient.

A tile is a :class:`sft.analysis.tiling.strips.StripStep` without carried rows. Of an upsampled result, or one also read inside, more rows
may be computed than requested; a gradient from outside applies to the requested rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.operator_run import OperatorRun
from sft.analysis.tiling.strips import NodeRows, OperandRead, RowsChange, StripStep
from sft.common.interval import Interval

__all__ = [
    "TileSchedule",
    "distinct_steps",
    "independent_tile",
    "independent_tiles",
    "tile_lengths",
    "tile_lengths_at",
]

Rows = npt.NDArray[np.int64]

_EMPTY = Interval(0, 0)


def independent_tile(
    run: OperatorRun, extents: Mapping[str, int], owned: Mapping[str, Interval], *, axis: int = ROWS, index: int = 0
) -> StripStep:
    """The rows that a tile of a run computes and reads along one axis.

    Args:
        run: the operators of the segment.
        extents: extent along the axis of every streamed value.
        owned: the rows of each result that belong to the tile. A reduction reads exactly these rows of its operand, without the halo that
            further readers add, so the tiles of an image count each element once.
        axis: axis of the image; "rows" are columns along the second one.
        index: the tile's number.
    """
    needed, spans_of = _required_rows(run, extents, owned, axis)
    reads: dict[str, tuple[OperandRead, ...]] = {}
    for name, spans in spans_of.items():
        row = run.rows[name]
        phase = row.access(run.graph[name], axis).phase(needed[name].start) if row.is_phased and name in needed else 0
        reads[name] = tuple(OperandRead.clipped(operand, span, extents[operand], phase) for operand, span in spans)
    nodes = []
    for name in (*run.sources, *run.names):
        owned_rows = owned[name].clip(extents[name]) if name in owned else _EMPTY
        nodes.append(_uncarried_rows(name, needed.get(name, _EMPTY), owned_rows, reads.get(name, ())))
    return StripStep(index=index, nodes=tuple(nodes))


def tile_lengths(run: OperatorRun, extents: Mapping[str, int], owned: Mapping[str, Interval], *, axis: int) -> dict[str, int]:
    """Number of rows of each value that :func:`independent_tile` computes or, of a source, reads; values without any are left out."""
    needed, _ = _required_rows(run, extents, owned, axis)
    return {name: len(interval) for name, interval in needed.items() if interval}


def _required_rows(
    run: OperatorRun, extents: Mapping[str, int], owned: Mapping[str, Interval], axis: int
) -> tuple[dict[str, Interval], dict[str, list[tuple[str, Interval]]]]:
    """The rows needed of each value, and the operands' rows that each operator reads, borders ignored."""
    needed = {name: interval.clip(extents[name]) for name, interval in owned.items()}
    spans_of: dict[str, list[tuple[str, Interval]]] = {}
    for name in reversed(run.names):
        node, row = run.graph[name], run.rows[name]
        operands = dict.fromkeys(run.operands(name))
        if row.role == "reduce":
            spans = [(operand, owned[operand]) for operand in operands if owned.get(operand)]
        elif interval := needed.get(name, _EMPTY):
            interval = needed[name] = row.computed(node, axis, interval)
            span = row.access(node, axis).read(interval)
            spans = [(operand, span) for operand in operands] if span else []
        else:
            spans = []
        spans_of[name] = spans
        for operand, span in spans:
            needed[operand] = needed.get(operand, _EMPTY).hull(span.clip(extents[operand]))
    return needed, spans_of


def _uncarried_rows(name: str, rows: Interval, owned: Interval, reads: tuple[OperandRead, ...]) -> NodeRows:
    return NodeRows(name=name, new=rows, available=rows, kept=Interval(rows.stop, rows.stop), owned=owned, reads=reads)


def tile_lengths_at(run: OperatorRun, extents: Mapping[str, int], span: Interval, *, axis: int) -> dict[str, int]:
    """The :func:`tile_lengths` of the tile that corresponds to the pixels ``span`` of the largest source.

    Every result, and every operand of a reduction, is divided among tiles in proportion, so each row belongs to one tile.
    """
    return tile_lengths(run, extents, _proportional_rows(run, extents)(span), axis=axis)


def _proportional_rows(run: OperatorRun, extents: Mapping[str, int]) -> Callable[[Interval], dict[str, Interval]]:
    """A function from pixels of the largest source to the rows that a tile owns."""
    extent, names = max(extents[name] for name in run.sources), run.owned
    return lambda span: {name: Interval(*(-(-at * extents[name] // extent) for at in (span.start, span.stop))) for name in names}


def independent_tiles(run: OperatorRun, extents: Mapping[str, int], tile_px: int, *, axis: int) -> tuple[StripStep, ...]:
    """The tiles of ``tile_px`` pixels of the largest source each, along one axis; tiles without any result are left out."""
    extent = max(extents[name] for name in run.sources)
    owned_rows = _proportional_rows(run, extents)
    steps: list[StripStep] = []
    for start in range(0, extent, tile_px):
        owned = owned_rows(Interval(start, min(start + tile_px, extent)))
        step = independent_tile(run, extents, owned, axis=axis, index=len(steps))
        if any(node.owned for node in step.nodes):
            steps.append(step)
    return tuple(steps)


def distinct_steps(steps: Sequence[StripStep]) -> tuple[Rows, Rows]:
    """Indices of tiles with pairwise different signatures, and for each tile the position of its own among them."""
    if len(steps) == 1:
        return np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    numbers: dict[tuple[Hashable, ...], int] = {}
    first: list[int] = []
    kinds = np.empty(len(steps), dtype=np.int64)
    for index, step in enumerate(steps):
        number = numbers.setdefault(step.signature, len(first))
        if number == len(first):
            first.append(index)
        kinds[index] = number
    return np.array(first, dtype=np.int64), kinds


@dataclass(frozen=True, kw_only=True)
class TileSchedule:
    """A schedule of tiles that carry no rows: every tile computes its own halo. The interface is that of :class:`StripSchedule`.

    Attributes:
        sources: the values that enter the run from outside, untiled.
        names: sources, then the run's operators in order.
        steps: the tiles.
        strip_rows: rows of the tallest source per tile.
    """

    sources: tuple[str, ...]
    names: tuple[str, ...]
    steps: tuple[StripStep, ...]
    strip_rows: int

    @property
    def num_steps(self) -> int:
        """Number of tiles."""
        return len(self.steps)

    def step(self, index: int) -> StripStep:
        """Tile ``index``."""
        return self.steps[index]

    def node_rows(self, name: str, index: int) -> NodeRows:
        """Rows of one value in tile ``index``."""
        return self.steps[index][name]

    def first_row(self, name: str, index: int) -> int:
        """First available row of a value in tile ``index``."""
        return self.steps[index][name].available.start

    def signatures(self, index: int) -> Sequence[Hashable]:
        """For each value, in order, the geometry that a tile's program depends on."""
        return self.steps[index].signature

    @cached_property
    def kinds(self) -> tuple[Rows, Rows]:
        """Tile indices with pairwise different signatures, and for each tile the position of its own among them."""
        return distinct_steps(self.steps)

    @cached_property
    def frontier(self) -> Mapping[str, Rows]:
        """All zero: no rows are available before a tile."""
        return dict.fromkeys(self.names, np.zeros(self.num_steps + 1, dtype=np.int64))

    @property
    def kept(self) -> Mapping[str, Rows]:
        """All zero: no rows are kept after a tile."""
        return self.frontier

    def rows_read(self, name: str, readers: Collection[str]) -> tuple[Rows, Rows]:
        """First and end row of a value that some operators read in each tile; both 0 if they read none."""
        spans = []
        for step in self.steps:
            rows = _EMPTY
            for node in step.nodes:
                for read in node.reads:
                    if read.operand == name and node.name in readers:
                        rows = rows.hull(read.rows)
            spans.append((rows.start, rows.stop) if rows else (0, 0))
        return np.array([start for start, _ in spans], dtype=np.int64), np.array([stop for _, stop in spans], dtype=np.int64)

    def carried_rows(self, index: int) -> dict[str, Interval]:
        """Empty: tiles carry no rows."""
        return {}

    def row_changes(self, index: int) -> list[RowsChange]:
        """Empty: tiles carry no rows."""
        return []
