"""The interface of a row of the operator table.

A row describes one family of operators for streaming:

- its streamed operands;
- the access map: the input rows and columns that an output row and column read;
- the output extent;
- the dimensions that survive, for fused-tileable dimensions;
- the reasons for which a use cannot stream.

Rows are symbolic only: the lowering rules in ``sft.lower``, under the same names, execute and differentiate the operators.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from sft.analysis.ir.access import AxisMap, AxisPlacement
from sft.analysis.ir.axes import Axes
from sft.analysis.ir.graph import Graph, Node
from sft.common.interval import Interval

__all__ = ["NextValueSpec", "Operator", "Role", "axis_entry", "symbolic_axis_entry", "untiled_operand_problem"]

#: Flow of rows. ``stream``: rows to rows. ``reduce``: every row is read once, the result is a global value. ``whole``: untiled tensors.
Role = Literal["stream", "reduce", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One row of the table. The defaults describe a pointwise function of a single pixel.

    Attributes:
        name: the family, also the key of its lowering rule.
        role: the flow of rows through the operator, see :data:`Role`.
        is_sized: True if a use of the operator can have further problems that are known only at a concrete size.
        is_phased: True if the computation of a strip depends on the index of its first row among the output rows of one input row.
        is_extra_result: True if the node is a further result of its operand's operator, computed with it, in the same segment.
        keeps_channels: True if a slice of the output's channels needs only the same slice of the input's.
        backward_reads: pair: the derivative reads the streamed operands; the derivative reads the result.
    """

    name: str
    role: Role = "stream"
    is_sized: bool = False
    is_phased: bool = False
    is_extra_result: bool = False
    keeps_channels: bool = True
    backward_reads: tuple[bool, bool] = (True, True)

    def streamed_operands(self, node: Node, streamed: Collection[str]) -> tuple[str, ...]:
        """Operands that are read in strips. All remaining ones (parameters, global values) are read untiled."""
        return tuple(name for name in node.operands if name in streamed)

    def resolved(self, node: Node, extents: tuple[int, ...]) -> Node:
        """The node with further arguments that the row derives from its operands' spatial extents, now integers."""
        return node

    def access(self, node: Node, axis: int) -> AxisMap:
        """The access map of every streamed operand along an axis."""
        return AxisMap()

    def placement(self, node: Node, axis: int) -> AxisPlacement:
        """Position of the output rows among the rows of a streamed operand, without rounding and without the slack of an access map."""
        return AxisPlacement.of_access(self.access(node, axis))

    def extent(self, node: Node, axis: int, extent: int) -> int:
        """The output's extent along an axis."""
        return extent

    def computed(self, node: Node, axis: int, rows: Interval) -> Interval:
        """Output rows that must be computed to obtain ``rows``: a superset if output rows are computed in groups."""
        return rows

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        """The pair :attr:`backward_reads` of this use of the operator."""
        return self.backward_reads

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        """For batch, channels and each axis of a streamed operand the output dimension that it becomes, or ``None``.

        The fused-tileable relation of Xu et al. (CC'22), section 4.1.1: a slice of the output along the dimension needs only a slice of the
        input along it.
        """
        return (0, 1 if self.keeps_channels else None, *range(2, 2 + axes.count))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        """Reasons why this use of the operator cannot stream; empty if it can."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class NextValueSpec(Operator):
    """Next value of a buffer of repeated blocks (``sft.nn.Repeat``), computed where the blocks run."""

    name: str = "repeat_next"
    role: Role = "whole"
    is_extra_result: bool = True


def untiled_operand_problem(node: Node, streamed: Collection[str]) -> list[str]:
    """The problem of an operator of which every operand must be an image in strips; empty if all are."""
    untiled = [name for name in node.operands if name not in streamed]
    return [f"{node.label}: operand {untiled[0]} is not an image in strips"] if untiled else []


def axis_entry(value: Any, axis: int) -> int:
    """The entry for an axis of an argument that has one entry per axis, or one for all.

    >>> axis_entry(3, 1), axis_entry((3,), 1), axis_entry((3, 5), 1)
    (3, 3, 5)
    """
    return int(symbolic_axis_entry(value, axis))


def symbolic_axis_entry(value: Any, axis: int) -> Any:
    """Like :func:`axis_entry`, for an argument that may be an expression of the image's size."""
    return value[axis if len(value) > 1 else 0] if isinstance(value, (tuple, list)) else value
