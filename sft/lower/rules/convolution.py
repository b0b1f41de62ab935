"""Convolution and average pooling on a strip, and the base class of all poolings.

Padding is needed only where the read interval leaves the image. Three mechanisms apply it, in this order of preference:

1. the operator's own symmetric padding, if both image borders are in the strip;
2. rows of zeros in the operand's buffer, for a convolution;
3. an explicitly padded copy of the strip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch

from sft.analysis.ir.axes import COLUMNS, ROWS
from sft.analysis.ir.graph import Node, refs_in
from sft.analysis.ir.ops import Window
from sft.analysis.tiling.strips import OperandRead
from sft.lower.context import NodeContext, SegmentInfo, accumulation_dtype
from sft.lower.program import Slot
from sft.lower.rules.base import Rule
from sft.lower.rules.row_pieces import RowWindow, divide_rows, is_divided

__all__ = ["AvgPoolRule", "ConvolutionRule", "PoolRule", "as_own_axes", "as_two_axes", "column_padding", "kernel_windows"]

aten = torch.ops.aten

#: Number of floats in an AVX-512 vector. For channels-last images with fewer channels, oneDNN's weight gradient of a strided pointwise
#: convolution (``jit_1x1:avx512_core`` in torch 2.13, seen on an AMD EPYC) writes past its scratchpad and crashes the process.
_VECTOR_CHANNELS = 16

#: Padding before and after, for each axis.
Padding = Sequence[tuple[int, int]]


def kernel_windows(ctx: NodeContext) -> tuple[Window, ...]:
    """The sliding window of the operator along each axis."""
    return ctx.scope.windows(ctx.node.name)


def _paddings(ctx: NodeContext, operand: str) -> list[tuple[int, int]]:
    """Padding that the strip and the panel read, and the declared padding of axes that are not tiled."""
    rows, columns = ctx.read_of(operand), ctx.columns_of(operand)
    declared = [(window.pad_low, window.pad_high) for window in kernel_windows(ctx)]
    return [(rows.pad_low, rows.pad_high), (columns.pad_low, columns.pad_high), *declared[2:]][: len(declared)]


def _emit_padding(ctx: NodeContext, strip: Slot, padding: Padding, value: float) -> Slot:
    if not any(low or high for low, high in padding):
        return strip
    lead = len(strip.shape) - len(padding)
    grown = [extent + low + high for extent, (low, high) in zip(strip.shape[lead:], padding, strict=True)]
    shape = (*strip.shape[:lead], *grown)
    if all(strip.shape):
        flat = [size for low, high in reversed(padding) for size in (low, high)]
        return ctx.builder.call(aten.constant_pad_nd.default, strip, flat, value, shape=shape)
    out = ctx.builder.empty(shape)
    return ctx.builder.call(aten.fill_.Scalar, out, value, writes=out)


class _WindowedRule(Rule):
    """Base of convolution and pooling: divides padding between the operator and an explicit copy.

    Attributes:
        border_value: the value of padding.
    """

    border_value: ClassVar[float] = 0.0

    def padded(self, ctx: NodeContext, operand: str, windows: Sequence[Window]) -> tuple[Slot, list[int]]:
        """The padded strip and the symmetric paddings left to the operator."""
        paddings, is_empty = _paddings(ctx, operand), ctx.has_empty_read(operand)
        native = [low if low == high and not is_empty else 0 for low, high in paddings]
        if not self.native_padding_fits(native, windows):
            native = [0] * len(native)
        explicit = [(low - size, high - size) for (low, high), size in zip(paddings, native, strict=True)]
        padded = _emit_padding(ctx, ctx.strip(operand), explicit, self.border_value)
        ctx.saved.update(padded=padded, offset=[low for low, _ in explicit])
        return padded, native

    def native_padding_fits(self, native: Sequence[int], windows: Sequence[Window]) -> bool:
        """True if the operator accepts these symmetric paddings."""
        return True

    def unpadded(self, ctx: NodeContext, operand: str, grad: Slot) -> Slot:
        """The gradient of the rows and columns read, from that of the padded strip."""
        extents = ctx.scope.axes.of(ctx.scope.shapes[operand])
        lengths = [len(ctx.read_of(operand).rows), len(ctx.columns_of(operand).rows), *extents[2:]]
        for axis, offset in enumerate(ctx.saved["offset"]):
            grad = ctx.narrow(grad, axis, offset, lengths[axis])
        return grad


def column_padding(scope: SegmentInfo, node: Node, operand: str) -> tuple[int, int]:
    """Left and right padding of a windowed operator's reads; ATen's operators apply it only if both are equal."""
    read = next(read for read in scope.columns[node.name].reads if read.operand == operand)
    return read.pad_low, read.pad_high


class ConvolutionRule(_WindowedRule):
    """``conv1d``, ``conv2d``, ``conv3d``; the backward differentiates the convolution of the padded strip."""

    def forward(self, ctx: NodeContext) -> Slot:
        node = ctx.node
        operand = next(refs_in(node.argument("input")))
        paddings = _paddings(ctx, operand)
        symmetric = all(low == high for low, high in paddings[1:])
        bordered = ctx.zero_padded_strip(operand) if symmetric else None
        if bordered is not None:
            padded, padding = bordered, [0, *(low for low, _ in paddings[1:])]
            ctx.saved.update(padded=padded, offset=[ctx.read_of(operand).pad_low, *[0] * (len(paddings) - 1)])
        else:
            padded, padding = self.padded(ctx, operand, kernel_windows(ctx))
        bias = node.argument("bias")
        ctx.saved["padding"] = padding
        return ctx.builder.call(
            aten.convolution.default,
            padded,
            ctx.operand_slot(node.argument("weight")),
            ctx.operand_slot(bias),
            *self._geometry(ctx),
            shape=ctx.out_shape,
        )

    def _geometry(self, ctx: NodeContext) -> tuple[Any, ...]:
        windows = kernel_windows(ctx)
        return (
            [window.stride for window in windows],
            list(ctx.saved["padding"]),
            [window.dilation for window in windows],
            False,
            [0] * len(windows),
            ctx.node.argument("groups"),
        )

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        node, builder, padded = ctx.node, ctx.builder, ctx.saved["padded"]
        image, weight, bias = node.argument("input"), node.argument("weight"), node.argument("bias")
        operand = next(refs_in(image))
        weight_slot = ctx.operand_slot(weight)
        mask = [ctx.needs_grad(image) and not ctx.has_empty_read(operand), ctx.needs_grad(weight), ctx.needs_grad(bias)]
        if mask[2] and (accumulation_dtype(grad.dtype) != grad.dtype or not mask[1]):
            # ATen would round each strip's sum to half precision; and oneDNN computes the weight's gradient with that of the bias.
            wide = accumulation_dtype(grad.dtype)
            shape, dims = (weight_slot.shape[0],), [0, *range(2, len(grad.shape))]
            total = builder.call(aten.sum.dim_IntList, grad, dims, shape=shape, dtype=wide, keywords={"dtype": wide})
            ctx.add_grad(bias, total, owned=True)
            mask[2] = False
        whole = (grad, padded, self._geometry(ctx))
        calls: Iterable[tuple[Slot, Slot, tuple[Any, ...], list[bool]]] = [(*whole, mask)]
        summed = (grad, *self._gathered(ctx)) if mask[1] and self._gathers_few_channels(ctx) else whole
        terms = self._in_pieces(ctx, *summed) if mask[1] else None
        if summed is not whole or terms is not None:
            calls = chain([(*whole, [mask[0], False, False])], ((*term, [False, *mask[1:]]) for term in terms or [summed]))
        sizes = None if bias is None else [weight_slot.shape[0]]
        for out_grad, read, geometry, output_mask in calls:
            if not any(output_mask):
                continue
            shapes = (read.shape, weight_slot.shape, (weight_slot.shape[0],))
            out = tuple(builder.slot(shape) if needed else None for needed, shape in zip(output_mask, shapes, strict=True))
            builder.call_many(aten.convolution_backward.default, (out_grad, read, weight_slot, sizes, *geometry, output_mask), out)
            if out[0] is not None:
                ctx.add_grad(image, self.unpadded(ctx, operand, out[0]), owned=True)
            if out[1] is not None:
                ctx.add_grad(weight, out[1], owned=True)
            if out[2] is not None:
                ctx.add_grad(bias, out[2], owned=True)

    @staticmethod
    def _in_pieces(
        ctx: NodeContext, grad: Slot, read: Slot, geometry: tuple[Any, ...]
    ) -> Iterator[tuple[Slot, Slot, tuple[Any, ...]]] | None:
        """The terms of a large weight gradient: output's gradient, image and geometry of each piece of rows; ``None`` for one call."""
        window, ((stride, *strides), (padding, *paddings), *others) = kernel_windows(ctx)[0], geometry
        rows = RowWindow(kernel_rows=(window.kernel - 1) * window.dilation + 1, stride=stride, padding=padding)
        if not is_divided(ctx.scope, read, grad, rows):
            return None
        inner = ([stride, *strides], [0, *paddings], *others)
        return ((out, image, inner) for image, out in divide_rows(ctx.builder, read, grad, rows, num_axes=1 + len(strides)))

    @staticmethod
    def _gathers_few_channels(ctx: NodeContext) -> bool:
        """True for strided pointwise convolutions of few channels, for which oneDNN's weight gradient crashes (``_VECTOR_CHANNELS``)."""
        windows, weight = kernel_windows(ctx), ctx.operand_slot(ctx.node.argument("weight"))
        is_pointwise = all(window.kernel == 1 for window in windows) and not any(ctx.saved["padding"])
        return is_pointwise and any(window.stride > 1 for window in windows) and weight.shape[1] < _VECTOR_CHANNELS

    def _gathered(self, ctx: NodeContext) -> tuple[Slot, tuple[Any, ...]]:
        """A copy of the pixels that a strided pointwise convolution reads, and its geometry on that copy (stride 1)."""
        read: Slot = ctx.saved["padded"]
        strides, *geometry = self._geometry(ctx)
        lead = len(read.shape) - len(strides)
        for dim, stride in enumerate(strides, lead):
            shape = (*read.shape[:dim], -(-read.shape[dim] // stride), *read.shape[dim + 1 :])
            read = ctx.builder.call(aten.slice.Tensor, read, dim, 0, read.shape[dim], stride, shape=shape, view_of=read)
        copy = ctx.builder.call(aten.clone.default, read, shape=read.shape, dtype=read.dtype)
        return copy, ([1] * len(strides), *geometry)


def as_two_axes(ctx: NodeContext, slot: Slot) -> Slot:
    """A value with at least two axes, as ATen's poolings require: a signal becomes an image of one column."""
    if ctx.scope.axes.count > 1:
        return slot
    return ctx.builder.call(aten.unsqueeze.default, slot, -1, shape=(*slot.shape, 1), view_of=slot, dtype=slot.dtype)


def as_own_axes(ctx: NodeContext, slot: Slot) -> Slot:
    """The inverse of :func:`as_two_axes`."""
    if ctx.scope.axes.count > 1:
        return slot
    return ctx.builder.call(aten.squeeze.dim, slot, -1, shape=slot.shape[:-1], view_of=slot, dtype=slot.dtype)


class PoolRule(_WindowedRule):
    """Base of poolings. A pooling along one axis runs as one along two, the second with a window of one pixel."""

    @staticmethod
    def lists(ctx: NodeContext, *entries: tuple[Sequence[int], int]) -> list[list[int]]:
        """Arguments with an entry for each axis; the second element of each pair is the entry of an added axis."""
        return [[*values, added] if ctx.scope.axes.count == 1 else [*values] for values, added in entries]


def _counts_padding(read: OperandRead, window: Window, counted: bool) -> bool:
    """True if every element that a pooling reads along an axis counts: none is padding, or padding counts too."""
    return not (read.pad_low or read.pad_high) or (counted and read.pad_high <= window.pad_high)


class AvgPoolRule(PoolRule):
    """``avg_pool1d``, ``avg_pool2d``, ``avg_pool3d``.

    The divisor counts elements inside the image (or inside the image and its declared padding). The operator's own divisor is right for a
    strip that holds no border, or only counted padding; also for one of full width, as the operator sees the left and right borders. At
    other borders the strip is padded, summed, and divided by the window sums of a mask that is one for counted elements.
    """

    def forward(self, ctx: NodeContext) -> Slot:
        operand = next(refs_in(ctx.node.argument("self")))
        windows = kernel_windows(ctx)
        read, across = ctx.read_of(operand), ctx.columns_of(operand)
        override, counted = ctx.node.argument("divisor_override"), ctx.node.argument("count_include_pad")
        whole = ctx.covers_image and all(2 * window.pad_low <= window.kernel for window in windows)
        columns_count = ctx.is_full_width or _counts_padding(across, windows[COLUMNS], counted)
        native = override is not None or (_counts_padding(read, windows[ROWS], counted) and columns_count)
        # The operator pads axes of which it sees both borders.
        sees_borders = [whole, whole or ctx.is_full_width, True][: len(windows)]
        if whole or native:
            paddings = [(0, 0) if seen else pads for seen, pads in zip(sees_borders, _paddings(ctx, operand), strict=True)]
            padding = [window.pad_low if seen else 0 for seen, window in zip(sees_borders, windows, strict=True)]
            return self._native(ctx, operand, paddings, self._arguments(ctx, padding, windows[ROWS].ceil, counted, override))
        return self._masked(ctx, operand, sees_borders, counted)

    def _native(self, ctx: NodeContext, operand: str, paddings: Padding, geometry: tuple[Any, ...]) -> Slot:
        """The operator itself, on a strip padded along the axes that the operator cannot pad."""
        padded = _emit_padding(ctx, ctx.strip(operand), paddings, 0.0)
        ctx.saved.update(padded=padded, counts=None, offset=[low for low, _ in paddings], geometry=geometry)
        return as_own_axes(ctx, self._average(ctx, as_two_axes(ctx, padded), geometry, ctx.out_shape[: -ctx.scope.axes.count]))

    def _average(self, ctx: NodeContext, value: Slot, geometry: tuple[Any, ...], lead: tuple[int, ...]) -> Slot:
        function = aten.avg_pool3d if ctx.scope.axes.count == 3 else aten.avg_pool2d
        extents = ctx.scope.axes.of(ctx.out_shape)
        shape = (*lead, *extents, *([1] if len(extents) == 1 else []))
        return ctx.builder.call(function.default, value, *geometry, shape=shape)

    def _masked(self, ctx: NodeContext, operand: str, sees_borders: Sequence[bool], counted: bool) -> Slot:
        """Window sums divided by the number of counted elements in each window."""
        builder, windows, strip = ctx.builder, kernel_windows(ctx), ctx.strip(operand)
        inside, out = ctx.scope.axes.of(strip.shape), ctx.scope.axes.of(ctx.out_shape)
        paddings = []
        for seen, window, pads, extent, length in zip(sees_borders, windows, _paddings(ctx, operand), inside, out, strict=True):
            reach = (length - 1) * window.stride + window.kernel - window.pad_low - extent
            paddings.append((window.pad_low, max(0, reach)) if seen else pads)
        padded = _emit_padding(ctx, strip, paddings, 0.0)
        mask = builder.zeros((1, 1, *ctx.scope.axes.of(padded.shape)))
        inner = mask
        for axis, (window, (low, high), extent) in enumerate(zip(windows, paddings, inside, strict=True)):
            before, after = (min(low, window.pad_low), min(high, window.pad_high)) if counted else (0, 0)
            inner = ctx.narrow(inner, axis, low - before, before + extent + after)
        builder.call(aten.fill_.Scalar, inner, 1.0, writes=inner)
        geometry = self._arguments(ctx, [0] * len(windows), False, True, 1)
        counts = self._average(ctx, as_two_axes(ctx, mask), geometry, (1, 1))
        ctx.saved.update(padded=padded, counts=counts, offset=[low for low, _ in paddings], geometry=geometry)
        total = self._average(ctx, as_two_axes(ctx, padded), geometry, ctx.out_shape[: -ctx.scope.axes.count])
        return as_own_axes(ctx, builder.call(aten.div_.Tensor, total, counts, writes=total))

    def _arguments(self, ctx: NodeContext, padding: Sequence[int], ceil: bool, counted: bool, override: int | None) -> tuple[Any, ...]:
        windows = kernel_windows(ctx)
        lists = self.lists(ctx, ([w.kernel for w in windows], 1), ([w.stride for w in windows], 1), (padding, 0))
        return (*lists, ceil, counted, override)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image, builder = ctx.node.argument("self"), ctx.builder
        operand = next(refs_in(image))
        if ctx.has_empty_read(operand):
            return
        padded, grad = as_two_axes(ctx, ctx.saved["padded"]), as_two_axes(ctx, grad)
        if ctx.saved["counts"] is not None:
            grad = builder.call(aten.div.Tensor, grad, ctx.saved["counts"], shape=grad.shape)
        function = aten.avg_pool3d_backward if ctx.scope.axes.count == 3 else aten.avg_pool2d_backward
        out = builder.call(function.default, grad, padded, *ctx.saved["geometry"], shape=padded.shape)
        ctx.add_grad(image, self.unpadded(ctx, operand, as_own_axes(ctx, out)), owned=True)
