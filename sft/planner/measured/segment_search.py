"""Segment search: bytes of the segments that a step's memory pool on a GPU reserves before the first step.

Left alone, the allocator makes a segment for each tensor that finds no free block: strips of slightly different heights then leave segments
that no later tensor fits. In one large segment, neighbouring free blocks merge. Some plans fit even better with separate segments for their
largest tensors, or with the allocator's own. So several divisions are simulated, and local searches change the best of them: they split
segments, merge them, and make them smaller. ``benchmarks/gpu_plans.py`` compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from sft.planner.measured.event_sequence import AllocationTrace
from sft.planner.measured.step_replay import StepReplay
from sft.runtime.caching_allocator import MIN_SEGMENT_BYTES, AllocatorSettings, segment_bytes

__all__ = ["choose_segments"]

#: More than any step reserves.
_UNLIMITED_BYTES: Final = 2**60
#: Divisions that are tried, in order: number of the largest tensors with segments of their own, and size of the common segment relative to
#: the bytes that it needs while its end is free.
_DIVISIONS: Final = ((0, 1.0), (1, 1.0), (0, 1.02), (16, 1.0), (2, 1.0), (0, 1.05), (8, 1.0), (4, 1.0))
#: Events that may be replayed to find a division; further divisions are not tried.
_MAX_REPLAYED_EVENTS: Final = 150_000
#: Divisions from which a local search starts, the best ones first.
_NUM_STARTS: Final = 3
#: Replays of a local search, at most, and the events that they may replay.
_MAX_CHANGES: Final = 500
_MAX_CHANGED_EVENTS: Final = 600_000
#: The local search ends if a step reserves at most this multiple of its bytes, or a rounded segment more.
_NEAR_OPTIMAL: Final = 1.005
_NEAR_OPTIMAL_BYTES: Final = 2 * 2**20
#: Sizes of tensors for which the local search splits segments off: the largest ones of a step.
_NUM_SPLIT_SIZES: Final = 12
#: Shares by which the local search makes segments smaller.
_SHRUNK_SHARES: Final = (0.002, 0.005, 0.01, 0.02, 0.04)


def choose_segments(trace: AllocationTrace, settings: AllocatorSettings, resident: Sequence[int] | None = ()) -> tuple[int, ...] | None:
    """Bytes of the segments in which a step reserves least memory; ``None`` if that is without a pool.

    Empty if the step allocates no block of more than a mebibyte.

    Args:
        trace: allocations of a step.
        settings: the allocator's settings.
        resident: bytes of each tensor that exists before the step; ``None`` for a step that has a pool in any case.
    """
    replay = StepReplay.of(trace, settings)
    peak = replay.sequence.peak
    largest = sorted((num_bytes for num_bytes in peak.sizes if num_bytes >= MIN_SEGMENT_BYTES), reverse=True)
    search = _SegmentSearch(replay, peak.num_bytes, largest)
    starts = {replay.own_segments(): search.reserved_bytes(replay.own_segments(), _UNLIMITED_BYTES)}
    for count, spare in _DIVISIONS:
        if search.num_replayed > _MAX_REPLAYED_EVENTS:
            break
        division = search.division(count, spare)
        starts[division] = search.reserved_bytes(division, _UNLIMITED_BYTES)
    best: tuple[int, ...] = ()
    least_bytes = _UNLIMITED_BYTES
    for start in sorted(starts, key=lambda segments: starts[segments])[:_NUM_STARTS]:
        segments, reserved_bytes = _improve(start, search)
        if reserved_bytes < least_bytes:
            best, least_bytes = segments, reserved_bytes
        if least_bytes <= search.enough_bytes:
            break
    if resident is not None and _bytes_without_pool(replay, resident, best) < least_bytes:
        return None
    return best


@dataclass(slots=True)
class _SegmentSearch:
    """Replays of one search.

    Attributes:
        replay: replays of the step.
        peak_bytes: peak of the live tensors.
        largest: sizes of the tensors that are alive at the peak and can fill a segment, largest first.
        num_replayed: events replayed so far.
    """

    replay: StepReplay
    peak_bytes: int
    largest: Sequence[int]
    num_replayed: int = 0
    _known: dict[tuple[int, ...], int] = field(default_factory=dict)
    _common_bytes: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def enough_bytes(self) -> float:
        """Reserved bytes at which the local search ends."""
        return max(_NEAR_OPTIMAL * self.peak_bytes, self.peak_bytes + _NEAR_OPTIMAL_BYTES)

    def division(self, count: int, spare: float) -> tuple[int, ...]:
        """Segments of the largest tensors, and a common one."""
        separate = tuple(segment_bytes(num_bytes) for num_bytes in self.largest[:count])
        if separate not in self._common_bytes:
            self._common_bytes[separate] = self.replay.common_segment_bytes(separate)
            self.num_replayed += self.replay.num_events
        common = segment_bytes(max(int(spare * self._common_bytes[separate]), MIN_SEGMENT_BYTES))
        return (*separate, common) if self._common_bytes[separate] else separate

    def reserved_bytes(self, segments: tuple[int, ...], limit_bytes: int) -> int:
        """Bytes that the pool reserves; if they exceed the limit, only as many as it has reserved at that moment."""
        if segments in self._known:
            return self._known[segments]
        reserved_bytes, num_replayed = self.replay.pool_bytes(segments, limit_bytes)
        self.num_replayed += num_replayed
        if reserved_bytes <= limit_bytes:
            self._known[segments] = reserved_bytes
        return reserved_bytes


def _bytes_without_pool(replay: StepReplay, resident: Sequence[int], segments: tuple[int, ...]) -> int:
    """Bytes of a step without a pool in excess of those outside of one; if they exceed those of a pool with segments, any such number."""
    outside_bytes, (pool_bytes, _) = replay.outside_bytes(resident), replay.pool_bytes(segments)
    return replay.bytes_without_pool(resident, outside_bytes + pool_bytes) - outside_bytes


def _improve(segments: tuple[int, ...], search: _SegmentSearch) -> tuple[tuple[int, ...], int]:
    """Local search from segments: a change stays if the step reserves no more than before. Returns the segments and the bytes reserved."""
    random = Random(0)  # the same plan each time
    sizes = {segment_bytes(num_bytes) for num_bytes in search.replay.sequence.sizes if num_bytes >= MIN_SEGMENT_BYTES}
    split_sizes = sorted(sizes, reverse=True)[:_NUM_SPLIT_SIZES] or [MIN_SEGMENT_BYTES]
    least_bytes = search.reserved_bytes(segments, _UNLIMITED_BYTES)
    last_replayed = search.num_replayed + _MAX_CHANGED_EVENTS
    for _ in range(_MAX_CHANGES if segments else 0):
        if search.num_replayed > last_replayed or least_bytes <= search.enough_bytes:
            break
        changed = _change(segments, split_sizes, random)
        reserved_bytes = search.reserved_bytes(changed, least_bytes)
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
