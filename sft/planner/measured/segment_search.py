"""Segment search: bytes of the segments that a step's memory pool on a GPU reserves before the first step.

Left alone, the allocator makes a segment for each tensor that finds no free block: strips of slightly different heights then leave segments
that no later tensor fits. In one large segment, neighbouring free blocks merge. Some plans fit even better with separate segments for their
largest tensors, or with the allocator's own. So several divisions are simulated, and a local search changes the best of them: it splits
segments, merges them, and makes them smaller. ``benchmarks/gpu_plans.py`` compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from sft.planner.measured.allocation_trace import AllocationTrace
from sft.planner.measured.reserved_memory import NUM_STEPS, simulate_reserved_memory
from sft.runtime.caching_allocator import MIN_SEGMENT_BYTES, AllocatorSettings, Block, CachingAllocator, segment_bytes

__all__ = ["choose_segments"]

#: Segment that no step fills.
_ENDLESS_BYTES: Final = 2**56
#: Divisions that are tried, in order: number of the largest tensors with segments of their own, and size of the common segment relative to
#: the bytes that it needs while its end is free.
_DIVISIONS: Final = ((0, 1.0), (1, 1.0), (0, 1.02), (16, 1.0), (2, 1.0), (0, 1.05), (8, 1.0), (4, 1.0))
#: Events that may be replayed to find a division; further divisions are not tried.
_MAX_REPLAYED_EVENTS: Final = 150_000
#: Replays of the local search, at most, and the events that they may replay.
_MAX_CHANGES: Final = 500
_MAX_CHANGED_EVENTS: Final = 600_000
#: The local search ends if a step reserves at most this multiple of its bytes, or a rounded segment more.
_NEAR_OPTIMAL: Final = 1.005
_NEAR_OPTIMAL_BYTES: Final = 2 * 2**20
#: Sizes of tensors for which the local search splits segments off: the largest ones of a step.
_NUM_SPLIT_SIZES: Final = 12
#: Shares by which the local search makes segments smaller.
_SHRUNK_SHARES: Final = (0.002, 0.005, 0.01, 0.02, 0.04)


def choose_segments(trace: AllocationTrace, settings: AllocatorSettings, resident: Sequence[int] = ()) -> tuple[int, ...] | None:
    """Bytes of the segments in which a step reserves least memory; ``None`` if that is without a pool.

    Empty if the step allocates no block of more than a mebibyte.

    Args:
        trace: allocations of a step.
        settings: the allocator's settings.
        resident: bytes of each tensor that exists before the step.
    """
    replay = _PoolReplay.of(trace, settings, resident)
    least_bytes = simulate_reserved_memory(trace, settings, resident=resident).reserved_bytes - replay.outside_bytes
    best: tuple[int, ...] | None = None
    for segments in _divisions(trace, settings, replay):
        reserved_bytes = replay.reserved_bytes(segments, least_bytes)
        if reserved_bytes < least_bytes or (reserved_bytes == least_bytes and best is None):
            least_bytes, best = reserved_bytes, segments
    start = replay.own_segments() if best is None else best
    changed, changed_bytes = _improve(start, replay)
    return changed if changed_bytes < least_bytes else best


@dataclass(slots=True, kw_only=True)
class _PoolReplay:
    """Replays of a step in pools with different segments.

    Attributes:
        events: allocations and frees in the pool.
        settings: the allocator's settings.
        outside_bytes: bytes that resident tensors and those of the caller reserve, outside of the pool.
        peak_bytes: peak of the blocks in the pool.
        num_replayed: events replayed so far.
    """

    events: tuple[tuple[int, int], ...]
    settings: AllocatorSettings
    outside_bytes: int
    peak_bytes: int
    num_replayed: int = 0
    _known: dict[tuple[int, ...], int] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: AllocationTrace, settings: AllocatorSettings, resident: Sequence[int]) -> _PoolReplay:
        """Replays of a trace; arguments as of :func:`choose_segments`."""
        outside = CachingAllocator(settings=settings)
        for num_bytes in resident:
            outside.allocate(num_bytes)
        _replay_events([event for event in trace.events if event[0] in trace.caller_numbers], outside)
        inside = tuple(event for event in trace.events if event[0] not in trace.caller_numbers)
        pool = CachingAllocator(settings=settings)
        _replay_events(inside, pool)
        return cls(events=inside, settings=settings, outside_bytes=outside.peak_reserved_bytes, peak_bytes=pool.peak_requested_bytes)

    def reserved_bytes(self, segments: tuple[int, ...], limit_bytes: int) -> int:
        """Bytes that the pool reserves; if they exceed the limit, only as many as it has reserved at that moment."""
        if segments in self._known:
            return self._known[segments]
        pool = CachingAllocator(settings=self.settings)
        pool.reserve(segments)
        for _ in range(NUM_STEPS):
            before_bytes = pool.reserved_bytes
            num_replayed, is_empty = _replay_events(self.events, pool, limit_bytes)
            self.num_replayed += num_replayed
            if pool.reserved_bytes > limit_bytes:
                return pool.reserved_bytes
            if is_empty and pool.reserved_bytes == before_bytes:
                break  # a further step would be the same
        self._known[segments] = pool.peak_reserved_bytes
        return pool.peak_reserved_bytes

    def own_segments(self) -> tuple[int, ...]:
        """Segments that the allocator makes if none is reserved, except those of small tensors."""
        pool = CachingAllocator(settings=self.settings)
        _replay_events(self.events, pool)
        sizes: dict[int, int] = {}
        for block in pool.free_blocks:
            sizes[block.segment] = sizes.get(block.segment, 0) + block.num_bytes
        return tuple(num_bytes for num_bytes in sizes.values() if num_bytes >= MIN_SEGMENT_BYTES)


def _replay_events(events: Sequence[tuple[int, int]], pool: CachingAllocator, limit_bytes: int | None = None) -> tuple[int, bool]:
    """Replay events until the pool exceeds a limit; returns their number, and true if no block is left."""
    blocks: dict[int, Block | None] = {}
    for count, (number, num_bytes) in enumerate(events, 1):
        if not num_bytes:
            pool.free(blocks.pop(number))
            continue
        blocks[number] = pool.allocate(num_bytes)
        if limit_bytes is not None and pool.reserved_bytes > limit_bytes:
            return count, False
    return len(events), not blocks


def _divisions(trace: AllocationTrace, settings: AllocatorSettings, replay: _PoolReplay) -> Iterator[tuple[int, ...]]:
    """Divisions into segments of the largest tensors and a common one."""
    largest = _largest_at_peak(trace)
    common_bytes: dict[tuple[int, ...], int] = {}
    for count, spare in _DIVISIONS:
        if replay.num_replayed > _MAX_REPLAYED_EVENTS:
            return
        separate = tuple(segment_bytes(num_bytes) for num_bytes in largest[:count])
        if separate not in common_bytes:
            common_bytes[separate] = _common_segment_bytes(trace, settings, separate)
            replay.num_replayed += len(replay.events)
        common = segment_bytes(max(int(spare * common_bytes[separate]), MIN_SEGMENT_BYTES))
        yield (*separate, common) if common_bytes[separate] else separate


def _improve(segments: tuple[int, ...], replay: _PoolReplay) -> tuple[tuple[int, ...], int]:
    """Local search from segments: a change stays if the step reserves no more than before. Returns the segments and the bytes reserved."""
    random = Random(0)  # the same plan each time
    sizes = {segment_bytes(num_bytes) for _, num_bytes in replay.events if num_bytes >= MIN_SEGMENT_BYTES}
    split_sizes = sorted(sizes, reverse=True)[:_NUM_SPLIT_SIZES] or [MIN_SEGMENT_BYTES]
    least_bytes = replay.reserved_bytes(segments, _ENDLESS_BYTES)
    enough_bytes = max(_NEAR_OPTIMAL * replay.peak_bytes, replay.peak_bytes + _NEAR_OPTIMAL_BYTES)
    last_replayed = replay.num_replayed + _MAX_CHANGED_EVENTS
    for _ in range(_MAX_CHANGES if segments else 0):
        if replay.num_replayed > last_replayed or least_bytes <= enough_bytes:
            break
        changed = _change(segments, split_sizes, random)
        reserved_bytes = replay.reserved_bytes(changed, least_bytes)
        if reserved_bytes <= least_bytes:
            segments, least_bytes = changed, reserved_bytes
    return segments, least_bytes


def _change(segments: tuple[int, ...], split_sizes: Sequence[int], random: Random) -> tuple[int, ...]:
    """Segments with one change: one of a tensor's size split off the largest, two merged, or one made smaller."""
    changed, kind = sorted(segments), random.random()
    if kind < 0.4:
        size = random.choice(split_sizes)
        if changed[-1] >= size + MIN_SEGMENT_BYTES:
            changed[-1] -= size
            changed.append(size)
    elif kind < 0.55 and len(changed) > 1:
        merged = changed.pop(random.randrange(len(changed)))
        changed[random.randrange(len(changed))] += merged
    else:
        index, share = random.randrange(len(changed)), random.choice(_SHRUNK_SHARES)
        changed[index] = segment_bytes(max(MIN_SEGMENT_BYTES, int((1 - share) * changed[index])))
    return tuple(sorted(changed))


