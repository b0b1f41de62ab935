"""Reference of PyTorch's caching allocator, without expandable segments: segments as lists of blocks, searched from the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from sft.runtime.caching_allocator import AllocatorSettings, segment_bytes

_MIB = 2**20


@dataclass
class _ReferenceBlock:
    num_bytes: int
    number: int | None = None


@dataclass
class ReferenceAllocator:
    """Literal implementation of the allocator's rules.

    Attributes:
        settings: the allocator's settings.
        segments: blocks of each segment, in the order of their addresses.
    """

    settings: AllocatorSettings
    segments: list[list[_ReferenceBlock]] = field(default_factory=list)

    @property
    def reserved_bytes(self) -> int:
        return sum(block.num_bytes for segment in self.segments for block in segment)

    @property
    def allocated_bytes(self) -> int:
        return sum(block.num_bytes for segment in self.segments for block in segment if block.number is not None)

    def allocate(self, number: int, num_bytes: int) -> None:
        size = self.settings.block_bytes(num_bytes)
        segment = self._best_segment(size)
        if segment is None:
            segment = [_ReferenceBlock(segment_bytes(size))]
            self.segments.append(segment)
        block = min((each for each in segment if self._fits(each, size)), key=lambda each: each.num_bytes)
        rest = block.num_bytes - size
        limit = self.settings.max_split_size_bytes
        if rest >= 512 if size <= _MIB else rest > _MIB and (limit is None or size < limit):
            block.num_bytes = size
            segment.insert(next(at for at, each in enumerate(segment) if each is block) + 1, _ReferenceBlock(rest))
        block.number = number

    def free(self, number: int) -> None:
        for segment in self.segments:
            for block in segment:
                if block.number == number:
                    block.number = None
            at = 1
            while at < len(segment):
                if segment[at - 1].number is None and segment[at].number is None:
                    segment[at - 1].num_bytes += segment.pop(at).num_bytes
                else:
                    at += 1

    def _best_segment(self, size: int) -> list[_ReferenceBlock] | None:
        """The segment with the smallest free block that is large enough, if the rules allow its use."""
        fitting = [
            (block.num_bytes, at)
            for at, segment in enumerate(self.segments)
            for block in segment
            if self._fits(block, size) and (sum(each.num_bytes for each in segment) == 2 * _MIB) == (size <= _MIB)
        ]
        if not fitting:
            return None
        num_bytes, at = min(fitting)
        limit = self.settings.max_split_size_bytes
        if limit is not None and (size < limit <= num_bytes or num_bytes - self.settings.max_non_split_rounding_bytes >= size >= limit):
            return None
        return self.segments[at]

    @staticmethod
    def _fits(block: _ReferenceBlock, size: int) -> bool:
        return block.number is None and block.num_bytes >= size
