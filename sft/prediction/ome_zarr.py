"""OME-Zarr: a multiscale image as a folder of chunks, written in rows of chunks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from sft.common.errors import InputError
from sft.prediction.pyramid import Pyramid, level_sizes
from sft.prediction.raster import FileWriter, PredictedRaster, RasterRows
from sft.sources.image import missing_extra

__all__ = ["OmeZarrWriter"]

_ZARR_FORMATS: dict[str, Literal[2, 3]] = {"0.4": 2, "0.5": 3}


class OmeZarrWriter(FileWriter):
    """Writer of an OME-Zarr image: axes ``yx`` for classes and single channels, ``cyx`` otherwise.

    Args:
        path: of the folder, such as ``map.ome.zarr``; an existing folder is replaced.
        chunk_px: side of a chunk; even. Default: 512
        version: of the format: ``"0.4"`` (Zarr format 2) or ``"0.5"`` (Zarr format 3). Default: ``"0.4"``

    Raises:
        InputError: an argument is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], *, chunk_px: int = 512, version: Literal["0.4", "0.5"] = "0.4") -> None:
        super().__init__(path)
        if chunk_px < 2 or chunk_px % 2:
            raise InputError(f"chunk_px {chunk_px}: give an even number, such as 512")
        if version not in _ZARR_FORMATS:
            raise InputError(f"version {version!r}: choose one of {', '.join(map(repr, _ZARR_FORMATS))}")
        if self.path.exists() and not _is_zarr(self.path):
            raise InputError(f"{self.path} exists and is not a Zarr folder; writing would remove it. Name another path.")
        self._chunk_px, self._version = chunk_px, version

    def begin(self, raster: PredictedRaster) -> None:
        """Begin a raster; see `RasterWriter`."""
        try:
            import zarr
        except ImportError as error:
            raise missing_extra(f"write {self.path}", "zarr", error) from error
        self._raster = raster
        sizes = level_sizes(raster.height_px, raster.width_px, tile_px=self._chunk_px)
        leading = (raster.num_channels,) if raster.num_channels > 1 else ()
        separator: dict[str, Any] = {"dimension_separator": "/"} if self._version == "0.4" else {}
        with self._refusing():
            group = zarr.open_group(str(self._new_partial()), mode="w", zarr_format=_ZARR_FORMATS[self._version])
            encoding: dict[str, Any] = {"chunk_key_encoding": {"name": "v2" if separator else "default", "separator": "/"}}
            self._arrays = [
                group.create_array(
                    str(level),
                    shape=(*leading, *size),
                    chunks=(*(1 for _ in leading), self._chunk_px, self._chunk_px),
                    dtype=raster.dtype,
                    **encoding,
                )
                for level, size in enumerate(sizes)
            ]
            described = self._described(sizes)
            group.attrs.update({"ome": {"version": self._version, **described}} if self._version == "0.5" else described)
        self._pyramid = Pyramid(raster, sizes, block_rows=self._chunk_px, emit=self._write_block)

    def write(self, rows: RasterRows) -> None:
        """Write the next rows; see `RasterWriter`."""
        with self._refusing():
            self._pyramid.add(rows)

    def finish(self) -> None:
        """Complete the folder under its temporary name; see `RasterWriter`."""
        self._arrays = []

    def _write_block(self, level: int, top: int, block: RasterRows) -> None:
        rows = slice(top, top + block.shape[1])
        if self._raster.num_channels > 1:
            self._arrays[level][:, rows] = block
        else:
            self._arrays[level][rows] = block[0]

    def _described(self, sizes: tuple[tuple[int, int], ...]) -> dict[str, Any]:
        """The multiscales metadata."""
        raster = self._raster
        unit = {"unit": "micrometer"} if raster.mpp else {}
        leading = raster.num_channels > 1
        axes: list[dict[str, str]] = [{"name": "c", "type": "channel"}] if leading else []
        axes += [{"name": name, "type": "space", **unit} for name in "yx"]
        x, y = raster.mpp or (1.0, 1.0)
        datasets = []
        for level in range(len(sizes)):
            factor = 2.0**level
            # The centre of the first pixel moves by half of the difference; the levels of classes take the top left pixel.
            shift = 0.0 if raster.is_classes else (factor - 1) / 2
            scale, translation = ([y * factor, x * factor], [y * shift, x * shift])
            datasets.append(
                {
                    "path": str(level),
                    "coordinateTransformations": [
                        {"type": "scale", "scale": [1.0] * leading + scale},
                        {"type": "translation", "translation": [0.0] * leading + translation},
                    ],
                }
            )
        multiscale: dict[str, Any] = {"name": self.path.name.split(".")[0], "axes": axes, "datasets": datasets}
        if self._version == "0.4":
            multiscale["version"] = "0.4"
        described: dict[str, Any] = {"multiscales": [multiscale]}
        if leading:
            described["omero"] = {"channels": [{"label": raster.name(channel)} for channel in range(raster.num_channels)]}
        elif raster.is_classes:
            described["image-label"] = {"version": self._version, "properties": [
                {"label-value": index, "name": name} for index, name in enumerate(raster.names)
            ]}  # fmt: skip
        if raster.georeference is not None:
            described["georeference"] = {"crs_wkt": raster.georeference.crs_wkt, "transform": [*raster.georeference.transform]}
        return described

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, shutil.Error) as error:
            raise self._refusal(error) from error


def _is_zarr(path: os.PathLike[str]) -> bool:
    return any(os.path.isfile(os.path.join(path, name)) for name in ("zarr.json", ".zgroup", ".zarray"))
