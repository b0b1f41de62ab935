"""Max pooling on a strip: with a fixed window, adaptive, its pool indices, and max unpooling.

**Windows of minus infinity.** If all elements of a window are minus infinity, its gradient belongs to the first element inside the image.
ATen excludes its own padding, but not the rows and columns that a strip was explicitly padded with; rules correct that. A backend corrects
ATen's kernels, except for pools of values that are bounded below, such as the result of a ReLU.

**Pool indices** count the pixels of the full image in row-major order. The pooling of a strip counts the pixels of the strip. Indices are
converted when the program runs, as the strip's position is bound then (the ``origin`` port).

**Adaptive max pooling** has windows of different sizes, which overlap by a row if sizes do not divide. Each window is copied, extended to
the widest window by repeating its last row, and an ordinary max pooling of the copies follows. A repeated element comes after the original
and is never greater, so ATen chooses the same element (and passes the gradient to it) as in the window itself.
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
from sft.analysis.ir.graph import Graph, refs_in
from sft.analysis.ir.ops import Window, window_of
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.row_gather import upload_table
from sft.lower.rules.base import Rule
from sft.lower.rules.convolution import PoolRule, as_own_axes, as_two_axes, kernel_windows
from sft.lower.rules.minmax import strip_starts
from sft.lower.rules.resampled_range import ResampledRange, index_select_channels_last, resampled_ranges

__all__ = ["AdaptiveMaxPoolRule", "MaxPoolIndicesRule", "MaxPoolRule", "MaxUnpoolRule", "correct_infinite_indices"]

aten = torch.ops.aten

#: Pointwise operators whose results are never minus infinity, whatever their arguments.
_BOUNDED_OPS = frozenset(
    f"aten.{name}"
    for name in ("abs", "exp", "gelu", "hardsigmoid", "hardswish", "relu", "relu6", "sigmoid", "silu", "softmax", "square", "tanh")
)
#: Operators whose results are not minus infinity if no operand is.
_SELECTIONS = frozenset(f"aten.{name}" for name in ("cat", "max_pool1d", "max_pool2d", "max_pool3d", "slice", "upsample_nearest2d"))


def is_bounded_below(graph: Graph, name: str) -> bool:
    """True if a value is known to have no element of minus infinity."""
    pending, seen = [name], set[str]()
    while pending:
        node = graph[pending.pop()]
        operator = node.target.rpartition(".")[0]
        if node.name in seen or operator in _BOUNDED_OPS:
            continue
        seen.add(node.name)
        if operator not in _SELECTIONS:
            return False
        pending += node.operands
    return True


class MaxPoolRule(PoolRule):
    """``max_pool1d``, ``max_pool2d``, ``max_pool3d``.

    On a strip the backward pass recomputes the indices. That costs no multiplication, while eight bytes an element would be the largest
    residual of a strip. On an untiled image they are saved, as in eager PyTorch.
    """

    border_value = float("-inf")

    def native_padding_fits(self, native: Sequence[int], windows: Sequence[Window]) -> bool:
        return all(2 * size <= window.kernel for size, window in zip(native, windows, strict=True))

    def forward(self, ctx: NodeContext) -> Slot:
        operand = next(refs_in(ctx.node.argument("self")))
        windows = kernel_windows(ctx)
        if ctx.covers_image:
            padded, padding = ctx.strip(operand), [window.pad_low for window in windows]
            ctx.saved.update(padded=padded, offset=[0] * len(windows))
        else:
            padded, padding = self.padded(ctx, operand, windows)
        ctx.saved["spread"] = as_two_axes(ctx, padded)
        kernel, stride, native, dilation = self.lists(
            ctx,
            ([w.kernel for w in windows], 1),
            ([w.stride for w in windows], 1),
            (padding, 0),
            ([w.dilation for w in windows], 1),
        )
        ctx.saved["geometry"] = (kernel, stride, native, dilation, windows[ROWS].ceil)
        out, ctx.saved["indices"] = self._pool(ctx)
        return as_own_axes(ctx, out)

    def _pool(self, ctx: NodeContext) -> tuple[Slot, Slot]:
        shape = ctx.out_shape if ctx.scope.axes.count > 1 else (*ctx.out_shape, 1)
        out, indices = ctx.builder.slot(shape), ctx.builder.slot(shape, torch.int64)
        function = aten.max_pool3d_with_indices if ctx.scope.axes.count == 3 else aten.max_pool2d_with_indices
        ctx.builder.call_many(function.default, (ctx.saved["spread"], *ctx.saved["geometry"]), (out, indices))
        if is_bounded_below(ctx.scope.graph, next(refs_in(ctx.node.argument("self")))):
            ctx.builder.bounded_maxima.add(indices.number)
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
        if is_volume and ctx.scope.deterministic:  # ATen adds overlapping windows in no fixed order
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
        """Add the gradient of explicit padding to the first pixels inside the image.

        Only windows of minus infinity give padding a gradient: ATen takes their first element, which may be explicit padding.
        """
        for axis, (window, offset) in enumerate(zip(kernel_windows(ctx), ctx.saved["offset"], strict=True)):
            starts = range(0, offset, window.stride)[: ctx.scope.axes.of(ctx.out_shape)[axis]]
            for start in starts:
                first = offset + (start - offset) % window.dilation
                inside = ctx.narrow(grad, axis, first, 1)
                ctx.builder.call(aten.add_.Tensor, inside, ctx.narrow(grad, axis, start, 1), writes=inside)


def _first_slices(window: Window, padding: int, count: int) -> tuple[int, ...]:
    """First slice inside the image of each of ``count`` windows padded by ATen."""
    starts = (index * window.stride - padding for index in range(count))
    return tuple(start % window.dilation if start < 0 else start for start in starts)


def _max_pool3d_grad(grad: Tensor, value: Tensor, indices: Tensor) -> Tensor:
    """The gradient of a 3-d max pooling by ``scatter_add_``, which PyTorch can make deterministic."""
    last = value.shape[1] > 1 and value.stride(1) == 1
    grads, flat_indices = ((tensor.movedim(1, -1).flatten(1, -2) if last else tensor.flatten(2)) for tensor in (grad, indices))
    axis, extents = 1 if last else 2, value.shape[2:]
    shape = (*grads.shape[:axis], math.prod(extents), *grads.shape[axis + 1 :])
    out: Tensor = grad.new_zeros(shape).scatter_add_(axis, flat_indices, grads).unflatten(axis, extents)
    return out.movedim(-1, 1) if last else out


def correct_infinite_indices(ctx: NodeContext, value: Slot, indices: Slot, starts: Sequence[int], pooled: Slot) -> None:
    """Emit a correction of 3-d pool indices of windows of minus infinity: they point into the first slice of the window.

    ATen's CPU kernel for channels last points into a wrong slice.
    """
    area, scratch_bytes = math.prod(pooled.shape[-2:]), 3 * indices.num_bytes // max(1, len(starts))
    ctx.builder.call(_correct_indices, indices, value, tuple(starts), area, writes=indices, scratch_bytes=scratch_bytes)


def _correct_indices(indices: Tensor, value: Tensor, starts: Sequence[int], area: int) -> None:
    if indices.device.type != "cpu":
        return
    for index, largest, start in zip(indices.unbind(2), value.unbind(2), starts, strict=True):
        index.copy_(torch.where(largest == -math.inf, index.remainder(area).add_(start * area), index))


class MaxPoolIndicesRule(MaxPoolRule):
    """The pool indices of a strip, converted to pixels of the image."""

    def forward(self, ctx: NodeContext) -> Slot:
        builder, operand = ctx.builder, next(refs_in(ctx.node.argument("self")))
        index_dtype, builder.dtype = builder.dtype, ctx.scope.dtype_of(operand)
        super().forward(ctx)
        builder.dtype = index_dtype
        indices: Slot = ctx.saved["indices"]
        if not ctx.covers_image:
            axes = []
            padded, extents = ctx.scope.axes.of(ctx.saved["padded"].shape), ctx.scope.axes.of(ctx.scope.shapes[operand])
            for axis, (size, offset, extent) in enumerate(zip(padded, ctx.saved["offset"], extents, strict=True)):
                window = window_of(ctx.node, axis)
                assert window is not None
                axes.append(_PaddedAxis(window, size, offset, extent))
            # Temporaries: the sum so far and one coordinate; with padding also its correction and a mask.
            scratch_bytes = 4 * indices.num_bytes + indices.num_bytes // 8 if any(ctx.saved["offset"]) else 2 * indices.num_bytes
            origin = builder.port("origin", ctx.node.name, ())
            builder.call(_indices_in_image, indices, origin, tuple(axes), writes=indices, scratch_bytes=scratch_bytes)
        return as_own_axes(ctx, indices)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        raise AssertionError("pool indices have no gradient")


@dataclass(frozen=True, slots=True)
class _PaddedAxis:
    """One axis of the padded strip that a pooling read.

    Attributes:
        window: the pooling's window.
        padded_extent: extent of the padded strip.
        offset: padding before the strip.
        extent: extent of the image.
    """

    window: Window
    padded_extent: int
    offset: int
    extent: int


def _indices_in_image(indices: Tensor, origin: Sequence[int], axes: Sequence[_PaddedAxis]) -> None:
    """Convert pool indices of a padded strip to those of the image, in place."""
    total, at, size = torch.zeros_like(indices), torch.empty_like(indices), 1
    for axis, first in reversed([*zip(axes, strip_starts(origin, len(axes)), strict=True)]):
        torch.remainder(indices, axis.padded_extent, out=at)
        indices.div_(axis.padded_extent, rounding_mode="floor")
        at += min(max(axis.window.access.low(first), 0), axis.extent) - axis.offset
        if axis.offset:
            # ATen chooses padding only in a window of minus infinity; its index is the window's first pixel inside.
            at.copy_(torch.where(at < 0, at % axis.window.dilation, at))
        total += at.mul_(size)
        size *= axis.extent
    indices.copy_(total)


class MaxUnpoolRule(Rule):
    """Max unpooling: each value at the index of its window's maximum, zeros at all other pixels; windows do not overlap."""

    def forward(self, ctx: NodeContext) -> Slot:
        builder, (value, indices) = ctx.builder, (ctx.node.argument("self"), ctx.node.argument("indices"))
        extents = ctx.scope.axes.of(ctx.out_shape)
        out = builder.zeros((*ctx.out_shape[: -len(extents)], math.prod(extents)))
        if not ctx.has_empty_read(next(refs_in(value))):
            strip = ctx.operand_slot(value)
            builder.call(aten.scatter_.src, out, 2, self._strip_indices(ctx, ctx.operand_slot(indices)), self._flat(ctx, strip), writes=out)
        return builder.call(aten.view.default, out, list(ctx.out_shape), shape=ctx.out_shape, view_of=out)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, (value, indices) = ctx.builder, (ctx.node.argument("self"), ctx.node.argument("indices"))
        if ctx.has_empty_read(next(refs_in(value))):
            return
        index, shape = self._strip_indices(ctx, ctx.operand_slot(indices)), ctx.operand_slot(value).shape
        gathered = builder.call(aten.gather.default, self._flat(ctx, grad), 2, index, shape=index.shape, dtype=grad.dtype)
        ctx.add_grad(value, builder.call(aten.view.default, gathered, list(shape), shape=shape, view_of=gathered), owned=True)

    @staticmethod
    def _flat(ctx: NodeContext, slot: Slot) -> Slot:
        shape = (*slot.shape[: -ctx.scope.axes.count], math.prod(ctx.scope.axes.of(slot.shape)))
        return ctx.builder.call(aten._reshape_copy.default, slot, list(shape), shape=shape, dtype=slot.dtype)

    def _strip_indices(self, ctx: NodeContext, indices: Slot) -> Slot:
        """Pool indices as pixels of the strip, flattened."""
        builder, axes = ctx.builder, ctx.scope.axes
        flat, image = self._flat(ctx, indices), axes.of(ctx.scope.shapes[ctx.node.name])
        origin = builder.port("origin", ctx.node.name, ())
        scratch_bytes = 2 * flat.num_bytes
        return builder.call(_indices_in_strip, flat, origin, image, axes.of(ctx.out_shape), writes=flat, scratch_bytes=scratch_bytes)


