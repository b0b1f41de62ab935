"""Sums and means over the image, and sums of exponentials: added up strip by strip, or taken at once."""

from __future__ import annotations

import math

import torch

from sft.analysis.graph import Node, refs_in
from sft.lower.context import NodeContext, SegmentInfo, accumulation_dtype
from sft.lower.emitter import ProgramBuilder
from sft.lower.program import Slot
from sft.lower.rules.base import AdditivePart, ReductionRule

__all__ = ["LogSumExpRule", "MeanRule", "SumRule", "WholeMeanRule", "spatial_dims", "as_single_pixel"]

aten = torch.ops.aten


def spatial_dims(ctx: NodeContext, strip: Slot) -> list[int]:
    """The dimensions of a strip that are axes of the image."""
    return list(range(len(strip.shape) - ctx.scope.axes.count, len(strip.shape)))


def as_single_pixel(ctx: NodeContext, slot: Slot) -> Slot:
    """A global value, ``[N, channels...]``, as an image of one pixel."""
    shape = (*slot.shape, *[1] * ctx.scope.axes.count)
    return ctx.emitter.call(aten.view.default, slot, list(shape), shape=shape, view_of=slot)


class SumRule(ReductionRule):
    """Sum over the axes: each strip adds its own."""

    saves_input = False

    def partial_shape(self, scope: SegmentInfo, node: Node) -> tuple[int, ...]:
        shape = scope.shapes[node.operands[0]]
        return (scope.batch, *shape[1 : len(shape) - scope.axes.count])

    def additive(self, node: Node) -> AdditivePart:
        return AdditivePart()

    def divisor(self, scope: SegmentInfo, node: Node) -> int:
        """What the sum is divided by."""
        return 1

    def forward(self, ctx: NodeContext) -> Slot:
        strip = ctx.strip(next(refs_in(ctx.node.argument("self"))))
        wide, axes = accumulation_dtype(strip.dtype), spatial_dims(ctx, strip)
        keywords = {"dtype": wide} if wide != strip.dtype else {}
        lead = strip.shape[: axes[0]]
        total = ctx.emitter.call(aten.sum.dim_IntList, strip, axes, shape=lead, dtype=wide, keywords=keywords)
        running = ctx.emitter.port("partial", ctx.node.name, lead, torch.float64)
        return ctx.emitter.add_into(running, total)

    def finish(self, scope: SegmentInfo, e: ProgramBuilder, node: Node, running: Slot, out: Slot) -> None:
        divisor = self.divisor(scope, node)
        if divisor != 1:
            running = e.call(aten.div.Scalar, running, divisor, shape=running.shape, dtype=torch.float64)
        flat = e.call(aten.view.default, running, list(out.shape), shape=out.shape, view_of=running, dtype=torch.float64)
        e.copy(out, flat)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image, e = ctx.node.argument("self"), ctx.emitter
        strip, divisor = ctx.strip(next(refs_in(image))), self.divisor(ctx.scope, ctx.node)
        if divisor != 1:
            grad = e.call(aten.div.Scalar, grad, divisor, shape=grad.shape)
        axes = spatial_dims(ctx, strip)
        pixel = (*strip.shape[: axes[0]], *[1] * len(axes))
        flat = e.call(aten.view.default, grad, list(pixel), shape=pixel, view_of=grad)
        ctx.add_grad(image, e.call(aten.expand.default, flat, list(strip.shape), shape=strip.shape, view_of=flat), owned=False)


class MeanRule(SumRule):
    """Mean over the axes: the sum, divided by the image's size at the walk's end."""

    def divisor(self, scope: SegmentInfo, node: Node) -> int:
        return math.prod(scope.axes.of(scope.shapes[node.operands[0]]))


class WholeMeanRule(MeanRule):
    """The same on a whole tensor: the operator itself."""

    def forward(self, ctx: NodeContext) -> Slot:
        shape = ctx.scope.shapes[ctx.node.name]
        strip = ctx.strip(next(refs_in(ctx.node.argument("self"))))
        dtype = ctx.scope.dtype_of(ctx.node.name)
        keywords = {"dtype": dtype} if dtype != strip.dtype else {}
        keepdim = len(shape) == len(strip.shape)
        return ctx.emitter.call(aten.mean.dim, strip, spatial_dims(ctx, strip), keepdim, shape=shape, keywords=keywords)


class LogSumExpRule(ReductionRule):
    """``log(sum(exp(x)))``: each strip's own, taken from its largest element, is added to the running one as logarithms are."""

    def start(self, node: Node) -> float:
        return -math.inf

    def additive(self, node: Node) -> AdditivePart:
        return AdditivePart(is_logarithm=True)

    def forward(self, ctx: NodeContext) -> Slot:
        e, strip = ctx.emitter, ctx.strip(next(refs_in(ctx.node.argument("self"))))
        axes = spatial_dims(ctx, strip)
        lead, dtype = strip.shape[: axes[0]], strip.dtype
        pixel = (*lead, *[1] * len(axes))
        largest = self._finite(e, e.call(aten.amax.default, strip, axes, True, shape=pixel, dtype=dtype))
        terms = e.call(aten.sub.Tensor, strip, largest, shape=strip.shape, dtype=dtype)
        e.call(aten.exp_.default, terms, writes=terms)
        total = e.call(aten.sum.dim_IntList, terms, axes, True, shape=pixel, dtype=dtype)
        e.call(aten.log_.default, total, writes=total)
        e.call(aten.add_.Tensor, total, largest, writes=total)
        flat = e.call(aten.view.default, total, list(lead), shape=lead, view_of=total)
        wide = e.cast(flat, torch.float64)
        running = e.port("partial", ctx.node.name, lead, torch.float64)
        return e.call(aten.logaddexp.out, running, wide, writes=running, keywords={"out": running})

    @staticmethod
    def _finite(e: ProgramBuilder, slot: Slot) -> Slot:
        """Infinities as zeros, which take nothing away from elements that are infinite themselves."""
        return e.call(aten.nan_to_num.default, slot, math.nan, 0.0, 0.0, shape=slot.shape, dtype=slot.dtype)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        e, image = ctx.emitter, ctx.node.argument("self")
        strip, value = ctx.strip(next(refs_in(image))), ctx.whole(ctx.node.name)
        total = as_single_pixel(ctx, self._finite(e, value))
        share = e.call(aten.sub.Tensor, strip, total, shape=strip.shape, dtype=strip.dtype)
        e.call(aten.exp_.default, share, writes=share)
        e.call(aten.mul_.Tensor, share, as_single_pixel(ctx, grad), writes=share)
        ctx.add_grad(image, share, owned=True)
