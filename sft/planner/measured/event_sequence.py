"""Event sequences: allocations and frees of a step, in which equal parts are stored once.

A step of thousands of strips runs some dozen programs, and each run of a program without residuals allocates and frees the same bytes in
the same order. So a sequence consists of events and of shorter sequences, with numbers that count from the begin. For example, two runs of
a program that allocates 7 bytes, then 5, and frees the 7:

    run = ((1, 7), (2, 5), (1, 0))
    step = ((0, run), (2, run), (2, 0), (4, 0))    which is    (1, 7) (2, 5) (1, 0) (3, 7) (4, 5) (3, 0) (2, 0) (4, 0)
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AllocationTrace", "Event", "EventSequence", "LivePeak"]

#: ``(number, num_bytes)`` for an allocation, ``(number, 0)`` for its free, or a sequence with the number of the allocations before it.
Event = tuple[int, "int | EventSequence"]


@dataclass(frozen=True, slots=True)
class LivePeak:
    """Live bytes at the first moment at which they are largest.

    Attributes:
        num_bytes: the bytes.
        sizes: bytes of each live allocation.
    """

    num_bytes: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class EventSequence:
    """Allocations and frees in order. One that occurs in another sequence frees only what it allocates.

    Attributes:
        items: events and sequences.
        num_events: number of events, those of sequences included.
        num_allocations: number of allocations.
        live: bytes of the allocations that are live at the end, by number.
        live_bytes: their sum.
        peak: peak of the live bytes.
        sizes: the different sizes of allocations.
        digest: hash of all events.
    """

    items: tuple[Event, ...]
    num_events: int
    num_allocations: int
    live: dict[int, int]
    live_bytes: int
    peak: LivePeak
    sizes: frozenset[int]
    digest: bytes

    @classmethod
    def of(cls, items: Iterable[Event], ignored: Container[int] = ()) -> EventSequence:
        """The sequence of these items, without the allocations of some numbers and their frees."""
        chosen = tuple(item for item in items if item[0] not in ignored or isinstance(item[1], EventSequence)) if ignored else tuple(items)
        live: dict[int, int] = {}
        live_bytes = num_events = num_allocations = 0
        peak, peak_bytes = LivePeak(0, ()), 0
        sizes: set[int] = set()
        is_highest = False  # the live bytes have just grown to a new peak
        for number, value in chosen:
            if isinstance(value, EventSequence):
                num_events += value.num_events
                num_allocations += value.num_allocations
                sizes |= value.sizes
                if live_bytes + value.peak.num_bytes > peak_bytes:
                    peak_bytes, is_highest = live_bytes + value.peak.num_bytes, False
                    peak = LivePeak(peak_bytes, (*live.values(), *value.peak.sizes))
                live.update({number + inner: num_bytes for inner, num_bytes in value.live.items()})
                live_bytes += value.live_bytes
                continue
            num_events += 1
            if value:
                num_allocations += 1
                sizes.add(value)
                live[number] = value
                live_bytes += value
                if live_bytes > peak_bytes:
                    peak_bytes, is_highest = live_bytes, True
            else:
                if is_highest:
                    peak, is_highest = LivePeak(peak_bytes, tuple(live.values())), False
                live_bytes -= live.pop(number)
        if is_highest:
            peak = LivePeak(peak_bytes, tuple(live.values()))
        return cls(chosen, num_events, num_allocations, live, live_bytes, peak, frozenset(sizes), _digest(chosen))

    def events(self, first: int = 0) -> Iterator[tuple[int, int]]:
        """All events, with numbers that count from ``first``."""
        for number, value in self.items:
            if isinstance(value, EventSequence):
                yield from value.events(first + number)
            else:
                yield first + number, value


def _digest(items: Sequence[Event]) -> bytes:
    """Hash of items; sequences enter by their hash."""
    numbers, digests = array("q"), dict[bytes, int]()
    for number, value in items:
        numbers.append(number)
        numbers.append(-1 - digests.setdefault(value.digest, len(digests)) if isinstance(value, EventSequence) else value)
    return hashlib.blake2b(b"".join((numbers.tobytes(), *digests)), digest_size=32).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationTrace:
    """Allocations and frees of a step.

    Attributes:
        sequence: the events.
        caller_numbers: allocations of the code that calls the model: inputs, and gradients of outputs.
        replays: replays of the step, by settings of the allocator (:class:`sft.planner.measured.step_replay.StepReplay`).
    """

    sequence: EventSequence
    caller_numbers: frozenset[int] = frozenset()
    replays: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, events: Iterable[tuple[int, int]], caller_numbers: frozenset[int] = frozenset()) -> AllocationTrace:
        """The trace of events."""
        return cls(sequence=EventSequence.of(events), caller_numbers=caller_numbers)

    @property
    def events(self) -> tuple[tuple[int, int], ...]:
        """All events."""
        return tuple(self.sequence.events())

    @property
    def peak_bytes(self) -> int:
        """Peak of the live bytes, workspaces included."""
        return self.sequence.peak.num_bytes
