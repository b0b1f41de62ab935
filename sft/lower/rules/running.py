"""Running statistics: one call, as nothing of it is differentiated.

A trace of it would be half a dozen instructions on vectors of channels, and networks have hundreds of these.
"""

from __future__ import annotations

from sft.errors import InternalError
from sft.lower.context import NodeContext
from sft.lower.functions import FUNCTIONS
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["RunningStatisticRule"]

#: Vectors of channels that are there at once while one is made, besides it, at most.
_NUM_VECTORS = 4


class RunningStatisticRule(Rule):
    """``sft.running_mean`` and ``sft.running_var``: the buffer's next value."""

    def forward(self, ctx: NodeContext) -> Slot:
        node, shape = ctx.node, ctx.side_shape(ctx.node.name)
        dtype, moments = ctx.scope.dtype_of(node.name), ctx.operand_slot(node.argument("moments"))
        keywords = {key: ctx.operand_slot(value) for key, value in node.arguments}
        scratch = _NUM_VECTORS * max(moments.num_bytes // moments.shape[-1], 1)
        return ctx.emitter.call(FUNCTIONS[node.target], shape=shape, dtype=dtype, keywords=keywords, scratch_bytes=scratch)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        raise InternalError(f"{ctx.node.label}: buffers have no gradient")
