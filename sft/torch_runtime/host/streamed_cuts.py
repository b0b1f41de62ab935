"""Streamed cuts: cuts on the host that are written and read strip by strip and never complete on the device, and their gradients.

For the segment that writes it, such a cut is an output on the host; for its readers it is an input that is not resident: a
`sft.sources.Source` of rows, which a thread reads ahead. In the backward pass the readers' gradients arrive in strips and are summed on the
host, and the writer reads strips of the sum. The device holds a few strips at a time.

In host memory an image is channels last, as on the device (a signal, channels first on the device, is transposed on its way): rows are
contiguous, and strips move as bytes.

*Direct cuts* (``sft.runtime.region``) are in the page-locked slab of their step. The rows of a sample are one block of bytes there and in a
strip on the device, so a strip is one copy for each sample, and no thread of the host takes part. A strip leaves while the next one is
computed, and arrives while the one before is. Gradients of later strips and readers are added on the device: rows that have a gradient
already come back, in chunks, before the sum leaves. All other cuts are copied through
staging memory, where a thread gathers and scatters their rows: cuts in files, of signals, and of panels, whose rows are not contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.analysis.ir.axes import Axes
from sft.common.array_types import BoolArray, ByteArray
from sft.common.interval import Interval
from sft.sources.host_arrays import copy_serially
from sft.sources.source import check_rows, check_samples
from sft.sources.strip_reader import read_chunks, reader_bytes
from sft.torch_runtime.host.host_memory import HostAllocator
from sft.torch_runtime.host.host_outputs import copy_in_order
from sft.torch_runtime.host.input_streaming import SourceStripLoader, StripTargets, strip_of, upload_rows
from sft.torch_runtime.host.offload import HostOffloader
from sft.torch_runtime.host.staging import HostStaging
from sft.torch_runtime.pass_statistics import PassReading

__all__ = ["CutStripLoader", "DirectCut", "DirectGradient", "DirectStripLoader", "HostCut", "HostGradient"]

#: Size of the chunks of rows that are compared at a time.
_CHUNK_BYTES = 1 << 20


class _HostImage:
    """Image (or signal, or volume) ``[N, C, rows, ...]`` on the host.

    Args:
        shape: three extents (a signal) or more.
        dtype: element type.
        allocator: allocates its bytes; ``None`` for a dry run, which has none.
        purpose: subject of error messages.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, allocator: HostAllocator | None, purpose: str) -> None:
        self._bind(
            np.zeros(0, np.uint8) if allocator is None else allocator.allocate(prod(shape) * dtype.itemsize, purpose),
            shape,
            dtype,
            allocator,
        )

    def _bind(self, data: ByteArray, shape: tuple[int, ...], dtype: torch.dtype, allocator: HostAllocator | None) -> None:
        self.dtype, self.trailing, self._allocator = dtype, shape[3:], allocator
        #: shape as an image, with the axes after the rows merged
        self.shape: tuple[int, int, int, int] = (shape[0], shape[1], shape[2], prod(shape[3:]))
        if allocator is None:
            self._data, self.tensor = data.reshape(shape[0], 0, 0), torch.empty((), dtype=dtype, device="cpu").expand(shape)
            return
        #: `[N, rows, bytes of a row]`
        self._data = data.reshape(shape[0], shape[2], -1)
        #: tensor of the full shape, of which the machine takes views
        self.tensor = torch.from_numpy(data.reshape(-1)).view(dtype).view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).detach()

    def _samples(self, batch: Interval) -> tuple[ByteArray, tuple[int, ...]]:
        check_samples(self, batch)
        _, channels, rows, _ = self.shape
        return self._data[batch.start : batch.stop], (len(batch), channels, rows, *self.trailing)

    def _release_pages(self, batch: Interval | None, rows: Interval | None) -> None:
        if self._allocator is None or self._allocator.folder is None:
            return
        for image in self._data[slice(None) if batch is None else slice(batch.start, batch.stop)]:
            self._allocator.release_pages(image if rows is None else image[rows.start : rows.stop])


