"""Outputs on the host: tensors in memory or in a mapped file that the region fills strip by strip.

Their memory is NumPy's, or a file's, so `sft.measure_peak` on the CPU counts the device's share alone. It is not page-locked on any device:
torch rounds page-locked buffers up to powers of two and keeps them, and these are the largest arrays of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from sft.analysis.ir.axes import ROWS, Axes
from sft.common.byte_units import format_bytes
from sft.common.errors import InputError
from sft.common.interval import Interval
from sft.sources.sink import NpyFile

__all__ = ["HostOutput", "OutputSink", "ResumingSink", "allocate_host_output", "copy_in_order", "copy_to_host"]


@runtime_checkable
class OutputSink(Protocol):
    """Consumer of an output that is delivered strip by strip and never exists as a full tensor.

    A call runs ``open``, then ``write`` for every strip, then ``publish``; a call that fails runs ``discard`` in place of ``publish``.
    Rows arrive from the top in every sweep. A plan with panels delivers the columns of one panel after those of the previous one.
    """

    def open(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Begin an output.

        Raises:
            InputError: the sink cannot hold it.
        """
        ...

    def write(self, block: Tensor, rows: Interval | None, columns: Interval | None) -> None:
        """Take a block of the output: a CPU tensor that is valid during the call.

        Args:
            block: of the output's number of dimensions.
            rows: its rows; ``None`` for all.
            columns: its columns; ``None`` for all.

        Raises:
            SourceError: it cannot be written.
        """
        ...

    def publish(self) -> None:
        """Complete the output.

        Raises:
            SourceError: it cannot be written.
        """
        ...

    def discard(self) -> None:
        """Drop an incomplete output; no effect after ``publish``."""
        ...


@runtime_checkable
class ResumingSink(OutputSink, Protocol):
    """Sink that has rows of an earlier, interrupted call. Strips above them may be left out; rows that arrive again must be ignored."""

    @property
    def num_known_rows(self) -> int:
        """Number of leading rows that the sink has; known after ``open``."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class HostOutput:
    """Output on the host.

    Attributes:
        tensor: CPU tensor that the caller gets.
        file: file that is its memory; ``None`` for RAM.
        sink: consumer of its strips; the tensor then is one number, expanded to the shape of the output.
    """

    tensor: Tensor
    file: NpyFile | None = None
    sink: OutputSink | None = None

    @classmethod
    def in_file(cls, file: NpyFile) -> HostOutput:
        """Output in a file."""
        return cls(torch.from_numpy(file.array), file)

    @classmethod
    def in_sink(cls, sink: OutputSink, shape: tuple[int, ...], dtype: torch.dtype) -> HostOutput:
        """Output that a sink consumes.

        Raises:
            InputError: the sink cannot hold it.
        """
        sink.open(shape, dtype)
        return cls(_expanded_number(shape, dtype), sink=sink)

    def write(self, view: Tensor, source: Tensor, axes: Axes, batch: Interval | None = None, rows: Interval | None = None) -> None:
        """Copy a buffer on any device into a region of the tensor.

        Args:
            view: view of the region.
            source: the buffer.
            axes: axes of the image, if the output is one.
            batch: batch elements of the region.
            rows: rows of the region.

        Raises:
            SourceError: the file was cut short, or the sink cannot write.
        """
        if self.sink is not None:
            self.sink.write(source.cpu(), rows, None)
            return
        if self.file is not None:
            self.file.check()
        if source.device.type != "meta":
            copy_in_order(view, source, source)
        if self.file is not None:
            self.file.release(axes.dim(self.tensor.dim(), ROWS), batch, rows)

    def publish(self) -> None:
        """Rename the file to its final name; complete the output of a sink.

        Raises:
            SourceError: it cannot be renamed.
        """
        if self.file is not None:
            self.file.publish()
        if self.sink is not None:
            self.sink.publish()

    def discard(self) -> None:
        """Remove the file unless it is published."""
        if self.file is not None:
            self.file.discard()
        if self.sink is not None:
            self.sink.discard()


def allocate_host_output(shape: tuple[int, ...], dtype: torch.dtype, *, channels_last: bool, is_dry: bool) -> HostOutput:
    """Allocate an output in host memory; for a dry run on the meta device, one expanded number.

    Raises:
        InputError: the system has less memory.
    """
    if is_dry:
        return HostOutput(_expanded_number(shape, dtype))
    num_bytes = prod(shape) * dtype.itemsize
    try:
        data = np.empty(num_bytes, np.uint8)
    except MemoryError as error:
        raise InputError(
            f"an output of shape {shape} needs {format_bytes(num_bytes)} of host memory, which could not be allocated; map it from a "
            "file with output='name.npy'"
        ) from error
    flat = torch.from_numpy(data).view(dtype)
    image = flat.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1) if channels_last else flat.view(shape)
    return HostOutput(image.detach())  # else autograd takes it for a view, which callers may not change in place


def _expanded_number(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of a shape that has the memory of one number."""
    return torch.from_numpy(np.zeros(dtype.itemsize, np.uint8)).view(dtype).expand(shape).detach()


def copy_in_order(target: Tensor, source: Tensor, dense: Tensor) -> None:
    """Copy in the memory order of ``dense``, one of the two tensors: between devices, that avoids a temporary next to it."""
    order = sorted(range(dense.dim()), key=dense.stride, reverse=True)
    target.permute(order).copy_(source.permute(order))


def copy_to_host(host: HostOutput, tensor: Tensor) -> Tensor:
    """Copy a tensor to an output on the host; the gradient of the copy is the tensor's."""
    copy: Tensor = _CopyToHost.apply(tensor, host)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return copy


class _CopyToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, host: HostOutput) -> Tensor:
        ctx.device = tensor.device
        host.write(host.tensor, tensor, Axes())
        return host.tensor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.device), None
