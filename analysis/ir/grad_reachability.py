"""Gradient reachability: the values that the outputs' gradients reach, and the buffers that the backward pass reads after their update."""

from __future__ import annotations

from dataclasses import replace

from sft.analysis.ir.graph import Graph, Node, Ref, map_refs
from sft.analysis.ir.ops import differentiable_operands

__all__ = ["clone_updated_buffers", "grad_reachable_values"]


def grad_reachable_values(graph: Graph) -> frozenset[str]:
    """The values that a gradient of the outputs flows to, if they require one.

    Gradients stop at ``detach`` and other non-differentiable operators; updates of buffers have none.
    """
    reached = set(graph.outputs)
    for node in reversed(graph.nodes):
        if node.name in reached and node.kind == "operator":
            reached.update(differentiable_operands(node))
    return frozenset(reached)


def clone_updated_buffers(graph: Graph) -> Graph:
    """Clone each updated buffer if the backward pass reads its old content: the buffer itself holds its new content by then.

    ::

        r = buffer(running)                   r = buffer(running)
        y = mul(x, r)                  ->     r_before = clone(r)
        update running                        y = mul(x, r_before); update running

    The backward pass reads a buffer if gradients flow through its reader, or if the reader is a spatial side input, which is recomputed
    with each strip. Running statistics are read by their own update alone, which has no gradient, and need no clone.
    """

    updated = {path for _, path in graph.updates}
    differentiated = grad_reachable_values(graph)

    def backward_operands(node: Node) -> tuple[str, ...]:
        """Operands of a node that the backward pass reads."""
        if node.target == "sft.spatial_side_input":
            return node.operands
        return tuple(differentiable_operands(node)) if node.kind == "operator" and node.name in differentiated else ()

    clones: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if clones and backward_operands(node):
            arguments = tuple((name, map_refs(value, lambda ref: Ref(clones.get(ref, ref)))) for name, value in node.arguments)
            node = replace(node, arguments=arguments)
        nodes.append(node)
        readers = [graph[user] for user in graph.users[node.name]] if node.kind == "buffer" and node.target in updated else []
        if any(node.name in backward_operands(user) for user in readers):
            clones[node.name] = f"{node.name}_before"
            clone = (("self", Ref(node.name)), ("memory_format", None))
            nodes.append(replace(node, name=clones[node.name], kind="operator", target="aten.clone.default", arguments=clone))
    return replace(graph, nodes=tuple(nodes)) if clones else graph
