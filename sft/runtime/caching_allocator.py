"""Simulator of PyTorch's CUDA caching allocator: the bytes that a sequence of allocations and frees reserves on a device.

A device runs out of *reserved* memory: segments that the allocator has requested from the driver. It divides segments into blocks, and a
free block serves a later request only if it is large enough. So reserved bytes exceed allocated bytes by rounding and by fragmentation,
and the excess depends on the order of requests. The simulator follows ``c10/cuda/CUDACachingAllocator.cpp`` for one stream:

========================== ===========================================================================================
size of a request          rounded up to 512 bytes, or by ``roundup_power2_divisions``
pools                      small (up to 1 MiB) and large
block                      the smallest free block of the pool that is large enough (best fit)
segment, if none is        2 MiB (small), 20 MiB (below 10 MiB), otherwise the size rounded up to 2 MiB
rest of a block            split off if it has 512 bytes (small pool) or more than 1 MiB (large pool)
``max_split_size_mb``      blocks of this size are neither split nor used for smaller requests
``expandable_segments``    one segment for each pool, which grows at its end; every rest of 512 bytes is split off
limit                      free segments are returned to the driver before a request fails
========================== ===========================================================================================

Expandable segments only grow in the simulation, so their reserved bytes are an upper bound.

The two pools share nothing but the limit. Without a limit each pool may be simulated alone (:meth:`BlockPool.replay`), which a search over
many simulations of one step uses.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Final

from sft.runtime.allocator_settings import AllocatorSettings

__all__ = [
    "MIN_SEGMENT_BYTES",
    "SMALL_BYTES",
    "SMALL_SEGMENT_BYTES",
    "AllocatorSettings",
    "Block",
    "BlockPool",
    "CachingAllocator",
    "segment_bytes",
]

_MIB: Final = 2**20
_MIN_BLOCK_BYTES: Final = 512
#: Largest block of the small pool.
SMALL_BYTES: Final = _MIB
#: Segment of the small pool; every other one is a multiple.
SMALL_SEGMENT_BYTES: Final = 2 * _MIB
_MEDIUM_BYTES: Final = 10 * _MIB
_LARGE_SEGMENT_BYTES: Final = 20 * _MIB
#: Smallest segment that is as large as its first request, rounded up; smaller requests share segments of fixed sizes.
MIN_SEGMENT_BYTES: Final = _MEDIUM_BYTES
#: A free block is one integer, its size above its address: the order of integers is that of best fit, of equal blocks the lowest address.
_ADDRESS_BITS: Final = 60
_ADDRESS_MASK: Final = 2**_ADDRESS_BITS - 1
#: Size that no block has.
_NO_LIMIT_BYTES: Final = 2**_ADDRESS_BITS


def segment_bytes(block_bytes: int) -> int:
    """Size of a new segment for a block."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < _MEDIUM_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-block_bytes // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES


