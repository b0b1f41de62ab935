"""Input streaming on torch devices: strips of a `sft.sources.Source`, read ahead of the sweep.

On CUDA the reader's buffers are page-locked, and strips are copied on the stream that also brings offloaded values back
(``sft.torch_runtime.offload``). A strip's memory on the device is allocated one strip ahead, on the computation's stream. Its copy waits
for an event recorded then, so that it runs while the strip before is computed. The host waits for a copy only when all but one of the
reader's buffers are being copied.

A `sft.sources.normalize.PixelSource` sends its pixels, a quarter of the bytes for uint8, and the device normalises them with the operations
of the host: the same bits. One of the two strips on the device then has the pixels of the next strip, so the bytes stay those of the plan.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sft.common.array_types import ByteArray
from sft.common.interval import Interval
from sft.common.pinned_memory import copy_streams
from sft.sources.host_arrays import AnyArray
from sft.sources.normalize import Normalizer, PixelSource
from sft.sources.source import Source, select_samples
from sft.sources.strip_reader import (
    NUM_RING_BUFFERS,
    StripReader,
    aligned_bytes,
    read_chunks,
    reader_bytes,
    ring_bytes_of,
    row_bytes,
    source_error,
)
from sft.torch_runtime.pass_statistics import PassReading
from sft.torch_runtime.staging import HostStaging, StagingRange

__all__ = ["DeviceNormalizer", "SourceStripLoader", "StripTargets", "Uploads", "load_source", "strip_of", "upload_rows"]


@dataclass(slots=True)
class Uploads:
    """Copies of strips to a CUDA device, from page-locked buffers of a reader.

    Attributes:
        device: the device.
        staged: the reader's buffers.
    """

    device: torch.device
    staged: StagingRange
    _running: deque[tuple[Any, Tensor]] = field(default_factory=deque)

    def allocate(self, num_bytes: int) -> ByteArray:
        """The reader's next buffer."""
        return self.staged.take(num_bytes, aligned_bytes(num_bytes)).numpy()

    def make_room(self) -> None:
        """Give the buffers of complete copies back; wait for the oldest copy if only one buffer would be left to the reader."""
        while self._running and (len(self._running) >= NUM_RING_BUFFERS - 1 or self._running[0][0].query()):
            event, _ = self._running.popleft()
            event.synchronize()

    def copy(self, target: Tensor, strip: Tensor, allocated: Any) -> None:
        """Copy a strip, after the event at which its target was allocated; the computation waits for the copy."""
        stream = copy_streams(self.device).up
        stream.wait_event(allocated)
        with torch.cuda.stream(stream):
            target.copy_(strip, non_blocking=True)
            done = stream.record_event()
        torch.cuda.current_stream(self.device).wait_event(done)
        self._running.append((done, strip))

    def finish(self) -> None:
        """Wait for all copies: their buffers are given away."""
        while self._running:
            event, _ = self._running.popleft()
            event.synchronize()


@dataclass(slots=True)
class StripTargets:
    """Device memory of a loader's strips, allocated one strip ahead, each time of the same size: the allocator reuses the same blocks.

    Attributes:
        device: the device.
        num_bytes: bytes of the tallest strip.
        num_left: strips without memory so far.
    """

    device: torch.device
    num_bytes: int
    num_left: int
    _ready: deque[tuple[Tensor, Any]] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._ready)

    def allocate(self) -> None:
        """Allocate the memory of a strip, and record an event after that, unless all strips have theirs."""
        if self.num_left:
            self.num_left -= 1
            data = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
            is_async = self.device.type == "cuda"
            self._ready.append((data, torch.cuda.current_stream(self.device).record_event() if is_async else None))

    def take(self) -> tuple[Tensor, Any]:
        """Memory of the next strip, and the event at which it was allocated."""
        return self._ready.popleft()

    def clear(self) -> None:
        """Free the memory of strips that were not taken."""
        self._ready.clear()


class _Pixels:
    """A source's rows before normalisation: a `sft.sources.Source` of the pixels' type."""

    def __init__(self, source: PixelSource) -> None:
        self._source = source
        self.shape, self.dtype = source.shape, source.normalizer.pixel_dtype

    def __repr__(self) -> str:
        return repr(self._source)

    def rows(self, interval: Interval, out: Tensor) -> None:
        """Fill ``out`` with pixels."""
        self._source.pixel_rows(interval, out)


