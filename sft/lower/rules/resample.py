"""Resampling on a strip: interpolation, adaptive average pooling, nearest upsampling.

Resampling is separable: each axis in turn, rows first. Every output row is a weighted sum of a window of input rows, gathered by index::

    out[i] = sum_k weight[k, i] * in[index[k, i]]

The adjoint has the same form with transposed windows, so gradients are sums in a fixed order, too. Indices and weights depend on the
strip's position, which is bound when the program runs (the ``origin`` port); so strips of one signature share their program.

In a linear interpolation ATen resamples the axes that the panel covers fully (it leaves the already resampled rows unchanged), unless sums
need a fixed order, which ATen's derivative does not keep on GPUs.

By a factor that is a power of two it also resamples the rows of one image: positions in the strip are those in the image less a whole
number, without rounding. The result begins some rows earlier than the strip, and is a view without these.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sft.analysis.ir.axes import COLUMNS, ROWS
from sft.analysis.ir.graph import refs_in
from sft.analysis.ir.ops.resampling import ResamplingSpec
from sft.analysis.ir.ops.resize_matrix import AxisResampling
from sft.lower.context import NodeContext, accumulation_dtype
from sft.lower.program import Slot
from sft.lower.row_gather import upload_table
from sft.lower.rules.base import ReductionRule, Rule

__all__ = ["FixedSizeAvgPoolRule", "NearestRule", "ResampledRange", "ResamplingRule", "index_select_channels_last", "resampled_ranges"]

aten = torch.ops.aten


class NearestRule(Rule):
    """Nearest upsampling by integer factors: a strip starts at an input row, so the operator itself runs on it."""

    def forward(self, ctx: NodeContext) -> Slot:
        strip = ctx.strip(next(refs_in(ctx.node.argument("input"))))
        factors, axes = ctx.node.argument("factors"), ctx.scope.axes
        grown = tuple(extent * factor for extent, factor in zip(axes.of(strip.shape), factors, strict=True))
        assert grown == axes.of(ctx.out_shape), "a strip of an upsampled value begins and ends at input rows and columns"
        ctx.saved["shape"] = strip.shape
        return ctx.builder.call(self._function(ctx, ""), strip, list(grown), *map(float, factors), shape=ctx.out_shape)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        shape, grown = ctx.saved["shape"], list(ctx.scope.axes.of(ctx.out_shape))
        scales = map(float, ctx.node.argument("factors"))
        out = ctx.builder.call(self._function(ctx, "_backward"), grad, grown, list(shape), *scales, shape=shape)
        ctx.add_grad(ctx.node.argument("input"), out, owned=True)

    @staticmethod
    def _function(ctx: NodeContext, kind: str) -> Any:
        return getattr(aten, f"{ctx.node.target.split('.')[1]}{kind}").default


@dataclass(frozen=True, slots=True)
class ResampledRange:
    """The range of one axis that a strip or panel resamples; also the function that resamples it.

    Attributes:
        sampling: indices and weights of the full axis.
        axis: index of the axis.
        length: number of output rows.
        extent: number of input rows.
        is_adjoint: True if rows of a gradient are gathered (the adjoint).
        is_sum: True if the range has all output rows, and the origin is the first input row (a reduction over strips).
    """

    sampling: AxisResampling
    axis: int
    length: int
    extent: int
    is_adjoint: bool = False
    is_sum: bool = False

    @property
    def is_full_axis(self) -> bool:
        """True if it is the full axis."""
        return (self.length, self.extent) == (self.sampling.length, self.sampling.extent)

    @property
    def num_rows(self) -> int:
        """Number of rows computed."""
        return self.extent if self.is_adjoint else self.length

    @property
    def width(self) -> int:
        """Number of terms in the sum of a row."""
        return (self.sampling.adjoint if self.is_adjoint else self.sampling.forward).width

    def first_rows(self, origin: tuple[int, int, int]) -> tuple[int, int]:
        """The first output row and the first input row."""
        first = origin[1 + self.axis] if self.axis <= COLUMNS else 0
        if self.is_sum:
            return 0, first
        is_full = self.extent == self.sampling.extent
        return first, 0 if is_full else min(max(0, self.sampling.access.low(first)), self.sampling.extent)

    def tables(self, origin: tuple[int, int, int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Indices and weights for a strip at ``origin`` of the image: batch element, row and column of its first element."""
        first, start = self.first_rows(origin)
        band = self.sampling.adjoint if self.is_adjoint else self.sampling.forward
        return band.submatrix(*((start, self.extent, first, self.length) if self.is_adjoint else (first, self.length, start, self.extent)))

    def is_same_at(self, here: tuple[int, int, int], there: tuple[int, int, int]) -> bool:
        """True if indices and weights are the same at both origins."""
        return all(map(np.array_equal, self.tables(here), self.tables(there)))

    def __call__(self, value: Tensor, origin: tuple[int, int, int], *, dim: int, dtype: torch.dtype) -> Tensor:
        """Resample a strip at ``origin`` of the image along ``dim``."""
        indices, weights = self.tables(origin)
        if dim != value.dim() - 1 and not (self.sampling.forward.is_selection and not self.is_adjoint):
            return _weighted_row_sums(value.to(dtype), dim, indices, weights)
        index = upload_table(indices, value.device)
        out = index_select_channels_last(value, dim, index[0]).to(dtype)
        if self.sampling.forward.is_selection and not self.is_adjoint:
            return out
        shape = [-1 if each == dim else 1 for each in range(value.dim())]
        weight = upload_table(weights, value.device, dtype)
        out.mul_(weight[0].view(shape))
        for term in range(1, self.width):
            out.addcmul_(index_select_channels_last(value, dim, index[term]).to(dtype), weight[term].view(shape))
        return out


