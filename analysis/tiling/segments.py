"""Legal segments: where a run of operators may be cut, and how far it stays fused-tileable.

A segment hands on what later segments read. Where exactly one value crosses from the operators before a place to those behind it,
that place is a *separator*: a cut there is one tensor. Between separators the maximal fused-tileable segments follow from the
operators' dimension maps (Xu et al., CC 2022, section 4.1.2: no operator can be added on either side).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sft.analysis.ir.graph import Graph
from sft.analysis.ir.graph_cuts import crossing_values
from sft.analysis.ir.ops import Operator
from sft.analysis.tiling.sft_partition import fused_dimensions

__all__ = ["FusedSegment", "Separator", "cut_positions", "fused_segments", "separators"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Separator:
    """A place between two operators that a single value crosses.

    Attributes:
        position: number of the run's operators before it.
        value: what crosses.
    """

    position: int
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSegment:
    """Operators between two separators that can run tile by tile together.

    Attributes:
        names: the operators, in order.
        dimensions: the fused-tileable dimensions, named as in `compat.dimensions_of`.
    """

    names: tuple[str, ...]
    dimensions: tuple[str, ...]


def separators(graph: Graph, names: Sequence[str], streamed: Collection[str]) -> tuple[Separator, ...]:
    """The separators inside a run of operators, its two ends left out.

    Args:
        graph: the graph.
        names: the run, in execution order.
        streamed: values that count as crossing even when they come from outside: the images. Parameters and global values
            from outside are at hand on either side and never cross; every value that the run itself makes does, up to the run's own
            last read of it.
    """
    inner = crossing_values(graph, names, streamed, live_out=False)[1:-1]
    return tuple(Separator(position=cut, value=values[0]) for cut, values in enumerate(inner, start=1) if len(values) == 1)


def cut_positions(graph: Graph, names: Sequence[str], streamed: Collection[str]) -> tuple[int, ...]:
    """Where a run may be cut in two: 0, every separator, its end."""
    if not names:
        return (0,)
    return (0, *(separator.position for separator in separators(graph, names, streamed)), len(names))


def fused_segments(
    graph: Graph,
    names: Sequence[str],
    rows: Mapping[str, Operator],
    streamed: Collection[str],
    wanted: Collection[str] | None = None,
) -> tuple[FusedSegment, ...]:
    """The maximal segments between separators that are fused-tileable along all dimensions ``wanted`` (default: the first axis).

    They may overlap: an operator between two separators can belong to a segment that ends with it and to one that starts there.
    Operators that no segment holds cannot be tiled along ``wanted``, whatever stands around them.
    """
    cuts = cut_positions(graph, names, streamed)
    required = {graph.axes.names[0]} if wanted is None else set(wanted)

    def segment(start: int, end: int) -> FusedSegment:
        inside = tuple(names[cuts[start] : cuts[end]])
        return FusedSegment(names=inside, dimensions=fused_dimensions(graph, inside, rows, streamed))

    found: list[FusedSegment] = []
    start = 0
    for end in range(1, len(cuts)):
        # A part of a fused-tileable segment is fused-tileable, so with a later end the start only ever moves forward.
        grown = start
        while grown < end and not required <= set(segment(grown, end).dimensions):
            grown += 1
        if grown > start and start < end - 1:
            found.append(segment(start, end - 1))
        start = grown
    if start < len(cuts) - 1:
        found.append(segment(start, len(cuts) - 1))
    return tuple(found)
