"""Cuts that are never whole on the device: on the host, written and read strip by strip, and their gradients likewise.

To the segment that makes it such a cut is an output on the host, to those that read it an input that is not resident: a
`sft.sources.Source` of rows, which a thread reads ahead. Backwards the readers' gradients come in strips and are added up on the host, and
the maker fetches the strips of the sum. What is never whole needs no room on the device but that of a few strips.

In memory an image lies channels last, as on the device (where a signal is channels first: it is laid out anew on its way): rows are
contiguous, and strips move as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from sft.analysis.ir.axes import Axes
from sft.analysis.tiling.constant_strips import BoolArray
from sft.common.interval import Interval
from sft.sources.source import check_rows, check_samples
from sft.torch_runtime.host_memory import ByteArray, HostAllocator
from sft.torch_runtime.host_outputs import copy_in_order
from sft.torch_runtime.input_streaming import PassReading, SourceStripLoader

__all__ = ["CutStripLoader", "HostCut", "HostGradient"]

#: Rows are compared in pieces of so many bytes.
_PIECE_BYTES = 1 << 20


class _HostImage:
    """An image (a signal, a volume) ``[N, C, rows, ...]`` on the host.

    Args:
        shape: three extents (a signal) or more.
        dtype: of its elements.
        room: where its bytes come from; none for a dry run, in which there are none.
        purpose: for error messages.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, room: HostAllocator | None, purpose: str) -> None:
        self._hold(np.zeros(0, np.uint8) if room is None else room.take(prod(shape) * dtype.itemsize, purpose), shape, dtype, room)

    def _hold(self, data: ByteArray, shape: tuple[int, ...], dtype: torch.dtype, room: HostAllocator | None) -> None:
        self.dtype, self.trailing, self._room = dtype, shape[3:], room
        #: as an image with one axis beside the rows
        self.shape: tuple[int, int, int, int] = (shape[0], shape[1], shape[2], prod(shape[3:]))
        if room is None:
            self._data, self.tensor = data.reshape(shape[0], 0, 0), torch.empty((), dtype=dtype, device="cpu").expand(shape)
            return
        #: `[N, rows, bytes of a row]`
        self._data = data.reshape(shape[0], shape[2], -1)
        #: what the machine takes views of
        self.tensor = torch.from_numpy(data.reshape(-1)).view(dtype).view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).detach()

    def _part(self, batch: Interval) -> tuple[ByteArray, tuple[int, ...]]:
        check_samples(self, batch)
        _, channels, rows, _ = self.shape
        return self._data[batch.start : batch.stop], (len(batch), channels, rows, *self.trailing)

    def _let_go(self, batch: Interval | None, rows: Interval | None) -> None:
        if self._room is None or self._room.folder is None:
            return
        for image in self._data[slice(None) if batch is None else slice(batch.start, batch.stop)]:
            self._room.let_go(image if rows is None else image[rows.start : rows.stop])


class HostCut(_HostImage):
    """A cut on the host, as an output that takes strips and as a `sft.sources.Source` of them."""

    def __repr__(self) -> str:
        return f"HostCut(shape={self.shape}, dtype={self.dtype})"

    def write(self, view: Tensor, part: Tensor, axes: Axes, batch: Interval | None = None, rows: Interval | None = None) -> None:
        """Copy a buffer on any device into a part of the cut; see `HostOutput.write`."""
        if self._room is not None:
            copy_in_order(view, part, part)
            self._let_go(batch, rows)

    def samples(self, batch: Interval) -> HostCut:
        """The cut of some batch elements, on the same memory."""
        data, shape = self._part(batch)
        found = object.__new__(HostCut)
        found._hold(data, shape, self.dtype, self._room)
        return found

    def rows(self, interval: Interval, out: Tensor) -> None:
        """Fill ``out`` with rows; see `sft.sources.Source`."""
        check_rows(repr(self), self.shape, interval, out, dtype=self.dtype)
        if self._room is None:
            return
        by_row = out.permute(0, 2, 3, 1)
        for sample in range(self.shape[0]):
            if by_row[sample].is_contiguous():  # with NumPy, as torch would start threads that fight the network's for the cores
                target = by_row[sample].flatten(1).view(torch.uint8).numpy()
                np.copyto(target, self._data[sample, interval.start : interval.stop])
            else:
                part = self.tensor[sample].narrow(1, interval.start, len(interval))
                out[sample].copy_(part.reshape(out[sample].shape))
            self._let_go(Interval(sample, sample + 1), interval)

    def repeated_rows(self, columns: Interval) -> BoolArray:
        """For each row whether it equals the row above it; see `sft.sources.source.RepeatingSource`.

        Args:
            columns: of the image, whatever axes lie behind them.
        """
        num, _, height, width = self.shape
        same = np.zeros(height, dtype=bool)
        if self._room is None:
            return same
        column_bytes = self._data.shape[2] // (width // prod(self.trailing[1:]))
        data = self._data[:, :, columns.start * column_bytes : columns.stop * column_bytes]
        step = max(1, _PIECE_BYTES // max(1, data.shape[0] * data.shape[2]))
        for top in range(1, height, step):
            bottom = min(top + step, height)
            same[top:bottom] = (data[:, top:bottom] == data[:, top - 1 : bottom - 1]).all(axis=(0, 2))
            for sample in range(num):
                self._let_go(Interval(sample, sample + 1), Interval(top - 1, bottom))
        return same

    def load(self, out: Tensor) -> None:
        """Fill a tensor of the cut's shape on any device."""
        if out.device.type != "meta" and self._room is not None:
            out.copy_(self.tensor)


class HostGradient(_HostImage):
    """The gradient of such a cut: zeros that strips are added to, from any reader, and that are fetched in strips."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, room: HostAllocator | None, purpose: str) -> None:
        super().__init__(shape, dtype, room, purpose)
        if room is not None and room.folder is None:
            self._data[:] = 0

    def samples(self, batch: Interval) -> HostGradient:
        """The gradient of some batch elements, on the same memory."""
        data, shape = self._part(batch)
        found = object.__new__(HostGradient)
        found._hold(data, shape, self.dtype, self._room)
        return found

    def add(self, rows: Interval, gradient: Tensor) -> None:
        """Add the gradient of rows: ``[N, C, len(rows), ...]``, on any device."""
        if self._room is None:
            return
        part = self.tensor.narrow(2, rows.start, len(rows))
        part.add_(gradient.to(part.device))
        self._let_go(None, rows)


class CutStripLoader(SourceStripLoader):
    """Strips of such a cut on a device, read ahead on the host.

    What they read is no input's, and in nobody's account.
    """

    def __init__(self, cut: HostCut, batch: Interval, order: Sequence[Interval], device: torch.device) -> None:
        super().__init__(cut, batch, order, device, PassReading())
        self._trailing = cut.trailing

    def take(self, rows: Interval) -> Tensor:
        strip = super().take(rows)
        return strip if len(self._trailing) == 1 else strip.view(*strip.shape[:3], *self._trailing)
