"""Pool requests: allocations and frees of a step in one pool of the simulated allocator, and their replay.

A step asks for most of its blocks in sequences that occur many times (:mod:`sft.planner.measured.event_sequence`). The result of a sequence
depends on the free blocks at its begin alone, as long as the pool has room. So results are stored by sequence and free blocks, and looked
up where both occur again: in strips in the middle of a sweep, and in sweeps of equal panels. This is the memoization of Schnarr and Larus,
"Fast out-of-order processor simulation using memoization" (ASPLOS 1998).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Final

from sft.planner.measured.event_sequence import EventSequence
from sft.runtime.caching_allocator import SMALL_BYTES, AllocatorSettings, BlockPool

__all__ = ["PoolRequests", "Request", "RequestSequence", "SequenceReplay"]

#: ``(number, block_bytes)`` for an allocation, ``(number, 0)`` for its free.
Request = tuple[int, int]
#: Start and end of a block.
_Block = tuple[int, int]

#: Requests of a sequence from which on its results are stored; fewer are replayed as fast as they are looked up, and stand for themselves.
_LEAST_REQUESTS: Final = 12
#: Most results that are stored.
_MOST_RESULTS: Final = 2**15


@dataclass(frozen=True, slots=True, eq=False)
class RequestSequence:
    """Requests in order. Numbers count from its begin.

    Attributes:
        parts: sequences, each with the number of allocations before it, and lists of requests between them, with 0.
        num_requests: number of requests.
        last_number: number of the last allocation.
    """

    parts: tuple[tuple[int, RequestSequence | list[Request]], ...]
    num_requests: int
    last_number: int

    @classmethod
    def of(cls, items: Iterable[tuple[int, int | RequestSequence]]) -> RequestSequence:
        """The sequence of requests and sequences."""
        parts: list[tuple[int, RequestSequence | list[Request]]] = []
        requests: list[Request] = []
        num_requests = last_number = 0
        for number, value in items:
            if isinstance(value, RequestSequence):
                last_number = number + value.last_number if value.last_number else last_number
                if requests:
                    parts.append((0, requests))
                    requests = []
                parts.append((number, value))
                num_requests += value.num_requests
            else:
                requests.append((number, value))
                num_requests += 1
                last_number = number if value else last_number
        return cls((*parts, (0, requests)) if requests else tuple(parts), num_requests, last_number)

    def requests(self, first: int) -> Iterator[Request]:
        """All requests, with numbers that count from ``first``."""
        for number, part in self.parts:
            if isinstance(part, RequestSequence):
                yield from part.requests(first + number)
            else:
                yield from [(first + each, size) for each, size in part]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolRequests:
    """Requests of an event sequence by pool.

    Attributes:
        small: requests in the small pool.
        large: requests in the large pool.
    """

    small: RequestSequence
    large: RequestSequence

    @classmethod
    def of(cls, sequence: EventSequence, settings: AllocatorSettings, ignored: Container[int] = ()) -> PoolRequests:
        """Requests of a sequence, without those of the allocations of some numbers."""
        return _split(sequence, settings, ignored, {}, {})


def _split(
    sequence: EventSequence,
    settings: AllocatorSettings,
    ignored: Container[int],
    blocks: dict[int, int],
    known: dict[EventSequence, PoolRequests],
) -> PoolRequests:
    """Requests of a sequence.

    Args:
        sequence: the sequence.
        settings: the allocator's settings.
        ignored: allocations that are left out.
        blocks: block sizes by bytes, so far.
        known: requests of other sequences, so far.
    """
    small: list[tuple[int, int | RequestSequence]] = []
    large: list[tuple[int, int | RequestSequence]] = []
    is_small: dict[int, bool] = {}
    for number, value in sequence.items:
        if isinstance(value, EventSequence):
            inner = known.get(value)
            if inner is None:
                inner = known[value] = _split(value, settings, (), blocks, known)
            for items, requests in ((small, inner.small), (large, inner.large)):
                if requests.num_requests >= _LEAST_REQUESTS:
                    items.append((number, requests))
                elif requests.num_requests:
                    items.extend(requests.requests(number))
            for each, num_bytes in value.live.items():
                is_small[number + each] = blocks[num_bytes] <= SMALL_BYTES
        elif number in ignored:
            continue
        elif value:
            size = blocks.get(value)
            if size is None:
                size = blocks[value] = settings.block_bytes(value)
            is_small[number] = size <= SMALL_BYTES
            (small if size <= SMALL_BYTES else large).append((number, size))
        else:
            (small if is_small.pop(number) else large).append((number, 0))
    return PoolRequests(small=RequestSequence.of(small), large=RequestSequence.of(large))


@dataclass(slots=True)
class SequenceReplay:
    """Replay of sequences in a pool.

    Attributes:
        pool: the pool.
    """

    pool: BlockPool
    _results: dict[tuple[RequestSequence, tuple[int, ...]], tuple[tuple[int, ...], tuple[tuple[int, _Block], ...]]] = field(
        default_factory=dict
    )
    _reserved_bytes: int = 0  # of the pool for which results are stored

    def replay(self, sequence: RequestSequence, blocks: MutableMapping[int, _Block], limit_bytes: int | None = None) -> int | None:
        """Allocate and free blocks in order.

        Args:
            sequence: the requests.
            blocks: start and end of the live blocks by number.
            limit_bytes: reserved bytes above which the replay ends.

        Returns:
            The number of the request that exceeded the limit; ``None`` if all requests were replayed.
        """
        for number, part in sequence.parts:
            if isinstance(part, RequestSequence):
                exceeding = self._replay_inner(number, part, blocks, limit_bytes)
            else:
                exceeding = self.pool.replay(part, blocks, limit_bytes)
            if exceeding is not None:
                return exceeding
        return None

    def _replay_inner(
        self, first: int, sequence: RequestSequence, blocks: MutableMapping[int, _Block], limit_bytes: int | None
    ) -> int | None:
        """Replay a sequence that frees only what it allocates, or look up its result; its live blocks are numbered from ``first`` on."""
        pool = self.pool
        if pool.reserved_bytes != self._reserved_bytes or len(self._results) >= _MOST_RESULTS:
            self._results.clear()
            self._reserved_bytes = pool.reserved_bytes
        key = (sequence, pool.free_blocks)
        result = self._results.get(key)
        if result is None:
            made: dict[int, _Block] = {}
            exceeding = self.replay(sequence, made, limit_bytes)
            if exceeding is not None:
                return first + exceeding
            result = pool.free_blocks, tuple(made.items())
            if pool.reserved_bytes == self._reserved_bytes:
                self._results[key] = result
        else:
            pool.free_blocks = result[0]
        for number, block in result[1]:
            blocks[first + number] = block
        return None
