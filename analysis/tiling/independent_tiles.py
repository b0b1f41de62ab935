"""Tiles computed by themselves: from the rows wanted of a segment's results back to the rows that every operator needs.

Source: Xu et al., CC 2022, section 4.3 and Listing 4. The reverse walk is the listing's: a value is needed where any of its readers
reads it, and an operator reads what its access map says. The listing propagates *sizes* (``sigma * T + delta``, largest over the
readers), which holds for tiles of equal size far from the border; here *positions* are propagated, so that a tile anywhere gets
exactly its halo, clipped at the image, and knows how much padding it has. Nor does the backward pass ask for a wider halo: a tile's
gradient with respect to a row that neighbouring tiles read too is a summand, and the sum over the tiles is the whole.

The result is a :class:`StripStep` that carries nothing in or out. A result that is upsampled, or read inside too, may be computed beyond
the part wanted; what comes from outside (its gradient) belongs to the part wanted alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sft.analysis.ir.graph import Graph
from sft.analysis.ir.ops import Operator
from sft.analysis.tiling.strips import NodeRows, OperandRead, StripStep
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

_NOTHING = Interval(0, 0)


def independent_tile(
    graph: Graph,
    names: Sequence[str],
    rows: Mapping[str, Operator],
    streamed: Collection[str],
    extents: Mapping[str, int],
    wanted: Mapping[str, Interval],
    *,
    axis: int = 0,
    index: int = 0,
) -> StripStep:
    """What a tile computes and reads along one axis.

    Args:
        graph: the graph, ``names`` in its order.
        names: the operators of the segment: streamed ones and reductions.
        rows: the operator table's row of each operator.
        streamed: the values that are tiled.
        extents: extent along the axis of every streamed value.
        wanted: the part of each result that the tile is for. A reduction takes of its operand exactly the part wanted, not the
            halo that other readers add to it, so that the tiles of an image count each element once.
        axis: of the image; "rows" are columns along the second one.
        index: the tile's number.
    """
    needed, taken = _required_rows(graph, names, rows, streamed, extents, wanted, axis)
    reads: dict[str, tuple[OperandRead, ...]] = {}
    for name, spans in taken.items():
        phase = rows[name].access(graph[name], axis).phase(needed[name].start) if rows[name].is_phased and name in needed else 0
        reads[name] = tuple(OperandRead.clipped(operand, span, extents[operand], phase) for operand, span in spans)
    nodes = []
    for name in (*graph.sources(names, streamed), *names):
        own = wanted[name].clip(extents[name]) if name in wanted else _NOTHING
        nodes.append(_uncarried_rows(name, needed.get(name, _NOTHING), own, reads.get(name, ())))
    return StripStep(index=index, nodes=tuple(nodes))


def tile_lengths(
    graph: Graph,
    names: Sequence[str],
    rows: Mapping[str, Operator],
    streamed: Collection[str],
    extents: Mapping[str, int],
    wanted: Mapping[str, Interval],
    *,
    axis: int = 0,
) -> dict[str, int]:
    """How many rows the tile of :func:`independent_tile` computes of each value, and needs of each source; values without any are left
    out.
    """
    needed, _ = _required_rows(graph, names, rows, streamed, extents, wanted, axis)
    return {name: len(part) for name, part in needed.items() if part}


def _required_rows(
    graph: Graph,
    names: Sequence[str],
    rows: Mapping[str, Operator],
    streamed: Collection[str],
    extents: Mapping[str, int],
    wanted: Mapping[str, Interval],
    axis: int,
) -> tuple[dict[str, Interval], dict[str, list[tuple[str, Interval]]]]:
    """The rows needed of each value, and what each operator reads of its operands, borders ignored."""
    needed = {name: interval.clip(extents[name]) for name, interval in wanted.items()}
    taken: dict[str, list[tuple[str, Interval]]] = {}
    for name in reversed(names):
        node, row = graph[name], rows[name]
        operands = dict.fromkeys(row.streamed_operands(node, streamed))
        if row.role == "reduce":
            spans = [(operand, wanted[operand]) for operand in operands if wanted.get(operand)]
        elif part := needed.get(name, _NOTHING):
            part = needed[name] = row.computed(node, axis, part)
            span = row.access(node, axis).read(part)
            spans = [(operand, span) for operand in operands] if span else []
        else:
            spans = []
        taken[name] = spans
        for operand, span in spans:
            needed[operand] = needed.get(operand, _NOTHING).hull(span.clip(extents[operand]))
    return needed, taken


def _uncarried_rows(name: str, rows: Interval, wanted: Interval, reads: tuple[OperandRead, ...]) -> NodeRows:
    return NodeRows(name=name, new=rows, available=rows, kept=Interval(rows.stop, rows.stop), owned=wanted, reads=reads)


def tile_lengths_at(
    graph: Graph,
    names: Sequence[str],
    rows: Mapping[str, Operator],
    streamed: Collection[str],
    extents: Mapping[str, int],
    span: Interval,
    *,
    axis: int,
) -> dict[str, int]:
    """What :func:`tile_lengths` tells of the tile of :func:`independent_tile_at`."""
    wanted = _proportional_rows(graph, names, rows, streamed, extents)(span)
    return tile_lengths(graph, names, rows, streamed, extents, wanted, axis=axis)


def _proportional_rows(
    graph: Graph, names: Sequence[str], rows: Mapping[str, Operator], streamed: Collection[str], extents: Mapping[str, int]
) -> Callable[[Interval], dict[str, Interval]]:
    """For pixels of the largest source what is wanted of each result, and of everything that a reduction takes."""
    extent = max(extents[name] for name in graph.sources(names, streamed))
    reduced = (o for name in names if rows[name].role == "reduce" for o in rows[name].streamed_operands(graph[name], streamed))
    ends = dict.fromkeys((*(name for name in graph.live_out(names) if name in streamed), *reduced))
    return lambda span: {name: Interval(*(-(-at * extents[name] // extent) for at in (span.start, span.stop))) for name in ends}


def independent_tiles(
    graph: Graph,
    names: Sequence[str],
    rows: Mapping[str, Operator],
    streamed: Collection[str],
    extents: Mapping[str, int],
    tile_px: int,
    *,
    axis: int,
) -> tuple[StripStep, ...]:
    """The tiles along one axis that stand for ``tile_px`` pixels of the largest source each; tiles without any result are left out."""
    extent = max(extents[name] for name in graph.sources(names, streamed))
    wanted_in = _proportional_rows(graph, names, rows, streamed, extents)
    steps: list[StripStep] = []
    for start in range(0, extent, tile_px):
        wanted = wanted_in(Interval(start, min(start + tile_px, extent)))
        step = independent_tile(graph, names, rows, streamed, extents, wanted, axis=axis, index=len(steps))
        if any(node.owned for node in step.nodes):
            steps.append(step)
    return tuple(steps)


def distinct_steps(steps: Sequence[StripStep]) -> tuple[Rows, Rows]:
    """Indices of steps with pairwise different signatures, and for each step which of them it equals."""
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
    """Steps that carry nothing: every tile computes its own halo. In other respects what :class:`Schedule` is.

    Attributes:
        sources: the values that enter the run from outside, whole.
        names: sources, then the run's operators in order.
        steps: the tiles.
        strip_rows: rows of the tallest source that a tile stands for.
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
        """One value in tile ``index``."""
        return self.steps[index][name]

    def first_row(self, name: str, index: int) -> int:
        """The first row of a value in tile ``index``."""
        return self.steps[index][name].available.start

    def signatures(self, index: int) -> Sequence[Hashable]:
        """For each value, in order, what a tile's program depends on of its rows and reads."""
        return self.steps[index].signature

    @cached_property
    def kinds(self) -> tuple[Rows, Rows]:
        """Tile indices with pairwise different signatures, and for each tile which of them it equals."""
        return distinct_steps(self.steps)

    @cached_property
    def frontier(self) -> Mapping[str, Rows]:
        """Nothing is at hand before a tile."""
        return dict.fromkeys(self.names, np.zeros(self.num_steps + 1, dtype=np.int64))

    @property
    def kept(self) -> Mapping[str, Rows]:
        """Nothing is kept behind one."""
        return self.frontier

    def rows_read(self, name: str, readers: Collection[str]) -> tuple[Rows, Rows]:
        """First row, and the one behind the last, that some operators read of a value in each tile; both 0 where they read none."""
        spans = []
        for step in self.steps:
            rows = _NOTHING
            for node in step.nodes:
                for read in node.reads:
                    if read.operand == name and node.name in readers:
                        rows = rows.hull(read.rows)
            spans.append((rows.start, rows.stop) if rows else (0, 0))
        return np.array([start for start, _ in spans], dtype=np.int64), np.array([stop for _, stop in spans], dtype=np.int64)

    def carried_rows(self, index: int) -> dict[str, Interval]:
        """Nothing is carried."""
        return {}
