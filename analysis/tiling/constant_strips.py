"""Constant strips: strips that compute the same bits as their neighbour, and need not run.

A strip's program reads rows of the sources, the rows carried in, and untiled values, which are fixed during a sweep. So strip ``i``
computes the same as strip ``i - 1``, bit for bit, if

(a) both have the same program,
(b) they read equal rows of the sources, and
(c) equal rows are carried into them.

The caller knows the image and gives the strips for which (a) and (b) hold: the *alike* strips. Then (c) follows without a look at any
activation. Consider a stretch of alike strips that begins with strip ``t``; the rows carried into ``t`` are arbitrary. A row ``o`` of value
``v`` computed in the stretch reads, by the access maps, no row of its operands above ``lo(o)``. So it equals its counterpart in the
previous strip if ``o >= C_v`` with

    C_v = max(F_v[t], ceil((divisor * C_w - first) / scale) for each operand w that is computed, not read),

and (c) holds for strip ``i`` as soon as all rows carried into it are at ``C_v`` or below: ``K_v[i] >= C_v`` (``F`` and ``K`` are the
frontier and the first row kept, see :mod:`sft.analysis.tiling.strips`). Padding needs no special case: strips that read it have other
programs, and the rows they left are among those carried into ``t``.

In the backward pass the gradients of carried rows take the role of the rows. A stretch ends with a strip ``u`` that is like ``u + 1``; the
gradient that ``u + 1`` passes to it is arbitrary. A row of ``v`` receives a contribution from a row ``o`` of a reader only at ``lo(o)`` or
below, so its gradient equals its counterpart's if it is above

    D_v = min(K_v[u + 1], lo_w(D_w) for each reader w of which rows from D_w on are computed in the stretch),

and strip ``i`` repeats strip ``i + 1`` as soon as the rows carried between them do: ``F_v[i + 1] <= D_v``.

Both bounds are computed once for each stretch. They give the number of constant strips required above (below) a strip before it can be
skipped: as many as its receptive field reaches over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import numpy as np

from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.graph import Graph
from sft.analysis.ir.ops import Operator
from sft.common.array_types import BoolArray, IntArray

__all__ = ["StripRanges", "constant_strips_backward", "constant_strips_forward", "is_constant_per_strip"]


class StripRanges(Protocol):
    """The parts of a schedule that decide repetition: the rows available and the rows kept before each strip."""

    @property
    def sources(self) -> tuple[str, ...]: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def frontier(self) -> Mapping[str, IntArray]: ...
    @property
    def kept(self) -> Mapping[str, IntArray]: ...


def is_constant_per_strip(same: BoolArray, start: IntArray, stop: IntArray) -> BoolArray:
    """For each strip: true if all rows that it and the previous strip read are equal.

    >>> same = np.array([False, True, True, False, True])  # rows 0 to 2 are equal, and rows 3 and 4
    >>> is_constant_per_strip(same, np.array([0, 1, 2, 3]), np.array([2, 3, 4, 5])).tolist()
    [False, True, False, False]

    Args:
        same: for each row of a source: true if it equals the row above it.
        start: the first row that each strip reads.
        stop: the end row (exclusive); equal to ``start`` for a strip that reads none.
    """
    changes = np.concatenate([[0], np.cumsum(~same)])
    first = np.minimum(start[1:], start[:-1]) + 1
    last = np.maximum(stop[1:], stop[:-1])
    end = len(same)  # empty reads may start here
    is_constant = (last <= first) | (changes[np.minimum(last, end)] == changes[np.minimum(first, end)])
    return np.concatenate([[False], is_constant])


def constant_strips_forward(
    graph: Graph, rows: Mapping[str, Operator], streamed: Collection[str], schedule: StripRanges, alike: BoolArray
) -> BoolArray:
    """Flags of the strips that compute the same rows as the previous strip.

    Args:
        graph: the graph.
        rows: the operator table's row of each operator.
        streamed: the values that are streamed in strips.
        schedule: the strips.
        alike: for each strip: true if its program, and the source rows that it reads, equal those of the previous strip.
    """
    is_constant = np.zeros(len(alike), dtype=bool)
    computed = [name for name in schedule.names if name in streamed and name not in schedule.sources]
    for start, stop in _true_runs(alike):
        same_from: dict[str, int] = {}
        is_settled = np.ones(stop - start, dtype=bool)
        for name in computed:
            node, first = graph[name], int(schedule.frontier[name][start])
            access = rows[name].access(node, ROWS)
            for operand in node.operands:
                if operand in same_from:
                    first = max(first, -((access.first - access.divisor * same_from[operand]) // access.scale))
            same_from[name] = first
            kept, front = schedule.kept[name][start:stop], schedule.frontier[name][start:stop]
            is_settled &= (kept >= front) | (kept >= first)
        is_constant[start:stop] = is_settled
    return is_constant


def constant_strips_backward(
    graph: Graph, rows: Mapping[str, Operator], streamed: Collection[str], schedule: StripRanges, alike: BoolArray
) -> BoolArray:
    """Flags of the strips with the same gradients as the next strip.

    Args:
        graph: the graph.
        rows: the operator table's row of each operator.
        streamed: the values that are streamed in strips and need a gradient.
        schedule: the strips.
        alike: for each strip: true if its program, all its forward values, and its gradients from outside equal those of the next strip.
    """
    is_constant = np.zeros(len(alike), dtype=bool)
    computed = [name for name in schedule.names if name in streamed and name not in schedule.sources]
    for start, stop in _true_runs(alike):
        same_to = {name: int(schedule.kept[name][stop]) for name in computed}
        is_settled = np.ones(stop - start, dtype=bool)
        for name in reversed(computed):
            node, last = graph[name], same_to[name]
            kept, front = schedule.kept[name][start + 1 : stop + 1], schedule.frontier[name][start + 1 : stop + 1]
            is_settled &= (kept >= front) | (front <= last)
            if last >= schedule.frontier[name][stop]:
                continue  # all its rows computed in the stretch have equal gradients
            access = rows[name].access(node, ROWS)
            for operand in node.operands:
                if operand in same_to:
                    same_to[operand] = min(same_to[operand], access.low(last))
        is_constant[start:stop] = is_settled
    return is_constant


def _true_runs(flags: BoolArray) -> Iterator[tuple[int, int]]:
    """Start and stop index of each run of true flags."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
