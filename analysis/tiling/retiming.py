"""Which operators wait for the phase that reads them, so that less crosses the barriers between.

What is made in one phase and read behind a barrier is kept whole. An operator that could run in an early phase is better left to a later
one where it reads less than it makes: the windows of ``F.unfold`` that a norm's gate is multiplied with, the scale and shift that SPADE
makes of a map of labels, an image that is enlarged for a sum. The image, the labels and the small image cross instead.

An operator runs at the latest in the phase of its first reader, at the earliest where its operands allow (the level of
:mod:`sft.analysis.tiling.phases`). Of all levels between the least bytes would be a flow in a network (Leiserson and Saxe, 1991, *Retiming
synchronous circuitry*, Section 8); few operators have a choice, so each of these is asked in turn, last first, whether it should go to its
latest phase with some of what it alone is made of. Ties stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any

import sympy as sp

from sft.analysis.ir.graph import Graph

__all__ = ["retime"]

#: What stands for the extents of images of any size.
_TYPICAL_PX = 4096
#: Most operators that move together.
_MAX_GROUP_SIZE = 64


def retime(
    graph: Graph,
    level: Mapping[str, int],
    runs: Mapping[str, bool],
    images: frozenset[str],
    in_strips: Callable[[str], Collection[str]],
) -> dict[str, int]:
    """The level of each value once operators have moved.

    Args:
        graph: the graph.
        level: the earliest phase of each value.
        runs: whether an operator runs in its phase's streamed run; else on whole tensors, behind it.
        images: the values that are images; beside these all others are small.
        in_strips: what an operator reads in strips.
    """
    delays = _Retiming(graph, dict(level), runs, images, in_strips)
    for node in reversed(graph.operators):
        if delays.may_move(node.name):
            delays.consider(node.name)
    return delays.level


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
        """Whether a value is made in strips, or of small values, and read in the model alone."""
        if name not in self._runs or self.level[name] < 0 or name in self._results or not self.graph.users[name]:
            return False
        return self._runs[name] or self._images.isdisjoint((name, *self.graph[name].operands))

    def consider(self, name: str) -> None:
        """Move an operator, and some of those that only it and its like read, to its latest phase if less crosses then."""
        latest = min(self._needed_by(user, name) for user in self.graph.users[name])
        if latest <= self.level[name]:
            return
        group, best, least = {name: None}, 0, 0.0
        while True:
            saved = self._change(group, latest)
            if saved < least:
                best, least = len(group), saved
            more = self._next(group, latest)
            if not more:
                break
            group.update(more)
        self.level.update(dict.fromkeys(list(group)[:best], latest))

    def _needed_by(self, user: str, name: str) -> int:
        """The last phase in which a value may be made for a reader."""
        waits = self._runs[user] and name not in self._in_strips(user)
        return self.level[user] - waits

    def _next(self, group: Collection[str], latest: int) -> dict[str, None]:
        """The largest value that the group reads and that would cross barriers for it, if it may move, with all that must move then."""
        operands = dict.fromkeys(operand for name in group for operand in self.graph[name].operands if operand not in group)
        for name in sorted(operands, key=self._bytes, reverse=True):
            together = self._with_readers(name, group, latest)
            if together and len(group) + len(together) <= _MAX_GROUP_SIZE:
                return together
        return {}

    def _with_readers(self, name: str, group: Collection[str], latest: int) -> dict[str, None]:
        """A value and those of its readers, and of theirs, that are too early for its move; empty where one of them has to stay."""
        found, waiting = {name: None}, [name]
        while waiting:
            moved = waiting.pop()
            if not self.may_move(moved) or self.level[moved] >= latest or len(found) > _MAX_GROUP_SIZE:
                return {}
            early = [user for user in self.graph.users[moved] if user in group or self._needed_by(user, moved) < latest]
            if any(self._runs[user] and moved not in self._in_strips(user) for user in early):
                return {}  # it would have to be there a phase before
            early = [user for user in early if user not in group]
            waiting += [user for user in early if user not in found]
            found.update(dict.fromkeys(early))
        return found

    def _change(self, group: Collection[str], latest: int) -> float:
        """How many bytes, times barriers crossed, a move of the group adds; negative where it saves some."""
        moved = dict.fromkeys(group, latest)
        values = dict.fromkeys((*group, *(operand for name in group for operand in self.graph[name].operands)))
        return sum(self._bytes(name) * (self._crossed(name, moved) - self._crossed(name, {})) for name in values)

    def _crossed(self, name: str, moved: Mapping[str, int]) -> int:
        """How many barriers a value crosses, with some operators moved."""
        if name in self._results:
            return 0  # held to the end in any case
        made = moved.get(name, self.level[name])
        return max(moved.get(user, self.level[user]) for user in self.graph.users[name]) - made

    def _bytes(self, name: str) -> float:
        """The bytes of an image that operators make; inputs are there in any case."""
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
