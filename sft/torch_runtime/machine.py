"""The machine of real tensors: buffers from torch's allocator, programs executed instruction by instruction.

Giving freed memory back to the system while a walk runs on the CPU.

The C library serves buffers of up to 32 MiB from one heap. A walk makes and frees such buffers strip after strip, and between them the
small blocks of carried rows that stay. Each block lands in the hole of a freed buffer, which then is too small for the next strip's,
so the heap grows by some strips' worth with every strip, although hardly any of it is in use: measured 5.9 GiB of process memory for
0.9 GiB of live tensors. Trimming hands the pages of the holes back. It is a no-op where the C library has no such call.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.analysis.ir.axes import COLUMNS, ROWS, Axes
from sft.analysis.tiling.constant_strips import BoolArray
from sft.common.interval import Interval
from sft.lower.program import DEVICE, Instruction, Port, Program, Slot
from sft.lower.rules.base import AdditivePart
from sft.runtime.machine import Buffer, OpaqueTensors, Residuals
from sft.runtime.moves import ScheduleOp
from sft.runtime.offload import OffloadedValue
from sft.runtime.weight_prefetch import GradientTransfer
from sft.sources.source import select_samples
from sft.torch_runtime.cuda_graphs import GraphCache
from sft.torch_runtime.host_memory import HostAllocator
from sft.torch_runtime.host_outputs import copy_in_order
from sft.torch_runtime.input_streaming import PassReading, SourceStripLoader, load_source
from sft.torch_runtime.offload import HostOffloader
from sft.torch_runtime.skip_constant import PassSkipping, equal_rows_on_device, source_equal_rows
from sft.torch_runtime.streamed_cuts import CutStripLoader, HostCut, HostGradient
from sft.torch_runtime.weight_streaming import WeightPass

__all__ = ["TRIM_AFTER_BYTES", "HeapTrimmer", "TorchMachine"]

#: Bytes of freed buffers that may pile up before the heap is trimmed; making them takes far longer than the trim.
TRIM_AFTER_BYTES = 256 * 2**20


@cache
def _find_malloc_trim() -> Callable[[], None] | None:
    """The C library's call, `None` where it has none."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: trim(0)


@dataclass(slots=True)
class HeapTrimmer:
    """Trims the heap each time that programs have made and freed enough."""

    freed_bytes: int = 0

    def note(self, num_bytes: int) -> None:
        """A program has run whose buffers took so many bytes at its peak."""
        self.freed_bytes += num_bytes
        if self.freed_bytes >= TRIM_AFTER_BYTES:
            self.freed_bytes = 0
            trim = _find_malloc_trim()
            if trim is not None:
                trim()


_AXES = Axes()


