"""Operators of single elements on images, and what else they read beside these.

An operator of single elements does not mind in which order an image has its dimensions, if all of its images have the same. What is no
image and broadcasts to them (a scale of channels, a mask, positions) gets its dimensions where the image has them (``sft.align_dims``);
where it varies along the image, it becomes an image that is read in strips, too (:mod:`sft.analysis.passes.elementwise`).

What is no image and yet varies along one: position embeddings, grids of coordinates, weights for each pixel.

Such a value is whole, but an image read in strips needs no more of it than lies beside the strip. ``sft.spatial_side_input`` makes an
image of it: of every strip the part that lies there, as a view, repeated where it has one entry and the image has many. Its gradient is
the strips', summed where it is repeated.

A constant of the image's size (``x.new_zeros(x.shape)``, ``torch.ones(1, 1, height, width)``) is never whole: ``sft.constant_image`` makes
a strip of it where one is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sft.analysis.ir.axes import Axes
from sft.analysis.ir.graph import Node, Ref, map_refs
from sft.analysis.ir.symbolic import broadcast_shapes, same_shape
from sft.analysis.passes.layout import DimLayout
from sft.analysis.passes.layout_tracker import EXPANDS, LayoutTracker, TrackedImage

__all__ = ["ElementwiseRewriter", "is_constant", "make_constant_image", "make_spatial_side_input", "varies_spatially"]

#: Constants of a given shape, and their value where that is no argument.
_CONSTANT_FACTORIES = {"aten.zeros.default": 0, "aten.ones.default": 1, "aten.full.default": None}


def is_constant(node: Node) -> bool:
    """Whether all elements of a value are one number that is known."""
    return node.target in _CONSTANT_FACTORIES


def make_constant_image(name: str, constant: Node, image: Node, channels: Any) -> Node:
    """The node ``name``: so many channels of a constant, as large as an image with one dimension of channels."""
    value = constant.argument("fill_value", _CONSTANT_FACTORIES[constant.target])
    arguments = (("self", Ref(image.name)), ("channels", channels), ("value", value), ("dtype", constant.dtype))
    shape = (image.shape[0], channels, *image.shape[2:])
    return replace(constant, name=name, target="sft.constant_image", shape=shape, arguments=arguments)


def varies_spatially(shape: Sequence[Any], layout: DimLayout, first_axis: int) -> bool:
    """Whether what broadcasts to a value of this layout varies along the image's axes, which begin at dimension ``first_axis``."""
    groups = layout.groups[max(0, len(layout.groups) - len(shape)) :]
    return len(shape) <= len(layout.groups) and any(
        extent != 1 and any(dim >= first_axis for dim in group) for group, extent in zip(groups, shape, strict=True)
    )


def make_spatial_side_input(name: str, value: Node, layout: DimLayout, image: Node, axes: Axes) -> Node | None:
    """The node ``name`` that takes ``value``, which broadcasts to one of this layout, into strips beside those of ``image``.

    ``None`` where its dimensions are not the image's.
    """
    rank, first_axis = len(image.shape), len(image.shape) - axes.count
    split: list[Any] = []
    places: list[int] = []
    for group, extent in zip(layout.groups[len(layout.groups) - len(value.shape) :], value.shape, strict=True):
        if extent == 1:
            continue
        whole = [image.shape[dim] for dim in group]
        if len(group) != 1 and not same_shape([layout.shape(image.shape)[layout.groups.index(group)]], [extent]):
            return None
        found = whole if len(group) != 1 else [extent]
        if any(dim >= first_axis and not same_shape([image.shape[dim]], [part]) for dim, part in zip(group, found, strict=True)):
            return None
        split += found
        places += group
    missing = [dim for dim in range(rank) if dim not in places]
    at = [*places, *missing]
    shape = list(image.shape)
    shape[1:first_axis] = [split[places.index(dim)] if dim in places else 1 for dim in range(1, first_axis)]
    arguments = (
        ("self", Ref(value.name)),
        ("like", Ref(image.name)),
        ("split", (*split, *[1] * len(missing))),
        ("order", tuple(at.index(dim) for dim in range(rank))),
        ("axes", axes.count),
    )
    return replace(value, name=name, kind="operator", target="sft.spatial_side_input", shape=tuple(shape), arguments=arguments, effect="")


