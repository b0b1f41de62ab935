"""Decomposition of reductions over some of the image's axes: strip pooling, coordinate attention, projections of volumes.

The result has the other axes: one row, one column, or one slice of the image. It is a global value; each strip updates its share of it::

    m = mean(x, dim=3, keepdim=True)      ->      m = sft.axis_sum(x, reduced=(1,), divides=True)      # [N, C, height, 1]

An operator that broadcasts it to the image reads it as a spatial side input (:mod:`sft.analysis.passes.elementwise`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.graph import Node, Ref
from sft.analysis.ir.symbolic import same_shape
from sft.analysis.passes.decompose_reductions import NodeSequence, select_statistic
from sft.analysis.passes.layout_tracker import LayoutTracker

__all__ = ["AXIS_POOLINGS", "AXIS_REDUCTIONS", "rewrite_axis_pool", "rewrite_axis_reduction"]

_SUM, _MEAN = "aten.sum.dim_IntList", "aten.mean.dim"


def _add_sum(sequence: NodeSequence, image: Node, reduced: Sequence[int], shape: Sequence[Any], num_axes: int, *, divides: bool) -> Node:
    keepdim = len(shape) == len(image.shape)
    arguments = (("self", Ref(image.name)), ("reduced", tuple(reduced)), ("divides", divides), ("keepdim", keepdim), ("axes", num_axes))
    return sequence.add("axes", "sft.axis_sum", shape, arguments, image.dtype)


def _add_minmax(sequence: NodeSequence, image: Node, reduced: Sequence[int], shape: Sequence[Any], num_axes: int, *, largest: bool) -> Node:
    arguments = (("self", Ref(image.name)), ("largest", largest), ("reduced", tuple(reduced)), ("axes", num_axes))
    statistics = sequence.add("extremes", "sft.axis_minmax", (*shape, 2), arguments, "float64")
    return select_statistic(sequence, statistics, 0, image.dtype)


#: Reductions over some axes, by target; each adds a node of the shape that remains.
_REDUCTIONS: dict[str, Callable[..., Node]] = {
    _SUM: partial(_add_sum, divides=False),
    _MEAN: partial(_add_sum, divides=True),
    "aten.amax.default": partial(_add_minmax, largest=True),
    "aten.amin.default": partial(_add_minmax, largest=False),
}
AXIS_REDUCTIONS = tuple(_REDUCTIONS)
#: Average poolings, adaptive ones and those by windows.
AXIS_POOLINGS = tuple(f"aten.{kind}avg_pool{count}d.default" for kind in ("", "adaptive_") for count in (2, 3))


def rewrite_axis_reduction(tracker: LayoutTracker, node: Node) -> bool:
    """Decompose a reduction over some axes of the image, possibly also over channels and the batch; false if no form of it streams."""
    image = tracker.images.get(node.operands[0])
    if image is None or len(node.operands) != 1:
        return False
    source, groups, argument = tracker.nodes[image.node], image.layout.groups, node.argument("dim")
    rank, first_axis = len(groups), len(source.shape) - tracker.axes.count
    dims = {dim % rank for dim in ([argument] if isinstance(argument, int) else argument or range(rank))}
    reduced = [image_dim for dim in dims for image_dim in groups[dim]]
    axes = sorted(dim - first_axis for dim in reduced if dim >= first_axis)
    other_dims = tuple(sorted(dim for dim in reduced if dim < first_axis))
    remaining = [image_dim for dim, group in enumerate(groups) if dim not in dims for image_dim in group]
    remaining += [dim for dim in range(first_axis) if dim not in remaining and dim not in other_dims]
    if node.dtype != source.dtype or not _is_partial(tracker, source, axes) or (other_dims and node.target not in (_SUM, _MEAN)):
        return False
    is_narrow_image = bool(node.argument("keepdim", False)) and not other_dims
    nodes = _decompose(tracker, node, source, axes, other_dims, None if is_narrow_image else remaining)
    tracker.add_nodes(nodes)
    return tracker.put(nodes[-1], image.layout) if is_narrow_image else True


def _is_partial(tracker: LayoutTracker, image: Node, axes: Sequence[int]) -> bool:
    """True if some axes are reduced, but not all of them; axes of one pixel do not count."""
    extents = tracker.axes.of(image.shape)
    remaining = [axis for axis in range(len(extents)) if axis not in axes]
    return any(extents[axis] != 1 for axis in axes) and any(extents[axis] != 1 for axis in remaining)


def _decompose(
    tracker: LayoutTracker, node: Node, image: Node, axes: Sequence[int], other_dims: Sequence[int], remaining: Sequence[int] | None
) -> tuple[Node, ...]:
    """The nodes of a reduction of an image.

    Args:
        tracker: the graph.
        node: the model's operator.
        image: the image.
        axes: indices of the reduced axes.
        other_dims: reduced dimensions of the batch and channels.
        remaining: the image's dimensions that remain, in the model's order; ``None`` if the result is an image with reduced axes of one
            pixel.
    """
    first_axis, sequence, num_axes = len(image.shape) - tracker.axes.count, NodeSequence(node), tracker.axes.count
    kept = [dim for dim in range(len(image.shape)) if dim - first_axis not in axes]
    shape = [image.shape[dim] for dim in kept]
    narrow = tuple(image.shape[dim] if dim in kept else 1 for dim in range(len(image.shape)))
    if remaining is None and node.target in (_SUM, _MEAN):
        _REDUCTIONS[node.target](sequence, image, axes, narrow, num_axes)
        return sequence.finish()
    result = _REDUCTIONS[node.target](sequence, image, axes, shape, num_axes)
    if other_dims:
        arguments = (("self", Ref(result.name)), ("dim", tuple(other_dims)), ("keepdim", False), ("dtype", None))
        kept = [dim for dim in kept if dim not in other_dims]
        shape = [image.shape[dim] for dim in kept]
        result = sequence.add("rest", node.target, shape, arguments, image.dtype)
    order = tuple(range(len(kept))) if remaining is None else tuple(kept.index(dim) for dim in remaining)
    placed = narrow if remaining is None else tuple(node.shape)
    if order != tuple(range(len(kept))) or tuple(result.shape) != placed:
        sequence.add("placed", "sft.restore_dims", placed, (("self", Ref(result.name)), ("order", order), ("shape", placed)))
    return sequence.finish()


def rewrite_axis_pool(tracker: LayoutTracker, node: Node) -> bool:
    """Rewrite an average pooling of all rows as a mean over them; one of columns alone has a window for each row, and streams."""
    image = tracker.first_image(node)
    source = tracker.nodes[image.node]
    if not image.layout.is_plain or len(source.shape) != tracker.axes.rank or len(node.shape) != len(source.shape):
        return False
    pooled, extents = tracker.axes.of(node.shape), tracker.axes.of(source.shape)
    dims = tuple(2 + axis for axis in range(tracker.axes.count) if pooled[axis] == 1)
    if 2 + ROWS not in dims or not _is_partial(tracker, source, [dim - 2 for dim in dims]):
        return False
    kept_axes = [axis for axis in range(tracker.axes.count) if 2 + axis not in dims]
    if not same_shape([pooled[axis] for axis in kept_axes], [extents[axis] for axis in kept_axes]) or not _covers(node, extents):
        return False
    arguments = (("self", node.argument("self")), ("dim", dims), ("keepdim", True), ("dtype", None))
    return rewrite_axis_reduction(tracker, replace(node, target=_MEAN, arguments=arguments))


def _covers(node: Node, extents: Sequence[Any]) -> bool:
    """True if each window of a pooling is one pixel, or the full axis, along each axis; adaptive poolings have such windows."""
    kernel = node.argument("kernel_size")
    if kernel is None:
        return True
    count = len(extents)
    sizes = tuple(kernel) * (count if len(kernel) == 1 else 1) if isinstance(kernel, (tuple, list)) else (kernel,) * count
    padding = node.argument("padding", 0)
    is_padded = any(padding) if isinstance(padding, (tuple, list)) else bool(padding)
    if is_padded or node.argument("divisor_override") is not None:
        return False
    return all(size == 1 or same_shape([size], [extent]) for size, extent in zip(sizes, extents, strict=True))
