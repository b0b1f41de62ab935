"""Max pooling on a strip.

Where all that a window holds is minus infinity, its gradient belongs to the first element. Beyond the border there is none: ATen knows that
of padding of its own, but not of the rows and columns that a strip was padded with.

Adaptive max pooling on a strip.

Its windows have different sizes and overlap by a row where sizes do not divide. Each is written out, filled up to the widest by repeating
its last row, and then an ordinary max pooling goes from window to window. A repeated element comes behind the one it repeats and is never
greater, so the first of several equal elements is the one that ATen finds in the window itself, and takes the gradient.

Where maxima are, and values put back there, on a strip.

Places count the pixels of the whole image, row-major. Those of a strip's own pooling count the strip's; where it lies is bound when the
program runs (the ``origin`` port).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.graph import refs_in
from sft.analysis.ir.ops import Window, window_of
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.row_gather import upload_table
from sft.lower.rules.base import Rule
from sft.lower.rules.convolution import PoolRule, as_own_axes, as_two_axes, kernel_windows
from sft.lower.rules.minmax import strip_starts
from sft.lower.rules.resample import ResampledRange, index_select_channels_last, resampled_ranges

__all__ = ["AdaptiveMaxPoolRule", "MaxPoolIndicesRule", "MaxPoolRule", "MaxUnpoolRule", "correct_infinite_indices"]

aten = torch.ops.aten


class MaxPoolRule(PoolRule):
    """``max_pool1d``, ``max_pool2d``, ``max_pool3d``.

    On a strip the indices, eight bytes an element, are found again in the backward pass instead of waiting for it: that costs no
    multiplication, and they would be the largest thing that a strip keeps. Kept whole they are saved, as in plain PyTorch.
    """

    border_value = float("-inf")

    def native_padding_fits(self, own: Sequence[int], windows: Sequence[Window]) -> bool:
        return all(2 * size <= window.kernel for size, window in zip(own, windows, strict=True))

    def forward(self, ctx: NodeContext) -> Slot:
        operand = next(refs_in(ctx.node.argument("self")))
        windows = kernel_windows(ctx)
        if ctx.covers_image:
            padded, padding = ctx.strip(operand), [window.pad_low for window in windows]
            ctx.saved.update(padded=padded, offset=[0] * len(windows))
        else:
            padded, padding = self.padded(ctx, operand, windows)
        ctx.saved["spread"] = as_two_axes(ctx, padded)
        kernel, stride, own, dilation = self.lists(
            ctx,
            ([w.kernel for w in windows], 1),
            ([w.stride for w in windows], 1),
            (padding, 0),
            ([w.dilation for w in windows], 1),
        )
        ctx.saved["geometry"] = (kernel, stride, own, dilation, windows[ROWS].ceil)
        out, ctx.saved["indices"] = self._pool(ctx)
        return as_own_axes(ctx, out)

    def _pool(self, ctx: NodeContext) -> tuple[Slot, Slot]:
        shape = ctx.out_shape if ctx.scope.axes.count > 1 else (*ctx.out_shape, 1)
        out, indices = ctx.builder.slot(shape), ctx.builder.slot(shape, torch.int64)
        function = aten.max_pool3d_with_indices if ctx.scope.axes.count == 3 else aten.max_pool2d_with_indices
        ctx.builder.call_many(function.default, (ctx.saved["spread"], *ctx.saved["geometry"]), (out, indices))
        if ctx.scope.axes.count == 3:
            starts = _first_slices(kernel_windows(ctx)[ROWS], ctx.saved["geometry"][2][ROWS], shape[2])
            correct_infinite_indices(ctx, out, indices, starts, ctx.saved["spread"])
        return out, indices

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image, value = ctx.node.argument("self"), ctx.saved["spread"]
        operand = next(refs_in(image))
        if ctx.has_empty_read(operand):
            return
        indices = ctx.saved["indices"] if ctx.covers_image else self._pool(ctx)[1]
        is_volume = ctx.scope.axes.count == 3
        grad = as_two_axes(ctx, grad)
        if is_volume and ctx.scope.deterministic:  # ATen's adds where windows overlap in any order
            scratch_bytes = grad.num_bytes + indices.num_bytes
            out = ctx.builder.call(_max_pool3d_grad, grad, value, indices, shape=value.shape, scratch_bytes=scratch_bytes)
        else:
            function = aten.max_pool3d_with_indices_backward if is_volume else aten.max_pool2d_with_indices_backward
            out = ctx.builder.call(function.default, grad, value, *ctx.saved["geometry"], indices, shape=value.shape)
        out = as_own_axes(ctx, out)
        self._move_padding_grads_inside(ctx, out)
        ctx.add_grad(image, self.unpadded(ctx, operand, out), owned=True)

    @staticmethod
    def _move_padding_grads_inside(ctx: NodeContext, grad: Slot) -> None:
        """Add what explicit padding got to the first pixels inside.

        Of a window that holds nothing but minus infinity ATen takes the first element. Padding of its own is none, ours is one.
        """
        for axis, (window, offset) in enumerate(zip(kernel_windows(ctx), ctx.saved["offset"], strict=True)):
            starts = range(0, offset, window.stride)[: ctx.scope.axes.of(ctx.out_shape)[axis]]
            for start in starts:
                first = offset + (start - offset) % window.dilation
                inside = ctx.narrow(grad, axis, first, 1)
                ctx.builder.call(aten.add_.Tensor, inside, ctx.narrow(grad, axis, start, 1), writes=inside)


def _max_pool3d_grad(grad: Tensor, value: Tensor, indices: Tensor) -> Tensor:
    """The gradient of what a pooling of volumes read, by an operator that PyTorch can make deterministic."""
    last = value.shape[1] > 1 and value.stride(1) == 1
    grads, places = ((part.movedim(1, -1).flatten(1, -2) if last else part.flatten(2)) for part in (grad, indices))
    axis, extents = 1 if last else 2, value.shape[2:]
    shape = (*grads.shape[:axis], math.prod(extents), *grads.shape[axis + 1 :])
    out: Tensor = grad.new_zeros(shape).scatter_add_(axis, places, grads).unflatten(axis, extents)
    return out.movedim(-1, 1) if last else out


def _first_slices(window: Window, padding: int, count: int) -> tuple[int, ...]:
    """Where so many windows begin that ATen pads by itself."""
    starts = (place * window.stride - padding for place in range(count))
    return tuple(start % window.dilation if start < 0 else start for start in starts)


def correct_infinite_indices(ctx: NodeContext, value: Slot, indices: Slot, starts: Sequence[int], pooled: Slot) -> None:
    """Where maxima of volumes are minus infinity, let indices be in the first slice of the window.

    ATen's kernel for channels last, on the CPU, forgets which one that is.
    """
    area, scratch_bytes = math.prod(pooled.shape[-2:]), 3 * indices.num_bytes // max(1, len(starts))
    ctx.builder.call(_correct_indices, indices, value, tuple(starts), area, writes=indices, scratch_bytes=scratch_bytes)


def _correct_indices(indices: Tensor, value: Tensor, starts: Sequence[int], area: int) -> None:
    if indices.device.type != "cpu":
        return
    for index, largest, start in zip(indices.unbind(2), value.unbind(2), starts, strict=True):
        index.copy_(torch.where(largest == -math.inf, index.remainder(area).add_(start * area), index))


@dataclass(frozen=True, slots=True)
class _UnfoldWindows:
    """Writes out the windows of an axis, one behind the other."""

    span: ResampledRange

    def __call__(self, value: Tensor, origin: tuple[int, int, int], *, dim: int) -> Tensor:
        first, start = self.span.places(origin)
        columns, _ = self.span.sampling.forward.submatrix(first, self.span.length, start, self.span.extent)
        return index_select_channels_last(value, dim, upload_table(columns.T.reshape(-1), value.device))


@dataclass(frozen=True, slots=True)
class _FoldWindows:
    """The adjoint of :class:`_UnfoldWindows`, for gradients that are zero where a row repeats the last one of its window."""

    span: ResampledRange

    def __call__(self, grad: Tensor, origin: tuple[int, int, int], *, dim: int) -> Tensor:
        span, windows = self.span, self.span.sampling.forward
        first, start = span.places(origin)
        readers, shares = span.sampling.adjoint.submatrix(start, span.extent, first, span.length)
        inside = shares > 0
        place = np.arange(start, start + span.extent) - windows.start[first + readers]
        index = upload_table(np.where(inside, readers * windows.width + place, 0), grad.device)
        mask = upload_table(inside, grad.device, grad.dtype)
        shape = [-1 if axis == dim else 1 for axis in range(grad.dim())]
        out = index_select_channels_last(grad, dim, index[0]).mul_(mask[0].view(shape))
        for term in range(1, len(index)):
            out.addcmul_(index_select_channels_last(grad, dim, index[term]), mask[term].view(shape))
        return out


class AdaptiveMaxPoolRule(Rule):
    """``adaptive_max_pool1d``, ``adaptive_max_pool2d``, ``adaptive_max_pool3d``; in the backward pass the maxima are found again."""

    def forward(self, ctx: NodeContext) -> Slot:
        return as_own_axes(ctx, self._pool(ctx)[1])

    def _pool(self, ctx: NodeContext) -> tuple[Slot, Slot, Slot]:
        """The windows written out, their maxima, and where in the windows these are."""
        builder, value = ctx.builder, self._strip(ctx)
        for span in self._spans(ctx):
            value = self._along(ctx, _UnfoldWindows(span), value, span.axis, span.length * span.sampling.forward.width)
        value = as_two_axes(ctx, value)
        shape = ctx.out_shape if ctx.scope.axes.count > 1 else (*ctx.out_shape, 1)
        out, indices = builder.slot(shape), builder.slot(shape, torch.int64)
        geometry = self._geometry(ctx)
        builder.call_many(self._function(ctx, ""), (value, *geometry), (out, indices))
        if ctx.scope.axes.count == 3:
            depth = geometry[0][0]
            correct_infinite_indices(ctx, out, indices, range(0, depth * shape[2], depth), value)
        return value, out, indices

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        windows, _, indices = self._pool(ctx)
        arguments = (as_two_axes(ctx, grad), windows, *self._geometry(ctx), indices)
        value = as_own_axes(ctx, ctx.builder.call(self._function(ctx, "_backward"), *arguments, shape=windows.shape))
        for span in reversed(self._spans(ctx)):
            value = self._along(ctx, _FoldWindows(span), value, span.axis, span.extent)
        ctx.add_grad(ctx.node.argument("self"), value, owned=True)

    @staticmethod
    def _strip(ctx: NodeContext) -> Slot:
        return ctx.strip(next(refs_in(ctx.node.argument("self"))))

    def _spans(self, ctx: NodeContext) -> list[ResampledRange]:
        axes = ctx.scope.axes
        return resampled_ranges(ctx, axes.of(ctx.out_shape), axes.of(self._strip(ctx).shape))

    @staticmethod
    def _along(ctx: NodeContext, function: _UnfoldWindows | _FoldWindows, value: Slot, axis: int, length: int) -> Slot:
        dim = ctx.scope.axes.dim(len(value.shape), axis)
        assert dim is not None
        shape = (*value.shape[:dim], length, *value.shape[dim + 1 :])
        # The sum of a fold has a term beside it.
        term = (
            math.prod(shape) * value.dtype.itemsize
            if isinstance(function, _FoldWindows) and function.span.sampling.adjoint.width > 1
            else 0
        )
        origin, scratch_bytes = ctx.builder.port("origin", ctx.node.name, ()), term + 16 * length
        keywords = {"dim": dim}
        return ctx.builder.call(function, value, origin, shape=shape, dtype=value.dtype, keywords=keywords, scratch_bytes=scratch_bytes)

    def _geometry(self, ctx: NodeContext) -> tuple[Any, ...]:
        """Kernel, stride, padding, dilation and rounding of the pooling from window to window."""
        widths = [span.sampling.forward.width for span in self._spans(ctx)]
        kernel = widths if len(widths) > 1 else [*widths, 1]
        return (kernel, list(kernel), [0] * len(kernel), [1] * len(kernel), False)

    @staticmethod
    def _function(ctx: NodeContext, kind: str) -> Any:
        return getattr(aten, f"max_pool{max(2, ctx.scope.axes.count)}d_with_indices{kind}").default


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
        builder, operand = ctx.builder, next(refs_in(ctx.node.argument("self")))
        own, builder.dtype = builder.dtype, ctx.scope.dtype_of(operand)
        super().forward(ctx)
        builder.dtype = own
        found: Slot = ctx.saved["indices"]
        if not ctx.covers_image:
            axes = []
            seen, extents = ctx.scope.axes.of(ctx.saved["padded"].shape), ctx.scope.axes.of(ctx.scope.shapes[operand])
            for axis, (size, offset, extent) in enumerate(zip(seen, ctx.saved["offset"], extents, strict=True)):
                window = window_of(ctx.node, axis)
                assert window is not None
                axes.append(_PaddedAxis(window, size, offset, extent))
            # Beside the places: their sum so far, one coordinate, and what becomes of it where it may lie in the padding.
            scratch_bytes = 4 * found.num_bytes + found.num_bytes // 8 if any(ctx.saved["offset"]) else 2 * found.num_bytes
            origin = builder.port("origin", ctx.node.name, ())
            builder.call(_indices_in_image, found, origin, tuple(axes), writes=found, scratch_bytes=scratch_bytes)
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
        builder, (value, places) = ctx.builder, (ctx.node.argument("self"), ctx.node.argument("indices"))
        extents = ctx.scope.axes.of(ctx.out_shape)
        out = builder.zeros((*ctx.out_shape[: -len(extents)], math.prod(extents)))
        if not ctx.has_empty_read(next(refs_in(value))):
            strip = ctx.operand_slot(value)
            builder.call(aten.scatter_.src, out, 2, self._places(ctx, ctx.operand_slot(places)), self._flat(ctx, strip), writes=out)
        return builder.call(aten.view.default, out, list(ctx.out_shape), shape=ctx.out_shape, view_of=out)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, (value, places) = ctx.builder, (ctx.node.argument("self"), ctx.node.argument("indices"))
        if ctx.has_empty_read(next(refs_in(value))):
            return
        where, shape = self._places(ctx, ctx.operand_slot(places)), ctx.operand_slot(value).shape
        found = builder.call(aten.gather.default, self._flat(ctx, grad), 2, where, shape=where.shape, dtype=grad.dtype)
        ctx.add_grad(value, builder.call(aten.view.default, found, list(shape), shape=shape, view_of=found), owned=True)

    @staticmethod
    def _flat(ctx: NodeContext, slot: Slot) -> Slot:
        shape = (*slot.shape[: -ctx.scope.axes.count], math.prod(ctx.scope.axes.of(slot.shape)))
        return ctx.builder.call(aten._reshape_copy.default, slot, list(shape), shape=shape, dtype=slot.dtype)

    def _places(self, ctx: NodeContext, places: Slot) -> Slot:
        """Places in the part of the result that the strip computes, pixels in one dimension."""
        builder, axes = ctx.builder, ctx.scope.axes
        flat, image = self._flat(ctx, places), axes.of(ctx.scope.shapes[ctx.node.name])
        origin = builder.port("origin", ctx.node.name, ())
        scratch_bytes = 2 * flat.num_bytes
        return builder.call(_indices_in_strip, flat, origin, image, axes.of(ctx.out_shape), writes=flat, scratch_bytes=scratch_bytes)


def _indices_in_strip(places: Tensor, origin: Sequence[int], image: Sequence[int], strip: Sequence[int]) -> None:
    """Turn places in the image into places in a strip of it."""
    total, at, size = torch.zeros_like(places), torch.empty_like(places), 1
    for axis, first in reversed([*enumerate(strip_starts(origin, len(image)))]):
        torch.remainder(places, image[axis], out=at)
        places.div_(image[axis], rounding_mode="floor")
        total += at.sub_(first).mul_(size)
        size *= strip[axis]
    places.copy_(total)
