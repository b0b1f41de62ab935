"""Simulated CUDA caching allocator: rounding, pools, segments, splitting, merging, settings; invariants over random sequences."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sft
from sft.runtime.caching_allocator import AllocatorSettings, Block, CachingAllocator
from tests.helpers.reference_allocator import ReferenceAllocator

_KIB, _MIB = 2**10, 2**20


def test_requests_round_up_to_512_bytes_and_segments_to_their_kind() -> None:
    for num_bytes, allocated, reserved in [
        (1, 512, 2 * _MIB),
        (513, 1024, 2 * _MIB),
        (_MIB, _MIB, 2 * _MIB),
        (_MIB + 1, _MIB + 512, 20 * _MIB),
        (9 * _MIB, 9 * _MIB, 20 * _MIB),
        (10 * _MIB, 10 * _MIB, 10 * _MIB),
        (11 * _MIB - 5, 12 * _MIB, 12 * _MIB),  # the rest of a mebibyte is not split off
    ]:
        allocator = CachingAllocator()
        allocator.allocate(num_bytes)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved), num_bytes


def test_the_smallest_free_block_serves_a_request() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(100 * _MIB), allocator.allocate(40 * _MIB)
    allocator.free(large)
    allocator.free(small)
    block = allocator.allocate(30 * _MIB)
    assert small is not None and block is not None and block.start == small.start
    assert allocator.reserved_bytes == 140 * _MIB


def test_neighbours_merge_in_any_order() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2]):
        allocator = CachingAllocator()
        whole = allocator.allocate(60 * _MIB)
        allocator.free(whole)
        blocks = [allocator.allocate(20 * _MIB) for _ in range(3)]
        assert allocator.reserved_bytes == 60 * _MIB
        for index in order:
            allocator.free(blocks[index])
        allocator.allocate(60 * _MIB)
        assert allocator.reserved_bytes == 60 * _MIB


def test_fragmentation_reserves_more_than_is_alive() -> None:
    """Blocks of 20 MiB with a gap after each: 30 MiB fit into no gap, though 60 MiB are free."""
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(120 * _MIB))
    blocks = [allocator.allocate(20 * _MIB) for _ in range(6)]
    for block in blocks[::2]:
        allocator.free(block)
    assert allocator.allocated_bytes == 60 * _MIB
    allocator.allocate(30 * _MIB)
    assert allocator.reserved_bytes == 150 * _MIB


def test_a_limit_returns_free_segments_before_it_fails() -> None:
    allocator = CachingAllocator(limit_bytes=100 * _MIB)
    allocator.free(allocator.allocate(60 * _MIB))
    allocator.allocate(80 * _MIB)
    assert (allocator.reserved_bytes, allocator.num_released, allocator.num_failures) == (80 * _MIB, 1, 0)
    allocator.allocate(40 * _MIB)
    assert allocator.num_failures == 1


def test_expandable_segments_grow_at_their_end() -> None:
    allocator = CachingAllocator(settings=AllocatorSettings(expandable_segments=True))
    allocator.allocate(30 * _MIB)
    last = allocator.allocate(30 * _MIB)
    assert (allocator.reserved_bytes, allocator.num_segments) == (60 * _MIB, 1)
    allocator.free(last)
    allocator.allocate(45 * _MIB)
    assert allocator.reserved_bytes == 80 * _MIB


def test_large_blocks_are_not_split_above_the_limit() -> None:
    allocator = CachingAllocator(settings=AllocatorSettings.parse("max_split_size_mb:64"))
    block = allocator.allocate(100 * _MIB)
    allocator.free(block)
    allocator.allocate(40 * _MIB)  # does not take the block of 100 MiB
    assert allocator.reserved_bytes == 140 * _MIB
    whole = allocator.allocate(90 * _MIB)
    assert block is not None and whole is not None and whole.end == block.end  # its rest is below 20 MiB
    assert allocator.allocated_bytes == 140 * _MIB


@pytest.mark.parametrize(
    ("text", "num_bytes", "rounded"),
    [
        ("roundup_power2_divisions:4", 1200, 1536),  # not above 512 bytes times 4
        ("roundup_power2_divisions:4", 5000, 5120),
        ("roundup_power2_divisions:4", 4096, 4096),
        ("roundup_power2_divisions:[64:8,128:2,>:1]", 100 * _MIB, 104 * _MIB),
        ("roundup_power2_divisions:[64:8,128:2,>:1]", 3 * _MIB + 5, 3 * _MIB + 256 * _KIB),
        ("roundup_power2_divisions:[64:8,128:2,>:1]", 130 * _MIB, 192 * _MIB),
        ("roundup_power2_divisions:[64:8,128:2,>:1]", 260 * _MIB + 1, 260 * _MIB + 512),
        ("", 5000, 5120),
    ],
)
def test_sizes_round_by_the_settings(text: str, num_bytes: int, rounded: int) -> None:
    assert AllocatorSettings.parse(text).block_bytes(num_bytes) == rounded


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync,expandable_segments:True")
    settings = AllocatorSettings.of_environment()
    assert settings.expandable_segments and not settings.is_native
    assert settings.undescribed == ("backend:cudaMallocAsync",)
    described = "backend:native,max_split_size_mb:64,pinned_use_cuda_host_register:True,roundup_power2_divisions:[64:8,>:1]"
    assert AllocatorSettings.parse(described).undescribed == ()
    assert AllocatorSettings.parse("per_process_memory_fraction:0.5, max_split_size_mb:64").undescribed == (
        "per_process_memory_fraction:0.5",
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:many")
    with pytest.raises(sft.InputError, match="max_split_size_mb:many"):
        AllocatorSettings.of_environment()


@st.composite
def _settings(draw: st.DrawFn) -> AllocatorSettings:
    return AllocatorSettings(
        expandable_segments=draw(st.booleans()),
        max_split_size_bytes=draw(st.sampled_from([None, 32 * _MIB])),
        roundup_power2_divisions=draw(st.sampled_from([(), (4,) * 16])),
    )


@given(_settings(), st.lists(st.tuples(st.booleans(), st.integers(1, 64 * _MIB)), max_size=80))
def test_live_blocks_never_overlap_and_counters_add_up(settings: AllocatorSettings, events: list[tuple[bool, int]]) -> None:
    allocator = CachingAllocator(settings=settings)
    live: list[Block] = []
    for is_request, size in events:
        if is_request or not live:
            block = allocator.allocate(size)
            assert block is not None and block.num_bytes >= size
            live.append(block)
        else:
            allocator.free(live.pop(size % len(live)))
        assert allocator.allocated_bytes == sum(block.num_bytes for block in live)
        assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
        spans = sorted((block.pool.is_small, block.start, block.end) for block in live)
        for (pool, _, end), after in itertools.pairwise(spans):
            assert pool != after[0] or end <= after[1]
    for block in live:
        allocator.free(block)
    allocator.release_cached_segments()
    assert allocator.reserved_bytes == allocator.allocated_bytes == 0


@given(
    st.sampled_from([AllocatorSettings(), AllocatorSettings.parse("max_split_size_mb:32,max_non_split_rounding_mb:4")]),
    st.lists(st.tuples(st.booleans(), st.one_of(st.integers(1, 2 * _MIB), st.integers(1, 64 * _MIB))), max_size=60),
)
def test_the_allocator_equals_a_reference(settings: AllocatorSettings, events: list[tuple[bool, int]]) -> None:
    allocator, reference = CachingAllocator(settings=settings), ReferenceAllocator(settings)
    live: dict[int, Block | None] = {}
    for number, (is_request, size) in enumerate(events):
        if is_request or not live:
            live[number] = allocator.allocate(size)
            reference.allocate(number, size)
        else:
            dead = [*live][size % len(live)]
            allocator.free(live.pop(dead))
            reference.free(dead)
        assert (allocator.reserved_bytes, allocator.allocated_bytes) == (reference.reserved_bytes, reference.allocated_bytes)


def test_an_expandable_segment_with_a_limit() -> None:
    """The free end of the segment returns to the driver with it; a request below the largest split size uses the end, nevertheless."""
    allocator = CachingAllocator(settings=AllocatorSettings(expandable_segments=True), limit_bytes=100 * _MIB)
    allocator.free(allocator.allocate(60 * _MIB))
    allocator.allocate(120 * _MIB)
    assert (allocator.reserved_bytes, allocator.num_released, allocator.num_failures) == (120 * _MIB, 1, 1)
    allocator = CachingAllocator(settings=AllocatorSettings.parse("expandable_segments:True,max_split_size_mb:32"))
    allocator.free(allocator.allocate(60 * _MIB))
    allocator.allocate(20 * _MIB)
    assert allocator.reserved_bytes == 60 * _MIB
