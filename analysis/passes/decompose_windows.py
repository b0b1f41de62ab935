"""Decomposition of windows: ``unfold``/``fold``, and transposed convolutions.

*Unfold and fold.* torch has the windows of an image as columns of a matrix, ``[N, C * kh * kw, windows]``, in row-major order. That is
again an image, with one pixel per window and the pixels of a window as channels, so these stream:

* ``sft.im2col``: the image of windows, without a border (zeros around the image are a ``pad`` before it);
* ``sft.col2im``: its adjoint, windows put back and summed where they overlap. A ``pad`` with negative amounts crops the rows beyond
  the image, and adds the rows that no window reaches.

``Tensor.unfold`` has windows along one axis, and their pixels as last dimension.

*Convolutions of each channel by itself.* A filter that a model applies to channels as samples (``x.view(N * C, 1, H, W)``: blurs, Sobel
filters) is a convolution in groups, with its weight repeated for each channel.

*Transposed convolutions with overlapping rows.* Each input row contributes to ``kernel`` output rows, ``stride`` rows after those of the
previous one. A strip that computed its rows from all input rows that reach them would repeat the multiplications at its seams. Therefore
products are carried from strip to strip, not input rows::

    y = conv_transpose2d(x, w, b)      ->      k = sft.kernel_rows(w)          # [Cin, kh * Cout / g, 1, kw], once a step
                                               p = conv_transpose2d(x, k)      # products with every kernel row, as channels
                                               y = sft.overlap_add(p, b)       # output row = sum of its products, and bias

The number of multiplications is that of the operator itself; along the other axes it is unchanged. In half precision the decomposition
computes in single precision: products rounded before their sum would deviate by more than the operator's own rounding, and before a ReLU
could change sign. (Products of half-precision numbers are exact in TF32, too.) Rows that do not overlap (a kernel of 2 with a stride of 2)
need no decomposition: each output row has a single input row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from sft.analysis.ir.axes import ROWS, Axes
from sft.analysis.ir.graph import Graph, Node, Ref
from sft.analysis.ir.ops.base import axis_entry, symbolic_axis_entry
from sft.analysis.ir.symbolic import divide_extent, same_shape
from sft.analysis.passes.layout import ChannelRearrangement, DimLayout
from sft.analysis.passes.layout_tracker import LayoutTracker, TrackedImage

__all__ = ["CONVOLUTIONS", "decompose_transposed_convolutions", "rewrite_convolution", "rewrite_windows"]


def _decompose_unfold(node: Node, image: Node, axes: Axes) -> tuple[list[Node], DimLayout] | None:
    """The nodes of ``F.unfold``, and the layout of its value in the last of them; ``None`` for images with other axes.

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


def _decompose_axis_unfold(node: Node, image: Node, layout: DimLayout, axes: Axes) -> tuple[Node, DimLayout] | None:
    """The node of ``Tensor.unfold`` along an axis, and the layout of its value; ``None`` along other dimensions."""
    dim = layout.image_dim(node.argument("dimension"))
    first_axis = len(image.shape) - axes.count
    if dim is None or dim < first_axis:
        return None
    ones = [1] * axes.count
    kernel, stride = ([*ones[: dim - first_axis], node.argument(key), *ones[dim - first_axis + 1 :]] for key in ("size", "step"))
    windows = _window_node(node, image, (*image.shape[1:first_axis], node.argument("size")), axes, kernel, stride, ones)
    groups = [tuple(each + (each >= first_axis) for each in group) for group in layout.groups]
    return windows, DimLayout((*groups, (first_axis,)))


