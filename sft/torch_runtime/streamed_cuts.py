"""Streamed cuts: cuts on the host that are written and read strip by strip and never complete on the device, and their gradients.

For the segment that writes it, such a cut is an output on the host; for its readers it is an input that is not resident: a
`sft.sources.Source` of rows, which a thread reads ahead. In the backward pass the readers' gradients arrive in strips and are summed on the
host, and the writer reads strips of the sum. The device holds a few strips at a time.

In host memory an image is channels last, as on the device (a signal, channels first on the device, is transposed on its way): rows are
contiguous, and strips move as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from sft.analysis.ir.axes import Axes
from sft.common.array_types import BoolArray, ByteArray
from sft.common.interval import Interval
from sft.sources.source import check_rows, check_samples
from sft.torch_runtime.host_memory import HostAllocator
from sft.torch_runtime.host_outputs import copy_in_order
from sft.torch_runtime.input_streaming import SourceStripLoader, upload_rows
from sft.torch_runtime.pass_statistics import PassReading
from sft.torch_runtime.staging import HostStaging

__all__ = ["CutStripLoader", "HostCut", "HostGradient"]

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
                out[sample].copy_(rows.reshape(out[sample].shape))
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
