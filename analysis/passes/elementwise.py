"""Elementwise operators on images: alignment of broadcast operands, and spatial side inputs.

An elementwise operator commutes with any order of an image's dimensions if all of its images share that order. Each operand that is not an
image and broadcasts to them is aligned:

* a scale of channels, a mask without spatial extent: its dimensions move to those of the image (``sft.align_dims``);
* a *spatial side input* varies along height or width without being an image: position embeddings, coordinate grids, weights for each
  pixel. It stays resident. ``sft.spatial_side_input`` makes an image of it: each strip reads the matching slice as a view, repeated where
  the side input has one entry and the image has many. Its gradient is the strips', summed over broadcast dimensions;
* a constant of the image's size is never stored at full size (:mod:`sft.analysis.passes.constants`).

Example, for an image with channels last and a position embedding ``[1, height, width, C]``::

    y = permute(x, [0, 2, 3, 1])                  p = spatial_side_input(pos, like=x)    # [1, C, height, width], in strips
    z = y + pos                           ->      z = x + p                              # tracked as permuted
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sft.analysis.ir.axes import Axes
from sft.analysis.ir.graph import Node, Ref, map_refs
from sft.analysis.ir.symbolic import broadcast_shapes, same_shape
from sft.analysis.passes.constants import constant_of, make_constant_image
from sft.analysis.passes.layout import DimLayout
from sft.analysis.passes.layout_tracker import LayoutTracker, TrackedImage

__all__ = [
    "add_spatial_side_input",
    "make_spatial_side_input",
    "rewrite_elementwise",
    "unexpanded",
    "varies_spatially",
]


def varies_spatially(shape: Sequence[Any], layout: DimLayout, first_axis: int) -> bool:
    """True if an operand that broadcasts to this layout varies along the image's axes, which begin at dimension ``first_axis``."""
    groups = layout.groups[max(0, len(layout.groups) - len(shape)) :]
    return len(shape) <= len(layout.groups) and any(
        extent != 1 and any(dim >= first_axis for dim in group) for group, extent in zip(groups, shape, strict=True)
    )


def make_spatial_side_input(name: str, value: Node, layout: DimLayout, image: Node, axes: Axes) -> Node | None:
    """The node ``name``: ``value``, which broadcasts to this layout, in strips that match those of ``image``.

    ``None`` if its dimensions do not match the image's.
    """
    rank, first_axis = len(image.shape), len(image.shape) - axes.count
    split: list[Any] = []
    dims: list[int] = []
    for group, extent in zip(layout.groups[len(layout.groups) - len(value.shape) :], value.shape, strict=True):
        if extent == 1:
            continue
        if len(group) != 1 and not same_shape([layout.shape(image.shape)[layout.groups.index(group)]], [extent]):
            return None
        extents = [image.shape[dim] for dim in group] if len(group) != 1 else [extent]
        if any(dim >= first_axis and not same_shape([image.shape[dim]], [size]) for dim, size in zip(group, extents, strict=True)):
            return None
        split += extents
        dims += group
    missing = [dim for dim in range(rank) if dim not in dims]
    source_dims = [*dims, *missing]
    shape = list(image.shape)
    shape[1:first_axis] = [split[dims.index(dim)] if dim in dims else 1 for dim in range(1, first_axis)]
    arguments = (
        ("self", Ref(value.name)),
        ("like", Ref(image.name)),
        ("split", (*split, *[1] * len(missing))),
        ("order", tuple(source_dims.index(dim) for dim in range(rank))),
        ("axes", axes.count),
    )
    return replace(value, name=name, kind="operator", target="sft.spatial_side_input", shape=tuple(shape), arguments=arguments, effect="")


