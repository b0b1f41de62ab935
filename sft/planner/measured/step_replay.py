"""Step replays: the bytes that a step reserves in the simulated allocator, pool by pool.

A search over segments replays one step many times. Four facts save most of that time:

- Without a limit the two pools of the allocator are independent, and reserved bytes only grow. So the pools are replayed one by one.
- Segments of a plan are in the large pool. So the bytes of the small pool are the same whatever the segments.
- A second step reserves nothing more in the small pool: a new segment there is the largest block that exists, so the allocator takes it
  only where no other block fits, as it took it in the first step when it was new.
- Strips ask for most blocks in sequences that repeat (:mod:`sft.planner.measured.pool_requests`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final, TypeVar

from sft.planner.measured.event_sequence import AllocationTrace, EventSequence
from sft.planner.measured.pool_requests import PoolRequests, RequestSequence, SequenceReplay
from sft.runtime.caching_allocator import MIN_SEGMENT_BYTES, SMALL_BYTES, AllocatorSettings, BlockPool

__all__ = ["NUM_STEPS", "RecordedTensors", "StepReplay"]

#: The second step starts with the segments of the first one, as all later steps do.
NUM_STEPS: Final = 2
#: Segment that no step fills.
_ENDLESS_BYTES: Final = 2**56
#: Results of the last steps, by digest and settings.
_RECENT: dict[Hashable, dict[Hashable, Any]] = {}
_MOST_RECENT: Final = 64

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTensors:
    """Bytes of copies of all that enters passes which are recorded as CUDA graphs and leaves them, outside of the memory pool.

    Attributes:
        inputs: bytes of the inputs, in descending order.
        others: bytes of seeds, outputs, their gradients, and gradients of inputs.
        copied: bytes of the gradients of parameters by group. One group after another is copied at the end of a step.
        input_segment_bytes: segment that is requested for the first input, with room for the copies of a group; 0 for none.
    """

    inputs: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    copied: tuple[tuple[int, ...], ...] = ()
    input_segment_bytes: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the tensors that exist at the end of a step: all but the copies, and those of the largest group."""
        return (*self.inputs, *self.others, *max(self.copied, key=sum, default=()))

    def variants(self) -> tuple[RecordedTensors, ...]:
        """Without and with a segment for the first input and the copies of a group.

        A copy of a few mebibytes that finds no free block takes a segment of 20 MiB. An input that has a segment of its own can leave room
        for the copies.
        """
        if not self.copied or not self.inputs or self.inputs[0] < MIN_SEGMENT_BYTES:
            return (self,)
        return self, replace(self, input_segment_bytes=self.inputs[0] + max(map(sum, self.copied)))