def _weighted_row_sums(value: Tensor, dim: int, indices: npt.NDArray[np.int64], weights: npt.NDArray[np.float64]) -> Tensor:
    """Weighted sums of rows along ``dim``, in one pass over memory: an embedding bag with a row of all columns as an embedding.

    Args:
        value: the strip; rows are not its last axis.
        dim: axis of the rows.
        indices: rows of each sum, ``[terms, sums]``.
        weights: their weights, likewise.
    """
    is_channels_last = value.dim() > 3 and value.shape[1] > 1 and value.stride(1) == 1
    if is_channels_last:
        value, dim = value.movedim(1, -1), dim - 1
    rows, plane_rows = _row_matrix(value, dim)
    planes, length = math.prod(value.shape[:dim]), indices.shape[1]
    index = upload_table(indices.T, value.device, torch.int32)
    weight = upload_table(weights.T, value.device, value.dtype)
    if planes > 1:
        first = torch.arange(0, planes * plane_rows, plane_rows, dtype=torch.int32, device=value.device)
        index, weight = (index + first.view(-1, 1, 1)).flatten(0, 1), weight.repeat(planes, 1)
    offsets = torch.arange(0, index.numel(), index.shape[1], dtype=torch.int32, device=value.device)
    sums = torch.embedding_bag(rows, index.flatten(), offsets, False, 0, False, weight.flatten())[0]
    out = sums.view(*value.shape[:dim], length, *value.shape[dim + 1 :])
    return out.movedim(-1, 1) if is_channels_last else out


def _row_matrix(value: Tensor, dim: int) -> tuple[Tensor, int]:
    """Rows along ``dim`` of all planes (the axes before it) as a matrix, and the number of its rows from one plane to the next.

    A copy only if the columns of a row, or the planes, are not at equal distances in memory.
    """
    planes, extent, width = math.prod(value.shape[:dim]), value.shape[dim], math.prod(value.shape[dim + 1 :])
    with contextlib.suppress(RuntimeError):  # planes at different distances
        stacked = value.view(planes, extent, width)
        plane_rows = stacked.stride(0) // width if planes > 1 else extent
        if stacked[0].is_contiguous() and (planes == 1 or stacked.stride(0) == plane_rows * width):
            return stacked.as_strided(((planes - 1) * plane_rows + extent, width), (width, 1)), plane_rows
    return value.reshape(planes * extent, width), extent


