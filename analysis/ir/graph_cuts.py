"""Where a graph can be taken apart: chains of cuts, and the division tree.

*Cuts.* Between two operators of an execution order some values cross: made before (or inputs), read behind. If it is one value, the place
is a separator. Where skips cross it is several, a cut set: everything behind can be computed from it, so a network with long skips (a
U-Net) is a chain too, if its cuts may be sets.

*Division.* A directed acyclic graph of values with one source and one target is taken apart into *independent segments*: vertices between
two ends that have no connection to the outside but through these. Feng and Huang, "Optimal gradient checkpoint search for arbitrary
computation graphs", CVPR 2021, sections 5.1 and 5.2, tell three kinds apart: a *linear* segment has splitting vertices that every path
passes, a *branch* segment consists of several that share both ends, any other is *complex*, and falls into the largest independent segments
inside it. Divided on and on, down to single edges, they are a tree, which is unique.

How the parts are found here: a splitting vertex is one that no edge jumps over in a topological order. Branches are the connected
components without the two ends. The segments with ends ``k`` and ``l`` inside a complex one are what falls off when ``k`` and ``l`` are
taken out: components with neither its source nor its target. (The paper's Algorithm 4 asks for *all* vertices between ``k`` and ``l`` to be
independent, and so misses a clean branch beside a tangled one.) Complexity: O(V^2 (V + E)) for a complex segment, O(V + E) for the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise
from typing import Literal

import networkx as nx

from sft.analysis.ir.graph import Graph

__all__ = ["Division", "ValueDag", "crossing_values", "division_tree"]


def crossing_values(graph: Graph, names: Sequence[str], among: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """What crosses each place in a run of operators, both ends included: values made before (or outside), and read behind.

    Args:
        graph: the graph.
        names: the run, in execution order.
        among: values from outside that count when they are read.

    Returns:
        For ``0..len(names)`` operators before the place, the values in order of making.
    """
    place = {name: i for i, name in enumerate(names)}
    last: dict[str, int] = {}
    for name in names:
        for operand in graph[name].operands:
            if operand in place or operand in among:
                last[operand] = place[name]
    crossing: list[list[str]] = [[] for _ in range(len(names) + 1)]
    for value in sorted(last, key=graph.position):
        for position in range(place.get(value, -1) + 1, last[value] + 1):
            crossing[position].append(value)
    return tuple(map(tuple, crossing))


@dataclass(frozen=True, kw_only=True)
class ValueDag:
    """Values and the operations between them, for the search of checkpoints.

    Attributes:
        sizes_bytes: size of each vertex; vertices are numbered in a topological order, the first is the only source, the last the only
        target. edges: (from, to).
        edge_bytes: what an operation holds for its backward besides its operands and its result, where that is not 0.
        names: a name for each vertex, if there are any.
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
        """For each vertex those behind it."""
        found: list[list[int]] = [[] for _ in self.sizes_bytes]
        for a, b in self.edges:
            found[a].append(b)
        return tuple(tuple(sorted(behind)) for behind in found)


@dataclass(frozen=True, kw_only=True)
class Division:
    """An independent segment and how it divides.

    Attributes:
        source: its first end.
        target: its other end.
        interior: the vertices between.
        kind: ``"edge"``, ``"linear"``, ``"branch"`` or ``"complex"``.
        parts: the segments that it divides into; of a linear one in order.
        inner_bytes: the sizes of the interior and of the edges together.
        connecting: the interior vertices that are ends of parts, in order.
    """

    source: int
    target: int
    interior: tuple[int, ...]
    kind: Literal["edge", "linear", "branch", "complex"]
    parts: tuple[Division, ...]
    inner_bytes: int
    connecting: tuple[int, ...]


def division_tree(dag: ValueDag) -> Division:
    """The division tree of a whole graph."""
    last = len(dag.sizes_bytes) - 1
    return _divide(dag, 0, last, tuple(range(1, last)), frozenset(dag.edges))


def _divide(dag: ValueDag, source: int, target: int, interior: tuple[int, ...], edges: frozenset[tuple[int, int]]) -> Division:
    inner_bytes = sum(dag.sizes_bytes[v] for v in interior) + sum(dag.edge_bytes.get(edge, 0) for edge in edges)

    def division(kind: Literal["edge", "linear", "branch", "complex"], parts: list[Division], connecting: Sequence[int]) -> Division:
        return Division(
            source=source,
            target=target,
            interior=interior,
            kind=kind,
            parts=tuple(parts),
            inner_bytes=inner_bytes,
            connecting=tuple(connecting),
        )

    if not interior:
        return division("edge", [], [])
    splitting = _cut_vertices(source, interior, edges)
    if splitting:
        ends = [source, *splitting, target]
        parts = []
        for a, b in pairwise(ends):
            between = tuple(v for v in interior if a < v < b)
            parts.append(_divide(dag, a, b, between, frozenset(e for e in edges if a <= e[0] and e[1] <= b)))
        return division("linear", parts, splitting)
    branches = _connected_components(interior, edges)
    direct = (source, target) in edges
    if len(branches) + direct > 1:
        parts = [_divide(dag, source, target, branch, _edges_touching(edges, branch)) for branch in branches]
        if direct:
            parts.append(_divide(dag, source, target, (), frozenset([(source, target)])))
        return division("branch", parts, [])
    parts = []
    covered: set[int] = set()
    for a, b, inside in _maximal_inner_segments(source, target, interior, edges):
        own = _edges_touching(edges, inside) | ({(a, b)} & edges)
        parts.append(_divide(dag, a, b, inside, own))
        covered |= set(inside)
    used = frozenset().union(*(_edges_touching(edges, part.interior) | ({(part.source, part.target)} & edges) for part in parts))
    parts += [_divide(dag, a, b, (), frozenset([(a, b)])) for a, b in sorted(edges - used)]
    return division("complex", parts, [v for v in interior if v not in covered])


def _edges_touching(edges: frozenset[tuple[int, int]], vertices: Sequence[int]) -> frozenset[tuple[int, int]]:
    inside = set(vertices)
    return frozenset(edge for edge in edges if edge[0] in inside or edge[1] in inside)


def _cut_vertices(source: int, interior: tuple[int, ...], edges: frozenset[tuple[int, int]]) -> list[int]:
    """Vertices that no edge jumps over."""
    reach: dict[int, int] = {}
    for a, b in edges:
        reach[a] = max(reach.get(a, a), b)
    found, farthest = [], reach[source]
    for v in interior:
        if farthest <= v:
            found.append(v)
        farthest = max(farthest, reach[v])
    return found


def _connected_components(vertices: Collection[int], edges: Collection[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Connected components of some vertices, by their first."""
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
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for a, b in combinations(vertices, 2):
        if (a, b) == (source, target):
            continue
        # What still hangs together with an end of the whole is not between a and b.
        seen = {a, b}
        stack = [v for v in (source, target) if v not in seen]
        seen.update(stack)
        while stack:
            for w in neighbours[stack.pop()]:
                if w not in seen:
                    seen.add(w)
                    stack.append(w)
        inside = tuple(v for v in interior if v not in seen)
        if inside:
            found.append((a, b, inside))
    found.sort(key=lambda segment: (-len(segment[2]), segment))
    largest: list[tuple[int, int, tuple[int, ...]]] = []
    covered: set[int] = set()
    for a, b, inside in found:
        if covered.isdisjoint(inside) and a not in covered and b not in covered:
            largest.append((a, b, inside))
            covered.update(inside)
    return sorted(largest)
