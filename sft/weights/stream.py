"""Weight streaming: blocks pass through a window on the device, prefetched before their use.

The order in which a network reads its blocks is known in advance; that list is the *plan* (a pass without one records it). A thread follows
the plan and copies blocks into the window's slots while earlier ones are in use. Among the free slots it evicts the one with the latest
next read (Belady, 1966: the fewest copies, and possible since the plan is known). A block in a slot is a copy of the store's, so eviction
costs no write. Blocks that the plan will read are *claimed*: their slots are not evicted before use. A read that is not the plan's next one
gives up all claims and fetches its block itself; the thread resumes at the point where the plan matches again. Source: the Scorch thesis,
section 3.2 (streaming plan, streaming budget, demand fetch); the eviction rule is ours.

The window is one buffer, allocated by the computing thread. On CUDA copies run on a separate stream, with events in both directions: the
computation waits for the copy of the block that it reads, a copy waits for the computation that last read the slot. No device-wide wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError, InputError, SourceError
from sft.common.legacy_names import renamed
from sft.weights.record import RecordPart
from sft.weights.store import Store

__all__ = ["StreamCounters", "StreamPass", "WeightStream"]

_NEVER = 2**62
#: Number of the plan's next reads that are searched for an unplanned read.
_RESYNC_READS = 64


@dataclass(slots=True)
class StreamCounters:
    """Counters summed over all passes.

    Attributes:
        reads: reads of a block.
        hits: reads of a block that was in the window.
        waits: reads that waited for a running copy.
        misses: reads that fetched their block themselves.
        num_copies: copies into the window.
        copied_bytes: bytes of these copies.
        written_bytes: bytes of updated blocks.
        wait_seconds: time that reads waited or copied.
    """

    reads: int = 0
    hits: int = 0
    waits: int = 0
    misses: int = 0
    num_copies: int = 0
    copied_bytes: int = 0
    written_bytes: int = 0
    wait_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _WindowSlot:
    """A slot of the window: its bytes, its block, and the pending reads of it."""

    data: Tensor
    views: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by id of the layout
    block: int = -1
    is_loading: bool = False
    pins: int = 0
    claims: int = 0
    next_read: int = _NEVER
    last_read: int = 0
    loaded: Any = None  # CUDA event of the copy into the slot
    used: Any = None  # CUDA event of the last computation that read it

    @property
    def is_free(self) -> bool:
        return not (self.is_loading or self.pins or self.claims)


class WeightStream:
    """A window on the device over the records of a store.

    Args:
        store: the records.
        device: device of the window.
        window_bytes: its size; at least one block.
        part: part of the records that passes through it.
        prefetch: whether a thread reads ahead. Default: if reading or copying is slow (a file, a CUDA device).

    Raises:
        BudgetError: the window is smaller than a block.
    """

    def __init__(
        self,
        store: Store,
        device: torch.device | str,
        *,
        window_bytes: int,
        part: RecordPart = "weights",
        prefetch: bool | None = None,
    ) -> None:
        self.store, self.device, self.part = store, torch.device(device), part
        self.slot_bytes = max(layout.part_bytes(part) for layout in store.layouts)
        if window_bytes < self.slot_bytes:
            raise BudgetError(
                f"a window of {format_bytes(window_bytes)} for weights, and the largest block has {format_bytes(self.slot_bytes)}; "
                f"give it {self.slot_bytes} bytes, or {2 * self.slot_bytes} to read ahead",
                needed_bytes=self.slot_bytes,
            )
        self.num_slots = min(window_bytes // self.slot_bytes if self.slot_bytes else 1, len(store.layouts))
        self.prefetch = (store.is_slow or self.device.type == "cuda") if prefetch is None else prefetch
        self.counters = StreamCounters()

    @property
    def window_bytes(self) -> int:
        """Bytes of the window on the device during a pass."""
        return self.num_slots * self.slot_bytes

    @contextmanager
    def open_pass(self, plan: Sequence[int] = ()) -> Iterator[StreamPass]:
        """Open a pass over the blocks, with prefetching in the order of ``plan``."""
        stream_pass = StreamPass(self, plan)
        try:
            stream_pass.start()
            yield stream_pass
        finally:
            stream_pass.close()


class StreamPass:
    """One pass over the blocks, used by one thread. Made by :meth:`WeightStream.open_pass`."""

    def __init__(self, stream: WeightStream, plan: Sequence[int]) -> None:
        self.stream = stream
        self.read_order: list[int] = []
        self._plan = list(plan)
        self._next_read = _next_reads(self._plan)
        self._window = torch.empty(stream.window_bytes, dtype=torch.uint8, device=stream.device)
        size = stream.slot_bytes
        self._slots = [_WindowSlot(self._window[at * size : (at + 1) * size]) for at in range(stream.num_slots)]
        self._slot_of: dict[int, _WindowSlot] = {}
        self._position = 0  # of the plan's next read
        self._ahead = 0  # of the next read to claim
        self._changed = threading.Condition()
        self._stopped = False
        self._is_lost = False  # an unplanned read is about to fetch its block
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._copies = torch.cuda.Stream(stream.device) if stream.device.type == "cuda" else None

    def start(self) -> None:
        """Start the prefetching thread."""
        if self._copies is not None:  # earlier computations may still read the window's memory
            self._copies.wait_stream(torch.cuda.current_stream(self.stream.device))
        if self.stream.prefetch and self._plan:
            self._thread = threading.Thread(target=self._read_ahead, name="sft-weights", daemon=True)
            self._thread.start()

    def acquire(self, block: int) -> dict[str, Tensor]:
        """The tensors of a block on the device, pinned until :meth:`release`.

        Raises:
            InputError: all slots are pinned.
            SourceError: the store cannot be read.
        """
        counters = self.stream.counters
        self.read_order.append(block)
        counters.reads += 1
        with self._changed:
            is_next = self._position < len(self._plan) and self._plan[self._position] == block
            if is_next:
                self._position += 1
                slot = self._planned(block) if self._thread is not None else None
                if slot is not None:
                    slot.claims -= 1
            else:
                self._abandon_read_plan(block)
                slot = None
            if slot is None:
                slot = self._slot_of.get(block)
                if slot is not None and not slot.is_loading:
                    counters.hits += 1
            if slot is not None and slot.is_loading:
                counters.waits += 1
                self._wait_while_loading([slot])
            if slot is None:
                slot = self._fetch(block, self._position - 1 if is_next else len(self._plan))
            slot.pins += 1
            self._is_lost = False
            if is_next:
                slot.next_read = self._next_read[self._position - 1]
            slot.last_read = counters.reads
            self._changed.notify_all()
        if slot.loaded is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(slot.loaded)
        return self.views(block)

    def release(self, block: int, *, forget: bool = False) -> None:
        """Unpin a block; with ``forget`` its slot holds no valid copy of the store's block any more."""
        with self._changed:
            slot = self._slot_of[block]
            slot.pins -= 1
            if self._copies is not None:
                slot.used = torch.cuda.current_stream(self.stream.device).record_event()
            if forget and not slot.pins and not slot.claims:
                del self._slot_of[block]
                slot.block, slot.next_read = -1, _NEVER
            self._changed.notify_all()

    def views(self, block: int) -> dict[str, Tensor]:
        """The tensors of an acquired block, in its slot."""
        slot, layout = self._slot_of[block], self.stream.store.layouts[block]
        views = slot.views.get(id(layout))
        if views is None:
            views = slot.views[id(layout)] = layout.views(slot.data, self.stream.part)
        return views

    def write(self, block: int) -> None:
        """Write the block in its slot to the store's next generation."""
        layout = self.stream.store.layouts[block]
        self.stream.store.write(block, self._slot_of[block].data, self.stream.part)
        self.stream.counters.written_bytes += layout.part_bytes(self.stream.part)

    def close(self) -> None:
        """Stop the thread and release the window."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._copies is not None:
            self._copies.synchronize()  # its copies read pages of the store
        self._slots.clear()
        self._slot_of.clear()
        del self._window

    def _planned(self, block: int) -> _WindowSlot:
        """The slot of the plan's next read, which the thread claims; waits until it is loaded."""
        counters = self.stream.counters
        waited = False
        started = time.perf_counter()
        while self._failure is None:
            slot = self._slot_of.get(block)
            if self._ahead >= self._position and slot is not None and not slot.is_loading:
                break
            if self._ahead < self._position and all(slot.pins for slot in self._slots):
                raise self._too_small()
            waited = True
            self._changed.wait()
        else:
            self._fail()
        if waited:
            counters.waits += 1
            counters.wait_seconds += time.perf_counter() - started
        else:
            counters.hits += 1
        return self._slot_of[block]

    def _fetch(self, block: int, position: int) -> _WindowSlot:
        """Load a block in the calling thread."""
        started = time.perf_counter()
        slot = self._reserve(block, position)
        while slot is None and any(other.is_loading for other in self._slots):
            self._wait_while_loading([other for other in self._slots if other.is_loading])
            slot = self._reserve(block, position)
        if slot is None:
            raise self._too_small()
        try:
            self._load(slot, block)
        except BaseException:
            del self._slot_of[block]
            slot.block, slot.next_read = -1, _NEVER
            raise
        self.stream.counters.misses += 1
        self.stream.counters.wait_seconds += time.perf_counter() - started
        return slot

    def _wait_while_loading(self, slots: list[_WindowSlot]) -> None:
        started = time.perf_counter()
        while all(slot.is_loading for slot in slots):
            if self._failure is not None:
                self._fail()
            self._changed.wait()
        self.stream.counters.wait_seconds += time.perf_counter() - started

    def _too_small(self) -> InputError:
        return InputError(f"all {len(self._slots)} slots of the window are in use; give blocks back, or make the window larger")

    def _fail(self) -> None:
        assert self._failure is not None
        if isinstance(self._failure, OSError) and not isinstance(self._failure, SourceError):
            raise SourceError(f"cannot read weights ahead: {self._failure}. The store must stay as it is during a pass.") from self._failure
        raise self._failure

    def _abandon_read_plan(self, block: int) -> None:
        """Give up all claims; resume after the next read of this block in the plan, if it is near."""
        self._is_lost = True  # until the block is loaded, the thread claims no slots
        for slot in self._slots:
            slot.claims = 0
        next_reads = self._plan[self._position : self._position + _RESYNC_READS]
        if block in next_reads:
            self._position += next_reads.index(block) + 1
        self._ahead = self._position

    def _reserve(self, block: int, position: int) -> _WindowSlot | None:
        """Assign a slot to the read at a position of the plan: an empty slot, or the free one with the latest next read.

        Returns ``None`` if no slot is free.
        """
        free = [slot for slot in self._slots if slot.is_free]
        if not free:
            return None
        slot = max(free, key=lambda slot: (slot.block < 0, slot.next_read, -slot.last_read))
        if slot.block >= 0:
            del self._slot_of[slot.block]
        slot.block, self._slot_of[block] = block, slot
        slot.next_read = self._next_read[position] if position < len(self._plan) else _NEVER
        return slot

    def _load(self, slot: _WindowSlot, block: int) -> None:
        """Copy a block into its slot."""
        store, part = self.stream.store, self.stream.part
        start, stop = store.layouts[block].span(part)
        source = store.record(block)[start:stop]
        target = slot.data[: stop - start]
        if self._copies is None:
            np.copyto(target.numpy(), source.numpy())  # not torch, which would start a team of threads in this one
        else:
            with torch.cuda.stream(self._copies):
                if slot.used is not None:
                    self._copies.wait_event(slot.used)
                target.copy_(source, non_blocking=True)
                slot.loaded = self._copies.record_event()
        self.stream.counters.num_copies += 1
        self.stream.counters.copied_bytes += stop - start

    def _read_ahead(self) -> None:
        """Main loop of the prefetching thread."""
        slot: _WindowSlot | None = None
        try:
            while True:
                with self._changed:
                    if slot is not None:
                        slot.is_loading = False
                        self._changed.notify_all()
                        slot = None
                    claimed = self._claim()
                    while claimed is None and not self._stopped:
                        self._changed.wait()
                        claimed = self._claim()
                    if self._stopped or claimed is None:
                        return
                    slot = claimed
                self._load(slot, slot.block)
        except BaseException as error:  # the reader must never wait forever
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _claim(self) -> _WindowSlot | None:
        """Claim planned reads of loaded blocks, up to the first that is not loaded; returns its slot, if one is free."""
        has_advanced = False
        empty_slot = None
        while not (self._stopped or self._is_lost) and self._ahead < len(self._plan):
            block = self._plan[self._ahead]
            slot = self._slot_of.get(block)
            if slot is None:
                slot = empty_slot = self._reserve(block, self._ahead)
                if slot is None:
                    break
                slot.is_loading = True
            slot.claims += 1
            slot.next_read = self._next_read[self._ahead]
            self._ahead += 1
            has_advanced = True
            if empty_slot is not None:
                break
        if has_advanced:
            self._changed.notify_all()
        return empty_slot


def _next_reads(plan: Sequence[int]) -> list[int]:
    """Position of the next read of the same block, for each read of a plan.

    >>> _next_reads([3, 5, 3]) == [2, _NEVER, _NEVER]
    True
    """
    following, latest = [_NEVER] * len(plan), dict[int, int]()
    for position in range(len(plan) - 1, -1, -1):
        following[position] = latest.get(plan[position], _NEVER)
        latest[plan[position]] = position
    return following


def __getattr__(name: str) -> Any:
    """Old names of classes in pickles."""
    return renamed(__name__, name)