class HostCut(_HostImage):
    """Cut on the host: an output that takes strips, and a `sft.sources.Source` of them."""

    def __repr__(self) -> str:
        return f"HostCut(shape={self.shape}, dtype={self.dtype})"

    def write(self, view: Tensor, source: Tensor, axes: Axes, batch: Interval | None = None, rows: Interval | None = None) -> None:
        """Copy a buffer on any device into a region of the cut; see `HostOutput.write`."""
        if self._allocator is not None:
            copy_in_order(view, source, source)
            self._release_pages(batch, rows)

    def samples(self, batch: Interval) -> HostCut:
        """The cut of some batch elements, on the same memory."""
        data, shape = self._samples(batch)
        cut = object.__new__(HostCut)
        cut._bind(data, shape, self.dtype, self._allocator)
        return cut

    def rows(self, interval: Interval, out: Tensor) -> None:
        """Fill ``out`` with rows; see `sft.sources.Source`."""
        check_rows(repr(self), self.shape, interval, out, dtype=self.dtype)
        if self._allocator is None:
            return
        by_row = out.permute(0, 2, 3, 1)
        for sample in range(self.shape[0]):
            if by_row[sample].is_contiguous():  # NumPy, since torch would start threads that compete with the network's for the cores
                target = by_row[sample].flatten(1).view(torch.uint8).numpy()
                np.copyto(target, self._data[sample, interval.start : interval.stop])
            else:
                rows = self.tensor[sample].narrow(1, interval.start, len(interval))
                copy_serially(out[sample], rows.reshape(out[sample].shape))
            self._release_pages(Interval(sample, sample + 1), interval)

    def repeated_rows(self, columns: Interval) -> BoolArray:
        """For each row, True if it equals the row above it; see `sft.sources.source.RepeatingSource`.

        Args:
            columns: columns of the image, with the axes after them merged.
        """
        num, _, height, width = self.shape
        equal = np.zeros(height, dtype=bool)
        if self._allocator is None:
            return equal
        column_bytes = self._data.shape[2] // (width // prod(self.trailing[1:]))
        data = self._data[:, :, columns.start * column_bytes : columns.stop * column_bytes]
        step = max(1, _CHUNK_BYTES // max(1, data.shape[0] * data.shape[2]))
        for top in range(1, height, step):
            bottom = min(top + step, height)
            equal[top:bottom] = (data[:, top:bottom] == data[:, top - 1 : bottom - 1]).all(axis=(0, 2))
            for sample in range(num):
                self._release_pages(Interval(sample, sample + 1), Interval(top - 1, bottom))
        return equal

    def load(self, out: Tensor, staging: HostStaging) -> None:
        """Fill a tensor of the cut's shape on any device."""
        if out.device.type == "meta" or self._allocator is None:
            return
        if out.device.type == "cuda":
            flat = out.flatten(3) if out.dim() > 3 else out.unsqueeze(3)
            assert flat.data_ptr() == out.data_ptr(), "a copy would receive the rows"
            upload_rows(self, flat, PassReading(), staging)
        else:
            out.copy_(self.tensor)


class HostGradient(_HostImage):
    """Gradient of a cut on the host: zeros that the readers' strips are added to, read by the writer in strips."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, allocator: HostAllocator | None) -> None:
        super().__init__(shape, dtype, allocator, "the gradient of a cut on the host")
        if allocator is not None and allocator.folder is None:
            self._data[:] = 0

    def samples(self, batch: Interval) -> HostGradient:
        """The gradient of some batch elements, on the same memory."""
        data, shape = self._samples(batch)
        gradient = object.__new__(HostGradient)
        gradient._bind(data, shape, self.dtype, self._allocator)
        return gradient

    def add(self, rows: Interval, gradient: Tensor) -> None:
        """Add the gradient of rows: ``[N, C, len(rows), ...]``, on any device."""
        if self._allocator is None:
            return
        target = self.tensor.narrow(2, rows.start, len(rows))
        target.add_(gradient.to(target.device))
        self._release_pages(None, rows)


class CutStripLoader(SourceStripLoader):
    """Loader of strips of a cut on the host; its reads are not inputs and stay out of the statistics."""

    def __init__(self, cut: HostCut, batch: Interval, order: Sequence[Interval], device: torch.device, staging: HostStaging) -> None:
        super().__init__(cut, batch, order, device, PassReading(), staging)
        self._trailing = cut.trailing

    def take(self, rows: Interval) -> Tensor:
        strip = super().take(rows)
        return strip if len(self._trailing) == 1 else strip.view(*strip.shape[:3], *self._trailing)


class _DirectImage:
    """Image or volume ``[N, C, rows, ...]`` in the slab of a step.

    Args:
        shape: four extents or more.
        dtype: element type.
        offloader: copies of the step.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, offloader: HostOffloader) -> None:
        self.shape, self.dtype, self.offloader = shape, dtype, offloader
        self._range = offloader.reserve(prod(shape) * dtype.itemsize)
        #: `[N, rows, elements of a row]`
        self._data = self._range.data.view(dtype).view(shape[0], shape[2], -1)
        self._leaving: tuple[Tensor, Any] | None = None

    def read(self, strip: Tensor, batch: Interval, rows: Interval, allocated: Any) -> None:
        """Fill a strip on the device, after the event at which it was allocated; the computation waits for it."""
        self._upload(self._blocks(strip, batch, rows), allocated)

    def finish(self) -> None:
        """Make the computation wait for the strip that leaves, and free it."""
        if self._leaving is not None:
            self.offloader.wait_copy(self._leaving[1])
            self._leaving = None

    def _begin_write(self, strip: Tensor, batch: Interval, rows: Interval) -> None:
        """Begin to copy a strip from the device, which must not change before :meth:`finish`."""
        self.finish()
        blocks = ((on_host, on_device) for on_device, on_host in self._blocks(strip, batch, rows))
        self._leaving = (strip, self.offloader.begin_copy("down", blocks))

    def _upload(self, blocks: Iterable[tuple[Tensor, Tensor]], allocated: Any = None) -> None:
        self.offloader.wait_copy(self.offloader.begin_copy("up", blocks, allocated))

    def _blocks(self, strip: Tensor, batch: Interval, rows: Interval) -> Iterator[tuple[Tensor, Tensor]]:
        """Contiguous blocks of a strip on the device, each with its place on the host."""
        on_device, on_host = _by_rows(strip), self._data[batch.start : batch.stop, rows.start : rows.stop]
        yield from [(on_device, on_host)] if on_host.is_contiguous() else zip(on_device, on_host, strict=True)