def rewrite_elementwise(tracker: LayoutTracker, node: Node) -> bool:
    """Apply an elementwise operator to the images that it reads; false if their layouts differ or an operand cannot be aligned."""
    tracked = {name: tracker.images[name] for name in node.operands if name in tracker.images}
    layout = _layout_of_largest(tracker, tracked)
    # An image of another layout that broadcasts, such as a row that has lost its channels, is read in the model's order.
    values = {name for name, image in tracked.items() if image.layout != layout and not same_shape(tracker.graph[name].shape, node.shape)}
    images = [image for name, image in tracked.items() if name not in values]
    image_shapes = [tracker.shape(image.node) for image in images]
    if any(image.layout != layout for image in images) or len({len(shape) for shape in image_shapes}) > 1:
        return False
    rank = len(image_shapes[0])
    # An image with one row or column is read in full for all strips of a larger one.
    widest = max(images, key=lambda image: sum(extent != 1 for extent in tracker.axes.of(tracker.shape(image.node))))
    is_outer = any(_is_narrow(tracker, widest, image) for image in images)  # the outer product of a row and a column
    full = _image_of_size(tracker, broadcast_shapes(image_shapes, rank)) if is_outer else None
    if full is not None:
        widest, is_outer = full, False
    aligned: dict[str, str] = {}
    for name in dict.fromkeys(node.operands):
        is_image = name in tracked and name not in values
        base = name if is_image else unexpanded(tracker, tracker.plain_name(name))
        operand: str | None = base
        if is_image:
            operand = tracker.images[name].node
            if is_outer and operand == widest.node:
                operand = _expand(tracker, node, operand, broadcast_shapes(image_shapes, rank))
            elif not is_outer and _is_narrow(tracker, tracker.images[name], widest):
                operand = _add_narrow_side_input(tracker, node, operand, widest)
        elif varies_spatially(tracker.shape(base), layout, rank - tracker.axes.count):
            operand = add_spatial_side_input(tracker, node, base, widest)
        elif not (layout.is_plain and len(layout.groups) == rank):
            operand = _align(tracker, base, layout, rank)
        if operand is None:
            return False
        aligned[name] = operand
    side_shapes = (tracker.shape(aligned[name]) for name in node.operands if name not in tracked or name in values)
    shape = broadcast_shapes([*image_shapes, *side_shapes], rank)
    if layout.shape(shape) != tuple(node.shape) and not same_shape(layout.shape(shape), node.shape):
        return False
    arguments = tuple((key, map_refs(value, lambda name: Ref(aligned[name]))) for key, value in node.arguments)
    return tracker.put(replace(node, shape=shape, arguments=arguments), layout)


def _layout_of_largest(tracker: LayoutTracker, images: Mapping[str, TrackedImage]) -> DimLayout:
    """The layout of the image with most dimensions that are not of extent 1; of several, the first one's."""
    name = max(images, key=lambda name: sum(extent != 1 for extent in tracker.graph[name].shape))
    return images[name].layout


def _is_narrow(tracker: LayoutTracker, image: TrackedImage, widest: TrackedImage) -> bool:
    """True if an image has one row or column where another one has more."""
    extents = (tracker.axes.of(tracker.shape(each.node)) for each in (image, widest))
    return any(extent == 1 != other for extent, other in zip(*extents, strict=True))


def _image_of_size(tracker: LayoutTracker, shape: Sequence[Any]) -> TrackedImage | None:
    """The latest image with the batch and the extents of a shape, and with as many dimensions; ``None`` if there is none."""
    size = (shape[0], *tracker.axes.of(shape))
    for image in reversed(tracker.images.values()):
        image_shape = tracker.shape(image.node)
        if len(image_shape) == len(shape) and (image_shape[0], *tracker.axes.of(image_shape)) == size:
            return image
    return None


def _add_narrow_side_input(tracker: LayoutTracker, reader: Node, name: str, widest: TrackedImage) -> str | None:
    """An image of one row or column as a side input of a wider one."""
    narrow, wide = tracker.nodes[name], tracker.nodes[widest.node]
    side = make_spatial_side_input(f"{reader.name}__{name}", narrow, DimLayout.plain(len(narrow.shape)), wide, tracker.axes)
    if side is None:
        return None
    side = replace(_of_flat_value(tracker, narrow, side, reader), module_path=reader.module_path)
    tracker.nodes[side.name] = side
    return side.name


