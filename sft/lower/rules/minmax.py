"""Min, max and argmax over the image: running reductions that keep the number of ties or the first index."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sft.analysis.ir.graph import Node, refs_in
from sft.lower.context import NodeContext, accumulation_dtype
from sft.lower.program import Slot
from sft.lower.rules.base import AdditivePart, ReductionRule
from sft.lower.rules.reductions import as_single_pixel, spatial_dims

__all__ = ["ArgMaxRule", "MinMaxRule", "column", "merge_minmax", "strip_starts"]

aten = torch.ops.aten

#: Most temporary tensors, each as large as the accumulator, during a merge.
_NUM_STATISTICS = 8


class MinMaxRule(ReductionRule):
    """The largest (smallest) element and its number of occurrences; its gradient is divided evenly among all of them."""

    def start(self, node: Node) -> float:
        return -math.inf if node.argument("largest") else math.inf

    def additive(self, node: Node) -> AdditivePart:
        return AdditivePart(columns=(1,))

    def forward(self, ctx: NodeContext) -> Slot:
        builder, largest = ctx.builder, ctx.node.argument("largest")
        strip = ctx.strip(next(refs_in(ctx.node.argument("self"))))
        axes, wide = spatial_dims(ctx, strip), accumulation_dtype(strip.dtype)
        lead = strip.shape[: axes[0]]
        pixel = (*lead, *[1] * len(axes))
        value = builder.call(aten.amax.default if largest else aten.amin.default, strip, axes, True, shape=pixel, dtype=strip.dtype)
        ones = self.occurrences(ctx, strip, value)
        count = builder.call(aten.sum.dim_IntList, ones, axes, shape=lead, dtype=wide)
        flat = builder.call(aten.view.default, value, list(lead), shape=lead, view_of=value)
        running = builder.port("partial", ctx.node.name, (*lead, 2), torch.float64)
        scratch_bytes = _NUM_STATISTICS * running.num_bytes
        return builder.call(merge_minmax, running, flat, count, largest, writes=running, scratch_bytes=scratch_bytes)

    @staticmethod
    def occurrences(ctx: NodeContext, strip: Slot, value: Slot) -> Slot:
        """A mask of the elements equal to the value: one or zero."""
        builder, wide = ctx.builder, accumulation_dtype(strip.dtype)
        same = builder.call(aten.eq.Tensor, strip, value, shape=strip.shape, dtype=torch.bool)
        return builder.call(aten._to_copy.default, same, shape=strip.shape, dtype=wide, keywords={"dtype": wide})

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, image = ctx.builder, ctx.node.argument("self")
        strip = ctx.strip(next(refs_in(image)))
        value, count = (column(ctx, ctx.global_slot(ctx.node.name), index) for index in (0, 1))
        share = builder.call(aten.div.Tensor, column(ctx, grad, 0), count, shape=count.shape, dtype=torch.float64)
        gradient = self.occurrences(ctx, strip, as_single_pixel(ctx, builder.cast(value, strip.dtype)))
        builder.call(aten.mul_.Tensor, gradient, as_single_pixel(ctx, builder.cast(share, gradient.dtype)), writes=gradient)
        ctx.add_grad(image, gradient, owned=True)


class ArgMaxRule(ReductionRule):
    """The largest element and its first index in row-major order, which alone receives the gradient."""

    def start(self, node: Node) -> float:
        return -math.inf

    def forward(self, ctx: NodeContext) -> Slot:
        builder, strip = ctx.builder, ctx.strip(next(refs_in(ctx.node.argument("self"))))
        axes = spatial_dims(ctx, strip)
        lead, extents = strip.shape[: axes[0]], strip.shape[axes[0] :]
        shape = (*lead, math.prod(extents))
        flat = builder.call(aten._reshape_copy.default, strip, list(shape), shape=shape, dtype=strip.dtype)
        value, position = builder.slot(lead, strip.dtype), builder.slot(lead, torch.int64)
        # Torch returns the first of several equal elements.
        builder.call_many(aten.max.dim, (flat, len(lead)), (value, position))
        running = builder.port("partial", ctx.node.name, (*lead, 2), torch.float64)
        arguments = (value, position, self._origin(ctx), extents, self._extents(ctx))
        return builder.call(_merge_argmax, running, *arguments, writes=running, scratch_bytes=_NUM_STATISTICS * running.num_bytes)

    @staticmethod
    def _origin(ctx: NodeContext) -> Slot:
        return ctx.builder.port("origin", ctx.node.name, ())

    @staticmethod
    def _extents(ctx: NodeContext) -> tuple[int, ...]:
        return ctx.scope.axes.of(ctx.scope.shapes[next(refs_in(ctx.node.argument("self")))])

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, image = ctx.builder, ctx.node.argument("self")
        strip = ctx.strip(next(refs_in(image)))
        position = column(ctx, ctx.global_slot(ctx.node.name), 1)
        out = builder.zeros(strip.shape, strip.dtype)
        arguments = (column(ctx, grad, 0), position, self._origin(ctx), self._extents(ctx))
        builder.call(_scatter_argmax_grad, out, *arguments, writes=out, scratch_bytes=2 * _NUM_STATISTICS * position.num_bytes)
        ctx.add_grad(image, out, owned=True)


def column(ctx: NodeContext, slot: Slot, index: int) -> Slot:
    """A statistic of an accumulator: an entry of its last dimension."""
    return ctx.builder.call(aten.select.int, slot, -1, index, shape=slot.shape[:-1], view_of=slot, dtype=slot.dtype)


def merge_minmax(running: Tensor, value: Tensor, count: Tensor, largest: bool) -> None:
    """Merge a strip's minima or maxima into the accumulator."""
    old, old_count = running.unbind(-1)
    value = value.to(running.dtype)
    new = torch.maximum(old, value) if largest else torch.minimum(old, value)
    # Before the first strip the count is infinite, like the value.
    merged = torch.where(old == new, old_count.nan_to_num(posinf=0.0, neginf=0.0), 0.0)
    merged += torch.where(value == new, count.to(running.dtype), 0.0)
    old.copy_(new)
    old_count.copy_(merged)


