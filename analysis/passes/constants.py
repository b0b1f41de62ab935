"""Constants: values with one known number as every element, and images that are filled with one.

A constant of the image's size (``x.new_zeros(x.shape)``, ``torch.ones(1, 1, height, width)``, a slice of one of these) is never stored at
full size: ``sft.constant_image`` creates a strip of it where one is read. So channels of zeros that are joined to an image, and a tensor of
zeros that channels are written into, stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sft.analysis.ir.axes import Axes
from sft.analysis.ir.graph import Node, Ref
from sft.analysis.ir.symbolic import same_shape
from sft.analysis.passes.layout_tracker import EXPANDS, PERMUTES, RESHAPES, LayoutTracker, TrackedImage

__all__ = ["Constant", "add_constant_image_like", "constant_of", "make_constant_image"]

#: Factories of constants, and their value where it is not an argument.
_FACTORIES = {"aten.zeros.default": 0, "aten.ones.default": 1, "aten.full.default": None}
#: Operators that overwrite all elements, and their value where it is not an argument.
_FILLS = {
    "aten.zero.default": 0,
    "aten.fill.Scalar": None,
    "aten.zeros_like.default": 0,
    "aten.ones_like.default": 1,
    "aten.full_like.default": None,
}
#: Operators whose result has elements of their operand only.
_SELECTIONS = frozenset({*EXPANDS, *PERMUTES, *RESHAPES, "aten.slice.Tensor", "aten.select.int", "aten.flip.default", "aten.roll.default"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A value with the same number as every element.

    Attributes:
        value: the number; symbolic if it depends on the image's size.
        dtype: element type without the ``torch.``.
    """

    value: Any
    dtype: str


def constant_of(nodes: Mapping[str, Node], name: str) -> Constant | None:
    """The constant that a node computes; ``None`` if its elements may differ."""
    node = nodes[name]
    while node.target in _SELECTIONS and node.kind == "operator":
        node = nodes[node.operands[0]]
    for table, key in ((_FACTORIES, "fill_value"), (_FILLS, "value" if node.target == "aten.fill.Scalar" else "fill_value")):
        if node.kind == "operator" and node.target in table:
            return Constant(value=node.argument(key, table[node.target]), dtype=node.dtype)
    return None


def make_constant_image(name: str, reader: Node, constant: Constant, image: Node, channels: Any, axes: Axes) -> Node:
    """The node ``name``: a constant with one dimension of ``channels`` channels and the size of an image.

    ``reader`` is the node of the model that the image stands for, or that reads it.
    """
    options = (("channels", channels), ("value", constant.value), ("dtype", constant.dtype), ("axes", axes.count))
    arguments, shape = (("self", Ref(image.name)), *options), (image.shape[0], channels, *axes.of(image.shape))
    size = _itemsize_bytes(constant.dtype, reader)
    node = replace(reader, name=name, kind="operator", target="sft.constant_image", shape=shape, arguments=arguments, effect="")
    return replace(node, dtype=constant.dtype, itemsize_bytes=size)


def _itemsize_bytes(dtype: str, reader: Node) -> int:
    """Bytes of one element."""
    if dtype == reader.dtype:
        return reader.itemsize_bytes
    bits = "".join(filter(str.isdigit, dtype))
    return int(bits) // 8 if bits else 1


def add_constant_image_like(tracker: LayoutTracker, name: str, like: TrackedImage | None) -> TrackedImage | None:
    """The image of a value; a constant of the size of ``like``, with any number of channels, becomes one. ``None`` for other values."""
    if name in tracker.images or like is None or name not in tracker.nodes:
        return tracker.images.get(name)
    image, value, groups = tracker.nodes[like.node], tracker.nodes[name], like.layout.groups
    constant = constant_of(tracker.nodes, name)
    if constant is None or len(value.shape) != len(groups) or (1,) not in groups:
        return None
    channels = value.shape[groups.index((1,))]
    shape = (image.shape[0], channels, *tracker.axes.of(image.shape))
    if any(dim >= len(shape) for group in groups for dim in group):
        return None  # several dimensions of channels
    if not same_shape(like.layout.shape(shape), value.shape):
        return None
    filled_name = f"{name}__filled"
    if filled_name in tracker.nodes:  # for another image
        filled_name += f"_like_{like.node}"
    filled = make_constant_image(filled_name, value, constant, image, channels, tracker.axes)
    tracker.nodes[filled.name] = filled
    return TrackedImage(filled.name, like.layout)
