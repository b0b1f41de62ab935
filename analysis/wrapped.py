"""Circular padding taken apart, so that the rows beyond one border, which are those at the other, are known before the first strip.

The rows that stand above the image are its last ones, which a walk sees at its end. They are few, so they are a global value:

* ``sft.border_rows``: the last ``low`` rows of the image, then its first ``high`` ones, collected in one walk;
* ``sft.circular_pad``: the image with these rows above and below it, streamed in the next walk;
* ``pad`` along the other axes, of which a strip holds all, where they are padded too.
"""

from __future__ import annotations

from dataclasses import replace

from sft.analysis.graph import Graph, Node, Ref

__all__ = ["decompose_circular_pads"]


def decompose_circular_pads(graph: Graph) -> Graph:
    """The graph with every circular padding of an image's rows replaced by its parts."""
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _decompose_circular_pad(node, graph) if _wraps_rows(node, graph) else [node]
    return replace(graph, nodes=tuple(nodes))


def _wraps_rows(node: Node, graph: Graph) -> bool:
    if node.target != "aten.pad.default" or node.argument("mode") != "circular" or len(node.shape) != graph.axes.rank:
        return False
    flat = node.argument("pad")
    return len(flat) == 2 * graph.axes.count and any(flat[-2:]) and min(flat) >= 0


def _decompose_circular_pad(node: Node, graph: Graph) -> list[Node]:
    count, flat = graph.axes.count, node.argument("pad")
    image, (low, high) = graph[node.argument("self").name], flat[-2:]
    lead, (rows, *rest) = image.shape[:-count], graph.axes.of(image.shape)
    amounts = (("low", low), ("high", high), ("axes", count))
    border = replace(
        node,
        name=f"{node.name}__border",
        target="sft.border_rows",
        shape=(*lead, low + high, *rest),
        arguments=(("self", Ref(image.name)), *amounts),
    )
    is_all = not any(flat[:-2])
    wrapped = replace(
        node,
        name=node.name if is_all else f"{node.name}__wrapped",
        target="sft.circular_pad",
        shape=(*lead, rows + low + high, *rest),
        arguments=(("self", Ref(image.name)), ("border", Ref(border.name)), *amounts),
    )
    if is_all:
        return [border, wrapped]
    return [border, wrapped, replace(node, arguments=(("self", Ref(wrapped.name)), ("pad", (*flat[:-2], 0, 0)), *node.arguments[2:]))]
