"""Casts between floating-point types, on strips and on whole tensors, and values that are cut off from their gradient."""

from __future__ import annotations

import torch

from sft.errors import InternalError
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["CastRule", "DetachRule"]

aten = torch.ops.aten


class CastRule(Rule):
    """``x.to(dtype)``; the gradient is cast back.

    The gradient of a weight in half precision is summed up over the strips in fp32. It goes into the fp32 weight's gradient as it is.
    """

    saves_input = False
    in_place = True
    takes_wide_grad = True

    def forward(self, ctx: NodeContext) -> Slot:
        operand = ctx.operand_slot(ctx.node.argument("self"))
        if ctx.destination is not None:
            return ctx.emitter.copy(ctx.destination, operand)
        return ctx.emitter.cast(operand, ctx.scope.dtype_of(ctx.node.name))

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image = ctx.node.argument("self")
        dtype = ctx.dtype_of(image)
        # Emitted also where the types agree: a whole gradient may arrive in either of two.
        back = ctx.emitter.call(aten._to_copy.default, grad, shape=grad.shape, dtype=dtype, keywords={"dtype": dtype})
        ctx.add_grad(image, back, owned=True)


class DetachRule(Rule):
    """``x.detach()``: the operand's memory under another name, which no gradient arrives at."""

    saves_input = False
    in_place = True

    def forward(self, ctx: NodeContext) -> Slot:
        operand = ctx.operand_slot(ctx.node.argument("self"))
        if ctx.destination is not None:
            return ctx.emitter.copy(ctx.destination, operand)
        # A view, and no second owner: who reads it must not write over it.
        return ctx.emitter.call(aten.alias.default, operand, shape=operand.shape, view_of=operand)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        raise InternalError(f"{ctx.node.label}: a gradient arrives at a detached value")
