"""How a value's dimensions, as the model sees them, lie in an image: permutations and reshapes followed without moving anything.

A model may hold its image with channels last (``permute(0, 2, 3, 1)``), as a list of pixels (``flatten(2).transpose(1, 2)``), or with its
channels in groups (``view(n, g, c // g, h, w)``). The image itself is kept in one order, ``[N, channels..., axes...]``
(:mod:`sft.analysis.ir.axes`); a :class:`DimLayout` says of each dimension of the model's value which dimensions of the image it runs over,
the last one fastest. Permuting a value only permutes its layout; reshaping one regroups it. Only where channels are split or merged does
the image change: into other dimensions of channels, pixel by pixel.
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
    """For each dimension of the model's value the image's dimensions that it runs over; dimensions of extent 1 may be in none."""

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def plain(cls, rank: int) -> DimLayout:
        """The image as it is."""
        return cls(tuple((dim,) for dim in range(rank)))

    @property
    def is_plain(self) -> bool:
        """Whether the value is the image as it is."""
        return self == DimLayout.plain(len(self.groups))

    def permuted(self, order: Sequence[int]) -> DimLayout:
        """The layout after ``permute(order)``.

        >>> DimLayout.plain(4).permuted((0, 2, 3, 1))
        Layout(groups=((0,), (2,), (3,), (1,)))
        """
        return DimLayout(tuple(self.groups[dim % len(self.groups)] for dim in order))

    def place(self, dim: int) -> int | None:
        """The image's dimension that a dimension is, ``None`` if it is not just one."""
        group = self.groups[dim % len(self.groups)]
        return group[0] if len(group) == 1 else None

    def shape(self, image: Sequence[Extent]) -> tuple[Extent, ...]:
        """The value's shape, given the image's."""
        return tuple(_product([image[dim] for dim in group]) for group in self.groups)

    def channels_merged_into_axes(self, first_axis: int) -> tuple[tuple[int, ...], ...] | None:
        """For each axis of the image the channels that the value has as its pixels; ``None`` if none has, or anything is not in order.

        >>> DimLayout(((0,), (1,), (4, 2), (5, 3))).channels_merged_into_axes(4)
        ((2,), (3,))
        """
        found = {group[0]: group[1:] for group in self.groups if group and group[0] >= first_axis}
        others = [dim for group in self.groups if not group or group[0] < first_axis for dim in group]
        is_taken = [all(0 < dim < first_axis for dim in taken) for taken in found.values()]
        if any(dim >= first_axis for dim in others) or not all(is_taken) or not any(found.values()):
            return None
        rank = max(found) + 1
        return tuple(found.get(axis, ()) for axis in range(first_axis, rank)) if len(found) == rank - first_axis else None

    def without(self, dims: Sequence[int]) -> DimLayout:
        """The layout once some of the image's dimensions are gone, which are groups of their own (or in none)."""
        gone = set(dims)
        shift = {dim: dim - sum(other < dim for other in gone) for group in self.groups for dim in group}
        return DimLayout(tuple(tuple(shift[dim] for dim in group) for group in self.groups if not gone.intersection(group)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRearrangement:
    """What happens to the channels of every pixel: split into ``split``, put into ``order``, merged into ``shape``."""

    split: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshapeResult:
    """A reshaped value: its layout, and how the image has to be rearranged first, if at all."""

    layout: DimLayout
    rearrangement: ChannelRearrangement | None


@dataclass(slots=True)
class _DimPiece:
    """A piece of one of the image's dimensions."""

    dim: int
    extent: Extent


def _product(extents: Sequence[Extent]) -> Extent:
    total: Extent = 1
    for extent in extents:
        total = total * extent
    return total


def _ratio(whole: Extent, part: Extent) -> Extent | None:
    """``whole / part`` where that is a whole number for every size of the image."""
    if isinstance(whole, int) and isinstance(part, int):
        return whole // part if whole % part == 0 else None
    ratio = sp.cancel(sp.sympify(whole) / sp.sympify(part))
    if ratio.is_integer is not True:
        return None
    return int(ratio) if ratio.is_number else ratio


def reshape_layout(layout: DimLayout, image: Sequence[Extent], shape: Sequence[Extent], axes: Axes) -> ReshapeResult | None:
    """The value of this layout reshaped to ``shape``; ``None`` where an axis of the image, or the batch, would be split.

    >>> shuffled = reshape_layout(DimLayout.plain(4), (2, 6, 8, 9), (2, 3, 2, 8, 9), Axes(2))
    >>> shuffled.layout, shuffled.rearrangement.shape
    (Layout(groups=((0,), (1,), (2,), (3,), (4,))), (3, 2))
    >>> reshape_layout(DimLayout.plain(4), (2, 6, 8, 9), (2, 6, 72), Axes(2)).layout
    Layout(groups=((0,), (1,), (2, 3)))
    """
    channels = range(1, len(image) - axes.count)
    parts: list[_DimPiece] = []  # pieces of the image's dimensions, in the order of the value
    groups: list[list[_DimPiece]] = []
    waiting = [_DimPiece(dim, image[dim]) for group in layout.groups for dim in group][::-1]
    hidden = [dim for dim in channels if not any(dim in group for group in layout.groups)]
    added: list[_DimPiece] = []
    for size in shape:
        group: list[_DimPiece] = []
        need: Extent = size
        if need == 1:
            if waiting and waiting[-1].extent == 1:
                group.append(waiting.pop())
            elif hidden:
                group.append(_DimPiece(hidden.pop(0), 1))
            else:
                added.append(_DimPiece(-1 - len(added), 1))
                group.append(added[-1])
        while need != 1:
            if not waiting:
                return None
            part = waiting[-1]
            if part.extent == 1 and part.dim in channels:
                hidden.append(waiting.pop().dim)
                continue
            ratio = _ratio(need, part.extent)
            if ratio is not None:
                group.append(waiting.pop())
                need = ratio
                continue
            rest = _ratio(part.extent, need) if isinstance(need, int) and isinstance(part.extent, int) else None
            if rest is None or part.dim not in channels:
                return None
            group.append(_DimPiece(part.dim, need))
            part.extent, need = rest, 1
        groups.append(group)
        parts += group
    for part in waiting:  # trailing units
        if part.extent != 1:
            return None
        if part.dim in channels:
            hidden.append(part.dim)
        elif not groups:
            return None  # nothing is left of the value's shape
        else:
            groups[-1].append(part)
            parts.append(part)
    return _renumber_pieces(groups, parts, hidden, len(image), axes)


def _renumber_pieces(
    groups: list[list[_DimPiece]], parts: list[_DimPiece], hidden: list[int], rank: int, axes: Axes
) -> ReshapeResult | None:
    """Number the pieces anew: batch, pieces of channels, axes; ``None`` where how many channels a piece has depends on the image's size."""
    first_axis = rank - axes.count
    pieces: list[_DimPiece] = []
    for dim in range(1, first_axis):
        found = [part for part in parts if part.dim == dim]
        pieces += found or [_DimPiece(dim, 1)]
    pieces += [part for part in parts if part.dim < 0]
    is_changed = len(pieces) != first_axis - 1
    # New dimensions come in the order that the value has them in.
    order = sorted(range(len(pieces)), key=lambda place: _position(parts, pieces[place])) if is_changed else list(range(len(pieces)))
    number = {id(pieces[place]): 1 + at for at, place in enumerate(order)}
    for part in parts:
        if part.dim == 0:
            number[id(part)] = 0
        elif part.dim >= first_axis:
            number[id(part)] = 1 + len(pieces) + part.dim - first_axis
    layout = DimLayout(tuple(tuple(number[id(part)] for part in group) for group in groups))
    if not all(_is_number(part.extent) for part in pieces):
        return None
    split = tuple(int(part.extent) for part in pieces)
    shape = tuple(split[place] for place in order)
    change = ChannelRearrangement(split=split, order=tuple(order), shape=shape) if is_changed else None
    return ReshapeResult(layout=layout, rearrangement=change)


def _is_number(extent: Extent) -> bool:
    return isinstance(extent, int) or extent.is_Integer


def _position(parts: list[_DimPiece], piece: _DimPiece) -> int:
    """Where a piece stands in the value; behind everything if it does not."""
    return next((place for place, part in enumerate(parts) if part is piece), len(parts))


def merge_channels(layout: DimLayout, image: Sequence[Extent], axes: Axes) -> ReshapeResult | None:
    """The same value over an image whose channels are merged where one of the value's dimensions runs over several of them.

    ``None`` where there is nothing to merge. What is left of dimensions in no group goes into the first dimension of channels.
    """
    first_axis = len(image) - axes.count
    channels = set(range(1, first_axis))
    groups = [group for group in layout.groups if group and channels.issuperset(group)]
    if all(len(group) == 1 for group in groups) or not all(map(_is_number, image[1:first_axis])):
        return None
    loose = [(dim,) for dim in sorted(channels - {dim for group in groups for dim in group})]
    placed = sorted(groups, key=min) + loose
    order = tuple(dim - 1 for group in placed for dim in group)
    split = tuple(int(image[dim]) for dim in range(1, first_axis))
    shape = tuple(int(_product([image[dim] for dim in group])) for group in placed)
    number = {group: 1 + place for place, group in enumerate(placed)}
    shift = 1 + len(placed) - first_axis
    found = [
        (number[group],) if group in number else tuple(dim if dim == 0 else number.get((dim,), dim + shift) for dim in group)
        for group in layout.groups
    ]
    return ReshapeResult(layout=DimLayout(tuple(found)), rearrangement=ChannelRearrangement(split=split, order=order, shape=shape))