def index_select_channels_last(value: Tensor, dim: int, index: Tensor) -> Tensor:
    """``index_select`` that keeps the channels-last layout."""
    if value.dim() > 3 and value.shape[1] > 1 and value.stride(1) == 1:
        return value.movedim(1, -1).index_select(dim - 1, index).movedim(-1, 1)
    return value.index_select(dim, index)


def emit_resampling(ctx: NodeContext, value: Slot, span: ResampledRange, dtype: torch.dtype) -> Slot:
    """Emit the resampling of a value along one axis."""
    dim = ctx.scope.axes.dim(len(value.shape), span.axis)
    assert dim is not None
    shape = (*value.shape[:dim], span.num_rows, *value.shape[dim + 1 :])
    count, num_terms = math.prod(shape), span.width * span.num_rows
    if dim == len(shape) - 1:
        # A term of the sum, its copy in a narrower type, and the tables of indices and weights.
        term = count * dtype.itemsize if span.width > 1 else 0
        narrow = count * value.dtype.itemsize if value.dtype != dtype else 0
        scratch_bytes = term + narrow + num_terms * (8 + dtype.itemsize)
    else:
        # A copy of the strip, and the tables of indices, weights and bags, of each plane.
        is_copied = value.dtype != dtype or _has_scattered_rows(ctx, value, dim)
        planes = math.prod(shape[:dim])
        scratch_bytes = math.prod(value.shape) * dtype.itemsize * is_copied + planes * num_terms * (2 * (4 + dtype.itemsize) + 4)
    return ctx.builder.call(
        span,
        value,
        ctx.builder.port("origin", ctx.node.name, ()),
        shape=shape,
        dtype=dtype,
        keywords={"dim": dim, "dtype": dtype},
        scratch_bytes=scratch_bytes,
    )


#: Ports whose tensors are dense in memory, except for slices along the rows or the samples.
_DENSE_PORTS = frozenset({"source", "carry", "grad_carry"})


def _has_scattered_rows(ctx: NodeContext, value: Slot, dim: int) -> bool:
    """True if the rows of a slot along ``dim`` may be scattered in memory, so that their matrix is a copy.

    That is so for slices along another axis, except columns of a single sample, for gradients of the caller, and for views that another
    operator has made, such as some of the channels.
    """
    builder = ctx.builder
    harmless = (0, dim, dim + 1) if value.shape[0] == 1 else (0, dim)
    for instruction in reversed(builder.instructions):
        if value.root == value.number or instruction.owner != builder.owner:
            break
        if all(out is None or out.number != value.number for out in instruction.outputs):
            continue
        if instruction.function is not aten.slice.Tensor or instruction.arguments[1] not in harmless:
            return True
        value = instruction.arguments[0]
    port = next((port for port, slot in builder.ports.items() if slot.number == value.number), None)
    return value.root != value.number or (port is not None and port.role not in _DENSE_PORTS)


def resampled_ranges(ctx: NodeContext, lengths: Sequence[int], extents: Sequence[int], *, is_sum: bool = False) -> list[ResampledRange]:
    """The range of each axis that the strip resamples."""
    row = ctx.scope.specs[ctx.node.name]
    assert isinstance(row, ResamplingSpec)
    spans = []
    for axis, (length, extent) in enumerate(zip(lengths, extents, strict=True)):
        sampling = row.sampling(ctx.node, axis)
        assert sampling is not None
        spans.append(ResampledRange(sampling, axis, length, extent, is_sum=is_sum))
    return spans


@dataclass(frozen=True, slots=True)
class _StripRows:
    """View of the rows of a strip in the interpolation of all its input rows.

    Attributes:
        span: the range of rows.
        factor: rows of the result for each input row.
        dim: their dimension.
    """

    span: ResampledRange
    factor: int
    dim: int

    def __call__(self, value: Tensor, origin: tuple[int, int, int]) -> Tensor:
        """The view for a strip at ``origin`` of the image."""
        return value.narrow(self.dim, self._first_row(origin), self.span.length)

    def is_same_at(self, here: tuple[int, int, int], there: tuple[int, int, int]) -> bool:
        """True if the view has the same rows at both origins."""
        return self._first_row(here) == self._first_row(there)

    def _first_row(self, origin: tuple[int, int, int]) -> int:
        first, start = self.span.first_rows(origin)
        return first - self.factor * start


