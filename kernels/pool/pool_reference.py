"""Pools of a tile in plain PyTorch, tap by tap: what the kernels must equal, bit for bit in fp32.

Rows that are not data count as nothing for the maximum. For the average they count as zero, and towards the number of
elements only as PyTorch has it: within the padding, and only where padding counts at all.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from sft.kernels.conv.conv_reference import data_view, fold_windows, padded_input
from sft.kernels.geometry import Geometry, TileAxis

__all__ = ["CODES_PER_BYTE", "count_bounds", "pack_taps", "reference_average_pool", "reference_average_pool_gradient"]
__all__ += ["reference_max_pool", "reference_max_pool_gradient", "unpack_taps"]

#: taps of windows of at most four elements take two bits
CODES_PER_BYTE = 4


def reference_max_pool(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The maxima, and for each the number of the tap that it came from, uint8, not packed. The first of equals; NaN beats all."""
    padded = padded_input(x, geometry, float("-inf"))
    is_data = padded_input(torch.ones_like(x[:1, :1]), geometry) > 0
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


def reference_max_pool_gradient(gradient: Tensor, taps: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of the input buffer; ``taps`` as ``reference_max_pool`` has them."""
    spans = (geometry.height.output.data, geometry.width.output.data)
    part, chosen = data_view(gradient, spans), data_view(taps, spans)
    return _scatter_taps([torch.where(chosen == number, part, 0) for number in range(geometry.kernel[0] * geometry.kernel[1])], geometry)


def reference_average_pool(x: Tensor, geometry: Geometry, *, count_padding: bool, divisor: int | None) -> Tensor:
    """The averages."""
    padded = padded_input(x, geometry).to(_wide(x))
    total = torch.zeros(*x.shape[:2], *geometry.output_size, dtype=padded.dtype, device=x.device)
    for rows, columns in _tap_views(geometry, geometry.output_size):
        total += padded[:, :, rows, columns]
    return (total / _counts(geometry, total, (0, 0), count_padding, divisor)).to(x.dtype)


def reference_average_pool_gradient(gradient: Tensor, geometry: Geometry, *, count_padding: bool, divisor: int | None) -> Tensor:
    """The gradient of the input buffer."""
    (top, _), (left, _) = spans = (geometry.height.output.data, geometry.width.output.data)
    part = data_view(gradient, spans).to(_wide(gradient))
    share = part / _counts(geometry, part, (top, left), count_padding, divisor)
    return _scatter_taps([share] * (geometry.kernel[0] * geometry.kernel[1]), geometry).to(gradient.dtype)


def count_bounds(axis: TileAxis, count_padding: bool) -> tuple[int, int]:
    """Rows of the input buffer, as a half-open range of its coordinates, that count towards the number of elements."""
    padding = axis.window.padding if count_padding else 0
    return -axis.input.start - padding, axis.input.extent - axis.input.start + padding


def pack_taps(taps: Tensor) -> Tensor:
    """Numbers below 4 of four neighbouring channels in one byte, the first in the lowest bits: ``[N, ceil(C / 4), h, w]``."""
    num_samples, num_channels, height, width = taps.shape
    groups = -(-num_channels // CODES_PER_BYTE)
    padded = taps.new_zeros(num_samples, groups * CODES_PER_BYTE, height, width)
    padded[:, :num_channels] = taps
    parts = padded.view(num_samples, groups, CODES_PER_BYTE, height, width).unbind(2)
    return parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6


def unpack_taps(packed: Tensor, num_channels: int) -> Tensor:
    """The inverse of ``pack_taps``."""
    return torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1, 2)[:, :num_channels]


def _tap_views(geometry: Geometry, size: tuple[int, int]) -> list[tuple[slice, slice]]:
    """For each tap the part of the padded input that it takes for ``size`` outputs."""
    parts = [
        [slice(tap * w.dilation, tap * w.dilation + (count - 1) * w.stride + 1, w.stride) for tap in range(w.kernel)]
        for w, count in zip((geometry.height.window, geometry.width.window), size, strict=True)
    ]
    return list(itertools.product(parts[0], parts[1]))


def _scatter_taps(shares: list[Tensor], geometry: Geometry) -> Tensor:
    """What each tap has to give to the rows that it reads, added up in the input buffer in fp32 at least."""
    first = shares[0]
    if not first.numel() or any(axis.input.data[1] == 0 for axis in geometry.axes):
        return first.new_zeros(*first.shape[:2], *geometry.input_size)
    ranges = [axis.window.reads(0, count) for axis, count in zip(geometry.axes, first.shape[2:], strict=True)]
    spread = torch.zeros(*first.shape[:2], *(stop - start for start, stop in ranges), dtype=_wide(first), device=first.device)
    for (rows, columns), share in zip(_tap_views(geometry, (first.shape[2], first.shape[3])), shares, strict=True):
        spread[:, :, rows, columns] += share
    return fold_windows(spread, geometry).to(first.dtype)


def _counts(geometry: Geometry, like: Tensor, start: tuple[int, int], count_padding: bool, divisor: int | None) -> Tensor:
    """What the sum of each output is divided by, from output ``start`` of the buffer on."""
    if divisor is not None:
        return torch.full_like(like[:1, :1], divisor)
    counts = []
    for axis, offset, size in zip(geometry.axes, start, like.shape[2:], strict=True):
        low, high = count_bounds(axis, count_padding)
        first = (torch.arange(size, device=like.device) + offset) * axis.window.stride + axis.shift
        counts.append((first + axis.window.kernel).clamp(max=high) - first.clamp(min=low))
    return (counts[0][:, None] * counts[1]).to(like.dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
