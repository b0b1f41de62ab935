"""Pool requests: allocations and frees of a step in one pool of the simulated allocator, and their replay.

A step asks for most of its blocks in sequences that occur many times (:mod:`sft.planner.measured.event_sequence`). The result of a sequence
depends on the free blocks at its begin alone, as long as the pool has room. So results are stored by sequence and free blocks, and looked
up where both occur again: in strips in the middle of a sweep, and in sweeps of equal panels. This is the memoization of Schnarr and Larus,
"Fast out-of-order processor simulation using memoization" (ASPLOS 1998).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Final

from sft.planner.measured.event_sequence import EventSequence
from sft.runtime.caching_allocator import SMALL_BYTES, AllocatorSettings, BlockPool

__all__ = ["PoolRequests", "Request", "RequestSequence", "SequenceReplay"]

#: ``(number, block_bytes)`` for an allocation, ``(number, 0)`` for its free.
Request = tuple[int, int]
#: Start and end of a block.
_Block = tuple[int, int]

#: Requests of a sequence from which on its results are stored: fewer are replayed as fast as they are looked up.
_LEAST_REQUESTS: Final = 12
#: Most results that are stored.
_MOST_RESULTS: Final = 2**15


@dataclass(frozen=True, slots=True, eq=False)
class RequestSequence:
    """Requests in order. Numbers count from its begin.

    Attributes:
        parts: sequences, each with the number of allocations before it, and lists of requests between them, with 0.
        num_requests: number of requests.
    """

    parts: tuple[tuple[int, RequestSequence | list[Request]], ...]
    num_requests: int

    @classmethod
    def of(cls, items: Iterable[tuple[int, int | RequestSequence]]) -> RequestSequence:
        """The sequence of requests and sequences."""
        parts: list[tuple[int, RequestSequence | list[Request]]] = []
        requests: list[Request] = []
        num_requests = 0
        for number, value in items:
            if isinstance(value, RequestSequence):
                if requests:
                    parts.append((0, requests))
                    requests = []
                parts.append((number, value))
                num_requests += value.num_requests
            else:
                requests.append((number, value))
                num_requests += 1
        return cls((*parts, (0, requests)) if requests else tuple(parts), num_requests)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolRequests:
    """Requests of an event sequence by pool.

    Attributes:
        small: requests in the small pool.
        large: requests in the large pool.
    """

    small: RequestSequence
    large: list[Request]

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
    large: list[Request] = []
    is_small: dict[int, bool] = {}
    for number, value in sequence.items:
        if isinstance(value, EventSequence):
            inner = known.get(value)
            if inner is None:
                inner = known[value] = _split(value, settings, (), blocks, known)
            if inner.small.num_requests:
                small.append((number, inner.small))
            if inner.large:
                large.extend([(number + each, size) for each, size in inner.large])
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
    return PoolRequests(small=RequestSequence.of(small), large=large)


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

    def replay(self, sequence: RequestSequence, blocks: MutableMapping[int, _Block]) -> None:
        """Allocate and free blocks in order.

        Args:
            sequence: the requests.
            blocks: start and end of the live blocks by number.
        """
        for number, part in sequence.parts:
            if isinstance(part, RequestSequence):
                for each, block in self._blocks_of(part):
                    blocks[number + each] = block
            else:
                self.pool.replay(part, blocks)

    def _blocks_of(self, sequence: RequestSequence) -> Iterable[tuple[int, _Block]]:
        """Replay a sequence that frees only what it allocates; its live blocks by number."""
        pool = self.pool
        made: dict[int, _Block] = {}
        if sequence.num_requests < _LEAST_REQUESTS:
            self.replay(sequence, made)
            return made.items()
        if pool.reserved_bytes != self._reserved_bytes or len(self._results) >= _MOST_RESULTS:
            self._results.clear()
            self._reserved_bytes = pool.reserved_bytes
        key = (sequence, pool.free_blocks)
        result = self._results.get(key)
        if result is not None:
            pool.free_blocks = result[0]
            return result[1]
        reserved_bytes = pool.reserved_bytes
        self.replay(sequence, made)
        if pool.reserved_bytes == reserved_bytes:
            self._results[key] = pool.free_blocks, tuple(made.items())
        return made.items()
