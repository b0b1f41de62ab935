"""What a walk runs on.

A walk only moves *handles*: it asks a machine for buffers, for views of rows, and to run programs. The torch machine hands out
tensors. The phantom machine hands out byte counts: a :class:`Phantom` returns its bytes when its last reference is dropped, as a
tensor returns its storage. So the very code that executes a plan also projects its peak, and neither can drift from the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sft.analysis.interval import Interval
from sft.lower.program import Port, Program, Slot

__all__ = ["Handle", "Machine", "Meter", "Phantom", "PhantomMachine", "Saved"]

Handle = Any


@dataclass(slots=True)
class Saved:
    """What the first half of a whole segment leaves for the second: tensors by slot number, or a phantom."""

    values: Any


class Machine(Protocol):
    """Buffers, views and programs."""

    def allocate(self, shape: tuple[int, ...], dtype: Any, *, zero: bool, contiguous: bool = False) -> Handle:
        """A new buffer; four-dimensional ones are channels last unless ``contiguous``."""

    def zeros_like(self, handle: Handle, shape: tuple[int, ...], dtype: Any) -> Handle:
        """Zeros laid out like ``handle``, of an element type of their own."""

    def view(self, handle: Handle, batch: Interval | None, rows: Interval | None) -> Handle:
        """Batch elements and rows of a buffer."""

    def add(self, target: Handle, source: Handle) -> None:
        """Add in place."""

    def cast(self, handle: Handle, shape: tuple[int, ...], dtype: Any) -> Handle:
        """The buffer in another element type."""

    def run(self, program: Program, bindings: Mapping[Port, Handle], saved: Saved | None = None) -> tuple[dict[Port, Handle], Saved]:
        """Run a program; returns its results, and what it saved for its second half."""


class Meter:
    """Counts live bytes and their peak, and the FLOPs of what ran."""

    def __init__(self) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0
        self.flops = 0

    def spike(self, num_bytes: int) -> None:
        """Note a peak of ``num_bytes`` above what is live."""
        self.peak_bytes = max(self.peak_bytes, self.now_bytes + num_bytes)


class Phantom:
    """A buffer that is only its size."""

    __slots__ = ("_base", "_meter", "num_bytes")

    def __init__(self, meter: Meter, num_bytes: int, base: Phantom | None = None) -> None:
        self._meter, self.num_bytes, self._base = meter, num_bytes, base
        meter.now_bytes += num_bytes
        meter.spike(0)

    def view(self) -> Phantom:
        """A view: it keeps the buffer alive and has no bytes of its own."""
        return Phantom(self._meter, 0, self)

    def __del__(self) -> None:
        self._meter.now_bytes -= self.num_bytes


@dataclass(slots=True)
class PhantomMachine:
    """A machine of byte counts."""

    meter: Meter = field(default_factory=Meter)

    def allocate(self, shape: tuple[int, ...], dtype: Any, *, zero: bool, contiguous: bool = False) -> Phantom:
        return Phantom(self.meter, Slot(0, shape, dtype, 0).num_bytes)

    def zeros_like(self, handle: Handle, shape: tuple[int, ...], dtype: Any) -> Phantom:
        return self.allocate(shape, dtype, zero=True)

    def view(self, handle: Handle, batch: Interval | None, rows: Interval | None) -> Phantom:
        assert isinstance(handle, Phantom)
        return handle.view()

    def add(self, target: Handle, source: Handle) -> None:
        pass

    def cast(self, handle: Handle, shape: tuple[int, ...], dtype: Any) -> Phantom:
        return self.allocate(shape, dtype, zero=False)

    def run(self, program: Program, bindings: Mapping[Port, Handle], saved: Saved | None = None) -> tuple[dict[Port, Handle], Saved]:
        meter = self.meter
        meter.spike(program.peak_bytes)
        meter.flops += program.flops
        left = program.end_bytes - sum(program.result_bytes.values())
        if saved is not None:  # the second half frees what the first one saved
            left += saved.values.num_bytes
            saved.values = None
        results = {port: Phantom(meter, program.result_bytes[port]) for port in program.results}
        return results, Saved(Phantom(meter, left))
