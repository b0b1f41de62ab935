"""Layout operators: rearrangement, repetition, assignment and shuffling of channels, and copies into slices.

Some ATen operators allocate more than the elements of their result, and are called as other functions (:data:`EXACT_STORAGE`): ``im2col``
and ``col2im`` resize a tensor of the operand's size; ``slice_scatter``, ``select_scatter`` and ``diagonal_scatter`` copy the whole storage
that their first operand is a view of: of one row of an image, all of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "EXACT_STORAGE",
    "align_dims",
    "assign_channels",
    "assign_slice",
    "constant_image",
    "copy_as",
    "expand_channels",
    "pad_channels",
    "pixel_shuffle",
    "pixel_unshuffle",
    "rearrange",
    "restore_dims",
    "select_scatter",
    "slice_scatter",
    "spatial_side_input",
]


def rearrange(self: Tensor, split: Sequence[int], order: Sequence[int], shape: Sequence[int], axes: int) -> Tensor:
    """Split the channels of each pixel, permute the factors, and merge them: a view if they are only split, a copy otherwise."""
    batch, extents = self.shape[0], self.shape[self.dim() - axes :]
    factors = self.reshape(batch, *split, *extents)
    permuted_dims = [dim for dim in order if split[dim] != 1]
    if permuted_dims == sorted(permuted_dims) and len(shape) == len(split):
        return self.reshape(batch, *shape, *extents)
    first_axis = 1 + len(split)
    permuted = factors.permute(0, *(1 + dim for dim in order), *range(first_axis, first_axis + axes))
    return permuted.clone(memory_format=torch.contiguous_format).view(batch, *shape, *extents)


def align_dims(self: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape a tensor so that its dimensions align with those of an image."""
    return self.reshape(tuple(shape))