@dataclass(slots=True)
class TorchMachine:
    """Runs programs on a torch device (``meta`` makes it a dry run).

    Attributes:
        device: where buffers are made.
        trace: called with each executed instruction, for tests.
        account: gains what is read of inputs that are not resident.
        heap: is trimmed now and then, on the CPU.
        copies: where what leaves for the host goes, in orders that have such moves.
        room: where cuts are that are never whole on the device.
        graphs: recordings of programs that are replayed instead of run.
        skipping: gains what strips ran, and which were left out.
        weights: brings streamed weights, and takes their gradients, in regions that have any.
    """

    device: torch.device
    trace: Callable[[Instruction], None] | None = None
    account: PassReading = field(default_factory=PassReading)
    heap: HeapTrimmer = field(default_factory=HeapTrimmer)
    copies: HostOffloader | None = None
    room: HostAllocator = field(default_factory=HostAllocator)
    graphs: GraphCache | None = None
    skipping: PassSkipping = field(default_factory=PassSkipping)
    weights: WeightPass | None = None

    def begin(self, move: ScheduleOp) -> None:
        pass

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, *, zero: bool, contiguous: bool = False) -> torch.Tensor:
        layout = torch.contiguous_format if contiguous else CHANNELS_LAST.get(len(shape), torch.contiguous_format)
        out = torch.empty(shape, dtype=dtype, device=self.device, memory_format=layout)
        return out.zero_() if zero else out

    def fill(self, handle: Buffer, value: float) -> None:
        handle.fill_(value)

    def zeros_like(self, handle: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if handle is None:
            return self.allocate(shape, dtype, zero=True)
        return torch.zeros_like(handle, dtype=dtype)

    def view(
        self, handle: Buffer, batch: Interval | None, rows: Interval | None, columns: Interval | None = None, *, axes: Axes = _AXES
    ) -> torch.Tensor:
        view: torch.Tensor = handle
        rank = view.dim()
        for dim, part in ((0, batch), (axes.dim(rank, ROWS), rows), (axes.dim(rank, COLUMNS), columns)):
            if dim is not None and part is not None and len(part) != view.shape[dim]:
                view = view.narrow(dim, part.start, len(part))
        return view

    def add(self, target: Buffer, source: Buffer) -> None:
        target.add_(source)

    def copy(self, target: Buffer, source: Buffer) -> None:
        target.copy_(source)

    def weigh(self, handle: Buffer, additive: AdditivePart, count: int, *, down: bool) -> None:
        parts = [handle] if additive.columns is None else [handle.select(-1, column) for column in additive.columns]
        for part in parts:
            if additive.is_logarithm:
                part.sub_(math.log(count)) if down else part.add_(math.log(count))
            else:
                part.div_(count) if down else part.mul_(count)

    def repeated_rows(self, handle: Buffer, batch: Interval, columns: Interval, *, axes: Axes) -> BoolArray | None:
        if self.device.type == "meta":
            return None
        if isinstance(handle, HostGradient):
            handle = handle.tensor
        if isinstance(handle, torch.Tensor):
            return equal_rows_on_device(self.view(handle, batch, None, columns, axes=axes), axes)
        return source_equal_rows(handle, batch, columns)

    def reserve(self, num_bytes: int) -> None:
        return None

    def note_strips(self, program: Program, *, num_run: int, num_skipped: int) -> None:
        self.skipping.note(num_run=num_run, num_skipped=num_skipped, flops=program.flops)

    def read(self, source: Buffer, batch: Interval, order: Sequence[Interval], row_bytes: int) -> SourceStripLoader:
        if isinstance(source, HostCut):
            return CutStripLoader(source, batch, order, self.device)
        return SourceStripLoader(source, batch, order, self.device, self.account)

    def load(self, source: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        out = self.allocate(shape, dtype, zero=False)
        if isinstance(source, HostCut):
            source.load(out)
        else:
            load_source(source, out, self.account)
        return out

    def give(self, sink: Buffer, batch: Interval, rows: Interval, gradient: Buffer) -> None:
        select_samples(sink, batch).add(rows, gradient)

    def put(
        self,
        host: Buffer,
        part: Buffer,
        batch: Interval | None = None,
        rows: Interval | None = None,
        columns: Interval | None = None,
        *,
        axes: Axes = _AXES,
    ) -> None:
        host.write(self.view(host.tensor, batch, rows, columns, axes=axes), part, axes, batch, rows)

    def fetch(
        self,
        host: Buffer,
        part: Buffer,
        batch: Interval | None = None,
        rows: Interval | None = None,
        columns: Interval | None = None,
        *,
        axes: Axes = _AXES,
    ) -> None:
        if self.device.type != "meta":
            whole = host.tensor if isinstance(host, HostGradient) else host
            copy_in_order(part, self.view(whole, batch, rows, columns, axes=axes), part)

    def host_cut(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostCut:
        return HostCut(shape, dtype, self._room_for_cuts, "a cut on the host")

    def host_gradient(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostGradient:
        return HostGradient(shape, dtype, self._room_for_cuts, "the gradient of a cut on the host")

    @property
    def _room_for_cuts(self) -> HostAllocator | None:
        return None if self.device.type == "meta" else self.room

    def cast(self, handle: Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        out: torch.Tensor = handle.to(dtype)
        return out

    def channels_first(self, handle: Buffer) -> torch.Tensor:
        out: torch.Tensor = handle.contiguous()
        return out

    def run(
        self, program: Program, bindings: Mapping[Port, Buffer], saved: Residuals | None = None
    ) -> tuple[dict[Port, Buffer], Residuals]:
        if self.graphs is not None and saved is None:
            found = self.graphs.run(program, bindings, lambda one, given: self._run(one, given, None)[0])
            if found is not None:
                return found, Residuals({})
        return self._run(program, bindings, saved)

    def _run(self, program: Program, bindings: Mapping[Port, Buffer], saved: Residuals | None) -> tuple[dict[Port, Buffer], Residuals]:
        tensors: dict[int, Any] = {} if saved is None else saved.values
        for port, slot in program.ports.items():
            if port in bindings:
                tensors[slot.number] = bindings[port]
        for instruction in program.instructions:
            self._execute(instruction, tensors)
        results = {port: tensors[slot.number] for port, slot in program.results.items()}
        left = {number: tensors[number] for number in program.saved}
        tensors.clear()
        if self.device.type == "cpu":
            self.heap.note(program.peak_bytes)
        return results, Residuals(left)

    def buffers_of(self, saved: Residuals, slots: Sequence[int]) -> list[torch.Tensor]:
        values = (saved.values[slot] for slot in slots)
        return [tensor for value in values for tensor in (value.buffers if isinstance(value, OpaqueTensors) else (value,))]

    @property
    def _host(self) -> HostOffloader:
        assert self.copies is not None, "the order copies to the host, and the machine has no room there"
        return self.copies

    def offload(self, target: str, handles: Sequence[Buffer]) -> OffloadedValue:
        return self._host.offload(target, handles)

    def release(self, copy: OffloadedValue) -> None:
        self._host.release(copy)

    def prefetch(self, copy: OffloadedValue) -> None:
        self._host.prefetch(copy)

    def settle(self, copy: OffloadedValue) -> None:
        self._host.settle(copy)

    def forget(self, copy: OffloadedValue) -> None:
        self._host.forget(copy)

    @property
    def _weights(self) -> WeightPass:
        assert self.weights is not None, "the region streams weights, and the machine has no store"
        return self.weights

    def load_weight(
        self, name: str, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype, handle: torch.Tensor | None, *, ahead: bool
    ) -> torch.Tensor:
        return self._weights.load(name, num_bytes, shape, dtype, handle, ahead=ahead)

    def settle_weights(self, names: Sequence[str]) -> None:
        self._weights.settle(names)

    def release_weight(self, name: str, handle: torch.Tensor) -> None:
        self._weights.release(name, handle)

    def take_gradient(self, name: str, gradient: torch.Tensor, weight: torch.Tensor, taking: GradientTransfer) -> None:
        self._weights.take(name, gradient, weight)

    def _execute(self, instruction: Instruction, tensors: dict[int, Any]) -> None:
        arguments = [self._resolve(argument, tensors) for argument in instruction.arguments]
        if instruction.keywords:
            keywords = {key: self._resolve(value, tensors) for key, value in instruction.keywords.items()}
            result = instruction.function(*arguments, **keywords)
        else:
            result = instruction.function(*arguments)
        outputs = instruction.outputs
        if len(outputs) == 1:
            (slot,) = outputs
            if slot is not None:
                tensors[slot.number] = result
        elif outputs:
            for slot, value in zip(outputs, result, strict=True):
                if slot is not None:
                    tensors[slot.number] = value
        for number in instruction.frees:
            tensors.pop(number, None)
        if self.trace is not None:
            self.trace(instruction)

    def _resolve(self, value: Any, tensors: dict[int, Any]) -> Any:
        if type(value) is Slot:
            return tensors[value.number]
        if type(value) is tuple:
            return [self._resolve(item, tensors) for item in value]
        return self.device if value is DEVICE else value
