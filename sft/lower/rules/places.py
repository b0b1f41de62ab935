"""Where maxima are, and values put back there, on a strip.

Places count the pixels of the whole image, row-major. Those of a strip's own pooling count the strip's; where it lies is bound when the
program runs (the ``origin`` port).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sft.analysis.graph import refs_in
from sft.analysis.operators import Window, window_of
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.rules.base import Rule
from sft.lower.rules.extremes import strip_starts
from sft.lower.rules.maxpool import MaxPoolRule
from sft.lower.rules.windowed import as_own_axes

__all__ = ["MaxPoolIndicesRule", "MaxUnpoolRule"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _PaddedAxis:
    """Of what a strip's pooling saw: its extent along an axis, how much of that is padding before it, and the image's extent."""

    window: Window
    seen: int
    offset: int
    extent: int


class MaxPoolIndicesRule(MaxPoolRule):
    """The indices of the strip's own pooling, counted in the image."""

    saves_input = False

    def forward(self, ctx: NodeContext) -> Slot:
        e, operand = ctx.emitter, next(refs_in(ctx.node.argument("self")))
        own, e.dtype = e.dtype, ctx.scope.dtype_of(operand)
        super().forward(ctx)
        e.dtype = own
        found: Slot = ctx.saved["indices"]
        if not ctx.is_whole:
            axes = []
            seen, extents = ctx.scope.axes.of(ctx.saved["padded"].shape), ctx.scope.axes.of(ctx.scope.shapes[operand])
            for axis, (size, offset, extent) in enumerate(zip(seen, ctx.saved["offset"], extents, strict=True)):
                window = window_of(ctx.node, axis)
                assert window is not None
                axes.append(_PaddedAxis(window, size, offset, extent))
            # Beside the places: their sum so far, one coordinate, and what becomes of it where it may lie in the padding.
            scratch_bytes = 4 * found.num_bytes + found.num_bytes // 8 if any(ctx.saved["offset"]) else 2 * found.num_bytes
            origin = e.port("origin", ctx.node.name, ())
            e.call(_indices_in_image, found, origin, tuple(axes), writes=found, scratch_bytes=scratch_bytes)
        return as_own_axes(ctx, found)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        raise AssertionError("places have no gradient")


def _indices_in_image(places: Tensor, origin: Sequence[int], axes: Sequence[_PaddedAxis]) -> None:
    """Turn places in what a strip's pooling saw into places in the image."""
    total, at, size = torch.zeros_like(places), torch.empty_like(places), 1
    for axis, first in reversed([*zip(axes, strip_starts(origin, len(axes)), strict=True)]):
        torch.remainder(places, axis.seen, out=at)
        places.div_(axis.seen, rounding_mode="floor")
        at += min(max(axis.window.access.low(first), 0), axis.extent) - axis.offset
        if axis.offset:
            # Only minus infinity is no greater than padding: then ATen's place is the window's first one inside.
            at.copy_(torch.where(at < 0, at % axis.window.dilation, at))
        total += at.mul_(size)
        size *= axis.extent
    places.copy_(total)


class MaxUnpoolRule(Rule):
    """Zeros, and each value where the maximum of its window was; no two windows share a pixel."""

    def forward(self, ctx: NodeContext) -> Slot:
        e, (value, places) = ctx.emitter, (ctx.node.argument("self"), ctx.node.argument("indices"))
        extents = ctx.scope.axes.of(ctx.out_shape)
        out = e.zeros((*ctx.out_shape[: -len(extents)], math.prod(extents)))
        if not ctx.reads_nothing(next(refs_in(value))):
            strip = ctx.operand_slot(value)
            e.call(aten.scatter_.src, out, 2, self._places(ctx, ctx.operand_slot(places)), self._flat(ctx, strip), writes=out)
        return e.call(aten.view.default, out, list(ctx.out_shape), shape=ctx.out_shape, view_of=out)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        e, (value, places) = ctx.emitter, (ctx.node.argument("self"), ctx.node.argument("indices"))
        if ctx.reads_nothing(next(refs_in(value))):
            return
        where, shape = self._places(ctx, ctx.operand_slot(places)), ctx.operand_slot(value).shape
        found = e.call(aten.gather.default, self._flat(ctx, grad), 2, where, shape=where.shape, dtype=grad.dtype)
        ctx.add_grad(value, e.call(aten.view.default, found, list(shape), shape=shape, view_of=found), owned=True)

    @staticmethod
    def _flat(ctx: NodeContext, slot: Slot) -> Slot:
        shape = (*slot.shape[: -ctx.scope.axes.count], math.prod(ctx.scope.axes.of(slot.shape)))
        return ctx.emitter.call(aten._reshape_copy.default, slot, list(shape), shape=shape, dtype=slot.dtype)

    def _places(self, ctx: NodeContext, places: Slot) -> Slot:
        """Places in the part of the result that the strip computes, pixels in one dimension."""
        e, axes = ctx.emitter, ctx.scope.axes
        flat, image = self._flat(ctx, places), axes.of(ctx.scope.shapes[ctx.node.name])
        origin = e.port("origin", ctx.node.name, ())
        scratch_bytes = 2 * flat.num_bytes
        return e.call(_indices_in_strip, flat, origin, image, axes.of(ctx.out_shape), writes=flat, scratch_bytes=scratch_bytes)


def _indices_in_strip(places: Tensor, origin: Sequence[int], image: Sequence[int], strip: Sequence[int]) -> None:
    """Turn places in the image into places in a strip of it."""
    total, at, size = torch.zeros_like(places), torch.empty_like(places), 1
    for axis, first in reversed([*enumerate(strip_starts(origin, len(image)))]):
        torch.remainder(places, image[axis], out=at)
        places.div_(image[axis], rounding_mode="floor")
        total += at.sub_(first).mul_(size)
        size *= strip[axis]
    places.copy_(total)
