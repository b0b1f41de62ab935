"""``unfold`` and ``fold`` of images, whose windows stay in the order of the pixels.

torch has windows as columns of a matrix, ``[N, C * kh * kw, windows]``, row by row. That is an image again, with as many rows as windows
fit beneath each other and the pixels of a window as channels, so these stream:

* ``sft.im2col``: the image of windows, without a border (zeros around the image are a ``pad`` before it);
* ``sft.col2im``: its adjoint, windows put back and summed where they overlap; what lies beyond the image is cut off by a ``pad``
  with negative amounts, which also adds the rows that no window reaches.

``Tensor.unfold`` has windows along one axis, and their pixels as last dimension.

Transposed convolutions whose rows overlap, taken apart into products and sums.

A transposed convolution spreads each input row over ``kernel`` output rows, ``stride`` apart from those of the next. Where they overlap,
a strip that computed its rows from all input rows that reach them would multiply those at the seams twice. What is carried from strip to
strip must be products, then, not input rows. So the operator becomes

* ``conv_transpose`` one row tall: for each row of the input its products with every row of the kernel, as channels. The kernel
  ``[Cin, Cout / g, kh, ...]`` is laid out as ``[Cin, kh * Cout / g, 1, ...]`` for it (``sft.kernel_rows``, once a step). As many
  multiplications as the operator itself, none of them twice; along the other axes it is what it was.
* ``sft.overlap_add``: each output row is the sum of the products that land on it, and the bias.

In half precision all of this is in single precision: products that were rounded before they are summed up would be off by more than the
operator's own rounding, and where a ReLU follows, of another sign. (Half numbers times half numbers are exact in TF32, too.)

Rows that do not overlap (a kernel of 2 with a stride of 2) need none of this: then an output row is one input row's own.

Circular padding taken apart, so that the rows beyond one border, which are those at the other, are known before the first strip.

The rows that stand above the image are its last ones, which a walk sees at its end. They are few, so they are a global value:

* ``sft.border_rows``: the last ``low`` rows of the image, then its first ``high`` ones, collected in one walk;
* ``sft.circular_pad``: the image with these rows above and below it, streamed in the next walk;
* ``pad`` along the other axes, of which a strip holds all, where they are padded too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sft.analysis.ir.axes import ROWS, Axes
from sft.analysis.ir.graph import Graph, Node, Ref
from sft.analysis.ir.ops.base import axis_entry, symbolic_axis_entry
from sft.analysis.ir.symbolic import divide_extent, same_shape
from sft.analysis.passes.layout import DimLayout

__all__ = ["decompose_axis_unfold", "decompose_circular_pads", "decompose_fold", "decompose_transposed_convolutions", "decompose_unfold"]


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


def decompose_transposed_convolutions(graph: Graph) -> Graph:
    """The graph with every transposed convolution of images whose rows overlap replaced by its parts."""
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
    wider: list[Node] = []
    if node.dtype in _HALF_DTYPES:
        wider = [_widened_operand(value, node, name) for value, name in ((weight, "weight"), (image, "input"))]
        weight, image = wider
    inputs, channels, kernel, *rest = weight.shape
    shape = (inputs, channels * kernel, 1, *rest)
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
    across = {name: _without_rows(node.argument(name), alone, count) for name, alone in _NEUTRAL_ARGUMENTS.items()}
    arguments = (
        ("input", Ref(image.name)),
        ("weight", Ref(rows.name)),
        ("bias", None),
        *((name, across[name]) for name in ("stride", "padding", "output_padding")),
        ("groups", groups),
        ("dilation", across["dilation"]),
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
    return [*wider, rows, products, sums]


def _widened_operand(value: Node, node: Node, name: str) -> Node:
    """What the operator reads, in single precision."""
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
#: Arguments with an entry for each axis, and what they are along one that is not spread.
_NEUTRAL_ARGUMENTS = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
_ARGUMENT_NAMES = {"kernel_size": "kernel"}


def _without_rows(value: Any, alone: int, count: int) -> tuple[Any, ...]:
    """An argument for each axis with the rows left alone."""
    return (alone, *(symbolic_axis_entry(value, axis) for axis in range(1, count)))


def decompose_circular_pads(graph: Graph) -> Graph:
    """The graph with every circular padding of an image's rows replaced by its parts."""
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _decompose_circular_pad(node, graph) if _wraps_rows(node, graph) else [node]
    return replace(graph, nodes=tuple(nodes))


def _wraps_rows(node: Node, graph: Graph) -> bool:
    if node.target != "aten.pad.default" or node.argument("mode") != "circular" or len(node.shape) != graph.axes.rank:
        return False
    flat = node.argument("pad")
    return len(flat) == 2 * graph.axes.count and any(flat[-2:]) and min(flat) >= 0


def _decompose_circular_pad(node: Node, graph: Graph) -> list[Node]:
    count, flat = graph.axes.count, node.argument("pad")
    image, (low, high) = graph[node.argument("self").name], flat[-2:]
    lead, (rows, *rest) = image.shape[:-count], graph.axes.of(image.shape)
    amounts = (("low", low), ("high", high), ("axes", count))
    border = replace(
        node,
        name=f"{node.name}__border",
        target="sft.border_rows",
        shape=(*lead, low + high, *rest),
        arguments=(("self", Ref(image.name)), *amounts),
    )
    is_all = not any(flat[:-2])
    wrapped = replace(
        node,
        name=node.name if is_all else f"{node.name}__wrapped",
        target="sft.circular_pad",
        shape=(*lead, rows + low + high, *rest),
        arguments=(("self", Ref(image.name)), ("border", Ref(border.name)), *amounts),
    )
    if is_all:
        return [border, wrapped]
    return [border, wrapped, replace(node, arguments=(("self", Ref(wrapped.name)), ("pad", (*flat[:-2], 0, 0)), *node.arguments[2:]))]