def _merge_argmax(
    running: Tensor, value: Tensor, position: Tensor, origin: Sequence[int], strip: Sequence[int], extents: Sequence[int]
) -> None:
    """Merge a strip's maxima and indices into the accumulator; strips and panels may come in any order."""
    old, old_position = running.unbind(-1)
    value = value.to(running.dtype)
    in_image = torch.zeros_like(position)
    for at, start, extent in zip(_unravel_index(position, strip), strip_starts(origin, len(extents)), extents, strict=True):
        in_image = in_image * extent + (at + start)
    position = in_image.to(running.dtype)
    # Before the first strip the index is infinite, like the value: every index precedes it.
    is_better = (value > old) | ((value == old) & (position < old_position.nan_to_num(neginf=math.inf))) | value.isnan()
    old_position.copy_(torch.where(is_better, position, old_position))
    old.copy_(torch.where(is_better, value, old))


def strip_starts(origin: Sequence[int], count: int) -> tuple[int, ...]:
    """First index of a strip along each axis; a third axis is never tiled."""
    _, row, column = origin
    return (row, column, 0)[:count]


def _unravel_index(position: Tensor, extents: Sequence[int]) -> list[Tensor]:
    """A row-major index as an index along each axis."""
    indices: list[Tensor] = []
    for extent in reversed(extents):
        indices.insert(0, position % extent)
        position = position // extent
    return indices


def _scatter_argmax_grad(out: Tensor, grad: Tensor, position: Tensor, origin: Sequence[int], extents: Sequence[int]) -> None:
    """Write the gradient at the argmax positions inside the strip, which holds zeros."""
    lead = grad.dim()
    inside = torch.ones_like(position, dtype=torch.bool)
    index: list[Tensor] = [torch.arange(size, device=out.device).view(size, *[1] * (lead - 1 - dim)) for dim, size in enumerate(grad.shape)]
    for at, start, size in zip(_unravel_index(position.long(), extents), strip_starts(origin, len(extents)), out.shape[lead:], strict=True):
        at = at - start
        inside &= (at >= 0) & (at < size)
        index.append(at.clamp(0, size - 1))
    out.index_put_(tuple(index), torch.where(inside, grad, 0.0).to(out.dtype))
