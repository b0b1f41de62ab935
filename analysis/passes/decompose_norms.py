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

Layer norm and RMS norm of images: of each pixel's channels, or of whole samples.

Of channels alone they are functions of single pixels. A layer norm of whole samples is a group norm with one group, one over the axes
alone has a group for each channel; the root mean square is a mean over the image. With a weight for each pixel they run whole: that
weight would have to come in strips, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sft.analysis.ir.graph import Graph, Node, Ref
from sft.analysis.ir.targets import CUMULATIVE_MOMENTUM
from sft.analysis.passes.decompose_reductions import NodeSequence, mean_over_axes, widen_half

__all__ = ["LAYER_NORMS", "decompose_layer_norm", "decompose_norms"]

_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
_BATCH_NORM_NO_STATS = "aten._native_batch_norm_legit.no_stats"
_GROUP_NORM = "aten.group_norm.default"
_INSTANCE_NORM = "aten.instance_norm.default"
_FROZEN_NORM = "aten._native_batch_norm_legit_no_training.default"
_FROZEN_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")


def decompose_norms(graph: Graph) -> Graph:
    """The graph with every norm over the image replaced by its parts."""
    parting = _NormDecomposer(graph)
    for node in graph.nodes:
        parting.nodes += parting.parts(node)
    updates = {target: name for name, target in graph.updates} | parting.updates
    return replace(graph, nodes=tuple(parting.nodes), updates=tuple((name, target) for target, name in updates.items()))


class _NormDecomposer:
    """Norms taken apart one after the other.

    The exporter drops what an InstanceNorm writes into its buffers, so their next values are added here: as ``updates``, and as
    what the same module reads when it is called again.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.updates: dict[str, str] = {}  # a buffer's next value, by its qualified name

    def parts(self, node: Node) -> list[Node]:
        """What stands for a node."""
        graph = self.graph
        if node.target == "getitem":
            source = graph[node.argument("source").name]
            if source.target == _BATCH_NORM and _is_decomposed(source, graph) and node.argument("index") in _RUNNING_STATISTICS:
                return [_running_statistic(node, source, graph)]
            return [replace(node, target=source.target, arguments=(*source.arguments, ("result", node.argument("index"))))]
        if node.target == _INSTANCE_NORM:
            return self._instance_norm(node)
        if not _is_decomposed(node, graph):
            return [node]
        if node.target in (_BATCH_NORM, _BATCH_NORM_NO_STATS):
            return _decompose_norm(node, groups=node.shape[1], per_sample=False)
        if node.target == _GROUP_NORM:
            return _decompose_norm(node, groups=node.argument("num_groups"), per_sample=True)
        return [node]

    def _instance_norm(self, node: Node) -> list[Node]:
        if not node.argument("use_input_stats"):
            kept = [(key, value) for key, value in node.arguments if key in _FROZEN_ARGUMENTS]
            return [replace(node, target=_FROZEN_NORM, arguments=tuple(kept))]
        buffers = {which: node.argument(which) for which in _RUNNING_STATISTICS.values()}
        if None in buffers.values():
            return _decompose_norm(node, groups=node.shape[1], per_sample=True) if _is_decomposed(node, self.graph) else [node]
        if not all(self._is_own(buffer.name) for buffer in buffers.values()):
            return [node]
        parts = _decompose_norm(node, groups=node.shape[1], per_sample=True)
        for which, buffer in buffers.items():
            held = self.graph[buffer.name]
            arguments = (
                ("moments", Ref(_suffixed_name(node, "moments"))),
                ("running", Ref(self.updates.get(held.target, held.name))),
                ("momentum", node.argument("momentum")),
            )
            made = replace(held, name=_suffixed_name(node, which), kind="operator", target=f"sft.{which}", arguments=arguments)
            parts.append(replace(made, module_path=node.module_path))
            self.updates[held.target] = made.name
        return parts

    def _is_own(self, name: str) -> bool:
        """Whether a running statistic is a buffer that only InstanceNorms read; others would read its next value."""
        graph = self.graph
        return graph[name].kind == "buffer" and all(graph[user].target == _INSTANCE_NORM for user in graph.users[name])


def _is_decomposed(node: Node, graph: Graph) -> bool:
    """Whether a norm is taken apart: those of images are, and those that update buffers, which have no derivative of torch's."""
    return len(node.shape) == graph.axes.rank or node.target == _BATCH_NORM


def _decompose_norm(node: Node, *, groups: Any, per_sample: bool) -> list[Node]:
    image: Ref = node.argument("input")
    num_axes = len(node.shape) - 2
    ones = (1,) * num_axes
    batch = node.shape[0] if per_sample else 1
    moments = _derived_node(
        node, "moments", (batch, groups, 3), (("self", image), ("groups", groups), ("per_sample", per_sample), ("axes", num_axes))
    )
    operands = (("weight", node.argument("weight")), ("bias", node.argument("bias")))
    scale_shift = _derived_node(
        node,
        "scale_shift",
        (batch, node.shape[1], *ones, 2),
        (("moments", Ref(moments.name)), *operands, ("axes", num_axes), ("channels", node.shape[1]), ("eps", node.argument("eps"))),
    )
    affine = replace(node, target="sft.affine", arguments=(("self", image), ("scale_shift", Ref(scale_shift.name))))
    return [moments, scale_shift, affine]


