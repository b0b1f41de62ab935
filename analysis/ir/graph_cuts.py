"""Graph cuts: the values that cross each position of an execution order, and the division tree of a graph of values.

*Crossing values.* A value crosses a position between two operators if it is computed before it (or is an input) and read after it. A
position with a single crossing value is a separator. Long skips (a U-Net) make several values cross: a cut set, from which all later
values can be computed. With cut sets, such a network is a chain too.

*Division tree.* A directed acyclic graph of values with one source and one target divides into *independent segments*: vertices between
two ends that are connected to the rest of the graph through these ends only. Feng and Huang, "Optimal gradient checkpoint search for
arbitrary computation graphs", CVPR 2021, sections 5.1 and 5.2, distinguish three kinds:

* *linear*: it has splitting vertices, which every path passes;
* *branch*: it consists of several segments that share both ends;
* *complex*: neither; it divides into the largest independent segments inside it.

Recursive division down to single edges gives a tree, which is unique. Algorithm:

* A splitting vertex is one that no edge jumps over in a topological order.
* Branches are the connected components after the two ends are removed.
* Segments with ends ``k`` and ``l`` inside a complex one are the components that contain neither its source nor its target after ``k`` and
  ``l`` are removed. (The paper's Algorithm 4 requires *all* vertices between ``k`` and ``l`` to be independent, and so misses a clean
  branch next to a tangled one.)

Complexity: O(V^2 (V + E)) for a complex segment, O(V + E) for the two other kinds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise
from typing import Literal

import networkx as nx

from sft.analysis.ir.graph import Graph

__all__ = ["Division", "ValueDag", "crossing_values", "cut_positions", "division_tree"]


def crossing_values(graph: Graph, names: Sequence[str], among: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """The values that cross each position in a run of operators, both ends included: computed before it (or outside), and read after it.

    Args:
        graph: the graph.
        names: the run, in execution order.
        among: values from outside that count if the run reads them.

    Returns:
        For each position ``0..len(names)``, the number of operators before it, the crossing values in topological order. Only reads by the
        run itself count.
    """
    position_of = {name: i for i, name in enumerate(names)}
    last_read: dict[str, int] = {}
    for name in names:
        for operand in graph[name].operands:
            if operand in position_of or operand in among:
                last_read[operand] = position_of[name]
    crossing: list[list[str]] = [[] for _ in range(len(names) + 1)]
    for value in sorted(last_read, key=graph.position):
        for position in range(position_of.get(value, -1) + 1, last_read[value] + 1):
            crossing[position].append(value)
    return tuple(map(tuple, crossing))


def cut_positions(graph: Graph, names: Sequence[str], streamed: Collection[str]) -> tuple[int, ...]:
    """Positions at which a run may be cut in two: 0, every separator, its end. A cut at a separator stores one tensor.

    Args:
        graph: the graph.
        names: the run, in execution order.
        streamed: values that count as crossing even if they are computed outside the run: the images. Parameters and global values from
            outside are available on either side and never cross. Every value that the run computes crosses up to the run's own last read.
    """
    crossing = crossing_values(graph, names, streamed)
    return (0, *(cut for cut in range(1, len(names)) if len(crossing[cut]) == 1), *([len(names)] if names else []))


@dataclass(frozen=True, kw_only=True)
class ValueDag:
    """Values and the operations between them, for the search of checkpoints.

    Attributes:
        sizes_bytes: size of each vertex. Vertices are in topological order; the first is the only source, the last the only target.
        edges: pairs (from, to).
        edge_bytes: bytes that an operation keeps for its backward in addition to its operands and its result, if not 0.
        names: a name for each vertex, optional.
    """

    sizes_bytes: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    edge_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.sizes_bytes) < 2 or len(set(self.edges)) != len(self.edges):
            raise ValueError("a graph of values needs a source, a target and edges that are all different")
        sources, targets = {a for a, _ in self.edges}, {b for _, b in self.edges}
        vertices = range(len(self.sizes_bytes))
        if any(not 0 <= a < b < len(self.sizes_bytes) for a, b in self.edges):
            raise ValueError("edges must rise in the vertices' topological order")
        if sources != set(vertices[:-1]) or targets != set(vertices[1:]):
            raise ValueError("the first vertex must be the only source and the last the only target")

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each vertex its direct successors, in order."""
        successors: list[list[int]] = [[] for _ in self.sizes_bytes]
        for a, b in self.edges:
            successors[a].append(b)
        return tuple(tuple(sorted(targets)) for targets in successors)


@dataclass(frozen=True, kw_only=True)
class Division:
    """An independent segment and its division.

    Attributes:
        source: its first end.
        target: its last end.
        interior: the vertices between the ends.
        kind: ``"edge"``, ``"linear"``, ``"branch"`` or ``"complex"``.
        parts: the child segments; those of a linear one in order.
        inner_bytes: the sizes of the interior and of the edges together.
        connecting: the interior vertices that are ends of child segments, in order.
    """

    source: int
    target: int
    interior: tuple[int, ...]
    kind: Literal["edge", "linear", "branch", "complex"]
    parts: tuple[Division, ...]
    inner_bytes: int
    connecting: tuple[int, ...]


