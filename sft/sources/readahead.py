"""The thread behind a `sft.sources.StripReader`: fills buffers in the order of a list, setting overlapping rows aside."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sft.analysis.interval import Interval
from sft.sources.source import Source

__all__ = [
    "ByteArray",
    "PrefetchFailure",
    "PrefetchState",
    "allocate_bytes",
    "prefetch_strips",
    "reader_bytes",
    "reader_bytes_at",
    "row_bytes",
    "shut_down_prefetch",
    "request_stop",
]

_JOIN_SECONDS = 5.0
_EMPTY = Interval(0, 0)

ByteArray = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


def row_bytes(source: Source) -> int:
    """Bytes of one row of every batch element and channel."""
    num, channels, _, width_px = source.shape
    return num * channels * width_px * source.dtype.itemsize


def reader_bytes(intervals: Sequence[Interval], num_row_bytes: int, num_buffers: int = 2) -> tuple[int, int, int]:
    """What a reader allocates: buffers, bytes of each, and bytes of the rows that it sets aside for the following strip.

    >>> reader_bytes([Interval(0, 4), Interval(3, 6), Interval(0, 0)], 10)
    (2, 40, 10)

    Args:
        intervals: what it reads, in order.
        num_row_bytes: of one row.
        num_buffers: strips that exist at once, at most.
    """
    ends = np.array([(rows.start, rows.stop) for rows in intervals], dtype=np.int64).reshape(-1, 2)
    return reader_bytes_at(ends[:, 0], ends[:, 1], num_row_bytes, num_buffers)


def reader_bytes_at(start: Ints, stop: Ints, num_row_bytes: int, num_buffers: int = 2) -> tuple[int, int, int]:
    """The same, of strips that begin and end at these rows."""
    start, stop = start[stop > start], stop[stop > start]
    tallest = int((stop - start).max(initial=0))
    carried_rows = int((np.minimum(stop[:-1], stop[1:]) - np.maximum(start[:-1], start[1:])).max(initial=0))
    return min(num_buffers, len(start)), tallest * num_row_bytes, carried_rows * num_row_bytes


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
    """All that the thread knows. It must not know the reader, which could then never be collected while the thread waits.

    The queues are `SimpleQueue`s since a buffer comes back in a destructor, which may run anywhere, even inside another ``put``.

    Attributes:
        source: what is read.
        intervals: rows in order, none of them empty.
        buffers: room for the largest strip each.
        carry: room for the rows that the following strip wants too.
        free: buffers to fill; None only wakes the thread.
        filled: buffers in the order of the intervals, or the end.
        stopped: whether the thread is to end.
        read_seconds: time in the source, and in copies of overlapping rows.
        num_rows_read: rows asked of the source.
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
    except BaseException as error:  # whatever it is, the consumer must not wait for ever
        shared.filled.put(PrefetchFailure(error=error, interval=interval))


def _read_strip(shared: PrefetchState, data: ByteArray, interval: Interval, carried: Interval, following: Interval) -> Interval:
    """Read a strip, but for the rows carried from the one before; returns the rows set aside for the next one.

    Rows move as bytes, with NumPy: torch would start a team of OpenMP threads here that fights the network's for the cores.
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
