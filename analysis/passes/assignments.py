"""Assignments and lookups of channels: writes into slices, and operators that take or write channels by an index tensor.

The exporter turns ``out[:, :2] = y`` into ``slice_scatter``. An assignment of channels becomes ``sft.assign_channels``, pixel by pixel.
What is written into may be a constant (``out = x.new_zeros(...)``), which becomes an image like the one that is written::

    z = zeros(n, c, h, w)                 ->      z = sft.constant_image(x)
    y = slice_scatter(z, x, dim=1)        ->      y = sft.assign_channels(z, x)

An index tensor (``x[:, [2, 1, 0]]``, ``index_copy``) names channels if it has one dimension and is not an image. All pixels are equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy as sp

from sft.analysis.ir.graph import Node, Ref
from sft.analysis.ir.ops.target_lists import INDEX_OPS
from sft.analysis.passes.assign_slices import assign_axis_slice, assign_row
from sft.analysis.passes.constants import add_constant_image_like
from sft.analysis.passes.layout import DimLayout
from sft.analysis.passes.layout_tracker import LayoutTracker, TrackedImage

__all__ = ["ASSIGNMENTS", "INDEXED", "rewrite_assignment", "rewrite_indexed"]

ASSIGNMENTS = ("aten.slice_scatter.default", "aten.select_scatter.default")
INDEXED = tuple(INDEX_OPS)


def rewrite_assignment(tracker: LayoutTracker, node: Node) -> bool:
    """Assignment of an image to some channels of another (``slice_scatter``, ``select_scatter``)."""
    name, source = node.argument("self").name, tracker.images.get(node.argument("src").name)
    selects = node.target == "aten.select_scatter.default"
    image = tracker.images.get(name)
    if source is not None and (assign_row if selects else assign_axis_slice)(tracker, node, source):
        return True
    if image is None and source is not None:
        image = add_constant_image_like(tracker, name, _with_channels(source, node.argument("dim", 0)) if selects else source)
    if image is None or source is None:
        return False
    shape = tracker.shape(image.node)
    dim = image.layout.image_dim(node.argument("dim", 0))
    if dim is None or not 1 <= dim < len(shape) - tracker.axes.count:
        return False
    if source.layout != (image.layout.without([dim]) if selects else image.layout):
        return False
    bounds = [node.argument(key) for key in (("index",) if selects else ("start", "end", "step"))]
    if any(isinstance(number, sp.Basic) for number in (shape[dim], *bounds)):
        return False  # the number of channels depends on the image's size
    if selects:
        channels = range(bounds[0] % shape[dim], bounds[0] % shape[dim] + 1)
    else:
        channels = range(*slice(*bounds).indices(shape[dim]))
    arguments = (
        ("self", Ref(image.node)),
        ("src", Ref(source.node)),
        ("dim", dim),
        *(("start", channels.start), ("stop", channels.stop), ("step", channels.step)),
        ("selects", selects),
    )
    return tracker.put(replace(node, target="sft.assign_channels", shape=shape, arguments=arguments), image.layout)


def _with_channels(image: TrackedImage, dim: int) -> TrackedImage:
    """An image without channels as one with channels, which the model's value has at ``dim``."""
    groups = [tuple(image_dim + (image_dim > 0) for image_dim in group) for group in image.layout.groups]
    groups.insert(dim % (len(groups) + 1), (1,))
    return TrackedImage(image.node, DimLayout(tuple(groups)))


def rewrite_indexed(tracker: LayoutTracker, node: Node) -> bool:
    """An operator that takes or writes the channels that an index tensor names."""
    position = _indexed_dim(node)
    if position is None:
        return False
    dim, index = position
    key, name = INDEX_OPS[node.target], node.argument("self").name
    values = node.argument(key) if key else None
    written = tracker.images.get(values.name) if isinstance(values, Ref) else None
    image = tracker.images.get(name) or add_constant_image_like(tracker, name, written)
    is_scalar = isinstance(values, Ref) and written is None and all(extent == 1 for extent in tracker.shape(values.name))
    if image is None or index.name in tracker.images or (isinstance(values, Ref) and not is_scalar and written is None):
        return False
    if written is not None and written.layout != image.layout:
        return False
    return _put_indexed(tracker, node, image, written, dim, index)


def _indexed_dim(node: Node) -> tuple[int, Ref] | None:
    """The dimension that an operator indexes, and the index; ``None`` if it indexes several."""
    if node.argument("dim") is not None:
        return node.argument("dim"), node.argument("index")
    indices = [(dim, index) for dim, index in enumerate(node.argument("indices")) if index is not None]
    return indices[0] if len(indices) == 1 else None


def _put_indexed(tracker: LayoutTracker, node: Node, image: TrackedImage, written: TrackedImage | None, dim: int, index: Ref) -> bool:
    """Add the operator on images; false if the index does not name channels."""
    shape, index_node = tracker.shape(image.node), tracker.nodes[index.name]
    image_dim = image.layout.image_dim(dim)
    names_channels = len(index_node.shape) == 1 and index_node.dtype in ("int64", "int32") and image_dim is not None
    if not names_channels or image_dim is None or not 1 <= image_dim < len(shape) - tracker.axes.count:
        return False
    changed: dict[str, Any] = {"self": Ref(image.node), "dim": image_dim, "indices": (*[None] * image_dim, index)}
    if written is not None:
        changed[str(INDEX_OPS[node.target])] = Ref(written.node)
    arguments = tuple((key, changed.get(key, value)) for key, value in node.arguments)
    length = node.shape[dim % len(node.shape)]
    result = tuple(length if axis == image_dim else extent for axis, extent in enumerate(shape))
    return tracker.put(replace(node, shape=result, arguments=arguments), image.layout)
