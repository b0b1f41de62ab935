"""Linear programmes of the fluid offloading problem, one for each offload set: an independent reference for the label search.

Time is cut at the operations, in their fixed order: a wait before each, then the operation. In each of these intervals the link carries
some bytes out and some in. Memory is linear between the cuts, so it is checked at the start and at the end of every operation. In an
ordered schedule all copies out precede all copies in: up to one interval bytes go out, and from it on they come in. All intervals are
tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from scipy.optimize import linprog

from sft.solvers.edges import Edge

__all__ = ["fluid_optimum"]

_WAIT, _OUT_WAITING, _OUT, _IN_WAITING, _IN, _GONE_START, _GONE_END = range(7)
_NUM = 7


def fluid_optimum(
    paths: Sequence[Sequence[Edge]], *, start_bytes: int, budget_bytes: int, rate: float
) -> tuple[float | None, tuple[Edge, ...], tuple[bool, ...]]:
    """The least time over all paths and all offload sets, with one that takes it; the time is None if nothing fits.

    Args:
        paths: edges in order, the loss as the last of each.
        start_bytes: bytes on the device at the start.
        budget_bytes: the memory.
        rate: the bytes a second of a half-duplex link.
    """
    programmes: list[tuple[float, int, Sequence[Edge], tuple[bool, ...], _Programme]] = []
    for path in paths:
        for leaves in product([False, True], repeat=len(path) - 1):
            programme = _Programme(path, (*leaves, False), start_bytes, budget_bytes, rate)
            seconds = programme.least_seconds()
            if seconds is not None:
                programmes.append((seconds, len(programmes), path, leaves, programme))
    best: float | None = None
    way: tuple[tuple[Edge, ...], tuple[bool, ...]] = ((), ())
    for least, _, path, leaves, programme in sorted(programmes, key=lambda item: item[:2]):
        if best is not None and least >= best - 1e-9:
            break
        for turn in range(2 * (2 * len(path) - 1)) if any(leaves) else (None,):
            seconds = programme.least_seconds(turn)
            if seconds is not None and (best is None or seconds < best - 1e-9):
                best, way = seconds, (tuple(path), leaves)
    return best, *way


class _Programme:
    """Linear programme of one path and one offload set."""

    def __init__(self, edges: Sequence[Edge], leaves: Sequence[bool], start_bytes: int, budget_bytes: int, rate: float) -> None:
        rows, limits = _constraints(edges, leaves, start_bytes, budget_bytes, rate)
        self._num_ops = 2 * len(edges) - 1
        self._rows, self._limits = np.array(rows), np.array(limits)
        self._cost = np.zeros(self._num_ops * _NUM)
        self._cost[_WAIT::_NUM] = 1.0
        self._compute_seconds = sum(edge.forward_seconds + edge.backward_seconds for edge in edges)

    def least_seconds(self, turn: int | None = None) -> float | None:
        """Least time, None if it does not fit; ``turn`` is the interval (two to an operation) in which the link changes direction; None
        allows both directions at any time.
        """
        bounds: list[tuple[float, float | None]] = [(0, None)] * len(self._cost)
        for interval in range(2 * self._num_ops) if turn is not None else ():
            op, run = divmod(interval, 2)
            if interval < (turn or 0):
                bounds[op * _NUM + (_IN_WAITING, _IN)[run]] = (0, 0)
            if interval > (turn or 0):
                bounds[op * _NUM + (_OUT_WAITING, _OUT)[run]] = (0, 0)
        solution = linprog(self._cost, A_ub=self._rows, b_ub=self._limits, bounds=bounds, method="highs")
        return float(solution.fun) + self._compute_seconds if solution.success else None


def _constraints(
    edges: Sequence[Edge], leaves: Sequence[bool], start_bytes: int, budget_bytes: int, rate: float
) -> tuple[list[np.ndarray], list[float]]:
    """``rows @ variables <= limits``."""
    n = len(edges)
    num_ops = 2 * n - 1  # forwards, the loss, backwards
    present = [start_bytes]
    for edge in edges:
        present.append(present[-1] + edge.saved_bytes + edge.output_bytes)
    inputs = [edge.input_bytes if away else 0 for edge, away in zip(edges, leaves, strict=True)]
    saves = [edge.saved_bytes if away else 0 for edge, away in zip(edges, leaves, strict=True)]
    total = sum(inputs) + sum(saves)
    rows: list[np.ndarray] = []
    limits: list[float] = []

    def at(op: int, kind: int) -> int:
        return op * _NUM + kind

    def add(terms: Sequence[tuple[int, float]], limit: float) -> None:
        row = np.zeros(num_ops * _NUM)
        for place, factor in terms:
            row[place] += factor
        rows.append(row)
        limits.append(limit)

    def moved(op: int, kinds: tuple[int, int], *, end: bool) -> list[tuple[int, float]]:
        """All bytes of a direction until the start or the end of an operation."""
        terms = [(at(k, kind), 1.0) for k in range(op) for kind in kinds]
        return [*terms, (at(op, kinds[0]), 1.0), *([(at(op, kinds[1]), 1.0)] if end else [])]

    def minus(terms: list[tuple[int, float]]) -> list[tuple[int, float]]:
        return [(place, -factor) for place, factor in terms]

    outs, ins = (_OUT_WAITING, _OUT), (_IN_WAITING, _IN)
    for op in range(num_ops):
        number = op if op < n else 2 * n - 2 - op
        edge, is_forward = edges[number], op < n
        seconds = edge.forward_seconds if is_forward else edge.backward_seconds
        need = present[number] + (edge.forward_need_bytes if is_forward else edge.backward_need_bytes)
        add([(at(op, _OUT_WAITING), 1), (at(op, _IN_WAITING), 1), (at(op, _WAIT), -rate)], 0)
        add([(at(op, _OUT), 1), (at(op, _IN), 1)], rate * seconds)
        for end, gone in ((False, _GONE_START), (True, _GONE_END)):
            out, back = moved(op, outs, end=end), moved(op, ins, end=end)
            add([(at(op, gone), 1.0), *minus(out)], 0)
            if is_forward:  # the operation reads its input, which is therefore still there, and has saved nothing yet
                made = sum(inputs[: number + 1]) + sum(saves[:number])
                add(out, made)
                add([(at(op, gone), 1.0)], made - inputs[number])
            else:
                add(minus(back), -(sum(inputs[number:]) + sum(saves[number:])))
                add([(at(op, gone), 1.0)], total)
            add([(at(op, gone), -1.0), *back], budget_bytes - need)
            add([*back, *minus(out)], 0)
    last = num_ops - 1
    add(minus(moved(last, outs, end=False)), -total)
    return rows, limits
