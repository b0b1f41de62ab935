"""Folding of BatchNorm with frozen statistics into the convolution that it follows.

A BatchNorm in evaluation mode is an affine map of each channel, and a convolution is linear, so both are one convolution::

    y = norm(conv(x, W, c))            ->      W' = sft.folded_weight(W, ...)     = W * scale
                                               c' = sft.folded_bias(c, ...)      = bias + (c - mean) * scale
                                               y  = conv(x, W', c')

with ``scale = weight / sqrt(var + eps)`` for each channel (Jacob et al. 2018, section 3.2). The weights are folded once a pass, outside of
the strips; gradients of ``W``, ``c``, ``weight`` and ``bias`` follow by the chain rule from those of ``W'`` and ``c'``. The strips lose
two passes over the image, forward and backward, and the result of the convolution, which the norm's gradient needs, is not kept.

Weights in float16 stay unfolded: the norm of an image in 0..65535 scales them by 1e-4, to numbers below the normal ones of that type.
Under autocast the weight that is folded is the one before its conversion to half precision, so that it is rounded once.

A folded weight and its gradient are two more tensors of the weight's size in the step. So weights above :data:`MAX_FOLDED_ELEMENTS` stay
unfolded: wide layers have small images. A budget without room for the other ones has a plan without any
(:meth:`sft.api.capture_cache.CapturedModel.unfolded`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sft.analysis.ir.graph import Graph, Node, Ref
from sft.analysis.ir.ops.table import CASTS
from sft.analysis.passes.positional_rng import SEED_NAME

__all__ = ["MAX_FOLDED_ELEMENTS", "fold_frozen_norms", "has_folded_norms", "name_of_bias"]

#: Largest number of elements of a weight that is folded: 3 x 3 convolutions of up to 170 channels.
MAX_FOLDED_ELEMENTS = 2**18
_FROZEN_NORM = "aten._native_batch_norm_legit_no_training.default"
_CONVOLUTIONS = frozenset(f"aten.conv{count}d.{overload}" for count in (1, 2, 3) for overload in ("default", "padding"))


def fold_frozen_norms(graph: Graph) -> Graph:
    """Fold every BatchNorm with frozen statistics into its convolution, where no other operator reads the convolution's result."""
    norms = {norm.name: graph[norm.argument("input").name] for norm in graph.operators if _is_frozen_norm(norm)}
    if not norms:
        return graph
    dynamic = graph.descendants({*graph.inputs, SEED_NAME})
    updated = {path for _, path in graph.updates}
    folded = {name: conv for name, conv in norms.items() if _folds(graph, graph[name], conv, dynamic, updated)}
    dropped = {conv.name for conv in folded.values()}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name in folded:
            nodes += _folded(graph, node, folded[node.name])
        elif node.name not in dropped:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def has_folded_norms(graph: Graph) -> bool:
    """True if norms were folded in a graph."""
    return any(node.target == "sft.folded_weight" for node in graph.operators)


def name_of_bias(weight: Node) -> str:
    """Name of the folded bias that belongs to a folded weight."""
    return f"{weight.name.removesuffix('weight')}bias"


def _is_frozen_norm(node: Node) -> bool:
    return node.target == _FROZEN_NORM and node.argument("result", 0) == 0


def _folds(graph: Graph, norm: Node, conv: Node, dynamic: frozenset[str], updated: set[str]) -> bool:
    """True if a norm can be folded: the convolution has no other reader, and all weights and statistics are fixed during a step."""
    if conv.target not in _CONVOLUTIONS or conv.dtype != norm.dtype or norm.dtype == "float16":
        return False
    if graph.users[conv.name] != (norm.name,) or conv.name in graph.results:
        return False
    fixed = [*conv.operands[1:], *norm.operands[1:]]
    if any(name in dynamic for name in fixed) or any(graph[name].target in updated for name in fixed if graph[name].kind == "buffer"):
        return False
    shape = graph[conv.argument("weight").name].shape
    return all(isinstance(extent, int) for extent in shape) and math.prod(map(int, shape)) <= MAX_FOLDED_ELEMENTS


def _folded(graph: Graph, norm: Node, conv: Node) -> Iterator[Node]:
    """The folded weight, the folded bias, and the convolution, which has the name of the norm's result."""
    weight = graph[conv.argument("weight").name]
    mean, var = ((key, norm.argument(key)) for key in ("running_mean", "running_var"))
    scale, shift = ((f"norm_{key}", norm.argument(key)) for key in ("weight", "bias"))
    eps = ("eps", norm.argument("eps"))

    def derived(suffix: str, shape: tuple[Any, ...], source: Ref | None, *others: tuple[str, Any]) -> Node:
        arguments = (("self", source and _wide(graph, source)), *others, ("dtype", weight.dtype))
        new = replace(norm, name=f"{norm.name}__{suffix}", target=f"sft.folded_{suffix}", shape=shape, arguments=arguments)
        return replace(new, dtype=weight.dtype, itemsize_bytes=weight.itemsize_bytes)

    new_weight = derived("weight", weight.shape, Ref(weight.name), scale, var, eps)
    new_bias = derived("bias", weight.shape[:1], conv.argument("bias"), scale, shift, mean, var, eps)
    yield from (new_weight, new_bias)
    operands = {"weight": Ref(new_weight.name), "bias": Ref(new_bias.name)}
    arguments = tuple((key, operands.get(key, value)) for key, value in conv.arguments)
    if conv.argument("bias") is None and "bias" not in dict(conv.arguments):
        arguments += (("bias", operands["bias"]),)
    yield replace(conv, name=norm.name, arguments=arguments)


def _wide(graph: Graph, ref: Ref) -> Ref:
    """The value before its conversion to a narrower type, if it was converted."""
    node = graph[ref.name]
    if node.target in CASTS and node.is_floating:
        source = graph[node.argument("self").name]
        if source.is_floating and source.itemsize_bytes > node.itemsize_bytes:
            return Ref(source.name)
    return ref
