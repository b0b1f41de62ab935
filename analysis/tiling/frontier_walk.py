"""How far a walk over strips of rows gets: the frontier of every value after each strip, and the rows that are still needed.

Single numbers tell how many strips a walk takes, arrays over them the rest. Values that are equally far share their arrays, as those of an
operator that computes pixel by pixel and of what it reads.
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

__all__ = ["FrontierOperator", "operand_reads", "propagate_frontiers", "walked_rows"]

Rows = npt.NDArray[np.int64]
#: One row, or one for each step.
_RowsT = TypeVar("_RowsT", int, Rows)

_NOTHING = Interval(0, 0)


def walked_rows(sources: Sequence[str], computed: Mapping[str, Interval], extents: Mapping[str, int], height: int) -> Interval:
    """The rows of the tallest source that a walk advances over, so that every source is read from its first row to its last."""
    walked = _NOTHING
    for name in sources:
        part, extent = computed[name], extents[name]
        walked = walked.hull(Interval(part.start * height // extent, -(-part.stop * height // extent)) if part else _NOTHING)
    # Rows that read nothing but padding are computed, too.
    return walked or (Interval(0, height) if any(computed.values()) else _NOTHING)


@dataclass(frozen=True, slots=True)
class FrontierOperator:
    """An operator as a walk sees it.

    Attributes:
        name: the operator.
        operands: the streamed values that it reads, each once.
        access: which rows of them; of a reduction, which takes every row once, the identity.
        reduces: whether it is a reduction.
        is_phased: see :class:`Read`.
    """

    name: str
    operands: tuple[str, ...]
    access: AxisMap
    reduces: bool
    is_phased: bool

    @classmethod
    def of(cls, node: Node, row: Operator, streamed: Collection[str]) -> FrontierOperator:
        """An operator with its row of the table."""
        operands = tuple(dict.fromkeys(operand for operand in node.operands if operand in streamed))
        reduces = row.role == "reduce"
        return cls(node.name, operands, AxisMap() if reduces else row.access(node, 0), reduces, row.is_phased)

    def frontier(self, least: _RowsT) -> _RowsT:
        """Its frontier where all that it reads has come so far."""
        access = self.access
        found = least if access.divisor == 1 else access.divisor * least
        if access.scale == 1:
            return found - access.last if access.last else found
        return (found - access.last - 1) // access.scale + 1

    def window(self, frontier: Mapping[str, Rows]) -> tuple[Rows, Rows]:
        """The first row that what is not yet computed reads of each operand, and the row behind the last that each step reads."""
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
    streamed: frozenset[str],
    extents: Mapping[str, int],
    sources: Sequence[str],
    computed: Mapping[str, Interval],
    walked: Interval,
    strip: int,
) -> dict[str, Rows]:
    """Unclipped frontiers after 0, 1, 2, ... strips, until every value is complete; values that are equally far share an array."""
    height = max(extents[name] for name in sources)

    def advanced(position: _RowsT) -> dict[str, _RowsT]:
        front = {name: -((-position * extents[name]) // height) for name in sources}
        # Sources are whole, so one that is complete never holds its readers back.
        for operator in operators:
            if operator.reduces:
                continue
            least = front[operator.operands[0]]
            for operand in operator.operands[1:]:
                if front[operand] is not least:
                    least = _minimum_frontier(least, front[operand])
            front[operator.name] = operator.frontier(least)
        return front

    # Frontiers never fall back: how many strips it takes is found with the last one alone.
    num_steps = -(-len(walked) // strip)
    while any(front < computed[name].stop for name, front in advanced(walked.start + num_steps * strip).items()):
        num_steps += max(1, num_steps // 8)
    front = advanced(walked.start + np.arange(num_steps + 1, dtype=np.int64) * strip)
    ends = {(id(values), computed[name].stop): values for name, values in front.items()}
    last = max((int(np.searchsorted(values, stop)) for (_, stop), values in ends.items()), default=0)
    # What reads nothing but padding is complete before the first strip, and made in it.
    end = max(last, 1) + 1 if walked else 1
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
    own: Mapping[str, Interval],
) -> tuple[Rows, Rows, Rows]:
    """First and last+1 row read in each step, borders ignored, and the first row still needed at each point."""
    (first, last), behind = window, frontier[operand]
    if operator.reduces:  # every row once, as it comes; of several operands when the last of them is there
        part = own.get(operand, _NOTHING)
        front = np.clip(first, part.start, part.stop)
        return front[:-1], front[1:], np.where(front >= part.stop, behind, np.minimum(front, behind))
    out = frontier[operator.name]
    if out is behind and operator.access.is_identity:
        return first[:-1], last, behind
    # A reader that is complete needs nothing more; one that is not needs rows from `first` on.
    needed = np.where(out >= computed[operator.name].stop, behind, np.maximum(first, 0))
    return first[:-1], last, np.minimum(needed, behind)
