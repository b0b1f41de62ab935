"""Graph isomorphism: equality of two graphs up to the names of their nodes, the renaming of a graph, and its slices that take all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sft.analysis.ir.graph import Graph, Node, Ref, map_refs

__all__ = ["isomorphism", "renamed", "without_full_slices"]


def isomorphism(graph: Graph, reference: Graph) -> dict[str, str] | None:
    """The name in a reference of each node of a graph; ``None`` if the graphs differ in more than names.

    Nodes correspond by their position, so two orders of the same operators differ. Targets of inputs and constants are names, too.
    """
    if len(graph.nodes) != len(reference.nodes):
        return None
    names = {node.name: other.name for node, other in zip(graph.nodes, reference.nodes, strict=True)}
    for node, other in zip(graph.nodes, reference.nodes, strict=True):
        is_named = node.kind in ("input", "constant")
        if _renamed_node(node, names, target=other.target if is_named else node.target) != other:
            return None
    is_equal = _renamed_results(graph, names) == _renamed_results(reference, {name: name for name in names.values()})
    return names if is_equal and graph.axes == reference.axes else None


def renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    """The graph with other names of its nodes."""
    nodes = (_renamed_node(node, names, target=names[node.name] if node.kind == "input" else node.target) for node in graph.nodes)
    outputs, updates, _ = _renamed_results(graph, names)
    return replace(graph, nodes=tuple(nodes), outputs=outputs, updates=updates)


def without_full_slices(graph: Graph) -> Graph:
    """The graph without slices that take all of their operand: ``x[:, 0]`` has one where the first extent is a symbol, else none."""
    names: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        if node.target == "aten.slice.Tensor" and node.argument("step") == 1 and node.shape == graph[node.operands[0]].shape:
            names[node.name] = names[node.operands[0]]
        else:
            names[node.name] = node.name
            nodes.append(_renamed_node(node, names, target=node.target))
    outputs, updates, _ = _renamed_results(graph, names)
    return replace(graph, nodes=tuple(nodes), outputs=outputs, updates=updates)


def _renamed_node(node: Node, names: Mapping[str, str], *, target: str) -> Node:
    arguments = tuple((key, map_refs(value, lambda name: Ref(names[name]))) for key, value in node.arguments)
    return replace(node, name=names[node.name], target=target, arguments=arguments)


def _renamed_results(
    graph: Graph, names: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], tuple[tuple[int, object], ...]]:
    """Outputs, updates and constant outputs."""
    updates = tuple((names[name], buffer) for name, buffer in graph.updates)
    return tuple(names[name] for name in graph.outputs), updates, graph.constant_outputs
