"""Retiming: move operators to a later phase if fewer bytes cross the barriers between.

A value computed in one phase and read after a barrier is stored untiled. An operator that could run early should run later if it reads
less than it computes: the windows of ``F.unfold`` that a norm's gate multiplies, SPADE's scale and shift from a label map, an image
upsampled for a sum. Then the image, the labels and the small image cross instead::

    phase 0: u = upsample(x)              phase 0:
    -- barrier: u crosses (4x bytes)      -- barrier: x crosses
    phase 1: y = u * gate                 phase 1: u = upsample(x); y = u * gate

An operator runs at the latest in the phase of its first reader, at the earliest where its operands allow (the level of
:mod:`sft.analysis.tiling.phases`). The optimum over all levels would be a network flow (Leiserson and Saxe, 1991, *Retiming synchronous
circuitry*, Section 8). Few operators have a choice, so a greedy search suffices: each of these, last first, moves to its latest phase
together with some of its exclusive ancestors if that saves bytes. Ties do not move.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any

import sympy as sp

from sft.analysis.ir.graph import Graph

__all__ = ["retime"]

#: Extent that represents images of any size.
_TYPICAL_PX = 4096
#: Largest number of operators that move together.
_MAX_GROUP_SIZE = 64


def retime(
    graph: Graph,
    level: Mapping[str, int],
    runs: Mapping[str, bool],
    images: frozenset[str],
    in_strips: Callable[[str], Collection[str]],
) -> dict[str, int]:
    """The level of each value after retiming.

    Args:
        graph: the graph.
        level: the earliest phase of each value.
        runs: True for an operator in its phase's streamed run; false for one in its tail.
        images: the values that are images; all remaining ones are small in comparison.
        in_strips: the operands that an operator reads in strips.
    """
    retiming = _Retiming(graph, dict(level), runs, images, in_strips)
    for node in reversed(graph.operators):
        if retiming.may_move(node.name):
            retiming.consider(node.name)
    return retiming.level


class _Retiming:
    def __init__(
        self,
        graph: Graph,
        level: dict[str, int],
        runs: Mapping[str, bool],
        images: frozenset[str],
        in_strips: Callable[[str], Collection[str]],
    ) -> None:
        self.graph, self.level, self._runs, self._images, self._in_strips = graph, level, runs, images, in_strips
        self._results = frozenset(graph.results)
        self._num_bytes: dict[str, float] = {}
        self._extents: dict[Any, float] = {}

    def may_move(self, name: str) -> bool:
        """True if a value is computed in strips, or from small values, and only operators of the model read it."""
        if name not in self._runs or self.level[name] < 0 or name in self._results or not self.graph.users[name]:
            return False
        return self._runs[name] or self._images.isdisjoint((name, *self.graph[name].operands))

    def consider(self, name: str) -> None:
        """Move an operator, with ancestors that only the group reads, to its latest phase if fewer bytes cross then."""
        latest = min(self._needed_by(user, name) for user in self.graph.users[name])
        if latest <= self.level[name]:
            return
        group, best, least = {name: None}, 0, 0.0
        while True:
            change = self._change(group, latest)
            if change < least:
                best, least = len(group), change
            addition = self._next(group, latest)
            if not addition:
                break
            group.update(addition)
        self.level.update(dict.fromkeys(list(group)[:best], latest))

    def _needed_by(self, user: str, name: str) -> int:
        """The last phase in which a value may be computed for a reader."""
        waits = self._runs[user] and name not in self._in_strips(user)
        return self.level[user] - waits

    def _next(self, group: Collection[str], latest: int) -> dict[str, None]:
        """The group's largest movable operand that would cross barriers, with all operators that must move along; may be empty."""
        operands = dict.fromkeys(operand for name in group for operand in self.graph[name].operands if operand not in group)
        for name in sorted(operands, key=self._bytes, reverse=True):
            members = self._with_readers(name, group, latest)
            if members and len(group) + len(members) <= _MAX_GROUP_SIZE:
                return members
        return {}

    def _with_readers(self, name: str, group: Collection[str], latest: int) -> dict[str, None]:
        """A value and its direct and indirect readers that are too early for its move; empty if one of them cannot move."""
        members, pending = {name: None}, [name]
        while pending:
            candidate = pending.pop()
            if not self.may_move(candidate) or self.level[candidate] >= latest or len(members) > _MAX_GROUP_SIZE:
                return {}
            early_readers = [user for user in self.graph.users[candidate] if user in group or self._needed_by(user, candidate) < latest]
            if any(self._runs[user] and candidate not in self._in_strips(user) for user in early_readers):
                return {}  # it would have to exist one phase earlier
            early_readers = [user for user in early_readers if user not in group]
            pending += [user for user in early_readers if user not in members]
            members.update(dict.fromkeys(early_readers))
        return members

    def _change(self, group: Collection[str], latest: int) -> float:
        """Bytes times barriers crossed that a move of the group adds; negative if it saves some."""
        moved = dict.fromkeys(group, latest)
        values = dict.fromkeys((*group, *(operand for name in group for operand in self.graph[name].operands)))
        return sum(self._bytes(name) * (self._crossed(name, moved) - self._crossed(name, {})) for name in values)

    def _crossed(self, name: str, moved: Mapping[str, int]) -> int:
        """Number of barriers that a value crosses, with some operators moved."""
        if name in self._results:
            return 0  # stored until the end in any case
        computed_in = moved.get(name, self.level[name])
        return max(moved.get(user, self.level[user]) for user in self.graph.users[name]) - computed_in

    def _bytes(self, name: str) -> float:
        """Bytes of an image that an operator computes; 0 for inputs, which exist in any case."""
        node = self.graph[name]
        if node.kind != "operator" or name not in self._images:
            return 0.0
        if name not in self._num_bytes:
            self._num_bytes[name] = node.itemsize_bytes * prod(map(self._extent, node.shape))
        return self._num_bytes[name]

    def _extent(self, extent: Any) -> float:
        if isinstance(extent, int):
            return float(extent)
        if extent not in self._extents:
            self._extents[extent] = float(extent.xreplace(dict.fromkeys(extent.free_symbols, sp.Integer(_TYPICAL_PX))))
        return self._extents[extent]
