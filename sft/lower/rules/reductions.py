"""Reductions over the image that are sums over strips: sum, mean, log-sum-exp, and contractions of two images over pixels."""

from __future__ import annotations

import math

import torch

from sft.analysis.ir.graph import Node, refs_in
from sft.lower.builder import ProgramBuilder
from sft.lower.context import NodeContext, SegmentInfo, accumulation_dtype
from sft.lower.program import Slot
from sft.lower.rules.base import AdditivePart, ReductionRule

__all__ = ["LogSumExpRule", "MeanRule", "SpatialContractionRule", "SumRule", "WholeMeanRule", "as_single_pixel", "spatial_dims"]

aten = torch.ops.aten


def spatial_dims(ctx: NodeContext, strip: Slot) -> list[int]:
    """The dimensions of a strip that are axes of the image."""
    return list(range(len(strip.shape) - ctx.scope.axes.count, len(strip.shape)))


def as_single_pixel(ctx: NodeContext, slot: Slot) -> Slot:
    """A global value, ``[N, channels...]``, as an image of one pixel."""
    shape = (*slot.shape, *[1] * ctx.scope.axes.count)
    return ctx.builder.call(aten.view.default, slot, list(shape), shape=shape, view_of=slot)


class SumRule(ReductionRule):
    """Sum over the axes: each strip adds its sum."""

    def partial_shape(self, scope: SegmentInfo, node: Node) -> tuple[int, ...]:
        shape = scope.shapes[node.operands[0]]
        return (scope.batch, *shape[1 : len(shape) - scope.axes.count])

    def additive(self, node: Node) -> AdditivePart:
        return AdditivePart()

    def divisor(self, scope: SegmentInfo, node: Node) -> int:
        """Divisor of the sum."""
        return 1

    def forward(self, ctx: NodeContext) -> Slot:
        strip = ctx.strip(next(refs_in(ctx.node.argument("self"))))
        wide, axes = accumulation_dtype(strip.dtype), spatial_dims(ctx, strip)
        keywords = {"dtype": wide} if wide != strip.dtype else {}
        lead = strip.shape[: axes[0]]
        total = ctx.builder.call(aten.sum.dim_IntList, strip, axes, shape=lead, dtype=wide, keywords=keywords)
        running = ctx.builder.port("partial", ctx.node.name, lead, torch.float64)
        return ctx.builder.add_into(running, total)

    def finish(self, scope: SegmentInfo, builder: ProgramBuilder, node: Node, running: Slot, out: Slot) -> None:
        divisor = self.divisor(scope, node)
        if divisor != 1:
            running = builder.call(aten.div.Scalar, running, divisor, shape=running.shape, dtype=torch.float64)
        flat = builder.call(aten.view.default, running, list(out.shape), shape=out.shape, view_of=running, dtype=torch.float64)
        builder.copy(out, flat)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image, builder = ctx.node.argument("self"), ctx.builder
        strip, divisor = ctx.strip(next(refs_in(image))), self.divisor(ctx.scope, ctx.node)
        if divisor != 1:
            grad = builder.call(aten.div.Scalar, grad, divisor, shape=grad.shape)
        axes = spatial_dims(ctx, strip)
        pixel = (*strip.shape[: axes[0]], *[1] * len(axes))
        flat = builder.call(aten.view.default, grad, list(pixel), shape=pixel, view_of=grad)
        ctx.add_grad(image, builder.call(aten.expand.default, flat, list(strip.shape), shape=strip.shape, view_of=flat), owned=False)


class MeanRule(SumRule):
    """Mean over the axes: the sum, divided by the number of pixels after the last strip."""

    def divisor(self, scope: SegmentInfo, node: Node) -> int:
        return math.prod(scope.axes.of(scope.shapes[node.operands[0]]))


class WholeMeanRule(MeanRule):
    """Mean of a full tensor: the operator itself."""

    def forward(self, ctx: NodeContext) -> Slot:
        shape = ctx.scope.shapes[ctx.node.name]
        strip = ctx.strip(next(refs_in(ctx.node.argument("self"))))
        dtype = ctx.scope.dtype_of(ctx.node.name)
        keywords = {"dtype": dtype} if dtype != strip.dtype else {}
        keepdim = len(shape) == len(strip.shape)
        return ctx.builder.call(aten.mean.dim, strip, spatial_dims(ctx, strip), keepdim, shape=shape, keywords=keywords)


class LogSumExpRule(ReductionRule):
    """``log(sum(exp(x)))``: a strip's value, computed relative to its largest element, is merged with ``logaddexp``."""

    def start(self, node: Node) -> float:
        return -math.inf

    def additive(self, node: Node) -> AdditivePart:
        return AdditivePart(is_logarithm=True)

    def forward(self, ctx: NodeContext) -> Slot:
        builder, strip = ctx.builder, ctx.strip(next(refs_in(ctx.node.argument("self"))))
        axes = spatial_dims(ctx, strip)
        lead, dtype = strip.shape[: axes[0]], strip.dtype
        pixel = (*lead, *[1] * len(axes))
        largest = self._finite(builder, builder.call(aten.amax.default, strip, axes, True, shape=pixel, dtype=dtype))
        terms = builder.call(aten.sub.Tensor, strip, largest, shape=strip.shape, dtype=dtype)
        builder.call(aten.exp_.default, terms, writes=terms)
        total = builder.call(aten.sum.dim_IntList, terms, axes, True, shape=pixel, dtype=dtype)
        builder.call(aten.log_.default, total, writes=total)
        builder.call(aten.add_.Tensor, total, largest, writes=total)
        flat = builder.call(aten.view.default, total, list(lead), shape=lead, view_of=total)
        wide = builder.cast(flat, torch.float64)
        running = builder.port("partial", ctx.node.name, lead, torch.float64)
        return builder.call(aten.logaddexp.out, running, wide, writes=running, keywords={"out": running})

    @staticmethod
    def _finite(builder: ProgramBuilder, slot: Slot) -> Slot:
        """Replace infinities by zero, so that subtracting the result leaves infinite elements infinite."""
        return builder.call(aten.nan_to_num.default, slot, math.nan, 0.0, 0.0, shape=slot.shape, dtype=slot.dtype)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, image = ctx.builder, ctx.node.argument("self")
        strip, value = ctx.strip(next(refs_in(image))), ctx.global_slot(ctx.node.name)
        total = as_single_pixel(ctx, self._finite(builder, value))
        share = builder.call(aten.sub.Tensor, strip, total, shape=strip.shape, dtype=strip.dtype)
        builder.call(aten.exp_.default, share, writes=share)
        builder.call(aten.mul_.Tensor, share, as_single_pixel(ctx, grad), writes=share)
        ctx.add_grad(image, share, owned=True)


