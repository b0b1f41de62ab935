"""Upsampling on a strip."""

from __future__ import annotations

from typing import Any

import torch

from sft.analysis.graph import refs_in
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["Nearest"]

aten = torch.ops.aten


class Nearest(Rule):
    """Nearest upsampling by whole factors: a strip starts at a whole input row, so it is the operator on a smaller image."""

    saves_input = False

    def forward(self, ctx: NodeContext) -> Slot:
        strip = ctx.strip(next(refs_in(ctx.node.argument("input"))))
        factors, axes = ctx.node.argument("factors"), ctx.scope.axes
        grown = tuple(extent * factor for extent, factor in zip(axes.of(strip.shape), factors, strict=True))
        assert grown == axes.of(ctx.out_shape), "a strip of an upsampled value begins and ends at input rows and columns"
        ctx.saved["shape"] = strip.shape
        return ctx.emitter.call(self._function(ctx, ""), strip, list(grown), *map(float, factors), shape=ctx.out_shape)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        shape, grown = ctx.saved["shape"], list(ctx.scope.axes.of(ctx.out_shape))
        scales = map(float, ctx.node.argument("factors"))
        out = ctx.emitter.call(self._function(ctx, "_backward"), grad, grown, list(shape), *scales, shape=shape)
        ctx.add_grad(ctx.node.argument("input"), out, owned=True)

    @staticmethod
    def _function(ctx: NodeContext, kind: str) -> Any:
        return getattr(aten, f"upsample_nearest{ctx.scope.axes.count}d{kind}").default
