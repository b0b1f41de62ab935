"""Images made of images: turned, mirrored, recoloured, masked. Each reads just the rectangle that it is asked for.

A network that reads an image in strips must see the same bits that it would see in the whole image, forwards and again backwards. Moving
pixels is exact. Colours are changed pixel by pixel with tables for what is no plain arithmetic (logarithms, exponentials) and with single
multiplications and additions otherwise; so a pixel's result does not depend on which others are computed beside it, as it may in a
matrix product or a vectorised exponential.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sft.errors import InputError
from sft.sources.image import Image, Pixels, check_region

__all__ = ["IDENTITY", "Affine", "Masked", "Recoloured", "Turned"]

_Floats = npt.NDArray[np.float32]
#: Pixels that are recoloured at a time: the working memory is some 50 times as many bytes.
_PIECE_PX = 1 << 18
#: Steps of the table of optical densities to intensities, per unit of density. Half a step is 0.06 grey levels.
_DENSITY_STEPS = 2048
_MAX_DENSITY = 8.0


class Turned:
    """An image mirrored left to right, or not, and then turned counter-clockwise by quarters; as ``np.rot90`` does.

    Args:
        image: the image.
        quarters: how often to turn.
        mirrored: whether to mirror before.
    """

    def __init__(self, image: Image, *, quarters: int = 0, mirrored: bool = False) -> None:
        self.image, self.quarters, self.mirrored = image, quarters % 4, mirrored
        sides = (image.width_px, image.height_px)
        self.width_px, self.height_px = sides[::-1] if self.quarters % 2 else sides
        # The tiles of slides are squares, so their height is as good for columns.
        self.tile_height_px: int | None = getattr(image, "tile_height_px", None)

    def __repr__(self) -> str:
        return f"Turned({self.image!r}, quarters={self.quarters}, mirrored={self.mirrored})"

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        """A rectangle; see `sft.sources.Image`.

        Raises:
            InputError: it is not wholly inside the image, or of another level than 0.
            SourceError: the pixels cannot be read.
        """
        _check_level(self, level)
        check_region(repr(self), x, y, w, h, self.width_px, self.height_px)
        width, height = self.image.width_px, self.image.height_px
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
class Affine:
    """``y = matrix x + offset`` of three channels.

    Attributes:
        matrix: rows of three numbers.
        offset: three numbers.
    """

    matrix: tuple[tuple[float, ...], ...]
    offset: tuple[float, ...]

    @staticmethod
    def of(matrix: npt.ArrayLike, offset: npt.ArrayLike = (0.0, 0.0, 0.0)) -> Affine:
        """From arrays."""
        rows = np.asarray(matrix, np.float64)
        return Affine(matrix=tuple(tuple(map(float, row)) for row in rows), offset=tuple(map(float, np.asarray(offset, np.float64))))

    def after(self, other: Affine) -> Affine:
        """``self(other(x))``."""
        mine, theirs = np.array(self.matrix), np.array(other.matrix)
        return Affine.of(mine @ theirs, mine @ np.array(other.offset) + np.array(self.offset))

    def apply(self, channels: Sequence[_Floats]) -> list[_Floats]:
        """To planes of float32, one multiplication or addition after another."""
        results = []
        for row, shift in zip(self.matrix, self.offset, strict=True):
            total = np.full(channels[0].shape, np.float32(shift))
            for weight, channel in zip(row, channels, strict=True):
                total += channel * np.float32(weight)
            results.append(total)
        return results


IDENTITY = Affine.of(np.eye(3))


class Recoloured:
    """An image with other colours: an affine map of optical densities, and then one of intensities in 0..1.

    Stains absorb, so they add up in optical density, ``-log((pixel + 1) / 256)`` (Ruifrok and Johnston, 2001).

    Args:
        image: the image.
        density: of the three channels' optical densities. Default: none
        intensity: of the three channels. Default: none
    """

    def __init__(self, image: Image, *, density: Affine = IDENTITY, intensity: Affine = IDENTITY) -> None:
        self.image, self.density, self.intensity = image, density, intensity
        self.width_px, self.height_px = image.width_px, image.height_px
        self.tile_height_px: int | None = getattr(image, "tile_height_px", None)

    def __repr__(self) -> str:
        return f"Recoloured({self.image!r})"

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        """A rectangle; see `sft.sources.Image`.

        Raises:
            InputError: it is not wholly inside the image, or of another level than 0.
            SourceError: the pixels cannot be read.
        """
        _check_level(self, level)
        pixels = self.image.read(x, y, w, h)
        if self.density == IDENTITY and self.intensity == IDENTITY:
            return pixels
        out = np.empty_like(pixels)
        rows = max(1, _PIECE_PX // w)
        for top in range(0, h, rows):
            out[top : top + rows] = self._recolour(pixels[top : top + rows])
        return out

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


_TO_DENSITY: _Floats = (-np.log((np.arange(256) + 1) / 256)).astype(np.float32)
_TO_SHARE: _Floats = (np.arange(256) / 255).astype(np.float32)
_FROM_DENSITY: Pixels = np.clip(
    np.rint(256 * np.exp(-np.arange(int(_MAX_DENSITY * _DENSITY_STEPS) + 1) / _DENSITY_STEPS) - 1), 0, 255
).astype(np.uint8)


class Masked:
    """An image that has one colour where a mask is zero. The mask may be smaller; its pixels are then squares.

    Args:
        image: the image.
        mask: ``[height, width]``; zero where nothing is to be seen.
        colour: RGB, what is seen there.

    Raises:
        InputError: the mask has another shape than the image, by more than one pixel of the mask.
    """

    def __init__(self, image: Image, mask: npt.NDArray[np.generic], colour: tuple[int, int, int]) -> None:
        if mask.ndim != 2 or 0 in mask.shape:
            raise InputError(f"a mask of shape {mask.shape} for {image!r}: give [height, width], none empty.")
        scale = image.width_px / mask.shape[1], image.height_px / mask.shape[0]
        if abs(scale[0] / scale[1] - 1) > 1 / min(mask.shape):
            raise InputError(
                f"a mask of {mask.shape[1]} x {mask.shape[0]} px for {image!r} of {image.width_px} x {image.height_px} px: the sides have "
                "another ratio. Give the mask of this slide."
            )
        self.image, self.colour = image, colour
        self._mask = mask != 0
        self.width_px, self.height_px = image.width_px, image.height_px
        self.tile_height_px: int | None = getattr(image, "tile_height_px", None)

    def __repr__(self) -> str:
        return f"Masked({self.image!r})"

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        """A rectangle; see `sft.sources.Image`.

        Raises:
            InputError: it is not wholly inside the image, or of another level than 0.
            SourceError: the pixels cannot be read.
        """
        _check_level(self, level)
        pixels = self.image.read(x, y, w, h)
        rows = np.arange(y, y + h) * self._mask.shape[0] // self.height_px
        cols = np.arange(x, x + w) * self._mask.shape[1] // self.width_px
        return np.where(self._mask[np.ix_(rows, cols)][..., None], pixels, np.array(self.colour, np.uint8))


def _check_level(image: object, level: int) -> None:
    if level:
        raise InputError(f"cannot read level {level} of {image!r}: it has one. Leave it out.")
