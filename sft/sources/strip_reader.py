"""Strip prefetching: a thread reads the next strips while the network works on one.

The sweep knows its rows and their order beforehand: forward, backward, or back and forth between checkpoints. The reader takes that list
and stays a bounded number of strips ahead of its consumer.

*Each row is read once.* The strips of a convolution overlap by halo rows. Rows that the following strip shares are copied before a strip
is delivered, instead of read again, in either direction. A monotone sweep requests every row of the source exactly once; alignment to
compressed tiles is the source's task (see `sft.sources.Normalized`).

*A strip belongs to its holder.* Buffers are few and reused, which invites the mistake of overwriting a strip that is still read. A buffer
returns to the reader only when the last tensor on it is gone: each strip is a storage of its own on top of a NumPy view, and the view's
destructor is the signal. A consumer that keeps all strips gets an error, not wrong numbers.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from sft.common.array_types import ByteArray, IntArray
from sft.common.errors import InputError, SkipSlideError, SourceError, reason_text, typed
from sft.common.interval import Interval
from sft.sources.source import Source

__all__ = [
    "FULL_READ_BYTES",
    "NUM_RING_BUFFERS",
    "PrefetchFailure",
    "PrefetchState",
    "StripReader",
    "aligned_bytes",
    "allocate_bytes",
    "pixel_staging_bytes",
    "prefetch_strips",
    "read_chunks",
    "reader_bytes",
    "reader_bytes_at",
    "request_stop",
    "ring_bytes",
    "ring_bytes_of",
    "row_bytes",
    "shut_down_prefetch",
    "source_error",
    "staged_number_bytes",
]

_JOIN_SECONDS = 5.0
_ALIGNMENT_BYTES = 64
#: An image is read at once in chunks of about this size.
FULL_READ_BYTES = 8 * 2**20
_EMPTY = Interval(0, 0)


def row_bytes(source: Source) -> int:
    """Bytes of one row of every batch element and channel."""
    num, channels, _, width_px = source.shape
    return num * channels * width_px * source.dtype.itemsize


def reader_bytes(intervals: Sequence[Interval], num_row_bytes: int, num_buffers: int = 2) -> tuple[int, int, int]:
    """Allocations of a reader: number of buffers, bytes of each, and bytes of the rows carried to the following strip.

    >>> reader_bytes([Interval(0, 4), Interval(3, 6), Interval(0, 0)], 10)
    (2, 40, 10)

    Args:
        intervals: of the strips, in order.
        num_row_bytes: of one row.
        num_buffers: strips that exist at once, at most.
    """
    ends = np.array([(rows.start, rows.stop) for rows in intervals], dtype=np.int64).reshape(-1, 2)
    return reader_bytes_at(ends[:, 0], ends[:, 1], num_row_bytes, num_buffers)


def reader_bytes_at(start: IntArray, stop: IntArray, num_row_bytes: int, num_buffers: int = 2) -> tuple[int, int, int]:
    """The same, of strips that begin and end at these rows."""
    start, stop = start[stop > start], stop[stop > start]
    tallest = int((stop - start).max(initial=0))
    carried_rows = int((np.minimum(stop[:-1], stop[1:]) - np.maximum(start[:-1], start[1:])).max(initial=0))
    return min(num_buffers, len(start)), tallest * num_row_bytes, carried_rows * num_row_bytes


#: Host buffers of a reader of strips for a device: one is filled, one waits, and one is being copied.
NUM_RING_BUFFERS = 3


def ring_bytes(start: IntArray, stop: IntArray, num_row_bytes: int) -> int:
    """Host bytes of a reader of strips for a device, which begin and end at these rows."""
    num_buffers, strip_bytes, carry_bytes = reader_bytes_at(start, stop, num_row_bytes, NUM_RING_BUFFERS)
    return num_buffers * aligned_bytes(strip_bytes) + aligned_bytes(carry_bytes)


def ring_bytes_of(intervals: Sequence[Interval], num_row_bytes: int) -> int:
    """The same, of these strips."""
    ends = np.array([(rows.start, rows.stop) for rows in intervals], dtype=np.int64).reshape(-1, 2)
    return ring_bytes(ends[:, 0], ends[:, 1], num_row_bytes)


def read_chunks(num_rows: int, num_row_bytes: int) -> list[Interval]:
    """Chunks of rows in which a full image is read, so that the memory of its decoder, or of its file's pages, stays small.

    >>> read_chunks(10, 2**21)
    [Interval(start=0, stop=4), Interval(start=4, stop=8), Interval(start=8, stop=10)]
    """
    step = max(1, FULL_READ_BYTES // num_row_bytes)
    return [Interval(top, min(top + step, num_rows)) for top in range(0, num_rows, step)]


def staged_number_bytes(pixel_dtype: torch.dtype, dtype: torch.dtype) -> int:
    """Bytes on a device of a pixel that becomes a number, with the number in float32 if it is narrower.

    >>> staged_number_bytes(torch.uint8, torch.bfloat16), staged_number_bytes(torch.uint8, torch.float32)
    (5, 1)
    """
    return pixel_dtype.itemsize + (4 if dtype.itemsize < 4 else 0)


def pixel_staging_bytes(num_bytes: int, num_row_bytes: int, dtype: torch.dtype) -> int:
    """Bytes on a device for pixels that arrive there, of a strip without another strip's memory: for all, or pieces of full rows.

    Pixels have at most 16 bits where the network's numbers have 16 or 32, and 32 where these have 64.

    >>> pixel_staging_bytes(1000, 100, torch.float32), pixel_staging_bytes(1000, 100, torch.float16)
    (500, 3000)
    >>> pixel_staging_bytes(2**30, 2**20, torch.float16), pixel_staging_bytes(2**30, 2**22, torch.float16)
    (8388608, 12582912)

    Args:
        num_bytes: of all numbers.
        num_row_bytes: of the numbers of one row of every batch element.
        dtype: of the numbers; integers (labels) have no pixels.
    """
    if not dtype.is_floating_point:
        return 0
    pixel_dtype = torch.float32 if dtype.itemsize > 4 else torch.float16
    staged, row = (size // dtype.itemsize * staged_number_bytes(pixel_dtype, dtype) for size in (num_bytes, num_row_bytes))
    return max(row, min(staged, FULL_READ_BYTES))


def aligned_bytes(num_bytes: int) -> int:
    """A size rounded up to whole cache lines."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def allocate_bytes(num_bytes: int) -> ByteArray:
    """A buffer that starts on a cache line; its pages are not touched before they are filled.

    It is torch's, so that `sft.measure_peak` sees it.
    """
    data: ByteArray = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").numpy()
    return data


