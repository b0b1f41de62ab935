"""Resampling on a strip: interpolation, adaptive average pooling, nearest upsampling.

Resampling is separable: each axis in turn, rows first, by gathered rows (:mod:`sft.lower.rules.resampled_range`). Interpolation by powers
of two is one call of ATen (:mod:`sft.lower.rules.block_interpolation`). In other linear interpolations ATen resamples the axes that the
panel covers fully (it leaves the already resampled rows unchanged). Sums that need a fixed order are gathered, as ATen's derivative keeps
none on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.graph import refs_in
from sft.lower.context import NodeContext, accumulation_dtype
from sft.lower.program import Slot
from sft.lower.rules.base import ReductionRule, Rule
from sft.lower.rules.block_interpolation import BlockInterpolation
from sft.lower.rules.resampled_range import ResampledRange, emit_resampling, resampled_ranges

__all__ = ["FixedSizeAvgPoolRule", "NearestRule", "ResamplingRule"]

aten = torch.ops.aten


def _function_of(ctx: NodeContext, suffix: str) -> Any:
    """ATen's function of the operator, or with the suffix ``"_backward"`` its derivative."""
    return getattr(aten, f"{ctx.node.target.split('.')[1]}{suffix}").default


def _runs_kernel(ctx: NodeContext, strip: Slot, *, is_adjoint: bool) -> bool:
    """True if a kernel of the backend resamples a strip, or its gradient, in place of ATen's calls."""
    backend, axes = ctx.scope.backend, ctx.scope.axes
    if backend is None:
        return False
    spans = resampled_ranges(ctx, axes.of(ctx.out_shape), axes.of(strip.shape))
    widths = [1 if span.sampling.is_identity else replace(span, is_adjoint=is_adjoint).width for span in spans]
    return backend.resamples(strip.dtype, strip.shape if is_adjoint else ctx.out_shape, widths, is_adjoint=is_adjoint)


class NearestRule(Rule):
    """Nearest upsampling by integer factors: a strip starts at an input row, so the operator itself runs on it."""

    def forward(self, ctx: NodeContext) -> Slot:
        strip = ctx.strip(next(refs_in(ctx.node.argument("input"))))
        factors, axes = ctx.node.argument("factors"), ctx.scope.axes
        grown = tuple(extent * factor for extent, factor in zip(axes.of(strip.shape), factors, strict=True))
        assert grown == axes.of(ctx.out_shape), "a strip of an upsampled value begins and ends at input rows and columns"
        ctx.saved["shape"] = strip.shape
        return ctx.builder.call(_function_of(ctx, ""), strip, list(grown), *map(float, factors), shape=ctx.out_shape)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        shape, grown = ctx.saved["shape"], list(ctx.scope.axes.of(ctx.out_shape))
        scales = map(float, ctx.node.argument("factors"))
        out = ctx.builder.call(_function_of(ctx, "_backward"), grad, grown, list(shape), *scales, shape=shape)
        ctx.add_grad(ctx.node.argument("input"), out, owned=True)


