"""What is no image and yet varies along one: position embeddings, grids of coordinates, weights for each pixel.

Such a value is whole, but an image read in strips needs no more of it than lies beside the strip. ``sft.spatial_side_input`` makes an image of it: of
every strip the part that lies there, as a view, repeated where it has one entry and the image has many. Its gradient is the strips',
summed where it is repeated.

A constant of the image's size (``x.new_zeros(x.shape)``, ``torch.ones(1, 1, height, width)``) is never whole: ``sft.constant_image`` makes a strip
of it where one is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sft.analysis.axes import Axes
from sft.analysis.extents import same_shape
from sft.analysis.graph import Node, Ref
from sft.analysis.layout import DimLayout

__all__ = ["make_spatial_side_input", "make_constant_image", "is_constant", "varies_spatially"]

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
