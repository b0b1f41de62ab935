"""Norm decomposition: a norm with statistics over the image becomes moments, scale and shift, and an affine map.

Such a norm is a barrier: no output row is known before every input row has been read. Only its statistics are global, though.
``y = x * scale + shift`` with

    scale = weight / sqrt(var + eps),    shift = bias - mean * scale

is pointwise once ``mean`` and ``var`` are known. So BatchNorm in training, GroupNorm and InstanceNorm become ::

    y = group_norm(x, w, b)        ->      m = sft.moments(x)
                                           s = sft.scale_shift(m, w, b)
                                           y = sft.affine(x, s)

* ``sft.moments``: mean, biased variance and count of each group of elements, ``[B, G, 3]`` (``B`` is 1 for statistics over the
  batch, otherwise the batch; ``G`` groups of channels); a reduction over the image with a global value as its result;
* ``sft.scale_shift``: ``[B, C, 1, ..., 1, 2]`` with a 1 for each axis, an operator on small untiled tensors;
* ``sft.affine``: a pointwise operator with a global side operand;
* ``sft.running_mean``, ``sft.running_var``: the buffers' next values, if the norm keeps running statistics.

The gradient follows by the chain rule: the gradients of ``scale`` and ``shift``, summed over the image, flow back through the moments.
Sources: Ioffe and Szegedy (2015), Wu and He (2018), Ulyanov et al. (2016).

Layer norm and RMS norm over channels are functions of single pixels (``sft.channel_norm``, ``sft.channel_rms_norm``). A layer norm over
complete samples is a group norm with one group, one over the axes only has a group for each channel; the root mean square is a mean over
the image. With a weight for each pixel they run untiled: that weight would have to be streamed, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sft.analysis.ir.graph import Graph, Node, Ref
from sft.analysis.ir.targets import CUMULATIVE_MOMENTUM
from sft.analysis.passes.decompose_reductions import NodeSequence, reduce_over_axes, widen_half
from sft.analysis.passes.layout_tracker import LayoutTracker

__all__ = ["LAYER_NORMS", "decompose_norms", "rewrite_layer_norm"]

_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
_BATCH_NORM_NO_STATS = "aten._native_batch_norm_legit.no_stats"
_GROUP_NORM = "aten.group_norm.default"
_INSTANCE_NORM = "aten.instance_norm.default"
_FROZEN_NORM = "aten._native_batch_norm_legit_no_training.default"
_FROZEN_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")


def decompose_norms(graph: Graph) -> Graph:
    """Replace every norm over the image by its decomposition."""
    decomposer = _NormDecomposer(graph)
    for node in graph.nodes:
        decomposer.nodes += decomposer.decompose(node)
    updates = {target: name for name, target in graph.updates} | decomposer.updates
    return replace(graph, nodes=tuple(decomposer.nodes), updates=tuple((name, target) for target, name in updates.items()))


class _NormDecomposer:
    """Decomposes norms in order.

    The exporter drops the writes of an InstanceNorm to its buffers, so their next values are added here: as ``updates``, and as operands of
    further calls of the same module.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.updates: dict[str, str] = {}  # a buffer's next value, by its qualified name

    def decompose(self, node: Node) -> list[Node]:
        """The nodes that replace a node."""
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
            frozen_arguments = [(key, value) for key, value in node.arguments if key in _FROZEN_ARGUMENTS]
            return [replace(node, target=_FROZEN_NORM, arguments=tuple(frozen_arguments))]
        buffers = {which: node.argument(which) for which in _RUNNING_STATISTICS.values()}
        if None in buffers.values():
            return _decompose_norm(node, groups=node.shape[1], per_sample=True) if _is_decomposed(node, self.graph) else [node]
        if not all(self._is_exclusive(buffer.name) for buffer in buffers.values()):
            return [node]
        nodes = _decompose_norm(node, groups=node.shape[1], per_sample=True)
        for which, buffer in buffers.items():
            buffer_node = self.graph[buffer.name]
            arguments = (
                ("moments", Ref(_suffixed_name(node, "moments"))),
                ("running", Ref(self.updates.get(buffer_node.target, buffer_node.name))),
                ("momentum", node.argument("momentum")),
            )
            next_value = replace(buffer_node, name=_suffixed_name(node, which), kind="operator", target=f"sft.{which}", arguments=arguments)
            nodes.append(replace(next_value, module_path=node.module_path))
            self.updates[buffer_node.target] = next_value.name
        return nodes

    def _is_exclusive(self, name: str) -> bool:
        """True if a running statistic is a buffer that only InstanceNorms read; any other reader would read its next value."""
        graph = self.graph
        return graph[name].kind == "buffer" and all(graph[user].target == _INSTANCE_NORM for user in graph.users[name])


def _is_decomposed(node: Node, graph: Graph) -> bool:
    """True for norms of images, and for norms that update buffers, which have no derivative in torch."""
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


