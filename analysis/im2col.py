"""``unfold`` and ``fold`` of images, whose windows stay in the order of the pixels.

torch has windows as columns of a matrix, ``[N, C * kh * kw, windows]``, row by row. That is an image again, with as many rows as windows
fit beneath each other and the pixels of a window as channels, so these stream:

* ``sft.im2col``: the image of windows, without a border (zeros around the image are a ``pad`` before it);
* ``sft.col2im``: its adjoint, windows put back and summed where they overlap; what lies beyond the image is cut off by a ``pad``
  with negative amounts, which also adds the rows that no window reaches.

``Tensor.unfold`` has windows along one axis, and their pixels as last dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sft.analysis.axes import Axes
from sft.analysis.extents import divide_extent, same_shape
from sft.analysis.graph import Node, Ref
from sft.analysis.layout import DimLayout

__all__ = ["decompose_fold", "decompose_unfold", "decompose_axis_unfold"]


def decompose_unfold(node: Node, image: Node, axes: Axes) -> tuple[list[Node], DimLayout] | None:
    """The nodes that stand for ``F.unfold``, and how its value lies in the last of them; ``None`` where the image has other axes.

    Args:
        node: the model's operator.
        image: ``[N, C, H, W]``.
        axes: of the image.
    """
    if axes.count != 2 or len(image.shape) != 4:
        return None
    kernel, stride, padding, dilation = _window_geometry(node)
    nodes = [] if not any(padding) else [_pad_node(node, image, f"{node.name}__padded", [(p, p) for p in padding])]
    padded = (nodes or [image])[-1]
    channels = image.shape[1] * kernel[0] * kernel[1]
    nodes.append(_window_node(node, padded, (channels,), axes, kernel, stride, dilation))
    return nodes, DimLayout(((0,), (1,), (2, 3)))


def decompose_axis_unfold(node: Node, image: Node, layout: DimLayout, axes: Axes) -> tuple[Node, DimLayout] | None:
    """The node that stands for ``Tensor.unfold`` along an axis, and how its value lies in it; ``None`` along anything else."""
    place = layout.place(node.argument("dimension"))
    first = len(image.shape) - axes.count
    if place is None or place < first:
        return None
    alone = [1] * axes.count
    kernel, stride = ([*alone[: place - first], node.argument(key), *alone[place - first + 1 :]] for key in ("size", "step"))
    made = _window_node(node, image, (*image.shape[1:first], node.argument("size")), axes, kernel, stride, alone)
    groups = [tuple(dim + (dim >= first) for dim in group) for group in layout.groups]
    return made, DimLayout((*groups, (first,)))


def decompose_fold(node: Node, image: Node, axes: Axes) -> list[Node] | None:
    """The nodes that stand for ``F.fold``; ``None`` where its windows do not lie as the image's pixels do.

    Args:
        node: the model's operator.
        image: ``[N, C * kh * kw, rows, columns]`` of windows.
        axes: of the image.
    """
    if axes.count != 2 or len(image.shape) != 4:
        return None
    kernel, stride, padding, dilation = _window_geometry(node)
    extents, counts = axes.of(node.shape), axes.of(image.shape)
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    around = [extent + 2 * p for extent, p in zip(extents, padding, strict=True)]
    if not same_shape(_window_counts(around, spans, stride), counts):
        return None
    reached = [(count - 1) * s + span for count, s, span in zip(counts, stride, spans, strict=True)]
    arguments = (("self", Ref(image.name)), ("kernel_size", tuple(kernel)), ("stride", tuple(stride)), ("dilation", tuple(dilation)))
    shape = (*node.shape[:2], *reached)
    if same_shape(reached, extents) and not any(padding):
        return [replace(node, target="sft.col2im", arguments=arguments)]
    sums = replace(node, name=f"{node.name}__sums", target="sft.col2im", shape=shape, arguments=arguments)
    amounts = [(-p, extent + p - reach) for p, extent, reach in zip(padding, extents, reached, strict=True)]
    return [sums, _pad_node(node, sums, node.name, amounts)]


def _window_geometry(node: Node) -> tuple[Sequence[int], ...]:
    """Kernel, stride, padding and dilation for both axes."""
    given = (node.argument(name) for name in ("kernel_size", "stride", "padding", "dilation"))
    return tuple(tuple(value) * (2 if len(value) == 1 else 1) for value in given)


def _window_counts(extents: Sequence[Any], spans: Sequence[int], stride: Sequence[int]) -> tuple[Any, ...]:
    """Windows along each axis."""
    return tuple(divide_extent(extent - span, s) + 1 for extent, span, s in zip(extents, spans, stride, strict=True))


def _pad_node(node: Node, image: Node, name: str, amounts: Sequence[tuple[Any, Any]]) -> Node:
    """The image with so many rows, and so many columns, of zeros before and behind it."""
    lead, extents = image.shape[: -len(amounts)], image.shape[-len(amounts) :]
    shape = (*lead, *(low + extent + high for extent, (low, high) in zip(extents, amounts, strict=True)))
    flat = tuple(amount for pair in reversed(amounts) for amount in pair)
    arguments = (("self", Ref(image.name)), ("pad", flat), ("mode", "constant"), ("value", 0.0))
    return replace(node, name=name, target="aten.pad.default", shape=shape, arguments=arguments)


def _window_node(
    node: Node,
    image: Node,
    channels: Sequence[int],
    axes: Axes,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Node:
    """The windows of an image."""
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    shape = (image.shape[0], *channels, *_window_counts(axes.of(image.shape), spans, stride))
    geometry = (("kernel_size", tuple(kernel)), ("stride", tuple(stride)), ("dilation", tuple(dilation)))
    arguments = (("self", Ref(image.name)), *geometry, ("channels", tuple(channels)))
    return replace(node, target="sft.im2col", shape=shape, arguments=arguments)
