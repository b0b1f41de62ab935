"""The partition of the SFT paper: fused-tileable dimensions, and the division of a network into fused-tiled segments.

Source: Xu et al., "Training of Deep Learning Pipelines on Memory-Constrained GPUs via Segmented Fused-Tiled Execution", CC 2022.

*Fused-tileable dimensions* (section 4.1 and Listing 2). An operator is FT-compatible along a dimension if a slice of its result needs only
a slice of its operand. Take every dimension of every value as a vertex and join the operand's dimension with the result's as given by the
operator's dimension map. Tiling one vertex then tiles its whole connected component, and a run is fused-tileable along exactly those
components that contain every operator of it. The paper uses the operator's loop indices between the two; as each loop indexes at most one
dimension of any tensor, composing the two maps loses no information.

*Partition* (section 4.2 and Listing 3). A value that does not fit into memory *must* be tiled; any other *may* be, and is a possible
checkpoint. Every must-tile operator starts or joins a segment that reads checkpoints only and ends with a checkpoint. Every reader of an
unstored value has to run in the same tiles. So the segment grows until it contains the post-dominator of each of its operators but the
last.

Where listing and text of the paper differ, we follow the text:

* line 4 marks as must-tile the values that are *smaller* than the memory;
* line 36 excludes the may-tile operator that ends a segment (text: it "ends at a checkpoint"); here the segment includes it;
* the loop of line 5 does not advance at a may-tile operator.
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
from sft.analysis.ir.graph import Graph, label_range
from sft.analysis.tiling.independent_tiles import tile_lengths
from sft.analysis.tiling.operator_run import OperatorRun
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
    """Names of a value's dimensions: batch, channels, and the image's axes."""
    return ("batch", "channel", *axes.names)


class ValueDimension(NamedTuple):
    """One dimension of one value, an index into :func:`dimension_names`."""

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
        """For each value its tiled dimension."""
        return {vertex.value: vertex.dimension for vertex in self.vertices}

    @property
    def is_tileable(self) -> bool:
        """False if a value has two dimensions in it (``x + x.transpose(2, 3)``): such a tile would be a diagonal block."""
        return len(self.dimension_of) == len(self.vertices)


def dimension_components(run: OperatorRun) -> tuple[DimensionComponent, ...]:
    """The connected components of the dimension maps of a run's operators (Listing 2), without those that have no operator.

    Dimension maps describe images; parameters and global values are read in full by any tile.
    """
    joined: UnionFind[ValueDimension] = UnionFind()
    operator_of: dict[ValueDimension, str] = {}
    operators: dict[ValueDimension, set[str]] = {}
    for name in run.names:
        for before, after in _mapped_dimensions(run, name):
            joined.union(before, after)
            operator_of[after] = name
    for vertex, name in operator_of.items():
        operators.setdefault(joined[vertex], set()).add(name)
    return tuple(
        DimensionComponent(vertices=frozenset(vertices), operators=frozenset(operators[joined[next(iter(vertices))]]))
        for vertices in joined.to_sets()
    )


def fused_components(run: OperatorRun) -> tuple[DimensionComponent, ...]:
    """The components along which a run is fused-tileable: each contains every one of its operators."""
    components = dimension_components(run)
    return tuple(component for component in components if component.is_tileable and len(component.operators) == len(run.names))


def fused_dimensions(run: OperatorRun) -> tuple[str, ...]:
    """Names of the run's fused-tileable dimensions, as dimensions of its sources.

    A run may consist of chains that share no value (two images that meet later). A sweep tiles them together, so the result is the
    intersection over the chains.
    """
    dimensions = dimension_names(run.graph.axes)
    allowed = set(range(len(dimensions))) if run.names else set()
    for chain in _connected_chains(run):
        source = next(iter(chain.operands(chain.names[0])), None)
        allowed &= {component.dimension_of[source] for component in fused_components(chain)} if source is not None else set()
    return tuple(dimensions[dimension] for dimension in sorted(allowed))


def _mapped_dimensions(run: OperatorRun, name: str) -> Iterator[tuple[ValueDimension, ValueDimension]]:
    dimension_map = run.rows[name].dimension_map(run.graph[name], run.graph.axes)
    for operand in dict.fromkeys(run.operands(name)):
        for before, after in enumerate(dimension_map):
            if after is not None:
                yield ValueDimension(operand, before), ValueDimension(name, after)


def _connected_chains(run: OperatorRun) -> list[OperatorRun]:
    """The operators grouped by connection through images, each group in order."""
    linked = nx.Graph()
    linked.add_nodes_from(run.names)
    linked.add_edges_from((operand, name) for name in run.names for operand in run.graph[name].operands if operand in run.streamed)
    return [run.of([name for name in run.names if name in group]) for group in nx.connected_components(linked)]


@dataclass(frozen=True, slots=True)
class PartitionGraphCache:
    """Intermediate results shared by all partitions of one graph, at any size and limit.

    Attributes:
        dimensions: fused-tileable dimensions, by the operators of a tiled segment.
        post_dominators: immediate post-dominators, by run.
    """

    dimensions: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    post_dominators: dict[tuple[str, ...], list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartitionShapeCache:
    """Intermediate results shared by all partitions of one graph at one size, with any limit.

    Attributes:
        runs: the results that are independent of the size.
        tile_bytes: bytes of the smallest tile, by the operators of a tiled segment.
    """

    runs: PartitionGraphCache = field(default_factory=PartitionGraphCache)
    tile_bytes: dict[tuple[str, ...], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSegment:
    """Consecutive operators with the same execution mode.

    Attributes:
        names: the operators, in order.
        tiled: True if they run fused and tiled, storing only the last result; may-tile operators store each of theirs.
        dimensions: the fused-tileable dimensions of a tiled segment.
        problem: reason why a tiled segment cannot run within the limit; empty if it can.
    """

    names: tuple[str, ...]
    tiled: bool
    dimensions: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A network divided into segments, in order."""

    segments: tuple[PartitionSegment, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """The segments that the paper's algorithm reports as out of memory; empty if every segment can run."""
        return tuple(segment.problem for segment in self.segments if segment.problem)


def partition(
    run: OperatorRun, shapes: Mapping[str, tuple[int, ...]], limit_bytes: int, cache: PartitionShapeCache | None = None
) -> Partition:
    """Divide a run so that no value of ``limit_bytes`` or more is ever stored untiled (Listing 3).

    As in the paper the limit applies to each segment separately; the caller checks that all checkpoints together fit.

    Args:
        run: all operators.
        shapes: shape of every value.
        limit_bytes: the memory; a value of exactly this size does not fit.
        cache: results that do not depend on the limit, for further calls at the same shapes. Default: `None`
    """
    cache = cache or PartitionShapeCache()
    names = run.names
    must_tile = [_value_bytes(run.graph, shapes, name) >= limit_bytes for name in names]
    post_dominators = cache.runs.post_dominators.get(names)
    if post_dominators is None:
        post_dominators = cache.runs.post_dominators[names] = _post_dominators(run.graph, names)
    segments: list[PartitionSegment] = []
    kept: list[str] = []
    position = 0
    while position < len(names):
        if not must_tile[position]:
            kept.append(names[position])
            position += 1
            continue
        end = _segment_end(position, must_tile, post_dominators)
        if kept:
            segments.append(PartitionSegment(names=tuple(kept), tiled=False))
            kept = []
        segments.append(_tiled_segment(run.of(names[position : end + 1]), shapes, limit_bytes, cache))
        position = end + 1
    if kept:
        segments.append(PartitionSegment(names=tuple(kept), tiled=False))
    return Partition(segments=tuple(segments))


def least_tile_bytes(run: OperatorRun, shapes: Mapping[str, tuple[int, ...]], dimensions: Collection[str]) -> int:
    """Bytes of all values of a segment in a tile of one element of its results along batch, height and width.

    The tile is in the middle of the image, with a complete halo on both sides. Channels are never tiled, even if ``dimensions`` contains
    them, as in every tile that we run.
    """
    inside = run.of([name for name in run.names if name in run.streamed])
    axes, values = run.graph.axes, dict.fromkeys((*run.sources, *inside.names))
    spans: list[Mapping[str, int]] = []
    for axis, axis_name in enumerate(axes.names):
        extents = {name: axes.extent(shapes[name], axis) for name in values}
        if axis_name in dimensions and run.results:
            owned = {name: Interval(extents[name] // 2, extents[name] // 2 + 1) for name in run.results}
            spans.append(tile_lengths(inside, extents, owned, axis=axis))
        else:
            spans.append(extents)
    total = 0
    operands = (operand for name in run.names for operand in run.operands(name))
    for name in dict.fromkeys((*operands, *run.names)):
        shape = list(shapes[name])
        if "batch" in dimensions:
            shape[0] = 1
        if name in run.streamed:
            shape[-axes.count :] = [span.get(name, 0) for span in spans]
        total += prod(shape) * run.graph[name].itemsize_bytes
    return total


def _post_dominators(graph: Graph, names: Sequence[str]) -> list[int]:
    """For each operator the position of its immediate post-dominator; the position after the last is the exit."""
    position_of = {name: i for i, name in enumerate(names)}
    exit_position = len(names)
    backwards = nx.DiGraph()
    for name in names:
        users = graph.users[name]
        backwards.add_edges_from((position_of.get(user, exit_position), position_of[name]) for user in users)
        if name in graph.results or not users:
            backwards.add_edge(exit_position, position_of[name])
    dominators = nx.immediate_dominators(backwards, exit_position) if names else {}
    return [dominators[i] for i in range(len(names))]


def _segment_end(start: int, must_tile: Sequence[bool], post_dominators: Sequence[int]) -> int:
    """Position of the may-tile operator that ends the segment from ``start``; after the last operator if no such operator exists."""
    end, pending = start, [start]
    while pending:
        dominator = post_dominators[pending.pop()]
        if dominator <= end:
            continue
        previous, end = end, dominator
        while end < len(must_tile) and must_tile[end]:
            end += 1
        pending.extend(range(previous, end))
    return end


def _tiled_segment(
    run: OperatorRun, shapes: Mapping[str, tuple[int, ...]], limit_bytes: int, cache: PartitionShapeCache
) -> PartitionSegment:
    graph, names = run.graph, run.names
    dimensions = cache.runs.dimensions.get(names)
    if dimensions is None:
        dimensions = cache.runs.dimensions[names] = fused_dimensions(run)
    tile_bytes = cache.tile_bytes.get(names)
    if tile_bytes is None:
        tile_bytes = cache.tile_bytes[names] = least_tile_bytes(run, shapes, dimensions)
    result_bytes = {name: _value_bytes(graph, shapes, name) for name in graph.live_out(names)}
    span = label_range(graph[names[0]].label, graph[names[-1]].label)
    problem = ""
    if max(result_bytes.values()) >= limit_bytes:
        problem = f"{span}: the result holds {max(result_bytes.values())} bytes, not below {limit_bytes}, and no smaller value follows"
    elif not dimensions:
        problem = f"{span}: its values do not fit into {limit_bytes} bytes and no dimension is fused-tileable"
    elif tile_bytes >= limit_bytes:
        problem = f"{span}: its smallest tile ({', '.join(dimensions)}) holds {tile_bytes} bytes, not below {limit_bytes}"
    return PartitionSegment(names=names, tiled=True, dimensions=dimensions, problem=problem)


def _value_bytes(graph: Graph, shapes: Mapping[str, tuple[int, ...]], name: str) -> int:
    return prod(shapes[name]) * graph[name].itemsize_bytes
