"""Norms on a strip: moments and affine map of a norm over the image, running statistics, frozen BatchNorm; also ReLU and leaky ReLU.

A norm over the image is decomposed (:mod:`sft.analysis.passes.decompose_norms`)::

    moments = mean, variance, count of each group     a reduction over strips
    scale, shift                                      traced, on vectors of channels
    out = x * scale + shift                           an affine map of each strip

Running statistics are one call each. No gradient passes through them, and a trace would be half a dozen instructions on vectors of
channels for each, in networks with hundreds of them.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.graph import Node, refs_in
from sft.common.errors import InternalError
from sft.lower.builder import ProgramBuilder
from sft.lower.context import NodeContext, SegmentInfo
from sft.lower.custom_ops import FUNCTIONS
from sft.lower.custom_ops.statistics import biased_var_mean
from sft.lower.program import Slot
from sft.lower.rules.base import AdditivePart, ReductionRule, Rule

__all__ = [
    "AffineRule",
    "FrozenNormRule",
    "MomentsRule",
    "ResultActivationRule",
    "RunningStatisticRule",
    "WholeMomentsRule",
    "empty_statistics",
]

aten = torch.ops.aten


class MomentsRule(ReductionRule):
    """Mean, variance and count of each group of elements.

    A strip's moments are merged into the accumulator (mean, sum of squared deviations, count; fp64) with the update of Chan, Golub and
    LeVeque (1983), which loses no digits if the mean is large compared to the deviations.
    """

    def additive(self, node: Node) -> AdditivePart:
        """The sum of squares and the count. With both divided by ``m``, the update weighs the strip as ``m`` equal strips."""
        return AdditivePart(columns=(1, 2))

    def forward(self, ctx: NodeContext) -> Slot:
        builder = ctx.builder
        variance, mean, count = self._of_strip(ctx)
        running = builder.port("partial", ctx.node.name, (*mean.shape, 3), torch.float64)
        old_mean, old_squares, old_count = (self._column(ctx, running, i) for i in range(3))
        shape, wide = mean.shape, torch.float64
        new_mean = builder.call(aten._to_copy.default, mean, shape=shape, dtype=wide, keywords={"dtype": wide})
        new_squares = builder.call(aten._to_copy.default, variance, shape=shape, dtype=wide, keywords={"dtype": wide})
        builder.call(aten.mul_.Scalar, new_squares, count, writes=new_squares)
        delta = builder.call(aten.sub_.Tensor, new_mean, old_mean, writes=new_mean)
        total = builder.call(aten.add.Scalar, old_count, count, shape=shape, dtype=wide)
        share = builder.call(aten.reciprocal.default, total, shape=shape, dtype=wide)
        builder.call(aten.mul_.Scalar, share, count, writes=share)
        builder.call(aten.add_.Tensor, old_squares, new_squares, writes=old_squares)
        cross = builder.call(aten.mul.Tensor, delta, delta, shape=shape, dtype=wide)
        builder.call(aten.mul_.Tensor, cross, old_count, writes=cross)
        builder.call(aten.mul_.Tensor, cross, share, writes=cross)
        builder.call(aten.add_.Tensor, old_squares, cross, writes=old_squares)
        builder.call(aten.mul_.Tensor, delta, share, writes=delta)
        builder.call(aten.add_.Tensor, old_mean, delta, writes=old_mean)
        builder.call(aten.copy_.default, old_count, total, writes=old_count)
        return running

    def finish(self, scope: SegmentInfo, builder: ProgramBuilder, node: Node, running: Slot, out: Slot) -> None:
        squares, count = (_column(builder, running, index) for index in (1, 2))
        builder.call(aten.div_.Tensor, squares, count, writes=squares)
        builder.copy(out, running)

    def _column(self, ctx: NodeContext, slot: Slot, index: int) -> Slot:
        return _column(ctx.builder, slot, index)

    def _of_strip(self, ctx: NodeContext) -> tuple[Slot, Slot, int]:
        """Biased variance and mean of the strip, ``[B, G]``, and the number of elements of a group in it."""
        builder, node = ctx.builder, ctx.node
        # Moments have the type of the node; elements of half precision are cast to it first.
        strip = builder.cast(ctx.strip(next(refs_in(node.argument("self")))), ctx.scope.dtype_of(node.name))
        first_axis = len(strip.shape) - ctx.scope.axes.count
        batch, *channels = strip.shape[:first_axis]
        extents = strip.shape[first_axis:]
        groups, per_sample = node.argument("groups"), node.argument("per_sample")
        if len(channels) == 1:
            split = (batch, groups, channels[0] // groups, *extents)
            strip = builder.call(aten.view.default, strip, list(split), shape=split, view_of=strip)
            axis = 2
        else:  # several dimensions of channels: a group runs over the last ones
            axis = 1 + list(itertools.accumulate(channels, operator.mul, initial=1)).index(groups)
        dims = [*(() if per_sample else (0,)), *range(axis, len(strip.shape))]
        shape = strip.shape[0 if per_sample else 1 : axis]
        variance, mean = builder.slot(shape), builder.slot(shape)
        builder.call_many(biased_var_mean, (strip, dims), (variance, mean))
        count = (1 if per_sample else batch) * math.prod(channels) // groups * math.prod(extents)
        full = (batch if per_sample else 1, groups)
        variance, mean = (builder.call(aten.view.default, s, list(full), shape=full, view_of=s) for s in (variance, mean))
        return variance, mean, count

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        node, builder, image = ctx.node, ctx.builder, ctx.node.argument("self")
        (operand,) = refs_in(image)
        strip = ctx.strip(operand)
        samples, *channels = ctx.scope.shapes[operand]
        batch, groups = (strip.shape[0] if node.argument("per_sample") else 1), node.argument("groups")
        count = (1 if node.argument("per_sample") else samples) * math.prod(channels) // groups
        value = ctx.global_slot(node.name)
        # d mean / dx = 1 / n and d var / dx = 2 (x - mean) / n: an affine map of x.
        scale = builder.call(aten.mul.Scalar, self._column(ctx, grad, 1), 2.0 / count, shape=(batch, groups))
        shift = builder.call(aten.mul.Scalar, self._column(ctx, grad, 0), 1.0 / count, shape=(batch, groups))
        product = builder.call(aten.mul.Tensor, scale, self._column(ctx, value, 0), shape=(batch, groups))
        builder.call(aten.sub_.Tensor, shift, product, writes=shift)
        lead = channels[: len(channels) - ctx.scope.axes.count]
        scale, shift = (self._by_channel(ctx, slot, lead) for slot in (scale, shift))
        ctx.add_grad(image, builder.call(aten.addcmul.default, shift, strip, scale, shape=strip.shape), owned=True)

    @staticmethod
    def _by_channel(ctx: NodeContext, slot: Slot, channels: Sequence[int]) -> Slot:
        """Expand ``[B, G]`` over channels, ``[B, channels..., 1, ..., 1]``."""
        builder = ctx.builder
        batch, groups = slot.shape
        num_channels = math.prod(channels)
        if groups not in (1, num_channels):
            slot = builder.call(aten.repeat_interleave.self_int, slot, num_channels // groups, 1, shape=(batch, num_channels))
        lead = [1] * len(channels) if groups == 1 else channels
        shape = (batch, *lead, *[1] * ctx.scope.axes.count)
        return builder.call(aten.view.default, slot, list(shape), shape=shape, view_of=slot)


class WholeMomentsRule(MomentsRule):
    """Moments of a full tensor, without an accumulator."""

    def forward(self, ctx: NodeContext) -> Slot:
        builder = ctx.builder
        variance, mean, count = self._of_strip(ctx)
        out = builder.empty((*mean.shape, 3))
        for index, moment in enumerate((mean, variance)):
            builder.copy(self._column(ctx, out, index), moment)
        last = self._column(ctx, out, 2)
        builder.call(aten.fill_.Scalar, last, count, writes=last)
        return out


def _column(builder: ProgramBuilder, slot: Slot, index: int) -> Slot:
    return builder.call(aten.select.int, slot, -1, index, shape=slot.shape[:-1], view_of=slot, dtype=slot.dtype)


class AffineRule(Rule):
    """``x * scale + shift`` with a scale and a shift for each channel, of each sample or of all."""

    in_place = True

    def forward(self, ctx: NodeContext) -> Slot:
        builder, (scale, shift) = ctx.builder, self._halves(ctx)
        strip = ctx.strip(next(refs_in(ctx.node.argument("self"))))
        if strip.dtype != scale.dtype:  # computed in the wider type, rounded once
            wide = builder.cast(strip, scale.dtype)
            builder.call(aten.addcmul.out, shift, wide, scale, writes=wide, keywords={"out": wide})
            return builder.cast(wide, strip.dtype) if ctx.destination is None else builder.copy(ctx.destination, wide)
        if ctx.destination is not None:
            return builder.call(aten.addcmul.out, shift, strip, scale, writes=ctx.destination, keywords={"out": ctx.destination})
        return builder.call(aten.addcmul.default, shift, strip, scale, shape=ctx.out_shape)

    def _halves(self, ctx: NodeContext) -> tuple[Slot, Slot]:
        (name,) = refs_in(ctx.node.argument("scale_shift"))
        both = ctx.global_slot(name)
        shape = ctx.global_shape(name)[:-1]
        first, second = (ctx.builder.call(aten.select.int, both, -1, i, shape=shape, view_of=both) for i in range(2))
        return first, second

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, image, side = ctx.builder, ctx.node.argument("self"), ctx.node.argument("scale_shift")
        (name,) = refs_in(side)
        wide = ctx.scope.dtype_of(name)
        grad, owned = builder.cast(grad, wide), owned or grad.dtype != wide
        if ctx.needs_grad(side):
            shape = ctx.global_shape(name)
            both = builder.zeros(shape, wide)
            inner = range(2, len(grad.shape))
            dims = [*inner] if shape[0] == grad.shape[0] and ctx.is_per_sample(name) else [0, *inner]
            strip = ctx.strip(next(refs_in(image)))
            product = builder.call(aten.mul.Tensor, grad, strip, shape=grad.shape, dtype=wide)
            for index, terms in enumerate((product, grad)):
                total = builder.call(aten.sum.dim_IntList, terms, dims, True, shape=shape[:-1], dtype=wide)
                half = builder.call(aten.select.int, both, -1, index, shape=shape[:-1], view_of=both)
                builder.copy(half, total)
            ctx.add_grad(side, both, owned=True)
        if ctx.needs_grad(image):
            scale, _ = self._halves(ctx)
            if owned:
                ctx.add_grad(image, builder.call(aten.mul_.Tensor, grad, scale, writes=grad), owned=True)
            else:
                ctx.add_grad(image, builder.call(aten.mul.Tensor, grad, scale, shape=grad.shape, dtype=wide), owned=True)


#: Most temporary vectors of channels while a running statistic is computed.
_NUM_VECTORS = 4


class RunningStatisticRule(Rule):
    """``sft.running_mean`` and ``sft.running_var``: the next value of the buffer."""

    def forward(self, ctx: NodeContext) -> Slot:
        node, shape = ctx.node, ctx.global_shape(ctx.node.name)
        dtype, moments = ctx.scope.dtype_of(node.name), ctx.operand_slot(node.argument("moments"))
        keywords = {key: ctx.operand_slot(value) for key, value in node.arguments}
        scratch = _NUM_VECTORS * max(moments.num_bytes // moments.shape[-1], 1)
        return ctx.builder.call(FUNCTIONS[node.target], shape=shape, dtype=dtype, keywords=keywords, scratch_bytes=scratch)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        raise InternalError(f"{ctx.node.label}: buffers have no gradient")


class FrozenNormRule(Rule):
    """BatchNorm with frozen statistics: an affine map of each channel."""

    def forward(self, ctx: NodeContext) -> Slot:
        node = ctx.node
        arguments = [ctx.operand_slot(node.argument(name)) for name in ("input", "weight", "bias", "running_mean", "running_var")]
        out = ctx.builder.slot(ctx.out_shape)
        ctx.builder.call_many(
            aten._native_batch_norm_legit_no_training.default,
            (*arguments, node.argument("momentum"), node.argument("eps")),
            (out, None, None),
        )
        return out

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        node, builder = ctx.node, ctx.builder
        image, weight, bias = node.argument("input"), node.argument("weight"), node.argument("bias")
        strip = ctx.operand_slot(image)
        mask = [ctx.needs_grad(image), ctx.needs_grad(weight), ctx.needs_grad(bias)]
        channels = (strip.shape[1],)
        values, shapes = (image, weight, bias), (strip.shape, channels, channels)
        out = tuple(builder.slot(shape, ctx.dtype_of(v)) if m else None for m, shape, v in zip(mask, shapes, values, strict=True))
        mean, variance = (ctx.operand_slot(node.argument(name)) for name in ("running_mean", "running_var"))
        saved = builder.call(empty_statistics, mean, shape=(0,), dtype=mean.dtype)
        builder.call_many(
            aten.native_batch_norm_backward.default,
            (grad, strip, ctx.operand_slot(weight), mean, variance, saved, saved, False, node.argument("eps"), mask),
            out,
        )
        for value, slot in zip(values, out, strict=True):
            if slot is not None:
                ctx.add_grad(value, slot, owned=True)


def empty_statistics(running: Tensor) -> Tensor:
    """Empty tensor in place of statistics saved by a forward pass: CUDA requires tensors, and treats empty ones as absent.

    Both devices check the type: the CPU expects that of the running statistics, CUDA its accumulation type.
    """
    return running.new_empty((0,), dtype=torch.promote_types(running.dtype, torch.float32) if running.is_cuda else running.dtype)


class ResultActivationRule(Rule):
    """``relu`` and ``leaky_relu``: differentiated from their result, so they may overwrite the operand."""

    saves_output = True
    in_place = True
    overwrites = True

    def _slope(self, ctx: NodeContext) -> float | None:
        return None if ctx.node.target == "aten.relu.default" else float(ctx.node.argument("negative_slope"))

    def forward(self, ctx: NodeContext) -> Slot:
        operand = next(refs_in(ctx.node.argument("self")))
        strip, slope, builder = ctx.strip(operand), self._slope(ctx), ctx.builder
        target = ctx.destination if ctx.destination is not None else ctx.overwrite
        if slope is None:
            if target is None:
                return builder.call(aten.relu.default, strip, shape=ctx.out_shape)
            if target is ctx.overwrite:
                return builder.call(aten.relu_.default, target, writes=target)
            return builder.call(aten.clamp_min.out, strip, 0, writes=target, keywords={"out": target})
        if target is None:
            return builder.call(aten.leaky_relu.default, strip, slope, shape=ctx.out_shape)
        return builder.call(aten.leaky_relu.out, strip, slope, writes=target, keywords={"out": target})

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        value, first_row = ctx.values[ctx.node.name]
        result = ctx.narrow(value, ROWS, ctx.rows.new.start - first_row, ctx.new_rows)
        slope, builder, image = self._slope(ctx), ctx.builder, ctx.node.argument("self")
        if slope is None:
            arguments: tuple[Any, ...] = (grad, result, 0)
            plain, into = aten.threshold_backward.default, aten.threshold_backward.grad_input
        else:
            arguments = (grad, result, slope, True)
            plain, into = aten.leaky_relu_backward.default, aten.leaky_relu_backward.grad_input
        if owned:
            ctx.add_grad(image, builder.call(into, *arguments, writes=grad, keywords={"grad_input": grad}), owned=True)
        else:
            ctx.add_grad(image, builder.call(plain, *arguments, shape=grad.shape), owned=True)
