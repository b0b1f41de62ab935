"""Gradient sinks: the gradient of an input that does not fit the device, written in strips to a host array or an ``.npy`` file.

The backward pass makes the gradient in strips, last one first; halo rows get a contribution from each of two neighbouring strips. The
first contribution to a row *replaces* the contents of the array and later ones are added, so the array need not be cleared: it may be a
new memmap, or the last step's. Rows that the network never reads get zeros at the end.

`NpyFile` is written under a temporary name in the same folder and renamed when it is complete. A failure leaves the previous file, and
processes that have it open or mapped keep it.

*A full disk must not kill the process.* Touching a page of a mapping whose block cannot be allocated raises SIGBUS. All blocks are
therefore allocated before the file is mapped; at that point a full disk is an ordinary error.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sft.common.byte_units import format_bytes
from sft.common.errors import InputError, SourceError
from sft.common.interval import Interval
from sft.sources.host_arrays import AnyArray, HostArray, Layout, as_host_array, axis_order, check_mapping, release_pages, resolve_layout
from sft.sources.source import check_samples

__all__ = ["ArraySink", "NpyFile", "RowSink", "allocate_blocks", "free_space_text", "numpy_dtype"]

_GRADIENT_DTYPES = ("float16", "float32", "float64")


@runtime_checkable
class RowSink(Protocol):
    """Gradient sink: takes an input's gradient in rows, as ``net(x, input_grad=...)`` writes it.

    The executor calls ``add`` for every strip of the backward pass in a fixed order, intervals overlapping, and ``finish`` once after
    the last. A refused call has not written. A failing backward pass leaves the rows that it had reached.
    """

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(N, C, H, W)`` of the input."""
        ...

    def add(self, rows: Interval, gradient: Tensor) -> None:
        """Add the gradient of rows: ``[N, C, len(rows), W]``, on any device.

        Raises:
            InputError: rows, shape or dtype do not fit; the array is unchanged.
            SourceError: the underlying file cannot be written.
        """
        ...

    def finish(self) -> None:
        """Set rows without a gradient to zero, and flush.

        Raises:
            SourceError: the underlying file cannot be written.
        """
        ...


