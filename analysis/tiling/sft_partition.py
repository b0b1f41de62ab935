"""The paper's partition of a network into fused-tiled segments and operators that keep their results whole.

Source: Xu et al., CC 2022, section 4.2 and Listing 3. A value that does not fit into memory *must* be tiled; any other *may* be, and
is a possible checkpoint. Every must-tile operator starts or joins a segment that reads checkpoints only and ends with a checkpoint:
the segment grows until it holds the post-dominator of each of its operators but the last, since whoever reads an unstored value has
to run in the same tiles.

The listing is read with its text where the two differ. It marks as must-tile what is *smaller* than the memory (line 4); a segment
ends *with* the first may-tile operator at or behind the post-dominators (the text: it "ends at a checkpoint"; line 36 leaves that
operator out); and its loop (line 5) stands still at a may-tile operator.

Fused-tileable dimensions: along which dimensions a run of operators can be tiled from its first to its last value.

Source: Xu et al., "Training of Deep Learning Pipelines on Memory-Constrained GPUs via Segmented Fused-Tiled Execution", CC 2022,
section 4.1 and Listing 2.

An operator is FT-compatible along a dimension if a slice of its result needs a slice of its operand only. Take every dimension of
every value as a vertex and join the operand's dimension to the result's wherever the operator's dimension map joins them. Tiling one
vertex then tiles its whole connected component, and a run is fused-tileable along exactly those components that every operator of
it lies in. The paper goes through the operator's loop indices, which lie between the two; as each loop indexes at most one
dimension of any tensor, composing the two maps loses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import networkx as nx
from networkx.utils import UnionFind

from sft.analysis.ir.axes import Axes
from sft.analysis.ir.graph import Graph
from sft.analysis.ir.ops import Operator
from sft.analysis.tiling.independent_tiles import tile_lengths
from sft.common.interval import Interval

__all__ = [
    "DimensionComponent",
    "Partition",
    "PartitionGraphCache",
    "PartitionSegment",
    "PartitionShapeCache",
    "ValueDimension",
    "dimension_components",
    "dimension_names",
    "fused_components",
    "fused_dimensions",
    "least_tile_bytes",
    "partition",
]


def dimension_names(axes: Axes) -> tuple[str, ...]:
    """The dimensions of a value by name: batch, channels, and the image's axes."""
    return ("batch", "channel", *axes.names)


class ValueDimension(NamedTuple):
    """One dimension of one value, an index into `dimension_names`."""

    value: str
    dimension: int


@dataclass(frozen=True, kw_only=True)
class DimensionComponent:
    """Dimensions of values that can only be tiled together.

    Attributes:
        vertices: the dimensions.
        operators: the operators that join them, each fused-tileable along this component.
    """

    vertices: frozenset[ValueDimension]
    operators: frozenset[str]

    @cached_property
    def dimension_of(self) -> dict[str, int]:
        """For each value the dimension of it that is tiled."""
        return {vertex.value: vertex.dimension for vertex in self.vertices}

    @property
    def is_tileable(self) -> bool:
        """Whether no value has two of its dimensions here (``x + x.transpose(2, 3)``): such a tile would be a diagonal block."""
        return len(self.dimension_of) == len(self.vertices)


def dimension_components(
    graph: Graph, names: Sequence[str], rows: Mapping[str, Operator], streamed: Collection[str]
) -> tuple[DimensionComponent, ...]:
    """The connected components of the dimension maps of the operators ``names`` (Listing 2), those without an operator left out.

    Args:
        graph: the graph.
        names: operators; what lies outside them joins nothing.
        rows: the operator table's row of each operator.
        streamed: the images among the values. Dimension maps speak of them; parameters and global values are whole at any tile.
    """
    joined: UnionFind[ValueDimension] = UnionFind()
    at: dict[ValueDimension, str] = {}
    operators: dict[ValueDimension, set[str]] = {}
    for name in names:
        for before, after in _mapped_dimensions(graph, name, rows[name], streamed):
            joined.union(before, after)
            at[after] = name
    for vertex, name in at.items():
        operators.setdefault(joined[vertex], set()).add(name)
    return tuple(
        DimensionComponent(vertices=frozenset(vertices), operators=frozenset(operators[joined[next(iter(vertices))]]))
        for vertices in joined.to_sets()
    )


def fused_components(
    graph: Graph, names: Sequence[str], rows: Mapping[str, Operator], streamed: Collection[str]
) -> tuple[DimensionComponent, ...]:
    """The components along which the run ``names`` is fused-tileable: every one of its operators lies in each of them."""
    found = dimension_components(graph, names, rows, streamed)
    return tuple(component for component in found if component.is_tileable and len(component.operators) == len(set(names)))


def fused_dimensions(graph: Graph, names: Sequence[str], rows: Mapping[str, Operator], streamed: Collection[str]) -> tuple[str, ...]:
    """The names of the run's fused-tileable dimensions, as its sources have them.

    A run may hold chains that share no value (two images that meet later). A walk tiles them side by side, so what counts is
    what all of them allow.
    """
    dimensions = dimension_names(graph.axes)
    allowed = set(range(len(dimensions))) if names else set()
    for part in _connected_operators(graph, names, streamed):
        source = next((o for o in rows[part[0]].streamed_operands(graph[part[0]], streamed)), None)
        allowed &= {c.dimension_of[source] for c in fused_components(graph, part, rows, streamed)} if source is not None else set()
    return tuple(dimensions[dimension] for dimension in sorted(allowed))


def _mapped_dimensions(
    graph: Graph, name: str, row: Operator, streamed: Collection[str]
) -> Iterator[tuple[ValueDimension, ValueDimension]]:
    node = graph[name]
    for operand in dict.fromkeys(row.streamed_operands(node, streamed)):
        for before, after in enumerate(row.dimension_map(node, graph.axes)):
            if after is not None:
                yield ValueDimension(operand, before), ValueDimension(name, after)


def _connected_operators(graph: Graph, names: Sequence[str], streamed: Collection[str]) -> list[list[str]]:
    """The operators grouped by whether images connect them, each group in order."""
    linked = nx.Graph()
    linked.add_nodes_from(names)
    linked.add_edges_from((operand, name) for name in names for operand in graph[name].operands if operand in streamed)
    return [[name for name in names if name in part] for part in nx.connected_components(linked)]


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
    ends = [name for name in graph.live_out(names) if name in streamed]
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
    whole_bytes = {name: _value_bytes(graph, shapes, name) for name in graph.live_out(names)}
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