def restore_dims(self: Tensor, order: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Permute an image to the order of dimensions of the model."""
    return self.permute(tuple(order)).clone(memory_format=torch.contiguous_format).view(tuple(shape))


def expand_channels(self: Tensor, channels: Sequence[int]) -> Tensor:
    """Expand dimensions of channels of extent 1."""
    first_axis = 1 + len(channels)
    return self.expand(self.shape[0], *channels, *self.shape[first_axis:])


def pixel_unshuffle(self: Tensor, factors: Sequence[int]) -> Tensor:
    """Space to depth: blocks of ``factors`` pixels become channels, ``[N, channels..., factors..., axes...]``."""
    first = self.dim() - len(factors)
    sizes = [size for extent, factor in zip(self.shape[first:], factors, strict=True) for size in (extent // factor, factor)]
    split = self.reshape(*self.shape[:first], *sizes)
    order = [*range(first), *range(first + 1, split.dim(), 2), *range(first, split.dim(), 2)]
    return split.permute(order).clone(memory_format=torch.contiguous_format)


def pixel_shuffle(self: Tensor, rest: Sequence[int], places: Sequence[Sequence[int]], factors: Sequence[int]) -> Tensor:
    """Depth to space: channels become rows and columns.

    Args:
        self: ``[N, channels..., axes...]``.
        rest: the dimensions of channels that stay; all further ones have extent 1 and are dropped.
        places: for each axis, the dimensions of channels merged into it, the fastest last.
        factors: for each axis, the product of their extents.
    """
    first = self.dim() - len(places)
    dropped = {*range(1, first)} - {*rest, *(dim for dims in places for dim in dims)}
    order = [0, *sorted(dropped), *rest, *(dim for axis, dims in enumerate(places) for dim in (first + axis, *dims))]
    grown = [extent * factor for extent, factor in zip(self.shape[first:], factors, strict=True)]
    moved = self.permute(order).clone(memory_format=torch.contiguous_format)
    return moved.view(self.shape[0], *([self.shape[dim] for dim in rest] or [1]), *grown)


def spatial_side_input(self: Tensor, like: Tensor, split: Sequence[int], order: Sequence[int], axes: int) -> Tensor:
    """Expand a spatial side input (a tensor that varies along axes of an image) to the size of the image ``like``."""
    image = self.view(tuple(split)).permute(tuple(order))
    first = like.dim() - axes
    return image.expand(like.shape[0], *image.shape[1:first], *like.shape[first:])


def constant_image(self: Tensor, channels: int, value: float, dtype: str, axes: int) -> Tensor:
    """An image of ``channels`` channels filled with one value, as large as ``self``."""
    return self.new_full((self.shape[0], channels, *self.shape[self.dim() - axes :]), value, dtype=getattr(torch, dtype))


def assign_slice(self: Tensor, src: Tensor, axis: int, start: int, stop: int, step: int, axes: int) -> Tensor:
    """An image with some rows, columns or slices of another one of the same size."""
    dim = self.dim() - axes + axis
    if step != 1:
        rows: Tensor = torch.ops.aten.slice.Tensor(src, dim, start, stop, step)
        return slice_scatter(self, rows, dim, start, stop, step)
    parts = [self.narrow(dim, 0, start), src.narrow(dim, start, stop - start), self.narrow(dim, stop, self.shape[dim] - stop)]
    return torch.cat(parts, dim)


def pad_channels(self: Tensor, dim: int, low: int, high: int, mode: str) -> Tensor:
    """Channels of an image padded by reflection, replication or wrapping, with at least 0 channels on each side."""
    extent = self.shape[dim]
    if mode == "reflect":
        before, after = self.narrow(dim, 1, low).flip(dim), self.narrow(dim, extent - 1 - high, high).flip(dim)
    elif mode == "replicate":
        sizes = list(self.shape)
        before, after = (
            self.narrow(dim, at, 1).expand(*sizes[:dim], count, *sizes[dim + 1 :]) for at, count in ((0, low), (extent - 1, high))
        )
    else:
        before, after = self.narrow(dim, extent - low, low), self.narrow(dim, 0, high)
    return torch.cat([before, self, after], dim)


def assign_channels(self: Tensor, src: Tensor, dim: int, start: int, stop: int, step: int, selects: bool) -> Tensor:
    """Replace channels of an image by those of another one.

    ``torch.slice_scatter`` would copy the whole storage that the image is a view of.

    Args:
        self: the image.
        src: the replacing image; without the dimension of channels if ``selects``.
        dim: the dimension of channels.
        start: the first channel to replace.
        stop: the end of the range of channels.
        step: the distance of replaced channels.
        selects: True if a single channel is replaced.
    """
    source = (src.unsqueeze(dim) if selects else src).to(self.dtype)
    channels = list(range(start, stop, step))
    if step == 1 and channels:
        slices = [self.narrow(dim, 0, start), source, self.narrow(dim, stop, self.shape[dim] - stop)]
    else:
        ends = [*channels, self.shape[dim]]
        slices = [self.narrow(dim, 0, ends[0])]
        for index, channel in enumerate(channels):
            slices += [source.narrow(dim, index, 1), self.narrow(dim, channel + 1, ends[index + 1] - channel - 1)]
    return torch.cat([each for each in slices if each.shape[dim]], dim)


def copy_as(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """``src`` in the shape and element type of ``self``: the functional form of ``self.copy_(src)``."""
    return src.to(self.dtype).expand_as(self).clone()


def slice_scatter(self: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """``torch.slice_scatter`` (the functional form of an assignment to a slice), with a derivative also for complex numbers."""
    if not self.is_complex():
        return torch.slice_scatter(self, src, dim, start, end, step)
    pairs = torch.slice_scatter(torch.view_as_real(self), torch.view_as_real(src.to(self.dtype)), dim % self.dim(), start, end, step)
    return torch.view_as_complex(pairs)


def select_scatter(self: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """``torch.select_scatter``, also for complex numbers, where torch has no derivative."""
    if not self.is_complex():
        return torch.select_scatter(self, src, dim, index)
    return torch.view_as_complex(
        torch.select_scatter(torch.view_as_real(self), torch.view_as_real(src.to(self.dtype)), dim % self.dim(), index)
    )


def _into_empty(overload: Any) -> Callable[..., Tensor]:
    def function(self: Tensor, *arguments: Any) -> Tensor:
        out: Tensor = overload(self, *arguments, out=self.new_empty(0))
        return out

    return function


def _into_view_of_clone(view: Any) -> Callable[..., Tensor]:
    def function(self: Tensor, src: Tensor, *arguments: Any) -> Tensor:
        out = self.clone()
        view(out, *arguments).copy_(src)
        return out

    return function


EXACT_STORAGE: Mapping[Any, Callable[..., Tensor]] = {
    torch.ops.aten.im2col.default: _into_empty(torch.ops.aten.im2col.out),
    torch.ops.aten.col2im.default: _into_empty(torch.ops.aten.col2im.out),
    torch.ops.aten.slice_scatter.default: _into_view_of_clone(torch.ops.aten.slice.Tensor),
    torch.ops.aten.select_scatter.default: _into_view_of_clone(torch.ops.aten.select.int),
    torch.ops.aten.diagonal_scatter.default: _into_view_of_clone(torch.ops.aten.diagonal.default),
}
"""ATen overload -> function of the same positional arguments and result."""