def division_tree(dag: ValueDag) -> Division:
    """The division tree of a graph of values."""
    last = len(dag.sizes_bytes) - 1
    return _divide(dag, 0, last, tuple(range(1, last)), frozenset(dag.edges))


def _divide(dag: ValueDag, source: int, target: int, interior: tuple[int, ...], edges: frozenset[tuple[int, int]]) -> Division:
    inner_bytes = sum(dag.sizes_bytes[v] for v in interior) + sum(dag.edge_bytes.get(edge, 0) for edge in edges)

    def division(kind: Literal["edge", "linear", "branch", "complex"], children: list[Division], connecting: Sequence[int]) -> Division:
        return Division(
            source=source,
            target=target,
            interior=interior,
            kind=kind,
            parts=tuple(children),
            inner_bytes=inner_bytes,
            connecting=tuple(connecting),
        )

    if not interior:
        return division("edge", [], [])
    cut_vertices = _cut_vertices(source, interior, edges)
    if cut_vertices:
        ends = [source, *cut_vertices, target]
        children = []
        for a, b in pairwise(ends):
            between = tuple(v for v in interior if a < v < b)
            children.append(_divide(dag, a, b, between, frozenset(e for e in edges if a <= e[0] and e[1] <= b)))
        return division("linear", children, cut_vertices)
    branches = _connected_components(interior, edges)
    direct = (source, target) in edges
    if len(branches) + direct > 1:
        children = [_divide(dag, source, target, branch, _edges_touching(edges, branch)) for branch in branches]
        if direct:
            children.append(_divide(dag, source, target, (), frozenset([(source, target)])))
        return division("branch", children, [])
    children = []
    covered: set[int] = set()
    for a, b, inside in _maximal_inner_segments(source, target, interior, edges):
        inner_edges = _edges_touching(edges, inside) | ({(a, b)} & edges)
        children.append(_divide(dag, a, b, inside, inner_edges))
        covered |= set(inside)
    used = frozenset().union(*(_edges_touching(edges, child.interior) | ({(child.source, child.target)} & edges) for child in children))
    children += [_divide(dag, a, b, (), frozenset([(a, b)])) for a, b in sorted(edges - used)]
    return division("complex", children, [v for v in interior if v not in covered])


def _edges_touching(edges: frozenset[tuple[int, int]], vertices: Sequence[int]) -> frozenset[tuple[int, int]]:
    inside = set(vertices)
    return frozenset(edge for edge in edges if edge[0] in inside or edge[1] in inside)


def _cut_vertices(source: int, interior: tuple[int, ...], edges: frozenset[tuple[int, int]]) -> list[int]:
    """Vertices that no edge jumps over."""
    reach: dict[int, int] = {}
    for a, b in edges:
        reach[a] = max(reach.get(a, a), b)
    vertices, farthest = [], reach[source]
    for v in interior:
        if farthest <= v:
            vertices.append(v)
        farthest = max(farthest, reach[v])
    return vertices


def _connected_components(vertices: Collection[int], edges: Collection[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Connected components of some vertices, ordered by their first vertex."""
    graph = nx.Graph()
    graph.add_nodes_from(vertices)
    graph.add_edges_from(edge for edge in edges if edge[0] in graph and edge[1] in graph)
    return sorted(tuple(sorted(component)) for component in nx.connected_components(graph))


def _maximal_inner_segments(
    source: int, target: int, interior: tuple[int, ...], edges: frozenset[tuple[int, int]]
) -> list[tuple[int, int, tuple[int, ...]]]:
    """The largest independent segments with an interior inside a complex one: ends and interior."""
    vertices = (source, *interior, target)
    neighbours: dict[int, list[int]] = {v: [] for v in vertices}
    for a, b in edges:
        neighbours[a].append(b)
        neighbours[b].append(a)
    candidates: list[tuple[int, int, tuple[int, ...]]] = []
    for a, b in combinations(vertices, 2):
        if (a, b) == (source, target):
            continue
        # A vertex still connected with an end of the enclosing segment is not between a and b.
        seen = {a, b}
        stack = [v for v in (source, target) if v not in seen]
        seen.update(stack)
        while stack:
            for w in neighbours[stack.pop()]:
                if w not in seen:
                    seen.add(w)
                    stack.append(w)
        inner = tuple(v for v in interior if v not in seen)
        if inner:
            candidates.append((a, b, inner))
    candidates.sort(key=lambda segment: (-len(segment[2]), segment))
    largest: list[tuple[int, int, tuple[int, ...]]] = []
    covered: set[int] = set()
    for a, b, inner in candidates:
        if covered.isdisjoint(inner) and a not in covered and b not in covered:
            largest.append((a, b, inner))
            covered.update(inner)
    return sorted(largest)
