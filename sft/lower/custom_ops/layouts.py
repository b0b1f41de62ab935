"""Other orders and numbers of channels, and where their elements are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "align_dims",
    "assign_channels",
    "constant_image",
    "copy_as",
    "expand_channels",
    "pixel_shuffle",
    "pixel_unshuffle",
    "rearrange",
    "restore_dims",
    "select_scatter",
    "slice_scatter",
    "spatial_side_input",
]


def rearrange(self: Tensor, split: Sequence[int], order: Sequence[int], shape: Sequence[int], axes: int) -> Tensor:
    """The channels of each pixel split, put into another order, and merged: a view where they are only split, else a copy."""
    batch, extents = self.shape[0], self.shape[self.dim() - axes :]
    parts = self.reshape(batch, *split, *extents)
    moved_places = [place for place in order if split[place] != 1]
    if moved_places == sorted(moved_places) and len(shape) == len(split):
        return self.reshape(batch, *shape, *extents)
    first_axis = 1 + len(split)
    moved = parts.permute(0, *(1 + place for place in order), *range(first_axis, first_axis + axes))
    return moved.clone(memory_format=torch.contiguous_format).view(batch, *shape, *extents)


def align_dims(self: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor with its dimensions where those of an image are."""
    return self.reshape(tuple(shape))


def restore_dims(self: Tensor, order: Sequence[int], shape: Sequence[int]) -> Tensor:
    """An image in the order of dimensions that the model has it in."""
    return self.permute(tuple(order)).clone(memory_format=torch.contiguous_format).view(tuple(shape))


def expand_channels(self: Tensor, channels: Sequence[int]) -> Tensor:
    """Channels repeated."""
    first_axis = 1 + len(channels)
    return self.expand(self.shape[0], *channels, *self.shape[first_axis:])


def pixel_unshuffle(self: Tensor, factors: Sequence[int]) -> Tensor:
    """``factors`` rows and columns of an image as channels, ``[N, channels..., factors..., axes...]``."""
    first = self.dim() - len(factors)
    pieces = [piece for extent, factor in zip(self.shape[first:], factors, strict=True) for piece in (extent // factor, factor)]
    split = self.reshape(*self.shape[:first], *pieces)
    order = [*range(first), *range(first + 1, split.dim(), 2), *range(first, split.dim(), 2)]
    return split.permute(order).clone(memory_format=torch.contiguous_format)


def pixel_shuffle(self: Tensor, rest: Sequence[int], places: Sequence[Sequence[int]], factors: Sequence[int]) -> Tensor:
    """Channels as rows and columns.

    Args:
        self: ``[N, channels..., axes...]``.
        rest: the dimensions of channels that stay; others have one entry, and go.
        places: for each axis those that it takes in, the fastest last.
        factors: their product.
    """
    first = self.dim() - len(places)
    gone = {*range(1, first)} - {*rest, *(dim for taken in places for dim in taken)}
    order = [0, *sorted(gone), *rest, *(dim for axis, taken in enumerate(places) for dim in (first + axis, *taken))]
    grown = [extent * factor for extent, factor in zip(self.shape[first:], factors, strict=True)]
    moved = self.permute(order).clone(memory_format=torch.contiguous_format)
    return moved.view(self.shape[0], *([self.shape[dim] for dim in rest] or [1]), *grown)


def spatial_side_input(self: Tensor, like: Tensor, split: Sequence[int], order: Sequence[int], axes: int) -> Tensor:
    """What varies along an image, as an image of that one's size."""
    part = self.view(tuple(split)).permute(tuple(order))
    first = like.dim() - axes
    return part.expand(like.shape[0], *part.shape[1:first], *like.shape[first:])


def constant_image(self: Tensor, channels: int, value: float, dtype: str) -> Tensor:
    """So many channels of one value, as large as an image."""
    return self.new_full((self.shape[0], channels, *self.shape[2:]), value, dtype=getattr(torch, dtype))


def assign_channels(self: Tensor, src: Tensor, dim: int, start: int, stop: int, step: int, selects: bool) -> Tensor:
    """An image of which some channels are another's; ``torch.slice_scatter`` copies all that the image is a view of.

    Args:
        self: the image.
        src: the other image; without the dimension where ``selects``.
        dim: of channels.
        start: the first channel that is replaced.
        stop: behind the last.
        step: from one to the next.
        selects: whether a single channel was named.
    """
    given = (src.unsqueeze(dim) if selects else src).to(self.dtype)
    places = list(range(start, stop, step))
    if step == 1 and places:
        parts = [self.narrow(dim, 0, start), given, self.narrow(dim, stop, self.shape[dim] - stop)]
    else:
        ends = [*places, self.shape[dim]]
        parts = [self.narrow(dim, 0, ends[0])]
        for at, place in enumerate(places):
            parts += [given.narrow(dim, at, 1), self.narrow(dim, place + 1, ends[at + 1] - place - 1)]
    return torch.cat([part for part in parts if part.shape[dim]], dim)


def copy_as(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """``src`` in the shape and element type of ``self``: what an assignment in place comes to."""
    return src.to(self.dtype).expand_as(self).clone()


def slice_scatter(self: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """``torch.slice_scatter``, which has no derivative for complex numbers: what an assignment to a part in place comes to."""
    if not self.is_complex():
        return torch.slice_scatter(self, src, dim, start, end, step)
    pairs = torch.slice_scatter(torch.view_as_real(self), torch.view_as_real(src.to(self.dtype)), dim % self.dim(), start, end, step)
    return torch.view_as_complex(pairs)


def select_scatter(self: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """``torch.select_scatter``, likewise."""
    if not self.is_complex():
        return torch.select_scatter(self, src, dim, index)
    return torch.view_as_complex(
        torch.select_scatter(torch.view_as_real(self), torch.view_as_real(src.to(self.dtype)), dim % self.dim(), index)
    )