def _decompose_fold(node: Node, image: Node, axes: Axes) -> list[Node] | None:
    """The nodes of ``F.fold``; ``None`` if its windows do not correspond to the image's pixels.

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
    padded_extents = [extent + 2 * p for extent, p in zip(extents, padding, strict=True)]
    if not same_shape(_window_counts(padded_extents, spans, stride), counts):
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
    arguments = (node.argument(name) for name in ("kernel_size", "stride", "padding", "dilation"))
    return tuple(tuple(value) * (2 if len(value) == 1 else 1) for value in arguments)


def _window_counts(extents: Sequence[Any], spans: Sequence[int], stride: Sequence[int]) -> tuple[Any, ...]:
    """Number of windows along each axis."""
    return tuple(divide_extent(extent - span, s) + 1 for extent, span, s in zip(extents, spans, stride, strict=True))


def _pad_node(node: Node, image: Node, name: str, amounts: Sequence[tuple[Any, Any]]) -> Node:
    """The image with rows, and columns, of zeros added before and after it."""
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
    """The im2col of an image."""
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    shape = (image.shape[0], *channels, *_window_counts(axes.of(image.shape), spans, stride))
    geometry = (("kernel_size", tuple(kernel)), ("stride", tuple(stride)), ("dilation", tuple(dilation)))
    arguments = (("self", Ref(image.name)), *geometry, ("channels", tuple(channels)))
    return replace(node, target="sft.im2col", shape=shape, arguments=arguments)


def decompose_transposed_convolutions(graph: Graph) -> Graph:
    """Replace every transposed convolution of images with overlapping rows by its decomposition."""
    depends = graph.descendants(graph.inputs)
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += (
            _decompose_transposed_convolution(node, graph)
            if _has_overlapping_rows(node, graph) and node.argument("weight").name not in depends
            else [node]
        )
    return replace(graph, nodes=tuple(nodes))


def _has_overlapping_rows(node: Node, graph: Graph) -> bool:
    if not node.target.startswith(f"aten.conv_transpose{graph.axes.count}d.") or len(node.shape) != graph.axes.rank:
        return False
    kernel, stride, dilation = (axis_entry(node.argument(name), ROWS) for name in ("kernel_size", "stride", "dilation"))
    return dilation * (kernel - 1) + 1 > stride


def _decompose_transposed_convolution(node: Node, graph: Graph) -> list[Node]:
    weight, image = graph[node.argument("weight").name], graph[node.argument("input").name]
    groups, count = node.argument("groups"), graph.axes.count
    casts: list[Node] = []
    if node.dtype in _HALF_DTYPES:
        casts = [_widened_operand(value, node, name) for value, name in ((weight, "weight"), (image, "input"))]
        weight, image = casts
    inputs, channels, kernel, *further = weight.shape
    shape = (inputs, channels * kernel, 1, *further)
    rows = replace(
        weight,
        name=f"{node.name}__kernel_rows",
        kind="operator",
        target="sft.kernel_rows",
        shape=shape,
        arguments=(("self", Ref(weight.name)),),
        module_path=node.module_path,
        effect="",
    )
    column_arguments = {name: _without_rows(node.argument(name), neutral, count) for name, neutral in _NEUTRAL_ARGUMENTS.items()}
    arguments = (
        ("input", Ref(image.name)),
        ("weight", Ref(rows.name)),
        ("bias", None),
        *((name, column_arguments[name]) for name in ("stride", "padding", "output_padding")),
        ("groups", groups),
        ("dilation", column_arguments["dilation"]),
        ("kernel_size", shape[2:]),
    )
    products = replace(
        node,
        name=f"{node.name}__products",
        shape=(node.shape[0], node.shape[1] * kernel, image.shape[2], *node.shape[3:]),
        dtype=image.dtype,
        itemsize_bytes=image.itemsize_bytes,
        arguments=arguments,
    )
    spread = tuple(
        (_ARGUMENT_NAMES.get(name, name), symbolic_axis_entry(node.argument(name), ROWS)) for name in ("kernel_size", *_NEUTRAL_ARGUMENTS)
    )
    sums = replace(
        node,
        target="sft.overlap_add",
        arguments=(("self", Ref(products.name)), ("bias", node.argument("bias")), ("groups", groups), ("spread", spread)),
    )
    return [*casts, rows, products, sums]


def _widened_operand(value: Node, node: Node, name: str) -> Node:
    """An operand cast to single precision."""
    return replace(
        value,
        name=f"{node.name}__{name}",
        kind="operator",
        target="aten._to_copy.default",
        dtype="float32",
        itemsize_bytes=4,
        arguments=(("self", Ref(value.name)), ("dtype", "float32")),
        module_path=node.module_path,
        effect="",
    )


_HALF_DTYPES = frozenset({"float16", "bfloat16"})
#: Arguments with an entry for each axis, and their neutral value.
_NEUTRAL_ARGUMENTS = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
_ARGUMENT_NAMES = {"kernel_size": "kernel"}


def _without_rows(value: Any, neutral: int, count: int) -> tuple[Any, ...]:
    """An argument for each axis, with the neutral value for the rows."""
    return (neutral, *(symbolic_axis_entry(value, axis) for axis in range(1, count)))


def rewrite_windows(tracker: LayoutTracker, node: Node) -> bool:
    """Rewrite ``unfold`` (windows to columns) and ``fold`` (columns to windows)."""
    image = tracker.images[node.operands[0]]
    source, count = tracker.nodes[image.node], tracker.axes.count
    if node.target == "aten.unfold.default":
        along = _decompose_axis_unfold(node, source, image.layout, tracker.axes)
        return along is not None and tracker.put(*along)
    if node.target == "aten.col2im.default":
        is_columns = image.layout.groups == ((0,), (1,), tuple(range(2, 2 + count)))
        nodes, layout = _decompose_fold(node, source, tracker.axes) if is_columns else None, DimLayout.plain(len(node.shape))
    else:
        unfolded = _decompose_unfold(node, source, tracker.axes) if image.layout.is_plain else None
        nodes, layout = unfolded or (None, image.layout)
    return nodes is not None and all([tracker.put(new, layout) for new in nodes])


#: Convolutions; those with overlapping rows in the output aside.
CONVOLUTIONS = tuple(f"aten.conv{count}d.{kind}" for count in (1, 2, 3) for kind in ("default", "padding"))


def rewrite_convolution(tracker: LayoutTracker, node: Node) -> bool:
    """Rewrite a convolution that takes channels of an image as samples as one in groups; false for other convolutions."""
    image, weight, bias = tracker.images.get(node.argument("input").name), node.argument("weight"), node.argument("bias")
    if image is None or any(ref.name in tracker.images for ref in (weight, bias) if ref is not None):
        return False
    (samples, *inner), source, count = image.layout.groups, tracker.nodes[image.node], tracker.axes.count
    first_axis = len(source.shape) - count
    axes = tuple((first_axis + axis,) for axis in range(count))
    if samples[:1] != (0,) or len(samples) < 2 or len(inner) != 1 + count or tuple(inner[1:]) != axes:
        return False
    channels = source.shape[1:first_axis]
    order = [dim - 1 for dim in (*samples[1:], *inner[0])]
    order += [dim for dim in range(len(channels)) if dim not in order]
    if not all(isinstance(extent, int) for extent in channels) or order != [dim for dim in order if 0 <= dim < len(channels)]:
        return False
    outer = tuple(channels[dim - 1] for dim in samples[1:])
    repeats, num_out = prod(outer), node.shape[1]
    merged = ChannelRearrangement(split=channels, order=tuple(order), shape=(prod(channels),))
    tracker.add_rearrangement(replace(node, dtype=source.dtype), merged, source.name, f"{node.name}__merged")
    arguments = {**dict(node.arguments), "input": Ref(f"{node.name}__merged"), "groups": repeats * node.argument("groups", 1)}
    for key, ref in (("weight", weight), ("bias", bias)):
        if ref is not None:
            repeated = _repeated(node, tracker.nodes[ref.name], f"{node.name}__{key}", repeats)
            tracker.nodes[repeated.name] = repeated
            arguments[key] = Ref(repeated.name)
    shape = (source.shape[0], repeats * num_out, *node.shape[2:])
    grouped = replace(node, name=f"{node.name}__grouped", shape=shape, arguments=tuple(arguments.items()))
    tracker.nodes[grouped.name] = grouped
    split = (*outer, num_out)
    tracker.add_rearrangement(node, ChannelRearrangement(split=split, order=tuple(range(len(split))), shape=split), grouped.name, node.name)
    last = len(split)
    groups = (tuple(range(last)), (last,), *((1 + last + axis,) for axis in range(count)))
    tracker.images[node.name] = TrackedImage(node.name, DimLayout(groups))
    return True


def _repeated(node: Node, value: Node, name: str, repeats: int) -> Node:
    """The node ``name``: a weight or a bias repeated for the groups of a convolution."""
    arguments = (("self", Ref(value.name)), ("repeats", (repeats, *[1] * (len(value.shape) - 1))))
    repeated = replace(value, name=name, kind="operator", target="aten.repeat.default", arguments=arguments, effect="")
    return replace(repeated, shape=(repeats * value.shape[0], *value.shape[1:]), module_path=node.module_path)
