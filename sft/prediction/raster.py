"""Description of a predicted raster, and the interface of the writers that store it."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from sft.common.atomic_files import PARTIAL_MARK, as_path, folder_problem, fsync_folder
from sft.common.errors import InputError, SourceError
from sft.prediction.identity import sha256_of_text
from sft.sources.georeference import Georeference

__all__ = ["FileWriter", "PredictedRaster", "RasterRows", "RasterWriter", "check_tiff_type"]

#: Element types of pixels in a TIFF, of all programs that read these files.
_TIFF_TYPES = ("uint8", "uint16", "int16", "float32", "float64")
#: Rows of a raster: ``[channels, rows, width]``.
RasterRows: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRaster:
    """Description of a predicted raster.

    Attributes:
        height_px, width_px: size of the raster.
        num_channels: 1 for classes; otherwise the number of the model's output channels.
        dtype: element type.
        is_classes: True if the values are class indices, False for values of a continuous quantity.
        names: names of the classes, or of the channels; empty if they have none.
        scale: input pixels (of the largest level) per raster pixel, (x, y).
        origin_px: left and top edge of the first raster pixel, in input pixels, (x, y).
        mpp: micrometres per raster pixel, (x, y); ``None`` if unknown.
        georeference: map coordinates of the raster's pixels; ``None`` for images that are not maps.
        value_scale: raster value that stands for 1.0 (255 for probabilities in uint8).
    """

    height_px: int
    width_px: int
    num_channels: int
    dtype: np.dtype[Any]
    is_classes: bool = False
    names: tuple[str, ...] = ()
    scale: tuple[float, float] = (1.0, 1.0)
    origin_px: tuple[float, float] = (0.0, 0.0)
    mpp: tuple[float, float] | None = None
    georeference: Georeference | None = None
    value_scale: float = 1.0

    def name(self, index: int) -> str:
        """Name of a class or channel."""
        return self.names[index] if index < len(self.names) else f"{'class' if self.is_classes else 'channel'} {index}"


@runtime_checkable
class RasterWriter(Protocol):
    """Writer of a raster, which arrives in rows from the top.

    ``begin``, then ``write`` until all rows are there, then ``finish``, then ``publish``. After an error ``discard``; before ``publish``
    nothing exists at the final path. All methods are called from one thread at a time.
    """

    @property
    def path(self) -> Path:
        """Final path."""
        ...

    def begin(self, raster: PredictedRaster) -> None:
        """Begin a raster.

        Raises:
            InputError: the format cannot hold it.
            SourceError: the file cannot be written, or a library is missing.
        """
        ...

    def write(self, rows: RasterRows) -> None:
        """Write the next rows, ``[channels, h, width]``; the array may be kept.

        Raises:
            SourceError: the file cannot be written.
        """
        ...

    def finish(self) -> None:
        """Complete the file under its temporary name.

        Raises:
            SourceError: the file cannot be written.
        """
        ...

    def publish(self) -> None:
        """Rename the file to its final path.

        Raises:
            SourceError: it cannot be renamed.
        """
        ...

    def discard(self) -> None:
        """Remove all temporary files; no effect after ``publish``."""
        ...


def check_tiff_type(raster: PredictedRaster, format_name: str) -> None:
    """Refuse element types that a kind of TIFF does not have.

    Raises:
        InputError: of a raster with such a type.
    """
    if raster.dtype.name not in _TIFF_TYPES:
        raise InputError(f"{format_name} has no pixels of {raster.dtype}: choose dtype uint8, uint16 or float32, or write .npy or OME-Zarr")


class FileWriter(ABC):
    """Base class of writers of one file, or one folder, with a temporary name until it is published.

    Args:
        path: final path; an existing file is replaced.

    Raises:
        InputError: no file can have this path, or its folder does not exist or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        purpose = f"a prediction to write as {type(self).__name__}"
        self._path = as_path(path, purpose)
        folder = self._path.parent
        if not folder.is_dir():
            raise InputError(f"{purpose}: {os.fspath(folder)!r} is not a folder; make it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"{purpose}: no permission to write into {os.fspath(folder)!r}; choose another folder")
        self._temporary: list[Path] = []
        self._partial: Path | None = None
        self._mark: str | None = None
        self._num_marked = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({os.fspath(self._path)!r})"

    @property
    def path(self) -> Path:
        """Final path."""
        return self._path

    @abstractmethod
    def begin(self, raster: PredictedRaster) -> None:
        """Begin a raster; see `RasterWriter`."""

    @abstractmethod
    def write(self, rows: RasterRows) -> None:
        """Write the next rows; see `RasterWriter`."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the file under its temporary name; see `RasterWriter`."""

    def mark_temporary_files(self, owner: str | None) -> None:
        """Names of temporary files by which the next process of the same owner finds those that a kill has left; these are removed here.

        Args:
            owner: of the files, one process at a time, such as the path of a journal; None for random names.
        """
        self._mark = None if owner is None else sha256_of_text(f"{owner}\n{self._path.name}")[:16]
        self._num_marked = 0
        if self._mark is not None:
            for path in self._path.parent.glob(f"{PARTIAL_MARK}{self._mark}-*"):
                _remove(path)

    def publish(self) -> None:
        """Rename the file to its final path; see `RasterWriter`."""
        partial = self._partial
        if partial is None:
            return
        replaced = self._path.with_name(f"{PARTIAL_MARK}{secrets.token_hex(8)}") if self._path.is_dir() else None
        try:
            if replaced is not None:
                os.rename(self._path, replaced)  # a folder cannot be replaced by a rename
            os.replace(partial, self._path)
            fsync_folder(self._path.parent)
        except OSError as error:
            raise self._refusal(error) from error
        self._partial = None
        self._temporary = [path for path in self._temporary if path != partial]
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        self.discard()

    def discard(self) -> None:
        """Remove all temporary files; no effect after ``publish``."""
        self._partial = None
        while self._temporary:
            _remove(self._temporary.pop())

    def _new_temporary(self, suffix: str) -> Path:
        """A new temporary path next to the target."""
        self._num_marked += 1
        name = secrets.token_hex(8) if self._mark is None else f"{self._mark}-{self._num_marked}"
        path = self._path.with_name(f"{PARTIAL_MARK}{name}{suffix}")
        self._temporary.append(path)
        return path

    def _new_partial(self) -> Path:
        """The temporary path of the result; it has the suffix of the target, which libraries read."""
        self.discard()
        self._partial = self._new_temporary("".join(self._path.suffixes[-2:]))
        return self._partial

    def _refusal(self, error: BaseException) -> SourceError:
        reason = folder_problem(self._path.parent, error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        number = error.errno if isinstance(error, OSError) else errno.EIO
        return SourceError(number, f"cannot write {self._path}: {reason}. Make room, or name a file in a folder that can be written.")


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
