"""Tiled TIFF (SVS, OME-TIFF, other pyramids): compressed tiles of a slide decoded directly, without a slide library.

OpenSlide draws every tile on a canvas with an alpha channel and returns it as another image; that costs several times the decoder's own
time (`benchmarks/reading.py`). This reader decodes a tile from the file straight to its place in the strip. The pixels are OpenSlide's,
bit for bit, for every file that both read. Four points need care:

- *Levels.* Every tiled image of the file, the largest first; of OME-TIFF the first image and its sub-images.
- *Damage must not pass.* libjpeg reports corrupt data as a warning and goes on with noise. imagecodecs ignores such warnings, OpenSlide
  makes them errors, and so does this module, by decoding JPEG with simplejpeg. (It also objects to left-over bytes after the last block,
  which OpenSlide ignores. Other codecs find damage as far as their format allows.)
- *The colour space is the TIFF tag's*, regardless of the markers of a JPEG tile. An abbreviated stream (a tile without its tables) gets
  the tables and an Adobe marker of the tag's colour space as a prefix.
- *Files that could differ are refused*, with a `NotTiledError`, and `sft.sources.open_image` then takes OpenSlide: strips instead of
  tiles, planes of channels, alpha, palettes, and vendors whose tiles overlap or are placed by a table. Content that OpenSlide would
  misread is refused with a `SourceError`: sample types other than uint8, channels other than colours and alpha, further images of the same
  size, pixels in another file.

Tiles that are not stored (zero bytes) have the background colour: white, or in a GeoTIFF the value of `sft.sources.tiff.metadata`.
"""

from __future__ import annotations

import logging
import os
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sft.common.errors import SourceError
from sft.sources.file_image import FileImage
from sft.sources.image import WHITE, ImageFacts, Pixels, StatedResolution, missing_extra
from sft.sources.readers.jpeg import jpeg_decoder
from sft.sources.readers.thread_pool import for_each, resolve_threads
from sft.sources.tiff.metadata import GeoTags, read_geo_tags, read_resolution

__all__ = ["NotTiledError", "TiffImage"]

_JPEG = 7
_YCBCR = 6
#: photometric interpretations by number of samples
_PHOTOMETRIC = {1: (1,), 3: (2, _YCBCR)}
_APERIO_YCBCR = 33003
#: bit of the kind of a page (NewSubfileType) that makes it a mask of another
_MASK_PAGE = 4
#: planar configuration: a plane for each channel
_PLANAR = 2
#: extra samples that are alpha, multiplied into the colours or not
_ALPHA = (1, 2)
#: the header of a TIFF has so many bytes
_MIN_OFFSET = 8
_SILENT = logging.NullHandler()
#: Formats of vendors that tifffile knows, in which tiles overlap, lie in several areas, or are placed by metadata.
_FOREIGN = ("is_bif", "is_ndpi", "is_scn", "is_philips", "is_qpi", "is_fluoview", "is_lsm", "is_avs")
_FOREIGN_SOFTWARE = ("MedScan",)  # Trestle

TileDecoder = Callable[[bytes, int], Pixels]


