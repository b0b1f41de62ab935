"""Convolution and pooling on a strip.

Padding is applied here, and only where the read interval leaves the image: where both image borders are in the strip the
operator's own symmetric padding does it; a convolution finds its zero border in the operand's buffer; elsewhere the strip is
padded explicitly.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from sft.analysis.graph import Node, refs_in
from sft.analysis.operators import Window, window_of
from sft.analysis.schedule import Read
from sft.lower.context import NodeContext, Scope, sum_dtype
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["AvgPool", "Convolution", "MaxPool", "column_padding"]

aten = torch.ops.aten


def _windows(ctx: NodeContext) -> tuple[Window, Window]:
    rows, columns = window_of(ctx.node, 0), window_of(ctx.node, 1)
    assert rows is not None and columns is not None
    return rows, columns


def _pad(ctx: NodeContext, strip: Slot, low: int, high: int, left: int, right: int, value: float) -> Slot:
    if not (low or high or left or right):
        return strip
    batch, channels, height, width = strip.shape
    shape = (batch, channels, height + low + high, width + left + right)
    if height and width:
        return ctx.emitter.call(aten.constant_pad_nd.default, strip, [left, right, low, high], value, shape=shape)
    out = ctx.emitter.empty(shape)
    return ctx.emitter.call(aten.fill_.Scalar, out, value, writes=out)


class _Windowed(Rule):
    """Shared by convolution and pooling: which padding the operator applies itself, and which is made explicit."""

    border_value: ClassVar[float] = 0.0

    def _padded(self, ctx: NodeContext, operand: str, windows: tuple[Window, Window]) -> tuple[Slot, tuple[int, int]]:
        """The padded strip and the symmetric paddings (height, width) left to the operator."""
        read, (left, right) = ctx.read_of(operand), column_padding(ctx.scope, ctx.node, operand)
        is_empty = ctx.reads_nothing(operand)
        own_height = read.pad_low if read.pad_low == read.pad_high and not is_empty else 0
        own_width = left if left == right and not is_empty else 0
        if not self._own_padding_fits(own_height, own_width, windows):
            own_height = own_width = 0
        padded = _pad(
            ctx,
            ctx.strip(operand),
            read.pad_low - own_height,
            read.pad_high - own_height,
            left - own_width,
            right - own_width,
            self.border_value,
        )
        ctx.saved["padded"] = padded
        ctx.saved["offset"] = (read.pad_low - own_height, left - own_width)
        return padded, (own_height, own_width)

    def _own_padding_fits(self, height: int, width: int, windows: tuple[Window, Window]) -> bool:
        return True

    def _unpadded(self, ctx: NodeContext, operand: str, grad: Slot) -> Slot:
        """The gradient of the rows and columns read, given the gradient of the padded strip."""
        top, left = ctx.saved["offset"]
        inner = ctx.emitter.narrow(grad, 2, top, len(ctx.read_of(operand).rows))
        return ctx.emitter.narrow(inner, 3, left, len(ctx.columns_of(operand).rows))


def column_padding(scope: Scope, node: Node, operand: str) -> tuple[int, int]:
    """Padding left and right of what a windowed operator reads; where the two differ ATen's operators cannot apply it."""
    read = next(read for read in scope.columns[node.name].reads if read.operand == operand)
    return read.pad_low, read.pad_high


