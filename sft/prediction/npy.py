"""``.npy`` files of predictions, mapped and written row by row."""

from __future__ import annotations

import os

import torch

from sft.prediction.raster import FileWriter, PredictedRaster, RasterRows
from sft.sources.host_arrays import release_pages
from sft.sources.sink import NpyFile

__all__ = ["NpyWriter"]


class NpyWriter(FileWriter):
    """Writer of an array: ``[H, W]`` for classes, ``[C, H, W]`` otherwise.

    Args:
        path: of the file.

    Raises:
        InputError: no file can have this path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._file: NpyFile | None = None

    def begin(self, raster: PredictedRaster) -> None:
        """Begin a raster; see `RasterWriter`."""
        shape = (raster.num_channels, raster.height_px, raster.width_px)
        self._top = 0
        self.discard()
        self._is_map = raster.is_classes
        shape_of_file, dtype = shape[1:] if raster.is_classes else shape, getattr(torch, raster.dtype.name)
        self._file = NpyFile(self.path, shape_of_file, dtype, part_name=self._new_temporary(".npy").name)

    def write(self, rows: RasterRows) -> None:
        """Write the next rows; see `RasterWriter`."""
        assert self._file is not None
        self._file.check()
        bottom = self._top + rows.shape[1]
        image = self._file.array[None] if self._is_map else self._file.array
        image[:, self._top : bottom] = rows
        release_pages(image[:, self._top : bottom].transpose(1, 2, 0))
        self._top = bottom

    def finish(self) -> None:
        """Nothing remains to be done; see `RasterWriter`."""

    def publish(self) -> None:
        """Rename the file to its final path; see `RasterWriter`."""
        if self._file is not None:
            self._file.publish()
            self._file = None
            self._temporary.clear()

    def discard(self) -> None:
        """Remove all temporary files; no effect after ``publish``."""
        if self._file is not None:
            self._file.discard()
            self._file = None
        super().discard()
