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
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from sft.common.errors import InputError

__all__ = ["MIN_SEGMENT_BYTES", "AllocatorSettings", "Block", "CachingAllocator", "segment_bytes"]

_MIB: Final = 2**20
_MIN_BLOCK_BYTES: Final = 512
_SMALL_BYTES: Final = _MIB
_SMALL_SEGMENT_BYTES: Final = 2 * _MIB
_MEDIUM_BYTES: Final = 10 * _MIB
_LARGE_SEGMENT_BYTES: Final = 20 * _MIB
_SEGMENT_ROUNDING_BYTES: Final = 2 * _MIB
#: Smallest segment that is as large as its first request, rounded up; smaller requests share segments of fixed sizes.
MIN_SEGMENT_BYTES: Final = _MEDIUM_BYTES
#: Variables of the environment, in the order in which torch reads them.
_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: Settings that the simulator follows, and the threshold at which unused segments are released, which lowers reserved bytes.
_DESCRIBED: Final = frozenset(
    {
        "expandable_segments",
        "garbage_collection_threshold",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "release_lock_on_cudamalloc",
        "roundup_power2_divisions",
    }
)
#: Settings about host memory.
_HOST_PREFIX: Final = "pinned_"
#: ``roundup_power2_divisions`` has an entry for each power of two from 1 MiB on.
_NUM_DIVISION_INTERVALS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of the caching allocator that change its reserved bytes.

    Attributes:
        expandable_segments: segments grow instead of multiplying.
        max_split_size_bytes: blocks of this size or more are not split; ``None`` for no limit.
        max_non_split_rounding_bytes: largest rest that a request of ``max_split_size_bytes`` or more may leave in a block.
        roundup_power2_divisions: number of divisions between two powers of two to which sizes are rounded up. Entry ``i`` is for sizes from
            ``2**i`` MiB on; the first one also for smaller sizes, the last one for all larger ones. Empty for none.
        is_native: false for ``backend:cudaMallocAsync``, which this simulator does not describe.
        undescribed: settings that may change reserved bytes, and that this simulator does not follow.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = _LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = ()
    is_native: bool = True
    undescribed: tuple[str, ...] = ()

    @classmethod
    def of_environment(cls) -> AllocatorSettings:
        """Settings of ``PYTORCH_CUDA_ALLOC_CONF``, or of ``PYTORCH_ALLOC_CONF``.

        Raises:
            InputError: a value is malformed.
        """
        text = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")
        return cls.parse(text)

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Settings in the form of the variable, such as ``"max_split_size_mb:512,expandable_segments:True"``.

        Raises:
            InputError: a value is malformed.

        >>> AllocatorSettings.parse("expandable_segments:True").expandable_segments
        True
        """
        options = dict(re.findall(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,\[]+)", text))
        split_mb = options.get("max_split_size_mb")
        try:
            return cls(
                expandable_segments=options.get("expandable_segments", "").strip().lower() == "true",
                max_split_size_bytes=None if split_mb is None else int(split_mb) * _MIB,
                max_non_split_rounding_bytes=int(options.get("max_non_split_rounding_mb", _LARGE_SEGMENT_BYTES // _MIB)) * _MIB,
                roundup_power2_divisions=_parse_divisions(options.get("roundup_power2_divisions", "").strip()),
                is_native=options.get("backend", "native").strip() == "native",
                undescribed=tuple(f"{name}:{value.strip()}" for name, value in options.items() if not _is_described(name, value.strip())),
            )
        except ValueError as error:
            raise InputError(
                f"the allocator settings {text!r} have a value that is not a number ({error}); see PYTORCH_ALLOC_CONF"
            ) from error

    def block_bytes(self, num_bytes: int) -> int:
        """Size of a request after rounding."""
        if num_bytes < _MIN_BLOCK_BYTES:
            return _MIN_BLOCK_BYTES
        divisions = 0
        if self.roundup_power2_divisions:
            interval = num_bytes.bit_length() - _MIB.bit_length()
            divisions = self.roundup_power2_divisions[min(max(interval, 0), _NUM_DIVISION_INTERVALS - 1)]
        if divisions > 1 and num_bytes > _MIN_BLOCK_BYTES * divisions:
            floor = 1 << (num_bytes.bit_length() - 1)
            step = max(1, floor // divisions)
            return -(-num_bytes // step) * step
        return -(-num_bytes // _MIN_BLOCK_BYTES) * _MIN_BLOCK_BYTES


def _is_described(name: str, value: str) -> bool:
    """True for a setting that the simulator follows, or that cannot raise reserved bytes."""
    return name in _DESCRIBED or name.startswith(_HOST_PREFIX) or (name, value) == ("backend", "native")


def _parse_divisions(text: str) -> tuple[int, ...]:
    """Divisions by interval: a number for all sizes, or ``[256:1,512:2,>:4]`` with powers of two in MiB."""
    if not text:
        return ()
    if not text.startswith("["):
        return (int(text),) * _NUM_DIVISION_INTERVALS
    intervals, interval = [0] * _NUM_DIVISION_INTERVALS, -1
    for bound, count in (entry.split(":") for entry in text.strip("[] ").split(",")):
        if bound.strip() == ">":
            intervals[interval + 1 :] = [int(count)] * (_NUM_DIVISION_INTERVALS - interval - 1)
            continue
        first, interval = interval < 0, min(int(bound).bit_length() - 1, _NUM_DIVISION_INTERVALS - 1)
        intervals[0 if first else interval : interval + 1] = [int(count)] * (interval + 1 if first else 1)
    return tuple(intervals)


_PoolName = Literal["small", "large"]


@dataclass(slots=True, eq=False)
class Block:
    """A block of a segment.

    Attributes:
        pool: pool of the block.
        segment: number of its segment.
        offset_bytes: position in the segment.
        num_bytes: size.
        requested_bytes: size of the request that it serves.
        is_free: true if no request uses it.
        before: neighbour in the segment, towards its start.
        after: neighbour towards its end.
    """

    pool: _PoolName
    segment: int
    offset_bytes: int
    num_bytes: int
    requested_bytes: int = 0
    is_free: bool = True
    before: Block | None = None
    after: Block | None = None


#: A free block after its size and address: smaller blocks come first, of equal ones that with the lower address.
_FreeBlock = tuple[int, int, int, Block]


def _entry(block: Block) -> _FreeBlock:
    return (block.num_bytes, block.segment, block.offset_bytes, block)


def segment_bytes(block_bytes: int) -> int:
    """Size of a new segment for a block."""
    if block_bytes <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if block_bytes < _MEDIUM_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-block_bytes // _SEGMENT_ROUNDING_BYTES) * _SEGMENT_ROUNDING_BYTES


@dataclass(slots=True, kw_only=True)
class CachingAllocator:
    """Allocator state, and its counters.

    Attributes:
        settings: the allocator's settings.
        limit_bytes: bytes of the device; ``None`` for no limit.
        requested_bytes: bytes of all live requests.
        allocated_bytes: bytes of their blocks.
        reserved_bytes: bytes of all segments.
        peak_requested_bytes: largest ``requested_bytes``.
        peak_allocated_bytes: largest ``allocated_bytes``.
        peak_reserved_bytes: largest ``reserved_bytes``.
        num_segments: segments requested from the driver.
        num_released: segments returned to the driver, each a synchronisation of the device.
        num_failures: requests for which the limit was too small; they are served nevertheless, so that a simulation continues.
    """

    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    limit_bytes: int | None = None
    requested_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_requested_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    num_segments: int = 0
    num_released: int = 0
    num_failures: int = 0
    _free: dict[_PoolName, list[_FreeBlock]] = field(default_factory=lambda: {"small": [], "large": []})
    _tails: dict[_PoolName, Block] = field(default_factory=dict)

    def allocate(self, num_bytes: int) -> Block | None:
        """Allocate a block. Empty tensors have none."""
        if num_bytes <= 0:
            return None
        size_bytes = self.settings.block_bytes(num_bytes)
        pool: _PoolName = "small" if size_bytes <= _SMALL_BYTES else "large"
        block = self._best_fit(pool, size_bytes) or self._new_block(pool, size_bytes)
        self._split(block, size_bytes)
        block.is_free, block.requested_bytes = False, num_bytes
        self.requested_bytes += num_bytes
        self.allocated_bytes += block.num_bytes
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
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
        block.is_free, block.requested_bytes = True, 0
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._take(neighbour)
                self._absorb(block, neighbour)
        insort(self._free[block.pool], _entry(block))

    def release_cached_segments(self) -> None:
        """Return segments without live blocks to the driver (``torch.cuda.empty_cache``)."""
        for blocks in self._free.values():
            for block in [entry[-1] for entry in blocks if entry[-1].before is None and entry[-1].after is None]:
                self._take(block)
                self.reserved_bytes -= block.num_bytes
                self.num_released += 1
                if self._tails.get(block.pool) is block:
                    del self._tails[block.pool]

    @property
    def free_blocks(self) -> Iterable[Block]:
        """All free blocks."""
        return (entry[-1] for entries in self._free.values() for entry in entries)

    def _best_fit(self, pool: _PoolName, size_bytes: int) -> Block | None:
        """Take the smallest free block that is large enough; ``None`` if there is none that may be used."""
        blocks = self._free[pool]
        index = bisect_left(blocks, (size_bytes,))
        if index == len(blocks):
            return None
        if self.settings.expandable_segments and blocks[index][-1] is self._tails.get(pool) and index + 1 < len(blocks):
            index += 1  # the end of the segment can grow, so every other block fits better
        block, limit_bytes = blocks[index][-1], self.settings.max_split_size_bytes
        if limit_bytes is not None:
            if size_bytes < limit_bytes <= block.num_bytes:
                return None
            if size_bytes >= limit_bytes and block.num_bytes >= size_bytes + self.settings.max_non_split_rounding_bytes:
                return None
        return blocks.pop(index)[-1]

    def _new_block(self, pool: _PoolName, size_bytes: int) -> Block:
        """Block of a new segment, or of the end of the expandable one."""
        if self.settings.expandable_segments:
            return self._grow(pool, size_bytes)
        num_bytes = segment_bytes(size_bytes)
        self._reserve(num_bytes)
        self.num_segments += 1
        return Block(pool, self.num_segments, 0, num_bytes)

    def _grow(self, pool: _PoolName, size_bytes: int) -> Block:
        """Extend the expandable segment of a pool; a free block at its end is part of the result."""
        page_bytes = _SMALL_SEGMENT_BYTES if pool == "small" else _LARGE_SEGMENT_BYTES
        tail = self._tails.get(pool)
        free_bytes = tail.num_bytes if tail is not None and tail.is_free else 0
        added_bytes = -(-(size_bytes - free_bytes) // page_bytes) * page_bytes
        self._reserve(added_bytes)
        if tail is not None and free_bytes:
            self._take(tail)
            tail.num_bytes += added_bytes
            return tail
        if tail is None:
            self.num_segments += 1
        block = Block(pool, self.num_segments, 0, added_bytes, before=tail)
        if tail is not None:
            block.segment, block.offset_bytes = tail.segment, tail.offset_bytes + tail.num_bytes
            tail.after = block
        self._tails[pool] = block
        return block

    def _reserve(self, num_bytes: int) -> None:
        """Request bytes from the driver; at the limit cached segments are returned first."""
        if self.limit_bytes is not None and self.reserved_bytes + num_bytes > self.limit_bytes:
            self.release_cached_segments()
            if self.reserved_bytes + num_bytes > self.limit_bytes:
                self.num_failures += 1
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _split(self, block: Block, size_bytes: int) -> None:
        """Split the rest of a block off, where the allocator does so."""
        rest_bytes, limit_bytes = block.num_bytes - size_bytes, self.settings.max_split_size_bytes
        if block.pool == "small" or self.settings.expandable_segments:
            splits = rest_bytes >= _MIN_BLOCK_BYTES
        else:
            splits = rest_bytes > _SMALL_BYTES and (limit_bytes is None or size_bytes < limit_bytes)
        if not splits:
            return
        rest = Block(block.pool, block.segment, block.offset_bytes + size_bytes, rest_bytes, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        elif self._tails.get(block.pool) is block:
            self._tails[block.pool] = rest
        block.after, block.num_bytes = rest, size_bytes
        insort(self._free[block.pool], _entry(rest))

    def _absorb(self, block: Block, neighbour: Block) -> None:
        """Merge a free neighbour into a block."""
        if neighbour is block.before:
            block.offset_bytes, block.before = neighbour.offset_bytes, neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
            elif self._tails.get(block.pool) is neighbour:
                self._tails[block.pool] = block
        block.num_bytes += neighbour.num_bytes

    def _take(self, block: Block) -> None:
        """Remove a block from the free list."""
        blocks = self._free[block.pool]
        index = bisect_left(blocks, (block.num_bytes, block.segment, block.offset_bytes))
        assert blocks[index][-1] is block
        del blocks[index]
