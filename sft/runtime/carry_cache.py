"""Carry cache: carried rows, each stored once.

Consecutive states of a sweep overlap wherever rows of a value are carried over several strips (a skip connection). Rows are therefore
stored in blocks, each with rows that no earlier block has. A state is only a set of intervals: the blocks that intersect it are retained
for it and dropped with the last state that needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sft.analysis.tiling.strips import RowsChange
from sft.common.interval import Interval
from sft.runtime.machine import Buffer
from sft.runtime.strip_policy import ALL_STRIPS, StripSelection

__all__ = ["CarryCache"]

RowsByValue = Mapping[str, Interval]


@dataclass(slots=True)
class _CarriedBlock:
    rows: Interval
    buffer: Buffer
    num_states: int = 0


@dataclass(slots=True)
class CarryCache:
    """Blocks of carried rows by value, in row order.

    Attributes:
        blocks: blocks by value name.
        selection: strips of the sweep that ran.
    """

    blocks: dict[str, list[_CarriedBlock]] = field(default_factory=dict)
    selection: StripSelection = ALL_STRIPS

    def append(self, name: str, rows: Interval, buffer: Buffer) -> None:
        """Add rows that no block has yet."""
        self.blocks.setdefault(name, []).append(_CarriedBlock(rows, buffer))

    def append_equal(self, name: str, rows: Interval, source: Interval) -> None:
        """Add rows that no block has yet and that equal those of the block ``source``; both blocks share its buffer."""
        buffer = next(block.buffer for block in self.blocks[name] if block.rows == source)
        self.append(name, rows, buffer)

    def retain(self, state: RowsByValue) -> None:
        """Retain the blocks of a state."""
        for name, rows in state.items():
            for block in self._intersecting(name, rows):
                block.num_states += 1

    def release(self, state: RowsByValue) -> None:
        """Release the blocks of a state; those of no other state are dropped."""
        for name, rows in state.items():
            for block in self._intersecting(name, rows):
                block.num_states -= 1
            self.blocks[name] = [block for block in self.blocks.get(name, ()) if block.num_states > 0]

    def advance(self, changes: Iterable[RowsChange]) -> None:
        """Retain the blocks of the next state and release those of a state, given the changes of the carried rows between them."""
        for name, before, after in changes:
            if self._recount(name, before, after):
                self.blocks[name] = [block for block in self.blocks[name] if block.num_states > 0]

    def _recount(self, name: str, before: tuple[int, int], after: tuple[int, int]) -> bool:
        """Count one state less for blocks of some rows, and one more for those of others; true if no state needs some block."""
        (old_start, old_stop), (start, stop) = before, after
        is_unused = False
        for block in self.blocks.get(name, ()):
            first, end = block.rows.start, block.rows.stop
            block.num_states += (first < stop and start < min(end, stop)) - (first < old_stop and old_start < min(end, old_stop))
            is_unused = is_unused or block.num_states <= 0
        return is_unused

    def slices(self, name: str, rows: Interval) -> list[tuple[int, Interval, Buffer]]:
        """Slices that make up ``rows``: offset in the gathered rows, rows within the block, buffer of the block."""
        slices = []
        for block in self._intersecting(name, rows):
            start, stop, first = max(block.rows.start, rows.start), min(block.rows.stop, rows.stop), block.rows.start
            slices.append((start - rows.start, Interval(start - first, stop - first), block.buffer))
        return slices

    def fork(self) -> CarryCache:
        """Copy that shares the buffers and counts its states by itself."""
        blocks = {name: [_CarriedBlock(b.rows, b.buffer, b.num_states) for b in blocks] for name, blocks in self.blocks.items()}
        return CarryCache(blocks, self.selection)

    def _intersecting(self, name: str, rows: Interval) -> list[_CarriedBlock]:
        return [block for block in self.blocks.get(name, ()) if block.rows.overlaps(rows)]
