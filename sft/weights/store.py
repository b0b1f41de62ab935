"""Where the weights of many blocks are: in the host's memory, or in a file.

A store has *generations*. Everybody reads the current one, which nothing changes while it is current; so what has been copied to a device
can be forgotten there at any time. Updates write the next generation beside it, block by block, in any order, and :meth:`Store.commit`
makes it the current one at once. An update that fails half way is dropped with :meth:`Store.abort`, and nothing has happened. The price is
room for two generations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sft.common.errors import InputError
from sft.common.pinned_memory import lock_pages
from sft.weights.record import ALIGNMENT_BYTES, RecordLayout, RecordPart

__all__ = ["HostStore", "Store", "allocate_host_bytes", "record_offsets"]


class Store(Protocol):
    """Records of blocks, in generations."""

    #: the layout of each block's record; equal ones are one object
    layouts: tuple[RecordLayout, ...]
    #: how many generations were committed since this object was made
    generation: int
    #: text that is committed with the weights
    metadata: dict[str, str]

    @property
    def is_slow(self) -> bool:
        """Whether reading takes longer than a copy in memory."""
        ...

    def record(self, block: int) -> Tensor:
        """The bytes of a block in the current generation, on the host; not to be changed while others read."""
        ...

    def all_records(self) -> Tensor:
        """The bytes of all blocks in the current generation, one behind the other."""
        ...

    def begin(self) -> None:
        """Start the next generation."""
        ...

    def write(self, block: int, data: Tensor, part: RecordPart = "all") -> None:
        """Write a block, or half of it, of the next generation. A half that is not written stays as it is."""
        ...

    def commit(self, metadata: Mapping[str, str] | None = None) -> None:
        """Make the next generation the current one; blocks that were not written are taken over."""
        ...

    def abort(self) -> None:
        """Drop the next generation, if there is one."""
        ...

    def close(self) -> None:
        """Give everything back; the store cannot be used again."""
        ...


def record_offsets(layouts: Sequence[RecordLayout]) -> list[int]:
    """Where each record begins, and where the last one ends."""
    return [0, *accumulate(layout.record_bytes for layout in layouts)]


def allocate_host_bytes(num_bytes: int, *, pin: bool = False) -> Tensor:
    """Uninitialised memory of the host.

    It is NumPy's, so that :func:`sft.measure_peak` counts on a CPU only what stands for the device's.

    Args:
        num_bytes: how much.
        pin: lock the pages, where the system allows it, for copies to a CUDA device beside the computation.
    """
    data = np.empty(num_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
    if pin:
        lock_pages(data, "streamed weights", "Raise the limit of locked memory (ulimit -l), or stream fewer.")
    start = -data.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(data[start : start + num_bytes])


class HostStore:
    """Records in the host's memory, pinned where that helps.

    Args:
        layouts: of each block.
        pin: lock the pages, for copies to a CUDA device.

    Raises:
        InputError: there are no blocks.
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

    @property
    def is_slow(self) -> bool:
        """No."""
        return False

    @property
    def num_bytes(self) -> int:
        """Bytes of the host that the store holds: one generation, or two once there was an update."""
        return self._offsets[-1] * (1 if self._next is None else 2)

    def record(self, block: int) -> Tensor:
        """The bytes of a block in the current generation."""
        return self._current[self._offsets[block] : self._offsets[block + 1]]

    def all_records(self) -> Tensor:
        """The bytes of all blocks in the current generation."""
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
        """Write a block, or half of it, of the next generation.

        Raises:
            InputError: it was not started.
        """
        if self._written is None or self._next is None:
            raise InputError("weights are written to the next generation; begin it first")
        start, stop = self.layouts[block].span(part)
        self._next[self._offsets[block] + start : self._offsets[block] + stop].copy_(data[: stop - start])
        self._written.update((block, half) for half in ("weights", "state") if part in (half, "all"))

    def next_record(self, block: int) -> Tensor:
        """The bytes of a block in the next generation, to be written as a whole.

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
        for block, layout in enumerate(self.layouts):
            for half in ("weights", "state"):
                start, stop = layout.span("state" if half == "state" else "weights")
                if (block, half) not in self._written and start < stop:
                    at = self._offsets[block]
                    self._next[at + start : at + stop].copy_(self._current[at + start : at + stop])
        self._current, self._next = self._next, self._current
        self._written = None
        self.generation += 1
        self.metadata = dict(metadata or {})

    def abort(self) -> None:
        """Drop the next generation."""
        self._written = None

    def close(self) -> None:
        """Give the memory back."""
        self.abort()
        self._current = self._current[:0]
        self._next = None
