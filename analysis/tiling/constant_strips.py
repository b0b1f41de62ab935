r"""Which strips of a walk do what the strip before them did: the argument by which they need not run.

A strip's program computes from what it reads of the sources, from the rows carried in, and from whole values that stay as they are during a
walk. So strip ``i`` makes what strip ``i - 1`` made, bit for bit, if (a) both have the same program, (b) they read the same of the sources,
and (c) the same rows are carried into them. Somebody who knows the image says where (a) and (b) hold: *alike* strips. Then (c) needs no
look at any activation. Over a stretch of alike strips that begins with strip ``t`` nothing is known of what is carried into ``t``. A row
``o`` of value ``v`` that is computed in the stretch reads, by the access maps, no row of its operands above ``lo(o)``. So it equals its
counterpart in the strip before if ``o >= C_v`` with

    C_v = max(F_v[t], ceil((divisor * C_w - first) / scale) for each operand w that is computed, not read),

and (c) holds for strip ``i`` as soon as all that is carried into it lies at ``C_v`` or below: ``K_v[i] >= C_v`` (``F`` and ``K`` are the
frontier and the first row kept, as in ``schedule``). Padding needs no care: strips that have it in reach have other programs, and what
they left behind is among the rows carried into ``t``.

Backwards the gradients of carried rows take the part of the rows. A stretch ends with a strip ``u`` that is like ``u + 1``, and nothing
is known of the gradient that ``u + 1`` hands to it. A row of ``v`` gets a part from a row ``o`` of a reader only at ``lo(o)`` or
below, so its gradient equals its counterpart's if it lies above

    D_v = min(K_v[u + 1], lo_w(D_w) for each reader w of which rows from D_w on are computed in the stretch),

and strip ``i`` repeats strip ``i + 1`` as soon as the rows carried between them do: ``F_v[i + 1] <= D_v``.

Both bounds are found once for each stretch. They say how many strips a constant region must have above (below) a strip before that one is
left out: as many as its receptive field reaches over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.graph import Graph
from sft.analysis.ir.ops import Operator

__all__ = ["BoolArray", "StripRanges", "constant_strips_backward", "constant_strips_forward", "is_constant_per_strip"]

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


class StripRanges(Protocol):
    """What a schedule says of the rows at hand and the rows kept before each step."""

    @property
    def sources(self) -> tuple[str, ...]: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def frontier(self) -> Mapping[str, IntArray]: ...
    @property
    def kept(self) -> Mapping[str, IntArray]: ...


def is_constant_per_strip(same: BoolArray, start: IntArray, stop: IntArray) -> BoolArray:
    """For each strip whether all rows that it and the strip before it read equal each other.

    >>> same = np.array([False, True, True, False, True])  # rows 0 to 2 are equal, and rows 3 and 4
    >>> is_constant_per_strip(same, np.array([0, 1, 2, 3]), np.array([2, 3, 4, 5])).tolist()
    [False, True, False, False]

    Args:
        same: for each row of a source whether it equals the row above it.
        start: the first row that each strip reads.
        stop: the row behind its last; a strip that reads nothing has the same as ``start``.
    """
    changes = np.concatenate([[0], np.cumsum(~same)])
    first = np.minimum(start[1:], start[:-1]) + 1
    last = np.maximum(stop[1:], stop[:-1])
    end = len(same)  # where strips may stand that read nothing any more
    is_constant = (last <= first) | (changes[np.minimum(last, end)] == changes[np.minimum(first, end)])
    return np.concatenate([[False], is_constant])


def constant_strips_forward(
    graph: Graph, rows: Mapping[str, Operator], streamed: Collection[str], schedule: StripRanges, alike: BoolArray
) -> BoolArray:
    """The strips that make what the strip before them made.

    Args:
        graph: the graph.
        rows: the operator table's row of each operator.
        streamed: the values that come in strips.
        schedule: the strips.
        alike: for each strip whether its program, and what it reads of the sources, are those of the strip before it.
    """
    found = np.zeros(len(alike), dtype=bool)
    own = [name for name in schedule.names if name in streamed and name not in schedule.sources]
    for start, stop in _true_runs(alike):
        same_from: dict[str, int] = {}
        settled = np.ones(stop - start, dtype=bool)
        for name in own:
            node, first = graph[name], int(schedule.frontier[name][start])
            access = rows[name].access(node, ROWS)
            for operand in node.operands:
                if operand in same_from:
                    first = max(first, -((access.first - access.divisor * same_from[operand]) // access.scale))
            same_from[name] = first
            kept, front = schedule.kept[name][start:stop], schedule.frontier[name][start:stop]
            settled &= (kept >= front) | (kept >= first)
        found[start:stop] = settled
    return found


def constant_strips_backward(
    graph: Graph, rows: Mapping[str, Operator], streamed: Collection[str], schedule: StripRanges, alike: BoolArray
) -> BoolArray:
    """The strips whose gradients are those of the strip behind them.

    Args:
        graph: the graph.
        rows: the operator table's row of each operator.
        streamed: the values that come in strips and need a gradient.
        schedule: the strips.
        alike: for each strip whether its program, all that it computes forward, and the gradients that it gets from outside are those of
            the strip behind it.
    """
    found = np.zeros(len(alike), dtype=bool)
    own = [name for name in schedule.names if name in streamed and name not in schedule.sources]
    for start, stop in _true_runs(alike):
        same_to = {name: int(schedule.kept[name][stop]) for name in own}
        settled = np.ones(stop - start, dtype=bool)
        for name in reversed(own):
            node, last = graph[name], same_to[name]
            kept, front = schedule.kept[name][start + 1 : stop + 1], schedule.frontier[name][start + 1 : stop + 1]
            settled &= (kept >= front) | (front <= last)
            if last >= schedule.frontier[name][stop]:
                continue  # none of its rows with another gradient is computed in the stretch
            access = rows[name].access(node, ROWS)
            for operand in node.operands:
                if operand in same_to:
                    same_to[operand] = min(same_to[operand], access.low(last))
        found[start:stop] = settled
    return found


def _true_runs(flags: BoolArray) -> Iterator[tuple[int, int]]:
    """First and last+1 index of each stretch of true ones."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
