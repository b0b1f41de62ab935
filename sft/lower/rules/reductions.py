"""Means over the image: summed strip by strip, or taken at once."""

from __future__ import annotations

import math

import torch

from sft.analysis.graph import refs_in
from sft.lower.context import NodeContext, sum_dtype
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["Mean", "WholeMean"]

aten = torch.ops.aten


def _axes(strip: Slot) -> list[int]:
    return list(range(2, len(strip.shape)))


class Mean(Rule):
    """Mean over height and width: each strip adds its sum to a running sum; the walk's end divides it by the image's size."""

    saves_input = False

    def forward(self, ctx: NodeContext) -> Slot:
        operand = next(refs_in(ctx.node.argument("self")))
        strip = ctx.strip(operand)
        wide = sum_dtype(strip.dtype)
        keywords = {"dtype": wide} if wide != strip.dtype else {}
        total = ctx.emitter.call(aten.sum.dim_IntList, strip, _axes(strip), shape=strip.shape[:2], dtype=wide, keywords=keywords)
        running = ctx.emitter.port("partial", ctx.node.name, strip.shape[:2], torch.float64)
        return ctx.emitter.add_into(running, total)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image, e = ctx.node.argument("self"), ctx.emitter
        operand = next(refs_in(image))
        axes, whole = ctx.scope.axes, ctx.scope.shapes[operand]
        scaled = e.call(aten.div.Scalar, grad, math.prod(axes.of(whole)), shape=grad.shape)
        pixel = (grad.shape[0], whole[1], *[1] * axes.count)
        flat = e.call(aten.view.default, scaled, list(pixel), shape=pixel, view_of=scaled)
        shape = ctx.strip(operand).shape
        ctx.add_grad(image, e.call(aten.expand.default, flat, list(shape), shape=shape, view_of=flat), owned=False)


class WholeMean(Mean):
    """The same on a whole tensor: the operator itself."""

    def forward(self, ctx: NodeContext) -> Slot:
        shape = ctx.scope.shapes[ctx.node.name]
        strip = ctx.strip(next(refs_in(ctx.node.argument("self"))))
        dtype = ctx.scope.dtype_of(ctx.node.name)
        keywords = {"dtype": dtype} if dtype != strip.dtype else {}
        return ctx.emitter.call(aten.mean.dim, strip, _axes(strip), len(shape) == len(strip.shape), shape=shape, keywords=keywords)