class NotTiledError(SourceError):
    """A TIFF that is not made of tiles that can be decoded one by one into RGB or grey."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TiffLevel:
    """One level: where its tiles lie in the file, and how to decode one."""

    width_px: int
    height_px: int
    tile_width_px: int
    tile_height_px: int
    offsets: npt.NDArray[np.int64]  #: of each tile, row by row, in bytes
    sizes: npt.NDArray[np.int64]  #: of each tile, in bytes
    decode: TileDecoder

    @property
    def num_across(self) -> int:
        return -(-self.width_px // self.tile_width_px)


class _TiffHandle:
    """An open file. Reads carry their position, so threads share it; the file closes with the last reference."""

    def __init__(self, path: Path, levels: tuple[_TiffLevel, ...], resolution: StatedResolution, num_channels: int, tags: GeoTags) -> None:
        self.path, self.levels, self.resolution, self.num_channels, self.tags = path, levels, resolution, num_channels, tags
        self.background = WHITE[:num_channels] if tags.missing_value is None else (tags.missing_value,) * num_channels
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, num_bytes: int, offset: int) -> bytes:
        """Bytes of the file."""
        if hasattr(os, "pread"):
            return os.pread(self.descriptor, num_bytes, offset)
        with open(self.path, "rb", buffering=0) as file:  # Windows: descriptors have a position that threads would share
            file.seek(offset)
            return file.read(num_bytes)


class TiffImage(FileImage[_TiffHandle]):
    """Tiled TIFF as an `sft.sources.Raster`, decoded tile by tile.

    Args:
        path: of the file.
        num_threads: number of tiles decoded in parallel. Default: `None` (the cores of this process, at most four)

    Raises:
        SourceError: the file does not exist. Other errors are raised at the first use: `NotTiledError` for another kind of TIFF.
    """

    def __init__(self, path: str | os.PathLike[str], *, num_threads: int | None = None) -> None:
        super().__init__(path)
        self.num_threads = resolve_threads(num_threads)
        #: tiles of the rectangles read so far; exact where one thread reads at a time
        self.num_tiles_decoded = 0

    @property
    def has_missing_tiles(self) -> bool:
        """True if some tiles were not recorded; they have the background colour."""
        return any(bool((level.sizes == 0).any()) for level in self._handle().levels)

    @property
    def is_geotiff(self) -> bool:
        """True for a GeoTIFF, whose missing tiles are those of GDAL."""
        return self._handle().tags.is_geo

    def check_complete(self) -> None:
        """Refuse a truncated file before the first read.

        Raises:
            SourceError: tiles lie beyond the end of the file, or in its header.
        """
        num_bytes = self.path.stat().st_size
        for number, level in enumerate(self._handle().levels):
            ends = level.offsets + level.sizes
            beyond = np.flatnonzero(((ends > num_bytes) | (level.offsets < _MIN_OFFSET)) & (level.sizes > 0))
            if len(beyond):
                down, across = divmod(int(beyond[0]), level.num_across)
                raise SourceError(
                    f"cannot use {self.path} ({num_bytes} bytes): {len(beyond)} of {len(ends)} tiles of level {number} do not lie in it, "
                    f"the first at column {across * level.tile_width_px}, row {down * level.tile_height_px}. It is cut short or "
                    'damaged; compare its size with the original and copy it again, or keep what is there with on_error="fill".'
                )

    def _open(self) -> _TiffHandle:
        try:
            import tifffile
        except ImportError as error:
            raise missing_extra(f"decode tiles of {self.path}", "fast", error) from error
        # Without a handler, logging prints its messages on stderr; the errors here say the same, with the file.
        logging.getLogger("tifffile").addHandler(_SILENT)
        try:
            with tifffile.TiffFile(self.path) as tiff:
                pages = _level_pages(self.path, tiff)
                levels = tuple(_level(page, _decoder(page)) for page in pages)
                resolution = read_resolution(tiff, pages[0])
                return _TiffHandle(self.path, levels, resolution, pages[0].samplesperpixel, read_geo_tags(self.path))
        except (SourceError, ImportError):
            raise
        except Exception as error:
            raise SourceError(
                f"cannot open {self.path} ({self.path.stat().st_size} bytes): {type(error).__name__}: {error}. Either no TIFF, or cut "
                "short; compare its size with the original and copy it again."
            ) from error

    def _describe(self, handle: _TiffHandle) -> ImageFacts:
        return ImageFacts(
            level_dimensions=tuple((level.width_px, level.height_px) for level in handle.levels),
            tiles_px=tuple((level.tile_width_px, level.tile_height_px) for level in handle.levels),
            num_channels=handle.num_channels,
            mpp=handle.resolution.mpp,
            mpp_note=handle.resolution.note,
            background=handle.background,
            nodata=handle.tags.nodata,
        )

    def _read(self, handle: _TiffHandle, x: int, y: int, w: int, h: int, level: int) -> Pixels:
        out = np.empty((h, w, handle.num_channels), np.uint8)
        wanted = handle.levels[level]
        tile_w, tile_h = wanted.tile_width_px, wanted.tile_height_px
        tiles = [
            (down, across) for down in range(y // tile_h, -(-(y + h) // tile_h)) for across in range(x // tile_w, -(-(x + w) // tile_w))
        ]
        for_each(partial(self._place, handle, level, out, x, y), tiles, self.num_threads)
        self.num_tiles_decoded += len(tiles)
        return out

    def _place(self, handle: _TiffHandle, level: int, out: Pixels, x: int, y: int, tile: tuple[int, int]) -> None:
        """Decode one tile into its place in a rectangle whose top left corner is (x, y)."""
        wanted, (down, across) = handle.levels[level], tile
        left, top = across * wanted.tile_width_px, down * wanted.tile_height_px
        first_x, last_x = max(x, left), min(x + out.shape[1], left + wanted.tile_width_px)
        first_y, last_y = max(y, top), min(y + out.shape[0], top + wanted.tile_height_px)
        target = out[first_y - y : last_y - y, first_x - x : last_x - x]
        position = down * wanted.num_across + across
        size = int(wanted.sizes[position])
        if size == 0:
            target[:] = handle.background
            return
        try:
            data = handle.read(size, int(wanted.offsets[position]))
            if int(wanted.offsets[position]) < _MIN_OFFSET:
                raise ValueError(f"its place in the file is given as {wanted.offsets[position]}, in the header")
            if len(data) != size:
                raise ValueError(f"the file ends after {len(data)} of {size} bytes")
            pixels = wanted.decode(data, position)
        except Exception as error:
            raise SourceError(
                f"cannot decode the tile at column {left}, row {top} ({wanted.tile_width_px} x {wanted.tile_height_px} px) of "
                f"level {level} of {self.path}: {error}. The tile is damaged; copy the file again, leave the slide out, or fill such "
                'tiles with background (on_error="fill"). reader="openslide" is the other decoder.'
            ) from error
        target[:] = pixels[first_y - top : last_y - top, first_x - left : last_x - left]


def _level_pages(path: Path, tiff: Any) -> list[Any]:
    """The pages that are levels, the largest first."""
    if not len(tiff.pages):
        raise ValueError("it lists no image")
    first = tiff.pages[0]
    foreign = [name for name in _FOREIGN if getattr(tiff, name, False)]
    if any(name in str(first.software) for name in _FOREIGN_SOFTWARE):
        foreign.append(str(first.software))
    if first is None or foreign or not first.is_tiled:
        what = (
            f"it is {foreign[0].removeprefix('is_').upper()}" if foreign else "its first image is not tiled" if first else "it has no image"
        )
        remedy = "Use OpenSlide, or convert it" if foreign else "Convert it"  # what is in strips OpenSlide does not read, either
        raise NotTiledError(f"cannot decode {path} by tiles: {what}. {remedy} to a tiled TIFF.")
    _check_directories(path, tiff)
    _refuse_masks(path, tiff)
    if tiff.is_ome:
        series = tiff.series[0]
        if len(series.levels[0].pages) != 1:  # no other reader would see more than the first, either
            raise SourceError(f"cannot read {path}: it has {series.axes} = {series.shape}, of which one plane is read. Export that plane.")
        holder = series.levels[0].keyframe.parent.filehandle
        if holder is not tiff.filehandle:
            raise SourceError(f"cannot read {path}: its pixels are in {holder.name}. Open that, or export one file.")
        if not series.levels[0].keyframe.is_tiled:
            raise NotTiledError(f"cannot decode {path} by tiles: its series {series.axes} = {series.shape} is not tiled. Convert it.")
        pages = [level.keyframe for level in series.levels]
    else:
        pages = [page for page in tiff.pages if page.is_tiled and (page is first or tiff.is_svs or page.is_reduced)]
        pages += [page for page in first.pages or () if page.is_tiled]
        size = first.imagewidth, first.imagelength
        others = [page for page in tiff.pages[1:] if page not in pages and (page.imagewidth, page.imagelength) == size]
        if others:
            several = f"{len(others) + 1} images of {size[0]} x {size[1]} px, of which one is read"
            raise SourceError(f"cannot read {path}: it has {several}. Export that one.")
    pages.sort(key=lambda page: -page.imagewidth)
    for page in pages:
        unread = _unsupported_content(page)
        if unread:
            raise SourceError(f"cannot read {path}: {unread}. Convert it to RGB or grey of uint8.")
        _check_page(path, page)
        reason = _decode_error(page, pages[0])
        if reason:
            raise NotTiledError(f"cannot decode {path} by tiles: {reason}. Use OpenSlide, or convert it to RGB of uint8 in tiles.")
    return pages


def _check_directories(path: Path, tiff: Any) -> None:
    """Refuse a file of which directories are missing: tifffile lists those in front of the first that it cannot read, and levels are gone.

    Raises:
        SourceError: it is one of these.
    """
    file, form, last = tiff.filehandle, tiff.tiff, tiff.pages[-1]
    file.seek(last.offset)
    (num_tags,) = struct.unpack(form.tagnoformat, file.read(form.tagnosize))
    file.seek(last.offset + form.tagnosize + num_tags * form.tagsize)
    (following,) = struct.unpack(form.offsetformat, file.read(form.offsetsize))
    below = [offset for page in tiff.pages for offset in page.subifds or () if offset >= file.size]
    if following or below:
        place = below[0] if below else following
        raise SourceError(
            f"cannot open {path} ({file.size} bytes): its list of images (so far {len(tiff.pages)}) goes on at byte {place}, "
            "where there is none. It is cut short or damaged; compare its size with the original and copy it again."
        )


def _refuse_masks(path: Path, tiff: Any) -> None:
    """Refuse a file with an internal mask, whose invalid pixels would count as the image's.

    Raises:
        SourceError: it has one.
    """
    masks = [page for page in tiff.pages if int(page.subfiletype) & _MASK_PAGE]
    if masks:
        raise SourceError(
            f"cannot read {path}: it has an internal mask of valid pixels ({masks[0].imagewidth} x {masks[0].imagelength} px), which is "
            "not read, so invalid pixels would count. Write a copy without it (gdal_translate -mask none), with its invalid pixels set to "
            "the background; or give the mask of the copy to sft.tissue.Masked."
        )


def _unsupported_content(page: Any) -> str | None:
    """Content of a page that no reader of this package decodes; None if all of it is pixels."""
    if page.dtype is None or page.dtype.kind not in "bu" or page.dtype.itemsize > 1:
        return f"its samples are {page.dtype}, which would be scaled to 8 bits"
    is_alpha = [int(kind) in _ALPHA for kind in page.extrasamples]
    if is_alpha not in ([], [True]):
        others = max(1, is_alpha.count(False))
        return f"it has {page.samplesperpixel} channels, of which {others} are no colours, nor the one alpha, and would be dropped"
    return None


def _decode_error(page: Any, base: Any) -> str | None:
    """Why a page cannot be decoded into uint8 pixels; None if it can."""
    samples = page.samplesperpixel
    if page.dtype != np.uint8 or page.bitspersample != 8 or page.sampleformat != 1:
        return f"its samples are {page.dtype} of {page.bitspersample} bits"
    if samples not in _PHOTOMETRIC or samples != base.samplesperpixel or page.extrasamples:
        return f"it has {samples} samples a pixel, {len(page.extrasamples)} of them extra"
    if samples > 1 and page.planarconfig == _PLANAR:
        return "its channels lie in planes"
    if page.imagedepth != 1:
        return f"it has {page.imagedepth} planes"
    is_converted = page.compression == _JPEG
    if page.compression in (6, _APERIO_YCBCR) or page.photometric not in _PHOTOMETRIC[samples]:
        return f"its compression is {page.compression!r} and its colours are {page.photometric!r}"
    if page.photometric == _YCBCR and not is_converted:
        return f"its colours are {page.photometric!r} in {page.compression!r}"
    ratio = (base.imagewidth / page.imagewidth) / (base.imagelength / page.imagelength)
    if abs(ratio - 1) > max(0.02, 2 / page.imagewidth + 2 / page.imagelength):
        return f"an image of {page.imagewidth} x {page.imagelength} px is no level of {base.imagewidth} x {base.imagelength} px"
    return None


def _check_page(path: Path, page: Any) -> None:
    """Refuse pages that no reader of this package decodes correctly: unlisted tiles, which OpenSlide takes for white, and rotated
    images, whose tiles it rotates one by one.

    Raises:
        SourceError: the page is one of these.
    """
    num_tiles = -(-page.imagewidth // page.tilewidth) * -(-page.imagelength // page.tilelength) * page.imagedepth
    if page.planarconfig == _PLANAR:
        num_tiles *= page.samplesperpixel
    if not len(page.dataoffsets) == len(page.databytecounts) == num_tiles:
        raise SourceError(f"cannot open {path}: it lists {len(page.dataoffsets)} tiles of {num_tiles}. Copy or write it again.")
    turned = page.tags.valueof("Orientation", default=1)
    if turned != 1:
        raise SourceError(f"cannot open {path}: it is stored turned (orientation {int(turned)}). Write it upright, without that tag.")


def _level(page: Any, decode: TileDecoder) -> _TiffLevel:
    return _TiffLevel(
        width_px=page.imagewidth,
        height_px=page.imagelength,
        tile_width_px=page.tilewidth,
        tile_height_px=page.tilelength,
        offsets=np.asarray(page.dataoffsets, np.int64),
        sizes=np.asarray(page.databytecounts, np.int64),
        decode=decode,
    )


def _decoder(page: Any) -> TileDecoder:
    shape = page.tilelength, page.tilewidth, page.samplesperpixel
    if page.compression == _JPEG:
        return jpeg_decoder(page.jpegtables, shape, is_ycbcr=page.photometric == _YCBCR)
    decode_tile = page.decode  # made at its first use: here, and not by several threads at once

    def decode(data: bytes, position: int) -> Pixels:
        decoded = decode_tile(data, position, _fullsize=True)[0]
        if decoded is None or decoded.shape[1:] != shape:
            raise ValueError(f"it decodes to {None if decoded is None else decoded.shape[1:]} instead of {shape}")
        pixels: Pixels = decoded[0]
        return pixels

    return decode
