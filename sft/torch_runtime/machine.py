"""Machine on real tensors: allocates buffers with torch's allocator and executes programs instruction by instruction.

On the CPU it also trims the heap while a sweep runs. The C library serves buffers of up to 32 MiB from one heap. A sweep allocates and
frees such buffers strip after strip, and between them the small blocks of carried rows, which stay. Each block is placed in the hole of a
freed buffer, which is then too small for the next strip, so the heap grows by a few strips with every strip although hardly any of it is
in use: measured 5.9 GiB of process memory for 0.9 GiB of live tensors. Trimming returns the pages of the holes to the system. It has no
effect if the C library has no ``malloc_trim``, or if the environment sets the heap's threshold (``MALLOC_TRIM_THRESHOLD_``).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar

import torch

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.analysis.ir.axes import COLUMNS, ROWS, Axes
from sft.common.errors import refusal_of_values
from sft.common.interval import Interval
from sft.lower.program import Instruction, Port, Program
from sft.lower.steps import Step, prepared_program
from sft.runtime.machine import DEFAULT_AXES, Buffer, OpaqueTensors, Residuals
from sft.runtime.moves import ScheduleOp
from sft.runtime.offload import OffloadedValue
from sft.runtime.weight_prefetch import GradientTransfer
from sft.sources.source import select_samples
from sft.torch_runtime.cuda_graphs import GraphCache
from sft.torch_runtime.host.host_memory import HostAllocator
from sft.torch_runtime.host.host_outputs import HostOutput, OutputSink, ResumingSink, copy_in_order
from sft.torch_runtime.host.host_transfers import HostTransfers, row_pieces
from sft.torch_runtime.host.input_streaming import SourceStripLoader, load_source
from sft.torch_runtime.host.offload import HostOffloader
from sft.torch_runtime.host.staging import HostStaging
from sft.torch_runtime.host.streamed_cuts import CutStripLoader, DirectCut, DirectGradient, DirectStripLoader, HostCut, HostGradient
from sft.torch_runtime.pass_statistics import LISTENERS, PassStatistics, note_flops
from sft.torch_runtime.skip_constant import TorchStripOps
from sft.torch_runtime.weight_streaming import WeightPass

__all__ = ["TRIM_AFTER_BYTES", "HeapTrimmer", "TorchMachine"]

#: Bytes of freed buffers after which the heap is trimmed; computing their content takes far longer than the trim.
TRIM_AFTER_BYTES = 256 * 2**20


@cache
def _find_malloc_trim() -> Callable[[], None] | None:
    """``malloc_trim`` of the C library; ``None`` if it has none, or if the environment says how many free bytes the heap keeps."""
    if "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return None
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: trim(0)


@dataclass(slots=True)
class HeapTrimmer:
    """Trims the heap after every ``TRIM_AFTER_BYTES`` of freed buffers.

    Attributes:
        freed_bytes: bytes freed since the last trim.
    """

    freed_bytes: int = 0

    def note(self, num_bytes: int) -> None:
        """Count the peak bytes of a program that has run."""
        self.freed_bytes += num_bytes
        if self.freed_bytes >= TRIM_AFTER_BYTES:
            self.freed_bytes = 0
            trim = _find_malloc_trim()
            if trim is not None:
                trim()


@dataclass(slots=True)
class TorchMachine:
    """Machine on a torch device (``meta``: a dry run).

    Attributes:
        device: device of the buffers.
        trace: called with each executed instruction, for tests.
        statistics: statistics of the pass, updated.
        heap: trims the heap, on the CPU.
        offloader: copies of offloaded values, for schedules that have any.
        host_allocator: allocates cuts on the host.
        graphs: recorded programs, which are replayed instead of executed.
        weights: transfers of streamed weights, for regions that have any.
        staging: page-locked host memory that copies to a CUDA device pass through.
    """

    has_data: ClassVar[bool] = True
    device: torch.device
    trace: Callable[[Instruction], None] | None = None
    statistics: PassStatistics = field(default_factory=PassStatistics)
    heap: HeapTrimmer = field(default_factory=HeapTrimmer)
    offloader: HostOffloader | None = None
    host_allocator: HostAllocator = field(default_factory=HostAllocator)
    graphs: GraphCache | None = None
    weights: WeightPass | None = None
    staging: HostStaging = field(default_factory=HostStaging)
    _transfers: HostTransfers | None = None

    def close(self) -> None:
        """End a pass: changes of host memory are complete.

        Raises:
            SourceError, InputError: of a file, or a gradient sink, that could not be written.
        """
        transfers, self._transfers = self._transfers, None
        if transfers is not None:
            transfers.close()

    def host_transfers(self) -> HostTransfers | None:
        """Asynchronous copies between the device and host memory; ``None`` on devices other than CUDA."""
        if self._transfers is None and self.device.type == "cuda":
            self._transfers = HostTransfers(self.device, self.staging)
        return self._transfers

    def start_op(self, op: ScheduleOp) -> None:
        """Mark the begin of a schedule op; tests watch it."""

    # Buffers.

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, *, zero: bool, contiguous: bool = False) -> torch.Tensor:
        layout = torch.contiguous_format if contiguous else CHANNELS_LAST.get(len(shape), torch.contiguous_format)
        out = torch.empty(shape, dtype=dtype, device=self.device, memory_format=layout)
        return out.zero_() if zero else out

    def zeros_like(self, buffer: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if buffer is None:
            return self.allocate(shape, dtype, zero=True)
        return torch.zeros_like(buffer, dtype=dtype)

    def view(
        self, buffer: Buffer, batch: Interval | None, rows: Interval | None, columns: Interval | None = None, *, axes: Axes = DEFAULT_AXES
    ) -> torch.Tensor:
        view: torch.Tensor = buffer
        rank = view.dim()
        for dim, interval in ((0, batch), (axes.dim(rank, ROWS), rows), (axes.dim(rank, COLUMNS), columns)):
            if dim is not None and interval is not None and len(interval) != view.shape[dim]:
                view = view.narrow(dim, interval.start, len(interval))
        return view

    def fill(self, buffer: Buffer, value: float) -> None:
        buffer.fill_(value)

    def add(self, target: Buffer, source: Buffer) -> None:
        target.add_(source)

    def copy(self, target: Buffer, source: Buffer) -> None:
        target.copy_(source)

    def cast(self, buffer: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        out: torch.Tensor = buffer.to(dtype)
        return out

    def to_channels_first(self, buffer: Buffer) -> torch.Tensor:
        out: torch.Tensor = buffer.contiguous()
        return out

    # Programs.

    def run(
        self, program: Program, bindings: Mapping[Port, Buffer], saved: Residuals | None = None
    ) -> tuple[dict[Port, Buffer], Residuals]:
        if LISTENERS:
            note_flops(program.flops)
        if self.graphs is not None and saved is None:
            results = self.graphs.run(program, bindings, lambda recorded, buffers: self._run(recorded, buffers, None)[0])
            if results is not None:
                return results, Residuals({})
        return self._run(program, bindings, saved)

    def _run(self, program: Program, bindings: Mapping[Port, Buffer], saved: Residuals | None) -> tuple[dict[Port, Buffer], Residuals]:
        prepared = prepared_program(program)
        tensors = prepared.values(self.device)
        if saved is not None:
            tensors.update(saved.values)
            saved.values.clear()  # an instruction frees each for the last time
        for port, slot in program.ports.items():
            if port in bindings:
                tensors[slot.number] = bindings[port]
        for step in prepared.steps:
            self._execute(step, tensors)
        results = {port: tensors[slot.number] for port, slot in program.results.items()}
        residuals = {number: tensors[number] for number in program.residuals}
        tensors.clear()
        if self.device.type == "cpu":
            self.heap.note(program.peak_bytes)
        return results, Residuals(residuals)

    def _execute(self, step: Step, tensors: dict[int, Any]) -> None:
        function, read, read_keywords, numbers, frees, instruction = step
        try:
            result = function(*read(tensors)) if read_keywords is None else function(*read(tensors), **read_keywords(tensors))
        except (IndexError, RuntimeError) as error:
            refusal = refusal_of_values(error, instruction.owner)
            if refusal is None:
                raise
            raise refusal from error
        if len(numbers) == 1:
            if numbers[0] is not None:
                tensors[numbers[0]] = result
        elif numbers:
            for number, value in zip(numbers, result, strict=True):
                if number is not None:
                    tensors[number] = value
        for freed in frees:
            tensors.pop(freed, None)
        if self.trace is not None:
            self.trace(instruction)

    def residual_buffers(self, saved: Residuals, slots: Sequence[int]) -> list[torch.Tensor]:
        values = (saved.values[slot] for slot in slots)
        return [tensor for value in values for tensor in (value.buffers if isinstance(value, OpaqueTensors) else (value,))]

    # Inputs, outputs and cuts on the host.

    def open_input(
        self, source: Buffer, batch: Interval, order: Sequence[Interval], row_bytes: int, dtype: torch.dtype
    ) -> SourceStripLoader | DirectStripLoader:
        if isinstance(source, (DirectCut, DirectGradient)):
            return DirectStripLoader(source, batch, order)
        if self._transfers is not None:  # a cut that is read is complete, and the readers' buffers begin where the plan has them
            self._transfers.finish()
        if isinstance(source, HostCut):
            return CutStripLoader(source, batch, order, self.device, self.staging)
        return SourceStripLoader(source, batch, order, self.device, self.statistics.reading, self.staging)

    def read_input(self, source: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        out = self.allocate(shape, dtype, zero=False)
        if self._transfers is not None:
            self._transfers.finish()
        if isinstance(source, HostCut):
            source.load(out, self.staging)
        else:
            load_source(source, out, self.statistics.reading, self.staging)
        return out

    def add_to_sink(self, sink: Buffer, batch: Interval, rows: Interval, gradient: Buffer) -> None:
        if isinstance(sink, DirectGradient):
            sink.add(batch, rows, gradient)
            return
        samples, transfers = select_samples(sink, batch), self.host_transfers()
        if transfers is None:
            samples.add(rows, gradient)
            return
        for start, piece in row_pieces(gradient, whole=len(rows) == sink.shape[2]):
            first = rows.start + start
            interval = rows if piece is gradient else Interval(first, first + piece.shape[2])
            transfers.download(piece, partial(samples.add, interval), sink)

    def write_output(
        self,
        host: Buffer,
        source: Buffer,
        batch: Interval | None = None,
        rows: Interval | None = None,
        columns: Interval | None = None,
        *,
        axes: Axes = DEFAULT_AXES,
    ) -> None:
        if isinstance(host, DirectCut):
            assert batch is not None and rows is not None, "a tiled segment writes it"
            host.write(source, batch, rows)
            return
        region, transfers = self.view(host.tensor, batch, rows, columns, axes=axes), self.host_transfers()
        if isinstance(host, HostOutput) and host.sink is not None:
            self._deliver(host.sink, source, rows, columns)
            return
        if transfers is None:
            host.write(region, source, axes, batch, rows)
            return
        for start, piece in row_pieces(source, whole=rows is None):
            target = region if piece is source else region.narrow(2, start, piece.shape[2])
            transfers.download(piece, partial(_write_piece, host, target, axes, batch, rows), host)

    def finish_strips(self, host: Buffer) -> None:
        host.finish()

    def known_rows(self, host: Buffer) -> int:
        sink = host.sink if isinstance(host, HostOutput) else None
        return sink.num_known_rows if isinstance(sink, ResumingSink) else 0

    def _deliver(self, sink: OutputSink, source: torch.Tensor, rows: Interval | None, columns: Interval | None) -> None:
        """Pass a block of an output to its sink; on CUDA from the thread of the copies, in order."""
        transfers = self.host_transfers()
        for start, piece in row_pieces(source, whole=rows is None):
            interval = rows if piece is source else Interval(start, start + piece.shape[2])
            if transfers is None:
                sink.write(piece, interval, columns)
            else:
                transfers.download(piece, partial(_write_block, sink, interval, columns), sink)

    def read_output_grad(
        self,
        host: Buffer,
        target: Buffer,
        batch: Interval | None = None,
        rows: Interval | None = None,
        columns: Interval | None = None,
        *,
        axes: Axes = DEFAULT_AXES,
    ) -> None:
        if self.device.type == "meta":
            return
        gradient, transfers = host.tensor if isinstance(host, HostGradient) else host, self.host_transfers()
        region = self.view(gradient, batch, rows, columns, axes=axes)
        if transfers is None or gradient.device.type != "cpu":
            copy_in_order(target, region, target)
            return
        transfers.wait(host)
        for start, piece in row_pieces(target, whole=rows is None):
            transfers.upload(piece, region if piece is target else region.narrow(2, start, piece.shape[2]))

    def allocate_host_cut(self, shape: tuple[int, ...], dtype: torch.dtype, *, direct: bool) -> HostCut | DirectCut:
        return DirectCut(shape, dtype, self._offloader) if direct else HostCut(shape, dtype, self._cut_allocator, "a cut on the host")

    def allocate_host_grad(self, shape: tuple[int, ...], dtype: torch.dtype, *, direct: bool) -> HostGradient | DirectGradient:
        return DirectGradient(shape, dtype, self._offloader) if direct else HostGradient(shape, dtype, self._cut_allocator)

    @property
    def _cut_allocator(self) -> HostAllocator | None:
        return None if self.device.type == "meta" else self.host_allocator

    # Offloaded values.

    @property
    def _offloader(self) -> HostOffloader:
        assert self.offloader is not None, "values are copied to the host, and the machine has no slab for them"
        return self.offloader

    def offload(self, target: str, buffers: Sequence[Buffer]) -> OffloadedValue:
        return self._offloader.offload(target, buffers)

    def release(self, copy: OffloadedValue) -> None:
        self._offloader.release(copy)

    def prefetch(self, copy: OffloadedValue) -> None:
        self._offloader.prefetch(copy)

    def wait_prefetch(self, copy: OffloadedValue) -> None:
        self._offloader.wait_prefetch(copy)

    def free_offload(self, copy: OffloadedValue) -> None:
        self._offloader.free_offload(copy)

    # Streamed weights.

    @property
    def _weights(self) -> WeightPass:
        assert self.weights is not None, "the region streams weights, and the machine has no store"
        return self.weights

    def load_weight(
        self, name: str, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype, buffer: torch.Tensor | None, *, ahead: bool
    ) -> torch.Tensor:
        return self._weights.load(name, num_bytes, shape, dtype, buffer, ahead=ahead)

    def wait_weights(self, names: Sequence[str]) -> None:
        self._weights.wait(names)

    def free_weight(self, name: str, buffer: torch.Tensor) -> None:
        self._weights.free(name, buffer)

    def send_weight_grad(self, name: str, gradient: torch.Tensor, weight: torch.Tensor, transfer: GradientTransfer) -> None:
        self._weights.send_gradient(name, gradient, weight)

    # Strips that a sweep leaves out.

    @property
    def strip_ops(self) -> TorchStripOps:
        if self._transfers is not None:  # rows of cuts on the host are compared
            self._transfers.finish()
        return TorchStripOps(self.device, self.view, self.statistics.skipping)


def _write_block(sink: OutputSink, rows: Interval | None, columns: Interval | None, copied: torch.Tensor) -> None:
    """Pass a copy on the host to a sink."""
    sink.write(copied, rows, columns)


def _write_piece(host: Any, region: torch.Tensor, axes: Axes, batch: Interval | None, rows: Interval | None, copied: torch.Tensor) -> None:
    """Write a copy on the host into a region of an output or a cut."""
    host.write(region, copied, axes, batch, rows)
