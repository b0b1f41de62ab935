"""One tile computed by itself: from the rows wanted of a segment's results back to the rows that every operator needs.

Source: Xu et al., CC 2022, section 4.3 and Listing 4. The reverse walk is the listing's: a value is needed where any of its readers
reads it, and an operator reads what its access map says. The listing propagates *sizes* (``sigma * T + delta``, largest over the
readers), which holds for tiles of equal size far from the border; here *positions* are propagated, so that a tile anywhere gets
exactly its halo, clipped at the image, and knows how much padding it has. Nor does the backward pass ask for a wider halo: a tile's
gradient with respect to a row that neighbouring tiles read too is a summand, and the sum over the tiles is the whole.

The result is a :class:`Step` that carries nothing in or out. A result that is upsampled, or read inside too, may be computed beyond the
part wanted; what comes from outside (its gradient) belongs to the part wanted alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sft.analysis.graph import Graph
from sft.analysis.interval import Interval
from sft.analysis.operators import Operator
from sft.analysis.schedule import NodeRows, Read, Step

__all__ = ["tile_step"]

_NOTHING = Interval(0, 0)


def tile_step(
    graph: Graph,
    names: Sequence[str],
    rows: Mapping[str, Operator],
    streamed: Collection[str],
    extents: Mapping[str, int],
    wanted: Mapping[str, Interval],
    *,
    axis: int = 0,
    index: int = 0,
) -> Step:
    """What a tile computes and reads along one axis.

    Args:
        graph: the graph, ``names`` in its order.
        names: the operators of the segment: streamed ones and reductions.
        rows: the operator table's row of each operator.
        streamed: the values that are tiled.
        extents: extent along the axis of every streamed value.
        wanted: the part of each result that the tile is for. A reduction takes of its operand exactly the part wanted, not the
            halo that other readers add to it, so that the tiles of an image count each element once.
        axis: index into ``AXES``; "rows" are columns along the width.
        index: the tile's number.
    """
    needed = {name: interval.clip(extents[name]) for name, interval in wanted.items()}
    reads: dict[str, tuple[Read, ...]] = {}
    for name in reversed(names):
        node, row = graph[name], rows[name]
        operands = tuple(dict.fromkeys(row.streamed_operands(node, streamed)))
        if row.role == "reduce":
            taken = {operand: wanted.get(operand, _NOTHING) for operand in operands}
        else:
            part = needed.get(name, _NOTHING)
            whole = row.access(node, axis).divisor
            if part and whole > 1:
                # Upsampling is computed by whole input rows, whose further copies cost no read.
                part = needed[name] = Interval(part.start // whole * whole, -(-part.stop // whole) * whole)
            taken = {operand: row.access(node, axis).read(part) for operand in operands} if part else {}
        reads[name] = tuple(Read.clipped(operand, span, extents[operand]) for operand, span in taken.items() if span)
        for read in reads[name]:
            needed[read.operand] = needed.get(read.operand, _NOTHING).hull(read.rows)
    sources = graph.sources(names, streamed)
    return Step(index=index, nodes=tuple(_alone(name, needed.get(name, _NOTHING), reads.get(name, ())) for name in (*sources, *names)))


def _alone(name: str, rows: Interval, reads: tuple[Read, ...]) -> NodeRows:
    return NodeRows(name=name, new=rows, held=rows, kept=Interval(rows.stop, rows.stop), reads=reads)