def _common_segment_bytes(trace: AllocationTrace, settings: AllocatorSettings, separate: tuple[int, ...]) -> int:
    """Bytes of a segment for all tensors that find no free block in the separate ones, if its end is used last."""
    pool = CachingAllocator(settings=settings)
    pool.reserve((*separate, _ENDLESS_BYTES))
    common = max(block.segment for block in pool.free_blocks)
    end_bytes, blocks = 0, dict[int, Block | None]()
    for number, num_bytes in trace.events:
        if number in trace.caller_numbers:
            continue
        if num_bytes:
            block = blocks[number] = pool.allocate(num_bytes)
            if block is not None and block.segment == common:
                end_bytes = max(end_bytes, block.offset_bytes + block.num_bytes)
        else:
            pool.free(blocks.pop(number))
    return end_bytes


def _largest_at_peak(trace: AllocationTrace) -> list[int]:
    """Sizes of the tensors that are alive at the peak and can fill a segment, largest first."""
    live: dict[int, int] = {}
    live_bytes = peak_bytes = 0
    at_peak: list[int] = []
    for number, num_bytes in trace.events:
        if number in trace.caller_numbers:
            continue
        if num_bytes:
            live[number] = num_bytes
            live_bytes += num_bytes
            if live_bytes > peak_bytes:
                peak_bytes, at_peak = live_bytes, []
        else:
            if live_bytes == peak_bytes and not at_peak:
                at_peak = list(live.values())
            live_bytes -= live.pop(number)
    return sorted((num_bytes for num_bytes in at_peak if num_bytes >= MIN_SEGMENT_BYTES), reverse=True)
