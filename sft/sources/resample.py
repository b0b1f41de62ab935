"""Images at a resolution in micrometres per pixel, from any set of levels.

Models are trained at a resolution; level numbers mean another one in every file. The rule:

1. Of the levels at least as fine as the requested resolution, the coarsest is read. A resolution finer than the finest level is an
error:
   no pixels are invented. (OpenSlide interpolates levels that are not reduced by an integer factor; those are not read through it.)
2. A level within 1 % of the requested resolution *has* it, and its pixels are used unchanged. (The resolution in a file is a calibration
of
   about three digits: 0.499 is a scanner's 0.5.)
3. Otherwise the level is reduced by area: an output pixel is the mean of the input pixels under it, rounded half up. The scale s = p/q
(input
   pixels per output pixel and axis) is the quotient of the resolutions: an integer if one is within 1 % of it, else the nearest fraction
   with q <= 1000. ``mpp`` states the result. Output pixel i covers [i s, (i + 1) s), counted from the image's top left corner; the image
   has floor(size / s) of them, so each is a full mean.

*Any order, the same bits.* In units of 1/q of a pixel all borders are integers. The weighted sums are therefore integers, which floating
point adds without rounding (float32 below 2^24, float64 below 2^53) in any order: a rectangle read alone equals that part of the full
image.

Floating-point pixels are added in float64 in the order of their rows and columns, and rounded once, so their bits do not depend on the
rectangle either.

Writers round the sizes of levels. A level of floor or ceil(size / n) px counts as reduced by exactly n, any other by the quotient of the
sizes. Pixels that are not square (another resolution in x than in y) become square.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from sft.common.errors import InputError
from sft.common.interval import Interval
from sft.sources.georeference import Georeference
from sft.sources.image import Image, Pixels, Raster, Rectangle, Size, dtype_range
from sft.sources.row_blocks import RowBlocks
from sft.sources.views import AtLevel, OneLevelView, RasterView, resolve_mpp

__all__ = ["MPP_TOLERANCE", "Resampled", "at_mpp", "level_scale"]

#: Relative difference up to which two resolutions are the same.
MPP_TOLERANCE = 0.01
_MAX_DENOMINATOR = 1000
#: Pixels that are summed at a time, about.
_PIECE_BYTES = 1 << 20
#: Integers below these are exact in float64 and float32, with room for the division.
_MAX_SUM, _MAX_SUM_32 = 2**50, 2**22

Sums = npt.NDArray[np.floating]


def at_mpp(image: Raster, mpp: float) -> Raster:
    """An image at a resolution: its nearest level that is at least as fine, reduced by area where that is finer by more than 1 %.

    Args:
        image: with ``mpp``; its levels are used.
        mpp: micrometres per px, in x and in y.

    Raises:
        InputError: the image does not say its resolution, or is coarser than that.
        SourceError: it cannot be opened.
    """
    number: Any = mpp
    if not isinstance(number, Real):
        raise InputError(f"cannot read {image} at mpp {mpp!r}: give one number, which holds in x and in y.")
    (wanted, _) = resolve_mpp(float(mpp), "mpp")
    if image.mpp is None:
        if RasterView(image).georeference is not None:
            raise InputError(
                f"cannot read {image} at {wanted:g} µm/px: its map coordinates have no size in metres, such as degrees. Warp it to a "
                "projected system (gdalwarp -t_srs), or say what a pixel of its largest level measures: slide_mpp=10e6 for 10 m."
            )
        why = RasterView(image).mpp_note or "the file does not say its resolution"
        raise InputError(
            f"cannot read {image} at {wanted:g} µm/px: {why}. Say what a pixel of its largest level measures: slide_mpp=0.25 (40x), 0.5 "
            "(20x), ... as the scanner has it."
        )
    best: tuple[int, tuple[Fraction, Fraction]] | None = None
    for level in RasterView(image).exact_levels:
        downsample = level_scale(image.level_dimensions[0], image.level_dimensions[level])
        if all(own * float(factor) <= wanted * (1 + MPP_TOLERANCE) for own, factor in zip(image.mpp, downsample, strict=True)):
            best = (level, downsample) if best is None or downsample > best[1] else best
    if best is None:
        raise InputError(
            f"cannot read {image} at {wanted:g} µm/px: its finest level has {image.mpp[0]:g} x {image.mpp[1]:g} µm/px, and images are "
            f"never enlarged. Give {max(image.mpp):g} or more, or leave mpp out."
        )
    level, (down_x, down_y) = best
    base: Raster = AtLevel(image, level, downsample=(float(down_x), float(down_y)))
    scales = [_scale(wanted / (own * float(factor))) for own, factor in zip(image.mpp, (down_x, down_y), strict=True)]
    if base.width_px < scales[0] or base.height_px < scales[1]:
        longest = min(own * extent for own, extent in zip(image.mpp, (image.width_px, image.height_px), strict=True))
        raise InputError(
            f"cannot read {image} of {image.width_px} x {image.height_px} px at {wanted:g} µm/px: no pixel would be left of its "
            f"{longest:g} µm. Give a finer resolution."
        )
    return base if scales == [1, 1] else Resampled(base, scales[0], scales[1])


def level_scale(size: Size, level_size: Size) -> tuple[Fraction, Fraction]:
    """By how much a level is reduced, in x and in y: an integer where rounding the size explains the rest.

    >>> level_scale((2220, 2967), (555, 741)), level_scale((1000, 1000), (400, 400))
    ((Fraction(4, 1), Fraction(4, 1)), (Fraction(5, 2), Fraction(5, 2)))
    """
    ratios = [Fraction(whole, part) for whole, part in zip(size, level_size, strict=True)]
    whole = round(sum(ratios) / 2)
    if whole >= 1 and all(part in (extent // whole, -(-extent // whole)) for extent, part in zip(size, level_size, strict=True)):
        ratios = [Fraction(whole)] * 2
    return ratios[0], ratios[1]


def _scale(ratio: float) -> Fraction:
    whole = round(ratio)
    return Fraction(whole) if abs(ratio / whole - 1) <= MPP_TOLERANCE else Fraction(ratio).limit_denominator(_MAX_DENOMINATOR)


class Resampled(OneLevelView):
    """An image reduced by area, row by row as it is read.

    >>> from sft.sources import ArrayImage
    >>> pixels = np.array([[[0], [10], [20]], [[30], [40], [50]], [[60], [70], [81]]], np.uint8)
    >>> Resampled(ArrayImage(pixels, layout="HWC"), Fraction(3, 2), Fraction(3, 2)).read(0, 0, 2, 2)[..., 0].tolist()
    [[13, 27], [53, 67]]

    Args:
        image: of any kind; its level 0 is read.
        scale_x: columns of the image per column of the result, at least 1.
        scale_y: rows of the image per row of the result, at least 1.

    Raises:
        InputError: a scale below 1, or of which not one px is left.
    """

    def __init__(self, image: Image, scale_x: Fraction, scale_y: Fraction) -> None:
        super().__init__(image)
        self.scale = scale_x, scale_y
        self._size = int(image.width_px / scale_x), int(image.height_px / scale_y)
        if min(self.scale) < 1 or min(self._size) < 1:
            raise InputError(
                f"cannot reduce {image} ({image.width_px} x {image.height_px} px) by {scale_x} x {scale_y}: scales are at least 1, and "
                "at least one pixel must be left. Change them."
            )
        if _largest_value(self.dtype) * scale_x.numerator * scale_y.numerator > _MAX_SUM:
            raise InputError(f"cannot reduce {image} by {scale_x} x {scale_y}: the sums are too large to be exact. Use rounder scales.")
        self._blocks = RowBlocks(image, Interval(0, image.width_px))

    def __repr__(self) -> str:
        return f"Resampled({self.image!r}, {self.scale[0]}, {self.scale[1]})"

    def _size_px(self) -> Size:
        return self._size

    def _tile_px(self) -> None:
        """None: rows that the next read shares are kept here."""

    @property
    def mpp(self) -> tuple[float, float] | None:
        """Micrometres per px, (x, y), by the exact scale."""
        mpp = super().mpp
        return None if mpp is None else (mpp[0] * float(self.scale[0]), mpp[1] * float(self.scale[1]))

    @property
    def georeference(self) -> Georeference | None:
        """Coordinate system and transform by the exact scale."""
        georeference = super().georeference
        return None if georeference is None else georeference.scaled(float(self.scale[0]), float(self.scale[1]))

    def close(self) -> None:
        """Let go of the file below, and of rows kept for the next read."""
        self._blocks.forget()
        super().close()

    def _read(self, rectangle: Rectangle) -> Pixels:
        scale_x, scale_y = self.scale
        columns, rows_below = _covered(rectangle.columns, scale_x), _covered(rectangle.rows, scale_y)
        # Of narrower rectangles, rows are shared within this call only.
        blocks = self._blocks if len(rectangle.columns) == self.width_px else RowBlocks(self.image, columns)
        out = np.empty((*rectangle.shape, self.num_channels), self.dtype)
        weight = scale_x.numerator * scale_y.numerator
        is_integer = out.dtype.kind != "f"
        dtype = np.float32 if is_integer and _largest_value(out.dtype) * 2 * weight < _MAX_SUM_32 else np.float64
        piece_rows = max(1, _PIECE_BYTES // (len(columns) * self.num_channels))
        step = max(1, int(piece_rows / scale_y))
        first, last = rectangle.rows.start, rectangle.rows.stop
        for top in range(first, last, step):
            output_rows = Interval(top, min(top + step, last))
            rows = _covered(output_rows, scale_y)
            pixels = blocks.rows(rows, within=rows_below)[:, : len(columns)]
            sums = _sum_columns(_sum_rows(pixels, rows.start, output_rows, scale_y, dtype), columns.start, rectangle.columns, scale_x)
            # Half up: no quotient is so near to an integer that the division could reach it.
            means = np.floor((2 * sums + weight) / (2 * weight)) if is_integer else sums / weight
            out[top - first : output_rows.stop - first] = means.astype(out.dtype)
        return out


def _largest_value(dtype: np.dtype[Any]) -> int:
    """Largest magnitude of an integer type; 1 for floating-point types, which have rounded sums."""
    return 1 if dtype.kind == "f" else max(abs(int(limit)) for limit in dtype_range(dtype))


def _covered(output: Interval, scale: Fraction) -> Interval:
    """The input pixels that some output pixels cover, the last perhaps in part."""
    return Interval(int(output.start * scale), ceil(output.stop * scale))


def _sum_rows(pixels: Pixels, first: int, output_rows: Interval, scale: Fraction, dtype: type[np.floating]) -> Sums:
    """Weighted sums of rows, in units of 1/q: ``[output rows, columns, channels]``. ``pixels`` begin at row ``first``."""
    p, q = scale.numerator, scale.denominator
    numbers = pixels.astype(dtype)
    sums = np.empty((len(output_rows), *pixels.shape[1:]), dtype)
    for total, row in zip(sums, range(output_rows.start, output_rows.stop), strict=True):
        start, stop = row * p, (row + 1) * p
        inner = Interval(-(-start // q), stop // q)  # rows that are covered whole; start <= stop since the scale is at least 1
        total[...] = 0
        for number in range(inner.start - first, inner.stop - first):  # in this order, since sums of floating-point pixels are rounded
            total += numbers[number]
        if q > 1:
            total *= q
        if start < inner.start * q:
            total += numbers[inner.start - 1 - first] * (inner.start * q - start)
        if stop > inner.stop * q:
            total += numbers[inner.stop - first] * (stop - inner.stop * q)
    return sums


def _sum_columns(sums: Sums, first: int, output_columns: Interval, scale: Fraction) -> Sums:
    """Weighted sums of columns: ``[rows, output columns, channels]``. ``sums`` begin at column ``first``."""
    if scale.denominator == 1:
        return _sum_whole_columns(sums, len(output_columns), int(scale))
    return _sum_parts(sums, first, output_columns, scale)


def _sum_whole_columns(sums: Sums, num_out: int, scale: int) -> Sums:
    """Each output pixel takes its first column, then its second, and so on; a channel at a time, so that each step is a long vector."""
    rows, _, channels = sums.shape
    flat = sums.reshape(rows, -1)
    total = np.empty((rows, num_out * channels), sums.dtype)
    for channel in range(channels):
        channel_sums = total[:, channel::channels]
        channel_sums[:] = flat[:, channel :: channels * scale][:, :num_out]
        for tap in range(1, scale):
            channel_sums += flat[:, channel + channels * tap :: channels * scale][:, :num_out]
    return total.reshape(rows, num_out, channels)


def _sum_parts(sums: Sums, first: int, output_columns: Interval, scale: Fraction) -> Sums:
    """The same with shares of columns, each output pixel beginning at another place in one."""
    p, q = scale.numerator, scale.denominator
    rows, width, channels = sums.shape
    flat = sums.reshape(rows, -1)
    start = np.arange(output_columns.start, output_columns.stop) * p - first * q
    whole = start // q
    total = np.zeros((rows, len(output_columns) * channels), sums.dtype)
    weighted = np.empty_like(total)
    for tap in range(-(-p // q) + 1):
        left = (whole + tap) * q
        weights = np.maximum(0, np.minimum(start + p, left + q) - np.maximum(start, left))
        # Beyond the last column that is covered the weight is 0.
        column = np.minimum(whole + tap, width - 1)
        np.take(flat, (column[:, None] * channels + np.arange(channels)).ravel(), axis=1, out=weighted, mode="clip")
        weighted *= np.repeat(weights, channels).astype(total.dtype)
        total += weighted
    return total.reshape(rows, len(output_columns), channels)
