"""Attribute inference: defaults that depend on the operands are written into the node as explicit arguments.

Kernel sizes of convolutions (``kernel_size``) and integer upsampling and unpooling factors (``factors``). Later passes can then read a node
without its neighbours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy as sp

from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops.pool_indices import UNPOOLINGS, unpooling_factors

__all__ = ["infer_attributes"]


#: Operators with a kernel among their operands.
_CONVOLUTION_PREFIXES = tuple(f"aten.{name}{count}d." for name in ("conv", "conv_transpose") for count in (1, 2, 3))

#: Poolings that also return the indices of their maxima.
_POOLS_WITH_INDICES = frozenset(f"aten.max_pool{count}d_with_indices.default" for count in (1, 2, 3))


def infer_attributes(graph: Graph) -> Graph:
    """Add derived arguments to every node."""
    return replace(graph, nodes=tuple(_infer_node_attributes(node, graph) for node in graph.nodes))


def _infer_node_attributes(node: Node, graph: Graph) -> Node:
    if node.target.startswith(_CONVOLUTION_PREFIXES):
        weight = graph[node.argument("weight").name]
        return _with_argument(node, "kernel_size", weight.shape[2:])
    if node.target in _POOLS_WITH_INDICES and node.argument("result") == 0:
        # The values equal those of the pooling without indices.
        arguments = tuple(item for item in node.arguments if item[0] != "result")
        return replace(node, target=node.target.replace("_with_indices", ""), arguments=arguments)
    if node.target in UNPOOLINGS:
        return _with_argument(node, "factors", unpooling_factors(node, graph))
    if node.target.startswith(("aten.upsample_nearest", "aten._upsample_nearest_exact")):
        source = graph[node.argument("input").name]
        return _with_argument(node, "factors", _integer_scale_factors(node, source))
    return node


def _integer_scale_factors(node: Node, source: Node) -> tuple[int, ...] | None:
    """Integer upsampling factors along each axis; ``None`` if one is not an integer."""
    scales = node.argument("scale_factors")
    if scales is None:
        scales = [sp.simplify(sp.sympify(out) / sp.sympify(size)) for out, size in zip(node.shape[2:], source.shape[2:], strict=True)]
    factors = []
    for scale in scales:
        if not sp.sympify(scale).is_number or scale < 1 or int(scale) != scale:
            return None
        factors.append(int(scale))
    return tuple(factors)


def _with_argument(node: Node, name: str, value: Any) -> Node:
    return replace(node, arguments=(*node.arguments, (name, value)))
