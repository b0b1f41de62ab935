"""Window operators: im2col and col2im, overlap-add of transposed convolutions, circular padding, 1-d unpooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sft.analysis.ir.ops.transposed import TransposedWindow
from sft.common.interval import Interval

__all__ = ["border_rows", "circular_pad", "col2im", "im2col", "kernel_rows", "max_unpool1d", "overlap_add"]


def max_unpool1d(self: Tensor, indices: Tensor, output_size: Sequence[int], factors: Sequence[int] | None) -> Tensor:
    """``max_unpool1d`` by ``max_unpool2d``."""
    size = [*output_size, 1]
    out: Tensor = torch.ops.aten.max_unpool2d.default(self.unsqueeze(-1), indices.unsqueeze(-1), size)
    return out.squeeze(-1)


def border_rows(self: Tensor, low: int, high: int, axes: int) -> Tensor:
    """The last ``low`` rows of an image followed by its first ``high``; of an image with fewer rows, which repeat."""
    dim = self.dim() - axes
    rows = self.shape[dim]
    if max(low, high) > rows:
        return torch.cat([self.narrow(dim, row % rows, 1) for row in (*range(-low, 0), *range(high))], dim)
    return torch.cat([self.narrow(dim, rows - low, low), self.narrow(dim, 0, high)], dim)


def circular_pad(self: Tensor, border: Tensor, low: int, high: int, axes: int) -> Tensor:
    """Pad an image with the rows of :func:`border_rows`: the first ``low`` above, the remaining ``high`` below."""
    dim = self.dim() - axes
    return torch.cat([border.narrow(dim, 0, low), self, border.narrow(dim, low, high)], dim)


def kernel_rows(self: Tensor) -> Tensor:
    """A kernel ``[Cin, Cout, kh, ...]`` with its rows as output channels, ``[Cin, kh * Cout, 1, ...]``."""
    inputs, channels, kernel, *rest = self.shape
    return self.movedim(2, 1).reshape(inputs, kernel * channels, 1, *rest)


def overlap_add(self: Tensor, bias: Tensor | None, groups: int, spread: Sequence[Sequence[Any]]) -> Tensor:
    """Overlap-add: the products with :func:`kernel_rows`, each row of the kernel shifted to its output row, and summed."""
    along = TransposedWindow(**{name: value for name, value in spread})
    batch, channels, rows, *rest = self.shape
    products = self.reshape(batch, groups, along.kernel, channels // along.kernel // groups, rows, *rest)
    extent = along.extent(rows)
    out = products.new_zeros((batch, groups, products.shape[3], extent, *rest))
    for tap, (first, count, start) in enumerate(along.tap_ranges(Interval(0, rows), Interval(0, extent))):
        if count:
            index = torch.arange(start, start + along.stride * (count - 1) + 1, along.stride, device=self.device)
            out = out.index_add(3, index, products[:, :, tap].narrow(3, first, count))
    out = out.reshape(batch, channels // along.kernel, extent, *rest)
    return out if bias is None else out + bias.reshape(-1, *[1] * (out.dim() - 2))


def im2col(self: Tensor, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int], channels: Sequence[int]) -> Tensor:
    """Windows of an image ``[N, channels..., axes...]``, with the pixels of a window as the fastest channels."""
    first = self.dim() - len(kernel_size)
    for axis, (kernel, step, spacing) in reversed(list(enumerate(zip(kernel_size, stride, dilation, strict=True)))):
        # Window pixels along later axes already precede the axes.
        dim = axis - len(kernel_size)
        count = (self.shape[dim] - spacing * (kernel - 1) - 1) // step + 1
        indices = [torch.arange(count, device=self.device) * step + spacing * tap for tap in range(kernel)]
        self = torch.stack([self.index_select(dim, index) for index in indices], first)
    return self.reshape(self.shape[0], *channels, *self.shape[self.dim() - len(kernel_size) :])


def col2im(self: Tensor, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """The sum of windows ``[N, C * kernel..., axes...]`` at their positions in the image."""
    batch, channels, *counts = self.shape
    self = self.reshape(batch, channels // math.prod(kernel_size), *kernel_size, *counts)
    for axis, (kernel, step, spacing) in enumerate(zip(kernel_size, stride, dilation, strict=True)):
        dim, count = axis - len(kernel_size), self.shape[axis - len(kernel_size)]
        extent = (count - 1) * step + spacing * (kernel - 1) + 1
        sums = self.new_zeros((*self.shape[:2], *self.shape[3:dim], extent, *self.shape[self.dim() + dim + 1 :]))
        for tap in range(kernel):
            index = torch.arange(count, device=self.device) * step + spacing * tap
            sums = sums.index_add(dim, index, self.select(2, tap))
        self = sums
    return self
