"""Where gradients go: the values that the outputs' gradients reach, and the buffers that must outlive their update for their sake."""

from __future__ import annotations

from dataclasses import replace

from sft.analysis.ir.graph import Graph, Node, Ref, map_refs
from sft.analysis.ir.ops import differentiable_operands

__all__ = ["clone_updated_buffers", "grad_reachable_values"]


def grad_reachable_values(graph: Graph) -> frozenset[str]:
    """The values that a gradient of the outputs flows to, if they need one; not through ``detach``, and not from buffers' updates."""
    found = set(graph.outputs)
    for node in reversed(graph.nodes):
        if node.name in found and node.kind == "operator":
            found.update(differentiable_operands(node))
    return frozenset(found)


def clone_updated_buffers(graph: Graph) -> Graph:
    """A copy of each buffer whose old content is read in the backward pass: the buffer itself has its new content by then.

    That is where gradients pass, and beside an image's strips, which are computed again with all that is computed with them. Running
    statistics are read by their own update alone, which has no gradient, and need none.
    """

    updated = {path for _, path in graph.updates}
    reached = grad_reachable_values(graph)

    def reads_again(node: Node) -> tuple[str, ...]:
        """What of its operands is read in the backward pass."""
        if node.target == "sft.spatial_side_input":
            return node.operands
        return tuple(differentiable_operands(node)) if node.kind == "operator" and node.name in reached else ()

    kept: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if kept and reads_again(node):
            swapped = tuple((name, map_refs(value, lambda ref: Ref(kept.get(ref, ref)))) for name, value in node.arguments)
            node = replace(node, arguments=swapped)
        nodes.append(node)
        readers = [graph[user] for user in graph.users[node.name]] if node.kind == "buffer" and node.target in updated else []
        if any(node.name in reads_again(user) for user in readers):
            kept[node.name] = f"{node.name}_before"
            arguments = (("self", Ref(node.name)), ("memory_format", None))
            nodes.append(replace(node, name=kept[node.name], kind="operator", target="aten.clone.default", arguments=arguments))
    return replace(graph, nodes=tuple(nodes)) if kept else graph
