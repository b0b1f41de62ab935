"""Segments of a TIFF level: position in the file, place in the image, and decoder of each tile or strip.

A level has planes: one for all channels of a page with interleaved samples, otherwise one for each channel. All planes have the same grid
of segments. A strip is a segment as wide as the image. Strips that are not compressed are divided, so that a read touches few bytes; a
compressed strip is decoded completely for each block of rows in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sft.sources.image import Pixels, Rectangle
from sft.sources.readers.jpeg import jpeg_decoder
from sft.sources.tiff.pages import JPEG, PLANAR, YCBCR, LevelPages

__all__ = ["TiffLevel", "TiffPlane", "build_level"]

#: Bytes of the segments into which an uncompressed strip is divided, about.
_STRIP_BYTES = 1 << 20

#: From the bytes of a segment and its index to pixels [rows, columns, channels].
TileDecoder = Callable[[bytes, int], Pixels]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiffPlane:
    """Segments of some channels."""

    first_channel: int
    num_channels: int
    offsets: npt.NDArray[np.int64]  #: of each segment, row by row, in bytes
    sizes: npt.NDArray[np.int64]  #: of each segment, in bytes
    first_index: int  #: index of the first segment, for the decoder
    decode: TileDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class TiffLevel:
    """One level: a grid of segments for each plane."""

    width_px: int
    height_px: int
    tile_width_px: int
    tile_height_px: int
    num_channels: int
    dtype: np.dtype[Any]
    planes: tuple[TiffPlane, ...]
    is_tiled: bool
    is_compressed: bool

    @property
    def num_across(self) -> int:
        """Segments in a row of the grid."""
        return -(-self.width_px // self.tile_width_px)

    def place(self, position: int) -> Rectangle:
        """Pixels of a segment of a plane; the last ones of a row or column may reach beyond the level."""
        down, across = divmod(position, self.num_across)
        return Rectangle.of(across * self.tile_width_px, down * self.tile_height_px, self.tile_width_px, self.tile_height_px)

    def positions_in(self, rectangle: Rectangle) -> list[int]:
        """Positions of the segments that overlap a rectangle, row by row."""
        rows, columns = rectangle.cells((self.tile_width_px, self.tile_height_px))
        return [row * self.num_across + column for row in rows for column in columns]

    @property
    def tile_bytes(self) -> int:
        """Bytes of a decoded segment of all channels."""
        return self.tile_width_px * self.tile_height_px * self.num_channels * self.dtype.itemsize


def build_level(pages: LevelPages) -> TiffLevel:
    """Segments and decoders of a level."""
    page = pages.keyframe
    is_compressed = page.compression != 1 or page.predictor != 1 or page.fillorder != 1
    tile_width, tile_height = (page.tilewidth, page.tilelength) if page.is_tiled else (page.imagewidth, _strip_rows(page))
    level_planes: list[TiffPlane] = []
    for number, each in enumerate(pages.pages):
        offsets, sizes = (np.asarray(values, np.int64) for values in (each.dataoffsets, each.databytecounts))
        num_planes = page.samplesperpixel if page.planarconfig == PLANAR else 1
        count = len(offsets) // num_planes
        for plane in range(num_planes):
            of_plane = slice(plane * count, (plane + 1) * count)
            samples = 1 if num_planes > 1 else page.samplesperpixel
            level_planes.append(
                TiffPlane(
                    first_channel=number * page.samplesperpixel + plane,
                    num_channels=samples,
                    offsets=offsets[of_plane],
                    sizes=sizes[of_plane],
                    first_index=plane * count,
                    decode=_decoder(page, (tile_height, tile_width, samples)),
                )
            )
    dtype = np.dtype(page.dtype)
    if not page.is_tiled and not is_compressed:
        row_bytes = tile_width * level_planes[0].num_channels * dtype.itemsize
        rows = _divisor(tile_height, _STRIP_BYTES // max(1, row_bytes), is_free=tile_height >= page.imagelength)
        order = np.dtype(page.parent.byteorder + page.dtype.char)
        if rows < tile_height:
            level_planes = [_divided(plane, page.imagelength, tile_height, rows, row_bytes, tile_width, order) for plane in level_planes]
            tile_height = rows
    return TiffLevel(
        width_px=page.imagewidth,
        height_px=page.imagelength,
        tile_width_px=tile_width,
        tile_height_px=tile_height,
        num_channels=pages.num_channels,
        dtype=dtype,
        planes=tuple(level_planes),
        is_tiled=page.is_tiled,
        is_compressed=is_compressed,
    )


def _strip_rows(page: Any) -> int:
    return int(max(1, min(page.rowsperstrip, page.imagelength)))


def _divisor(strip_rows: int, most: int, *, is_free: bool) -> int:
    """Rows of a segment, at most ``most``: any number for an image of one strip, otherwise a divisor of the strip's rows.

    >>> _divisor(96, 40, is_free=False), _divisor(96, 40, is_free=True), _divisor(97, 40, is_free=False)
    (32, 40, 1)
    """
    rows = max(1, min(strip_rows, most))
    return rows if is_free else next(count for count in range(rows, 0, -1) if strip_rows % count == 0)


def _divided(
    plane: TiffPlane, height_px: int, strip_rows: int, rows: int, row_bytes: int, width_px: int, dtype: np.dtype[Any]
) -> TiffPlane:
    """Plane of uncompressed strips in segments of fewer rows, which divide the rows of a strip."""
    tops = np.arange(0, height_px, rows)
    strips, within = tops // strip_rows, tops % strip_rows
    bottoms = np.minimum(tops + rows, height_px)
    offsets = plane.offsets[strips] + within * row_bytes
    sizes = np.where(plane.sizes[strips] > 0, (bottoms - tops) * row_bytes, 0)
    shape = (width_px, plane.num_channels)

    def decode(data: bytes, position: int) -> Pixels:
        return np.frombuffer(data, dtype).reshape(-1, *shape)

    return TiffPlane(
        first_channel=plane.first_channel, num_channels=plane.num_channels, offsets=offsets, sizes=sizes, first_index=0, decode=decode
    )


def _decoder(page: Any, shape: tuple[int, int, int]) -> TileDecoder:
    if page.compression == JPEG and page.dtype == np.uint8 and shape[2] in (1, 3):
        return jpeg_decoder(page.jpegtables, shape, is_ycbcr=page.photometric == YCBCR, fewer_rows=not page.is_tiled)
    decode_tile = page.decode  # made at its first use: here, and not by several threads at once
    is_tiled = page.is_tiled

    def decode(data: bytes, position: int) -> Pixels:
        decoded = decode_tile(data, position, _fullsize=True)[0] if is_tiled else decode_tile(data, position)[0]
        expected = shape if is_tiled else shape[1:]  # the last strip has fewer rows
        if decoded is None or decoded.shape[1 if is_tiled else 2 :] != expected:
            raise ValueError(f"it decodes to {None if decoded is None else decoded.shape[1:]} instead of {shape}")
        pixels: Pixels = decoded[0]
        return pixels

    return decode
