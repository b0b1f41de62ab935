"""Writes into rows, columns or slices of an image, and joins along an axis.

The written part is padded to the image's size, so that both operands come in the same strips; ``sft.assign_slice`` takes the rows from
``start`` on from one of them and the remaining ones from the other::

    x[:, :, 2:5] = y                      ->      p = pad(y, rows=(2, height - 5)); z = sft.assign_slice(x, p, axis=0, start=2, stop=5)
    x[:, :, 3]                            ->      z = slice(x, rows=(3, 4)), tracked as squeezed
    x[:, :, 0::2] = y                     ->      as above, with rows of zeros between those of y (:mod:`sft.analysis.passes.interleave`)
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
from sft.analysis.passes.interleave import spread_rows
from sft.analysis.passes.layout import reshape_layout
from sft.analysis.passes.layout_tracker import LayoutTracker, TrackedImage

__all__ = ["assign_axis_slice", "assign_row", "join_along_axis", "select_row"]

#: Most images that are joined by padding each of them.
_MAX_JOINED = 4


def select_row(tracker: LayoutTracker, node: Node) -> bool:
    """Rewrite ``select`` along an axis as a slice of one row and a squeeze; false along other dimensions."""
    image, index = tracker.images[node.operands[0]], node.argument("index")
    shape, dim = tracker.shape(image.node), image.layout.image_dim(node.argument("dim"))
    if dim is None or dim < len(shape) - tracker.axes.count or not isinstance(index, int):
        return False
    row = tuple(1 if each == dim else extent for each, extent in enumerate(shape))
    squeezed = reshape_layout(image.layout, row, node.shape, tracker.axes)
    if squeezed is None or squeezed.rearrangement is not None:
        return False
    bounds = (("start", index), ("end", index + 1 if index != -1 else None), ("step", 1))
    arguments = (("self", Ref(image.node)), ("dim", dim), *bounds)
    return tracker.put(replace(node, target="aten.slice.Tensor", shape=row, arguments=arguments), squeezed.layout)


def assign_row(tracker: LayoutTracker, node: Node, source: TrackedImage) -> bool:
    """Rewrite ``select_scatter`` along an axis as ``slice_scatter`` of one row; false along other dimensions."""
    dim = node.argument("dim") % len(node.shape)
    row = tuple(1 if each == dim else extent for each, extent in enumerate(node.shape))
    unsqueezed = reshape_layout(source.layout, tracker.shape(source.node), row, tracker.axes)
    if unsqueezed is None or unsqueezed.rearrangement is not None:
        return False
    arguments = (
        ("self", node.argument("self")),
        ("src", node.argument("src")),
        ("dim", dim),
        ("start", node.argument("index")),
        ("step", 1),
    )
    return assign_axis_slice(tracker, replace(node, arguments=arguments), TrackedImage(source.node, unsqueezed.layout))


def assign_axis_slice(tracker: LayoutTracker, node: Node, source: TrackedImage) -> bool:
    """Rewrite ``slice_scatter`` of an image along an axis; false if the sizes do not match."""
    name, start, step = node.argument("self").name, node.argument("start"), node.argument("step", 1)
    dim = source.layout.image_dim(node.argument("dim", 0))
    written = tracker.nodes[source.node]
    if dim is None or dim < len(written.shape) - tracker.axes.count or not isinstance(step, int):
        return False
    extent, count = node.shape[node.argument("dim", 0)], written.shape[dim] * step
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
    amounts = (first, extent - first - count)  # a crop, of rows between those that are written, if the last amount is negative
    if step != 1:
        value = 0 if constant is None else constant.value
        spread = spread_rows(tracker, node, written, f"{node.name}__spread", dim, step, value=value)
        if spread is None:
            return False
        tracker.put(spread, source.layout)
        written, source = spread, TrackedImage(spread.name, source.layout)
    if constant is not None:
        return _put_padded(tracker, node, source, dim, amounts, constant)
    assert image is not None
    padded = pad_axis(node, written, f"{node.name}__placed", dim, amounts, tracker.axes.count)
    tracker.put(padded, source.layout)
    span = (first, first + count, step)
    assigned = _assignment(node, tracker.nodes[image.node], padded, node.name, dim, span, tracker.axes.count)
    return tracker.put(assigned, source.layout)


def join_along_axis(tracker: LayoutTracker, node: Node) -> bool:
    """Rewrite ``cat`` along an axis of images, and constants of one value; false for other operands."""
    images = [tracker.images[name] for name in node.operands if name in tracker.images]
    layout, dim = images[0].layout, images[0].layout.image_dim(node.argument("dim", 0))
    nodes = [tracker.nodes[image.node] for image in images]
    is_alike = all(image.layout == layout and _can_join(each, nodes[0], dim) for image, each in zip(images, nodes, strict=True))
    if dim is None or dim < len(nodes[0].shape) - tracker.axes.count or not is_alike or len(images) > _MAX_JOINED:
        return False
    constants = [constant_of(tracker.nodes, name) for name in node.operands if name not in tracker.images]
    if any(constant is None or constant != constants[0] or constant.dtype != nodes[0].dtype for constant in constants):
        return False
    value = constants[0].value if constants and constants[0] is not None else 0
    if isinstance(value, sp.Basic):
        return False
    return _join(tracker, node, dim, value)


def _can_join(image: Node, other: Node, dim: int | None) -> bool:
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
            padded = _assignment(node, result, padded, name, dim, (offset, end, 1), tracker.axes.count)
            tracker.put(padded, image.layout)
        result, offset = padded, end
    return True


def _put_padded(tracker: LayoutTracker, node: Node, source: TrackedImage, dim: int, amounts: tuple[Any, Any], constant: Constant) -> bool:
    padded = pad_axis(node, tracker.nodes[source.node], node.name, dim, amounts, tracker.axes.count, value=constant.value)
    return tracker.put(padded, source.layout)


def _assignment(node: Node, image: Node, padded: Node, name: str, dim: int, span: Sequence[Any], num_axes: int) -> Node:
    """The node ``name``: ``image``, with the rows of ``span`` (start, stop, step; columns, slices) of ``padded``."""
    axis = dim - (len(image.shape) - num_axes)
    options = (("axis", axis), *zip(("start", "stop", "step"), span, strict=True), ("axes", num_axes))
    arguments = (("self", Ref(image.name)), ("src", Ref(padded.name)), *options)
    return replace(padded, name=name, target="sft.assign_slice", shape=padded.shape, arguments=arguments)