@dataclass(slots=True, kw_only=True)
class PrefetchFailure:
    """The thread's last word."""

    error: BaseException
    interval: Interval


@dataclass(slots=True, kw_only=True)
class PrefetchState:
    """State shared with the thread. The thread has no reference to the reader, which could then never be collected while the thread
    waits.

    The queues are `SimpleQueue`s since a buffer comes back in a destructor, which may run anywhere, even inside another ``put``.

    Attributes:
        source: the source to read.
        intervals: rows in order, none of them empty.
        buffers: memory for the largest strip each.
        carry: memory for the rows that the following strip shares.
        free: buffers to fill; None only wakes the thread.
        filled: buffers in the order of the intervals, or the end.
        stopped: True to end the thread.
        read_seconds: time in the source, and in copies of overlapping rows.
        num_rows_read: rows requested of the source.
    """

    source: Source
    intervals: tuple[Interval, ...]
    buffers: list[ByteArray]
    carry: ByteArray
    free: queue.SimpleQueue[int | None]
    filled: queue.SimpleQueue[int | PrefetchFailure]
    stopped: bool = False
    read_seconds: float = 0.0
    num_rows_read: int = 0

    def strip_bytes(self, index: int, interval: Interval) -> ByteArray:
        """The part of a buffer that a strip takes."""
        return self.buffers[index][: len(interval) * row_bytes(self.source)]

    def strip(self, data: ByteArray, interval: Interval) -> Tensor:
        """The bytes as a strip ``[N, C, rows, W]``, contiguous in channels-last order."""
        num, channels, _, width_px = self.source.shape
        numbers = torch.from_numpy(data).view(self.source.dtype)
        return numbers.view(num, len(interval), width_px, channels).permute(0, 3, 1, 2)


def request_stop(shared: PrefetchState) -> None:
    """Ask the thread to end after the read that it is in."""
    shared.stopped = True
    shared.free.put(None)


def shut_down_prefetch(shared: PrefetchState, thread: threading.Thread) -> None:
    """For a reader that was not closed. It may run inside garbage collection: in any thread, so the wait for it has an end."""
    request_stop(shared)
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)


