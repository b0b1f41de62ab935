"""One strip of a run: which rows every value gains, holds, reads and keeps.

All rows are global: those of the whole image at that layer, whatever strip or band they are computed in.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from sft.analysis.interval import Interval

__all__ = ["RowBand", "NodeRows", "OperandRead", "StripStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBand:
    """The part of an image that one of several walks is for, its halo above and below included.

    Attributes:
        computed: for each value the rows that the walk computes (of a source: reads); values that it has nothing to do with have none.
        own: for each result, and for each value that a reduction takes, the rows that are this walk's and no other's.
    """

    computed: Mapping[str, Interval]
    own: Mapping[str, Interval]


@dataclass(frozen=True, slots=True)
class OperandRead:
    """What one operator reads of one operand in one step.

    Attributes:
        operand: the value read.
        rows: its rows, inside the image.
        pad_low: border rows above them.
        pad_high: border rows below them.
        phase: where the first row computed stands among those that one row of the operand is spread to, for operators that ask for it.
    """

    operand: str
    rows: Interval
    pad_low: int
    pad_high: int
    phase: int = 0

    @classmethod
    def clipped(cls, operand: str, span: Interval, extent: int, phase: int = 0) -> OperandRead:
        """The read of ``span``, borders ignored, of a value of ``extent`` rows.

        >>> OperandRead.clipped("x", Interval(-1, 8), 6)
        Read(operand='x', rows=Interval(start=0, stop=6), pad_low=1, pad_high=2, phase=0)
        """
        rows = span.clip(extent)
        pad_low = min(max(0, -span.start), len(span))
        return cls(operand=operand, rows=rows, pad_low=pad_low, pad_high=len(span) - pad_low - len(rows), phase=phase)


@dataclass(frozen=True, slots=True)
class NodeRows:
    """One value in one step.

    Attributes:
        name: the value.
        new: rows computed in this step (for an input of the run: rows that arrive).
        held: rows that are at hand during the step: carried ones, then new ones.
        kept: rows carried into the next step.
        wanted: the part of ``new`` that is this step's own: all of it, unless neighbouring steps compute it too. Only this part is
            written out, takes a gradient from outside, and is reduced.
        reads: what the operator reads, one entry for each streamed operand.
    """

    name: str
    new: Interval
    held: Interval
    kept: Interval
    wanted: Interval
    reads: tuple[OperandRead, ...]

    @property
    def carried(self) -> Interval:
        """Rows that earlier steps left."""
        return Interval(self.held.start, self.new.start)

    @property
    def appended(self) -> Interval:
        """Rows of this step that later steps need: what the row store gains."""
        return Interval(max(self.kept.start, self.new.start), self.kept.stop)


@dataclass(frozen=True)
class StripStep:
    """One strip: what every value gains, holds and keeps, in global rows."""

    index: int
    nodes: tuple[NodeRows, ...]

    def __getitem__(self, name: str) -> NodeRows:
        return self._by_name[name]

    @cached_property
    def signature(self) -> tuple[Hashable, ...]:
        """For each value what the program depends on of it: positions count from each value's own first row."""
        first = {node.name: node.held.start for node in self.nodes}
        return tuple(
            (
                (len(node.new), len(node.held), len(node.kept)),
                node.wanted.shift(-node.new.start) if node.wanted else None,
                tuple((read.rows.shift(-first[read.operand]), read.pad_low, read.pad_high, read.phase) for read in node.reads),
            )
            for node in self.nodes
        )

    @cached_property
    def _by_name(self) -> dict[str, NodeRows]:
        return {node.name: node for node in self.nodes}