class ArraySink:
    """NumPy array, memmap or host tensor as a `RowSink`.

    >>> array = np.full((4, 2), np.nan, np.float32)[None]
    >>> sink = ArraySink(array, shape=(1, 1, 4, 2), dtype=torch.float32)
    >>> sink.add(Interval(1, 3), torch.ones(1, 1, 2, 2))
    >>> sink.add(Interval(0, 2), torch.ones(1, 1, 2, 2))
    >>> sink.finish()
    >>> array[0, :, 0].tolist()
    [1.0, 2.0, 1.0, 0.0]

    Args:
        array: floating point and writable, with three axes (one batch element) or four.
        shape: ``(N, C, H, W)`` of the network's input.
        dtype: of the gradient. The array's type must hold it without rounding: the same or a wider one.
        layout: names of the array's axes in order. None takes the one that gives `shape`. Default: `None`

    Raises:
        InputError: wrong type, rank, shape or dtype, read-only, or elements that share memory. The array is unchanged.
    """

    def __init__(self, array: HostArray, *, shape: tuple[int, int, int, int], dtype: torch.dtype, layout: Layout | None = None) -> None:
        host_array = as_host_array(array, "write gradients to")
        self._array = host_array
        self.layout: Layout = resolve_layout("input_grad", tuple(host_array.shape), layout, expected=shape)
        self.shape = shape
        full_tensor = _as_tensor(host_array)
        if not dtype.is_floating_point or torch.promote_types(full_tensor.dtype, dtype) is not full_tensor.dtype:
            raise InputError(
                f"cannot write gradients of {dtype} to an array of {full_tensor.dtype}: they would be rounded. Give an array of "
                f"{dtype} or a wider type."
            )
        self.dtype = full_tensor.dtype
        if len(self.layout) == 3:
            full_tensor = full_tensor[None]
        self._target = full_tensor.permute(axis_order(self.layout, "NCHW"))
        by_sample = host_array[None] if len(self.layout) == 3 else host_array
        order = axis_order(self.layout, "NHWC")
        self._pages: HostArray = by_sample.permute(order) if isinstance(by_sample, Tensor) else by_sample.transpose(order)
        #: which rows of which batch element hold a gradient already
        self._written: npt.NDArray[np.bool_] = np.zeros((shape[0], shape[2]), np.bool_)

    def __repr__(self) -> str:
        return f"ArraySink(shape={self.shape}, dtype={self.dtype}, layout={self.layout!r})"

    def samples(self, batch: Interval) -> ArraySink:
        """Sink of some batch elements; it writes to the same array, and the two share the record of written rows.

        Raises:
            InputError: the batch elements do not exist.
        """
        check_samples(self, batch)
        _, channels, height_px, width_px = self.shape
        sink = object.__new__(ArraySink)
        sink._array, sink.layout, sink.dtype = self._array, self.layout, self.dtype
        sink.shape = (len(batch), channels, height_px, width_px)
        sink._target = self._target[batch.start : batch.stop]
        sink._pages = self._pages[batch.start : batch.stop]
        sink._written = self._written[batch.start : batch.stop]
        return sink

    def add(self, rows: Interval, gradient: Tensor) -> None:
        """Add the gradient of rows; see `RowSink`.

        Raises:
            InputError: rows, shape or dtype do not fit; `out` is unchanged.
            SourceError: the mapped file was cut short.
        """
        num, channels, height_px, width_px = self.shape
        expected = (num, channels, len(rows), width_px)
        span = f"rows [{rows.start}, {rows.stop})"
        if rows and not Interval(0, height_px).contains(rows):
            raise InputError(f"cannot add a gradient to {span} of {self}: it has {height_px} rows. Clip the interval to the image.")
        if tuple(gradient.shape) != expected:
            raise InputError(f"cannot add a gradient of shape {tuple(gradient.shape)} to {span} of {self}: they have shape {expected}.")
        if not gradient.dtype.is_floating_point or torch.promote_types(gradient.dtype, self.dtype) is not self.dtype:
            raise InputError(f"cannot add a gradient of {gradient.dtype} to {self}: it would be rounded. Use an array of a wider type.")
        if not rows:
            return
        check_mapping(self._array, "input_grad")
        gradient = gradient.detach().cpu()
        for sample in range(num):
            for run, is_written in _runs(self._written[sample, rows.start : rows.stop]):
                source = gradient[sample, :, run.start : run.stop]
                target = self._target[sample, :, rows.start + run.start : rows.start + run.stop]
                if is_written:
                    target.add_(source)
                else:
                    target.copy_(source)
            release_pages(self._pages[sample, rows.start : rows.stop])
        self._written[:, rows.start : rows.stop] = True

    def finish(self) -> None:
        """Set rows that got no gradient to zero and flush a memmap; see `RowSink`. Calling it twice is fine.

        Raises:
            SourceError: the mapped file was cut short.
        """
        check_mapping(self._array, "input_grad")
        for sample in range(self.shape[0]):
            for run, is_written in _runs(self._written[sample]):
                if not is_written:
                    self._target[sample, :, run.start : run.stop].zero_()
                    release_pages(self._pages[sample, run.start : run.stop])
        self._written[:] = True
        if isinstance(self._array, np.memmap):
            self._array.flush()


def _runs(flags: npt.NDArray[np.bool_]) -> list[tuple[Interval, bool]]:
    """Stretches of equal flags, in order."""
    edges = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
    return [(Interval(a, b), bool(flags[a])) for a, b in pairwise(edges)]


