"""Layout canonicalization: rewrite the graph so that every image has one order of dimensions, ``[N, channels..., axes...]``.

:class:`sft.analysis.passes.layout_tracker.LayoutTracker` tracks the layout of the model's values in images. This pass rewrites each
operator to work on the image itself::

    y = permute(x, [0, 2, 3, 1])                  # eliminated
    z = layer_norm(y, [C], w, b)          ->      z = sft.channel_norm(x, w, b, dims=(1,))
    s = sum(z, dim=[1, 2])                        s = sum(z, dim=(2, 3))

* Permutes, transposes, reshapes and squeezes are eliminated, or become ``sft.rearrange``, which moves channels within each pixel.
* Elementwise operators stay; their broadcast operands are aligned (:mod:`sft.analysis.passes.elementwise`).
* Operators along dimensions (``softmax``, ``cat``, ``sum``, ...) get the image's dimensions as arguments.
* ``linear`` along channels becomes a convolution with a kernel of one pixel, ``layer_norm`` along channels ``sft.channel_norm``
  (:mod:`sft.analysis.passes.decompose_norms`). Reductions over the image (:mod:`sft.analysis.passes.decompose_reductions`), matrix products
  (:mod:`sft.analysis.passes.decompose_products`) and losses (:mod:`sft.analysis.passes.decompose_losses`) are decomposed.
* Pixels that become channels, and channels that become pixels, become ``sft.pixel_unshuffle`` and ``sft.pixel_shuffle``; windows of pixels
  become ``sft.im2col`` and ``sft.col2im`` (:mod:`sft.analysis.passes.decompose_windows`).
* All remaining operators get the value in the model's order, restored untiled (``sft.restore_dims``) unless that is the image's order.

A rewrite is a function of the tracker and a node that returns true if it applies; ``_REWRITES`` lists the candidates by target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from sft.analysis.ir.graph import Graph, Node, Ref, map_refs
from sft.analysis.ir.ops import DIMENSION_ARGUMENTS, ELEMENTWISE
from sft.analysis.ir.symbolic import same_shape
from sft.analysis.ir.targets import ELEMENTWISE_LOSSES
from sft.analysis.passes.assign_slices import join_along_axis, select_row
from sft.analysis.passes.assignments import ASSIGNMENTS, INDEXED, rewrite_assignment, rewrite_indexed
from sft.analysis.passes.constants import add_constant_image_like
from sft.analysis.passes.decompose_axis_reductions import AXIS_POOLINGS, AXIS_REDUCTIONS, rewrite_axis_pool, rewrite_axis_reduction
from sft.analysis.passes.decompose_losses import LABEL_LOSSES, decompose_whole_loss, rewrite_elementwise_loss, rewrite_label_loss
from sft.analysis.passes.decompose_norms import LAYER_NORMS, rewrite_layer_norm
from sft.analysis.passes.decompose_pads import PADS, rewrite_pad, rewrite_roll
from sft.analysis.passes.decompose_products import MATRIX_PRODUCTS, rewrite_linear, rewrite_product
from sft.analysis.passes.decompose_reductions import (
    ADAPTIVE_POOLINGS,
    REDUCTIONS,
    SOFTMAXES,
    rewrite_global_pool,
    rewrite_reduction,
    rewrite_softmax,
)
from sft.analysis.passes.decompose_windows import CONVOLUTIONS, rewrite_convolution, rewrite_windows
from sft.analysis.passes.elementwise import add_spatial_side_input, rewrite_elementwise, unexpanded, varies_spatially
from sft.analysis.passes.interleave import rewrite_repeated_rows
from sft.analysis.passes.layout import DimLayout
from sft.analysis.passes.layout_tracker import EXPANDS, PERMUTES, RESHAPES, LayoutTracker, TrackedImage

__all__ = ["CANONICALIZED_TARGETS", "canonicalize"]

_Rewrite = Callable[[LayoutTracker, Node], bool]

_WINDOWS = ("aten.im2col.default", "aten.col2im.default", "aten.unfold.default")
#: Operators that are eliminated, or rewritten into others.
CANONICALIZED_TARGETS = tuple(
    sorted({*PERMUTES, *RESHAPES, *EXPANDS, *LAYER_NORMS, *REDUCTIONS, *MATRIX_PRODUCTS, *_WINDOWS, "aten.linear.default"})
)


def canonicalize(graph: Graph) -> Graph:
    """Rewrite a graph as described in the module docstring. A graph with all images in canonical order is returned unchanged."""
    tracker = LayoutTracker(graph)
    for node in graph.nodes:
        _add_node(tracker, node)
    outputs = tuple(tracker.plain_name(name) for name in graph.outputs)
    updates = tuple((tracker.plain_name(name), target) for name, target in graph.updates)
    return replace(graph, nodes=tuple(tracker.nodes.values()), outputs=outputs, updates=updates).without_dead_operators()


def _add_node(tracker: LayoutTracker, node: Node) -> None:
    """Add one node of the model to the new graph, rewritten if a rewrite applies."""
    if node.kind != "operator":
        tracker.nodes[node.name] = node
        if node.kind == "input" and tracker.axes.is_image_shape(node.shape):
            tracker.images[node.name] = TrackedImage(node.name, DimLayout.plain(len(node.shape)))
        return
    reads_image = any(name in tracker.images for name in node.operands)
    if not (reads_image and any(rewrite(tracker, node) for rewrite in _REWRITES.get(node.target, ()))):
        for new in decompose_whole_loss(node, [tracker.graph[name].shape for name in node.operands]):
            tracker.copy_operator(new)


# -- operators along dimensions -----------------------------------------------------------------------------------------


def _rewrite_along_dims(tracker: LayoutTracker, node: Node) -> bool:
    """Operator along dimensions that correspond to image dimensions: dimensions of channels, or all axes together."""
    spec, key = DIMENSION_ARGUMENTS[node.target], DIMENSION_ARGUMENTS[node.target].argument
    if node.target in ("aten.cat.default", "aten.stack.default") and not _join_side_inputs(tracker, node, is_new_dim=spec.adds):
        return False
    operands = [operand for operand in node.operands if operand in tracker.images]
    layout, image_shape = tracker.images[operands[0]].layout, tracker.shape(tracker.images[operands[0]].node)
    if set(node.operands) != set(operands) or any(tracker.images[operand].layout != layout for operand in operands):
        return False
    if key not in dict(node.arguments) or any(len(tracker.shape(tracker.images[o].node)) != len(image_shape) for o in operands):
        return False
    argument, first_axis = node.argument(key), len(image_shape) - tracker.axes.count
    if spec.adds:
        return _stack(tracker, node, layout, argument % len(node.shape), first_axis)
    rank = len(layout.groups)
    dims = [dim % rank for dim in ([argument] if isinstance(argument, int) else argument or range(rank))]
    image_dims = [image_dim for image_dim in map(layout.image_dim, dims) if image_dim is not None]
    if len(image_dims) != len(dims):
        return False
    drops = spec.drops and not node.argument("keepdim", False)
    new_layout = layout.without(image_dims) if drops else layout
    new_argument: Any = image_dims[0] if isinstance(argument, int) else tuple(image_dims)
    if all(1 <= dim < first_axis for dim in image_dims):
        extents = {} if drops else {image_dim: node.shape[dim] for dim, image_dim in zip(dims, image_dims, strict=True)}
        shape = [extents.get(dim, extent) for dim, extent in enumerate(image_shape) if not (drops and dim in image_dims)]
        return _put_on_images(tracker, node, new_layout, (key, new_argument), tuple(shape))
    if node.target == "aten.slice.Tensor" and not layout.is_plain:
        sliced = tuple(node.shape[dims[0]] if dim == image_dims[0] else extent for dim, extent in enumerate(image_shape))
        return _put_on_images(tracker, node, layout, (key, new_argument), sliced)
    is_over_axes = sorted(image_dims) == list(range(first_axis, len(image_shape)))
    if drops and is_over_axes and new_layout.is_plain and len(new_layout.groups) == first_axis:
        return _put_on_images(tracker, node, None, (key, new_argument))
    return False


def _stack(tracker: LayoutTracker, node: Node, layout: DimLayout, dim: int, first_axis: int) -> bool:
    """Stack images along a new dimension of channels: that of a plain value among its channels, otherwise the first one. Always true."""
    if layout.is_plain and 1 <= dim <= first_axis:
        return _put_on_images(tracker, node, DimLayout.plain(len(node.shape)))
    groups = [tuple(image_dim + (image_dim > 0) for image_dim in group) for group in layout.groups]
    groups.insert(dim, (1,))
    batch, *further = tracker.shape(tracker.first_image(node).node)
    return _put_on_images(tracker, node, DimLayout(tuple(groups)), ("dim", 1), (batch, node.shape[dim], *further))


def _join_side_inputs(tracker: LayoutTracker, node: Node, *, is_new_dim: bool) -> bool:
    """Make spatial side inputs images if they are concatenated with one (or stacked: ``is_new_dim``); false if that fails."""
    image = tracker.first_image(node)
    first_axis = len(tracker.shape(image.node)) - tracker.axes.count
    channel_dim = None if is_new_dim else image.layout.image_dim(node.argument("dim", 0))
    if not is_new_dim and (channel_dim is None or not 1 <= channel_dim < first_axis):
        return False
    side_images: dict[str, TrackedImage] = {}
    for name in (name for name in dict.fromkeys(node.operands) if name not in tracker.images):
        shape, base = tracker.shape(name), unexpanded(tracker, name)
        if len(shape) != len(image.layout.groups) or not varies_spatially(shape, image.layout, first_axis):
            return False
        # The side input repeats along the image and the batch by itself; expanded channels have to be explicit.
        repeated = [dim for dim, extent in enumerate(tracker.shape(base)) if extent != shape[dim]]
        is_implicit = all(dim == 0 or dim >= first_axis for value_dim in repeated for dim in image.layout.groups[value_dim])
        side = add_spatial_side_input(tracker, node, base if is_implicit else name, image)
        if side is None:
            return False
        side_images[name] = TrackedImage(side, image.layout)
    tracker.images.update(side_images)
    return True


def _put_on_images(
    tracker: LayoutTracker,
    node: Node,
    layout: DimLayout | None,
    argument: tuple[str, Any] | None = None,
    shape: tuple[Any, ...] | None = None,
) -> bool:
    """Add an operator on images, with one argument and the shape replaced. Its result is an image of this layout, or none. Always true."""
    arguments = tuple((key, map_refs(value, lambda name: Ref(tracker.images[name].node))) for key, value in node.arguments)
    if argument is not None:
        arguments = tuple(argument if key == argument[0] else (key, value) for key, value in arguments)
    tracker.nodes[node.name] = replace(node, shape=node.shape if shape is None else shape, arguments=arguments)
    if layout is not None:
        tracker.images[node.name] = TrackedImage(node.name, layout)
    return True


# -- shapes -------------------------------------------------------------------------------------------------


def _rewrite_full_slice(tracker: LayoutTracker, node: Node) -> bool:
    """Eliminate a slice of all elements, as the exporter makes one of each ``:`` of an index; false for other slices."""
    name = node.operands[0]
    if not same_shape(tracker.graph[name].shape, node.shape) or node.argument("step", 1) != 1:
        return False
    tracker.images[node.name] = tracker.images[name]
    return True


def _rewrite_expand(tracker: LayoutTracker, node: Node) -> bool:
    """Expansion of channels."""
    image = tracker.images.get(node.operands[0])
    if image is None or len(node.shape) != len(image.layout.groups):
        return False
    shape = list(tracker.shape(image.node))
    first_axis = len(shape) - tracker.axes.count
    for group, extent in zip(image.layout.groups, node.shape, strict=True):
        if len(group) == 1 and 1 <= group[0] < first_axis:
            shape[group[0]] = extent
    if not same_shape(image.layout.shape(shape), node.shape):
        return False
    arguments = (("self", Ref(image.node)), ("channels", tuple(shape[1:first_axis])))
    return tracker.put(replace(node, target="sft.expand_channels", shape=tuple(shape), arguments=arguments), image.layout)


def _rewrite_broadcast(tracker: LayoutTracker, node: Node) -> bool:
    """``broadcast_tensors`` of images of one size: the identity, since readers broadcast."""
    name = node.operands[node.argument("result", 0)]
    image = tracker.images.get(name)
    if image is None or not same_shape(image.layout.shape(tracker.shape(image.node)), node.shape):
        return False
    tracker.images[node.name] = image
    return True


def _rewrite_unpool(tracker: LayoutTracker, node: Node) -> bool:
    """Unpooling of a signal, which torch expresses as that of an image one pixel wide."""
    operands = [tracker.graph[name] for name in node.operands]
    images = [tracker.images.get(operand.operands[0]) for operand in operands if operand.target == "aten.unsqueeze.default"]
    if tracker.axes.count != 1 or [image and image.layout for image in images] != [DimLayout.plain(3)] * 2:
        return False
    value, indices = (Ref(image.node) for image in images if image is not None)
    arguments = (("self", value), ("indices", indices), ("output_size", node.argument("output_size")[:1]))
    unpooled = replace(node, target="sft.max_unpool1d", shape=node.shape[:3], arguments=arguments)
    return tracker.put(unpooled, DimLayout((*DimLayout.plain(3).groups, ())))


# -- labels ---------------------------------------------------------------------------------------------


def _rewrite_one_hot(tracker: LayoutTracker, node: Node) -> bool:
    """One-hot encoding: classes become channels, which the model's value has last."""
    image, num_classes = tracker.first_image(node), node.argument("num_classes", -1)
    shape = tracker.shape(image.node)
    if len(shape) != tracker.axes.rank or shape[1] != 1 or num_classes < 1 or any(1 in group for group in image.layout.groups):
        return False
    arguments = (("self", Ref(image.node)), ("num_classes", num_classes))
    one_hot = replace(node, target="sft.one_hot", shape=(shape[0], num_classes, *tracker.axes.of(shape)), arguments=arguments)
    return tracker.put(one_hot, DimLayout((*image.layout.groups, (1,))))


