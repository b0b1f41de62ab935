"""Slide transforms: rotations, flips and colour maps. Each view reads only the rectangle that is requested.

Strips must have the same bits as the full image, in the forward and in the backward pass. Moving pixels is exact. Colours are changed
pixel by pixel, with tables for logarithms and exponentials and with single multiplications and additions. So a pixel's result does not
depend on its neighbours in the same call, as it may in a matrix product or a vectorised exponential.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sft.common.array_types import BoolArray, Float32Array
from sft.common.interval import Interval
from sft.sources.georeference import Georeference
from sft.sources.image import Image, Pixels, Rectangle, Size
from sft.sources.source import image_equal_rows
from sft.sources.views import OneLevelView, RasterView

__all__ = ["IDENTITY", "ColourAffine", "PixelwiseColours", "Recoloured", "Turned"]

#: Pixels that are recoloured at a time: the working memory is some 50 times as many bytes.
_PIECE_PX = 1 << 18
#: Steps of the table of optical densities to intensities, per unit of density. Half a step is 0.06 grey levels.
_DENSITY_STEPS = 2048
_MAX_DENSITY = 8.0
#: Columns of an image without known tiles (resampled, cropped) that are read at least, where they become rows.
_COLUMNS_PX = 256


class Turned(OneLevelView):
    """An image mirrored left to right, or not, and then turned counter-clockwise by quarters; as ``np.rot90`` does.

    Args:
        image: the image; its level 0 counts.
        quarters: how often to turn.
        mirrored: whether to mirror before.
    """

    def __init__(self, image: Image, *, quarters: int = 0, mirrored: bool = False) -> None:
        super().__init__(image)
        self.quarters, self.mirrored = quarters % 4, mirrored

    def __repr__(self) -> str:
        return f"Turned({self.image!r}, quarters={self.quarters}, mirrored={self.mirrored})"

    def _size_px(self) -> Size:
        return self._turned(super()._size_px())

    def _tile_px(self) -> Size | None:
        """Rows that were columns cost whole tiles below, also where none are known."""
        tile = super()._tile_px()
        return self._turned(tile or (_COLUMNS_PX, self.image.height_px)) if self.quarters % 2 else tile

    @property
    def mpp(self) -> tuple[float, float] | None:
        """Micrometres per px, (x, y)."""
        mpp = super().mpp
        return mpp if mpp is None or self.quarters % 2 == 0 else (mpp[1], mpp[0])

    @property
    def georeference(self) -> Georeference | None:
        """Coordinate system and transform of the turned image."""
        georeference = super().georeference
        if georeference is None:
            return None
        (c, f), (x1, y1), (x2, y2) = (georeference.point(*self._image_point(x, y)) for x, y in ((0, 0), (1, 0), (0, 1)))
        return Georeference(crs_wkt=georeference.crs_wkt, transform=(x1 - c, x2 - c, c, y1 - f, y2 - f, f))

    def positions(self, positions_px: npt.NDArray[np.int64], size_px: int) -> npt.NDArray[np.int64]:
        """Upper left corners ``[N, 2]`` (column, row) in the view of squares of ``size_px`` at corners in the image."""
        left, top = positions_px.T
        if self.mirrored:
            left = self.image.width_px - size_px - left
        right, bottom = self.image.width_px - size_px - left, self.image.height_px - size_px - top
        return np.stack(((left, top), (top, right), (right, bottom), (bottom, left))[self.quarters], axis=1)

    def _image_point(self, x: int, y: int) -> tuple[int, int]:
        """Position in the image of a position in the view, in px from the top left corners."""
        width, height = self.image.width_px, self.image.height_px
        x, y = ((x, y), (width - y, x), (width - x, height - y), (y, height - x))[self.quarters]
        return (width - x if self.mirrored else x), y

    def _turned(self, size: Size) -> Size:
        return (size[1], size[0]) if self.quarters % 2 else size

    def repeated(self, part: Interval, *, columns: bool = False) -> BoolArray:
        """Repeated rows of the underlying image; see `sft.sources.source.RepeatingImage`."""
        width, height, quarters = self.image.width_px, self.image.height_px, self.quarters
        # Lines along one axis of the view are lines of the image, in its order or backwards, and so are the places along them.
        of_columns = columns != bool(quarters % 2)
        turned = quarters in ((2, 3) if columns else (1, 2))
        across_turned = quarters in ((1, 2) if columns else (2, 3))
        lines_back, places_back = turned != (self.mirrored and of_columns), across_turned != (self.mirrored and not of_columns)
        extent = height if of_columns else width
        equal = image_equal_rows(self.image, Interval(extent - part.stop, extent - part.start) if places_back else part, columns=of_columns)
        # A line equals the one before it as that one equals it: read backwards, each answer belongs to its other neighbour.
        return np.concatenate([equal[:1], equal[:0:-1]]) if lines_back else equal

    def _read(self, rectangle: Rectangle) -> Pixels:
        width, height = self.image.width_px, self.image.height_px
        x, y, w, h = rectangle.arguments
        if self.quarters == 0:
            left, top, cols, rows = x, y, w, h
        elif self.quarters == 1:
            left, top, cols, rows = width - y - h, x, h, w
        elif self.quarters == 2:
            left, top, cols, rows = width - x - w, height - y - h, w, h
        else:
            left, top, cols, rows = y, height - x - w, h, w
        if self.mirrored:
            left = width - left - cols
        pixels = self.image.read(left, top, cols, rows)
        turned: Pixels = np.ascontiguousarray(np.rot90(pixels[:, ::-1] if self.mirrored else pixels, self.quarters))
        return turned


@dataclass(frozen=True, slots=True, kw_only=True)
class ColourAffine:
    """``y = matrix x + offset`` of three channels.

    Attributes:
        matrix: rows of three numbers.
        offset: three numbers.
    """

    matrix: tuple[tuple[float, ...], ...]
    offset: tuple[float, ...]

    @staticmethod
    def of(matrix: npt.ArrayLike, offset: npt.ArrayLike = (0.0, 0.0, 0.0)) -> ColourAffine:
        """Colour map from arrays."""
        rows = np.asarray(matrix, np.float64)
        return ColourAffine(matrix=tuple(tuple(map(float, row)) for row in rows), offset=tuple(map(float, np.asarray(offset, np.float64))))

    def after(self, other: ColourAffine) -> ColourAffine:
        """``self(other(x))``."""
        first, second = np.array(self.matrix), np.array(other.matrix)
        return ColourAffine.of(first @ second, first @ np.array(other.offset) + np.array(self.offset))

    def apply(self, channels: Sequence[Float32Array]) -> list[Float32Array]:
        """To planes of float32, one multiplication or addition after another."""
        results = []
        for row, shift in zip(self.matrix, self.offset, strict=True):
            total = np.full(channels[0].shape, np.float32(shift))
            for weight, channel in zip(row, channels, strict=True):
                total += channel * np.float32(weight)
            results.append(total)
        return results


IDENTITY = ColourAffine.of(np.eye(3))


class PixelwiseColours(RasterView):
    """An image with other colours; those of a pixel depend on that pixel alone."""

    @abstractmethod
    def _recolour(self, pixels: Pixels) -> Pixels:
        """The new colours of some pixels."""

    def repeated(self, part: Interval, *, columns: bool = False) -> BoolArray:
        """Repeated rows of the underlying image: a pixel's colour depends on that pixel only."""
        return image_equal_rows(self.image, part, columns=columns)

    def _read(self, rectangle: Rectangle) -> Pixels:
        pixels = rectangle.read(self.image)
        out = np.empty_like(pixels)
        rows = max(1, _PIECE_PX // len(rectangle.columns))
        for top in range(0, len(rectangle.rows), rows):
            out[top : top + rows] = self._recolour(pixels[top : top + rows])
        return out


class Recoloured(PixelwiseColours):
    """An image with other colours: an affine map of optical densities, and then one of intensities in 0..1.

    Stains absorb, so they add up in optical density, ``-log((pixel + 1) / 256)`` (Ruifrok and Johnston, 2001).

    Args:
        image: the image.
        density: of the three channels' optical densities. Default: none
        intensity: of the three channels. Default: none
    """

    def __init__(self, image: Image, *, density: ColourAffine = IDENTITY, intensity: ColourAffine = IDENTITY) -> None:
        super().__init__(image)
        self.density, self.intensity = density, intensity

    def _read(self, rectangle: Rectangle) -> Pixels:
        is_identity = self.density == IDENTITY and self.intensity == IDENTITY
        return rectangle.read(self.image) if is_identity else super()._read(rectangle)

    def _recolour(self, pixels: Pixels) -> Pixels:
        planes: list[npt.NDArray[np.generic]] = [pixels[..., channel] for channel in range(3)]
        if self.density != IDENTITY:
            densities = self.density.apply([_TO_DENSITY[plane] for plane in planes])
            top = np.float32(len(_FROM_DENSITY) - 1)
            steps = [np.rint(np.clip(density * np.float32(_DENSITY_STEPS), 0, top)).astype(np.int32) for density in densities]
            planes = [_FROM_DENSITY[step] for step in steps]
        if self.intensity != IDENTITY:
            shares = self.intensity.apply([_TO_SHARE[plane] for plane in planes])
            planes = [np.rint(np.clip(share * np.float32(255), 0, 255)).astype(np.uint8) for share in shares]
        return np.stack(planes, axis=-1).astype(np.uint8, copy=False)


_TO_DENSITY: Float32Array = (-np.log((np.arange(256) + 1) / 256)).astype(np.float32)
_TO_SHARE: Float32Array = (np.arange(256) / 255).astype(np.float32)
_FROM_DENSITY: Pixels = np.clip(
    np.rint(256 * np.exp(-np.arange(int(_MAX_DENSITY * _DENSITY_STEPS) + 1) / _DENSITY_STEPS) - 1), 0, 255
).astype(np.uint8)
