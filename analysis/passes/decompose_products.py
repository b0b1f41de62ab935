"""Matrix products of images: over all pixels, whose result is a global value, and of every pixel's channels with such a matrix.

``matmul``, ``bmm`` and ``einsum`` of two operands are read with a letter for each dimension, as ``einsum`` writes them. Two forms stream:

* ``sft.contract_pixels``: both operands are images, and what is summed over are all axes of the image (a pooling by attention, Gram
  matrices,
  the keys times the values of linear attention). A reduction.
* ``sft.mix_channels``: one operand is an image, the other a matrix for each sample; what is summed over are channels.

Products that pair pixels with pixels (self-attention) run whole.

``decompose_linear`` along the channels of an image: a convolution with a kernel of one pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from string import ascii_letters
from typing import Any

from sft.analysis.ir.axes import Axes
from sft.analysis.ir.graph import Node, Ref
from sft.analysis.ir.symbolic import same_shape
from sft.analysis.passes.layout import DimLayout

__all__ = ["MATRIX_PRODUCTS", "ContractionOperand", "decompose_linear", "decompose_product", "product_letters"]

MATRIX_PRODUCTS = frozenset({"aten.matmul.default", "aten.bmm.default", "aten.einsum.default"})


@dataclass(frozen=True, slots=True)
class ContractionOperand:
    """An operand: its letters, the node that holds it, and how it lies in an image (``None``: it is no image)."""

    letters: str
    node: Node
    layout: DimLayout | None

    def dims(self, letter: str) -> tuple[int, ...]:
        """The dimensions of the node that a letter runs over."""
        at = self.letters.index(letter)
        return (at,) if self.layout is None else self.layout.groups[at]

    def extent(self, letter: str) -> Any:
        """The extent that a letter stands for."""
        return prod(self.node.shape[dim] for dim in self.dims(letter))

    def dims_of(self, letters: Sequence[str]) -> tuple[int, ...]:
        """The dimensions of several letters, in their order."""
        return tuple(dim for letter in letters for dim in self.dims(letter))


def product_letters(node: Node, ranks: Sequence[int]) -> tuple[str, str, str] | None:
    """A letter for each dimension of the two operands and of the result; ``None`` where they broadcast or repeat one."""
    if node.target != "aten.einsum.default":
        if not ranks[0] == ranks[1] >= 3:
            return None
        shared, (row, column, inner) = ascii_letters[: ranks[0] - 2], list(ascii_letters[-3:])
        return shared + row + inner, shared + inner + column, shared + row + column
    operands, arrow, out = node.argument("equation").replace(" ", "").partition("->")
    terms = (*operands.split(","), out)
    if not arrow or len(terms) != 3 or any("." in term or len(set(term)) < len(term) for term in terms):
        return None
    return terms


def decompose_product(
    node: Node, left: ContractionOperand, right: ContractionOperand, out: str, num_axes: int
) -> tuple[tuple[Node, ...], DimLayout | None] | None:
    """The nodes that stand for a product, and how its result lies in an image, if it does; ``None`` where no form of it streams."""
    if left.layout is not None and right.layout is not None:
        return _contract_pixels(node, left, right, out, num_axes)
    image, matrix = (left, right) if left.layout is not None else (right, left)
    return _mix_channels(node, image, matrix, out, num_axes)


def _contract_pixels(
    node: Node, left: ContractionOperand, right: ContractionOperand, out: str, num_axes: int
) -> tuple[tuple[Node, ...], None] | None:
    summed = [letter for letter in left.letters if letter in right.letters and letter not in out]
    axes = [_axes_of_letters(factor, summed, num_axes) for factor in (left, right)]
    both = [letter for letter in out if letter in left.letters and letter in right.letters]
    groups = [letter for letter in both if not left.dims(letter) == right.dims(letter) == (0,)]
    free = [[letter for letter in out if letter in factor.letters and letter not in both] for factor in (left, right)]
    order = [*(letter for letter in both if letter not in groups), *groups, *free[0], *free[1]]
    is_complete = sorted(order) == sorted(out) and set(left.letters + right.letters) == {*summed, *out}
    if len(both) != len(groups) + 1 or not is_complete or axes[0] != axes[1] or sorted(axes[0]) != list(range(num_axes)):
        return None
    parts = [_split_channels(factor, groups, rest, num_axes) for factor, rest in zip((left, right), free, strict=True)]
    if None in parts or not same_shape([left.extent(g) for g in groups], [right.extent(g) for g in groups]):
        return None
    extents = {letter: (left if letter in left.letters else right).extent(letter) for letter in order}
    shape = tuple(extents[letter] for letter in order)
    arguments = (
        ("self", Ref(left.node.name)),
        ("other", Ref(right.node.name)),
        ("left", parts[0]),
        ("right", parts[1]),
        ("shape", shape),
        ("axes", num_axes),
    )
    made = replace(node, target="sft.contract_pixels", shape=shape, arguments=arguments)
    if order == list(out):
        return (made,), None
    made = replace(made, name=f"{node.name}__contracted")
    turned = (("self", Ref(made.name)), ("order", tuple(order.index(letter) for letter in out)), ("shape", node.shape))
    return (made, replace(node, target="sft.restore_dims", arguments=turned)), None


def _mix_channels(
    node: Node, image: ContractionOperand, matrix: ContractionOperand, out: str, num_axes: int
) -> tuple[tuple[Node, ...], DimLayout] | None:
    first_axis = len(image.node.shape) - num_axes
    pixels = [letter for letter in image.letters if any(dim >= first_axis for dim in image.dims(letter))]
    samples = [letter for letter in image.letters if image.dims(letter) == (0,)]
    groups = [letter for letter in out if letter in image.letters and letter in matrix.letters and letter not in samples]
    summed = [letter for letter in image.letters if letter in matrix.letters and letter not in out]
    free = [letter for letter in out if letter not in image.letters]
    is_read = sorted(matrix.letters) == sorted([*samples, *groups, *summed, *free]) and sorted(out) == sorted(
        [*samples, *groups, *free, *pixels]
    )
    shared = [*samples, *groups, *summed]
    if not is_read or len(samples) != 1 or sorted(_axes_of_letters(image, pixels, num_axes)) != list(range(num_axes)):
        return None
    part = _split_channels(image, groups, summed, num_axes)
    if (
        part is None
        or set(image.letters) != {*shared, *pixels}
        or not same_shape(*([f.extent(x) for x in shared] for f in (image, matrix)))
    ):
        return None
    inner = [prod(matrix.extent(letter) for letter in letters) for letters in (groups, free, summed)]
    order = tuple(matrix.letters.index(letter) for letter in (*samples, *groups, *free, *summed))
    # As many dimensions as an image has say that the first one is the batch.
    shape = (image.node.shape[0], *inner, 1)
    turned = replace(
        matrix.node,
        name=f"{node.name}__matrix",
        kind="operator",
        target="sft.restore_dims",
        shape=shape,
        arguments=(("self", Ref(matrix.node.name)), ("order", order), ("shape", shape)),
        module_path=node.module_path,
        effect="",
    )
    channels = tuple(matrix.extent(letter) for letter in (*groups, *free)) or (1,)
    arguments = (("self", Ref(image.node.name)), ("matrix", Ref(turned.name)), ("part", part), ("channels", channels), ("axes", num_axes))
    made = replace(
        node, target="sft.mix_channels", shape=(image.node.shape[0], *channels, *image.node.shape[first_axis:]), arguments=arguments
    )
    shift = 1 + len(channels) - first_axis
    places: dict[str, tuple[int, ...]] = {letter: (1 + at,) for at, letter in enumerate((*groups, *free))}
    places |= {samples[0]: (0,), **{letter: tuple(dim + shift for dim in image.dims(letter)) for letter in pixels}}
    return (turned, made), DimLayout(tuple(places[letter] for letter in out))


def _axes_of_letters(factor: ContractionOperand, letters: Sequence[str], num_axes: int) -> list[int]:
    """The axes that letters run over; others of its dimensions are negative."""
    return [dim - (len(factor.node.shape) - num_axes) for dim in factor.dims_of(letters)]


def _split_channels(
    factor: ContractionOperand, groups: Sequence[str], rest: Sequence[str], num_axes: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The image's dimensions of channels that a product is made for each of, and the others; ``None`` where a letter is no channel."""
    first, second = factor.dims_of(groups), factor.dims_of(rest)
    channels = range(1, len(factor.node.shape) - num_axes)
    if any(dim not in channels for dim in (*first, *second)) or not all(isinstance(factor.node.shape[dim], int) for dim in channels):
        return None
    return first, (*second, *(dim for dim in channels if dim not in (*first, *second)))


def decompose_linear(node: Node, matrix: Node, image: Node, axes: Axes) -> tuple[Node, Node]:
    """The kernel and the convolution that stand for ``decompose_linear`` on an image with one dimension of channels.

    Args:
        node: the model's operator.
        matrix: its weight, ``[to, from]``.
        image: ``[N, from, axes...]``.
        axes: of the image.
    """
    ones = (1,) * axes.count
    shape = (*matrix.shape, *ones)
    kernel = replace(
        matrix,
        name=f"{node.name}__kernel",
        kind="operator",
        target="sft.align_dims",
        shape=shape,
        arguments=(("self", Ref(matrix.name)), ("shape", shape)),
        module_path=node.module_path,
    )
    arguments = (
        ("input", Ref(image.name)),
        ("weight", Ref(kernel.name)),
        ("bias", node.argument("bias")),
        ("stride", ones),
        ("padding", (0,) * axes.count),
        ("dilation", ones),
        ("groups", 1),
    )
    target, made = f"aten.conv{axes.count}d.default", (image.shape[0], matrix.shape[0], *axes.of(image.shape))
    return kernel, replace(node, target=target, shape=made, arguments=arguments)