def _indices_in_strip(indices: Tensor, origin: Sequence[int], image: Sequence[int], strip: Sequence[int]) -> None:
    """Convert pool indices of the image to those of a strip of it, in place."""
    total, at, size = torch.zeros_like(indices), torch.empty_like(indices), 1
    for axis, first in reversed([*enumerate(strip_starts(origin, len(image)))]):
        torch.remainder(indices, image[axis], out=at)
        indices.div_(image[axis], rounding_mode="floor")
        total += at.sub_(first).mul_(size)
        size *= strip[axis]
    indices.copy_(total)


class AdaptiveMaxPoolRule(Rule):
    """``adaptive_max_pool1d``, ``adaptive_max_pool2d``, ``adaptive_max_pool3d``; the backward pass recomputes the maxima."""

    def forward(self, ctx: NodeContext) -> Slot:
        return as_own_axes(ctx, self._pool(ctx)[1])

    def _pool(self, ctx: NodeContext) -> tuple[Slot, Slot, Slot]:
        """The copied windows, their maxima, and the indices of these in the windows."""
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
        # A fold of several terms needs a temporary for one of them.
        term = (
            math.prod(shape) * value.dtype.itemsize
            if isinstance(function, _FoldWindows) and function.span.sampling.adjoint.width > 1
            else 0
        )
        origin, scratch_bytes = ctx.builder.port("origin", ctx.node.name, ()), term + 16 * length
        keywords = {"dim": dim}
        return ctx.builder.call(function, value, origin, shape=shape, dtype=value.dtype, keywords=keywords, scratch_bytes=scratch_bytes)

    def _geometry(self, ctx: NodeContext) -> tuple[Any, ...]:
        """Kernel, stride, padding, dilation and rounding of the pooling of copied windows."""
        widths = [span.sampling.forward.width for span in self._spans(ctx)]
        kernel = widths if len(widths) > 1 else [*widths, 1]
        return (kernel, list(kernel), [0] * len(kernel), [1] * len(kernel), False)

    @staticmethod
    def _function(ctx: NodeContext, kind: str) -> Any:
        return getattr(aten, f"max_pool{max(2, ctx.scope.axes.count)}d_with_indices{kind}").default