def _whole_factor(sampling: AxisResampling) -> int | None:
    """Factor of an interpolation by a power of two, with positions that are exact in every type; ``None`` for another one."""
    factor, rest = divmod(sampling.length, sampling.extent)
    is_plain = sampling.kind == "linear" and not sampling.align_corners and sampling.scale in (None, factor)
    return factor if is_plain and not rest and factor > 1 and factor & (factor - 1) == 0 else None


class ResamplingRule(Rule):
    """Interpolation and adaptive average pooling, in single precision or wider until the last axis."""

    def forward(self, ctx: NodeContext) -> Slot:
        builder, strip = ctx.builder, ctx.strip(self._operand(ctx))
        spans, is_linear = self._split_axes(ctx, strip)
        ctx.saved.update(spans=spans, is_linear=is_linear)
        has_kernels = ctx.scope.backend is not None and ctx.scope.backend.has_kernels
        factor = _whole_factor(spans[0].sampling) if is_linear and strip.shape[0] == 1 and spans and not has_kernels else None
        if factor is not None:
            return self._interpolate(ctx, strip, spans[0], factor)
        value, wide = strip, accumulation_dtype(strip.dtype)
        for span in spans:
            value = emit_resampling(ctx, value, span, wide)
        if is_linear:
            ctx.saved["inner"] = value.shape
            value = builder.call(
                self._function(ctx, ""), value, *self._sizes(ctx), *self._geometry(ctx), shape=ctx.out_shape, dtype=value.dtype
            )
        return builder.call(aten.clone.default, strip, shape=strip.shape) if value is strip else builder.cast(value, strip.dtype)

    def _interpolate(self, ctx: NodeContext, strip: Slot, span: ResampledRange, factor: int) -> Slot:
        """Interpolate all rows of the strip by ATen, and take a view of those of the result."""
        builder, dim = ctx.builder, ctx.scope.axes.dim(len(strip.shape), ROWS)
        assert dim is not None
        ctx.saved["inner"] = (*strip.shape[:dim], span.length, *strip.shape[dim + 1 :])
        shape = (*ctx.out_shape[:dim], factor * strip.shape[dim], *ctx.out_shape[dim + 1 :])
        align_corners, _, *scales = self._geometry(ctx)
        sizes = list(ctx.scope.axes.of(shape))
        full = builder.call(self._function(ctx, ""), strip, sizes, align_corners, float(factor), *scales, shape=shape, dtype=strip.dtype)
        take_rows, origin = _StripRows(span, factor, dim), builder.port("origin", ctx.node.name, ())
        return builder.call(take_rows, full, origin, shape=ctx.out_shape, view_of=full, dtype=strip.dtype)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, value, wide = ctx.builder, grad, accumulation_dtype(grad.dtype)
        if ctx.saved["is_linear"]:
            inner = ctx.saved["inner"]
            value = builder.cast(value, wide if ctx.saved["spans"] else grad.dtype)
            sizes = (*self._sizes(ctx), list(inner))
            value = builder.call(self._function(ctx, "_backward"), value, *sizes, *self._geometry(ctx), shape=inner, dtype=value.dtype)
        for span in reversed(ctx.saved["spans"]):
            value = emit_resampling(ctx, value, replace(span, is_adjoint=True), wide)
        image = ctx.node.argument("input" if ctx.node.target.endswith(".vec") else "self")
        ctx.add_grad(image, builder.cast(value, grad.dtype), owned=value is not grad or owned)

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
    def _function(ctx: NodeContext, kind: str) -> Any:
        return getattr(aten, f"{ctx.node.target.split('.')[1]}{kind}").default

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
