"""OME-TIFF: a pyramid of compressed tiles, in one pass over the rows.

A TIFF writer needs the tiles of a level, and of a channel, one after the other; rows contain tiles of all of them. Tiles are therefore
compressed at once and appended to a temporary file next to the target. At the end they are copied, still compressed, into the TIFF, in its
order. Levels are SubIFDs of the page of their channel, as OME-TIFF 6 defines pyramids.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

from sft.common.errors import InputError
from sft.prediction.pyramid import Pyramid, level_sizes, padded_tiles
from sft.prediction.raster import FileWriter, PredictedRaster, RasterRows, check_tiff_type
from sft.sources.image import missing_extra
from sft.sources.readers.thread_pool import resolve_threads

__all__ = ["OmeTiffWriter"]

_COMPRESSION_LEVEL = 6
#: A classic TIFF has offsets of 32 bits; compressed tiles may be slightly larger than raw ones.
_MAX_CLASSIC_BYTES = 2**31


class OmeTiffWriter(FileWriter):
    """Writer of a tiled, pyramidal OME-TIFF (Deflate), for QuPath, Fiji, napari, tifffile and OpenSlide.

    It stores the size of a pixel, and the names of channels. Classes have one channel; a network with several output channels gives a page
    for each (axes ``CYX``).

    Args:
        path: of the file, such as ``map.ome.tif``.
        tile_px: side of a tile; a multiple of 16. Default: 512

    Raises:
        InputError: an argument is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], *, tile_px: int = 512) -> None:
        super().__init__(path)
        if tile_px < 16 or tile_px % 16:
            raise InputError(f"tile_px {tile_px}: tiles of a TIFF have a multiple of 16 px; give 256 or 512")
        self._tile_px = tile_px
        self._spool: _TileSpool | None = None

    def begin(self, raster: PredictedRaster) -> None:
        """Begin a raster; see `RasterWriter`."""
        try:
            import tifffile  # noqa: F401
        except ImportError as error:
            raise missing_extra(f"write {self.path}", "fast", error) from error
        check_tiff_type(raster, "OME-TIFF")
        self._raster = raster
        self._sizes = level_sizes(raster.height_px, raster.width_px, tile_px=self._tile_px)
        self._new_partial()
        try:
            self._spool = _TileSpool(self._new_temporary(".tiles"), self._tile_px)
        except OSError as error:
            raise self._refusal(error) from error
        self._pyramid = Pyramid(raster, self._sizes, block_rows=self._tile_px, emit=self._spool.add)

    def write(self, rows: RasterRows) -> None:
        """Write the next rows; see `RasterWriter`."""
        try:
            self._pyramid.add(rows)
        except OSError as error:
            raise self._refusal(error) from error

    def finish(self) -> None:
        """Complete the file under its temporary name; see `RasterWriter`."""
        assert self._spool is not None and self._partial is not None
        try:
            self._assemble(self._partial, self._spool)
            with self._partial.open("rb") as file:
                os.fsync(file.fileno())
        except (OSError, ValueError) as error:
            raise self._refusal(error) from error
        self._close_spool()

    def discard(self) -> None:
        """Remove all temporary files; no effect after ``publish``."""
        self._close_spool()
        super().discard()

    def _close_spool(self) -> None:
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    def _assemble(self, path: Path, spool: _TileSpool) -> None:
        import tifffile

        raster, tile = self._raster, (self._tile_px, self._tile_px)
        is_big = spool.num_bytes >= _MAX_CLASSIC_BYTES
        resolution = {"resolution": (1e4 / raster.mpp[0], 1e4 / raster.mpp[1]), "resolutionunit": "CENTIMETER"} if raster.mpp else {}
        with tifffile.TiffWriter(path, bigtiff=is_big, ome=True) as tiff:
            for level, (height_px, width_px) in enumerate(self._sizes):
                axes, shape = (
                    ("CYX", (raster.num_channels, height_px, width_px)) if raster.num_channels > 1 else ("YX", (height_px, width_px))
                )
                first: dict[str, Any] = {"subifds": len(self._sizes) - 1, "metadata": {"axes": axes, **self._metadata()}, **resolution}
                tiff.write(
                    spool.read(level, raster.num_channels),
                    shape=shape,
                    dtype=raster.dtype,
                    tile=tile,
                    photometric="minisblack",
                    compression="adobe_deflate",
                    **(first if level == 0 else {"subfiletype": 1, "metadata": None}),
                )

    def _metadata(self) -> dict[str, Any]:
        """OME attributes of the image."""
        raster = self._raster
        metadata: dict[str, Any] = {"Name": self.path.name.split(".")[0]}
        if raster.mpp is not None:
            metadata |= {
                "PhysicalSizeX": raster.mpp[0],
                "PhysicalSizeXUnit": "µm",
                "PhysicalSizeY": raster.mpp[1],
                "PhysicalSizeYUnit": "µm",
            }
        if raster.num_channels > 1:
            metadata["Channel"] = {"Name": [raster.name(channel) for channel in range(raster.num_channels)]}
        elif raster.is_classes and raster.names:
            metadata["Channel"] = {"Name": "classes: " + ", ".join(f"{index} {name}" for index, name in enumerate(raster.names))}
        return metadata


class _TileSpool:
    """Compressed tiles in a temporary file, with the place of each."""

    def __init__(self, path: Path, tile_px: int) -> None:
        self._file: IO[bytes] = path.open("w+b")
        self._tile_px = tile_px
        self._places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._threads = ThreadPoolExecutor(resolve_threads(None), thread_name_prefix="sft-encode")
        self.num_bytes = 0  #: of all tiles

    def add(self, level: int, top: int, block: RasterRows) -> None:
        """Compress and append the tiles of a block."""
        del top  # blocks arrive in order
        tiles = list(padded_tiles(block, self._tile_px))
        for (channel, _), data in zip(tiles, self._threads.map(_compressed, (tile for _, tile in tiles)), strict=True):
            self._file.write(data)
            self._places.setdefault((level, channel), []).append((self.num_bytes, len(data)))
            self.num_bytes += len(data)

    def read(self, level: int, num_channels: int) -> Iterator[bytes]:
        """The tiles of a level, channel after channel."""
        self._file.flush()
        for channel in range(num_channels):
            for offset, length in self._places[level, channel]:
                yield os.pread(self._file.fileno(), length, offset)

    def close(self) -> None:
        """Close the file and end the threads."""
        self._threads.shutdown()
        self._file.close()


_compressed = partial(zlib.compress, level=_COMPRESSION_LEVEL)
