"""What a lowering rule is.

``forward`` returns the slot of the new rows. It may write them into ``ctx.destination`` (the tail of the buffer behind the
carried rows) or over ``ctx.overwrite`` (an operand nobody else reads) where the operator has an in-place form; otherwise the
caller copies. ``backward`` takes the gradient of the new rows and reports gradients of the operands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from sft.analysis.ir.graph import Node
from sft.lower.builder import ProgramBuilder
from sft.lower.context import NodeContext, SegmentInfo
from sft.lower.program import Slot

__all__ = ["AdditivePart", "ReductionRule", "Rule"]


@dataclass(frozen=True, slots=True)
class AdditivePart:
    """Which part of a running value is a sum over strips, so that a strip that counts ``m`` times adds ``m`` times as much.

    Attributes:
        columns: entries along the last dimension; ``None`` for all of the value.
        is_logarithm: whether the value is the logarithm of the sum.
    """

    columns: tuple[int, ...] | None = None
    is_logarithm: bool = False


class Rule(ABC):
    """The lowering of one family of operators.

    Attributes:
        saves_input: whether the backward reads the streamed operands' values.
        saves_output: whether the backward reads the operator's own value.
        in_place: whether ``forward`` can write into a destination.
        overwrites: whether ``forward`` can write over its only operand.
        accepts_wide_grad: whether ``backward`` takes the gradient of a whole value in a wider type than the value's.
    """

    saves_input: ClassVar[bool] = True
    saves_output: ClassVar[bool] = False
    in_place: ClassVar[bool] = False
    overwrites: ClassVar[bool] = False
    accepts_wide_grad: ClassVar[bool] = False

    @abstractmethod
    def forward(self, ctx: NodeContext) -> Slot:
        """Emit the computation of the new rows."""

    @abstractmethod
    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        """Emit the gradients of the operands; ``owned`` says whether ``grad`` may be overwritten."""


class ReductionRule(Rule):
    """A reduction over the image: strips change a running one (fp64), which becomes the global value once all of them are seen.

    ``forward`` changes the running reduction, the ``partial`` port, and returns it.
    """

    def partial_shape(self, scope: SegmentInfo, node: Node) -> tuple[int, ...]:
        """Shape of the running reduction for one walk."""
        return scope.global_shape(node.name)

    def start(self, node: Node) -> float:
        """What it holds before the first strip."""
        return 0.0

    def additive(self, node: Node) -> AdditivePart | None:
        """Which part of it is a sum, where how often a strip counts changes nothing else; ``None`` where that is not so."""
        return None

    def finish(self, scope: SegmentInfo, builder: ProgramBuilder, node: Node, running: Slot, out: Slot) -> None:
        """Emit what makes the global value of it."""
        builder.copy(out, running)