class Convolution(_Windowed):
    """``conv2d``; the explicitly padded strip is what the backward differentiates."""

    def forward(self, ctx: NodeContext) -> Slot:
        node = ctx.node
        operand = next(refs_in(node.argument("input")))
        left, right = column_padding(ctx.scope, node, operand)
        bordered = ctx.bordered_strip(operand) if left == right else None
        if bordered is not None:
            padded, padding = bordered, (0, left)
            ctx.saved.update(padded=padded, offset=(ctx.read_of(operand).pad_low, 0))
        else:
            padded, padding = self._padded(ctx, operand, _windows(ctx))
        bias = node.argument("bias")
        ctx.saved["padding"] = padding
        return ctx.emitter.call(
            aten.convolution.default,
            padded,
            ctx.operand_slot(node.argument("weight")),
            ctx.operand_slot(bias),
            *self._geometry(ctx),
            shape=ctx.out_shape,
        )

    def _geometry(self, ctx: NodeContext) -> tuple[Any, ...]:
        rows, columns = _windows(ctx)
        return (
            [rows.stride, columns.stride],
            list(ctx.saved["padding"]),
            [rows.dilation, columns.dilation],
            False,
            [0, 0],
            ctx.node.argument("groups"),
        )

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        node, e, padded = ctx.node, ctx.emitter, ctx.saved["padded"]
        image, weight, bias = node.argument("input"), node.argument("weight"), node.argument("bias")
        operand = next(refs_in(image))
        weight_slot = ctx.operand_slot(weight)
        mask = [ctx.needs_grad(image) and not ctx.reads_nothing(operand), ctx.needs_grad(weight), ctx.needs_grad(bias)]
        if mask[2] and sum_dtype(grad.dtype) != grad.dtype:
            # ATen rounds each strip's sum to half precision.
            wide = sum_dtype(grad.dtype)
            shape = (weight_slot.shape[0],)
            total = e.call(aten.sum.dim_IntList, grad, [0, 2, 3], shape=shape, dtype=wide, keywords={"dtype": wide})
            ctx.add_grad(bias, total, owned=True)
            mask[2] = False
        if not any(mask):
            return
        out = tuple(
            e.slot(shape) if wanted else None
            for wanted, shape in zip(mask, (padded.shape, weight_slot.shape, (weight_slot.shape[0],)), strict=True)
        )
        sizes = None if bias is None else [weight_slot.shape[0]]
        e.call_many(aten.convolution_backward.default, (grad, padded, weight_slot, sizes, *self._geometry(ctx), mask), out)
        if out[0] is not None:
            ctx.add_grad(image, self._unpadded(ctx, operand, out[0]), owned=True)
        if out[1] is not None:
            ctx.add_grad(weight, out[1], owned=True)
        if out[2] is not None:
            ctx.add_grad(bias, out[2], owned=True)


class MaxPool(_Windowed):
    """``max_pool2d``.

    On a strip the indices, eight bytes an element, are found again in the backward pass instead of waiting for it: that costs no
    multiplication, and they would be the largest thing that a strip keeps. Kept whole they are saved, as in plain PyTorch.
    """

    border_value = float("-inf")

    def _own_padding_fits(self, height: int, width: int, windows: tuple[Window, Window]) -> bool:
        return 2 * height <= windows[0].kernel and 2 * width <= windows[1].kernel

    def forward(self, ctx: NodeContext) -> Slot:
        operand = next(refs_in(ctx.node.argument("self")))
        rows, columns = _windows(ctx)
        if ctx.is_whole:
            padded, padding = ctx.strip(operand), (rows.pad_low, columns.pad_low)
            ctx.saved.update(padded=padded, offset=(0, 0))
        else:
            padded, padding = self._padded(ctx, operand, (rows, columns))
        ctx.saved["geometry"] = (
            [rows.kernel, columns.kernel],
            [rows.stride, columns.stride],
            list(padding),
            [rows.dilation, columns.dilation],
            rows.ceil,
        )
        out, ctx.saved["indices"] = self._pool(ctx)
        return out

    def _pool(self, ctx: NodeContext) -> tuple[Slot, Slot]:
        out, indices = ctx.emitter.slot(ctx.out_shape), ctx.emitter.slot(ctx.out_shape, torch.int64)
        arguments = (ctx.saved["padded"], *ctx.saved["geometry"])
        ctx.emitter.call_many(aten.max_pool2d_with_indices.default, arguments, (out, indices))
        return out, indices

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image, padded = ctx.node.argument("self"), ctx.saved["padded"]
        operand = next(refs_in(image))
        if ctx.reads_nothing(operand):
            return
        indices = ctx.saved["indices"] if ctx.is_whole else self._pool(ctx)[1]
        out = ctx.emitter.call(
            aten.max_pool2d_with_indices_backward.default,
            grad,
            padded,
            *ctx.saved["geometry"],
            indices,
            shape=padded.shape,
        )
        ctx.add_grad(image, self._unpadded(ctx, operand, out), owned=True)


def _counts_as_inside(read: Read, window: Window, counted: bool) -> bool:
    """Whether every element that a pooling reads along an axis counts: none is padding, or padding counts too."""
    return not (read.pad_low or read.pad_high) or (counted and read.pad_high <= window.pad_high)