@dataclass(slots=True, kw_only=True)
class BlockPool:
    """One of the two pools: its segments, and the free blocks in them. Its live blocks are known to the caller, as start and end addresses.

    Segments have ascending addresses with gaps between them, so that blocks of two segments never merge.

    Attributes:
        settings: the allocator's settings.
        is_small: true for the pool of blocks up to 1 MiB.
        segments: bytes of the segments by address.
        reserved_bytes: bytes of all segments.
        num_segments: segments requested so far.
        peak_address: highest end of a block so far.
    """

    settings: AllocatorSettings
    is_small: bool
    segments: dict[int, int] = field(default_factory=dict)
    reserved_bytes: int = 0
    num_segments: int = 0
    peak_address: int = 0
    _next_address: int = 0
    _free: list[int] = field(default_factory=list)
    _free_by_start: dict[int, int] = field(default_factory=dict)
    _free_by_end: dict[int, int] = field(default_factory=dict)

    def replay(
        self, requests: Iterable[tuple[int, int]], blocks: MutableMapping[int, tuple[int, int]], limit_bytes: int | None = None
    ) -> int | None:
        """Allocate and free blocks in order.

        This loop is the whole allocator, and most of the time of planning for a GPU: hence the local names, and no calls.

        Args:
            requests: ``(number, block_bytes)`` for an allocation, ``(number, 0)`` for its free.
            blocks: start and end of the live blocks by number.
            limit_bytes: reserved bytes above which the replay ends.

        Returns:
            The number of the request that exceeded the limit; ``None`` if all requests were replayed.
        """
        free, by_start, by_end = self._free, self._free_by_start, self._free_by_end
        find, insert, take, bits, mask = bisect_left, insort, free.pop, _ADDRESS_BITS, _ADDRESS_MASK
        unsplit_bytes, whole_bytes = self._unsplit_bytes, self._whole_bytes
        is_best_fit = not self.settings.expandable_segments and self.settings.max_split_size_bytes is None
        peak_address = self.peak_address
        for number, size in requests:
            if size:
                index = find(free, size << bits)
                if index == len(free) or not is_best_fit:
                    index = self._place(index, size)
                    if limit_bytes is not None and self.reserved_bytes > limit_bytes:
                        return number
                entry = take(index)
                start = entry & mask
                end = start + (entry >> bits)
                del by_start[start]
                rest = end - start - size
                if rest > unsplit_bytes and size < whole_bytes:
                    middle = start + size
                    entry = rest << bits | middle
                    insert(free, entry, 0, index)
                    by_start[middle] = by_end[end] = entry
                    end = middle
                else:
                    del by_end[end]
                if end > peak_address:
                    peak_address = end
                blocks[number] = start, end
            else:
                start, end = blocks.pop(number)
                if start in by_end:
                    entry = by_end.pop(start)
                    del free[find(free, entry)]
                    start = entry & mask
                    del by_start[start]
                if end in by_start:
                    entry = by_start.pop(end)
                    del free[find(free, entry)]
                    end += entry >> bits
                    del by_end[end]
                entry = (end - start) << bits | start
                insert(free, entry)
                by_start[start] = by_end[end] = entry
        self.peak_address = peak_address
        return None

    def allocate(self, size: int) -> tuple[int, int]:
        """Allocate one block; its start and end."""
        blocks: dict[int, tuple[int, int]] = {}
        self.replay([(0, size)], blocks)
        return blocks[0]

    def free(self, block: tuple[int, int]) -> None:
        """Return one block, and merge it with free neighbours."""
        self.replay([(0, 0)], {0: block})

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """All free blocks. Later blocks depend on these alone, as long as the pool does not grow."""
        return tuple(self._free)

    @free_blocks.setter
    def free_blocks(self, blocks: tuple[int, ...]) -> None:
        self._free[:] = blocks
        self._free_by_start = {entry & _ADDRESS_MASK: entry for entry in blocks}
        self._free_by_end = {(entry & _ADDRESS_MASK) + (entry >> _ADDRESS_BITS): entry for entry in blocks}

    @property
    def repeats_steps(self) -> bool:
        """True if a step that frees all its blocks reserves as much as any number of such steps.

        A new segment of the small pool is the largest block there. So a later step takes it where the first one took it when it was new.
        """
        limit_bytes = self.settings.max_split_size_bytes
        return self.is_small and (limit_bytes is None or limit_bytes > SMALL_SEGMENT_BYTES)

    def growth_bytes(self, size: int) -> int:
        """Bytes that a request would reserve; zero if a free block serves it."""
        if self._choice(bisect_left(self._free, size << _ADDRESS_BITS), size) is not None:
            return 0
        if not self.settings.expandable_segments:
            return segment_bytes(size)
        page_bytes = SMALL_SEGMENT_BYTES if self.is_small else _LARGE_SEGMENT_BYTES
        # Blocks of ``max_split_size_mb`` are not used for smaller requests, but for their segment's growth.
        return max(0, -(-(size - (self._tail >> _ADDRESS_BITS)) // page_bytes) * page_bytes)

    def release_segments(self) -> int:
        """Return segments without live blocks to the driver; their number."""
        cached = [start for start, num_bytes in self.segments.items() if self._free_by_start.get(start, 0) >> _ADDRESS_BITS == num_bytes]
        for start in cached:
            self._remove(self._free_by_start[start])
            self.reserved_bytes -= self.segments.pop(start)
        return len(cached)

    def free_segment_bytes(self) -> list[int]:
        """Free bytes of each segment that has some, in ascending order."""
        starts, num_bytes = sorted(self.segments), dict.fromkeys(self.segments, 0)
        for start, entry in self._free_by_start.items():
            num_bytes[starts[bisect_left(starts, start + 1) - 1]] += entry >> _ADDRESS_BITS
        return sorted(filter(None, num_bytes.values()))

    @property
    def _unsplit_bytes(self) -> int:
        """Most bytes that a block has in excess of its request."""
        return _MIN_BLOCK_BYTES - 1 if self.is_small or self.settings.expandable_segments else SMALL_BYTES

    @property
    def _whole_bytes(self) -> int:
        """Smallest request that takes a block whole."""
        limit_bytes = None if self.is_small or self.settings.expandable_segments else self.settings.max_split_size_bytes
        return _NO_LIMIT_BYTES if limit_bytes is None else limit_bytes

    @property
    def _tail(self) -> int:
        """Free block at the end of the expandable segment; zero if there is none."""
        return self._free_by_end.get(self._next_address, 0) if self.settings.expandable_segments and self.segments else 0

    def _place(self, index: int, size: int) -> int:
        """Index of the free block that serves a request; the pool grows if there is none."""
        choice = self._choice(index, size)
        return bisect_left(self._free, self._grow(size)) if choice is None else choice

    def _choice(self, index: int, size: int) -> int | None:
        """Index of the smallest free block that is large enough and may be used, given that of the first that is large enough."""
        if index == len(self._free):
            return None
        if self._free[index] == self._tail and index + 1 < len(self._free):
            index += 1  # the end of the segment can grow, so every other block fits better
        num_bytes, limit_bytes = self._free[index] >> _ADDRESS_BITS, self.settings.max_split_size_bytes
        if limit_bytes is not None:
            if size < limit_bytes <= num_bytes:
                return None
            if size >= limit_bytes and num_bytes >= size + self.settings.max_non_split_rounding_bytes:
                return None
        return index

    def _grow(self, size: int) -> int:
        """Reserve a segment, or more of the expandable one; returns the free block at its end."""
        added_bytes, tail = self.growth_bytes(size), self._tail
        if self.settings.expandable_segments and self.segments:
            start = self._next_address
            self.segments[next(iter(self.segments))] += added_bytes
        else:
            start = self._next_address + 1
            self.segments[start] = added_bytes
            self.num_segments += 1
        self.reserved_bytes += added_bytes
        self._next_address = start + added_bytes
        if tail:
            self._remove(tail)
            start = tail & _ADDRESS_MASK
        entry = (self._next_address - start) << _ADDRESS_BITS | start
        insort(self._free, entry)
        self._free_by_start[start] = self._free_by_end[self._next_address] = entry
        return entry

    def _remove(self, entry: int) -> None:
        """Remove a free block."""
        start = entry & _ADDRESS_MASK
        del self._free[bisect_left(self._free, entry)], self._free_by_start[start], self._free_by_end[start + (entry >> _ADDRESS_BITS)]


@dataclass(frozen=True, slots=True)
class Block:
    """A live block.

    Attributes:
        pool: its pool.
        start: address in the pool.
        end: end address.
        requested_bytes: size of the request that it serves.
    """

    pool: BlockPool
    start: int
    end: int
    requested_bytes: int

    @property
    def num_bytes(self) -> int:
        """Size."""
        return self.end - self.start


@dataclass(slots=True, kw_only=True)
class CachingAllocator:
    """Both pools, a limit, and counters.

    Attributes:
        settings: the allocator's settings.
        limit_bytes: bytes of the device; ``None`` for no limit.
        requested_bytes: bytes of all live requests.
        allocated_bytes: bytes of their blocks.
        peak_requested_bytes: largest ``requested_bytes``.
        peak_allocated_bytes: largest ``allocated_bytes``.
        peak_reserved_bytes: largest ``reserved_bytes``.
        num_released: segments returned to the driver, each a synchronisation of the device.
        num_failures: requests for which the limit was too small; they are served nevertheless, so that a simulation continues.
    """

    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    limit_bytes: int | None = None
    requested_bytes: int = 0
    allocated_bytes: int = 0
    peak_requested_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    num_released: int = 0
    num_failures: int = 0
    _small: BlockPool = field(init=False, repr=False)
    _large: BlockPool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._small = BlockPool(settings=self.settings, is_small=True)
        self._large = BlockPool(settings=self.settings, is_small=False)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return self._small.reserved_bytes + self._large.reserved_bytes

    @property
    def num_segments(self) -> int:
        """Segments requested from the driver so far."""
        return self._small.num_segments + self._large.num_segments

    def allocate(self, num_bytes: int) -> Block | None:
        """Allocate a block. Empty tensors have none."""
        if num_bytes <= 0:
            return None
        size = self.settings.block_bytes(num_bytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        if self.limit_bytes is not None and self.reserved_bytes + pool.growth_bytes(size) > self.limit_bytes:
            self._make_room(pool, size)
        block = Block(pool, *pool.allocate(size), num_bytes)
        self.requested_bytes += num_bytes
        self.allocated_bytes += block.num_bytes
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def reserve(self, segments: Iterable[int]) -> None:
        """Request segments in advance and leave them free: large requests that are freed once all are served."""
        for block in [self.allocate(num_bytes) for num_bytes in segments]:
            self.free(block)
        self.peak_requested_bytes, self.peak_allocated_bytes = self.requested_bytes, self.allocated_bytes

    def free(self, block: Block | None) -> None:
        """Return a block, and merge it with free neighbours."""
        if block is None:
            return
        self.requested_bytes -= block.requested_bytes
        self.allocated_bytes -= block.num_bytes
        block.pool.free((block.start, block.end))

    def release_cached_segments(self) -> None:
        """Return segments without live blocks to the driver (``torch.cuda.empty_cache``)."""
        self.num_released += self._small.release_segments() + self._large.release_segments()

    def _make_room(self, pool: BlockPool, size: int) -> None:
        """Return cached segments for a request that exceeds the limit; count a failure if they do not suffice."""
        if pool.growth_bytes(size):
            self.release_cached_segments()
            self.num_failures += self.reserved_bytes + pool.growth_bytes(size) > (self.limit_bytes or 0)