def _as_tensor(array: HostArray) -> Tensor:
    """The array as a tensor on the same memory, or a refusal."""
    if isinstance(array, np.ndarray):
        if array.dtype.name not in _GRADIENT_DTYPES or not array.dtype.isnative:
            raise InputError(
                f"cannot write gradients to an array of {array.dtype.str}: supported are {', '.join(_GRADIENT_DTYPES)} in native byte "
                "order and torch.bfloat16. Give one of those."
            )
        if not array.flags.writeable:
            raise InputError("cannot write gradients to a read-only array. Open a memmap with mode 'r+' or 'w+', or give a copy.")
        if any(stride < 0 or stride % array.itemsize for stride in array.strides):
            raise InputError(f"cannot write gradients to an array with strides {array.strides}: give one that is not flipped or packed.")
        array = torch.from_numpy(array)
    # Along no axis may a step be smaller than all that the faster axes span: elements would share memory and get each other's sums.
    reach = 1
    for stride, extent in sorted((stride, extent) for stride, extent in zip(array.stride(), array.shape, strict=True) if extent > 1):
        if stride < reach:
            raise InputError(
                f"cannot write gradients to an array of shape {tuple(array.shape)} and strides {array.stride()}: some of its elements "
                "share memory. Give a copy."
            )
        reach += stride * (extent - 1)
    return array


#: Errors of the path itself, not of the disk.
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
    """``.npy`` file of zeros to be filled in, in C order.

    Args:
        path: final name; :meth:`publish` replaces an existing file.
        shape: of the array.
        dtype: of the array; one that NumPy has.
        part_name: name of the file until it is published, in the folder of the final one; an earlier file of this name is removed.
            Default: `None` (a random name)

    Raises:
        InputError: the file cannot be created.
        SourceError: the disk is full, or fails. No file is left in either case.
    """

    def __init__(self, path: Path, shape: Sequence[int], dtype: torch.dtype, *, part_name: str | None = None) -> None:
        kind = numpy_dtype(dtype)
        assert kind is not None, f"{dtype} is refused when the plan is made"
        # Through a link, as numpy.save writes; a name of its own, as the target's may be as long as names can be.
        self.path = Path(os.path.realpath(path))
        self._temporary: Path | None = self.path.with_name(part_name or f".sft-{secrets.token_hex(8)}.part")
        num_bytes = prod(shape) * kind.itemsize
        try:
            if self.path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(self.path))
            if part_name is not None:
                self._temporary.unlink(missing_ok=True)
            self.array = _mapped(self._temporary, tuple(shape), kind)
        except OSError as error:
            self.discard()
            problem = f"cannot write an output of shape {tuple(shape)} ({format_bytes(num_bytes)}) to {os.fspath(path)!r}: {error.strerror}"
            if isinstance(error, _CALLER_ERRORS) or error.errno == errno.EROFS:
                raise InputError(f"{problem}. Give a path in a folder that exists and may be written to.") from error
            raise SourceError(error.errno, f"{problem}{free_space_text(self.path.parent)}. Make room, or choose another disk.") from error
        except BaseException:
            self.discard()
            raise

    def check(self) -> None:
        """Refuse to touch a truncated file; call it before every access.

        Raises:
            SourceError: the file is shorter than before.
        """
        check_mapping(self.array, f"the output {os.fspath(self.path)!r}")

    def release(self, row_dim: int | None = None, batch: Interval | None = None, rows: Interval | None = None) -> None:
        """Release the pages of written rows to the kernel.

        Args:
            row_dim: the dimension of rows; None for an array that is not an image, and all of it.
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
        """Rename the file to its final name; a second call has no effect.

        Raises:
            SourceError: the file cannot be renamed. It stays unpublished.
        """
        if self._temporary is None:
            return
        try:
            os.replace(self._temporary, self.path)
        except OSError as error:
            raise SourceError(
                error.errno, f"cannot rename the finished output to {os.fspath(self.path)!r}: {error.strerror}. Choose another path."
            ) from error
        self._temporary = None

    def discard(self) -> None:
        """Remove the file if it is not published; the array stays usable."""
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            temporary.unlink(missing_ok=True)


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
    """Allocate disk blocks for a range of a file; they hold zeros.

    Raises:
        OSError: the disk is full.
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
    """Free space of a folder's disk, for an error message."""
    try:
        return f"; {format_bytes(shutil.disk_usage(folder).free)} are free in {os.fspath(folder)!r}"
    except OSError:
        return ""
