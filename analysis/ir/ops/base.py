"""What a row of the operator table says.

A row speaks for one family of operators: which of its operands are streamed, which input rows and columns an output row and column
reads (the access map), what lies beyond the true image border, what extent comes out, which dimensions survive (for fused-tileable
dimensions), and why a given use of it cannot stream. Execution is elsewhere: ``sft.lower`` holds, under the same names, how a row of the
table runs and is differentiated.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from sft.analysis.ir.access import AxisMap
from sft.analysis.ir.axes import Axes
from sft.analysis.ir.graph import Graph, Node
from sft.common.interval import Interval

__all__ = ["Border", "NextValueSpec", "Operator", "Role", "axis_entry", "symbolic_axis_entry"]

#: How rows flow: ``stream``: rows in, rows out; ``reduce``: every row is read once and a global value comes out; ``whole``: whole tensors.
Role = Literal["stream", "reduce", "whole"]
#: What an operator reads beyond the true image border.
Border = Literal["none", "zeros", "-inf", "counted zeros", "not counted", "value", "reflected", "repeated", "wrapped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One row of the table; by itself that of a function of single pixels.

    Attributes:
        name: the family, also the key of its lowering rule.
        role: how rows flow through it.
        is_sized: whether there may be more problems with a use of it once sizes are numbers.
        is_phased: whether what a strip computes depends on where its first row stands among those that one input row is spread to.
        follows: whether it is a further result of its operand: it is made where that is made, in the same segment.
    """

    name: str
    role: Role = "stream"
    is_sized: bool = False
    is_phased: bool = False
    is_extra_result: bool = False

    def streamed_operands(self, node: Node, streamed: Collection[str]) -> tuple[str, ...]:
        """The operands that come in strips; the others (parameters, global values) are whole."""
        return tuple(name for name in node.operands if name in streamed)

    def resolved(self, node: Node, extents: tuple[int, ...]) -> Node:
        """The node with what else the row wants to know of it, now that its operands' extents along the axes are numbers."""
        return node

    def access(self, node: Node, axis: int) -> AxisMap:
        """The access map along an axis of every streamed operand."""
        return AxisMap()

    def extent(self, node: Node, axis: int, extent: int) -> int:
        """The output's extent along an axis."""
        return extent

    def computed(self, node: Node, axis: int, part: Interval) -> Interval:
        """What has to be computed to have the output rows ``part``; more than these where output rows come in groups."""
        return part

    def border(self, node: Node) -> Border:
        """What the operator reads beyond the true image border."""
        return "none"

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        """Whether the derivative reads the streamed operands, and whether it reads the result."""
        return (True, True)

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        """For batch, channels and each axis of a streamed operand which of them it becomes in the output, if any.

        The fused-tileable relation of Xu et al. (CC'22), section 4.1.1: a slice of the output along the dimension needs only
        a slice of the input along it.
        """
        return (0, 1, *range(2, 2 + axes.count))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        """Why this use of the operator cannot stream; empty when it can."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class NextValueSpec(Operator):
    """What a buffer of repeated blocks (``sft.nn.Repeat``) holds after the call; made where the blocks run."""

    name: str = "repeat_next"
    role: Role = "whole"
    is_extra_result: bool = True


def axis_entry(value: Any, axis: int) -> int:
    """The entry for an axis of an argument that may stand for all of them.

    >>> axis_entry(3, 1), axis_entry((3,), 1), axis_entry((3, 5), 1)
    (3, 3, 5)
    """
    return int(symbolic_axis_entry(value, axis))


def symbolic_axis_entry(value: Any, axis: int) -> Any:
    """The same of an argument that may be an expression of the image's size."""
    return value[axis if len(value) > 1 else 0] if isinstance(value, (tuple, list)) else value
