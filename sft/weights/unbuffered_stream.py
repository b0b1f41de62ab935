"""Records on the device one at a time: as long as one is used it has a buffer of its very size, and nothing is read ahead.

Where the records of a store differ much in size, as those of a model's parameters do, a window of equal slots
(:class:`~sft.weights.WeightStream`) would be as large as so many times the largest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sft.weights.record import RecordPart
from sft.weights.store import Store
from sft.weights.stream import StreamCounters

__all__ = ["UnbufferedPass", "UnbufferedStream"]


class UnbufferedStream:
    """A store, seen a record at a time.

    Args:
        store: has the records.
        device: where they are used.
        part: which half of them is.
    """

    def __init__(self, store: Store, device: torch.device, *, part: RecordPart = "weights") -> None:
        self.store, self.device, self.part = store, device, part
        self.counters = StreamCounters()

    @property
    def window_bytes(self) -> int:
        """What the largest record takes on the device while it is used."""
        return max(layout.part_bytes(self.part) for layout in self.store.layouts)

    @contextmanager
    def reading(self, plan: Sequence[int] = ()) -> Iterator[UnbufferedPass]:
        """A pass over records, in any order."""
        yield UnbufferedPass(self)


class UnbufferedPass:
    """One pass. Made by :meth:`UnbufferedStream.reading`."""

    def __init__(self, stream: UnbufferedStream) -> None:
        self.stream = stream
        self._taken: dict[int, Tensor] = {}

    def take(self, block: int) -> dict[str, Tensor]:
        """The tensors of a record, on the device, until :meth:`give`."""
        stream = self.stream
        start, stop = stream.store.layouts[block].span(stream.part)
        data = torch.empty(stop - start, dtype=torch.uint8, device=stream.device)
        data.copy_(stream.store.record(block)[start:stop])
        self._taken[block] = data
        stream.counters.reads += 1
        stream.counters.misses += 1
        stream.counters.num_copies += 1
        stream.counters.copied_bytes += stop - start
        return self.views(block)

    def give(self, block: int, *, forget: bool = False) -> None:
        """The record is not used any more; none is remembered, so nothing is to be forgotten."""
        del self._taken[block]

    def views(self, block: int) -> dict[str, Tensor]:
        """The tensors of a record that was taken."""
        return self.stream.store.layouts[block].views(self._taken[block], self.stream.part)

    def write(self, block: int) -> None:
        """Write a record as it is here to the store's next generation."""
        data = self._taken[block]
        self.stream.store.write(block, data, self.stream.part)
        self.stream.counters.written_bytes += data.numel()
