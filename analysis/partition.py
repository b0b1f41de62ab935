"""The paper's partition of a network into fused-tiled segments and operators that keep their results whole.

Source: Xu et al., CC 2022, section 4.2 and Listing 3. A value that does not fit into memory *must* be tiled; any other *may* be, and
is a possible checkpoint. Every must-tile operator starts or joins a segment that reads checkpoints only and ends with a checkpoint:
the segment grows until it holds the post-dominator of each of its operators but the last, since whoever reads an unstored value has
to run in the same tiles.

The listing is read with its text where the two differ. It marks as must-tile what is *smaller* than the memory (line 4); a segment
ends *with* the first may-tile operator at or behind the post-dominators (the text: it "ends at a checkpoint"; line 36 leaves that
operator out); and its loop (line 5) stands still at a may-tile operator.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import networkx as nx

from sft.analysis.compat import fused_dimensions
from sft.analysis.graph import Graph
from sft.analysis.interval import Interval
from sft.analysis.operators import Operator
from sft.analysis.tile import tile_lengths

__all__ = ["PartitionGraphCache", "PartitionShapeCache", "Partition", "PartitionSegment", "least_tile_bytes", "partition"]


@dataclass(frozen=True, slots=True)
class PartitionGraphCache:
    """What partitions of one graph have in common, whatever the size and their limit.

    Attributes:
        dimensions: fused-tileable dimensions of the operators of a tiled segment.
        post_dominators: of runs.
    """

    dimensions: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    post_dominators: dict[tuple[str, ...], list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartitionShapeCache:
    """What partitions of one graph at one size have in common, whatever their limit.

    Attributes:
        runs: what those at other sizes have in common with them.
        tile_bytes: of the smallest tile of a tiled segment.
    """

    runs: PartitionGraphCache = field(default_factory=PartitionGraphCache)
    tile_bytes: dict[tuple[str, ...], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSegment:
    """Consecutive operators that are executed alike.

    Attributes:
        names: the operators, in order.
        tiled: whether they run fused and tiled, keeping only the last result (may-tile operators keep each of theirs).
        dimensions: the fused-tileable dimensions of a tiled segment.
        tile_bytes: of a tiled segment, the bytes of all its values in the smallest tile.
        problem: why a tiled segment cannot run within the limit; empty when it can.
    """

    names: tuple[str, ...]
    tiled: bool
    dimensions: tuple[str, ...] = ()
    tile_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A network cut into segments, in order."""

    segments: tuple[PartitionSegment, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What the paper's algorithm reports as out of memory; empty when every segment can run."""
        return tuple(segment.problem for segment in self.segments if segment.problem)


def partition(
    graph: Graph,
    names: Sequence[str],
    rows: Mapping[str, Operator],
    streamed: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    limit_bytes: int,
    known: PartitionShapeCache | None = None,
) -> Partition:
    """Cut the operators ``names`` so that no value of ``limit_bytes`` or more is ever whole (Listing 3).

    As in the paper the limit holds for each segment by itself; that all checkpoints together fit is the caller's to check.

    Args:
        graph: the graph.
        names: all operators, in execution order.
        rows: the operator table's row of each operator.
        streamed: the images among the values.
        shapes: shape of every value.
        limit_bytes: the memory; a value that fills it does not fit.
        known: keeps what does not depend on the limit, for others at the same shapes. Default: `None`
    """
    known = known or PartitionShapeCache()
    must_tile = [_value_bytes(graph, shapes, name) >= limit_bytes for name in names]
    run = tuple(names)
    after = known.runs.post_dominators.get(run)
    if after is None:
        after = known.runs.post_dominators[run] = _post_dominators(graph, run)
    segments: list[PartitionSegment] = []
    kept: list[str] = []
    position = 0
    while position < len(names):
        if not must_tile[position]:
            kept.append(names[position])
            position += 1
            continue
        end = _segment_end(position, must_tile, after)
        if kept:
            segments.append(PartitionSegment(names=tuple(kept), tiled=False))
            kept = []
        segments.append(_tiled_segment(graph, tuple(names[position : end + 1]), rows, streamed, shapes, limit_bytes, known))
        position = end + 1
    if kept:
        segments.append(PartitionSegment(names=tuple(kept), tiled=False))
    return Partition(segments=tuple(segments))


def least_tile_bytes(
    graph: Graph,
    names: Sequence[str],
    rows: Mapping[str, Operator],
    streamed: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    dimensions: Collection[str],
) -> int:
    """Bytes of all values of a segment in a tile of one element of its results along batch, height and width.

    The tile lies in the middle, where its halo is whole on both sides. Of ``dimensions`` the channels stay whole, as in every
    tile that we run.
    """
    ends = [name for name in graph.handed_on(names) if name in streamed]
    inside = [name for name in names if name in streamed]
    axes, values = graph.axes, dict.fromkeys((*graph.sources(names, streamed), *inside))
    spans: list[Mapping[str, int]] = []
    for axis, axis_name in enumerate(axes.names):
        extents = {name: axes.extent(shapes[name], axis) for name in values}
        if axis_name in dimensions and ends:
            wanted = {name: Interval(extents[name] // 2, extents[name] // 2 + 1) for name in ends}
            spans.append(tile_lengths(graph, inside, rows, streamed, extents, wanted, axis=axis))
        else:
            spans.append(extents)
    total = 0
    sources = (o for name in names for o in rows[name].streamed_operands(graph[name], streamed))
    for name in dict.fromkeys((*sources, *names)):
        shape = list(shapes[name])
        if "batch" in dimensions:
            shape[0] = 1
        if name in streamed:
            shape[-axes.count :] = [span.get(name, 0) for span in spans]
        total += prod(shape) * graph[name].itemsize_bytes
    return total


def _post_dominators(graph: Graph, names: Sequence[str]) -> list[int]:
    """For each operator the place of its immediate post-dominator; the place behind the last is the exit."""
    place = {name: i for i, name in enumerate(names)}
    leave = len(names)
    backwards = nx.DiGraph()
    for name in names:
        users = graph.users[name]
        backwards.add_edges_from((place.get(user, leave), place[name]) for user in users)
        if name in graph.results or not users:
            backwards.add_edge(leave, place[name])
    found = nx.immediate_dominators(backwards, leave) if names else {}
    return [found[i] for i in range(len(names))]


def _segment_end(start: int, must_tile: Sequence[bool], after: Sequence[int]) -> int:
    """The place of the may-tile operator that ends the segment from ``start``; behind the last one if there is none."""
    end, waiting = start, [start]
    while waiting:
        wanted = after[waiting.pop()]
        if wanted <= end:
            continue
        before, end = end, wanted
        while end < len(must_tile) and must_tile[end]:
            end += 1
        waiting.extend(range(before, end))
    return end


def _tiled_segment(
    graph: Graph,
    names: tuple[str, ...],
    rows: Mapping[str, Operator],
    streamed: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    limit_bytes: int,
    known: PartitionShapeCache,
) -> PartitionSegment:
    dimensions = known.runs.dimensions.get(names)
    if dimensions is None:
        dimensions = known.runs.dimensions[names] = fused_dimensions(graph, names, rows, streamed)
    tile_bytes = known.tile_bytes.get(names)
    if tile_bytes is None:
        tile_bytes = known.tile_bytes[names] = least_tile_bytes(graph, names, rows, streamed, shapes, dimensions)
    whole_bytes = {name: _value_bytes(graph, shapes, name) for name in graph.handed_on(names)}
    span = f"{graph[names[0]].label} .. {graph[names[-1]].label}"
    problem = ""
    if max(whole_bytes.values()) >= limit_bytes:
        problem = f"{span}: the result holds {max(whole_bytes.values())} bytes, not below {limit_bytes}, and nothing smaller follows"
    elif not dimensions:
        problem = f"{span}: its values do not fit into {limit_bytes} bytes and no dimension is fused-tileable"
    elif tile_bytes >= limit_bytes:
        problem = f"{span}: its smallest tile ({', '.join(dimensions)}) holds {tile_bytes} bytes, not below {limit_bytes}"
    return PartitionSegment(names=names, tiled=True, dimensions=dimensions, tile_bytes=tile_bytes, problem=problem)


def _value_bytes(graph: Graph, shapes: Mapping[str, tuple[int, ...]], name: str) -> int:
    return prod(shapes[name]) * graph[name].itemsize_bytes