def _reads_image(tracker: LayoutTracker, name: str) -> bool:
    """True if an operator computes a value from an image, directly or through other operators."""
    pending, seen = [name], set[str]()
    while pending:
        node = tracker.nodes[pending.pop()]
        for operand in node.operands:
            if operand in tracker.images:
                return True
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return False


def _of_flat_value(tracker: LayoutTracker, narrow: Node, side: Node, reader: Node) -> Node:
    """A side input of a narrow value, flattened: any strip may need all of it, and a list of numbers is no image, so it stays untiled."""
    shape = (math.prod(narrow.shape),)
    flat = replace(narrow, name=f"{side.name}_whole", kind="operator", target="sft.align_dims", shape=shape, effect="")
    tracker.nodes[flat.name] = replace(flat, arguments=(("self", Ref(narrow.name)), ("shape", shape)), module_path=reader.module_path)
    return replace(side, arguments=tuple((key, Ref(flat.name) if key == "self" else value) for key, value in side.arguments))


def _expand(tracker: LayoutTracker, reader: Node, name: str, shape: Sequence[Any]) -> str:
    """A row or column repeated along the image, untiled."""
    expanded = f"{reader.name}__{name}_expanded"
    size = (*tracker.shape(name)[: -tracker.axes.count], *shape[-tracker.axes.count :])
    arguments = (("self", Ref(name)), ("size", size), ("implicit", False))
    node = replace(tracker.nodes[name], name=expanded, target="aten.expand.default", shape=size, arguments=arguments, effect="")
    tracker.nodes[expanded] = replace(node, kind="operator", module_path=reader.module_path)
    return expanded


def add_spatial_side_input(tracker: LayoutTracker, reader: Node, name: str, image: TrackedImage) -> str | None:
    """Add a spatial side input (or constant image) for ``reader`` and return its node; ``None`` if its dimensions do not match."""
    image_node = tracker.nodes[image.node]
    value = tracker.nodes[name]
    side = make_spatial_side_input(f"{reader.name}__{name}", value, image.layout, image_node, tracker.axes)
    if side is None:
        return None
    constant = constant_of(tracker.nodes, name)
    if constant is not None and len(image_node.shape) == tracker.axes.rank:
        side = make_constant_image(side.name, value, constant, image_node, side.shape[1], tracker.axes)
    elif len(value.shape) >= tracker.axes.rank and 1 in tracker.axes.of(value.shape) and _reads_image(tracker, name):
        side = _of_flat_value(tracker, value, side, reader)
    tracker.nodes[side.name] = replace(side, module_path=reader.module_path)
    return side.name


def unexpanded(tracker: LayoutTracker, name: str) -> str:
    """The value before expansions of the same rank: an elementwise reader broadcasts it again."""
    node = tracker.nodes[name]
    while node.target == "aten.expand.default" and len(tracker.shape(node.operands[0])) == len(node.shape):
        node = tracker.nodes[node.operands[0]]
    return node.name


def _align(tracker: LayoutTracker, name: str, layout: DimLayout, rank: int) -> str | None:
    """An operand that broadcasts to this layout, with its dimensions moved to those of the image; ``None`` if that needs a permutation."""
    shape = tracker.shape(name)
    if len(shape) > len(layout.groups):
        return None
    if shape in ((), (1,)):
        return name
    full = (*[1] * (len(layout.groups) - len(shape)), *shape)
    image: list[Any] = [1] * rank
    dims: list[int] = []
    for group, extent in zip(layout.groups, full, strict=True):
        if extent != 1:
            if len(group) != 1:
                return None
            dims.append(group[0])
            image[group[0]] = extent
    if dims != sorted(dims):
        return None
    aligned = f"{name}__aligned_{'_'.join(map(str, dims))}_of_{rank}"
    if aligned not in tracker.nodes:
        node = tracker.nodes[name]
        arguments = (("self", Ref(name)), ("shape", tuple(image)))
        tracker.nodes[aligned] = replace(
            node, name=aligned, kind="operator", target="sft.align_dims", shape=tuple(image), arguments=arguments, effect=""
        )
    return aligned
