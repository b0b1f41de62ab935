"""Stores of the weights of many blocks, with transactional updates; here the one in host memory.

A store has *generations*. Readers see the current one, which is immutable while it is current, so a copy of it on a device can be discarded
at any time. Updates write the next generation block by block, in any order, and :meth:`Store.commit` makes it current at once. A failed
update is discarded with :meth:`Store.abort` and has no effect. The price is space for two generations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sft.common.errors import InputError
from sft.common.pinned_memory import begin_download, lock_pages
from sft.weights.record import ALIGNMENT_BYTES, RecordLayout, RecordPart

__all__ = ["HostStore", "Store", "allocate_host_bytes", "record_offsets"]


class Store(Protocol):
    """Records of blocks, in generations."""

    #: Layout of each block's record; equal layouts are one object.
    layouts: tuple[RecordLayout, ...]
    #: Number of generations committed since this object was made.
    generation: int
    #: Text that is committed with the weights.
    metadata: dict[str, str]

    @property
    def is_slow(self) -> bool:
        """True if reading is slower than a copy in memory."""
        ...

    def record(self, block: int) -> Tensor:
        """Bytes of a block in the current generation, on the host; read-only while other readers exist."""
        ...

    def all_records(self) -> Tensor:
        """Bytes of all blocks in the current generation, contiguous."""
        ...

    def begin(self) -> None:
        """Start the next generation."""
        ...

    def write(self, block: int, data: Tensor, part: RecordPart = "all") -> None:
        """Write a block, or one part of its record, of the next generation. A part that is not written keeps its content."""
        ...

    def commit(self, metadata: Mapping[str, str] | None = None) -> None:
        """Make the next generation the current one; blocks that were not written are copied from the current one."""
        ...

    def abort(self) -> None:
        """Discard the next generation, if any."""
        ...

    def close(self) -> None:
        """Release all memory; the store cannot be used again."""
        ...


def record_offsets(layouts: Sequence[RecordLayout]) -> list[int]:
    """Offset of each record, and the end of the last one."""
    return [0, *accumulate(layout.record_bytes for layout in layouts)]


def allocate_host_bytes(num_bytes: int, *, pin: bool = False) -> Tensor:
    """Allocate uninitialised host memory.

    The memory is NumPy's, so that :func:`sft.measure_peak` on a CPU counts only memory that represents the device's.

    Args:
        num_bytes: its size.
        pin: lock the pages, if the system allows it, so that copies to a CUDA device overlap with the computation.
    """
    data = np.empty(num_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
    if pin:
        lock_pages(data, "streamed weights", "Raise the limit of locked memory (ulimit -l), or stream fewer.")
    start = -data.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(data[start : start + num_bytes])


class HostStore:
    """Records in host memory, optionally pinned.

    Args:
        layouts: layout of each block.
        pin: lock the pages, for copies to a CUDA device.

    Raises:
        InputError: no blocks are given.
    """

    def __init__(self, layouts: Sequence[RecordLayout], *, pin: bool = False) -> None:
        if not layouts:
            raise InputError("a store needs at least one block")
        self.layouts = tuple(layouts)
        self.generation = 0
        self.metadata: dict[str, str] = {}
        self._pin = pin
        self._offsets = record_offsets(self.layouts)
        self._current = allocate_host_bytes(self._offsets[-1], pin=pin).zero_()
        self._next: Tensor | None = None
        self._written: set[tuple[int, str]] | None = None
        self._written_event: Any = None  # CUDA event after all copies into the next generation

    @property
    def is_slow(self) -> bool:
        """False: reading is a copy in memory."""
        return False

    @property
    def num_bytes(self) -> int:
        """Host bytes of the store: one generation, or two after the first update."""
        return self._offsets[-1] * (1 if self._next is None else 2)

    def record(self, block: int) -> Tensor:
        """Bytes of a block in the current generation."""
        return self._current[self._offsets[block] : self._offsets[block + 1]]

    def all_records(self) -> Tensor:
        """Bytes of all blocks in the current generation."""
        return self._current

    def begin(self) -> None:
        """Start the next generation.

        Raises:
            InputError: it was started before.
        """
        if self._written is not None:
            raise InputError("the next generation of weights was started before; commit it or abort it first")
        if self._next is None:
            self._next = allocate_host_bytes(self._offsets[-1], pin=self._pin)
        self._written = set()

    def write(self, block: int, data: Tensor, part: RecordPart = "all") -> None:
        """Write a block, or one part of its record, of the next generation.

        Raises:
            InputError: it was not started.
        """
        if self._written is None or self._next is None:
            raise InputError("weights are written to the next generation; begin it first")
        start, stop = self.layouts[block].span(part)
        target, source = self._next[self._offsets[block] + start : self._offsets[block] + stop], data[: stop - start]
        if source.device.type == "cuda" and self._pin:
            self._written_event = begin_download(target, source)  # on one stream, so the last event is of all copies
        else:
            target.copy_(source)
        self._written.update((block, half) for half in ("weights", "state") if part in (half, "all"))

    def next_record(self, block: int) -> Tensor:
        """Bytes of a block in the next generation, to be written completely.

        Raises:
            InputError: it was not started.
        """
        if self._written is None or self._next is None:
            raise InputError("weights are written to the next generation; begin it first")
        self._written.update({(block, "weights"), (block, "state")})
        return self._next[self._offsets[block] : self._offsets[block + 1]]

    def commit(self, metadata: Mapping[str, str] | None = None) -> None:
        """Make the next generation the current one.

        Raises:
            InputError: it was not started.
        """
        if self._written is None or self._next is None:
            raise InputError("there is no next generation to commit; begin it first")
        self._wait_writes()
        for block, layout in enumerate(self.layouts):
            for half in ("weights", "state"):
                start, stop = layout.span("state" if half == "state" else "weights")
                if (block, half) not in self._written and start < stop:
                    offset = self._offsets[block]
                    self._next[offset + start : offset + stop].copy_(self._current[offset + start : offset + stop])
        self._current, self._next = self._next, self._current
        self._written = None
        self.generation += 1
        self.metadata = dict(metadata or {})

    def abort(self) -> None:
        """Discard the next generation."""
        self._wait_writes()
        self._written = None

    def _wait_writes(self) -> None:
        """Wait for the copies into the next generation that are under way."""
        event, self._written_event = self._written_event, None
        if event is not None:
            event.synchronize()

    def close(self) -> None:
        """Release the memory."""
        self.abort()
        self._current = self._current[:0]
        self._next = None
