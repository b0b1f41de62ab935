"""Value ranges: limits of each channel for `sft.sources.Normalized`, given, or percentiles of a bounded number of pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sft.common.errors import InputError
from sft.sources.image import Image, dtype_range, pixel_dtype
from sft.sources.views import RasterView

__all__ = ["ValueRange", "channel_numbers", "low_and_span", "percentile_range"]

#: ``(low, high)`` of all channels, or one pair a channel.
ValueRange: TypeAlias = tuple[float, float] | Sequence[tuple[float, float]]

#: Pixels that a measurement reads, about; the bound of its memory.
_MAX_PIXELS = 1 << 22
#: Rows of a block that is read.
_BLOCK_ROWS = 64


def percentile_range(image: Image, low: float = 1.0, high: float = 99.0) -> tuple[tuple[float, float], ...]:
    """Percentiles of each channel, as a `value_range` of `sft.sources.Normalized`.

    Up to four million pixels are read: all of an image of that size, otherwise the finest level that is small enough, otherwise blocks of
    rows at equal distances. Pixels of the image's ``nodata`` value and NaN do not count. A channel that marks valid pixels
    (``open_image(mask="channel")``) has the range of its type. The result depends on the image alone.

    >>> from sft.sources import ArrayImage
    >>> percentile_range(ArrayImage(np.arange(101, dtype=np.uint16)[None]), 10, 90)
    ((10.0, 90.0),)

    Args:
        image: of any kind.
        low: percentile that becomes 0. Default: 1
        high: percentile that becomes 1. Default: 99

    Raises:
        InputError: no percentiles, or a channel without a range: it has one value, or no pixel that counts.
        SourceError: the image cannot be read.
    """
    if not 0 <= low < high <= 100:
        raise InputError(f"cannot measure percentiles {low} to {high} of {image}: give 0 <= low < high <= 100.")
    pixels, nodata = _sample(image), getattr(image, "nodata", None)
    ranges, masks = [], RasterView(image).mask_channels
    for channel in range(pixels.shape[1]):
        if channel in masks:
            ranges.append((0.0, 1.0 if pixels.dtype.kind == "f" else float(dtype_range(pixels.dtype)[1])))
            continue
        values = pixels[:, channel]
        valid = np.isfinite(values) if values.dtype.kind == "f" else np.ones(len(values), np.bool_)
        values = values[valid if nodata is None else valid & (values != nodata)]
        limits = np.percentile(values, (low, high)).tolist() if len(values) else [0.0, 0.0]
        if not limits[0] < limits[1]:
            raise InputError(
                f"cannot measure percentiles {low:g} to {high:g} of channel {channel} of {image}: "
                + (f"both are {limits[0]:g}" if len(values) else f"of {len(pixels):,} pixels that were read, none has data")
                + ". Give value_range=(low, high) as numbers, or leave this channel out."
            )
        ranges.append((float(limits[0]), float(limits[1])))
    return tuple(ranges)


def _sample(image: Image) -> npt.NDArray[Any]:
    """Pixels ``[number, channels]`` of the whole image, of a level, or of blocks of rows."""
    view = RasterView(image)
    sizes = view.level_dimensions
    level = next((number for number, (w, h) in enumerate(sizes) if w * h <= _MAX_PIXELS and number in view.exact_levels), 0)
    width, height = sizes[level]
    num_blocks = -(-height // _BLOCK_ROWS)
    num_read = min(num_blocks, max(1, _MAX_PIXELS // (width * _BLOCK_ROWS)))
    blocks = np.unique(np.linspace(0, num_blocks - 1, num_read).round().astype(np.int64)).tolist()
    pieces = [view.read(0, top, width, min(_BLOCK_ROWS, height - top), level) for top in (block * _BLOCK_ROWS for block in blocks)]
    return np.concatenate([piece.reshape(-1, piece.shape[2]) for piece in pieces]).astype(pixel_dtype(image), copy=False)


def low_and_span(value_range: ValueRange, num_channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Lower ends and extents of the value range of each channel.

    >>> low_and_span((100, 600), 2), low_and_span([(0, 1), (2, 4)], 2)
    (((100.0, 100.0), (500.0, 500.0)), ((0.0, 2.0), (1.0, 2.0)))
    """
    try:
        pairs = np.asarray(value_range, np.float64)
        pairs = np.broadcast_to(pairs, (num_channels, 2)) if pairs.shape == (2,) else pairs
    except (TypeError, ValueError):
        pairs = np.empty(0)
    if pairs.shape != (num_channels, 2) or not np.isfinite(pairs).all() or not (pairs[:, 1] > pairs[:, 0]).all():
        raise InputError(
            f"cannot normalise with value_range={value_range!r}: give (low, high) with low < high, or one such pair for each of the "
            f"{num_channels} channels."
        )
    return tuple(pairs[:, 0].tolist()), tuple((pairs[:, 1] - pairs[:, 0]).tolist())


def channel_numbers(name: str, values: Sequence[float] | None, default: float, num_channels: int) -> tuple[float, ...]:
    """The values of a setting with one number a channel, `default` for each if there are none."""
    if values is None:
        return (default,) * num_channels
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot normalise with {name} {values!r}: expected {num_channels} numbers, one a channel.") from error
    if len(numbers) != num_channels:
        raise InputError(
            f"cannot normalise with {name} {numbers}: these are {len(numbers)} values for {num_channels} channels. Give one a channel."
        )
    return tuple(math.copysign(0.0, 1.0) if number == 0 else number for number in numbers)  # x - -0.0 is not x for x = -0.0