class DeviceNormalizer:
    """A normalizer's operations on a device, bit for bit those of the host: each rounds once.

    Args:
        normalizer: the normalisation.
        dtype: float32 or float64.
        device: the device.
    """

    def __init__(self, normalizer: Normalizer, dtype: torch.dtype, device: torch.device) -> None:
        def vector(values: AnyArray) -> Tensor:
            # Filled, not copied: a copy would wait for the device. A divisor that is a number would become a reciprocal.
            data = torch.empty(len(values), 1, 1, dtype=dtype, device=device)
            for channel, value in enumerate(values.tolist()):
                data[channel].fill_(value)
            return data

        limits, shift, scale = normalizer.channel_values(dtype)
        self._limits = None if limits is None else (vector(limits[0]), vector(limits[1]))
        self._shift, self._scale = vector(shift), vector(scale)

    def __call__(self, pixels: Tensor, out: Tensor) -> None:
        """Normalise ``pixels`` into ``out``; both are ``[N, C, rows, W]``."""
        out.copy_(pixels)
        if self._limits is not None:
            out.clamp_(*self._limits)
        out.sub_(self._shift).div_(self._scale)


@dataclass(slots=True)
class _PixelStaging:
    """Device memory for the pixels of the next strip.

    Attributes:
        data: bytes, as many as the tallest strip has after normalisation: the size that the plan counts, and the allocator reuses.
        free: event from which on the pixels may be overwritten.
        dtype: of the pixels.
        normalize: makes them the numbers of the strip.
    """

    data: Tensor
    free: Any
    dtype: torch.dtype
    normalize: DeviceNormalizer


class SourceStripLoader:
    """Loader of strips of a source, which a thread on the host reads ahead.

    Args:
        source: source of the full batch.
        batch: batch elements to read.
        order: rows of each strip, in the order in which they are taken.
        device: device of the strips; on the CPU they are views of the reader's buffers.
        statistics: updated when the loader is closed.
        staging: page-locked memory, for a CUDA device.
    """

    def __init__(
        self,
        source: Source,
        batch: Interval,
        order: Sequence[Interval],
        device: torch.device,
        statistics: PassReading,
        staging: HostStaging | None = None,
    ) -> None:
        self._device, self._statistics, self._num_batch = device, statistics, len(batch)
        self._staging, self._uploads = staging, None
        samples = select_samples(source, batch)
        self._dtype, num_row_bytes = samples.dtype, row_bytes(samples)
        self._pixels: _PixelStaging | None = None
        num_targets, target_bytes, _ = reader_bytes(order, num_row_bytes)
        self._targets = StripTargets(device, target_bytes, num_left=sum(map(bool, order)))
        if device.type != "cuda":
            self._reader: StripReader | None = StripReader(samples, order)
            return
        self._staging = staging or HostStaging()
        self._uploads = Uploads(device, self._staging.allocate(ring_bytes_of(order, num_row_bytes)))
        for _ in range(num_targets):
            self._targets.allocate()
        if num_targets > 1 and isinstance(samples, PixelSource) and _is_smaller(samples):
            data, allocated = self._targets.take()
            normalize = DeviceNormalizer(samples.normalizer, samples.dtype, device)
            self._pixels = _PixelStaging(data, allocated, samples.normalizer.pixel_dtype, normalize)
            self._targets.num_left += 1
            samples = _Pixels(samples)
        self._reader = StripReader(samples, order, num_buffers=NUM_RING_BUFFERS, allocate=self._uploads.allocate)

    def take(self, rows: Interval) -> Tensor:
        """The next strip, channels last.

        Raises:
            SourceError: it cannot be read.
        """
        assert self._reader is not None
        if self._uploads is not None and rows:
            return self._upload(self._uploads, self._reader, rows)
        strip = self._reader.take(rows)
        if self._device.type == "cpu":
            return strip
        copy = torch.empty(strip.shape, dtype=strip.dtype, device=self._device, memory_format=torch.channels_last)
        return copy.copy_(strip)

    def _upload(self, uploads: Uploads, reader: StripReader, rows: Interval) -> Tensor:
        """The next strip on a CUDA device."""
        uploads.make_room()
        strip = reader.take(rows)
        pixels = self._pixels
        if len(self._targets) < (1 if pixels else 2):  # the strip before is dropped
            self._targets.allocate()
        data, allocated = self._targets.take()
        target = strip_of(data, self._dtype, strip.shape)
        if pixels is None:
            uploads.copy(target, strip, allocated)
            return target
        staged = strip_of(pixels.data, pixels.dtype, strip.shape)
        uploads.copy(staged, strip, pixels.free)
        pixels.normalize(staged, target)
        pixels.free = torch.cuda.current_stream(self._device).record_event()
        if not self._targets.num_left and not self._targets:  # the last strip
            self._pixels = None
        return target

    def close(self) -> None:
        """Stop the thread, free the buffers and update the statistics."""
        reader, self._reader = self._reader, None
        if reader is None:
            return
        reader.close()
        self._targets.clear()
        if self._uploads is not None:
            assert self._staging is not None
            self._uploads.finish()
            self._pixels = None  # no copy writes to it any more
            self._staging.free(self._uploads.staged)
        self._statistics.read_seconds += reader.read_seconds
        self._statistics.waited_seconds += reader.waited_seconds
        self._statistics.num_rows_read += reader.num_rows_read * self._num_batch
        self._statistics.read_bytes += reader.read_bytes


