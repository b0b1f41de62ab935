"""Carried rows, stored once.

Consecutive states of a walk overlap wherever a value's rows are carried over several strips (a skip connection). Rows are therefore
kept in blocks, each holding rows that no earlier block holds, and a state is only a set of intervals: the blocks that intersect it
are held for it and dropped with the last state that needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sft.analysis.tiling.constant_strips import BoolArray
from sft.common.interval import Interval
from sft.runtime.machine import Buffer

__all__ = ["CarryCache"]

RowsByValue = Mapping[str, Interval]


@dataclass(slots=True)
class _CarriedBlock:
    rows: Interval
    handle: Buffer
    holders: int = 0


@dataclass(slots=True)
class CarryCache:
    """Blocks of carried rows by value, in row order.

    Attributes:
        blocks: by value.
        repeats: for each strip of the walk whether it makes what the strip before it made; ``None`` where all are run.
    """

    blocks: dict[str, list[_CarriedBlock]] = field(default_factory=dict)
    repeats: BoolArray | None = None

    def append(self, name: str, rows: Interval, handle: Buffer) -> None:
        """Add rows that no block holds yet."""
        self.blocks.setdefault(name, []).append(_CarriedBlock(rows, handle))

    def share(self, name: str, rows: Interval, like: Interval) -> None:
        """Add rows that no block holds yet and that equal those of the block that holds ``like``, which stands for both from now on."""
        handle = next(block.handle for block in self.blocks[name] if block.rows == like)
        self.append(name, rows, handle)

    def hold(self, state: RowsByValue) -> None:
        """Keep what a state needs."""
        for name, rows in state.items():
            for block in self._touching(name, rows):
                block.holders += 1

    def release(self, state: RowsByValue) -> None:
        """Drop what only this state needed."""
        for name, rows in state.items():
            for block in self._touching(name, rows):
                block.holders -= 1
            self.blocks[name] = [block for block in self.blocks.get(name, ()) if block.holders > 0]

    def pieces(self, name: str, rows: Interval) -> list[tuple[int, Interval, Buffer]]:
        """What to copy to gather ``rows``: offset in the gathered rows, rows within the block, block."""
        found = []
        for block in self._touching(name, rows):
            part = block.rows.intersect(rows)
            found.append((part.start - rows.start, part.shift(-block.rows.start), block.handle))
        return found

    def fork(self) -> CarryCache:
        """A store with the same blocks whose holders are counted apart."""
        blocks = {n: [_CarriedBlock(b.rows, b.handle, b.holders) for b in blocks] for n, blocks in self.blocks.items()}
        return CarryCache(blocks, self.repeats)

    def _touching(self, name: str, rows: Interval) -> list[_CarriedBlock]:
        return [block for block in self.blocks.get(name, ()) if block.rows.intersect(rows)]
