"""Transposed convolutions on a strip, and the sums of overlapping rows (see :mod:`sft.analysis.passes.decompose_windows`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.graph import refs_in
from sft.analysis.ir.ops.transposed import OverlapAddSpec, TransposedWindow, transposed_window_of
from sft.lower.context import NodeContext, accumulation_dtype
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["OverlapAddRule", "TransposedConvolutionRule"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _RowCrop:
    """How the rows that the operator makes from those read become the rows that are computed, along one axis.

    Attributes:
        padding: what the operator cuts off at both ends.
        output_padding: what it adds behind.
        before: what is cut off besides, in front.
        behind: and behind.
    """

    padding: int
    output_padding: int
    before: int
    behind: int

    @classmethod
    def of(cls, spread: TransposedWindow, low: int, high: int) -> _RowCrop:
        """``low`` rows too many in front, ``high`` behind (negative where some lack there, which no input row reaches)."""
        assert low >= 0
        lacking = low - high
        if 0 <= lacking < max(spread.stride, spread.dilation):
            return cls(low, lacking, 0, 0)  # as the operator itself is meant
        if lacking < 0:
            return cls(low, 0, 0, -lacking)
        return cls(max(high, 0), max(-high, 0), low - max(high, 0), 0)


class TransposedConvolutionRule(Rule):
    """``conv_transpose1d``, ``conv_transpose2d``, ``conv_transpose3d``: ATen's own, on the rows and columns read."""

    def forward(self, ctx: NodeContext) -> Slot:
        node, builder = ctx.node, ctx.builder
        (operand,) = refs_in(node.argument("input"))
        if ctx.has_empty_read(operand):
            return self._only_bias(ctx)
        strip, crops, shape = ctx.strip(operand), [], list(ctx.out_shape[:2])
        for axis, (part, read) in enumerate(ctx.spans(operand)):
            spread = transposed_window_of(node, axis)
            first, stop = read.start * spread.stride - spread.padding, (read.stop - 1) * spread.stride - spread.padding + spread.span
            crop = _RowCrop.of(spread, part.start - first, stop - part.stop)
            crops.append(crop)
            shape.append(crop.before + len(part) + crop.behind)
        ctx.saved.update(strip=strip, crops=crops)
        weight, bias = (ctx.operand_slot(node.argument(name)) for name in ("weight", "bias"))
        made = builder.call(aten.convolution.default, strip, weight, bias, *self._geometry(ctx), shape=shape)
        for axis, (crop, extent) in enumerate(zip(crops, shape[2:], strict=True)):
            made = ctx.narrow(made, axis, crop.before, extent - crop.before - crop.behind)
        return made

    @staticmethod
    def _only_bias(ctx: NodeContext) -> Slot:
        """Rows behind those that any input row reaches."""
        out = ctx.builder.empty(ctx.out_shape)
        return _fill_with_bias(ctx, out, ctx.operand_slot(ctx.node.argument("bias")))

    @staticmethod
    def _geometry(ctx: NodeContext) -> tuple[Any, ...]:
        spreads = [transposed_window_of(ctx.node, axis) for axis in range(ctx.scope.axes.count)]
        crops: list[_RowCrop] = ctx.saved["crops"]
        return (
            [spread.stride for spread in spreads],
            [crop.padding for crop in crops],
            [spread.dilation for spread in spreads],
            True,
            [crop.output_padding for crop in crops],
            ctx.node.argument("groups"),
        )

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        node, builder = ctx.node, ctx.builder
        image, weight, bias = node.argument("input"), node.argument("weight"), node.argument("bias")
        _add_bias_grad(ctx, bias, grad)
        mask = [ctx.needs_grad(image), ctx.needs_grad(weight), False]
        if ctx.has_empty_read(next(refs_in(image))) or not any(mask):
            return
        crops: list[_RowCrop] = ctx.saved["crops"]
        flat = [size for crop in reversed(crops) for size in (crop.before, crop.behind)]
        if any(flat):
            extents = (n + crop.before + crop.behind for n, crop in zip(grad.shape[2:], crops, strict=True))
            grad = builder.call(aten.constant_pad_nd.default, grad, flat, 0.0, shape=(*grad.shape[:2], *extents), dtype=grad.dtype)
        strip, kernel = ctx.saved["strip"], ctx.operand_slot(weight)
        out = tuple(builder.slot(slot.shape) if wanted else None for slot, wanted in zip((strip, kernel), mask[:2], strict=True))
        builder.call_many(aten.convolution_backward.default, (grad, strip, kernel, None, *self._geometry(ctx), mask), (*out, None))
        for value, slot in zip((image, weight), out, strict=True):
            if slot is not None:
                ctx.add_grad(value, slot, owned=True)


