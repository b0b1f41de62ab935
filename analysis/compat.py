"""Fused-tileable dimensions: along which dimensions a run of operators can be tiled from its first to its last value.

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
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import networkx as nx
from networkx.utils import UnionFind

from sft.analysis.axes import Axes
from sft.analysis.graph import Graph
from sft.analysis.operators import Operator

__all__ = ["DimensionComponent", "ValueDimension", "dimension_components", "dimension_names", "fused_components", "fused_dimensions"]


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
