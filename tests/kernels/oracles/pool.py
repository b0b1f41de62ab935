"""Pools of a tile in plain PyTorch, tap by tap: the oracle of the kernels, bit for bit in fp32.

A maximum ignores rows that are not data. An average reads them as zeros; they count as elements by PyTorch's rule: inside of the padding,
and only if padding counts.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from sft.kernels.geometry import Geometry, TileAxis
from sft.kernels.pool.taps import TAPS_PER_BYTE

__all__ = ["pack_taps", "reference_average_pool", "reference_average_pool_gradient", "reference_max_pool"]


def reference_max_pool(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The maxima, and the number of the tap of each, uint8, not packed: the first of equal elements; NaN is the largest."""
    padded = _padded_input(x, geometry, float("-inf"))
    is_data = _padded_input(torch.ones_like(x[:1, :1]), geometry) > 0
    best = taps = None
    for number, (rows, columns) in enumerate(_tap_views(geometry, geometry.output_size)):
        value, valid = padded[:, :, rows, columns], is_data[:, :, rows, columns]
        if best is None or taps is None:
            best, taps = value.clone(), torch.where(valid, 0, 255).to(torch.uint8).expand_as(value).clone()
            continue
        take = valid & ((taps == 255) | (value > best) | value.isnan())
        best, taps = torch.where(take, value, best), torch.where(take, number, taps).to(torch.uint8)
    assert best is not None and taps is not None  # a window has at least one tap
    return best, torch.where(taps == 255, 0, taps)


def reference_average_pool(x: Tensor, geometry: Geometry, *, count_padding: bool, divisor: int | None) -> Tensor:
    """The averages."""
    padded = _padded_input(x, geometry).to(_wide(x))
    total = torch.zeros(*x.shape[:2], *geometry.output_size, dtype=padded.dtype, device=x.device)
    for rows, columns in _tap_views(geometry, geometry.output_size):
        total += padded[:, :, rows, columns]
    return (total / _counts(geometry, total, (0, 0), count_padding, divisor)).to(x.dtype)


def reference_average_pool_gradient(gradient: Tensor, geometry: Geometry, *, count_padding: bool, divisor: int | None) -> Tensor:
    """The gradient of the input buffer."""
    (top, _), (left, _) = spans = (geometry.height.output.data, geometry.width.output.data)
    view = _data_view(gradient, spans).to(_wide(gradient))
    share = view / _counts(geometry, view, (top, left), count_padding, divisor)
    return _scatter_taps([share] * (geometry.kernel[0] * geometry.kernel[1]), geometry).to(gradient.dtype)


def _count_bounds(axis: TileAxis, count_padding: bool) -> tuple[int, int]:
    """Rows of the input buffer, as a half-open range of its coordinates, that count towards the number of elements."""
    padding = axis.window.padding if count_padding else 0
    return -axis.input.start - padding, axis.input.extent - axis.input.start + padding


def pack_taps(taps: Tensor) -> Tensor:
    """Numbers below 4 of four neighbouring channels in one byte, the first in the lowest bits: ``[N, ceil(C / 4), h, w]``."""
    num_samples, num_channels, height, width = taps.shape
    groups = -(-num_channels // TAPS_PER_BYTE)
    padded = taps.new_zeros(num_samples, groups * TAPS_PER_BYTE, height, width)
    padded[:, :num_channels] = taps
    codes = padded.view(num_samples, groups, TAPS_PER_BYTE, height, width).unbind(2)
    return codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6


def _data_view(tensor: Tensor, spans: tuple[tuple[int, int], ...]) -> Tensor:
    """View of the rows and columns of a buffer that are data, given as half-open ranges."""
    return tensor[(slice(None), slice(None), *(slice(low, high) for low, high in spans))]


def _padded_input(x: Tensor, geometry: Geometry, value: float = 0.0) -> Tensor:
    """Rows and columns that the output's windows read, with ``value`` outside the data."""
    pads: list[int] = []
    for axis in reversed(geometry.axes):
        low, high = axis.input.data
        first, last = axis.window.reads(0, axis.output.size)
        offset = axis.shift + axis.window.padding
        pads += [low - (first + offset), (last + offset) - high]
    return F.pad(_data_view(x, tuple(axis.input.data for axis in geometry.axes)), pads, value=value)


def _fold_windows(spread: Tensor, geometry: Geometry) -> Tensor:
    """Crop and pad sums over the rows that the output's data rows read to the input buffer; zero in rows that are not data."""
    to_data: list[int] = []
    to_buffer: list[int] = []
    for axis in reversed(geometry.axes):
        low, high = axis.input.data
        first, last = axis.window.reads(*axis.output.data)
        offset = axis.shift + axis.window.padding
        to_data += [first + offset - low, high - (last + offset)]
        to_buffer += [low, axis.input.size - high]
    return F.pad(F.pad(spread, to_data), to_buffer)


def _tap_views(geometry: Geometry, size: tuple[int, int]) -> list[tuple[slice, slice]]:
    """For each tap the part of the padded input that it takes for ``size`` outputs."""
    views = [
        [slice(tap * w.dilation, tap * w.dilation + (count - 1) * w.stride + 1, w.stride) for tap in range(w.kernel)]
        for w, count in zip((geometry.height.window, geometry.width.window), size, strict=True)
    ]
    return list(itertools.product(views[0], views[1]))


def _scatter_taps(shares: list[Tensor], geometry: Geometry) -> Tensor:
    """Contribution of each tap to the rows that it reads, summed in the input buffer in fp32 at least."""
    first = shares[0]
    if not first.numel() or any(axis.input.data[1] == 0 for axis in geometry.axes):
        return first.new_zeros(*first.shape[:2], *geometry.input_size)
    ranges = [axis.window.reads(0, count) for axis, count in zip(geometry.axes, first.shape[2:], strict=True)]
    spread = torch.zeros(*first.shape[:2], *(stop - start for start, stop in ranges), dtype=_wide(first), device=first.device)
    for (rows, columns), share in zip(_tap_views(geometry, (first.shape[2], first.shape[3])), shares, strict=True):
        spread[:, :, rows, columns] += share
    return _fold_windows(spread, geometry).to(first.dtype)


def _counts(geometry: Geometry, like: Tensor, start: tuple[int, int], count_padding: bool, divisor: int | None) -> Tensor:
    """Divisor of the sum of each output, from output ``start`` of the buffer on."""
    if divisor is not None:
        return torch.full_like(like[:1, :1], divisor)
    counts = []
    for axis, offset, size in zip(geometry.axes, start, like.shape[2:], strict=True):
        low, high = _count_bounds(axis, count_padding)
        first = (torch.arange(size, device=like.device) + offset) * axis.window.stride + axis.shift
        counts.append((first + axis.window.kernel).clamp(max=high) - first.clamp(min=low))
    return (counts[0][:, None] * counts[1]).to(like.dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
