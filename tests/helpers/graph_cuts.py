"""Cut sets, value graphs and fused segments of a graph, as independent references for the tests of cuts and dimensions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from sft.analysis.ir.graph import Graph
from sft.analysis.ir.graph_cuts import ValueDag, crossing_values, cut_positions
from sft.analysis.tiling.operator_run import OperatorRun
from sft.analysis.tiling.sft_partition import fused_dimensions

__all__ = ["Cut", "FusedSegment", "crossing_cuts", "fused_segments", "separators", "value_dag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A position between two operators, and the values that cross it.

    Attributes:
        position: number of the run's operators before it.
        values: the crossing values, in order of making.
        num_bytes: their sizes together.
    """

    position: int
    values: tuple[str, ...]
    num_bytes: int


def separators(graph: Graph, names: Sequence[str], streamed: Collection[str]) -> list[tuple[int, str]]:
    """Positions inside a run at which the product cuts it, with the value that crosses each."""
    crossing = crossing_values(graph, names, streamed)
    return [(cut, value) for cut in cut_positions(graph, names, streamed)[1:-1] for value in crossing[cut]]


def crossing_cuts(
    graph: Graph,
    names: Sequence[str],
    among: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    most_values: int = 1,
) -> tuple[Cut, ...]:
    """Positions in a run of operators, both ends included, that at most ``most_values`` values cross.

    Args:
        graph: the graph.
        names: the run, in execution order.
        among: values from outside that count when they are read: inputs, not parameters.
        shapes: shape of every value at the size in question.
        most_values: 1 gives the separators alone.
    """
    crossing = [_crossing(graph, names, among, position) for position in range(len(names) + 1)]
    return tuple(
        Cut(position=position, values=values, num_bytes=sum(_value_bytes(graph, shapes, value) for value in values))
        for position, values in enumerate(crossing)
        if 1 <= len(values) <= most_values
    )


def value_dag(graph: Graph, names: Sequence[str], among: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> ValueDag:
    """A run of operators as a graph of values.

    Several inputs get a common source, several results (dead ends among them) a common target, of no bytes, named ``""``.

    Args:
        graph: the graph.
        names: the operators, in execution order.
        among: values from outside that count as vertices: inputs, not parameters.
        shapes: shape of every value at the size in question.
    """
    inside = set(names)
    sources = [node.name for node in graph.nodes if node.name in among and node.name not in inside]
    sources = [name for name in sources if any(user in inside for user in graph.users[name])]
    wanted = set(graph.live_out(names))
    results = [name for name in names if name in wanted or inside.isdisjoint(graph.users[name])]
    starts = [*(name for name in names if not any(o in inside or o in among for o in graph[name].operands)), *sources]
    order = [*sources, *names]
    links = [(o, name) for name in names for o in dict.fromkeys(graph[name].operands) if o in inside or o in sources]
    if len(starts) > 1:
        order.insert(0, "")
        links += [("", name) for name in starts]
    if len(results) > 1 or results != [order[-1]]:
        order.append("(results)")
        links += [(name, "(results)") for name in results]
    number = {name: i for i, name in enumerate(order)}
    named = set(sources) | inside
    return ValueDag(
        sizes_bytes=tuple(_value_bytes(graph, shapes, name) if name in named else 0 for name in order),
        edges=tuple(dict.fromkeys((number[a], number[b]) for a, b in links)),
        names=tuple(name if name in named else "" for name in order),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSegment:
    """Operators between two separators that can run tile by tile together.

    Attributes:
        names: the operators, in order.
        dimensions: the fused-tileable dimensions, named as in `compat.dimensions_of`.
    """

    names: tuple[str, ...]
    dimensions: tuple[str, ...]


def fused_segments(run: OperatorRun, wanted: Collection[str] | None = None) -> tuple[FusedSegment, ...]:
    """The maximal segments between separators that are fused-tileable along all dimensions ``wanted`` (default: the first axis).

    They may overlap: an operator between two separators can belong to a segment that ends with it and to one that starts there.
    Operators in no segment cannot be tiled along ``wanted`` in any context.
    """
    cuts = cut_positions(run.graph, run.names, run.streamed)
    required = {run.graph.axes.names[0]} if wanted is None else set(wanted)

    def segment(start: int, end: int) -> FusedSegment:
        inside = run.of(run.names[cuts[start] : cuts[end]])
        return FusedSegment(names=inside.names, dimensions=fused_dimensions(inside))

    segments: list[FusedSegment] = []
    start = 0
    for end in range(1, len(cuts)):
        # A subsegment of a fused-tileable segment is fused-tileable, so with a later end the start only moves forward.
        grown = start
        while grown < end and not required <= set(segment(grown, end).dimensions):
            grown += 1
        if grown > start and start < end - 1:
            segments.append(segment(start, end - 1))
        start = grown
    if start < len(cuts) - 1:
        segments.append(segment(start, len(cuts) - 1))
    return tuple(segments)


def _crossing(graph: Graph, names: Sequence[str], among: Collection[str], position: int) -> tuple[str, ...]:
    """Values available before a position that the operators after it read, or that outlive the run; by definition."""
    before, after = names[:position], names[position:]
    read = {operand for name in after for operand in graph[name].operands}
    live = read | set(graph.live_out(names))
    outside = [node.name for node in graph.nodes if node.name in among and node.name not in set(names)]
    return tuple(sorted((n for n in (*outside, *before) if n in live), key=graph.position))


def _value_bytes(graph: Graph, shapes: Mapping[str, tuple[int, ...]], name: str) -> int:
    return prod(shapes[name]) * graph[name].itemsize_bytes