#: Dimensions of channels of an image: those of groups, and the free ones.
_DimSplit = tuple[tuple[int, ...], tuple[int, ...]]


class SpatialContractionRule(ReductionRule):
    """Product of matrices ``[B * groups, M, pixels]`` and ``[B * groups, K, pixels]`` over the pixels, in single precision or wider."""

    def additive(self, node: Node) -> AdditivePart:
        return AdditivePart()

    def forward(self, ctx: NodeContext) -> Slot:
        builder, (left, right) = ctx.builder, (self._flat(ctx, operand, dims) for operand, dims in self._factors(ctx))
        product = self._product(ctx, left, self._transposed(ctx, right))
        running = builder.port("partial", ctx.node.name, ctx.global_shape(ctx.node.name), torch.float64)
        flat = builder.call(aten.view.default, product, list(running.shape), shape=running.shape, view_of=product)
        return builder.add_into(running, flat)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, factors = ctx.builder, self._factors(ctx)
        wide = accumulation_dtype(ctx.scope.dtype_of(factors[0][0]))
        sizes = [math.prod(ctx.scope.shapes[operand][dim] for dim in dims[1]) for operand, dims in factors]
        groups = math.prod(ctx.scope.shapes[factors[0][0]][dim] for dim in factors[0][1][0])
        shape = (ctx.scope.batch * groups, *sizes)
        matrix = builder.cast(builder.call(aten._reshape_copy.default, grad, list(shape), shape=shape, dtype=grad.dtype), wide)
        for key, (operand, dims), (other, other_dims) in zip(("self", "other"), factors, reversed(factors), strict=True):
            if ctx.needs_grad(ctx.node.argument(key)):
                product = self._product(ctx, matrix, self._flat(ctx, other, other_dims))
                ctx.add_grad(ctx.node.argument(key), self._unflat(ctx, product, operand, dims), owned=True)
            matrix = self._transposed(ctx, matrix)

    @staticmethod
    def _factors(ctx: NodeContext) -> list[tuple[str, _DimSplit]]:
        node = ctx.node
        return [(next(refs_in(node.argument(key))), node.argument(side)) for key, side in (("self", "left"), ("other", "right"))]

    @staticmethod
    def _order(ctx: NodeContext, operand: str, dims: _DimSplit) -> list[int]:
        rank = len(ctx.scope.shapes[operand])
        return [0, *dims[0], *dims[1], *range(rank - ctx.scope.axes.count, rank)]

    def _flat(self, ctx: NodeContext, operand: str, dims: _DimSplit) -> Slot:
        """A strip as a matrix for each group."""
        builder, strip, order = ctx.builder, ctx.strip(operand), self._order(ctx, operand, dims)
        if order != sorted(order):
            moved = tuple(strip.shape[dim] for dim in order)
            strip = builder.call(aten.permute.default, strip, order, shape=moved, view_of=strip, dtype=strip.dtype)
        groups, count = len(dims[0]), len(dims[1])
        channels, pixels = math.prod(strip.shape[1 + groups : 1 + groups + count]), math.prod(strip.shape[1 + groups + count :])
        shape = (math.prod(strip.shape[: 1 + groups]), channels, pixels)
        flat = builder.call(aten._reshape_copy.default, strip, list(shape), shape=shape, dtype=strip.dtype)
        return builder.cast(flat, accumulation_dtype(strip.dtype))

    def _unflat(self, ctx: NodeContext, flat: Slot, operand: str, dims: _DimSplit) -> Slot:
        """The inverse of :meth:`_flat`."""
        builder, order, target = ctx.builder, self._order(ctx, operand, dims), ctx.strip(operand).shape
        shape = tuple(target[dim] for dim in order)
        image = builder.call(aten.view.default, flat, list(shape), shape=shape, view_of=flat, dtype=flat.dtype)
        if order == sorted(order):
            return image
        back = [order.index(dim) for dim in range(len(order))]
        return builder.call(aten.permute.default, image, back, shape=target, view_of=image, dtype=flat.dtype)

    @staticmethod
    def _transposed(ctx: NodeContext, matrix: Slot) -> Slot:
        batch, rows, columns = matrix.shape
        return ctx.builder.call(aten.transpose.int, matrix, 1, 2, shape=(batch, columns, rows), view_of=matrix, dtype=matrix.dtype)

    @staticmethod
    def _product(ctx: NodeContext, left: Slot, right: Slot) -> Slot:
        shape = (left.shape[0], left.shape[1], right.shape[2])
        return ctx.builder.call(aten.bmm.default, left, right, shape=shape, dtype=left.dtype)
