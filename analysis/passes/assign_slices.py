"""Writes into rows, columns or slices of an image, and joins along an axis.

The written part is padded to the image's size, so that both operands come in the same strips; ``sft.assign_slice`` takes the rows from
``start`` on from one of them and the remaining ones from the other::

    x[:, :, 2:5] = y                      ->      p = pad(y, rows=(2, height - 5)); z = sft.assign_slice(x, p, axis=0, start=2, stop=5)
    cat([x, y], dim=2)                    ->      a = pad(x, rows=(0, hy)); b = pad(y, rows=(hx, 0)); z = sft.assign_slice(a, b, ...)

If the other part is a constant, the result is a pad with that constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy as sp

from sft.analysis.ir.graph import Node, Ref
from sft.analysis.ir.symbolic import same_shape
from sft.analysis.passes.constants import Constant, constant_of
from sft.analysis.passes.decompose_pads import pad_axis
from sft.analysis.passes.layout_tracker import LayoutTracker, TrackedImage

__all__ = ["assign_axis_slice", "join_along_axis"]

#: Most images that are joined by padding each of them.
_MAX_JOINED = 4


def assign_axis_slice(tracker: LayoutTracker, node: Node, source: TrackedImage) -> bool:
    """Rewrite ``slice_scatter`` of an image along an axis; false if the slice has a step, or the sizes do not match."""
    name, start, step = node.argument("self").name, node.argument("start"), node.argument("step", 1)
    dim = source.layout.image_dim(node.argument("dim", 0))
    written = tracker.nodes[source.node]
    if dim is None or dim < len(written.shape) - tracker.axes.count or step != 1:
        return False
    extent, count = node.shape[node.argument("dim", 0)], written.shape[dim]
    first = 0 if start is None else start
    first = first + extent if isinstance(first, int) and first < 0 else first
    shape = tuple(extent if each == dim else size for each, size in enumerate(written.shape))
    if not same_shape(source.layout.shape(shape), node.shape):
        return False
    image, constant = tracker.images.get(name), None
    if image is None:
        constant = constant_of(tracker.nodes, name) if name in tracker.nodes else None
        if constant is None or constant.dtype != written.dtype or isinstance(constant.value, sp.Basic):
            return False
    elif (
        image.layout != source.layout
        or not same_shape(tracker.shape(image.node), shape)
        or tracker.nodes[image.node].dtype != written.dtype
    ):
        return False
    amounts = (first, extent - first - count)
    if constant is not None:
        return _put_padded(tracker, node, source, dim, amounts, constant)
    assert image is not None
    padded = pad_axis(node, written, f"{node.name}__placed", dim, amounts, tracker.axes.count)
    tracker.put(padded, source.layout)
    assigned = _assignment(node, tracker.nodes[image.node], padded, node.name, dim, (first, first + count), tracker.axes.count)
    return tracker.put(assigned, source.layout)


def join_along_axis(tracker: LayoutTracker, node: Node) -> bool:
    """Rewrite ``cat`` along an axis of images, and constants of one value; false for other operands."""
    images = [tracker.images[name] for name in node.operands if name in tracker.images]
    layout, dim = images[0].layout, images[0].layout.image_dim(node.argument("dim", 0))
    nodes = [tracker.nodes[image.node] for image in images]
    is_alike = all(image.layout == layout and _is_beside(each, nodes[0], dim) for image, each in zip(images, nodes, strict=True))
    if dim is None or dim < len(nodes[0].shape) - tracker.axes.count or not is_alike or len(images) > _MAX_JOINED:
        return False
    constants = [constant_of(tracker.nodes, name) for name in node.operands if name not in tracker.images]
    if any(constant is None or constant != constants[0] or constant.dtype != nodes[0].dtype for constant in constants):
        return False
    value = constants[0].value if constants and constants[0] is not None else 0
    if isinstance(value, sp.Basic):
        return False
    return _join(tracker, node, dim, value)


def _is_beside(image: Node, other: Node, dim: int | None) -> bool:
    """True if two images have one element type, and one size apart from a dimension."""
    if image.dtype != other.dtype or len(image.shape) != len(other.shape):
        return False
    sizes = [[size for each, size in enumerate(node.shape) if each != dim] for node in (image, other)]
    return same_shape(*sizes)


def _join(tracker: LayoutTracker, node: Node, dim: int, value: Any) -> bool:
    model_dim = node.argument("dim", 0)
    extent, offset = node.shape[model_dim], 0
    result: Node | None = None
    last = max(index for index, name in enumerate(node.operands) if name in tracker.images)
    for index, name in enumerate(node.operands):
        image = tracker.images.get(name)
        if image is None:
            offset = offset + tracker.shape(name)[model_dim]
            continue
        image_node = tracker.nodes[image.node]
        end = offset + image_node.shape[dim]
        padded_name = node.name if result is None and index == last else f"{node.name}__placed{index}"
        padded = pad_axis(node, image_node, padded_name, dim, (offset, extent - end), tracker.axes.count, value=value)
        tracker.put(padded, image.layout)
        if result is not None:
            name = node.name if index == last else f"{node.name}__joined{index}"
            padded = _assignment(node, result, padded, name, dim, (offset, end), tracker.axes.count)
            tracker.put(padded, image.layout)
        result, offset = padded, end
    return True


def _put_padded(tracker: LayoutTracker, node: Node, source: TrackedImage, dim: int, amounts: tuple[Any, Any], constant: Constant) -> bool:
    padded = pad_axis(node, tracker.nodes[source.node], node.name, dim, amounts, tracker.axes.count, value=constant.value)
    return tracker.put(padded, source.layout)


def _assignment(node: Node, image: Node, padded: Node, name: str, dim: int, span: Sequence[Any], num_axes: int) -> Node:
    """The node ``name``: ``image``, with the rows of ``span`` (columns, slices) of ``padded``."""
    axis = dim - (len(image.shape) - num_axes)
    options = (("axis", axis), ("start", span[0]), ("stop", span[1]), ("axes", num_axes))
    arguments = (("self", Ref(image.name)), ("src", Ref(padded.name)), *options)
    return replace(padded, name=name, target="sft.assign_slice", shape=padded.shape, arguments=arguments)