def prefetch_strips(shared: PrefetchState) -> None:
    """The thread."""
    carried = interval = _EMPTY
    try:
        with torch.no_grad():
            for position, interval in enumerate(shared.intervals):
                index = shared.free.get()
                if shared.stopped or index is None:
                    return
                following = shared.intervals[position + 1] if position + 1 < len(shared.intervals) else _EMPTY
                started = time.perf_counter()
                carried = _read_strip(shared, shared.strip_bytes(index, interval), interval, carried, following)
                shared.read_seconds += time.perf_counter() - started
                shared.filled.put(index)
    except BaseException as error:  # any error: the consumer must not wait forever
        shared.filled.put(PrefetchFailure(error=error, interval=interval))


def _read_strip(shared: PrefetchState, data: ByteArray, interval: Interval, carried: Interval, following: Interval) -> Interval:
    """Read a strip without the rows carried from its predecessor; returns the rows carried to the next one.

    Rows move as bytes, with NumPy: torch would start a team of OpenMP threads that competes with the network's for the cores.
    """
    num = shared.source.shape[0]
    by_row = data.reshape(num, len(interval), -1)
    out = shared.strip(data, interval)

    def carry_of(rows: Interval) -> ByteArray:
        return shared.carry[: len(rows) * row_bytes(shared.source)].reshape(num, len(rows), -1)

    if carried:  # always inside the interval: it is the intersection of two neighbours in the list
        by_row[:, carried.start - interval.start : carried.stop - interval.start] = carry_of(carried)
        missing = [Interval(interval.start, carried.start), Interval(carried.stop, interval.stop)]
    else:
        missing = [interval]
    for rows in filter(None, missing):
        shared.source.rows(rows, out[:, :, rows.start - interval.start : rows.stop - interval.start])
        shared.num_rows_read += len(rows)
    kept = interval.intersect(following)
    if kept:
        carry_of(kept)[:] = by_row[:, kept.start - interval.start : kept.stop - interval.start]
    return kept


