"""Interpolation of a block of an image by ATen: linear, by factors that are powers of two.

Positions in the block are those in the image less whole numbers, without rounding, so ATen computes the same weights. It interpolates all
input rows and columns of the block; the result has some more than the block at its borders, which are cut off:

.. code-block:: text

    y = upsample_bilinear2d(strip)              all rows and columns of the strip, times the factor
    block = y[..., first:first + length, :]     a view, or a copy if its elements are scattered

The adjoint pads the gradient with zeros in their place. Axes that the block covers fully may have any scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sft.analysis.ir.axes import ROWS
from sft.lower.context import NodeContext, accumulation_dtype
from sft.lower.program import Slot
from sft.lower.rules.resampled_range import ResampledRange, may_be_scattered, resampled_ranges

__all__ = ["BlockInterpolation"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _BlockRange:
    """View of the rows (columns) of a block in the interpolation of all its input rows (columns).

    Attributes:
        span: the range of the axis.
        factor: rows of the result for each input row.
        dim: their dimension.
    """

    span: ResampledRange
    factor: int
    dim: int

    def __call__(self, value: Tensor, origin: tuple[int, int, int]) -> Tensor:
        """The view for a block at ``origin`` of the image."""
        return value.narrow(self.dim, self._first_row(origin), self.span.length)

    def is_same_at(self, origin: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
        """True if the view has the same rows at both origins."""
        return self._first_row(origin) == self._first_row(other)

    def _first_row(self, origin: tuple[int, int, int]) -> int:
        first, start = self.span.first_rows(origin)
        return first - self.factor * start


@dataclass(frozen=True, slots=True)
class BlockInterpolation:
    """Interpolation of one block.

    Attributes:
        operator: name of ATen's operator, such as ``upsample_bilinear2d``.
        shape: shape of the strip that is interpolated.
        out_shape: shape of the block.
        ranges: the axes of which the block has a part.
        scales: scale of each axis as ATen's argument; ``None`` for the ratio of the sizes.
        align_corners: as in :func:`torch.nn.functional.interpolate`.
    """

    operator: str
    shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    ranges: tuple[_BlockRange, ...]
    scales: tuple[float | None, ...]
    align_corners: bool

    @classmethod
    def of(cls, ctx: NodeContext, strip: Slot) -> BlockInterpolation | None:
        """The interpolation of a step; ``None`` if ATen cannot compute it, or not in a fixed order."""
        axes = ctx.scope.axes
        if ctx.scope.deterministic:
            return None
        spans = resampled_ranges(ctx, axes.of(ctx.out_shape), axes.of(strip.shape))
        if all(span.sampling.is_identity for span in spans):
            return None
        ranges, scales = [], []
        for span in spans:
            sampling, dim = span.sampling, axes.dim(len(strip.shape), span.axis)
            scales.append(None if sampling.is_identity else sampling.scale)
            is_unchanged = sampling.is_identity and span.length == span.extent
            if is_unchanged or (span.is_full_axis and sampling.kind == "linear"):
                continue
            factor = sampling.power_of_two
            if factor is None or dim is None:
                return None
            ranges.append(_BlockRange(span, factor, dim))
            scales[-1] = float(factor)
        operator, align_corners = ctx.node.target.split(".")[1], spans[0].sampling.align_corners
        return cls(operator, strip.shape, tuple(ctx.out_shape), tuple(ranges), tuple(scales), align_corners)

    def forward(self, ctx: NodeContext, strip: Slot) -> Slot:
        """Interpolate the strip, and take the block of the result."""
        builder, shape = ctx.builder, self._full_shape
        geometry = (list(ctx.scope.axes.of(shape)), self.align_corners, *self.scales)
        rows = ctx.scope.axes.dim(len(strip.shape), ROWS)
        is_copied = may_be_scattered(ctx, strip, (0, rows) if strip.shape[0] == 1 and rows is not None else (0,))
        function, scratch_bytes = getattr(aten, self.operator).default, strip.num_bytes * is_copied
        full = builder.call(function, strip, *geometry, shape=shape, dtype=strip.dtype, scratch_bytes=scratch_bytes)
        block, is_dense = self._block(ctx, full), all(each.span.axis == ROWS for each in self.ranges)
        if not self.ranges or (is_dense and strip.shape[0] == 1):
            return block
        return builder.copy(builder.empty(block.shape, block.dtype), block)

    def backward(self, ctx: NodeContext, grad: Slot) -> Slot:
        """The strip's gradient, in single precision or wider."""
        builder, shape, wide = ctx.builder, self._full_shape, accumulation_dtype(grad.dtype)
        if self.ranges:
            full = builder.zeros(shape, wide)
            builder.copy(self._block(ctx, full), grad)
        else:
            full = builder.cast(grad, wide)
        geometry = (list(ctx.scope.axes.of(shape)), list(self.shape), self.align_corners, *self.scales)
        function = getattr(aten, f"{self.operator}_backward").default
        return builder.call(function, full, *geometry, shape=self.shape, dtype=wide)

    @property
    def _full_shape(self) -> tuple[int, ...]:
        """Shape of the interpolation of all rows and columns of the strip."""
        factors = {each.dim: each.factor for each in self.ranges}
        return tuple(factors[dim] * self.shape[dim] if dim in factors else extent for dim, extent in enumerate(self.out_shape))

    def _block(self, ctx: NodeContext, value: Slot) -> Slot:
        """View of the block in the interpolation of the strip."""
        origin = ctx.builder.port("origin", ctx.node.name, ())
        for each in self.ranges:
            shape = (*value.shape[: each.dim], each.span.length, *value.shape[each.dim + 1 :])
            value = ctx.builder.call(each, value, origin, shape=shape, view_of=value)
        return value
