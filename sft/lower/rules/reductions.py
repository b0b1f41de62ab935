"""Means over the image: summed strip by strip, or taken at once."""

from __future__ import annotations

import torch

from sft.analysis.graph import refs_in
from sft.lower.context import NodeContext, sum_dtype
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["Mean", "WholeMean"]

aten = torch.ops.aten


class Mean(Rule):
    """Mean over height and width: each strip adds its sum to a running sum; the walk's end divides it by the image's size."""

    saves_input = False

    def forward(self, ctx: NodeContext) -> Slot:
        operand = next(refs_in(ctx.node.argument("self")))
        strip = ctx.strip(operand)
        wide = sum_dtype(strip.dtype)
        keywords = {"dtype": wide} if wide != strip.dtype else {}
        total = ctx.emitter.call(aten.sum.dim_IntList, strip, [2, 3], shape=strip.shape[:2], dtype=wide, keywords=keywords)
        running = ctx.emitter.port("partial", ctx.node.name, strip.shape[:2], torch.float64)
        return ctx.emitter.add_into(running, total)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image, e = ctx.node.argument("self"), ctx.emitter
        operand = next(refs_in(image))
        _, channels, height, width = ctx.scope.shapes[operand]
        rows, columns = ctx.read_of(operand).rows, ctx.columns_of(operand).rows
        scaled = e.call(aten.div.Scalar, grad, height * width, shape=grad.shape)
        flat = e.call(
            aten.view.default,
            scaled,
            [grad.shape[0], channels, 1, 1],
            shape=(grad.shape[0], channels, 1, 1),
            view_of=scaled,
        )
        shape = (grad.shape[0], channels, len(rows), len(columns))
        ctx.add_grad(image, e.call(aten.expand.default, flat, list(shape), shape=shape, view_of=flat), owned=False)


class WholeMean(Mean):
    """The same on a whole tensor: the operator itself."""

    def forward(self, ctx: NodeContext) -> Slot:
        shape = ctx.scope.shapes[ctx.node.name]
        strip = ctx.strip(next(refs_in(ctx.node.argument("self"))))
        dtype = ctx.scope.dtype_of(ctx.node.name)
        keywords = {"dtype": dtype} if dtype != strip.dtype else {}
        return ctx.emitter.call(aten.mean.dim, strip, [2, 3], len(shape) == 4, shape=shape, keywords=keywords)
