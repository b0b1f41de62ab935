"""Happens-before checker: vector clocks of streams and host threads, and the last accesses of every byte of memory.

A *timeline* is a CUDA stream or a host thread. Work on one timeline is ordered. Between timelines the order comes from launches, events
and synchronisation, each of which joins vector clocks (Mattern, 1988). Two accesses of one byte, at least one of them a write, without an
order between them are a race. Allocations and frees are writes: the caching allocator gives a freed block to the next allocation on its
stream at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Access", "Allocation", "ByteView", "RaceChecker", "Timeline", "library_line"]

Clock = dict[int, int]
_Ids = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Timeline:
    """Stream or host thread.

    Attributes:
        number: its number.
        name: its name in messages.
        clock: ticks of all timelines that its next work follows.
    """

    number: int
    name: str
    clock: Clock = field(default_factory=dict)

    def join(self, clock: Clock) -> None:
        """Order the next work after all work of a clock."""
        for number, tick in clock.items():
            if tick > self.clock.get(number, 0):
                self.clock[number] = tick

    def snapshot(self) -> Clock:
        """Clock of an event after all work so far."""
        return dict(self.clock)

    def advance(self) -> int:
        """Begin one piece of work; its tick."""
        tick = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = tick
        return tick


@dataclass(frozen=True, slots=True)
class Access:
    """Read or write of some bytes."""

    timeline: Timeline
    tick: int
    label: str
    writes: bool

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} on {self.timeline.name} ({self.label})"


@dataclass(frozen=True, slots=True)
class ByteView:
    """Strided view of an allocation, in bytes."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def flat(cls, offset: int, num_bytes: int) -> ByteView:
        """View of consecutive bytes."""
        return cls(offset, (num_bytes,), (1,), 1)

    def of(self, ids: _Ids) -> _Ids:
        """Elements of an array with one number for each byte."""
        strides = (*(4 * stride for stride in self.strides), 4)
        return np.lib.stride_tricks.as_strided(ids[self.offset :], (*self.shape, self.itemsize), strides)

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape


@dataclass(slots=True, eq=False)
class Allocation:
    """Memory with the last accesses of its bytes.

    Attributes:
        name: description in messages.
        num_bytes: its size.
        owner: timeline that it was allocated on, to which it returns.
    """

    name: str
    num_bytes: int
    owner: Timeline
    _writers: _Ids = field(init=False, repr=False)
    _readers: dict[int, _Ids] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._writers = np.zeros(self.num_bytes, np.int32)

    def writers(self, view: ByteView) -> _Ids:
        """Ids of the last writes."""
        return view.of(self._writers)

    def readers(self, view: ByteView) -> Iterator[_Ids]:
        """Ids of the last reads, by timeline."""
        for ids in self._readers.values():
            yield view.of(ids)

    def readers_of(self, timeline: Timeline, view: ByteView) -> _Ids:
        """Ids of a timeline's last reads."""
        if timeline.number not in self._readers:
            self._readers[timeline.number] = np.zeros(self.num_bytes, np.int32)
        return view.of(self._readers[timeline.number])


class RaceChecker:
    """Recorder of accesses; races are collected in ``races``, each with both accesses."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.timelines: list[Timeline] = []
        self._accesses: list[Access | None] = [None]

    def timeline(self, name: str) -> Timeline:
        """New timeline."""
        timeline = Timeline(len(self.timelines), name)
        self.timelines.append(timeline)
        return timeline

    def access(
        self, timeline: Timeline, label: str, reads: Sequence[tuple[Allocation, ByteView]], writes: Sequence[tuple[Allocation, ByteView]]
    ) -> None:
        """One piece of work on a timeline that reads and writes these bytes."""
        tick = timeline.advance()
        read_id, write_id = (self._new_id(Access(timeline, tick, label, is_write)) for is_write in (False, True))
        for allocation, view in reads:
            if not view.is_empty:
                self._check(allocation, allocation.writers(view), read_id)
        for allocation, view in writes:
            if not view.is_empty:
                self._check(allocation, allocation.writers(view), write_id)
                for ids in allocation.readers(view):
                    self._check(allocation, ids, write_id)
        for allocation, view in reads:
            if not view.is_empty:
                allocation.readers_of(timeline, view)[...] = read_id
        for allocation, view in writes:
            if not view.is_empty:
                allocation.writers(view)[...] = write_id

    def write_all(self, timeline: Timeline, label: str, allocation: Allocation) -> None:
        """Write of a complete allocation: its begin or its end."""
        self.access(timeline, label, (), [(allocation, ByteView.flat(0, allocation.num_bytes))])

    def _new_id(self, access: Access) -> int:
        self._accesses.append(access)
        return len(self._accesses) - 1

    def _check(self, allocation: Allocation, ids: _Ids, new_id: int) -> None:
        new = self._accesses[new_id]
        assert new is not None
        firsts = ids[..., 0]  # the bytes of an element are accessed together
        low, high = int(firsts.min()), int(firsts.max())
        for number in (low,) if low == high else np.unique(firsts).tolist():
            old = self._accesses[number]
            if old is not None and old.tick > new.timeline.clock.get(old.timeline.number, 0):
                self.races.append(f"{allocation.name}: {new} is not ordered after the {old}")


def library_line() -> str:
    """Line of the library that the calling thread is in."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/sft/" in name and "/tests/" not in name:
            return f" at {name[name.rindex('/sft/') + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