@dataclass(frozen=True, slots=True)
class _OverlapMap:
    """Which rows of the products land on which rows of the sums, in one step.

    Attributes:
        taps: rows of the kernel, each with the first of its rows, how many, and where they land.
        stride: rows from one landing to the next.
        groups: of channels.
    """

    taps: tuple[tuple[int, int, int], ...]
    stride: int
    groups: int

    def _pairs(self, products: Tensor, sums: Tensor) -> list[tuple[Tensor, Tensor]]:
        apart = products.unflatten(1, (self.groups, len(self.taps), -1))
        onto = sums.unflatten(1, (self.groups, -1))
        return [
            (apart[:, :, tap].narrow(3, first, count), onto.narrow(3, start, self.stride * (count - 1) + 1)[:, :, :, :: self.stride])
            for tap, (first, count, start) in enumerate(self.taps)
            if count
        ]

    def add(self, products: Tensor, sums: Tensor) -> None:
        """Add the products to the sums."""
        for product, total in self._pairs(products, sums):
            total.add_(product)

    def take(self, sums: Tensor, products: Tensor) -> None:
        """The adjoint: give each product what arrives at its sum."""
        for product, total in self._pairs(products, sums):
            product.copy_(total)


class OverlapAddRule(Rule):
    """Sums of products, row by row; in half precision they are rounded once."""

    saves_input = False
    in_place = True

    def _landing(self, ctx: NodeContext, operand: str) -> _OverlapMap:
        row, (part, read) = ctx.scope.specs[ctx.node.name], ctx.spans(operand)[ROWS]
        assert isinstance(row, OverlapAddSpec)
        spread = row.spread(ctx.node)
        return _OverlapMap(tuple(spread.tap_ranges(read, part)), spread.stride, ctx.node.argument("groups"))

    def forward(self, ctx: NodeContext) -> Slot:
        node, builder = ctx.node, ctx.builder
        (operand,) = refs_in(node.argument("self"))
        dtype = ctx.scope.dtype_of(node.name)
        wide = accumulation_dtype(dtype)
        out = ctx.destination if ctx.destination is not None and wide == dtype else builder.empty(ctx.out_shape, wide)
        _fill_with_bias(ctx, out, ctx.operand_slot(node.argument("bias")))
        if not ctx.has_empty_read(operand):
            landing, products = self._landing(ctx, operand), ctx.strip(operand)
            # Adding a narrower type makes a wider copy of what is added.
            most = max(count for _, count, _ in landing.taps) if wide != products.dtype else 0
            pixels = math.prod(ctx.scope.axes.of(products.shape)[1:])
            scratch_bytes = products.shape[0] * ctx.out_shape[1] * most * pixels * wide.itemsize
            builder.call(landing.add, products, out, writes=out, scratch_bytes=scratch_bytes)
        return builder.cast(out, dtype)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        node, builder = ctx.node, ctx.builder
        image = node.argument("self")
        (operand,) = refs_in(image)
        _add_bias_grad(ctx, node.argument("bias"), grad)
        if ctx.has_empty_read(operand) or not ctx.needs_grad(image):
            return
        products = builder.zeros(ctx.strip(operand).shape, ctx.strip(operand).dtype)
        builder.call(self._landing(ctx, operand).take, grad, products, writes=products)
        ctx.add_grad(image, products, owned=True)


def _fill_with_bias(ctx: NodeContext, out: Slot, bias: Slot | None) -> Slot:
    """The bias, or zeros, everywhere."""
    if bias is None:
        return ctx.builder.call(aten.zero_.default, out, writes=out)
    shape = (bias.shape[0], *[1] * ctx.scope.axes.count)
    spread = ctx.builder.call(aten.view.default, bias, list(shape), shape=shape, view_of=bias)
    return ctx.builder.copy(out, spread)


def _add_bias_grad(ctx: NodeContext, bias: Any, grad: Slot) -> None:
    """Sum the gradient over batch and axes; wide, as it is one strip's share."""
    if not ctx.needs_grad(bias):
        return
    wide, dims = accumulation_dtype(grad.dtype), [0, *range(2, len(grad.shape))]
    keywords = {"dtype": wide} if wide != grad.dtype else {}
    ctx.add_grad(bias, ctx.builder.call(aten.sum.dim_IntList, grad, dims, shape=grad.shape[1:2], dtype=wide, keywords=keywords), owned=True)