class DirectCut(_DirectImage):
    """Cut in page-locked memory."""

    def write(self, strip: Tensor, batch: Interval, rows: Interval) -> None:
        """Begin to copy a strip from the device; see :meth:`finish`."""
        self._begin_write(strip, batch, rows)


class DirectGradient(_DirectImage):
    """Gradient of a cut in page-locked memory: zeros until strips are added to it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, offloader: HostOffloader) -> None:
        super().__init__(shape, dtype, offloader)
        #: rows that have a gradient, ``[N, rows]``; those of the slab may have any content before
        self._has_gradient = np.zeros((shape[0], shape[2]), dtype=bool)

    def add(self, batch: Interval, rows: Interval, gradient: Tensor) -> None:
        """Add the gradient of rows, a strip on the device, which becomes the sum; see :meth:`finish`."""
        self.finish()
        for strip, sample in zip(_by_rows(gradient), range(batch.start, batch.stop), strict=True):
            for added in self._rows_with_gradient(sample, rows):
                for chunk in read_chunks(len(added), self._data.shape[2] * self.dtype.itemsize):
                    first = added.start + chunk.start
                    earlier = torch.empty_like(strip[: len(chunk)])
                    self._upload([(earlier, self._data[sample, first : first + len(chunk)])])
                    strip[first - rows.start : first - rows.start + len(chunk)].add_(earlier)
                    del earlier
        self._begin_write(gradient, batch, rows)
        self._has_gradient[batch.start : batch.stop, rows.start : rows.stop] = True

    def read(self, strip: Tensor, batch: Interval, rows: Interval, allocated: Any) -> None:
        if self._has_gradient[batch.start : batch.stop, rows.start : rows.stop].all():
            super().read(strip, batch, rows, allocated)
            return
        strip.zero_()
        for number, sample in enumerate(range(batch.start, batch.stop)):
            for added in self._rows_with_gradient(sample, rows):
                target = strip[number : number + 1].narrow(2, added.start - rows.start, len(added))
                self._upload(self._blocks(target, Interval(sample, sample + 1), added))

    def _rows_with_gradient(self, sample: int, rows: Interval) -> list[Interval]:
        """The rows of a sample that have a gradient, as intervals."""
        known = self._has_gradient[sample, rows.start : rows.stop].astype(np.int8)
        borders = np.flatnonzero(np.diff(known, prepend=0, append=0)) + rows.start
        return [Interval(start, stop) for start, stop in pairwise(borders.tolist())][::2]


class DirectStripLoader:
    """Loader of strips of a direct cut, or of its gradient: each is copied while the strip before is computed.

    Args:
        cut: the cut, or its gradient.
        batch: batch elements to read.
        order: rows of each strip, in the order in which they are taken.
    """

    def __init__(self, cut: DirectCut | DirectGradient, batch: Interval, order: Sequence[Interval]) -> None:
        self._cut, self._batch = cut, batch
        num_targets, num_bytes, _ = reader_bytes(order, len(batch) * prod(cut.shape[1:]) // cut.shape[2] * cut.dtype.itemsize)
        self._targets = StripTargets(cut.offloader.device, num_bytes, num_left=sum(map(bool, order)))
        for _ in range(num_targets):
            self._targets.allocate()

    def take(self, rows: Interval) -> Tensor:
        """The next strip, channels last."""
        shape = (len(self._batch), self._cut.shape[1], len(rows), *self._cut.shape[3:])
        if not rows:
            return torch.empty(shape, dtype=self._cut.dtype, device=self._targets.device)
        if len(self._targets) < 2:  # the strip before is dropped
            self._targets.allocate()
        data, allocated = self._targets.take()
        strip = strip_of(data, self._cut.dtype, shape)
        self._cut.read(strip, self._batch, rows, allocated)
        return strip

    def close(self) -> None:
        """Free the memory of strips that were not taken."""
        self._targets.clear()


def _by_rows(strip: Tensor) -> Tensor:
    """View ``[N, rows, elements of a row]`` of a strip, which is channels last."""
    return strip.movedim(1, -1).view(strip.shape[0], strip.shape[2], -1)
