"""Products of two images over all pixels: each strip adds its own."""

from __future__ import annotations

import math

import torch

from sft.analysis.graph import Node, refs_in
from sft.lower.context import NodeContext, accumulation_dtype
from sft.lower.program import Slot
from sft.lower.rules.base import AdditivePart, ReductionRule

__all__ = ["SpatialContractionRule"]

aten = torch.ops.aten

#: The image's dimensions of channels that a product is made for each of, and the others.
_DimSplit = tuple[tuple[int, ...], tuple[int, ...]]


class SpatialContractionRule(ReductionRule):
    """Matrices ``[B * groups, M, pixels]`` and ``[B * groups, K, pixels]`` multiplied over the pixels, in single precision or wider."""

    def additive(self, node: Node) -> AdditivePart:
        return AdditivePart()

    def forward(self, ctx: NodeContext) -> Slot:
        e, (left, right) = ctx.emitter, (self._flat(ctx, operand, part) for operand, part in self._factors(ctx))
        found = self._product(ctx, left, self._turned(ctx, right))
        running = e.port("partial", ctx.node.name, ctx.side_shape(ctx.node.name), torch.float64)
        flat = e.call(aten.view.default, found, list(running.shape), shape=running.shape, view_of=found)
        return e.add_into(running, flat)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        e, factors = ctx.emitter, self._factors(ctx)
        wide = accumulation_dtype(ctx.scope.dtype_of(factors[0][0]))
        sizes = [math.prod(ctx.scope.shapes[operand][dim] for dim in part[1]) for operand, part in factors]
        groups = math.prod(ctx.scope.shapes[factors[0][0]][dim] for dim in factors[0][1][0])
        shape = (ctx.scope.batch * groups, *sizes)
        matrix = e.cast(e.call(aten._reshape_copy.default, grad, list(shape), shape=shape, dtype=grad.dtype), wide)
        for key, (operand, part), (other, others) in zip(("self", "other"), factors, reversed(factors), strict=True):
            if ctx.needs_grad(ctx.node.argument(key)):
                found = self._product(ctx, matrix, self._flat(ctx, other, others))
                ctx.add_grad(ctx.node.argument(key), self._unflat(ctx, found, operand, part), owned=True)
            matrix = self._turned(ctx, matrix)

    @staticmethod
    def _factors(ctx: NodeContext) -> list[tuple[str, _DimSplit]]:
        node = ctx.node
        return [(next(refs_in(node.argument(key))), node.argument(part)) for key, part in (("self", "left"), ("other", "right"))]

    @staticmethod
    def _order(ctx: NodeContext, operand: str, part: _DimSplit) -> list[int]:
        rank = len(ctx.scope.shapes[operand])
        return [0, *part[0], *part[1], *range(rank - ctx.scope.axes.count, rank)]

    def _flat(self, ctx: NodeContext, operand: str, part: _DimSplit) -> Slot:
        """A strip as a matrix for each group."""
        e, strip, order = ctx.emitter, ctx.strip(operand), self._order(ctx, operand, part)
        if order != sorted(order):
            moved = tuple(strip.shape[dim] for dim in order)
            strip = e.call(aten.permute.default, strip, order, shape=moved, view_of=strip, dtype=strip.dtype)
        groups, count = len(part[0]), len(part[1])
        channels, pixels = math.prod(strip.shape[1 + groups : 1 + groups + count]), math.prod(strip.shape[1 + groups + count :])
        shape = (math.prod(strip.shape[: 1 + groups]), channels, pixels)
        flat = e.call(aten._reshape_copy.default, strip, list(shape), shape=shape, dtype=strip.dtype)
        return e.cast(flat, accumulation_dtype(strip.dtype))

    def _unflat(self, ctx: NodeContext, flat: Slot, operand: str, part: _DimSplit) -> Slot:
        """The inverse."""
        e, order, target = ctx.emitter, self._order(ctx, operand, part), ctx.strip(operand).shape
        shape = tuple(target[dim] for dim in order)
        found = e.call(aten.view.default, flat, list(shape), shape=shape, view_of=flat, dtype=flat.dtype)
        if order == sorted(order):
            return found
        back = [order.index(dim) for dim in range(len(order))]
        return e.call(aten.permute.default, found, back, shape=target, view_of=found, dtype=flat.dtype)

    @staticmethod
    def _turned(ctx: NodeContext, matrix: Slot) -> Slot:
        batch, rows, columns = matrix.shape
        return ctx.emitter.call(aten.transpose.int, matrix, 1, 2, shape=(batch, columns, rows), view_of=matrix, dtype=matrix.dtype)

    @staticmethod
    def _product(ctx: NodeContext, left: Slot, right: Slot) -> Slot:
        shape = (left.shape[0], left.shape[1], right.shape[2])
        return ctx.emitter.call(aten.bmm.default, left, right, shape=shape, dtype=left.dtype)
