"""Norms that measure the image, taken apart: moments, what follows from them, and an affine map of each element.

A norm with statistics over the image is a barrier: no output row is known before every input row has been seen. Only its first
third is global, though. ``y = x * scale + shift`` with

    scale = weight / sqrt(var + eps),    shift = bias - mean * scale

is pointwise once ``mean`` and ``var`` are known. So BatchNorm in training, GroupNorm and InstanceNorm become

* ``sft.moments``: mean, biased variance and count of each group of elements, ``[B, G, 3]`` (``B`` is 1 for statistics over the
  batch, else the batch; ``G`` groups of channels); a reduction over the image, whose result is a global value;
* ``sft.scale_shift``: ``[B, C, 1, ..., 1, 2]`` with a 1 for each axis, an operator on small whole tensors;
* ``sft.affine``: a pointwise operator with a global side operand;
* ``sft.running_mean``, ``sft.running_var``: the buffers' next values, where the norm keeps running statistics.

Gradients need nothing more: the chain rule sends the gradient of ``scale`` and ``shift``, summed over the image, back through the
moments. Sources: Ioffe and Szegedy (2015), Wu and He (2018), Ulyanov et al. (2016).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sft.analysis.graph import Graph, Node, Ref

__all__ = ["with_norms_apart"]

_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
_BATCH_NORM_NO_STATS = "aten._native_batch_norm_legit.no_stats"
_GROUP_NORM = "aten.group_norm.default"
_INSTANCE_NORM = "aten.instance_norm.default"


def with_norms_apart(graph: Graph) -> Graph:
    """The graph with every norm over the image replaced by its parts."""
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _parts(node, graph)
    return replace(graph, nodes=tuple(nodes))


def _parts(node: Node, graph: Graph) -> list[Node]:
    if node.target == "getitem":
        source = graph[node.argument("source").name]
        if source.target == _BATCH_NORM and len(source.shape) == graph.axes.rank and node.argument("index") in _RUNNING:
            return [_running(node, source)]
        return [replace(node, target=source.target, arguments=(*source.arguments, ("result", node.argument("index"))))]
    if len(node.shape) != graph.axes.rank:
        return [node]
    if node.target in (_BATCH_NORM, _BATCH_NORM_NO_STATS):
        return _norm(node, graph, groups=node.shape[1], per_sample=False)
    if node.target == _GROUP_NORM:
        return _norm(node, graph, groups=node.argument("num_groups"), per_sample=True)
    if node.target == _INSTANCE_NORM and node.argument("use_input_stats") and node.argument("running_mean") is None:
        return _norm(node, graph, groups=node.shape[1], per_sample=True)
    return [node]


def _norm(node: Node, graph: Graph, *, groups: Any, per_sample: bool) -> list[Node]:
    image: Ref = node.argument("input")
    ones = (1,) * graph.axes.count
    batch = node.shape[0] if per_sample else 1
    moments = _node(
        node, "moments", (batch, groups, 3), (("self", image), ("groups", groups), ("per_sample", per_sample), ("axes", graph.axes.count))
    )
    operands = (("weight", node.argument("weight")), ("bias", node.argument("bias")))
    scale_shift = _node(
        node,
        "scale_shift",
        (batch, node.shape[1], *ones, 2),
        (("moments", Ref(moments.name)), *operands, ("axes", graph.axes.count), ("channels", node.shape[1]), ("eps", node.argument("eps"))),
    )
    affine = replace(node, target="sft.affine", arguments=(("self", image), ("scale_shift", Ref(scale_shift.name))))
    return [moments, scale_shift, affine]


#: Which of the functional BatchNorm's results are the running statistics' next values.
_RUNNING = {3: "running_mean", 4: "running_var"}


def _running(node: Node, source: Node) -> Node:
    which = _RUNNING[node.argument("index")]
    arguments = (
        ("moments", Ref(_part_name(source, "moments"))),
        ("running", source.argument(which)),
        ("momentum", source.argument("momentum")),
    )
    return replace(node, target=f"sft.{which}", arguments=arguments, module_path=source.module_path)


def _part_name(node: Node, part: str) -> str:
    return f"{node.name}__{part}"


def _node(norm: Node, part: str, shape: tuple[Any, ...], arguments: tuple[tuple[str, Any], ...]) -> Node:
    # Statistics of a half type's elements, and what follows from them, are in fp32, as eager PyTorch accumulates them.
    dtype, itemsize_bytes = ("float32", 4) if norm.itemsize_bytes < 4 else (norm.dtype, norm.itemsize_bytes)
    return replace(
        norm,
        name=_part_name(norm, part),
        target=f"sft.{part}",
        shape=shape,
        arguments=arguments,
        dtype=dtype,
        itemsize_bytes=itemsize_bytes,
    )
