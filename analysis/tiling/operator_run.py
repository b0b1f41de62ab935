"""Operator run: consecutive operators of a graph, with their rows of the operator table and the values that are streamed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sft.analysis.ir.graph import Graph
from sft.analysis.ir.ops import Operator

__all__ = ["OperatorRun"]


@dataclass(frozen=True, kw_only=True)
class OperatorRun:
    """Consecutive operators of a graph: streamed ones and reductions, which one sweep may fuse.

    Attributes:
        graph: the graph.
        names: the operators, in the graph's order.
        rows: the operator table's row of each operator.
        streamed: the values that are streamed in strips.
    """

    graph: Graph
    names: tuple[str, ...]
    rows: Mapping[str, Operator]
    streamed: Collection[str]

    def of(self, names: Sequence[str]) -> OperatorRun:
        """The run of other operators of the same graph."""
        return replace(self, names=tuple(names))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The streamed values that it reads from outside, in order."""
        return self.graph.sources(self.names, self.streamed)

    @cached_property
    def results(self) -> tuple[str, ...]:
        """Its streamed values that are outputs of the graph, or that operators outside read, in order."""
        return tuple(name for name in self.graph.live_out(self.names) if name in self.streamed)

    def operands(self, name: str) -> tuple[str, ...]:
        """The streamed operands of one of its operators."""
        return self.rows[name].streamed_operands(self.graph[name], self.streamed)

    @property
    def owned(self) -> tuple[str, ...]:
        """The values of which each tile or band owns rows: results, and operands of reductions, of which each row counts once."""
        reduced = (operand for name in self.names if self.rows[name].role == "reduce" for operand in self.operands(name))
        return tuple(dict.fromkeys((*self.results, *reduced)))
