"""Transposed convolution on a strip, and overlap-add: the sum of kernel rows at output rows.

A transposed convolution either runs as ATen's operator on the rows read, or decomposed (:mod:`sft.analysis.passes.decompose_windows`) into
a convolution with all rows of the kernel and an overlap-add.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.graph import refs_in
from sft.analysis.ir.ops.transposed import OverlapAddSpec, TransposedWindow, transposed_window_of
from sft.lower.context import NodeContext, accumulation_dtype
from sft.lower.program import Slot
from sft.lower.rules.base import Rule
from sft.lower.rules.row_pieces import RowWindow, divide_rows, is_divided

__all__ = ["OverlapAddRule", "TransposedConvolutionRule"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _RowCrop:
    """The crop along one axis from all output rows of the rows read to the rows of the strip.

    Attributes:
        padding: rows that the operator crops at both ends.
        output_padding: rows that the operator adds at the end.
        before: rows cropped afterwards, at the start.
        after: rows cropped afterwards, at the end.
    """

    padding: int
    output_padding: int
    before: int
    after: int

    @classmethod
    def of(cls, window: TransposedWindow, low: int, high: int) -> _RowCrop:
        """The crop of ``low`` rows at the start and ``high`` at the end; a negative ``high`` adds rows that no input row reaches."""
        assert low >= 0
        missing = low - high
        if 0 <= missing < max(window.stride, window.dilation):
            return cls(low, missing, 0, 0)  # the operator's own output padding
        if missing < 0:
            return cls(low, 0, 0, -missing)
        return cls(max(high, 0), max(-high, 0), low - max(high, 0), 0)


class TransposedConvolutionRule(Rule):
    """``conv_transpose1d``, ``conv_transpose2d``, ``conv_transpose3d``: ATen's operator on the rows and columns read."""

    def forward(self, ctx: NodeContext) -> Slot:
        node, builder = ctx.node, ctx.builder
        (operand,) = refs_in(node.argument("input"))
        if ctx.has_empty_read(operand):
            return self._only_bias(ctx)
        strip, crops, shape = ctx.strip(operand), [], list(ctx.out_shape[:2])
        for axis, (computed, read) in enumerate(ctx.spans(operand)):
            window = transposed_window_of(node, axis)
            first, stop = read.start * window.stride - window.padding, (read.stop - 1) * window.stride - window.padding + window.span
            crop = _RowCrop.of(window, computed.start - first, stop - computed.stop)
            crops.append(crop)
            shape.append(crop.before + len(computed) + crop.after)
        ctx.saved.update(strip=strip, crops=crops)
        weight, bias = (ctx.operand_slot(node.argument(name)) for name in ("weight", "bias"))
        output = builder.call(aten.convolution.default, strip, weight, bias, *self._geometry(ctx), shape=shape)
        for axis, (crop, extent) in enumerate(zip(crops, shape[2:], strict=True)):
            output = ctx.narrow(output, axis, crop.before, extent - crop.before - crop.after)
        return output

    @staticmethod
    def _only_bias(ctx: NodeContext) -> Slot:
        """Output rows that no input row reaches: the bias."""
        out = ctx.builder.empty(ctx.out_shape)
        return _fill_with_bias(ctx, out, ctx.operand_slot(ctx.node.argument("bias")))

    @staticmethod
    def _geometry(ctx: NodeContext) -> tuple[Any, ...]:
        windows = [transposed_window_of(ctx.node, axis) for axis in range(ctx.scope.axes.count)]
        crops: list[_RowCrop] = ctx.saved["crops"]
        return (
            [window.stride for window in windows],
            [crop.padding for crop in crops],
            [window.dilation for window in windows],
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
        flat = [size for crop in reversed(crops) for size in (crop.before, crop.after)]
        if any(flat):
            extents = (n + crop.before + crop.after for n, crop in zip(grad.shape[2:], crops, strict=True))
            grad = builder.call(aten.constant_pad_nd.default, grad, flat, 0.0, shape=(*grad.shape[:2], *extents), dtype=grad.dtype)
        strip, kernel = ctx.saved["strip"], ctx.operand_slot(weight)
        whole = (grad, strip, self._geometry(ctx))
        calls: Iterable[tuple[Slot, Slot, tuple[Any, ...], list[bool]]] = [(*whole, mask)]
        terms = self._in_pieces(ctx, *whole) if mask[1] else None
        if terms is not None:
            calls = chain([(*whole, [mask[0], False, False])], ((*term, [False, True, False]) for term in terms))
        for out_grad, read, geometry, output_mask in calls:
            if not any(output_mask):
                continue
            out = tuple(builder.slot(slot.shape) if needed else None for slot, needed in zip((read, kernel), output_mask[:2], strict=True))
            builder.call_many(aten.convolution_backward.default, (out_grad, read, kernel, None, *geometry, output_mask), (*out, None))
            for value, slot in zip((image, weight), out, strict=True):
                if slot is not None:
                    ctx.add_grad(value, slot, owned=True)

    @staticmethod
    def _in_pieces(
        ctx: NodeContext, grad: Slot, strip: Slot, geometry: tuple[Any, ...]
    ) -> Iterator[tuple[Slot, Slot, tuple[Any, ...]]] | None:
        """The terms of a large weight gradient: output's gradient, image and geometry of each piece of rows; ``None`` for one call."""
        strides, (padding, *paddings), dilations, is_transposed, (_, *output_paddings), groups = geometry
        rows = RowWindow(kernel_rows=transposed_window_of(ctx.node, 0).span, stride=strides[0], padding=padding)
        if not is_divided(ctx.scope, grad, strip, rows):
            return None
        inner = (strides, [0, *paddings], dilations, is_transposed, [0, *output_paddings], groups)
        return ((image, out, inner) for image, out in divide_rows(ctx.builder, grad, strip, rows, num_axes=len(strides)))


@dataclass(frozen=True, slots=True)
class _OverlapMap:
    """The rows of products that are added to each row of sums, in one step.

    Attributes:
        taps: for each row of the kernel: first row of its products, number of rows, and first row of the sums.
        stride: distance of consecutive products in the sums.
        groups: groups of channels.
    """

    taps: tuple[tuple[int, int, int], ...]
    stride: int
    groups: int

    def _pairs(self, products: Tensor, sums: Tensor) -> list[tuple[Tensor, Tensor]]:
        by_tap = products.unflatten(1, (self.groups, len(self.taps), -1))
        by_group = sums.unflatten(1, (self.groups, -1))
        return [
            (by_tap[:, :, tap].narrow(3, first, count), by_group.narrow(3, start, self.stride * (count - 1) + 1)[:, :, :, :: self.stride])
            for tap, (first, count, start) in enumerate(self.taps)
            if count
        ]

    def add(self, products: Tensor, sums: Tensor) -> None:
        """Add the products to the sums."""
        for product, total in self._pairs(products, sums):
            total.add_(product)

    def gather(self, sums: Tensor, products: Tensor) -> None:
        """The adjoint: copy to each product the gradient of its sum."""
        for product, total in self._pairs(products, sums):
            product.copy_(total)


class OverlapAddRule(Rule):
    """Overlap-add of products, row by row; in half precision the sum is rounded once."""

    in_place = True

    def _overlap_map(self, ctx: NodeContext, operand: str) -> _OverlapMap:
        row, (computed, read) = ctx.scope.specs[ctx.node.name], ctx.spans(operand)[ROWS]
        assert isinstance(row, OverlapAddSpec)
        window = row.spread(ctx.node)
        return _OverlapMap(tuple(window.tap_ranges(read, computed)), window.stride, ctx.node.argument("groups"))

    def forward(self, ctx: NodeContext) -> Slot:
        node, builder = ctx.node, ctx.builder
        (operand,) = refs_in(node.argument("self"))
        dtype = ctx.scope.dtype_of(node.name)
        wide = accumulation_dtype(dtype)
        out = ctx.destination if ctx.destination is not None and wide == dtype else builder.empty(ctx.out_shape, wide)
        _fill_with_bias(ctx, out, ctx.operand_slot(node.argument("bias")))
        if not ctx.has_empty_read(operand):
            overlap, products = self._overlap_map(ctx, operand), ctx.strip(operand)
            # Adding a narrower type makes a wider copy of the addend.
            copied_rows = max(count for _, count, _ in overlap.taps) if wide != products.dtype else 0
            pixels = math.prod(ctx.scope.axes.of(products.shape)[1:])
            scratch_bytes = products.shape[0] * ctx.out_shape[1] * copied_rows * pixels * wide.itemsize
            builder.call(overlap.add, products, out, writes=out, scratch_bytes=scratch_bytes)
        return builder.cast(out, dtype)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        node, builder = ctx.node, ctx.builder
        image = node.argument("self")
        (operand,) = refs_in(image)
        _add_bias_grad(ctx, node.argument("bias"), grad)
        if ctx.has_empty_read(operand) or not ctx.needs_grad(image):
            return
        products = builder.zeros(ctx.strip(operand).shape, ctx.strip(operand).dtype)
        builder.call(self._overlap_map(ctx, operand).gather, grad, products, writes=products)
        ctx.add_grad(image, products, owned=True)


def _fill_with_bias(ctx: NodeContext, out: Slot, bias: Slot | None) -> Slot:
    """Fill ``out`` with the bias, or with zeros."""
    if bias is None:
        return ctx.builder.call(aten.zero_.default, out, writes=out)
    shape = (bias.shape[0], *[1] * ctx.scope.axes.count)
    expanded = ctx.builder.call(aten.view.default, bias, list(shape), shape=shape, view_of=bias)
    return ctx.builder.copy(out, expanded)


def _add_bias_grad(ctx: NodeContext, bias: Any, grad: Slot) -> None:
    """Report the gradient of the bias: the sum over batch and axes, in a wider type for half precision, as strips are accumulated."""
    if not ctx.needs_grad(bias):
        return
    wide, dims = accumulation_dtype(grad.dtype), [0, *range(2, len(grad.shape))]
    keywords = {"dtype": wide} if wide != grad.dtype else {}
    ctx.add_grad(bias, ctx.builder.call(aten.sum.dim_IntList, grad, dims, shape=grad.shape[1:2], dtype=wide, keywords=keywords), owned=True)