class StripReader:
    """Serves row intervals of a source as tensors, in a given order, reading ahead in one thread.

    Iterate over it, or call :meth:`take` with each interval in turn. Use it in a ``with`` block: leaving it, for whatever reason,
    ends the thread. So does dropping the last reference, and an error.

    >>> from sft.sources.arrays import ArraySource
    >>> source = ArraySource(torch.arange(12.0).view(1, 6, 2))
    >>> with StripReader(source, [Interval(0, 4), Interval(3, 6)]) as reader:
    ...     for strip in reader:
    ...         print(tuple(strip.shape), strip[0, 0, :, 0].tolist())
    (1, 1, 4, 2) [0.0, 2.0, 4.0, 6.0]
    (1, 1, 3, 2) [6.0, 8.0, 10.0]
    >>> reader.num_rows_read
    6

    Args:
        source: what to read.
        intervals: rows in the order in which they will be wanted. They may overlap and repeat; empty ones give tensors without rows.
        num_buffers: strips that exist at once, the consumer's included. Default: 2
        allocate: allocates the buffers. Default: torch's memory

    Raises:
        InputError: an interval reaches outside the image, or there are fewer than two buffers.
    """

    def __init__(
        self,
        source: Source,
        intervals: Sequence[Interval],
        *,
        num_buffers: int = 2,
        allocate: Callable[[int], ByteArray] = allocate_bytes,
    ) -> None:
        if not isinstance(source, Source):
            raise InputError(f"cannot read strips of {typed(source)}: expected a sft.sources.Source. Wrap it.")
        height_px = source.shape[2]
        outside = [rows for rows in intervals if rows and not Interval(0, height_px).contains(rows)]
        if outside:
            listed = ", ".join(f"[{rows.start}, {rows.stop})" for rows in outside[:5])
            raise InputError(f"cannot read rows {listed} of {source}: it has {height_px} rows. Clip the intervals to the image.")
        if num_buffers < 2:
            raise InputError(f"cannot read ahead with {num_buffers} buffers: the consumer holds one. Use num_buffers >= 2.")
        self.intervals = tuple(intervals)
        self.num_buffers = num_buffers
        rows_to_read = tuple(rows for rows in intervals if rows)
        count, strip_bytes, carry_bytes = reader_bytes(rows_to_read, row_bytes(source), num_buffers)
        self._shared = shared = PrefetchState(
            source=source,
            intervals=rows_to_read,
            buffers=[allocate(strip_bytes) for _ in range(count)],
            carry=allocate(carry_bytes),
            free=queue.SimpleQueue(),
            filled=queue.SimpleQueue(),
        )
        #: bytes that the reader allocated: its buffers, and the rows set aside for the following strip
        self.buffer_bytes = strip_bytes * count + carry_bytes
        for index in range(count):
            shared.free.put(index)
        self._position = 0
        self._waited_seconds = 0.0
        self._error: SourceError | None = None
        self._lent: list[weakref.ref[ByteArray]] = []
        self._process = os.getpid()
        # A daemon, so that a forgotten reader does not keep the process from ending; the finalizer also runs at exit and joins.
        self._thread = threading.Thread(target=prefetch_strips, args=(shared,), name="sft-strip-reader", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, shut_down_prefetch, shared, self._thread)

    def __repr__(self) -> str:
        return f"StripReader({self._shared.source!r}, {self._position} of {len(self.intervals)} strips served)"

    def __enter__(self) -> StripReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.intervals)

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        if self._position == len(self.intervals):
            self.close()
            raise StopIteration
        return self.take(self.intervals[self._position])

    def take(self, interval: Interval) -> Tensor:
        """Next strip, ``[N, C, rows, W]`` and contiguous in channels-last order; valid as long as the caller holds it.

        Args:
            interval: its rows, which must be the next in the list.

        Raises:
            InputError: another interval is next, every buffer is still in use, or the reader is closed or of another process.
            SourceError: the rows cannot be read. Every later call raises the same.
        """
        rows = f"rows [{interval.start}, {interval.stop}) of {self._shared.source}"
        if self._error is not None:
            raise self._error
        if self._position == len(self.intervals) or interval != self.intervals[self._position]:
            following = "nothing" if self._position == len(self.intervals) else str(self.intervals[self._position])
            raise InputError(f"cannot take {rows}: position {self._position} in the list of intervals has {following}. Keep its order.")
        if os.getpid() != self._process:
            raise InputError(f"cannot take {rows}: the thread that reads is in process {self._process}. Make a reader in each process.")
        if not self._finalizer.alive:
            raise InputError(f"cannot take {rows}: the reader is closed. Make a new one.")
        if not interval:
            self._position += 1
            num, channels, _, width_px = self._shared.source.shape
            return torch.empty(
                (num, channels, 0, width_px), dtype=self._shared.source.dtype, device="cpu", memory_format=torch.channels_last
            )
        self._lent = [view for view in self._lent if view() is not None]
        if len(self._lent) >= len(self._shared.buffers):  # waiting would never end
            raise InputError(
                f"cannot take {rows}: all {len(self._lent)} buffers are held as earlier strips. Drop those, or raise num_buffers."
            )
        started = time.perf_counter()
        result = self._shared.filled.get()
        self._waited_seconds += time.perf_counter() - started
        if isinstance(result, PrefetchFailure):
            self._error = source_error(self._shared.source, result.interval, result.error)
            self.close()
            raise self._error from result.error
        self._position += 1
        view = self._shared.strip_bytes(result, interval)
        # Not at exit: no strip is read any more.
        weakref.finalize(view, self._shared.free.put, result).atexit = False
        self._lent.append(weakref.ref(view))
        return self._shared.strip(view, interval)

    def close(self) -> None:
        """End the thread (it finishes the read that it is in). Strips that were handed out stay valid. Calling it twice is fine."""
        if self._finalizer.detach() is not None:
            request_stop(self._shared)
            if os.getpid() == self._process:
                self._thread.join()

    @property
    def read_seconds(self) -> float:
        """Seconds that the thread spent reading and normalising."""
        return self._shared.read_seconds

    @property
    def waited_seconds(self) -> float:
        """Seconds that the consumer waited for a strip."""
        return self._waited_seconds

    @property
    def num_rows_read(self) -> int:
        """Rows asked of the source; overlapping ones count once."""
        return self._shared.num_rows_read

    @property
    def read_bytes(self) -> int:
        """Bytes that the source delivered, as normalised numbers."""
        return self.num_rows_read * row_bytes(self._shared.source)


def source_error(source: Source, rows: Interval, error: BaseException) -> SourceError:
    """Error for a failure in a source's own ``rows``; a `sft.SkipSlideError` stays one."""
    kind = SkipSlideError if isinstance(error, SkipSlideError) else SourceError
    return kind(
        f"cannot read the strip of rows [{rows.start}, {rows.stop}) of {source}: {type(error).__name__}: {reason_text(error)}. "
        "Repair the source and run the step again."
    )