class ResamplingRule(Rule):
    """Interpolation and adaptive average pooling, in single precision or wider until the last axis."""

    def forward(self, ctx: NodeContext) -> Slot:
        builder, strip = ctx.builder, ctx.strip(self._operand(ctx))
        interpolation = BlockInterpolation.of(ctx, strip)
        spans, is_linear = self._split_axes(ctx, strip)
        ctx.saved.update(interpolation=interpolation, strip=strip, spans=spans, is_linear=is_linear)
        if interpolation is not None and not _runs_kernel(ctx, strip, is_adjoint=False):
            return interpolation.forward(ctx, strip)
        value, wide = strip, accumulation_dtype(strip.dtype)
        for span in spans:
            value = emit_resampling(ctx, value, span, wide)
        if is_linear:
            value = builder.call(
                _function_of(ctx, ""), value, *self._sizes(ctx), *self._geometry(ctx), shape=ctx.out_shape, dtype=value.dtype
            )
        return builder.call(aten.clone.default, strip, shape=strip.shape) if value is strip else builder.cast(value, strip.dtype)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        interpolation: BlockInterpolation | None = ctx.saved["interpolation"]
        if interpolation is None or _runs_kernel(ctx, ctx.saved["strip"], is_adjoint=True):
            value = self._gather_adjoint(ctx, grad)
        else:
            value = interpolation.backward(ctx, grad)
        image = ctx.node.argument("input" if ctx.node.target.endswith(".vec") else "self")
        ctx.add_grad(image, ctx.builder.cast(value, grad.dtype), owned=value is not grad or owned)

    def _gather_adjoint(self, ctx: NodeContext, grad: Slot) -> Slot:
        builder, value, wide = ctx.builder, grad, accumulation_dtype(grad.dtype)
        if ctx.saved["is_linear"]:
            inner = self._shape_before_columns(ctx)
            value = builder.cast(value, wide if ctx.saved["spans"] else grad.dtype)
            sizes = (*self._sizes(ctx), list(inner))
            value = builder.call(_function_of(ctx, "_backward"), value, *sizes, *self._geometry(ctx), shape=inner, dtype=value.dtype)
        for span in reversed(ctx.saved["spans"]):
            value = emit_resampling(ctx, value, replace(span, is_adjoint=True), wide)
        return value

    @staticmethod
    def _shape_before_columns(ctx: NodeContext) -> tuple[int, ...]:
        """Shape of the strip once the axes are resampled along which rows are gathered."""
        shape = list(ctx.saved["strip"].shape)
        for span in ctx.saved["spans"]:
            dim = ctx.scope.axes.dim(len(shape), span.axis)
            assert dim is not None
            shape[dim] = span.length
        return tuple(shape)

    @staticmethod
    def _operand(ctx: NodeContext) -> str:
        return next(name for name in ctx.node.operands if name in ctx.scope.streamed)

    @staticmethod
    def _split_axes(ctx: NodeContext, strip: Slot) -> tuple[list[ResampledRange], bool]:
        """The axes to gather along, rows first, and true if ATen's linear interpolation resamples the other axes."""
        axes = ctx.scope.axes
        spans = [span for span in resampled_ranges(ctx, axes.of(ctx.out_shape), axes.of(strip.shape)) if not span.sampling.is_identity]
        inner = [span for span in spans if span.axis != ROWS]
        if inner and not ctx.scope.deterministic and all(span.is_full_axis and span.sampling.kind == "linear" for span in inner):
            return [span for span in spans if span.axis == ROWS], True
        return spans, False

    @staticmethod
    def _sizes(ctx: NodeContext) -> tuple[list[int]]:
        return (list(ctx.scope.axes.of(ctx.out_shape)),)

    @staticmethod
    def _geometry(ctx: NodeContext) -> tuple[Any, ...]:
        """ATen's further arguments. Resampled axes have no scale, which CUDA would apply a second time."""
        samplings = ctx.node.argument("samplings")
        scales = (None if axis == ROWS or each.is_identity else each.scale for axis, each in enumerate(samplings))
        return (samplings[0].align_corners, *scales)


@dataclass(frozen=True, slots=True)
class _WindowSums:
    """Adds a strip's share to the means of a grid's windows.

    Attributes:
        spans: the strip's range of each axis.
        dtype: element type of the strip's sums.
    """

    spans: tuple[ResampledRange, ...]
    dtype: torch.dtype

    def __call__(self, running: Tensor, strip: Tensor, origin: tuple[int, int, int]) -> None:
        value = strip
        for span in reversed(self.spans):
            dim = value.dim() - len(self.spans) + span.axis
            first, windows = span.first_rows(origin)[1], span.sampling.forward
            sums = value.new_zeros((*value.shape[:dim], span.length, *value.shape[dim + 1 :]), dtype=self.dtype)
            for window, (start, stop) in enumerate(zip(windows.start.tolist(), windows.stop.tolist(), strict=True)):
                low, high = max(start - first, 0), min(stop - first, span.extent)
                if low < high:
                    total = sums.select(dim, window)
                    torch.sum(value.narrow(dim, low, high - low), dim, dtype=self.dtype, out=total)
                    total.div_(stop - start)
            value = sums
        running.add_(value)

    def scratch_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of the sums along two consecutive axes."""
        sizes, sum_bytes = list(shape), [0]
        for span in reversed(self.spans):
            sizes[len(sizes) - len(self.spans) + span.axis] = span.length
            sum_bytes.append(math.prod(sizes) * self.dtype.itemsize)
        return max(a + b for a, b in pairwise(sum_bytes))


class FixedSizeAvgPoolRule(ReductionRule):
    """Adaptive average pooling to a small grid: each strip adds its share of the windows that it touches."""

    def forward(self, ctx: NodeContext) -> Slot:
        builder, strip, scope = ctx.builder, ctx.strip(next(refs_in(ctx.node.argument("self")))), ctx.scope
        shape = ctx.global_shape(ctx.node.name)
        sums = _WindowSums(
            tuple(resampled_ranges(ctx, scope.axes.of(shape), scope.axes.of(strip.shape), is_sum=True)), accumulation_dtype(strip.dtype)
        )
        running = builder.port("partial", ctx.node.name, shape, torch.float64)
        origin = builder.port("origin", ctx.node.name, ())
        return builder.call(sums, running, strip, origin, writes=running, scratch_bytes=sums.scratch_bytes(strip.shape))

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, image, axes = ctx.builder, ctx.node.argument("self"), ctx.scope.axes
        (operand,) = refs_in(image)
        value, wide = grad, accumulation_dtype(grad.dtype)
        for span in resampled_ranges(ctx, axes.of(grad.shape), axes.of(ctx.strip(operand).shape), is_sum=True):
            value = emit_resampling(ctx, value, replace(span, is_adjoint=True), wide)
        ctx.add_grad(image, builder.cast(value, grad.dtype), owned=True)