#: Which of the functional BatchNorm's results are the running statistics' next values.
_RUNNING_STATISTICS = {3: "running_mean", 4: "running_var"}


def _running_statistic(node: Node, source: Node, graph: Graph) -> Node:
    which = _RUNNING_STATISTICS[node.argument("index")]
    arguments: tuple[tuple[str, Any], ...] = (
        ("moments", Ref(_suffixed_name(source, "moments"))),
        ("running", source.argument(which)),
        ("momentum", source.argument("momentum")),
    )
    if source.argument("momentum") == CUMULATIVE_MOMENTUM:
        buffer, num_calls = _source_buffer(source.argument(which).name, which, graph)
        path = buffer.target.removesuffix(which)
        count = next(held for held in graph.nodes if held.kind == "buffer" and held.target == f"{path}num_batches_tracked")
        arguments += (("num_batches", Ref(count.name)), ("num_calls", num_calls))
    return replace(node, target=f"sft.{which}", arguments=arguments, module_path=source.module_path)


def _source_buffer(name: str, which: str, graph: Graph) -> tuple[Node, int]:
    """The buffer behind a running statistic, and which call of the module within this step reads it, from 1."""
    num_calls, node = 1, graph[name]
    while node.kind == "operator":
        node = graph[graph[node.argument("source").name].argument(which).name]
        num_calls += 1
    return node, num_calls


def _suffixed_name(node: Node, part: str) -> str:
    return f"{node.name}__{part}"


def _derived_node(norm: Node, part: str, shape: tuple[Any, ...], arguments: tuple[tuple[str, Any], ...]) -> Node:
    # Statistics of a half type's elements, and what follows from them, are in fp32, as eager PyTorch accumulates them.
    dtype, itemsize_bytes = ("float32", 4) if norm.itemsize_bytes < 4 else (norm.dtype, norm.itemsize_bytes)
    return replace(
        norm,
        name=_suffixed_name(norm, part),
        target=f"sft.{part}",
        shape=shape,
        arguments=arguments,
        dtype=dtype,
        itemsize_bytes=itemsize_bytes,
    )


#: Norms of a value's last dimensions, by target, and what they are called where those are channels.
LAYER_NORMS = {"aten.layer_norm.default": "sft.channel_norm", "aten.rms_norm.default": "sft.channel_rms_norm"}


def decompose_layer_norm(node: Node, image: Node, places: Sequence[int], num_axes: int) -> tuple[Node, ...] | None:
    """The nodes that stand for a norm over the image's dimensions ``places``; ``None`` where there is no form of it that streams."""
    first_axis = len(image.shape) - num_axes
    affine = tuple((key, value) for key, value in node.arguments if key in ("weight", "bias"))
    if all(1 <= place < first_axis for place in places):
        arguments = (("self", Ref(image.name)), *affine, ("eps", node.argument("eps")), ("dims", tuple(places)))
        return (replace(node, target=LAYER_NORMS[node.target], shape=image.shape, arguments=arguments),)
    rest = tuple(sorted(place for place in places if place < first_axis))
    all_channels = tuple(range(1, first_axis))
    if rest not in ((), all_channels) or len(places) - len(rest) != num_axes or any(value is not None for _, value in affine):
        return None
    if node.target == "aten.rms_norm.default":
        return _decompose_rms_norm(node, image, rest, num_axes)
    if not rest and len(all_channels) > 1:
        return None
    groups = 1 if rest else image.shape[1]
    nothing = (("weight", None), ("bias", None))
    arguments = (("input", Ref(image.name)), ("num_groups", groups), *nothing, ("eps", node.argument("eps")))
    return (replace(node, target="aten.group_norm.default", shape=image.shape, arguments=arguments),)


def _decompose_rms_norm(node: Node, image: Node, rest: tuple[int, ...], num_axes: int) -> tuple[Node, ...]:
    """``x / sqrt(mean(x^2) + eps)`` (Zhang and Sennrich, 2019)."""
    chain = NodeSequence(node)
    wide = widen_half(chain, image)
    square = chain.add("square", "aten.mul.Tensor", image.shape, (("self", Ref(wide.name)), ("other", Ref(wide.name))), wide.dtype)
    mean = mean_over_axes(chain, square, num_axes, rest)
    arguments = (("self", Ref(mean.name)), ("eps", node.argument("eps")), ("dtype", node.dtype))
    factor = chain.add("factor", "sft.inverse_sqrt", mean.shape, arguments, wide.dtype)
    first_axis = len(image.shape) - num_axes
    pixel = tuple(1 if dim in rest or dim >= first_axis else extent for dim, extent in enumerate(image.shape))
    spread = chain.add("spread", "sft.align_dims", pixel, (("self", Ref(factor.name)), ("shape", pixel)), wide.dtype)
    made = chain.add("scaled", "aten.mul.Tensor", image.shape, (("self", Ref(wide.name)), ("other", Ref(spread.name))), wide.dtype)
    chain.cast(made, node.dtype, "rounded")
    return chain.finish()
