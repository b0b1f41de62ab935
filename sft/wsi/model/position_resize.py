"""Resize of per-position scores to the pixels of the image, each position on its centre.

Position ``i`` of a feature map is centred at ``first_centre + i * stride`` px (`sft.position_grids`). ``F.interpolate(scores, size)`` puts
it at ``(i + 1/2) * size / positions``: half a stride off for a padded network, and more where the stride does not divide the image.
Here the linear interpolation between the centres is composed of operators that stream::

    pad        the border positions are replicated, so that the interpolation covers the image
    interpolate by the stride; ``align_corners`` for centres on pixels, as of a ResNet (``32 i + 1/2``)
    slice      to the pixels of the image

Centres that are neither on pixels nor at the middle of ``stride`` pixels (an even kernel with stride 1 or 3) need a shift by a fraction of
a pixel. It is a blend of neighbouring positions before the interpolation: the position is centred exactly, and slightly wider.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor
from torch.nn import functional as F

import sft

__all__ = ["AxisResize", "axis_resizes", "resize_positions"]

_HALF = Fraction(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisResize:
    """Resize of one axis.

    Attributes:
        stride_px: pixels from one position to the next; at least 1.
        on_pixels: True if positions are interpolated from centre of pixel to centre of pixel (``align_corners``).
        before: replicated positions in front of the first one.
        after: replicated positions after the last one.
        blend: share of the next position that is added to each position; 0 for none.
        start_px: first pixel of the interpolated positions that is one of the image.
    """

    stride_px: float
    on_pixels: bool
    before: int
    after: int
    blend: float
    start_px: int

    @property
    def is_identity(self) -> bool:
        """True if positions are the pixels."""
        return self.stride_px == 1 and not self.before and not self.start_px and not self.blend

    def extent_px(self, num_positions: int) -> int:
        """Pixels of the interpolated positions, padding included."""
        if self.on_pixels:
            return (num_positions - 1) * int(self.stride_px) + 1
        stride = int(self.stride_px)
        return num_positions * stride if stride == self.stride_px else int(num_positions * self.stride_px)


def axis_resizes(grids: Sequence[sft.PositionGrid], extent_px: int, num_positions: Sequence[int]) -> tuple[AxisResize, ...] | None:
    """Resizes of the axes of a feature map; None for a map with more positions than pixels.

    Args:
        grids: of the axes.
        extent_px: height and width of an image.
        num_positions: rows and columns of the feature map of this image. The extent that positions do not cover depends on the remainder
            of ``extent / stride``; the largest one is padded.
    """
    if any(grid.stride_px < 1 for grid in grids):
        return None
    grids = [_pixel_grid(grid, extent_px, count) for grid, count in zip(grids, num_positions, strict=True)]
    on_pixels = all(grid.stride_px.denominator == 1 and (grid.first_centre_px - _HALF).denominator == 1 for grid in grids)
    return tuple(_axis_resize(grid, extent_px, count, on_pixels) for grid, count in zip(grids, num_positions, strict=True))


def resize_positions(scores: Tensor, size: tuple[int, int], axes: Sequence[AxisResize]) -> Tensor:
    """Scores of positions ``[N, K, h, w]`` as scores of pixels ``[N, K, *size]``.

    An image that the padded positions do not cover, of a network whose positions are not a grid, is divided into equal cells.
    """
    rows, columns = axes
    if rows.is_identity and columns.is_identity and tuple(scores.shape[2:]) == size:
        return scores
    padding = (columns.before, columns.after, rows.before, rows.after)
    padded = F.pad(scores, padding, mode="replicate") if any(padding) else scores
    if rows.blend:
        padded = (1 - rows.blend) * padded[:, :, :-1] + rows.blend * padded[:, :, 1:]
    if columns.blend:
        padded = (1 - columns.blend) * padded[..., :-1] + columns.blend * padded[..., 1:]
    height, width = (axis.extent_px(count) for axis, count in zip(axes, padded.shape[2:], strict=True))
    if height < rows.start_px + size[0] or width < columns.start_px + size[1]:
        return F.interpolate(scores, size, mode="bilinear", align_corners=False)
    if any(axis.stride_px != int(axis.stride_px) for axis in axes):
        padded = F.interpolate(padded, scale_factor=(rows.stride_px, columns.stride_px), mode="bilinear", align_corners=False)
    elif not rows.stride_px == columns.stride_px == 1:
        padded = F.interpolate(padded, (height, width), mode="bilinear", align_corners=rows.on_pixels)
    return padded[:, :, rows.start_px : rows.start_px + size[0], columns.start_px : columns.start_px + size[1]]


def _pixel_grid(grid: sft.PositionGrid, extent_px: int, num_positions: int) -> sft.PositionGrid:
    """The grid of the pixels for a map with a position for each of them, up to half a pixel.

    The branches of a U-Net are centred up to half a pixel apart, and their common centre between them. A shift would blur the map.
    """
    pixels = sft.PositionGrid(stride_px=Fraction(1), first_centre_px=_HALF)
    is_map_of_pixels = grid.stride_px == 1 and num_positions == extent_px and abs(grid.first_centre_px - _HALF) <= _HALF
    return pixels if is_map_of_pixels else grid


def _axis_resize(grid: sft.PositionGrid, extent_px: int, num_positions: int, on_pixels: bool) -> AxisResize:
    stride, centre = grid.stride_px, grid.first_centre_px
    # Interpolated pixel of the centre of the first position: 0 with align_corners, else the middle of its stride.
    first = Fraction(0) if on_pixels else (stride - 1) / 2
    before = max(0, math.ceil((centre - _HALF - first) / stride))
    start = first + before * stride - (centre - _HALF)
    blend = (start - math.floor(start)) / stride
    # An image of another remainder has up to stride - 1 px more after its last position.
    uncovered = (extent_px + stride - 1 - centre - _HALF - first) / stride + 1 - num_positions
    return AxisResize(
        stride_px=float(stride),
        on_pixels=on_pixels,
        before=before,
        after=max(0, math.ceil(uncovered)) + (blend > 0),
        blend=float(blend),
        start_px=math.floor(start),
    )
