"""A ``.npy`` file that is filled strip by strip and appears under its name when it is complete.

It is written under another name beside the target and renamed at the end, so a failure leaves what was there before, and whoever has an
older file open or mapped keeps it.

*A full disk must not kill the process.* Touching a page of a mapping whose block cannot be allocated is a SIGBUS. All blocks are therefore
allocated before the file is mapped, where a full disk is an error like any other.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch

from sft.analysis.interval import Interval
from sft.errors import InputError, SourceError
from sft.sources.host import AnyArray, check_mapping, release_pages
from sft.units import format_bytes

__all__ = ["NpyFile", "allocate_blocks", "numpy_dtype", "free_space_text"]

#: The path itself is at fault, not the disk behind it.
_CALLER_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
#: File systems that cannot preallocate say so in one of these ways.
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_PIECE_BYTES = 1 << 20


def numpy_dtype(dtype: torch.dtype) -> np.dtype[np.generic] | None:
    """NumPy's name for an element type; None where it has none (bfloat16, the 8-bit floats).

    >>> numpy_dtype(torch.float16), numpy_dtype(torch.bfloat16)
    (dtype('float16'), None)
    """
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return None


class NpyFile:
    """A file of zeros to be filled in, in C order.

    Args:
        path: what it will be called; a file there is replaced by :meth:`publish`.
        shape: of the array.
        dtype: of the array; one that NumPy has.

    Raises:
        InputError: no file can be made there.
        SourceError: there is no room for it, or the disk fails. Nothing is left behind in either case.
    """

    def __init__(self, path: Path, shape: Sequence[int], dtype: torch.dtype) -> None:
        kind = numpy_dtype(dtype)
        assert kind is not None, f"{dtype} is refused when the plan is made"
        # Through a link, as numpy.save writes; a name of its own, as the target's may be as long as names can be.
        self.path = Path(os.path.realpath(path))
        self._part: Path | None = self.path.with_name(f".sft-{secrets.token_hex(8)}.part")
        num_bytes = prod(shape) * kind.itemsize
        try:
            if self.path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(self.path))
            self.array = _mapped(self._part, tuple(shape), kind)
        except OSError as error:
            self.discard()
            wanted = f"cannot write an output of shape {tuple(shape)} ({format_bytes(num_bytes)}) to {os.fspath(path)!r}: {error.strerror}"
            if isinstance(error, _CALLER_ERRORS) or error.errno == errno.EROFS:
                raise InputError(f"{wanted}. Give a path in a folder that exists and may be written to.") from error
            raise SourceError(error.errno, f"{wanted}{free_space_text(self.path.parent)}. Make room, or choose another disk.") from error
        except BaseException:
            self.discard()
            raise

    def check(self) -> None:
        """Refuse to touch a file that somebody has cut short; call it before every access.

        Raises:
            SourceError: it is shorter than it was.
        """
        check_mapping(self.array, f"the output {os.fspath(self.path)!r}")

    def release(self, row_dim: int | None = None, batch: Interval | None = None, rows: Interval | None = None) -> None:
        """Hand the pages of what was written back to the kernel.

        Args:
            row_dim: the dimension of rows; None for an array that is no image, and all of it.
            batch: batch elements, all of them by default.
            rows: rows, all of them by default.
        """
        shape = self.array.shape
        if row_dim is None or rows is None:
            release_pages(self.array.reshape(-1, 1, 1))
            return
        images = self.array.reshape(shape[0], prod(shape[1:row_dim]), shape[row_dim], prod(shape[row_dim + 1 :]))
        for image in images[slice(None) if batch is None else slice(batch.start, batch.stop)]:
            release_pages(image[:, rows.start : rows.stop].transpose(1, 2, 0))

    def publish(self) -> None:
        """Give the file its name; a second call does nothing.

        Raises:
            SourceError: the file cannot be renamed. It stays unpublished.
        """
        if self._part is None:
            return
        try:
            os.replace(self._part, self.path)
        except OSError as error:
            raise SourceError(
                error.errno, f"cannot rename the finished output to {os.fspath(self.path)!r}: {error.strerror}. Choose another path."
            ) from error
        self._part = None

    def discard(self) -> None:
        """Remove the file if it is not published; the array stays usable."""
        part, self._part = self._part, None
        if part is not None:
            part.unlink(missing_ok=True)


def _mapped(path: Path, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> AnyArray:
    """A new file with all its blocks, mapped."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    with os.fdopen(descriptor, "r+b") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()
        offset = file.tell()
        allocate_blocks(descriptor, offset, prod(shape) * dtype.itemsize)
        return np.memmap(file, dtype, "r+", offset=offset, shape=shape)


def allocate_blocks(descriptor: int, offset: int, num_bytes: int) -> None:
    """Give a stretch of a file blocks on the disk; they hold zeros.

    Raises:
        OSError: there are not so many.
    """
    allocate = getattr(os, "posix_fallocate", None)
    if allocate is not None:
        try:
            allocate(descriptor, offset, max(1, num_bytes))
            return
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise
    zeros = bytes(_PIECE_BYTES)
    os.lseek(descriptor, offset, os.SEEK_SET)
    while num_bytes > 0:
        num_bytes -= os.write(descriptor, zeros[: min(num_bytes, _PIECE_BYTES)])


def free_space_text(folder: Path) -> str:
    """How much is free on a folder's disk, for an error message."""
    try:
        return f"; {format_bytes(shutil.disk_usage(folder).free)} are free in {os.fspath(folder)!r}"
    except OSError:
        return ""
