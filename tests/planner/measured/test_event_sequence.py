"""Event sequences and their replay have the numbers of the same events one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.planner.measured import pool_requests
from sft.planner.measured.event_sequence import AllocationTrace, Event, EventSequence, LivePeak
from sft.planner.measured.pool_requests import PoolRequests, SequenceReplay
from sft.planner.measured.reserved_memory import reserved_bytes, simulate_reserved_memory
from sft.runtime.caching_allocator import AllocatorSettings, BlockPool

_MIB = 2**20
_SIZES = st.one_of(st.integers(1, 3000), st.integers(1, _MIB), st.integers(_MIB, 12 * _MIB))


@st.composite
def _sequences(draw: st.DrawFn, depth: int, *, may_leave: bool) -> EventSequence:
    """Allocations, frees and repeated sequences, some of which leave allocations to the enclosing sequence."""
    inner = [draw(_sequences(depth - 1, may_leave=True)) for _ in range(2)] if depth else []
    items: list[Event] = []
    live: list[int] = []
    count = 0
    for choice, size in draw(st.lists(st.tuples(st.integers(0, 5), _SIZES), max_size=14)):
        if choice < 2:
            count += 1
            live.append(count)
            items.append((count, size))
        elif choice < 4 and inner:
            sequence = inner[choice % 2]
            items.append((count, sequence))
            live += [count + number for number in sequence.live]
            count += sequence.num_allocations
        elif live:
            items.append((live.pop(size % len(live)), 0))
    if not may_leave or draw(st.booleans()):
        items += [(number, 0) for number in live]
    return EventSequence.of(items)


@settings(max_examples=60)
@given(_sequences(2, may_leave=True))
def test_a_sequence_sums_up_its_events(sequence: EventSequence) -> None:
    flat = EventSequence.of(sequence.events())
    assert (sequence.num_events, sequence.num_allocations) == (flat.num_events, flat.num_allocations)
    assert (sequence.live, sequence.live_bytes, sequence.sizes) == (flat.live, flat.live_bytes, flat.sizes)
    assert sequence.peak.num_bytes == flat.peak.num_bytes == sum(sequence.peak.sizes)
    assert sorted(sequence.peak.sizes) == sorted(flat.peak.sizes)


@settings(max_examples=60)
@given(_sequences(2, may_leave=True), st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:1"]), st.integers(0, 3))
def test_replayed_sequences_reserve_the_bytes_of_their_events(sequence: EventSequence, options: str, num_resident: int) -> None:
    allocator, trace = AllocatorSettings.parse(options), AllocationTrace(sequence=sequence)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_requests, "_LEAST_REQUESTS", 2)
        for segments in (None, (20 * _MIB,)):
            resident = [_MIB // 3] * num_resident
            simulated = simulate_reserved_memory(AllocationTrace.of(trace.events), allocator, segments=segments, resident=resident)
            assert reserved_bytes(trace, allocator, segments=segments, resident=resident) == simulated.reserved_bytes


def test_a_sequence_is_replayed_once_for_the_same_free_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty runs of a program with a result that lives until the next run: two positions alternate, and the other runs are looked up."""
    run = EventSequence.of([(number, 1024) for number in range(1, 11)] + [(number, 0) for number in range(1, 10)])
    items: list[Event] = [(0, run)]
    for number in range(10, 200, 10):
        items += [(number, run), (number, 0)]
    trace = EventSequence.of(items)
    requests, pool = PoolRequests.of(trace, AllocatorSettings()), BlockPool(settings=AllocatorSettings(), is_small=True)
    replayed: list[int] = []
    replay = BlockPool.replay

    def counted(self: BlockPool, requests: list[tuple[int, int]], *arguments: object) -> object:
        replayed.append(len(requests))
        return replay(self, requests, *arguments)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(BlockPool, "replay", counted)
    blocks: dict[int, tuple[int, int]] = {}
    SequenceReplay(pool).replay(requests.small, blocks)
    assert requests.small.num_requests == trace.num_events == 20 * 19 + 19
    assert replayed.count(19) == 3, "the first one grows the pool, the other two start from different free blocks"
    assert list(blocks) == [200] and trace.peak == LivePeak(11 * 1024, (1024,) * 11)