@dataclass(slots=True, kw_only=True)
class StepReplay:
    """Replays of a step, in a memory pool of its own with different segments, or in the default pool.

    Attributes:
        trace: the step.
        settings: the allocator's settings.
        results: bytes by segments, shared by equal steps.
    """

    trace: AllocationTrace
    settings: AllocatorSettings
    results: dict[Hashable, Any]
    _requests: dict[bool, PoolRequests] = field(default_factory=dict)
    _sequence: EventSequence | None = None

    @classmethod
    def of(cls, trace: AllocationTrace, settings: AllocatorSettings) -> StepReplay:
        """Replays of a trace; the same object for the same settings."""
        if settings not in trace.replays:
            results = _recent_results((trace.sequence.digest, trace.caller_numbers, settings))
            trace.replays[settings] = cls(trace=trace, settings=settings, results=results)
        replay: StepReplay = trace.replays[settings]
        return replay

    @property
    def sequence(self) -> EventSequence:
        """Allocations and frees in the pool of the step."""
        if self._sequence is None:
            whole, callers = self.trace.sequence, self.trace.caller_numbers
            self._sequence = EventSequence.of(whole.items, callers) if callers else whole
        return self._sequence

    @property
    def num_events(self) -> int:
        """Number of the allocations and frees in the pool of the step."""
        return self.trace.sequence.num_events - 2 * len(self.trace.caller_numbers)

    @property
    def small_bytes(self) -> int:
        """Bytes that the small pool reserves."""
        return self._memoized("small", lambda: self._replay_steps(self._pool_requests().small, self._empty_pool(small=True))[0])

    def outside_bytes(self, resident: Sequence[int], recorded: RecordedTensors | None = None) -> int:
        """Bytes that resident tensors and those of the caller reserve, outside of the pool.

        Args:
            resident: bytes of each tensor that exists before the step.
            recorded: tensors of recorded passes. Their copies of gradients are either added to resident ones, group by group, or replace
                these, which were freed before the step.
        """
        numbers = self.trace.caller_numbers
        callers = [item for item in self.trace.sequence.items if item[0] in numbers and isinstance(item[1], int)]
        variants = [(callers, resident)]
        if recorded is not None and recorded.copied:
            num_lasting = 1 + max((index for index, (_, value) in enumerate(callers) if value), default=-1)
            lasting, frees = callers[:num_lasting], callers[num_lasting:]
            groups = _numbered(recorded.copied, 1 + max(numbers, default=0))
            added = [event for group in groups for event in (*group, *_frees(group))]
            kept = [event for group in groups for event in group]
            variants = [
                ([*lasting, *added, *frees], resident),
                ([*lasting, *kept, *frees, *_frees(kept)], _without(resident, [num_bytes for _, num_bytes in kept])),
            ]
        sequences = ((EventSequence.of(events), sizes) for events, sizes in variants)
        return max(self._shared_bytes(PoolRequests.of(sequence, self.settings), sizes, None, recorded) for sequence, sizes in sequences)

    def bytes_without_pool(self, resident: Sequence[int], limit_bytes: int | None = None) -> int:
        """Bytes that resident tensors and the whole step reserve in the default pool; if above the limit, as many as at that moment."""
        key = ("default pool", tuple(resident))
        if key in self.results:
            known_bytes: int = self.results[key]
            return known_bytes
        reserved_bytes = self._shared_bytes(self._pool_requests(with_caller=True), resident, limit_bytes)
        if limit_bytes is None or reserved_bytes <= limit_bytes:
            self.results[key] = reserved_bytes
        return reserved_bytes

    def pool_bytes(self, segments: tuple[int, ...], limit_bytes: int | None = None) -> tuple[int, int]:
        """Bytes that the pool of the step reserves, or if they exceed the limit, as many as at that moment; number of events replayed."""
        whole: tuple[int, int] | None = self.results.get((segments, None))
        if whole is not None and (limit_bytes is None or whole[0] <= limit_bytes):
            return whole
        result = self._memoized((segments, limit_bytes), lambda: self._replayed_bytes(segments, limit_bytes))
        if limit_bytes is None or result[0] <= limit_bytes:
            self.results[segments, None] = result
        return result

    def own_segments(self) -> tuple[int, ...]:
        """Segments that the allocator makes if none is reserved, except those of small tensors."""

        def made() -> tuple[int, ...]:
            pool = self._empty_pool()
            SequenceReplay(pool).replay(self._pool_requests().large, {})
            return tuple(num_bytes for num_bytes in pool.free_segment_bytes() if num_bytes >= MIN_SEGMENT_BYTES)

        return self._memoized("own", made)

    def common_segment_bytes(self, separate: tuple[int, ...]) -> int:
        """Bytes of a segment for all large tensors that find no free block in the separate ones, if its end is used last."""

        def used() -> int:
            pool = self._reserved_pool((*separate, _ENDLESS_BYTES))
            base, num_segments, pool.peak_address = max(pool.segments), len(pool.segments), 0
            SequenceReplay(pool).replay(self._pool_requests().large, {})
            # Where the longest segment may not be split, tensors have new segments.
            return max(0, pool.peak_address - base) if len(pool.segments) == num_segments else 0

        return self._memoized(("common", separate), used)

    def _memoized(self, key: Hashable, make: Callable[[], _ResultT]) -> _ResultT:
        if key not in self.results:
            self.results[key] = make()
        result: _ResultT = self.results[key]
        return result

    def _pool_requests(self, *, with_caller: bool = False) -> PoolRequests:
        """Requests of the step, or of the step and its caller."""
        if with_caller not in self._requests:
            ignored = () if with_caller else self.trace.caller_numbers
            self._requests[with_caller] = PoolRequests.of(self.trace.sequence, self.settings, ignored)
        return self._requests[with_caller]

    def _replayed_bytes(self, segments: tuple[int, ...], limit_bytes: int | None) -> tuple[int, int]:
        small_bytes, pool = self.small_bytes, self._reserved_pool(segments)
        large_limit_bytes = None if limit_bytes is None else limit_bytes - small_bytes
        large_bytes, share = self._replay_steps(self._pool_requests().large, pool, large_limit_bytes)
        return small_bytes + large_bytes, int(share * self.num_events)

    def _shared_bytes(
        self, requests: PoolRequests, resident: Iterable[int], limit_bytes: int | None, recorded: RecordedTensors | None = None
    ) -> int:
        """Bytes that resident tensors, those of recorded passes and requests reserve in one pool."""
        small, large = self._empty_pool(small=True), self._empty_pool()

        def allocate(sizes: Iterable[int]) -> None:
            for size in (self.settings.block_bytes(num_bytes) for num_bytes in sizes if num_bytes > 0):
                (small if size <= SMALL_BYTES else large).allocate(size)

        allocate(resident)
        if recorded is not None:
            if recorded.input_segment_bytes:
                large.free(large.allocate(self.settings.block_bytes(recorded.input_segment_bytes)))
            allocate((*recorded.inputs, *recorded.others))
        large_bytes, _ = self._replay_steps(requests.large, large, limit_bytes)
        if limit_bytes is not None and large_bytes > limit_bytes:
            return large_bytes
        return large_bytes + self._replay_steps(requests.small, small)[0]

    def _replay_steps(self, requests: RequestSequence, pool: BlockPool, limit_bytes: int | None = None) -> tuple[int, float]:
        """Bytes that a pool reserves for the steps, and the number of steps until they exceed the limit, or cannot change any more."""
        num_steps, replay = 0.0, SequenceReplay(pool)
        for _ in range(NUM_STEPS):
            before_bytes, blocks = pool.reserved_bytes, dict[int, tuple[int, int]]()
            if limit_bytes is not None and before_bytes > limit_bytes:
                break
            exceeding = replay.replay(requests, blocks, limit_bytes)
            if exceeding is not None:
                num_steps += exceeding / requests.last_number
                break
            num_steps += 1
            if not blocks and (pool.repeats_steps or pool.reserved_bytes == before_bytes):
                break
        return pool.reserved_bytes, num_steps

    def _empty_pool(self, *, small: bool = False) -> BlockPool:
        return BlockPool(settings=self.settings, is_small=small)

    def _reserved_pool(self, segments: Iterable[int]) -> BlockPool:
        """Large pool with free segments."""
        pool = self._empty_pool()
        for block in [pool.allocate(self.settings.block_bytes(num_bytes)) for num_bytes in segments]:
            pool.free(block)
        return pool


def _numbered(groups: Iterable[Iterable[int]], first: int) -> list[list[tuple[int, int]]]:
    """Allocations of groups of tensors, with numbers that count from ``first``."""
    numbers = count(first)
    return [[(next(numbers), num_bytes) for num_bytes in group] for group in groups]


def _frees(allocations: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(number, 0) for number, _ in allocations]


def _without(sizes: Iterable[int], removed: Iterable[int]) -> list[int]:
    """Sizes without some of them, the last ones of each size."""
    left, kept = Counter(removed), list[int]()
    for num_bytes in reversed([*sizes]):
        if left[num_bytes]:
            left[num_bytes] -= 1
        else:
            kept.append(num_bytes)
    return kept[::-1]


def _recent_results(key: Hashable) -> dict[Hashable, Any]:
    """Results of an equal step, if it is among the last ones: a search sees most of its plans again with other resident tensors."""
    results = _RECENT.pop(key, {})
    _RECENT[key] = results
    while len(_RECENT) > _MOST_RECENT:
        _RECENT.pop(next(iter(_RECENT)), None)
    return results
