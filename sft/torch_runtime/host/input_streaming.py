"""Input streaming on torch devices: strips of a `sft.sources.Source`, read ahead of the sweep.

On CUDA the reader's buffers are page-locked, and strips are copied on the stream that also brings offloaded values back
(``sft.torch_runtime.host.offload``). A strip's memory on the device is allocated one strip ahead, on the computation's stream. Its copy
waits for an event recorded then, so that it runs while the strip before is computed. The host waits for a copy only when all but one of the
reader's buffers are being copied.

A `sft.sources.source.PixelSource` sends its pixels, a quarter of the bytes for uint8, and the device normalises them with the operations
of the host: the same bits. They arrive in staging memory on the device, which is part of the plan:

- of several strips, one of the two strips on the device is the staging memory, and has pixels of the next strip;
- a single strip (a chunk of tiles) and a complete image have :func:`~sft.sources.strip_reader.pixel_staging_bytes`.

The host computes float16 and bfloat16 in float32 and rounds once, at the end. So does the device: the staging memory has pixels and their
float32 numbers. What does not fit at once passes through it in pieces.
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
from sft.sources.normalize import Normalizer
from sft.sources.source import PixelSource, Source, select_samples
from sft.sources.strip_reader import (
    NUM_RING_BUFFERS,
    StripReader,
    aligned_bytes,
    pixel_staging_bytes,
    read_chunks,
    reader_bytes,
    ring_bytes_of,
    row_bytes,
    source_error,
    staged_number_bytes,
)
from sft.torch_runtime.host.staging import HostStaging, StagingRange
from sft.torch_runtime.pass_statistics import PassReading

__all__ = ["DeviceNormalizer", "SourceStripLoader", "StripTargets", "Uploads", "load_source", "strip_of", "upload_rows"]

#: Types of a network's numbers that are computed on the device from pixels.
_NETWORK_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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

    def copy(self, target: Tensor, source: Tensor, allocated: Any) -> Any:
        """Copy from a buffer, after the event at which the target was allocated; the computation waits for the event that is returned."""
        stream = copy_streams(self.device).up
        stream.wait_event(allocated)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done = stream.record_event()
        torch.cuda.current_stream(self.device).wait_event(done)
        return done

    def keep(self, strip: Tensor, done: Any) -> None:
        """Keep a strip's buffer until the event of its last copy."""
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
        dtype: floating-point type of the numbers. Narrow ones are computed in float32.
        device: the device.
    """

    def __init__(self, normalizer: Normalizer, dtype: torch.dtype, device: torch.device) -> None:
        self.work_dtype = torch.promote_types(dtype, torch.float32)

        def vector(values: AnyArray) -> Tensor:
            # Filled, not copied: a copy would wait for the device. A divisor that is a number would become a reciprocal.
            data = torch.empty(len(values), dtype=self.work_dtype, device=device)
            for channel, value in enumerate(values.tolist()):
                data[channel].fill_(value)
            return data

        limits, shift, scale = normalizer.channel_values(self.work_dtype)
        self._limits = None if limits is None else (vector(limits[0]), vector(limits[1]))
        self._shift, self._scale = vector(shift), vector(scale)

    def __call__(self, pixels: Tensor, out: Tensor, work: Tensor) -> None:
        """Normalise ``pixels`` into ``out`` by way of ``work``, of the working type; all are ``[..., C]``, and the last two may be one."""
        work.copy_(pixels)
        if self._limits is not None:
            work.clamp_(*self._limits)
        torch.div(work.sub_(self._shift), self._scale, out=out)


@dataclass(slots=True)
class _PixelStaging:
    """Device memory in which pixels arrive, and in which narrow numbers are computed.

    Attributes:
        data: its bytes.
        free: event from which on they may be overwritten.
        pixel_dtype: type of the pixels.
        dtype: type of the numbers.
        normalize: makes pixels numbers.
    """

    data: Tensor
    free: Any
    pixel_dtype: torch.dtype
    dtype: torch.dtype
    normalize: DeviceNormalizer

    @classmethod
    def of(cls, source: PixelSource, data: Tensor, allocated: Any) -> _PixelStaging:
        """Staging memory of a source, allocated at an event."""
        pixel_dtype = source.normalizer.pixel_dtype
        return cls(data, allocated, pixel_dtype, source.dtype, DeviceNormalizer(source.normalizer, source.dtype, data.device))

    @property
    def num_numbers(self) -> int:
        """Numbers that are computed at once."""
        return self.data.numel() // staged_number_bytes(self.pixel_dtype, self.dtype)

    def upload(self, uploads: Uploads, pixels: Tensor, out: Tensor) -> Any:
        """Copy at most `num_numbers` pixels from a buffer, and normalise them; both tensors are ``[..., C]``.

        Returns:
            The event at which the copy is complete.
        """
        work, num_work_bytes = out, 0
        if self.dtype is not self.normalize.work_dtype:
            num_work_bytes = pixels.numel() * self.normalize.work_dtype.itemsize
            work = self.data[:num_work_bytes].view(self.normalize.work_dtype).view(pixels.shape)
        num_bytes = pixels.numel() * self.pixel_dtype.itemsize
        staged = self.data[num_work_bytes : num_work_bytes + num_bytes].view(self.pixel_dtype).view(pixels.shape)
        done = uploads.copy(staged, pixels, self.free)
        self.normalize(staged, out, work)
        self.free = torch.cuda.current_stream(self.data.device).record_event()
        return done

    def upload_strip(self, uploads: Uploads, strip: Tensor, out: Tensor) -> Any:
        """Copy the pixels of a strip, and normalise them, in pieces; both tensors are contiguous in channels-last order.

        Returns:
            The event at which the copy is complete.
        """
        num_channels, done = strip.shape[1], None
        pixels, numbers = (each.permute(0, 2, 3, 1).view(-1, num_channels) for each in (strip, out))
        step = self.num_numbers // num_channels
        for start in range(0, len(pixels), step):
            done = self.upload(uploads, pixels[start : start + step], numbers[start : start + step])
        return done


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
        if num_targets and isinstance(samples, PixelSource) and _is_normalised_on_device(samples, target_bytes):
            self._pixels = _PixelStaging.of(samples, *self._allocate_staging(num_targets, target_bytes, num_row_bytes))
            samples = _Pixels(samples)
        self._reader = StripReader(samples, order, num_buffers=NUM_RING_BUFFERS, allocate=self._uploads.allocate)

    def _allocate_staging(self, num_targets: int, target_bytes: int, num_row_bytes: int) -> tuple[Tensor, Any]:
        """Memory for pixels, and the event at which it was allocated: one of the strips, or that of a single strip."""
        if num_targets > 1:
            self._targets.num_left += 1
            return self._targets.take()
        num_bytes = pixel_staging_bytes(target_bytes, num_row_bytes, self._dtype)
        return _allocate(num_bytes, self._device)

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
        done = uploads.copy(target, strip, allocated) if pixels is None else pixels.upload_strip(uploads, strip, target)
        uploads.keep(strip, done)
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


def _allocate(num_bytes: int, device: torch.device) -> tuple[Tensor, Any]:
    """Bytes on a CUDA device, and the event at which they were allocated."""
    data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return data, torch.cuda.current_stream(device).record_event()


def _is_normalised_on_device(source: PixelSource, num_bytes: int) -> bool:
    """True if pixels are not the numbers themselves, take few bytes, and the least piece fits into ``num_bytes``.

    Few are no more than numbers of 16 bits, or half of the numbers' bytes.
    """
    pixel_dtype, dtype = source.normalizer.pixel_dtype, source.dtype
    if dtype not in _NETWORK_DTYPES or not source.normalizer.changes(dtype) or pixel_dtype.itemsize > max(2, dtype.itemsize // 2):
        return False
    return source.shape[1] * staged_number_bytes(pixel_dtype, dtype) <= num_bytes


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
    num_row_bytes = row_bytes(source)
    chunks = read_chunks(height, num_row_bytes)
    uploads = Uploads(out.device, staging.allocate(ring_bytes_of(chunks, num_row_bytes)))
    allocated = torch.cuda.current_stream(out.device).record_event()
    pixels, reads = None, source
    if isinstance(source, PixelSource):
        num_bytes = pixel_staging_bytes(height * num_row_bytes, num_row_bytes, source.dtype)
        if _is_normalised_on_device(source, num_bytes):
            pixels, reads = _PixelStaging.of(source, *_allocate(num_bytes, out.device)), _Pixels(source)
            step = min(pixels.num_numbers * source.dtype.itemsize, len(chunks[0]) * num_row_bytes) // num_row_bytes
            chunks = [Interval(top, min(top + step, height)) for top in range(0, height, step)]
    reader = StripReader(reads, chunks, num_buffers=NUM_RING_BUFFERS, allocate=uploads.allocate)
    try:
        for rows in chunks:
            uploads.make_room()
            strip = reader.take(rows)
            by_row, target = strip.permute(0, 2, 3, 1), out[:, :, rows.start : rows.stop].permute(0, 2, 3, 1)
            if pixels is not None:
                done = pixels.upload(uploads, by_row, target)
            else:  # rows of several samples are not dense on the device: CUDA would copy them via a buffer there
                for sample in range(num):
                    done = uploads.copy(target[sample], by_row[sample], allocated)
            uploads.keep(strip, done)
            del strip, by_row
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
