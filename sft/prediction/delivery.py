"""Delivery of a prediction: from the strips of the sweep to the writers, in a thread of its own.

The sweep converts a strip and puts it into a short queue. One thread takes it from it, compresses and writes it, while the sweep
computes the next strip. The length of the queue bounds the memory: if the disk is slower than the computation, the sweep waits.

With a journal, the thread first gives the writers the rows of an earlier, interrupted call, while the sweep computes the rows below them.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.common.errors import InputError, SourceError
from sft.common.interval import Interval
from sft.prediction.prediction_head import Kind
from sft.prediction.raster import FileWriter, PredictedRaster, RasterRows, RasterWriter
from sft.prediction.row_journal import RowJournal

__all__ = ["Delivery", "resolve_dtype"]

#: Strips that wait for the writers.
_QUEUE_LENGTH = 2
#: Bytes of the rows that are passed on at once; an untiled segment delivers its output as one block.
_MAX_ITEM_BYTES = 2**24

_DTYPES: dict[Kind, tuple[str, ...]] = {
    "classes": ("uint8", "uint16", "int16"),
    "softmax": ("uint8", "uint16", "float16", "float32"),
    "sigmoid": ("uint8", "uint16", "float16", "float32"),
    "values": ("float32", "float16", "float64"),
}


def resolve_dtype(kind: Kind, dtype: str | None) -> np.dtype[Any]:
    """Element type of a prediction: the requested one, otherwise the first that its kind allows.

    Raises:
        InputError: the kind has no such type.
    """
    if dtype is not None and dtype not in _DTYPES[kind]:
        raise InputError(f"dtype {dtype!r} of a prediction of kind {kind!r}: choose one of {', '.join(map(repr, _DTYPES[kind]))}")
    return np.dtype(dtype or _DTYPES[kind][0])


class Delivery:
    """Sink of one prediction (`sft.torch_runtime.host.host_outputs.ResumingSink`).

    Args:
        kind: of the prediction.
        dtype: element type of the rasters.
        writers: of the rasters.
        describe: the raster of an output's shape.
        journal: of the rows. Default: `None` (a killed call starts from the first row)

    Attributes:
        raster: the raster; known when the computation has started.
        write_seconds: seconds of each writer, in their order.
        wait_seconds: seconds that the computation waited for the writers, the end included.
    """

    def __init__(
        self,
        kind: Kind,
        dtype: np.dtype[Any],
        writers: Sequence[RasterWriter],
        describe: Callable[[tuple[int, ...]], PredictedRaster],
        journal: RowJournal | None = None,
    ) -> None:
        self._kind, self._dtype, self._writers, self._describe = kind, dtype, tuple(writers), describe
        self._journal = journal
        self.raster: PredictedRaster | None = None
        self.write_seconds = [0.0] * len(self._writers)
        self.wait_seconds = 0.0
        self._queue: queue.Queue[RasterRows | None] = queue.Queue(_QUEUE_LENGTH)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._next_row = 0
        self._num_spooled = 0
        self._spool: RasterRows | None = None

    @property
    def num_known_rows(self) -> int:
        """Rows that the journal has."""
        return 0 if self._journal is None else self._journal.num_rows

    def open(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Begin the rasters.

        Raises:
            InputError: a format cannot hold them.
            SourceError: another process has the journal, or a file cannot be written.
        """
        del dtype
        if len(shape) != 4 or shape[0] != 1:
            raise InputError(f"predict writes one image [1, K, h, w], and the output has shape {shape}; call it for each image")
        if self._kind == "classes" and self._dtype == np.uint8 and shape[1] > 256:
            raise InputError(f"{shape[1]} classes do not fit uint8: give dtype='uint16'")
        self.raster = self._describe(shape)
        if self._journal is not None:
            self._journal.open(self.raster)
            self._next_row = self._journal.num_rows
        owner = None if self._journal is None else os.fspath(self._journal.path.absolute())
        for position, writer in enumerate(self._writers):
            if isinstance(writer, FileWriter):
                writer.mark_temporary_files(owner)
            with _Stopwatch(self.write_seconds, position):
                writer.begin(self.raster)
        self._thread = threading.Thread(target=self._write_all, name="sft-write", daemon=True)
        self._thread.start()

    def write(self, block: Tensor, rows: Interval | None, columns: Interval | None) -> None:
        """Convert a block and pass it to the writers.

        Raises:
            SourceError: an earlier block cannot be written.
            InputError: values that are not finite.
        """
        assert self.raster is not None
        top = 0 if rows is None else rows.start
        num_repeated = min(max(0, self.num_known_rows - top), block.shape[2])
        block, top = block[:, :, num_repeated:], top + num_repeated
        height, width = block.shape[2:]
        is_next = top == self._next_row and width == self.raster.width_px and self._spool is None
        step = max(1, _MAX_ITEM_BYTES // (self.raster.num_channels * self.raster.width_px * self._dtype.itemsize))
        for start in range(0, height, step):
            converted = self._convert(block[0, :, start : start + step])
            if is_next:
                self._put(converted)
                self._next_row += converted.shape[1]
            else:
                self._spool_block(converted, top + start, 0 if columns is None else columns.start)

    def publish(self) -> None:
        """Complete the files, then move all of them to their final paths.

        Raises:
            SourceError: a file cannot be written.
        """
        assert self.raster is not None
        begin = time.perf_counter()
        if self._spool is not None:
            total = self.raster.height_px * self.raster.width_px
            assert self._num_spooled + self._next_row * self.raster.width_px == total, "blocks of the output are missing"
            step = max(1, _MAX_ITEM_BYTES // (self._spool[:, :1].nbytes))
            for top in range(self._next_row, self.raster.height_px, step):
                self._put(np.array(self._spool[:, top : top + step]))
        self._end_thread()
        self._raise_error()
        for position, writer in enumerate(self._writers):
            with _Stopwatch(self.write_seconds, position):
                writer.finish()
        for writer in self._writers:
            writer.publish()
        if self._journal is not None:
            self._journal.remove()
        self._spool = None
        self.wait_seconds += time.perf_counter() - begin

    def discard(self) -> None:
        """Remove incomplete files; no effect after ``publish``."""
        if self._error is None:
            self._error = SourceError("the prediction was given up")  # the thread drops the waiting rows
        self._end_thread()
        self._spool = None
        for writer in self._writers:
            with suppress(OSError):
                writer.discard()
        if self._journal is not None:
            self._journal.close()

    def _convert(self, block: Tensor) -> RasterRows:
        """Values ``[K, h, w]`` in the type of the raster, in memory of their own.

        Raises:
            InputError: they are not finite.
        """
        if block.is_floating_point() and not bool(torch.isfinite(block).all()):
            raise InputError("the network's output has values that are not finite (NaN or infinity); check its weights and the input")
        if self._kind == "classes":
            if block.is_floating_point():
                block = block > 0
            return block.contiguous().numpy().astype(self._dtype)
        values = block.to(torch.float64 if self._dtype == np.float64 else torch.float32, memory_format=torch.contiguous_format, copy=True)
        if self._dtype.kind == "u":
            values.mul_(np.iinfo(self._dtype).max).round_()
        return values.numpy().astype(self._dtype, copy=False)

    def _spool_block(self, block: RasterRows, top: int, left: int) -> None:
        """Keep a block of a panel in a temporary file: panels come one after the other, rows of the raster are complete at the end only."""
        assert self.raster is not None
        if self._spool is None:
            shape = (block.shape[0], self.raster.height_px, self.raster.width_px)
            with tempfile.TemporaryFile(dir=self._writers[0].path.parent) as file:
                self._spool = np.memmap(file, self._dtype, "w+", shape=shape)
        self._spool[:, top : top + block.shape[1], left : left + block.shape[2]] = block
        self._num_spooled += block.shape[1] * block.shape[2]

    def _put(self, rows: RasterRows) -> None:
        self._raise_error()
        begin = time.perf_counter()
        self._queue.put(rows)
        self.wait_seconds += time.perf_counter() - begin

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _end_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _write_all(self) -> None:
        """Write the rows of the journal, then those of the queue until its end; after an error, drop them."""
        try:
            for known in () if self._journal is None else self._journal.rows():
                self._write_rows(known)
        except BaseException as error:  # raised in the thread of the computation
            self._error = error
        while (rows := self._queue.get()) is not None:
            if self._error is not None:
                continue
            try:
                if self._journal is not None:
                    self._journal.add(rows)
                self._write_rows(rows)
            except BaseException as error:
                self._error = error

    def _write_rows(self, rows: RasterRows) -> None:
        for position, writer in enumerate(self._writers):
            with _Stopwatch(self.write_seconds, position):
                writer.write(rows)


class _Stopwatch:
    """Adds the seconds of a block to an entry of a list."""

    def __init__(self, seconds: list[float], position: int) -> None:
        self._seconds, self._position = seconds, position

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._seconds[self._position] += time.perf_counter() - self._begin
