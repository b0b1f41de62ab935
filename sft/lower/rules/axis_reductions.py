"""Reductions over some axes of the image: each strip updates the slice of the accumulator that lies under it.

The accumulator has the remaining axes of the full image. The strip's position in it is bound when the program runs (the ``origin`` port).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sft.analysis.ir.graph import Node, refs_in
from sft.lower.builder import ProgramBuilder
from sft.lower.context import NodeContext, SegmentInfo, accumulation_dtype
from sft.lower.program import Slot
from sft.lower.rules.base import ReductionRule
from sft.lower.rules.minmax import MinMaxRule, column, merge_minmax, strip_starts

__all__ = ["AxisMinMaxRule", "AxisSumRule"]

aten = torch.ops.aten

#: Most temporary tensors, each as large as the slice of the accumulator, during a merge.
_NUM_STATISTICS = 8


class _AxisReductionRule(ReductionRule):
    """Base of the reductions over some axes."""

    @staticmethod
    def strip_of(ctx: NodeContext) -> tuple[Slot, list[int]]:
        """The strip that is reduced, and its reduced dimensions."""
        strip = ctx.strip(next(refs_in(ctx.node.argument("self"))))
        first_axis = len(strip.shape) - ctx.scope.axes.count
        return strip, [first_axis + axis for axis in ctx.node.argument("reduced")]

    @staticmethod
    def position(ctx: NodeContext, strip: Slot) -> tuple[Slot, int, tuple[tuple[int, int], ...], int]:
        """Arguments of :func:`_slice_under`: origin, index of the first remaining axis, remaining axes with their extents, all axes."""
        count, reduced = ctx.scope.axes.count, ctx.node.argument("reduced")
        extents = ctx.scope.axes.of(strip.shape)
        remaining = tuple((axis, extents[axis]) for axis in range(count) if axis not in reduced)
        return ctx.builder.port("origin", ctx.node.name, ()), len(strip.shape) - count, remaining, count

    def slice_of(self, ctx: NodeContext, value: Slot, strip: Slot, dims: Sequence[int]) -> Slot:
        """The slice of a value with the accumulator's shape that lies under a strip, with the reduced dimensions of extent 1."""
        position = self.position(ctx, strip)
        last = value.shape[len(strip.shape) - len(dims) :]
        lead = tuple(extent for dim, extent in enumerate(strip.shape) if dim not in dims)
        view = ctx.builder.call(_slice_under, value, *position, shape=(*lead, *last), view_of=value, dtype=value.dtype)
        shape = (*(1 if dim in dims else extent for dim, extent in enumerate(strip.shape)), *last)
        return ctx.builder.call(_unsqueeze_dims, view, tuple(sorted(dims)), shape=shape, view_of=view, dtype=value.dtype)


class AxisSumRule(_AxisReductionRule):
    """Sum or mean over some axes."""

    def partial_shape(self, scope: SegmentInfo, node: Node) -> tuple[int, ...]:
        shape, first_axis = scope.global_shape(node.name), len(scope.shapes[node.operands[0]]) - scope.axes.count
        dims = [first_axis + axis for axis in node.argument("reduced")] if node.argument("keepdim") else []
        return tuple(extent for dim, extent in enumerate(shape) if dim not in dims)

    def forward(self, ctx: NodeContext) -> Slot:
        strip, dims = self.strip_of(ctx)
        wide = accumulation_dtype(strip.dtype)
        keywords = {"dtype": wide} if wide != strip.dtype else {}
        shape = tuple(extent for dim, extent in enumerate(strip.shape) if dim not in dims)
        total = ctx.builder.call(aten.sum.dim_IntList, strip, dims, shape=shape, dtype=wide, keywords=keywords)
        running = ctx.builder.port("partial", ctx.node.name, self.partial_shape(ctx.scope, ctx.node), torch.float64)
        return ctx.builder.call(_add_under, running, total, *self.position(ctx, strip), writes=running)

    def finish(self, scope: SegmentInfo, builder: ProgramBuilder, node: Node, running: Slot, out: Slot) -> None:
        divisor = self._divisor(scope, node)
        if divisor != 1:
            running = builder.call(aten.div.Scalar, running, divisor, shape=running.shape, dtype=torch.float64)
        flat = builder.call(aten.view.default, running, list(out.shape), shape=out.shape, view_of=running, dtype=torch.float64)
        builder.copy(out, flat)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, (strip, dims) = ctx.builder, self.strip_of(ctx)
        shape = self.partial_shape(ctx.scope, ctx.node)
        flat = builder.call(aten._reshape_copy.default, grad, list(shape), shape=shape, dtype=grad.dtype)
        gradient, divisor = self.slice_of(ctx, flat, strip, dims), self._divisor(ctx.scope, ctx.node)
        if divisor != 1:
            gradient = builder.call(aten.div.Scalar, gradient, divisor, shape=gradient.shape, dtype=gradient.dtype)
        spread = builder.call(aten.expand.default, gradient, list(strip.shape), shape=strip.shape, view_of=gradient, dtype=gradient.dtype)
        ctx.add_grad(ctx.node.argument("self"), spread, owned=False)

    @staticmethod
    def _divisor(scope: SegmentInfo, node: Node) -> int:
        extents = scope.axes.of(scope.shapes[node.operands[0]])
        return math.prod(extents[axis] for axis in node.argument("reduced")) if node.argument("divides") else 1