def _is_smaller(source: PixelSource) -> bool:
    """True if a source's pixels take fewer bytes than its numbers, and a device normalises them as the host does."""
    pixel_dtype = source.normalizer.pixel_dtype
    return source.dtype in (torch.float32, torch.float64) and pixel_dtype.itemsize < source.dtype.itemsize and pixel_dtype != torch.bfloat16


def strip_of(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A strip ``[N, C, rows, W, ...]``, channels last, in the first bytes of device memory."""
    numbers = data[: math.prod(shape) * dtype.itemsize].view(dtype)
    return numbers.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def upload_rows(source: Source, out: Tensor, statistics: PassReading, staging: HostStaging) -> None:
    """Fill an image on a CUDA device with all rows of a source.

    Raises:
        SourceError: the rows cannot be read.
    """
    num, _, height, _ = source.shape
    chunks = read_chunks(height, row_bytes(source))
    uploads = Uploads(out.device, staging.allocate(ring_bytes_of(chunks, row_bytes(source))))
    allocated = torch.cuda.current_stream(out.device).record_event()
    reader = StripReader(source, chunks, num_buffers=NUM_RING_BUFFERS, allocate=uploads.allocate)
    try:
        for rows in chunks:
            uploads.make_room()
            strip = reader.take(rows)
            for sample in range(num):  # rows of several samples are not dense on the device: CUDA would copy them via a buffer there
                target = out[sample, :, rows.start : rows.stop].permute(1, 2, 0)
                uploads.copy(target, strip[sample].permute(1, 2, 0), allocated)
            del strip
    finally:
        reader.close()
        uploads.finish()
        staging.free(uploads.staged)
        statistics.read_seconds += reader.read_seconds
        statistics.waited_seconds += reader.waited_seconds
        statistics.num_rows_read += reader.num_rows_read * num
        statistics.read_bytes += reader.read_bytes


def load_source(source: Source, out: Tensor, statistics: PassReading, staging: HostStaging | None = None) -> None:
    """Fill a tensor on any device with all rows of a source.

    Raises:
        SourceError: the rows cannot be read.
    """
    if out.device.type == "cuda":
        upload_rows(source, out, statistics, staging or HostStaging())
        return
    chunks = read_chunks(source.shape[2], row_bytes(source))
    if out.device.type != "cpu":
        loader = SourceStripLoader(source, Interval(0, source.shape[0]), chunks, out.device, statistics)
        try:
            for rows in chunks:
                out[:, :, rows.start : rows.stop].copy_(loader.take(rows))
        finally:
            loader.close()
        return
    # The source writes into the tensor itself: no copy and no computation that a thread could overlap with.
    started = time.perf_counter()
    with torch.no_grad():
        for rows in chunks:
            try:
                source.rows(rows, out[:, :, rows.start : rows.stop])
            except Exception as error:
                raise source_error(source, rows, error) from error
            statistics.num_rows_read += source.shape[0] * len(rows)
    seconds = time.perf_counter() - started
    statistics.read_seconds += seconds
    statistics.waited_seconds += seconds
    statistics.read_bytes += out.numel() * out.element_size()
