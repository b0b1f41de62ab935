"""Cloud-optimized GeoTIFF (COG), through rasterio: rows go to a tiled GeoTIFF, which GDAL's COG driver then orders and reduces."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sft.common.errors import InputError
from sft.prediction.pyramid import Pyramid
from sft.prediction.raster import FileWriter, PredictedRaster, RasterRows, check_tiff_type
from sft.sources.image import missing_extra

__all__ = ["CogWriter"]

#: Tiles that GDAL keeps decoded, in MiB; its default is 5 % of the memory.
_CACHE_MIB = 64


class CogWriter(FileWriter):
    """Writer of a COG with the coordinate system and transform of the input, and overviews (Deflate).

    Overviews of classes take the nearest pixel, those of other values the average. Names of channels become band descriptions; names of
    classes become tags ``CLASS_0``, ``CLASS_1``, ...

    Args:
        path: of the file, such as ``map.tif``.
        tile_px: side of a tile; a multiple of 16, at least 128. Default: 512
        nodata: value that marks pixels without data. Default: `None`

    Raises:
        InputError: an argument is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], *, tile_px: int = 512, nodata: float | None = None) -> None:
        super().__init__(path)
        if tile_px < 128 or tile_px % 16:
            raise InputError(f"tile_px {tile_px}: tiles of a COG have a multiple of 16 px, at least 128; give 256 or 512")
        self._tile_px, self._nodata = tile_px, nodata
        self._dataset: Any = None

    def begin(self, raster: PredictedRaster) -> None:
        """Begin a raster; see `RasterWriter`."""
        try:
            import rasterio
            from affine import Affine
        except ImportError as error:
            raise missing_extra(f"write {self.path}", "geo", error) from error
        check_tiff_type(raster, "GeoTIFF")
        self._raster = raster
        self._new_partial()
        self._base = self._new_temporary(".tif")
        profile: dict[str, Any] = {
            "driver": "GTiff",
            "height": raster.height_px,
            "width": raster.width_px,
            "count": raster.num_channels,
            "dtype": raster.dtype.name,
            "nodata": self._nodata,
            "tiled": True,
            "blockxsize": self._tile_px,
            "blockysize": self._tile_px,
            "interleave": "band",
            "compress": "deflate",
            "zlevel": 1,
            "bigtiff": "IF_SAFER",
            "num_threads": 1,
        }
        if raster.georeference is not None:
            profile["transform"] = Affine(*raster.georeference.transform)
            if raster.georeference.crs_wkt:
                profile["crs"] = rasterio.crs.CRS.from_wkt(raster.georeference.crs_wkt)
        with self._gdal():
            self._dataset = rasterio.open(self._base, "w", **profile)
            for channel in range(raster.num_channels if raster.names and not raster.is_classes else 0):
                self._dataset.set_band_description(channel + 1, raster.name(channel))
            if raster.is_classes:
                self._dataset.update_tags(**{f"CLASS_{index}": name for index, name in enumerate(raster.names)})
        size = (raster.height_px, raster.width_px)
        self._rows = Pyramid(raster, (size,), block_rows=self._tile_px, emit=self._write_block)

    def write(self, rows: RasterRows) -> None:
        """Write the next rows; see `RasterWriter`."""
        with self._gdal():
            self._rows.add(rows)

    def finish(self) -> None:
        """Complete the file under its temporary name; see `RasterWriter`."""
        import rasterio.shutil

        with self._gdal():
            self._dataset.close()
            self._dataset = None
            rasterio.shutil.copy(
                str(self._base),
                str(self._partial),
                driver="COG",
                COMPRESS="DEFLATE",
                BLOCKSIZE=self._tile_px,
                OVERVIEW_RESAMPLING="NEAREST" if self._raster.is_classes else "AVERAGE",
                BIGTIFF="IF_SAFER",
                NUM_THREADS="2",
            )
        self._base.unlink()

    def discard(self) -> None:
        """Remove all temporary files; no effect after ``publish``."""
        if self._dataset is not None:
            dataset, self._dataset = self._dataset, None
            with self._gdal():
                dataset.close()
        if self._partial is not None:  # GDAL's own temporary files
            self._temporary += self._partial.parent.glob(f"{self._partial.name}.*")
        super().discard()

    def _write_block(self, level: int, top: int, block: RasterRows) -> None:
        del level
        self._dataset.write(block, window=((top, top + block.shape[1]), (0, self._raster.width_px)))

    @contextmanager
    def _gdal(self) -> Iterator[None]:
        """GDAL with a small cache; its errors become source errors. The environment belongs to the thread."""
        import rasterio
        from rasterio.errors import NotGeoreferencedWarning, RasterioError

        try:
            with rasterio.Env(GDAL_CACHEMAX=_CACHE_MIB), warnings.catch_warnings():
                warnings.simplefilter("ignore", NotGeoreferencedWarning)
                yield
        except (RasterioError, OSError) as error:
            raise self._refusal(error) from error
