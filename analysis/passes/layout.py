"""Dimension layouts: the place of each dimension of a model tensor in the canonical order (batch, channels, axes).

A model may hold its image with channels last (``permute(0, 2, 3, 1)``), as a list of pixels (``flatten(2).transpose(1, 2)``), or with its
channels in groups (``view(n, g, c // g, h, w)``). The image itself has one order, ``[N, channels..., axes...]``
(:mod:`sft.analysis.ir.axes`). A :class:`DimLayout` gives for each dimension of the model's value the image dimensions that it runs over,
the last one fastest::

    x                              [N, C, H, W]      ((0,), (1,), (2,), (3,))
    x.permute(0, 2, 3, 1)          [N, H, W, C]      ((0,), (2,), (3,), (1,))
    x.flatten(2)                   [N, C, H * W]     ((0,), (1,), (2, 3))

Permuting a value only permutes its layout; reshaping one regroups it; no data moves. The image changes only if channels are split or
merged: into other dimensions of channels, pixel by pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy as sp

from sft.analysis.ir.axes import Axes

__all__ = ["ChannelRearrangement", "DimLayout", "ReshapeResult", "merge_channels", "reshape_layout"]

Extent = Any
"""An integer or a SymPy expression."""


@dataclass(frozen=True, slots=True)
class DimLayout:
    """For each dimension of the model's value the image dimensions that it runs over. Image dimensions of extent 1 may be in no group."""

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def plain(cls, rank: int) -> DimLayout:
        """The layout of an image in its own order."""
        return cls(tuple((dim,) for dim in range(rank)))

    @property
    def is_plain(self) -> bool:
        """True if the value is the image in its own order."""
        return self == DimLayout.plain(len(self.groups))

    def permuted(self, order: Sequence[int]) -> DimLayout:
        """The layout after ``permute(order)``.

        >>> DimLayout.plain(4).permuted((0, 2, 3, 1))
        DimLayout(groups=((0,), (2,), (3,), (1,)))
        """
        return DimLayout(tuple(self.groups[dim % len(self.groups)] for dim in order))

    def image_dim(self, dim: int) -> int | None:
        """The image dimension that corresponds to a dimension; ``None`` unless it is exactly one."""
        group = self.groups[dim % len(self.groups)]
        return group[0] if len(group) == 1 else None

    def shape(self, image: Sequence[Extent]) -> tuple[Extent, ...]:
        """The value's shape, given the image's."""
        return tuple(_product([image[dim] for dim in group]) for group in self.groups)

    def channels_merged_into_axes(self, first_axis: int) -> tuple[tuple[int, ...], ...] | None:
        """For each axis of the image the channel dimensions that the value merges into it; ``None`` if it merges none, or in another order.

        >>> DimLayout(((0,), (1,), (4, 2), (5, 3))).channels_merged_into_axes(4)
        ((2,), (3,))
        """
        merged_channels = {group[0]: group[1:] for group in self.groups if group and group[0] >= first_axis}
        remaining = [dim for group in self.groups if not group or group[0] < first_axis for dim in group]
        is_valid = [all(0 < dim < first_axis for dim in channels) for channels in merged_channels.values()]
        if any(dim >= first_axis for dim in remaining) or not all(is_valid) or not any(merged_channels.values()):
            return None
        rank = max(merged_channels) + 1
        return (
            tuple(merged_channels.get(axis, ()) for axis in range(first_axis, rank)) if len(merged_channels) == rank - first_axis else None
        )

    def without(self, dims: Sequence[int]) -> DimLayout:
        """The layout after some image dimensions are removed, each a group of its own (or in no group)."""
        removed = set(dims)
        shift = {dim: dim - sum(other < dim for other in removed) for group in self.groups for dim in group}
        return DimLayout(tuple(tuple(shift[dim] for dim in group) for group in self.groups if not removed.intersection(group)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRearrangement:
    """A rearrangement of the channels of every pixel.

    Attributes:
        split: extents that the channels are split into.
        order: permutation of the split dimensions.
        shape: extents that they are merged into.
    """

    split: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshapeResult:
    """The result of a reshape.

    Attributes:
        layout: layout of the reshaped value.
        rearrangement: change of the image required first, if any.
    """

    layout: DimLayout
    rearrangement: ChannelRearrangement | None


@dataclass(slots=True)
class _DimPiece:
    """A factor of one of the image's dimensions.

    Attributes:
        dim: the dimension; negative for a new one of extent 1.
        extent: its extent.
    """

    dim: int
    extent: Extent


def _product(extents: Sequence[Extent]) -> Extent:
    product: Extent = 1
    for extent in extents:
        product = product * extent
    return product


def _ratio(extent: Extent, factor: Extent) -> Extent | None:
    """``extent / factor`` if that is an integer for every size of the image; otherwise ``None``."""
    if isinstance(extent, int) and isinstance(factor, int):
        return extent // factor if extent % factor == 0 else None
    ratio = sp.cancel(sp.sympify(extent) / sp.sympify(factor))
    if ratio.is_integer is not True:
        return None
    return int(ratio) if ratio.is_number else ratio


def reshape_layout(layout: DimLayout, image: Sequence[Extent], shape: Sequence[Extent], axes: Axes) -> ReshapeResult | None:
    """The layout of a value reshaped to ``shape``; ``None`` if an axis of the image, or the batch, would be split.

    >>> shuffled = reshape_layout(DimLayout.plain(4), (2, 6, 8, 9), (2, 3, 2, 8, 9), Axes(2))
    >>> shuffled.layout, shuffled.rearrangement.shape
    (DimLayout(groups=((0,), (1,), (2,), (3,), (4,))), (3, 2))
    >>> reshape_layout(DimLayout.plain(4), (2, 6, 8, 9), (2, 6, 72), Axes(2)).layout
    DimLayout(groups=((0,), (1,), (2, 3)))
    """
    channels = range(1, len(image) - axes.count)
    pieces: list[_DimPiece] = []  # in the order of the value
    groups: list[list[_DimPiece]] = []
    pending = [_DimPiece(dim, image[dim]) for group in layout.groups for dim in group][::-1]
    hidden = [dim for dim in channels if not any(dim in group for group in layout.groups)]
    added: list[_DimPiece] = []
    for size in shape:
        group: list[_DimPiece] = []
        needed: Extent = size
        if needed == 1:
            if pending and pending[-1].extent == 1:
                group.append(pending.pop())
            elif hidden:
                group.append(_DimPiece(hidden.pop(0), 1))
            else:
                added.append(_DimPiece(-1 - len(added), 1))
                group.append(added[-1])
        while needed != 1:
            if not pending:
                return None
            piece = pending[-1]
            if piece.extent == 1 and piece.dim in channels:
                hidden.append(pending.pop().dim)
                continue
            ratio = _ratio(needed, piece.extent)
            if ratio is not None:
                group.append(pending.pop())
                needed = ratio
                continue
            remainder = _ratio(piece.extent, needed) if isinstance(needed, int) and isinstance(piece.extent, int) else None
            if remainder is None or piece.dim not in channels:
                return None
            group.append(_DimPiece(piece.dim, needed))
            piece.extent, needed = remainder, 1
        groups.append(group)
        pieces += group
    for piece in pending:  # trailing units
        if piece.extent != 1:
            return None
        if piece.dim in channels:
            hidden.append(piece.dim)
        elif not groups:
            return None  # the value's shape is empty
        else:
            groups[-1].append(piece)
            pieces.append(piece)
    return _renumber_pieces(groups, pieces, hidden, len(image), axes)


def _renumber_pieces(
    groups: list[list[_DimPiece]], value_pieces: list[_DimPiece], hidden: list[int], rank: int, axes: Axes
) -> ReshapeResult | None:
    """Number the pieces as image dimensions: batch, pieces of channels, axes; ``None`` if a piece has a symbolic number of channels."""
    first_axis = rank - axes.count
    channel_pieces: list[_DimPiece] = []
    for dim in range(1, first_axis):
        dim_pieces = [piece for piece in value_pieces if piece.dim == dim]
        channel_pieces += dim_pieces or [_DimPiece(dim, 1)]
    channel_pieces += [piece for piece in value_pieces if piece.dim < 0]
    is_changed = len(channel_pieces) != first_axis - 1
    # New dimensions get the order of the value.
    order = (
        sorted(range(len(channel_pieces)), key=lambda index: _position(value_pieces, channel_pieces[index]))
        if is_changed
        else list(range(len(channel_pieces)))
    )
    number = {id(channel_pieces[index]): 1 + position for position, index in enumerate(order)}
    for piece in value_pieces:
        if piece.dim == 0:
            number[id(piece)] = 0
        elif piece.dim >= first_axis:
            number[id(piece)] = 1 + len(channel_pieces) + piece.dim - first_axis
    layout = DimLayout(tuple(tuple(number[id(piece)] for piece in group) for group in groups))
    if not all(_is_number(piece.extent) for piece in channel_pieces):
        return None
    split = tuple(int(piece.extent) for piece in channel_pieces)
    shape = tuple(split[index] for index in order)
    change = ChannelRearrangement(split=split, order=tuple(order), shape=shape) if is_changed else None
    return ReshapeResult(layout=layout, rearrangement=change)


def _is_number(extent: Extent) -> bool:
    return isinstance(extent, int) or extent.is_Integer


def _position(pieces: list[_DimPiece], target: _DimPiece) -> int:
    """Position of a piece in the value; after all pieces if it is not in it."""
    return next((place for place, piece in enumerate(pieces) if piece is target), len(pieces))


def merge_channels(layout: DimLayout, image: Sequence[Extent], axes: Axes) -> ReshapeResult | None:
    """The same value over an image with channel dimensions merged where one dimension of the value runs over several of them.

    ``None`` if no dimensions need merging. Channel dimensions in no group keep a dimension of their own.
    """
    first_axis = len(image) - axes.count
    channels = set(range(1, first_axis))
    groups = [group for group in layout.groups if group and channels.issuperset(group)]
    if all(len(group) == 1 for group in groups) or not all(map(_is_number, image[1:first_axis])):
        return None
    ungrouped = [(dim,) for dim in sorted(channels - {dim for group in groups for dim in group})]
    merged = sorted(groups, key=min) + ungrouped
    order = tuple(dim - 1 for group in merged for dim in group)
    split = tuple(int(image[dim]) for dim in range(1, first_axis))
    shape = tuple(int(_product([image[dim] for dim in group])) for group in merged)
    number = {group: 1 + index for index, group in enumerate(merged)}
    shift = 1 + len(merged) - first_axis
    merged_groups = [
        (number[group],) if group in number else tuple(dim if dim == 0 else number.get((dim,), dim + shift) for dim in group)
        for group in layout.groups
    ]
    return ReshapeResult(layout=DimLayout(tuple(merged_groups)), rearrangement=ChannelRearrangement(split=split, order=order, shape=shape))
