"""Adaptive max pooling on a strip.

Its windows have different sizes and overlap by a row where sizes do not divide. Each is written out, filled up to the widest by repeating
its last row, and then an ordinary max pooling goes from window to window. A repeated element comes behind the one it repeats and is never
greater, so the first of several equal elements is the one that ATen finds in the window itself, and takes the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.analysis.graph import refs_in
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.rules.base import Rule
from sft.lower.rules.maxpool import correct_infinite_indices
from sft.lower.rules.resample import ResampledRange, index_select_channels_last, resampled_ranges
from sft.lower.rules.windowed import as_two_axes, as_own_axes
from sft.lower.upload import upload_table

__all__ = ["AdaptiveMaxPoolRule"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _UnfoldWindows:
    """Writes out the windows of an axis, one behind the other."""

    span: ResampledRange

    def __call__(self, value: Tensor, origin: tuple[int, int, int], *, dim: int) -> Tensor:
        first, start = self.span.places(origin)
        columns, _ = self.span.sampling.forward.part(first, self.span.length, start, self.span.extent)
        return index_select_channels_last(value, dim, upload_table(columns.T.reshape(-1), value.device))


@dataclass(frozen=True, slots=True)
class _FoldWindows:
    """The adjoint of :class:`_UnfoldWindows`, for gradients that are zero where a row repeats the last one of its window."""

    span: ResampledRange

    def __call__(self, grad: Tensor, origin: tuple[int, int, int], *, dim: int) -> Tensor:
        span, windows = self.span, self.span.sampling.forward
        first, start = span.places(origin)
        readers, shares = span.sampling.adjoint.part(start, span.extent, first, span.length)
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
        e, value = ctx.emitter, self._strip(ctx)
        for span in self._spans(ctx):
            value = self._along(ctx, _UnfoldWindows(span), value, span.axis, span.length * span.sampling.forward.width)
        value = as_two_axes(ctx, value)
        shape = ctx.out_shape if ctx.scope.axes.count > 1 else (*ctx.out_shape, 1)
        out, indices = e.slot(shape), e.slot(shape, torch.int64)
        geometry = self._geometry(ctx)
        e.call_many(self._function(ctx, ""), (value, *geometry), (out, indices))
        if ctx.scope.axes.count == 3:
            depth = geometry[0][0]
            correct_infinite_indices(ctx, out, indices, range(0, depth * shape[2], depth), value)
        return value, out, indices

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        windows, _, indices = self._pool(ctx)
        arguments = (as_two_axes(ctx, grad), windows, *self._geometry(ctx), indices)
        value = as_own_axes(ctx, ctx.emitter.call(self._function(ctx, "_backward"), *arguments, shape=windows.shape))
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
        origin, scratch_bytes = ctx.emitter.port("origin", ctx.node.name, ()), term + 16 * length
        keywords = {"dim": dim}
        return ctx.emitter.call(function, value, origin, shape=shape, dtype=value.dtype, keywords=keywords, scratch_bytes=scratch_bytes)

    def _geometry(self, ctx: NodeContext) -> tuple[Any, ...]:
        """Kernel, stride, padding, dilation and rounding of the pooling from window to window."""
        widths = [span.sampling.forward.width for span in self._spans(ctx)]
        kernel = widths if len(widths) > 1 else [*widths, 1]
        return (kernel, list(kernel), [0] * len(kernel), [1] * len(kernel), False)

    @staticmethod
    def _function(ctx: NodeContext, kind: str) -> Any:
        return getattr(aten, f"max_pool{max(2, ctx.scope.axes.count)}d_with_indices{kind}").default
