"""Lowering rules: how one family of operators is computed and differentiated on a strip, or on a full tensor.

A rule sees the gradient of the *new* rows only. The gradient of carried rows is handled around it, in :mod:`sft.lower.lower_strip`: the
rule reports the gradient of all operand rows that it read, and the lowering passes the carried ones on to the previous strip.

- ``forward(ctx)`` returns the slot of the new rows. An operator with an in-place form may write them into ``ctx.destination`` (the rows of
  the buffer after the carried rows) or over ``ctx.overwrite`` (an operand without further readers). Otherwise the lowering copies them.
- ``backward(ctx, grad, owned)`` takes the gradient of the new rows and reports gradients of the operands with ``ctx.add_grad``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from sft.analysis.ir.graph import Node
from sft.lower.builder import ProgramBuilder
from sft.lower.context import NodeContext, SegmentInfo
from sft.lower.program import Slot

__all__ = ["AdditivePart", "ReductionRule", "Rule"]


@dataclass(frozen=True, slots=True)
class AdditivePart:
    """The entries of an accumulator that are sums over strips: a strip counted ``m`` times adds ``m`` times as much.

    Attributes:
        columns: indices along the last dimension; ``None`` for all entries.
        is_logarithm: True if the accumulator holds the logarithm of the sum.
    """

    columns: tuple[int, ...] | None = None
    is_logarithm: bool = False


class Rule(ABC):
    """The lowering of one family of operators.

    Attributes:
        saves_output: True if the backward reads the operator's own value.
        in_place: True if ``forward`` can write into a destination.
        overwrites: True if ``forward`` can overwrite an operand, by default its only one (:meth:`overwritten`).
        accepts_wide_grad: True if ``backward`` takes the gradient of a global value in a wider type than the value's.
    """

    saves_output: ClassVar[bool] = False
    in_place: ClassVar[bool] = False
    overwrites: ClassVar[bool] = False
    accepts_wide_grad: ClassVar[bool] = False

    def overwritten(self, node: Node, streamed: Collection[str], *, untiled: bool) -> str | None:
        """The streamed operand that ``forward`` can overwrite, if it has no further readers; ``None`` for none."""
        if not self.overwrites:
            return None
        (name,) = dict.fromkeys(operand for operand in node.operands if operand in streamed)
        return name

    @abstractmethod
    def forward(self, ctx: NodeContext) -> Slot:
        """Emit the computation of the new rows."""

    @abstractmethod
    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        """Emit the gradients of the operands; ``owned`` is true if ``grad`` may be overwritten."""


class ReductionRule(Rule):
    """A reduction over the image: each strip updates an accumulator (fp64), from which the global value is computed after the last strip.

    ``forward`` updates the accumulator, the ``partial`` port, and returns it.
    """

    def partial_shape(self, scope: SegmentInfo, node: Node) -> tuple[int, ...]:
        """Shape of the accumulator in one sweep."""
        return scope.global_shape(node.name)

    def start(self, node: Node) -> float:
        """Initial value of the accumulator."""
        return 0.0

    def additive(self, node: Node) -> AdditivePart | None:
        """The entries that are sums, if counting a strip several times changes these alone; ``None`` otherwise."""
        return None

    def finish(self, scope: SegmentInfo, builder: ProgramBuilder, node: Node, running: Slot, out: Slot) -> None:
        """Emit the computation of the global value from the accumulator."""
        builder.copy(out, running)