class AxisMinMaxRule(_AxisReductionRule):
    """The largest (smallest) element along some axes; its gradient is divided evenly among all of them."""

    def start(self, node: Node) -> float:
        return -math.inf if node.argument("largest") else math.inf

    def forward(self, ctx: NodeContext) -> Slot:
        builder, largest, (strip, dims) = ctx.builder, ctx.node.argument("largest"), self.strip_of(ctx)
        pixel = tuple(1 if dim in dims else extent for dim, extent in enumerate(strip.shape))
        lead = tuple(extent for dim, extent in enumerate(strip.shape) if dim not in dims)
        value = builder.call(aten.amax.default if largest else aten.amin.default, strip, dims, True, shape=pixel, dtype=strip.dtype)
        ones, wide = MinMaxRule.occurrences(ctx, strip, value), accumulation_dtype(strip.dtype)
        count = builder.call(aten.sum.dim_IntList, ones, dims, shape=lead, dtype=wide)
        flat = builder.call(aten.view.default, value, list(lead), shape=lead, view_of=value)
        running = builder.port("partial", ctx.node.name, ctx.global_shape(ctx.node.name), torch.float64)
        scratch_bytes = _NUM_STATISTICS * 2 * 8 * math.prod(lead)
        arguments = (flat, count, largest, *self.position(ctx, strip))
        return builder.call(_merge_minmax_under, running, *arguments, writes=running, scratch_bytes=scratch_bytes)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, (strip, dims) = ctx.builder, self.strip_of(ctx)
        statistics = self.slice_of(ctx, ctx.global_slot(ctx.node.name), strip, dims)
        gradients = self.slice_of(ctx, grad, strip, dims)
        value, count, share = (column(ctx, *each) for each in ((statistics, 0), (statistics, 1), (gradients, 0)))
        share = builder.call(aten.div.Tensor, share, count, shape=count.shape, dtype=torch.float64)
        gradient = MinMaxRule.occurrences(ctx, strip, builder.cast(value, strip.dtype))
        builder.call(aten.mul_.Tensor, gradient, builder.cast(share, gradient.dtype), writes=gradient)
        ctx.add_grad(ctx.node.argument("self"), gradient, owned=True)


def _slice_under(value: Tensor, origin: Sequence[int], first: int, remaining: Sequence[tuple[int, int]], axes: int) -> Tensor:
    """The slice of an accumulator that lies under a strip."""
    starts = strip_starts(origin, axes)
    for index, (axis, extent) in enumerate(remaining):
        if value.shape[first + index] != extent:
            value = value.narrow(first + index, starts[axis], extent)
    return value


def _unsqueeze_dims(value: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        value = value.unsqueeze(dim)
    return value


def _add_under(running: Tensor, total: Tensor, *position: Any) -> None:
    _slice_under(running, *position).add_(total)


def _merge_minmax_under(running: Tensor, value: Tensor, count: Tensor, largest: bool, *position: Any) -> None:
    merge_minmax(_slice_under(running, *position), value, count, largest)
