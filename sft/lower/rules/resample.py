"""Upsampling on a strip."""

from __future__ import annotations

import torch

from sft.analysis.graph import refs_in
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["Nearest"]

aten = torch.ops.aten


class Nearest(Rule):
    """``upsample_nearest2d`` by whole factors: a strip starts at a whole input row, so it is the operator on a smaller image."""

    saves_input = False

    def forward(self, ctx: NodeContext) -> Slot:
        strip = ctx.strip(next(refs_in(ctx.node.argument("input"))))
        factors = ctx.node.argument("factors")
        grown = (strip.shape[2] * factors[0], strip.shape[3] * factors[1])
        assert grown == ctx.out_shape[2:], "a strip of an upsampled value begins and ends at input rows and columns"
        ctx.saved["shape"] = strip.shape
        return ctx.emitter.call(aten.upsample_nearest2d.default, strip, list(ctx.out_shape[2:]), *map(float, factors), shape=ctx.out_shape)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        shape = ctx.saved["shape"]
        out = ctx.emitter.call(
            aten.upsample_nearest2d_backward.default,
            grad,
            list(ctx.out_shape[2:]),
            list(shape),
            *map(float, ctx.node.argument("factors")),
            shape=shape,
        )
        ctx.add_grad(ctx.node.argument("input"), out, owned=True)