class AvgPool(_Windowed):
    """``avg_pool2d``.

    The divisor counts elements inside the image (or the image and its declared padding). A strip that holds no border, or only
    counted padding, has the operator's own divisor; so has one of full width, whose left and right borders the operator knows. At
    other borders the strip is padded, summed, and divided by the sums of a mask that is one where elements count.
    """

    def forward(self, ctx: NodeContext) -> Slot:
        operand = next(refs_in(ctx.node.argument("self")))
        windows = _windows(ctx)
        rows, columns = windows
        read = ctx.read_of(operand)
        override, counted = ctx.node.argument("divisor_override"), ctx.node.argument("count_include_pad")
        whole = ctx.is_whole and 2 * rows.pad_low <= rows.kernel and 2 * columns.pad_low <= columns.kernel
        across = ctx.columns_of(operand)
        left, right = (0, 0) if ctx.is_full_width else (across.pad_low, across.pad_high)
        native = override is not None or (
            _counts_as_inside(read, rows, counted) and (ctx.is_full_width or _counts_as_inside(across, columns, counted))
        )
        e = ctx.emitter
        if whole or native:
            if whole:
                padded, padding = ctx.strip(operand), (rows.pad_low, columns.pad_low)
                ctx.saved["offset"] = (0, 0)
            else:
                padded = _pad(ctx, ctx.strip(operand), read.pad_low, read.pad_high, left, right, 0.0)
                padding = (0, columns.pad_low if ctx.is_full_width else 0)
                ctx.saved["offset"] = (read.pad_low, left)
            ctx.saved.update(padded=padded, counts=None, geometry=self._arguments(windows, padding, rows.ceil, counted, override))
            return e.call(aten.avg_pool2d.default, padded, *ctx.saved["geometry"], shape=ctx.out_shape)
        width, out_width = len(across.rows), ctx.out_shape[3]
        if ctx.is_full_width:
            left = columns.pad_low
            right = max(0, (out_width - 1) * columns.stride + columns.kernel - left - width)
        padded = _pad(ctx, ctx.strip(operand), read.pad_low, read.pad_high, left, right, 0.0)
        mask = e.zeros((1, 1, *padded.shape[2:]))
        extra = (rows.pad_low, rows.pad_high, columns.pad_low, columns.pad_high) if counted else (0, 0, 0, 0)
        top = max(0, read.pad_low - extra[0])
        bottom = read.pad_low + len(read.rows) + min(read.pad_high, extra[1])
        begin, end = max(0, left - extra[2]), left + width + min(right, extra[3])
        inner = e.narrow(e.narrow(mask, 2, top, bottom - top), 3, begin, end - begin)
        e.call(aten.fill_.Scalar, inner, 1.0, writes=inner)
        geometry = self._arguments(windows, (0, 0), False, True, 1)
        counts = e.call(aten.avg_pool2d.default, mask, *geometry, shape=(1, 1, ctx.new_rows, out_width))
        ctx.saved.update(padded=padded, counts=counts, offset=(read.pad_low, left), geometry=geometry)
        total = e.call(aten.avg_pool2d.default, padded, *geometry, shape=ctx.out_shape)
        return e.call(aten.div_.Tensor, total, counts, writes=total)

    @staticmethod
    def _arguments(
        windows: tuple[Window, Window], padding: tuple[int, int], ceil: bool, counted: bool, override: int | None
    ) -> tuple[Any, ...]:
        rows, columns = windows
        return ([rows.kernel, columns.kernel], [rows.stride, columns.stride], list(padding), ceil, counted, override)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image, padded, e = ctx.node.argument("self"), ctx.saved["padded"], ctx.emitter
        operand = next(refs_in(image))
        if ctx.reads_nothing(operand):
            return
        if ctx.saved["counts"] is not None:
            grad = e.call(aten.div.Tensor, grad, ctx.saved["counts"], shape=grad.shape)
        out = e.call(aten.avg_pool2d_backward.default, grad, padded, *ctx.saved["geometry"], shape=padded.shape)
        ctx.add_grad(image, self._unpadded(ctx, operand, out), owned=True)
