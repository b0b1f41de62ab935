"""Frontier propagation: computed rows and live rows of every value after each strip of a sweep.

The formulas apply to single rows, which give the number of strips, and to arrays over all strips. Values with equal frontiers share their
array, such as the result of a per-pixel operator and its operand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sft.analysis.ir.access import AxisMap
from sft.analysis.ir.graph import Node
from sft.analysis.ir.ops import Operator
from sft.common.interval import Interval

__all__ = ["FrontierOperator", "operand_reads", "propagate_frontiers", "swept_rows"]

Rows = npt.NDArray[np.int64]
#: One row, or one for each strip.
_RowsT = TypeVar("_RowsT", int, Rows)

_EMPTY = Interval(0, 0)


def swept_rows(sources: Sequence[str], computed: Mapping[str, Interval], extents: Mapping[str, int], height: int) -> Interval:
    """Rows of the tallest source that a sweep advances over, so that every source is read from its first required row to its last."""
    swept = _EMPTY
    for name in sources:
        rows, extent = computed[name], extents[name]
        swept = swept.hull(Interval(rows.start * height // extent, -(-rows.stop * height // extent)) if rows else _EMPTY)
    # Rows that read only padding are computed, too.
    return swept or (Interval(0, height) if any(computed.values()) else _EMPTY)


@dataclass(frozen=True, slots=True)
class FrontierOperator:
    """An operator's access to rows, as needed for frontiers.

    Attributes:
        name: the operator.
        operands: the streamed values that it reads, each once.
        access: access map of its rows; the identity for a reduction, which reads every row once.
        reduces: True if it is a reduction.
        is_phased: see :class:`sft.analysis.ir.ops.Operator`.
    """

    name: str
    operands: tuple[str, ...]
    access: AxisMap
    reduces: bool
    is_phased: bool

    @classmethod
    def of(cls, node: Node, row: Operator, streamed: Collection[str]) -> FrontierOperator:
        """The operator of a node with its row of the table."""
        operands = tuple(dict.fromkeys(operand for operand in node.operands if operand in streamed))
        reduces = row.role == "reduce"
        return cls(node.name, operands, AxisMap() if reduces else row.access(node, 0), reduces, row.is_phased)

    def frontier(self, least: _RowsT) -> _RowsT:
        """Its frontier, given the least frontier of its operands."""
        access = self.access
        scaled = least if access.divisor == 1 else access.divisor * least
        if access.scale == 1:
            return scaled - access.last if access.last else scaled
        return (scaled - access.last - 1) // access.scale + 1

    def window(self, frontier: Mapping[str, Rows]) -> tuple[Rows, Rows]:
        """First row of each operand that its rows not yet computed read, and end row that each strip reads."""
        if self.reduces:
            front = np.minimum.reduce([frontier[operand] for operand in self.operands])
            return front, front[1:]
        access, out = self.access, frontier[self.name]
        if access.is_identity:
            return out, out[1:]
        first, last = access.scale * out + access.first, access.scale * out[1:] + (access.last - access.scale)
        if access.divisor > 1:
            first, last = first // access.divisor, last // access.divisor
        return first, np.where(out[1:] > out[:-1], last + 1, first[:-1])


def propagate_frontiers(
    operators: Sequence[FrontierOperator],
    extents: Mapping[str, int],
    sources: Sequence[str],
    computed: Mapping[str, Interval],
    swept: Interval,
    strip: int,
) -> dict[str, Rows]:
    """Unclipped frontiers after 0, 1, 2, ... strips, until every value is complete. Values with equal frontiers share an array."""
    height = max(extents[name] for name in sources)

    def advanced(position: _RowsT) -> dict[str, _RowsT]:
        front = {name: -((-position * extents[name]) // height) for name in sources}
        # Sources are untiled, so a complete one never delays its readers.
        for operator in operators:
            if operator.reduces:
                continue
            least = front[operator.operands[0]]
            for operand in operator.operands[1:]:
                if front[operand] is not least:
                    least = _minimum_frontier(least, front[operand])
            front[operator.name] = operator.frontier(least)
        return front

    # Frontiers are monotone, so the last strip alone gives the number of strips.
    num_steps = -(-len(swept) // strip)
    while any(front < computed[name].stop for name, front in advanced(swept.start + num_steps * strip).items()):
        num_steps += max(1, num_steps // 8)
    front = advanced(swept.start + np.arange(num_steps + 1, dtype=np.int64) * strip)
    ends = {(id(values), computed[name].stop): values for name, values in front.items()}
    last = max((int(np.searchsorted(values, stop)) for (_, stop), values in ends.items()), default=0)
    # Values that read only padding are complete before the first strip, and computed in it.
    end = max(last, 1) + 1 if swept else 1
    trimmed = {id(values): values[:end] for values in front.values()}
    return {name: trimmed[id(values)] for name, values in front.items()}


def _minimum_frontier(first: _RowsT, second: _RowsT) -> _RowsT:
    return min(first, second) if isinstance(first, int) else np.minimum(first, second)


def operand_reads(
    operator: FrontierOperator,
    window: tuple[Rows, Rows],
    frontier: Mapping[str, Rows],
    operand: str,
    computed: Mapping[str, Interval],
    owned: Mapping[str, Interval],
) -> tuple[Rows, Rows, Rows]:
    """First and end row read in each strip, borders ignored, and the first row still needed at each boundary."""
    (first, last), available = window, frontier[operand]
    if operator.reduces:  # every row once, as soon as all operands have it
        rows = owned.get(operand, _EMPTY)
        front = np.clip(first, rows.start, rows.stop)
        return front[:-1], front[1:], np.where(front >= rows.stop, available, np.minimum(front, available))
    out = frontier[operator.name]
    if out is available and operator.access.is_identity:
        return first[:-1], last, available
    # A complete reader needs no further rows; an incomplete one needs rows from `first` on.
    needed = np.where(out >= computed[operator.name].stop, available, np.maximum(first, 0))
    return first[:-1], last, np.minimum(needed, available)
