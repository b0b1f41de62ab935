"""Repeated and interleaved rows: each row of an image becomes several rows of the result.

A new dimension of channels holds the rows of a group, and ``sft.pixel_shuffle`` moves it into the axis::

    repeat_interleave(x, 2, dim=2)        ->      z = pixel_shuffle(expand(x, channels=(C, 2)))
    x[:, :, 1::2] = y                     ->      p = pixel_shuffle(pad(y, channels by 1))         # rows of y, and rows of zeros
                                                  z = sft.assign_slice(x, pad(p, rows=(1, -1)), axis=0, start=1, step=2)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sft.analysis.ir.graph import Node, Ref
from sft.analysis.passes.decompose_pads import pad_axis
from sft.analysis.passes.layout import ChannelRearrangement
from sft.analysis.passes.layout_tracker import LayoutTracker

__all__ = ["rewrite_repeated_rows", "spread_rows"]


def rewrite_repeated_rows(tracker: LayoutTracker, node: Node) -> bool:
    """Rewrite ``repeat_interleave`` along channels or an axis of an image; false along other dimensions."""
    image, factor, dim = tracker.images.get(node.argument("self").name), node.argument("repeats"), node.argument("dim")
    image_dim = None if image is None or dim is None else image.layout.image_dim(dim)
    if image is None or not image_dim or not isinstance(factor, int) or factor < 1:
        return False
    spread = spread_rows(tracker, node, tracker.nodes[image.node], node.name, image_dim, factor)
    return spread is not None and tracker.put(spread, image.layout)


def spread_rows(tracker: LayoutTracker, node: Node, image: Node, name: str, dim: int, factor: int, *, value: Any = None) -> Node | None:
    """The node ``name`` for the operator ``node``: ``factor`` rows (channels) for each one of an image. Nodes that it reads are added.

    ``None`` if the number of channels depends on the image's size.

    Args:
        tracker: the graph under construction.
        node: the operator of the model.
        image: the node of the image.
        name: of the new node.
        dim: dimension of the image.
        factor: rows for each row.
        value: element of all rows but the first one of each; ``None`` for copies of that row.
    """
    first_axis = len(image.shape) - tracker.axes.count
    channels, extents = image.shape[1:first_axis], image.shape[first_axis:]
    if not all(isinstance(extent, int) for extent in channels):
        return None
    place = min(dim + 1, first_axis)  # of the new dimension
    split = (*channels[: place - 1], 1, *channels[place - 1 :])
    grouped = (*split[: place - 1], factor, *split[place:])
    change = ChannelRearrangement(split=split, order=tuple(range(len(split))), shape=split)
    tracker.add_rearrangement(replace(node, dtype=image.dtype), change, image.name, f"{name}__rows")
    rows = tracker.nodes[f"{name}__rows"]
    if value is None:
        arguments = (("self", Ref(rows.name)), ("channels", grouped))
        groups = replace(rows, name=f"{name}__groups", target="sft.expand_channels", arguments=arguments)
        groups = replace(groups, shape=(image.shape[0], *grouped, *extents))
    else:
        groups = pad_axis(node, rows, f"{name}__groups", place, (0, factor - 1), tracker.axes.count, value=value)
    tracker.nodes[groups.name] = groups
    shape = tuple(extent * factor if each == dim else extent for each, extent in enumerate(image.shape))
    if dim < first_axis:
        merged = ChannelRearrangement(split=grouped, order=tuple(range(len(grouped))), shape=shape[1:first_axis])
        tracker.add_rearrangement(groups, merged, groups.name, name)
        return tracker.nodes[name]
    places = tuple((place,) if axis == dim - first_axis else () for axis in range(tracker.axes.count))
    factors = tuple(factor if axis == dim - first_axis else 1 for axis in range(tracker.axes.count))
    shuffle = (("self", Ref(groups.name)), ("rest", tuple(range(1, place))), ("places", places), ("factors", factors))
    return replace(groups, name=name, target="sft.pixel_shuffle", shape=shape, arguments=shuffle)
