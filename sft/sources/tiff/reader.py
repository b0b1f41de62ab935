"""TIFF (SVS, OME-TIFF, GeoTIFF, other pyramids): compressed tiles and strips decoded directly, without a slide library.

OpenSlide draws every tile on a canvas with an alpha channel and returns it as another image; that costs several times the decoder's own
time (`benchmarks/reading.py`). This reader decodes a tile from the file straight to its place in the strip. The pixels are OpenSlide's,
bit for bit, for every file that both read. Files with 16 bits, floating-point numbers or more channels are read by it alone.
`sft.sources.tiff.pages` lists what is refused. Three points need care:

- *Damage must not pass.* libjpeg reports corrupt data as a warning and continues with noise. imagecodecs ignores such warnings, OpenSlide
  makes them errors, and so does this module, by decoding JPEG with simplejpeg. (It also objects to left-over bytes after the last block,
  which OpenSlide ignores. Other codecs find damage as far as their format allows.)
- *The colour space is the TIFF tag's*, regardless of the markers of a JPEG tile. An abbreviated stream (a tile without its tables) gets
  the tables and an Adobe marker of the tag's colour space as a prefix.
- *Strips cost.* A compressed strip is decoded completely for every block of rows in it. One of more than 64 MiB is warned of
  (`sft.sources.ReadCostWarning`), one above the host budget is refused.

Tiles that are not stored (zero bytes) have the background colour: white in uint8, 0 in other types, or in a GeoTIFF the value of
`sft.sources.tiff.metadata`.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from sft.common.byte_units import format_bytes
from sft.common.errors import SftError, SourceError, reason_text
from sft.sources.file_image import COSTLY_BYTES, FileImage, check_decode_bytes
from sft.sources.image import ImageFacts, Pixels, Rectangle, StatedResolution, missing_extra
from sft.sources.readers.geotiff import georeference_mpp, read_georeference
from sft.sources.readers.remote import remote_path
from sft.sources.readers.thread_pool import for_each, resolve_threads
from sft.sources.tiff.metadata import GeoTags, read_channel_names, read_geo_tags, read_resolution
from sft.sources.tiff.pages import select_levels
from sft.sources.tiff.segments import TiffLevel, TiffPlane, build_level

__all__ = ["TiffImage"]

#: bytes of the header of a TIFF
_MIN_OFFSET = 8
_SILENT = logging.NullHandler()


class _TiffHandle:
    """An open file. Reads carry their position, so threads share it; the file closes with the last reference."""

    def __init__(
        self, path: Path, levels: tuple[TiffLevel, ...], resolution: StatedResolution, names: tuple[str, ...], tags: GeoTags
    ) -> None:
        self.path, self.levels, self.resolution, self.channel_names, self.tags = path, levels, resolution, names, tags
        self.num_channels, self.dtype = levels[0].num_channels, levels[0].dtype
        missing = tags.missing_value_of(self.dtype)
        self.background = ((255 if self.dtype == np.uint8 else 0) if missing is None else missing,) * self.num_channels
        self.remote = remote_path(path)
        if self.remote is not None:
            return
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, num_bytes: int, offset: int) -> bytes:
        """Bytes of the file."""
        if self.remote is not None:
            return self.remote.read_range(offset, num_bytes)
        if hasattr(os, "pread"):
            return os.pread(self.descriptor, num_bytes, offset)
        with open(self.path, "rb", buffering=0) as file:  # Windows: descriptors have a position that threads would share
            file.seek(offset)
            return file.read(num_bytes)

    def fetch(self, tiles: Sequence[tuple[TiffPlane, int]]) -> dict[int, bytes]:
        """Bytes of some segments by their offset, of a remote file in one call; none of a local file, which is read segment by segment."""
        ranges = sorted({(int(plane.offsets[position]), int(plane.sizes[position])) for plane, position in tiles if plane.sizes[position]})
        if self.remote is None or not ranges:
            return {}
        return {offset: data for (offset, _), data in zip(ranges, self.remote.read_ranges(ranges), strict=True)}


class TiffImage(FileImage[_TiffHandle]):
    """TIFF as an `sft.sources.Raster`, decoded tile by tile: uint8, uint16, int16 or floating-point pixels, any number of channels.

    Args:
        path: of the file, or its URL (extra ``remote``).
        num_threads: number of tiles decoded in parallel. Default: `None` (the cores of this process, at most four)
        series: number of the image in an OME-TIFF of several. Default: `None` (the first)
        at: index along every axis other than channels, height and width that has more than one entry, such as ``{"t": 0, "z": 12}``;
            ``{"page": 3}`` in a file of several images without a description. Default: `None`
        host_budget_bytes: limit of a decoded strip or tile. Default: `None` (1 GiB)
        labels: True for a label map: integers of any size, indices of palettes, and 0 for missing tiles. Default: `False`

    Raises:
        SourceError: the file does not exist. Other errors are raised at the first use: `NotTiledError` for another kind of TIFF.
    """

    # Defaults for pickles of older releases.
    series: int | None = None
    at: Mapping[str, int] = MappingProxyType({})
    host_budget_bytes: int | str | None = None
    labels: bool = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        num_threads: int | None = None,
        series: int | None = None,
        at: Mapping[str, int] | None = None,
        host_budget_bytes: int | str | None = None,
        labels: bool = False,
    ) -> None:
        super().__init__(path)
        self.num_threads = resolve_threads(num_threads)
        self.series, self.at, self.host_budget_bytes, self.labels = series, dict(at or {}), host_budget_bytes, labels
        #: tiles of the rectangles read so far; exact where one thread reads at a time
        self.num_tiles_decoded = 0

    @property
    def has_missing_tiles(self) -> bool:
        """True if some tiles were not recorded; they have the background colour."""
        return any(bool((plane.sizes == 0).any()) for level in self._handle().levels for plane in level.planes)

    @property
    def is_geotiff(self) -> bool:
        """True for a GeoTIFF: its missing tiles are those of GDAL."""
        return self._handle().tags.is_geo

    def check_complete(self) -> None:
        """Refuse a truncated file before the first read.

        Raises:
            SourceError: tiles lie beyond the end of the file, or in its header.
        """
        num_bytes = self.path.stat().st_size
        for number, level in enumerate(self._handle().levels):
            offsets, sizes = (np.concatenate([getattr(plane, name) for plane in level.planes]) for name in ("offsets", "sizes"))
            ends = offsets + sizes
            beyond = np.flatnonzero(((ends > num_bytes) | (offsets < _MIN_OFFSET)) & (sizes > 0))
            if len(beyond):
                beyond %= len(level.planes[0].offsets)
                place = level.place(int(beyond[0]))
                raise SourceError(
                    f"cannot use {self.path} ({num_bytes} bytes): {len(beyond)} of {len(ends)} tiles of level {number} are outside its "
                    f"data, the first at column {place.columns.start}, row {place.rows.start}. It is cut short or "
                    'damaged; compare its size with the original and copy it again, or read the intact tiles with on_error="fill".'
                )

    def _open(self) -> _TiffHandle:
        try:
            import tifffile
        except ImportError as error:
            raise missing_extra(f"decode tiles of {self.path}", "fast", error) from error
        # Without a handler, logging prints its messages on stderr; the errors here say the same, with the file.
        logging.getLogger("tifffile").addHandler(_SILENT)
        try:
            with ExitStack() as stack:
                file: Any = stack.enter_context(self.path.open("rb")) if remote_path(self.path) is not None else self.path
                tiff = stack.enter_context(tifffile.TiffFile(file))
                pages = select_levels(self.path, tiff, series=self.series, at=self.at, labels=self.labels)
                levels = tuple(map(build_level, pages))
                resolution = read_resolution(tiff, pages[0].keyframe, self.series or 0)
                names = read_channel_names(tiff, self.series or 0, levels[0].num_channels)
                tags = read_geo_tags(self.path)
                handle = _TiffHandle(self.path, levels, resolution, names, tags)
                if self.labels and tags.missing_value is None:
                    handle.background = (0,) * handle.num_channels
        except (SftError, ImportError):
            raise
        except Exception as error:
            raise SourceError(
                f"cannot open {self.path} ({self.path.stat().st_size} bytes): {type(error).__name__}: {reason_text(error)}. "
                f"Either no TIFF, or cut "
                "short; compare its size with the original and copy it again."
            ) from error

        for level in levels:
            unit = "a tile" if level.is_tiled else "a strip"
            check_decode_bytes(self.path, unit, level.tile_bytes, self.host_budget_bytes)
        return handle

    def _describe(self, handle: _TiffHandle) -> ImageFacts:
        georeference = read_georeference(self.path) if handle.tags.is_geo else None
        return ImageFacts(
            level_dimensions=tuple((level.width_px, level.height_px) for level in handle.levels),
            tiles_px=tuple((level.tile_width_px, level.tile_height_px) for level in handle.levels),
            num_channels=handle.num_channels,
            mpp=handle.resolution.mpp or georeference_mpp(georeference),
            mpp_note=handle.resolution.note,
            background=handle.background,
            nodata=handle.tags.nodata,
            georeference=georeference,
            dtype=handle.dtype.name,
            channel_names=handle.channel_names,
            cost_note=_cost_note(handle.levels),
        )

    def _read_channels(self, handle: _TiffHandle, rectangle: Rectangle, channels: Sequence[int]) -> Pixels:
        """Planes of other channels are not decoded."""
        planes = {plane.first_channel: plane for plane in handle.levels[rectangle.level].planes if plane.num_channels == 1}
        if not planes.keys() >= set(channels):
            return super()._read_channels(handle, rectangle, channels)
        chosen = tuple(replace(planes[channel], first_channel=place) for place, channel in enumerate(channels))
        return self._read_planes(handle, rectangle, chosen)

    def _read(self, handle: _TiffHandle, rectangle: Rectangle) -> Pixels:
        return self._read_planes(handle, rectangle, handle.levels[rectangle.level].planes)

    def _read_planes(self, handle: _TiffHandle, rectangle: Rectangle, planes: Sequence[TiffPlane]) -> Pixels:
        """A rectangle of some planes, each at its first channel."""
        level = handle.levels[rectangle.level]
        out = np.empty((*rectangle.shape, sum(plane.num_channels for plane in planes)), handle.dtype)
        segments = [(plane, position) for position in level.positions_in(rectangle) for plane in planes]
        fetched = handle.fetch(segments)

        def decode(segment: tuple[TiffPlane, int]) -> None:
            """Decode a segment into its place in the rectangle."""
            plane, position = segment
            place = level.place(position)
            overlap = rectangle.intersect(place)
            channels = slice(plane.first_channel, plane.first_channel + plane.num_channels)
            target = out[overlap.slices_in(rectangle)][..., channels]
            if plane.sizes[position] == 0:
                target[:] = handle.background[channels]
                return
            try:
                pixels = _decoded(handle, plane, position, fetched, min_rows=overlap.rows.stop - place.rows.start)
            except Exception as error:
                raise SourceError(
                    f"cannot decode the {'tile' if level.is_tiled else 'strip'} at column {place.columns.start}, row {place.rows.start} "
                    f"({level.tile_width_px} x {level.tile_height_px} px) of level {rectangle.level} of {self.path}: "
                    f"{reason_text(error)}. The tile is damaged; copy the file again, leave the slide out, or fill such tiles with "
                    'background (on_error="fill"). reader="openslide" is the other decoder.'
                ) from error
            target[:] = pixels[overlap.slices_in(place)]

        for_each(decode, segments, self.num_threads)
        self.num_tiles_decoded += len(segments)
        return out


def _decoded(handle: _TiffHandle, plane: TiffPlane, position: int, fetched: Mapping[int, bytes], *, min_rows: int) -> Pixels:
    """Pixels of a segment, at least ``min_rows`` rows.

    Raises:
        ValueError: the segment is damaged. Decoders raise other errors.
    """
    offset, size = int(plane.offsets[position]), int(plane.sizes[position])
    data = fetched[offset] if offset in fetched else handle.read(size, offset)
    if offset < _MIN_OFFSET:
        raise ValueError(f"its place in the file is given as {offset}, in the header")
    if len(data) != size:
        raise ValueError(f"the file ends after {len(data)} of {size} bytes")
    pixels = plane.decode(data, plane.first_index + position)
    if pixels.shape[0] < min_rows:
        raise ValueError(f"it has {pixels.shape[0]} of {min_rows} rows")
    return pixels


def _cost_note(levels: Sequence[TiffLevel]) -> str:
    """Cost of reading compressed strips, or large tiles; empty where a read decodes little more than its pixels."""
    level = max(levels, key=lambda level: level.tile_bytes)
    if level.tile_bytes < COSTLY_BYTES or not (level.is_tiled or level.is_compressed):
        return ""
    unit = "tiles" if level.is_tiled else "compressed strips"
    return (
        f"its {unit} of {level.tile_width_px} x {level.tile_height_px} px are decoded completely, into {format_bytes(level.tile_bytes)} "
        "each, for every block of rows in them; a tiled TIFF with tiles of 512 px is read faster and in less memory"
    )