def _rewrite_scatter(tracker: LayoutTracker, node: Node) -> bool:
    """Scatter of values by labels; a constant that they are scattered into becomes an image like the labels."""
    name, labels = node.argument("self").name, tracker.images.get(node.argument("index").name)
    image = add_constant_image_like(tracker, name, labels)
    if image is not None:
        tracker.images[name] = image
    return _rewrite_along_dims(tracker, node)


def _rewrite_table(*rows: tuple[Iterable[str], _Rewrite]) -> dict[str, tuple[_Rewrite, ...]]:
    """The rewrites of each target, in the order of the rows."""
    table: dict[str, tuple[_Rewrite, ...]] = {}
    for targets, rewrite in rows:
        for target in targets:
            table[target] = (*table.get(target, ()), rewrite)
    return table


#: Candidate rewrites by target, the most specific first.
_REWRITES = _rewrite_table(
    (PERMUTES, LayoutTracker.permute),
    (RESHAPES, LayoutTracker.reshape),
    (ELEMENTWISE, rewrite_elementwise),
    (REDUCTIONS, rewrite_reduction),
    (AXIS_REDUCTIONS, rewrite_axis_reduction),
    (SOFTMAXES, rewrite_softmax),
    (("aten.slice.Tensor",), _rewrite_full_slice),
    (("aten.select.int",), select_row),
    (DIMENSION_ARGUMENTS, _rewrite_along_dims),
    (("aten.cat.default",), join_along_axis),
    (ELEMENTWISE_LOSSES, rewrite_elementwise_loss),
    (LABEL_LOSSES, rewrite_label_loss),
    (("aten.linear.default",), rewrite_linear),
    (LAYER_NORMS, rewrite_layer_norm),
    (("aten.max_unpool2d.default",), _rewrite_unpool),
    (ADAPTIVE_POOLINGS, rewrite_global_pool),
    (AXIS_POOLINGS, rewrite_axis_pool),
    (_WINDOWS, rewrite_windows),
    (CONVOLUTIONS, rewrite_convolution),
    (PADS, rewrite_pad),
    (("aten.roll.default",), rewrite_roll),
    (EXPANDS, _rewrite_expand),
    (("aten.repeat_interleave.self_int",), rewrite_repeated_rows),
    (MATRIX_PRODUCTS, rewrite_product),
    (("aten.broadcast_tensors.default",), _rewrite_broadcast),
    (("aten.one_hot.default",), _rewrite_one_hot),
    (("aten.scatter.value", "aten.scatter.src"), _rewrite_scatter),
    (ASSIGNMENTS, rewrite_assignment),
    (INDEXED, rewrite_indexed),
)