class ElementwiseRewriter(LayoutTracker):
    """A rewriting that can put operators of single elements on images."""

    def elementwise(self, node: Node) -> bool:
        """Put an operator of single elements on the images that it reads; whether that is possible."""
        images = [self.images[name] for name in node.operands if name in self.images]
        layout = images[0].layout
        held = [self.shape(image.node) for image in images]
        if any(image.layout != layout for image in images) or len({len(shape) for shape in held}) > 1:
            return False
        rank = len(held[0])
        # Of an image of one row, or column, beside larger ones all of these need that row.
        widest = max(images, key=lambda image: sum(extent != 1 for extent in self.axes.of(self.shape(image.node))))
        is_outer = any(self._is_narrow(widest, image) for image in images)  # of a row and a column
        aligned: dict[str, str] = {}
        for name in dict.fromkeys(node.operands):
            base = name if name in self.images else self.unexpanded(name)
            side: str | None = base
            if name in self.images:
                side = self.images[name].node
                if is_outer and side == widest.node:
                    side = self._expanded(node, side, broadcast_shapes(held, rank))
                elif not is_outer and self._is_narrow(self.images[name], widest):
                    side = self._narrow_side_input(node, side, widest)
            elif varies_spatially(self.shape(base), layout, rank - self.axes.count):
                side = self.side_input_image(node, base, widest)
            elif not (layout.is_plain and len(layout.groups) == rank):
                side = self._aligned(base, layout, rank)
            if side is None:
                return False
            aligned[name] = side
        sides = (self.shape(aligned[name]) for name in node.operands if name not in self.images)
        shape = broadcast_shapes([*held, *sides], rank)
        if layout.shape(shape) != tuple(node.shape) and not same_shape(layout.shape(shape), node.shape):
            return False
        arguments = tuple((key, map_refs(value, lambda name: Ref(aligned[name]))) for key, value in node.arguments)
        return self.put(replace(node, shape=shape, arguments=arguments), layout)

    def _is_narrow(self, image: TrackedImage, widest: TrackedImage) -> bool:
        """Whether an image has one row or column where another one has more."""
        axes = (self.axes.of(self.shape(one.node)) for one in (image, widest))
        return any(own == 1 != other for own, other in zip(*axes, strict=True))

    def _narrow_side_input(self, reader: Node, name: str, widest: TrackedImage) -> str | None:
        """An image of one row, or column, beside a wider one: a strip may need any of it, so it is a list of numbers first, and whole."""
        narrow, wide = self.nodes[name], self.nodes[widest.node]
        made = make_spatial_side_input(f"{reader.name}__{name}", narrow, DimLayout.plain(len(narrow.shape)), wide, self.axes)
        if made is None:
            return None
        shape = (math.prod(narrow.shape),)
        whole = replace(narrow, name=f"{made.name}_whole", kind="operator", target="sft.align_dims", shape=shape, effect="")
        self.nodes[whole.name] = replace(whole, arguments=(("self", Ref(name)), ("shape", shape)), module_path=reader.module_path)
        arguments = tuple((key, Ref(whole.name) if key == "self" else value) for key, value in made.arguments)
        self.nodes[made.name] = replace(made, arguments=arguments, module_path=reader.module_path)
        return made.name

    def _expanded(self, reader: Node, name: str, shape: Sequence[Any]) -> str:
        """A row or column repeated along the image, whole."""
        expanded = f"{reader.name}__{name}_expanded"
        size = (*self.shape(name)[: -self.axes.count], *shape[-self.axes.count :])
        arguments = (("self", Ref(name)), ("size", size), ("implicit", False))
        made = replace(self.nodes[name], name=expanded, target="aten.expand.default", shape=size, arguments=arguments, effect="")
        self.nodes[expanded] = replace(made, kind="operator", module_path=reader.module_path)
        return expanded

    def side_input_image(self, reader: Node, name: str, image: TrackedImage) -> str | None:
        """What varies along an image without being one, as an image for ``reader``."""
        of = self.nodes[image.node]
        made = make_spatial_side_input(f"{reader.name}__{name}", self.nodes[name], image.layout, of, self.axes)
        if made is None:
            return None
        constant = self._before_expansions(name)
        if is_constant(constant) and len(of.shape) == self.axes.rank:
            made = make_constant_image(made.name, constant, of, made.shape[1])
        self.nodes[made.name] = replace(made, module_path=reader.module_path)
        return made.name

    def _before_expansions(self, name: str) -> Node:
        """What a value was before it was expanded, in more dimensions, too: for what is the same everywhere."""
        node = self.nodes[name]
        while node.target in EXPANDS:
            node = self.nodes[node.argument("self").name]
        return node

    def unexpanded(self, name: str) -> str:
        """What a value that was expanded to the size of an image was before: what reads it broadcasts it again."""
        node = self.nodes[name]
        while node.target == "aten.expand.default" and len(self.shape(node.operands[0])) == len(node.shape):
            node = self.nodes[node.operands[0]]
        return node.name

    def _aligned(self, name: str, layout: DimLayout, rank: int) -> str | None:
        """What broadcasts to a value of this layout, with its dimensions where the image has them."""
        shape = self.shape(name)
        if all(extent == 1 for extent in shape):
            return name if len(shape) <= 1 else None
        if len(shape) > len(layout.groups):
            return None
        full = (*[1] * (len(layout.groups) - len(shape)), *shape)
        image: list[Any] = [1] * rank
        places: list[int] = []
        for group, extent in zip(layout.groups, full, strict=True):
            if extent != 1:
                if len(group) != 1:
                    return None
                places.append(group[0])
                image[group[0]] = extent
        if places != sorted(places):
            return None
        aligned = f"{name}__aligned_{'_'.join(map(str, places))}_of_{rank}"
        if aligned not in self.nodes:
            node = self.nodes[name]
            arguments = (("self", Ref(name)), ("shape", tuple(image)))
            self.nodes[aligned] = replace(
                node, name=aligned, kind="operator", target="sft.align_dims", shape=tuple(image), arguments=arguments, effect=""
            )
        return aligned
