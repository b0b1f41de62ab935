"""Weight streaming without a window: each record has a buffer of its exact size while it is used, and no prefetching.

If the records of a store differ much in size, as those of a model's parameters do, a window of equal slots
(:class:`~sft.weights.WeightStream`) would take a multiple of the largest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sft.weights.record import RecordPart
from sft.weights.store import Store
from sft.weights.stream import StreamCounters

__all__ = ["UnbufferedPass", "UnbufferedStream"]


class UnbufferedStream:
    """Reader of a store, one record at a time.

    Args:
        store: the records.
        device: device of the buffers.
        part: part of the records that is read.
    """

    def __init__(self, store: Store, device: torch.device, *, part: RecordPart = "weights") -> None:
        self.store, self.device, self.part = store, device, part
        self.counters = StreamCounters()

    @property
    def window_bytes(self) -> int:
        """Bytes of the largest record on the device while it is used."""
        return max(layout.part_bytes(self.part) for layout in self.store.layouts)

    @contextmanager
    def open_pass(self, plan: Sequence[int] = ()) -> Iterator[UnbufferedPass]:
        """Open a pass over records, in any order."""
        stream_pass = UnbufferedPass(self)
        try:
            yield stream_pass
        finally:
            stream_pass.close()


class UnbufferedPass:
    """One pass over records. Made by :meth:`UnbufferedStream.open_pass`."""

    def __init__(self, stream: UnbufferedStream) -> None:
        self.stream = stream
        self._buffers: dict[int, Tensor] = {}
        self._read_event: Any = None  # CUDA event after the last copy from the store

    def close(self) -> None:
        """Wait for the copies from the store, which may be overwritten after the pass."""
        event, self._read_event = self._read_event, None
        if event is not None:
            event.synchronize()

    def acquire(self, block: int) -> dict[str, Tensor]:
        """The tensors of a record on the device, until :meth:`release`."""
        stream = self.stream
        start, stop = stream.store.layouts[block].span(stream.part)
        data = torch.empty(stop - start, dtype=torch.uint8, device=stream.device)
        data.copy_(stream.store.record(block)[start:stop], non_blocking=True)
        if data.device.type == "cuda":
            self._read_event = torch.cuda.current_stream(data.device).record_event()
        self._buffers[block] = data
        stream.counters.reads += 1
        stream.counters.misses += 1
        stream.counters.num_copies += 1
        stream.counters.copied_bytes += stop - start
        return self.views(block)

    def release(self, block: int, *, forget: bool = False) -> None:
        """Free the record's buffer; ``forget`` has no effect, as no record is cached."""
        del self._buffers[block]

    def views(self, block: int) -> dict[str, Tensor]:
        """The tensors of an acquired record."""
        return self.stream.store.layouts[block].views(self._buffers[block], self.stream.part)

    def write(self, block: int) -> None:
        """Write the record in its buffer to the store's next generation."""
        data = self._buffers[block]
        self.stream.store.write(block, data, self.stream.part)
        self.stream.counters.written_bytes += data.numel()