@dataclass(frozen=True, slots=True)
class _UnfoldWindows:
    """Copies the windows along an axis one after the other, each extended to the widest."""

    span: ResampledRange

    def __call__(self, value: Tensor, origin: tuple[int, int, int], *, dim: int) -> Tensor:
        first, start = self.span.first_rows(origin)
        columns, _ = self.span.sampling.forward.submatrix(first, self.span.length, start, self.span.extent)
        return index_select_channels_last(value, dim, upload_table(columns.T.reshape(-1), value.device))


@dataclass(frozen=True, slots=True)
class _FoldWindows:
    """The adjoint of :class:`_UnfoldWindows`, for gradients that are zero at repeated rows."""

    span: ResampledRange

    def __call__(self, grad: Tensor, origin: tuple[int, int, int], *, dim: int) -> Tensor:
        span, windows = self.span, self.span.sampling.forward
        first, start = span.first_rows(origin)
        readers, shares = span.sampling.adjoint.submatrix(start, span.extent, first, span.length)
        inside = shares > 0
        offset = np.arange(start, start + span.extent) - windows.start[first + readers]
        index = upload_table(np.where(inside, readers * windows.width + offset, 0), grad.device)
        mask = upload_table(inside, grad.device, grad.dtype)
        shape = [-1 if axis == dim else 1 for axis in range(grad.dim())]
        out = index_select_channels_last(grad, dim, index[0]).mul_(mask[0].view(shape))
        for term in range(1, len(index)):
            out.addcmul_(index_select_channels_last(grad, dim, index[term]), mask[term].view(shape))
        return out