#: Results of the functional BatchNorm that are next values of running statistics, by index.
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
        count = next(buffer for buffer in graph.nodes if buffer.kind == "buffer" and buffer.target == f"{path}num_batches_tracked")
        arguments += (("num_batches", Ref(count.name)), ("num_calls", num_calls))
    return replace(node, target=f"sft.{which}", arguments=arguments, module_path=source.module_path)


def _source_buffer(name: str, which: str, graph: Graph) -> tuple[Node, int]:
    """The buffer of a running statistic, and the number (from 1) of the module's call within this step that reads it."""
    num_calls, node = 1, graph[name]
    while node.kind == "operator":
        node = graph[graph[node.argument("source").name].argument(which).name]
        num_calls += 1
    return node, num_calls


def _suffixed_name(node: Node, suffix: str) -> str:
    return f"{node.name}__{suffix}"


def _derived_node(norm: Node, suffix: str, shape: tuple[Any, ...], arguments: tuple[tuple[str, Any], ...]) -> Node:
    # Statistics of half-precision elements, and values derived from them, are in fp32, as eager PyTorch accumulates them.
    dtype, itemsize_bytes = ("float32", 4) if norm.itemsize_bytes < 4 else (norm.dtype, norm.itemsize_bytes)
    return replace(
        norm,
        name=_suffixed_name(norm, suffix),
        target=f"sft.{suffix}",
        shape=shape,
        arguments=arguments,
        dtype=dtype,
        itemsize_bytes=itemsize_bytes,
    )


#: Norms of a value's last dimensions, by target, and their operators if those dimensions are channels.
LAYER_NORMS = {"aten.layer_norm.default": "sft.channel_norm", "aten.rms_norm.default": "sft.channel_rms_norm"}


def _decompose_layer_norm(node: Node, image: Node, dims: Sequence[int], num_axes: int) -> tuple[Node, ...] | None:
    """The nodes of a norm over the image dimensions ``dims``; ``None`` if no form of it streams."""
    first_axis = len(image.shape) - num_axes
    affine = tuple((key, value) for key, value in node.arguments if key in ("weight", "bias"))
    if all(1 <= dim < first_axis for dim in dims):
        arguments = (("self", Ref(image.name)), *affine, ("eps", node.argument("eps")), ("dims", tuple(dims)))
        return (replace(node, target=LAYER_NORMS[node.target], shape=image.shape, arguments=arguments),)
    other_dims = tuple(sorted(dim for dim in dims if dim < first_axis))
    all_channels = tuple(range(1, first_axis))
    if other_dims not in ((), all_channels) or len(dims) - len(other_dims) != num_axes or any(value is not None for _, value in affine):
        return None
    if node.target == "aten.rms_norm.default":
        return _decompose_rms_norm(node, image, other_dims, num_axes)
    if not other_dims and len(all_channels) > 1:
        return None
    groups = 1 if other_dims else image.shape[1]
    no_affine = (("weight", None), ("bias", None))
    arguments = (("input", Ref(image.name)), ("num_groups", groups), *no_affine, ("eps", node.argument("eps")))
    return (replace(node, target="aten.group_norm.default", shape=image.shape, arguments=arguments),)


def _decompose_rms_norm(node: Node, image: Node, other_dims: tuple[int, ...], num_axes: int) -> tuple[Node, ...]:
    """``x / sqrt(mean(x^2) + eps)`` (Zhang and Sennrich, 2019)."""
    sequence = NodeSequence(node)
    wide = widen_half(sequence, image)
    square = sequence.add("square", "aten.mul.Tensor", image.shape, (("self", Ref(wide.name)), ("other", Ref(wide.name))), wide.dtype)
    mean = reduce_over_axes(sequence, square, num_axes, other_dims, "aten.mean.dim")
    arguments = (("self", Ref(mean.name)), ("eps", node.argument("eps")), ("dtype", node.dtype))
    factor = sequence.add("factor", "sft.inverse_sqrt", mean.shape, arguments, wide.dtype)
    first_axis = len(image.shape) - num_axes
    pixel = tuple(1 if dim in other_dims or dim >= first_axis else extent for dim, extent in enumerate(image.shape))
    spread = sequence.add("spread", "sft.align_dims", pixel, (("self", Ref(factor.name)), ("shape", pixel)), wide.dtype)
    scaled = sequence.add("scaled", "aten.mul.Tensor", image.shape, (("self", Ref(wide.name)), ("other", Ref(spread.name))), wide.dtype)
    sequence.cast(scaled, node.dtype, "rounded")
    return sequence.finish()


def rewrite_layer_norm(tracker: LayoutTracker, node: Node) -> bool:
    """Rewrite a layer norm or RMS norm over channels, or over the image."""
    image = tracker.images.get(node.argument("input").name)
    if image is None or any(name in tracker.images for name in node.operands[1:]):
        return False
    normalized = image.layout.groups[len(image.layout.groups) - len(node.argument("normalized_shape")) :]
    dims = [dim for group in normalized for dim in group]
    nodes = _decompose_layer_norm(node, tracker.nodes[image.node], dims, tracker.axes.count)
    return nodes is not None and all([tracker.put(new, image.layout) for new in nodes])
