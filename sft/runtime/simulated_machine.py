"""Machine of byte counts: projects the peak memory and the FLOPs of a step without allocating a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sft.analysis.ir.axes import Axes
from sft.common.interval import Interval
from sft.lower.program import Port, Program, Slot
from sft.runtime.machine import DEFAULT_AXES, Buffer, Residuals
from sft.runtime.offload import HostArena, OffloadedValue
from sft.runtime.streamed_inputs import returned_rows_bytes
from sft.runtime.weight_prefetch import GradientTransfer
from sft.sources.strip_reader import FULL_READ_BYTES, aligned_bytes, pixel_staging_bytes, read_chunks, reader_bytes, ring_bytes_of

__all__ = ["NUM_TRANSFERS", "MemoryCounter", "SimulatedBuffer", "SimulatedMachine"]


#: Page-locked buffers of copies to the host, and of gradients from it: two in each direction.
NUM_TRANSFERS = 4


class MemoryCounter:
    """Counter of live bytes, of their peak, and of FLOPs.

    Args:
        block: bytes that the allocator uses for a buffer of a given size. Default: `None` (the size itself)
    """

    def __init__(self, block: Callable[[int], int] | None = None) -> None:
        self.block = block
        self.live_bytes = 0
        self.peak_bytes = 0
        self.flops = 0

    def allocate(self, num_bytes: int) -> Any:
        """Count a buffer; the result identifies its memory, if the counter distinguishes addresses."""
        self.live_bytes += num_bytes if self.block is None else self.block(num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return None

    def free(self, num_bytes: int, address: Any) -> None:
        """Stop counting a buffer."""
        self.live_bytes -= num_bytes if self.block is None else self.block(num_bytes)

    def record_peak(self, num_bytes: int) -> None:
        """Raise the peak to ``num_bytes`` above the live bytes, for memory that is allocated and freed within one operation."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + num_bytes)


class SimulatedBuffer:
    """Buffer that has a size and no data; its bytes are live until its last reference is dropped.

    Attributes:
        num_bytes: its size.
        address: its memory, if the counter distinguishes addresses.
    """

    __slots__ = ("_base", "_memory", "address", "num_bytes")

    def __init__(self, memory: MemoryCounter, num_bytes: int, base: SimulatedBuffer | None = None) -> None:
        self._memory, self.num_bytes, self._base = memory, num_bytes, base
        self.address = memory.allocate(num_bytes)

    @classmethod
    def counted(cls, memory: MemoryCounter, num_bytes: int, address: Any) -> SimulatedBuffer:
        """Buffer of bytes that the counter has counted already."""
        buffer = cls(memory, 0)
        buffer.num_bytes, buffer.address = num_bytes, address
        return buffer

    def view(self) -> SimulatedBuffer:
        """View without bytes of its own that keeps this buffer alive."""
        return SimulatedBuffer(self._memory, 0, self)

    @property
    def root(self) -> SimulatedBuffer:
        """Owner of the memory: this buffer, or the one that it is a view of."""
        return self if self._base is None else self._base.root

    def resize(self, num_bytes: int) -> None:
        """Free the bytes (0), or allocate them again."""
        self._memory.free(self.num_bytes, self.address)
        self.num_bytes = num_bytes
        self.address = self._memory.allocate(num_bytes)

    def __del__(self) -> None:
        self._memory.free(self.num_bytes, self.address)


class _SlabCounter(MemoryCounter):
    """Counter of buffers in the slab of a step.

    Args:
        arena: layout of the slab.
    """

    def __init__(self, arena: HostArena) -> None:
        super().__init__()
        self._arena = arena

    def allocate(self, num_bytes: int) -> int:
        return self._arena.allocate(num_bytes)

    def free(self, num_bytes: int, address: Any) -> None:
        self._arena.free(address)


class _HostBuffer(SimulatedBuffer):
    """Cut on the host, or its gradient."""

    __slots__ = ()


class _DirectBuffer(_HostBuffer):
    """Direct cut on the host, or its gradient.

    Attributes:
        leaving: strip on the device that is being copied to it.
    """

    __slots__ = ("leaving",)
    leaving: SimulatedBuffer | None


@dataclass(slots=True)
class _SimulatedStripLoader:
    """Loader of simulated strips, which are views of its buffers.

    Attributes:
        buffers: its buffers on the device.
        pixels: memory for pixels of a single strip.
        staging: arena of its page-locked buffers on the host.
        start: their offset; ``None`` if the device's memory is the host's.
    """

    buffers: list[SimulatedBuffer]
    pixels: SimulatedBuffer | None
    staging: HostArena
    start: int | None

    def take(self, rows: Interval) -> SimulatedBuffer:
        if rows:
            self.pixels = None
        return self.buffers[0].view() if self.buffers else SimulatedBuffer(MemoryCounter(), 0)

    def close(self) -> None:
        self.buffers.clear()
        self.pixels = None
        if self.start is not None:
            self.staging.free(self.start)
            self.start = None


