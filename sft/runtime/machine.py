"""What a walk runs on.

A walk only moves *handles*: it asks a machine for buffers, for views of rows, and to run programs. The torch machine hands out
tensors. The phantom machine hands out byte counts: a :class:`SimulatedBuffer` returns its bytes when its last reference is dropped, as a
tensor returns its storage. So the very code that executes a plan also projects its peak, and neither can drift from the other.

What segments run on and leave behind: whole tensors by value name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from sft.analysis.ir.axes import Axes
from sft.analysis.tiling.constant_strips import BoolArray
from sft.common.interval import Interval
from sft.lower.program import Port, Program, Slot
from sft.lower.rules.base import AdditivePart
from sft.runtime.moves import ScheduleOp
from sft.runtime.offload import HostArena, OffloadedValue
from sft.runtime.weight_prefetch import GradientTransfer
from sft.sources.strip_reader import reader_bytes

__all__ = [
    "Buffer",
    "Gradients",
    "Machine",
    "MemoryCounter",
    "OpaqueTensors",
    "Residuals",
    "SimulatedBuffer",
    "SimulatedMachine",
    "StripLoader",
    "ValueBindings",
]

Buffer = Any
_AXES = Axes()


@dataclass(slots=True)
class Residuals:
    """What the first half of a whole segment leaves for the second: tensors by slot number, or a phantom.

    ``loaded`` are images read for the first half that some of these tensors are views of; ``handed`` values that were handed on, and are
    among these tensors or the owners of their memory. Those that ``last`` are still there when the second half is through.
    """

    values: Any
    loaded: dict[str, Buffer] = field(default_factory=dict)
    handed: list[Buffer] = field(default_factory=list)
    last: bool = False

    def fork(self) -> Residuals:
        """The same values for a second half that is not the last to read them."""
        if not isinstance(self.values, dict):
            return Residuals(self.values, last=True)
        return Residuals(
            {slot: value.fork() if isinstance(value, OpaqueTensors) else value for slot, value in self.values.items()}, last=True
        )


@runtime_checkable
class OpaqueTensors(Protocol):
    """Many tensors in one slot, which whoever reads them takes apart."""

    @property
    def buffers(self) -> Sequence[Buffer]:
        """One tensor for each storage that is there for their sake."""

    def fork(self) -> Any:
        """The same tensors, to be taken apart in the place of this."""


class StripLoader(Protocol):
    """Strips of an input that is read while a walk runs."""

    def take(self, rows: Interval) -> Buffer:
        """The next strip; its buffer goes back to the reader when the last handle on it is gone."""

    def close(self) -> None:
        """End the reading and free its buffers, whether all strips were taken or not."""


class Machine(Protocol):
    """Buffers, views and programs."""

    def begin(self, move: ScheduleOp) -> None:
        """Hear that a move of the order begins; the one before it is through."""

    def allocate(self, shape: tuple[int, ...], dtype: Any, *, zero: bool, contiguous: bool = False) -> Buffer:
        """A new buffer; images are channels last unless ``contiguous``."""

    def fill(self, handle: Buffer, value: float) -> None:
        """Set every element."""

    def zeros_like(self, handle: Buffer, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """Zeros laid out like ``handle``, of an element type of their own."""

    def view(
        self, handle: Buffer, batch: Interval | None, rows: Interval | None, columns: Interval | None = None, *, axes: Axes = _AXES
    ) -> Buffer:
        """Batch elements, and rows and columns of an image of these axes; ``None`` stands for all."""

    def add(self, target: Buffer, source: Buffer) -> None:
        """Add in place."""

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy in place."""

    def weigh(self, handle: Buffer, additive: AdditivePart, count: int, *, down: bool) -> None:
        """Divide what is a sum of a running value by a number (``down``), or multiply it."""

    def repeated_rows(self, handle: Buffer, batch: Interval, columns: Interval, *, axes: Axes) -> BoolArray | None:
        """For each row whether it equals the row above it, bit for bit, in these batch elements and columns; ``None`` if nobody knows."""

    def reserve(self, num_bytes: int) -> Buffer:
        """Room that a pass takes only if its data says so, for as long as the handle is held: all that a machine of byte counts knows."""

    def note_strips(self, program: Program, *, num_run: int, num_skipped: int) -> None:
        """Hear that so many strips of a program ran, and that others were left out as they would have made the same."""

    def read(self, source: Buffer, batch: Interval, order: Sequence[Interval], row_bytes: int) -> StripLoader:
        """Begin to read rows of an input's source, in this order; ``row_bytes`` of each row of these batch elements."""

    def load(self, source: Buffer, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """An input's source as a whole, channels last."""

    def give(self, sink: Buffer, batch: Interval, rows: Interval, gradient: Buffer) -> None:
        """Add the gradient of an input's rows to its sink."""

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
        """Copy a buffer into an output on the host: all of it, or what :meth:`view` would show of it."""

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
        """Fill a buffer with the gradient of an output on the host: all of it, or what :meth:`view` would show of it."""

    def host_cut(self, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """Room on the host for a cut, for :meth:`put` and to be read like an input's source."""

    def host_gradient(self, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """Zeros on the host for the gradient of such a cut, for :meth:`give` and :meth:`fetch`."""

    def cast(self, handle: Buffer, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """The buffer in another element type."""

    def channels_first(self, handle: Buffer) -> Buffer:
        """The buffer with its channels first: a copy where it lies otherwise."""

    def run(
        self, program: Program, bindings: Mapping[Port, Buffer], saved: Residuals | None = None
    ) -> tuple[dict[Port, Buffer], Residuals]:
        """Run a program; returns its results, and what it saved for its second half."""

    def buffers_of(self, saved: Residuals, slots: Sequence[int]) -> Sequence[Buffer]:
        """The buffers behind slots that a program saved, which are all of those that it made for its second half alone."""

    def offload(self, target: str, handles: Sequence[Buffer]) -> OffloadedValue:
        """Begin to copy the buffers behind these handles to the host, each once."""

    def release(self, copy: OffloadedValue) -> None:
        """Wait for that, and give the device's bytes back; handles stay, and are good for nothing."""

    def prefetch(self, copy: OffloadedValue) -> None:
        """Take bytes on the device for all these handles again, and begin to copy back."""

    def settle(self, copy: OffloadedValue) -> None:
        """Wait for that: what runs next may read."""

    def forget(self, copy: OffloadedValue) -> None:
        """End the use of a copy, whatever it is doing."""

    def load_weight(self, name: str, num_bytes: int, shape: tuple[int, ...], dtype: Any, handle: Buffer | None, *, ahead: bool) -> Buffer:
        """Begin to bring a streamed weight, which takes so many bytes: under an earlier handle on it that was released, if there is one.

        ``ahead`` says that it is not needed before something else has run.
        """

    def settle_weights(self, names: Sequence[str]) -> None:
        """Wait for those of these that are on their way: what runs next may read them."""

    def release_weight(self, name: str, handle: Buffer) -> None:
        """Give a weight's bytes back; the handle stays, and is good for nothing."""

    def take_gradient(self, name: str, gradient: Buffer, weight: Buffer, taking: GradientTransfer) -> None:
        """Take the whole gradient of a streamed weight that is there; both may be changed in place."""


class MemoryCounter:
    """Counts live bytes and their peak, and the FLOPs of what ran.

    Args:
        block: what a buffer of so many bytes counts for. Default: `None` (its bytes)
    """

    def __init__(self, block: Callable[[int], int] | None = None) -> None:
        self.block = block
        self.now_bytes = 0
        self.peak_bytes = 0
        self.flops = 0

    def spike(self, num_bytes: int) -> None:
        """Note a peak of ``num_bytes`` above what is live."""
        self.peak_bytes = max(self.peak_bytes, self.now_bytes + num_bytes)


class SimulatedBuffer:
    """A buffer that is only its size."""

    __slots__ = ("_base", "_meter", "num_bytes")

    def __init__(self, meter: MemoryCounter, num_bytes: int, base: SimulatedBuffer | None = None) -> None:
        self._meter, self.num_bytes, self._base = meter, num_bytes, base
        meter.now_bytes += num_bytes if meter.block is None else meter.block(num_bytes)
        meter.spike(0)

    def view(self) -> SimulatedBuffer:
        """A view: it keeps the buffer alive and has no bytes of its own."""
        return SimulatedBuffer(self._meter, 0, self)

    @property
    def root(self) -> SimulatedBuffer:
        """The buffer that this is a view of, or is."""
        return self if self._base is None else self._base.root

    def resize(self, num_bytes: int) -> None:
        """Give the bytes back, or take them again."""
        meter = self._meter
        before, now = (self.num_bytes, num_bytes) if meter.block is None else (meter.block(self.num_bytes), meter.block(num_bytes))
        meter.now_bytes += now - before
        self.num_bytes = num_bytes
        meter.spike(0)

    def __del__(self) -> None:
        meter = self._meter
        meter.now_bytes -= self.num_bytes if meter.block is None else meter.block(self.num_bytes)


@dataclass(slots=True)
class _SimulatedStripLoader:
    """Strips of byte counts: the reader's buffers on the host, a copy of the strip on a device."""

    meter: MemoryCounter
    row_bytes: int
    buffers: SimulatedBuffer | None

    def take(self, rows: Interval) -> SimulatedBuffer:
        return SimulatedBuffer(self.meter, len(rows) * self.row_bytes if self.buffers is None else 0)

    def close(self) -> None:
        self.buffers = None


@dataclass(slots=True)
class SimulatedMachine:
    """A machine of byte counts.

    Attributes:
        meter: counts them.
        on_host: whether the device's memory is the host's, so that buffers for reading are in it.
        space: what a slab on the host has to hold.
        host: counts what is on the host besides.
    """

    meter: MemoryCounter = field(default_factory=MemoryCounter)
    on_host: bool = True
    space: HostArena = field(default_factory=HostArena)
    host: MemoryCounter = field(default_factory=MemoryCounter)

    def begin(self, move: ScheduleOp) -> None:
        pass

    def end(self) -> None:
        """Hear that the step is through."""

    def allocate(self, shape: tuple[int, ...], dtype: Any, *, zero: bool, contiguous: bool = False) -> SimulatedBuffer:
        return SimulatedBuffer(self.meter, Slot(0, shape, dtype, 0).num_bytes)

    def fill(self, handle: Buffer, value: float) -> None:
        pass

    def zeros_like(self, handle: Buffer, shape: tuple[int, ...], dtype: Any) -> SimulatedBuffer:
        return self.allocate(shape, dtype, zero=True)

    def view(
        self, handle: Buffer, batch: Interval | None, rows: Interval | None, columns: Interval | None = None, *, axes: Axes = _AXES
    ) -> SimulatedBuffer:
        assert isinstance(handle, SimulatedBuffer)
        return handle.view()

    def add(self, target: Buffer, source: Buffer) -> None:
        pass

    def copy(self, target: Buffer, source: Buffer) -> None:
        pass

    def weigh(self, handle: Buffer, additive: AdditivePart, count: int, *, down: bool) -> None:
        pass

    def repeated_rows(self, handle: Buffer, batch: Interval, columns: Interval, *, axes: Axes) -> BoolArray | None:
        return None

    def reserve(self, num_bytes: int) -> SimulatedBuffer:
        return SimulatedBuffer(self.meter, num_bytes)

    def note_strips(self, program: Program, *, num_run: int, num_skipped: int) -> None:
        pass

    def read(self, source: Buffer, batch: Interval, order: Sequence[Interval], row_bytes: int) -> _SimulatedStripLoader:
        count, strip_bytes, carry_bytes = reader_bytes(order, row_bytes)
        buffers = SimulatedBuffer(self.meter, count * strip_bytes + carry_bytes) if self.on_host else None
        return _SimulatedStripLoader(self.meter, row_bytes, buffers)

    def load(self, source: Buffer, shape: tuple[int, ...], dtype: Any) -> SimulatedBuffer:
        return self.allocate(shape, dtype, zero=False)

    def give(self, sink: Buffer, batch: Interval, rows: Interval, gradient: Buffer) -> None:
        pass

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
        pass

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
        pass

    def host_cut(self, shape: tuple[int, ...], dtype: Any) -> SimulatedBuffer:
        return SimulatedBuffer(self.host, Slot(0, shape, dtype, 0).num_bytes)

    def host_gradient(self, shape: tuple[int, ...], dtype: Any) -> SimulatedBuffer:
        return self.host_cut(shape, dtype)

    def cast(self, handle: Buffer, shape: tuple[int, ...], dtype: Any) -> SimulatedBuffer:
        return self.allocate(shape, dtype, zero=False)

    def channels_first(self, handle: Buffer) -> SimulatedBuffer:
        return SimulatedBuffer(self.meter, handle.num_bytes)

    def run(
        self, program: Program, bindings: Mapping[Port, Buffer], saved: Residuals | None = None
    ) -> tuple[dict[Port, Buffer], Residuals]:
        meter = self.meter
        meter.spike(program.lasting_peak_bytes() if saved is not None and saved.last else program.peak_bytes)
        meter.flops += program.flops
        left = program.end_bytes - sum(program.result_bytes.values())
        if saved is not None:  # the second half frees what the first one saved
            left += saved.values.num_bytes
            saved.values = None
        results = {port: SimulatedBuffer(meter, program.result_bytes[port]) for port in program.results}
        return results, Residuals(SimulatedBuffer(meter, left))

    def buffers_of(self, saved: Residuals, slots: Sequence[int]) -> list[Buffer]:
        return [saved.values]

    def offload(self, target: str, handles: Sequence[Buffer]) -> OffloadedValue:
        buffers = list({id(handle.root): handle.root for handle in handles}.values())
        sizes = tuple(buffer.num_bytes for buffer in buffers)
        return OffloadedValue(target, buffers, sizes, self.space.take(sum(sizes)))

    def release(self, copy: OffloadedValue) -> None:
        for buffer in copy.buffers:
            buffer.resize(0)
        copy.is_away, copy.is_arriving = True, False

    def prefetch(self, copy: OffloadedValue) -> None:
        for buffer, size in zip(copy.buffers, copy.sizes, strict=True):
            buffer.resize(size)
        copy.is_away, copy.is_arriving = False, True

    def settle(self, copy: OffloadedValue) -> None:
        copy.is_arriving = False

    def forget(self, copy: OffloadedValue) -> None:
        copy.buffers.clear()
        self.space.give_back(copy.start)

    def load_weight(
        self, name: str, num_bytes: int, shape: tuple[int, ...], dtype: Any, handle: SimulatedBuffer | None, *, ahead: bool
    ) -> SimulatedBuffer:
        if handle is None:
            return SimulatedBuffer(self.meter, num_bytes)
        handle.resize(num_bytes)
        return handle

    def settle_weights(self, names: Sequence[str]) -> None:
        pass

    def release_weight(self, name: str, handle: SimulatedBuffer) -> None:
        handle.resize(0)

    def take_gradient(self, name: str, gradient: Buffer, weight: Buffer, taking: GradientTransfer) -> None:
        self.meter.spike(taking.scratch_bytes)


@dataclass(slots=True)
class ValueBindings:
    """Whole tensors by value name: cuts, parameters, buffers, global values; of inputs that are not resident, the sources; of outputs
    that leave strip by strip, what takes them on the host.

    ``readers`` are those of the running walk, by input; ``reads_skipped`` says whether they read strips that are left out, too.
    """

    by_name: dict[str, Buffer] = field(default_factory=dict)
    readers: dict[str, StripLoader] = field(default_factory=dict)
    reads_skipped: bool = False


@dataclass(slots=True)
class Gradients:
    """Gradients of whole tensors by value name, on the host for outputs that leave strip by strip.

    ``sinks`` take those of inputs that are not resident.
    """

    by_name: dict[str, Buffer] = field(default_factory=dict)
    sinks: dict[str, Buffer] = field(default_factory=dict)