@dataclass(slots=True)
class SimulatedMachine:
    """Machine of byte counts.

    Attributes:
        memory: counter of the device's bytes.
        on_host: True if the device's memory is the host's, so that buffers for reading inputs count, too.
        host_arena: arena on the host for offloaded values and direct cuts.
        host_memory: counter of the other bytes on the host (cuts that are not direct).
        staging: arena of the page-locked buffers of readers.
        transfer_bytes: bytes of the largest page-locked buffer of another copy.
        num_known_rows: leading rows of outputs on the host that their consumer has already, as of an interrupted prediction.
    """

    has_data: ClassVar[bool] = False
    memory: MemoryCounter = field(default_factory=MemoryCounter)
    on_host: bool = True
    host_arena: HostArena = field(default_factory=HostArena)
    host_memory: MemoryCounter = field(default_factory=MemoryCounter)
    staging: HostArena = field(default_factory=HostArena)
    transfer_bytes: int = 0
    num_known_rows: int = 0

    def caller(self) -> AbstractContextManager[None]:
        """Context of allocations by the code that calls the model: inputs, and gradients of outputs."""
        return nullcontext()

    def _no_effect(self, *arguments: Any, **keywords: Any) -> None:
        """Operations that write data, and neither allocate nor free memory."""

    end = start_op = fill = add = copy = wait_weights = _no_effect
    scale_sums = count_strips = _no_effect

    # Buffers.

    def allocate(self, shape: tuple[int, ...], dtype: Any, *, zero: bool, contiguous: bool = False) -> SimulatedBuffer:
        return SimulatedBuffer(self.memory, Slot(0, shape, dtype, 0).num_bytes)

    def zeros_like(self, buffer: Buffer, shape: tuple[int, ...], dtype: Any) -> SimulatedBuffer:
        return self.allocate(shape, dtype, zero=True)

    def view(
        self, buffer: Buffer, batch: Interval | None, rows: Interval | None, columns: Interval | None = None, *, axes: Axes = DEFAULT_AXES
    ) -> SimulatedBuffer:
        assert isinstance(buffer, SimulatedBuffer)
        return buffer.view()

    def cast(self, buffer: Buffer, shape: tuple[int, ...], dtype: Any) -> SimulatedBuffer:
        return self.allocate(shape, dtype, zero=False)

    def to_channels_first(self, buffer: Buffer) -> SimulatedBuffer:
        return SimulatedBuffer(self.memory, buffer.num_bytes)

    # Programs.

    def run(
        self, program: Program, bindings: Mapping[Port, Buffer], saved: Residuals | None = None
    ) -> tuple[dict[Port, Buffer], Residuals]:
        memory = self.memory
        memory.record_peak(program.retained_peak_bytes() if saved is not None and saved.is_retained else program.peak_bytes)
        memory.flops += program.flops
        residual_bytes = program.end_bytes - sum(program.result_bytes.values())
        if saved is not None:  # the backward program frees what the forward program saved
            residual_bytes += saved.values.num_bytes
            saved.values = None
        results = {port: SimulatedBuffer(memory, program.result_bytes[port]) for port in program.results}
        return results, Residuals(SimulatedBuffer(memory, residual_bytes))

    def residual_buffers(self, saved: Residuals, slots: Sequence[int]) -> list[Buffer]:
        return [saved.values]

    # Host.

    def open_input(self, source: Buffer, batch: Interval, order: Sequence[Interval], row_bytes: int, dtype: Any) -> _SimulatedStripLoader:
        num_buffers, strip_bytes, carry_bytes = reader_bytes(order, row_bytes)
        sizes = [strip_bytes] * num_buffers + ([carry_bytes] if self.on_host else [])
        buffers = [SimulatedBuffer(self.memory, size) for size in sizes]
        has_pixels = not self.on_host and num_buffers == 1 and not isinstance(source, _HostBuffer)
        pixels = SimulatedBuffer(self.memory, pixel_staging_bytes(strip_bytes, row_bytes, dtype)) if has_pixels else None
        is_staged = not self.on_host and not isinstance(source, _DirectBuffer)
        start = self.staging.allocate(ring_bytes_of(order, row_bytes)) if is_staged else None
        return _SimulatedStripLoader(buffers, pixels, self.staging, start)

    def read_input(self, source: Buffer, shape: tuple[int, ...], dtype: Any) -> SimulatedBuffer:
        out = self.allocate(shape, dtype, zero=False)
        if not self.on_host:
            row_bytes = Slot(0, (*shape[:2], 1, *shape[3:]), dtype, 0).num_bytes
            self.staging.free(self.staging.allocate(ring_bytes_of(read_chunks(shape[2], row_bytes), row_bytes)))
            if not isinstance(source, _HostBuffer):
                self.memory.record_peak(pixel_staging_bytes(row_bytes * shape[2], row_bytes, dtype))
        return out

    def note_transfer(self, num_bytes: int, host: Buffer = None) -> None:
        """Count the page-locked buffer of a strip that is copied to ``host``, or from a gradient there."""
        if not self.on_host and not isinstance(host, _DirectBuffer):
            self.transfer_bytes = max(self.transfer_bytes, num_bytes)

    def add_to_sink(self, sink: Buffer, batch: Interval, rows: Interval, gradient: Buffer) -> None:
        self.note_transfer(gradient.num_bytes, sink)
        if isinstance(sink, _DirectBuffer):
            self.memory.record_peak(returned_rows_bytes(gradient.num_bytes // len(batch), len(rows)))
            sink.leaving = gradient

    def write_output(
        self, host: Buffer, source: Buffer, batch: Interval | None = None, rows: Interval | None = None, *_: Any, **__: Any
    ) -> None:
        self.note_transfer(source.num_bytes if rows is not None else min(source.num_bytes, FULL_READ_BYTES), host)
        if isinstance(host, _DirectBuffer):
            host.leaving = source

    def finish_strips(self, host: Buffer) -> None:
        assert isinstance(host, _DirectBuffer)
        host.leaving = None

    def known_rows(self, host: Buffer) -> int:
        return self.num_known_rows

    def read_output_grad(
        self, host: Buffer, target: Buffer, batch: Interval | None = None, rows: Interval | None = None, *_: Any, **__: Any
    ) -> None:
        self.note_transfer(target.num_bytes if rows is not None else min(target.num_bytes, FULL_READ_BYTES))

    @property
    def staging_bytes(self) -> int:
        """Page-locked bytes: buffers of readers, and two buffers in each direction of other copies."""
        return self.staging.num_bytes + NUM_TRANSFERS * aligned_bytes(self.transfer_bytes)

    def allocate_host_cut(self, shape: tuple[int, ...], dtype: Any, *, direct: bool) -> SimulatedBuffer:
        num_bytes = Slot(0, shape, dtype, 0).num_bytes
        return _DirectBuffer(_SlabCounter(self.host_arena), num_bytes) if direct else _HostBuffer(self.host_memory, num_bytes)

    def allocate_host_grad(self, shape: tuple[int, ...], dtype: Any, *, direct: bool) -> SimulatedBuffer:
        return self.allocate_host_cut(shape, dtype, direct=direct)

    def offload(self, target: str, buffers: Sequence[Buffer]) -> OffloadedValue:
        roots = list({id(buffer.root): buffer.root for buffer in buffers}.values())
        sizes = tuple(root.num_bytes for root in roots)
        return OffloadedValue(target, roots, sizes, self.host_arena.allocate(sum(sizes)))

    def release(self, copy: OffloadedValue) -> None:
        for buffer in copy.buffers:
            buffer.resize(0)
        copy.is_away, copy.is_arriving = True, False

    def prefetch(self, copy: OffloadedValue) -> None:
        for buffer, size in zip(copy.buffers, copy.sizes, strict=True):
            buffer.resize(size)
        copy.is_away, copy.is_arriving = False, True

    def wait_prefetch(self, copy: OffloadedValue) -> None:
        copy.is_arriving = False

    def free_offload(self, copy: OffloadedValue) -> None:
        copy.buffers.clear()
        self.host_arena.free(copy.start)

    # Weights.

    def load_weight(
        self, name: str, num_bytes: int, shape: tuple[int, ...], dtype: Any, buffer: SimulatedBuffer | None, *, ahead: bool
    ) -> SimulatedBuffer:
        if buffer is None:
            return SimulatedBuffer(self.memory, num_bytes)
        buffer.resize(num_bytes)
        return buffer

    def free_weight(self, name: str, buffer: SimulatedBuffer) -> None:
        buffer.resize(0)

    def send_weight_grad(self, name: str, gradient: Buffer, weight: Buffer, transfer: GradientTransfer) -> None:
        self.memory.record_peak(transfer.scratch_bytes)

    # Strip policies: no row is known to equal another, so every strip runs.

    @property
    def strip_ops(self) -> SimulatedMachine:
        return self

    def equal_rows(self, image: Buffer, batch: Interval, columns: Interval, *, axes: Axes) -> None:
        return None

    def reserve(self, num_bytes: int) -> SimulatedBuffer:
        return SimulatedBuffer(self.memory, num_bytes)
