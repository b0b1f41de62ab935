"""im2col and col2im (``unfold`` and ``fold``) on a strip: copies of windows, and sums of windows.

See :mod:`sft.analysis.passes.decompose_windows` for the operators.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sft.analysis.ir.graph import refs_in
from sft.analysis.ir.ops.transposed import TransposedWindow, transposed_window_of
from sft.common.interval import Interval
from sft.lower.context import NodeContext, accumulation_dtype
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["Col2imRule", "Im2colRule"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _WindowGrid:
    """The windows of a block of an image, ``[N, channels..., axes...]``.

    Attributes:
        taps: for each axis and each pixel of a window along it: the first window that has the pixel inside the block, the number of such
            windows, and the pixel's index in the block.
        along: geometry of the windows along each axis.
    """

    taps: tuple[tuple[tuple[int, int, int], ...], ...]
    along: tuple[TransposedWindow, ...]

    @classmethod
    def of_im2col(cls, ctx: NodeContext, operand: str) -> _WindowGrid:
        """The windows that im2col computes from the rows and columns read."""
        return cls._of(ctx, ctx.spans(operand))

    @classmethod
    def of_col2im(cls, ctx: NodeContext, operand: str) -> _WindowGrid:
        """The windows that col2im reads for the rows and columns computed."""
        return cls._of(ctx, [(windows, pixels) for pixels, windows in ctx.spans(operand)])

    @classmethod
    def _of(cls, ctx: NodeContext, spans: Sequence[tuple[Interval, Interval]]) -> _WindowGrid:
        along = tuple(transposed_window_of(ctx.node, axis) for axis in range(len(spans)))
        return cls(tuple(tuple(a.tap_ranges(*span)) for a, span in zip(along, spans, strict=True)), along)

    def gather(self, image: Tensor, windows: Tensor) -> None:
        """Copy the image into windows, ``[N, channels..., windows...]``; window pixels outside the block keep their values."""
        split, count = self._split_pixels(image, windows), len(self.along)
        if all(taps == (0, extent, taps[2]) for axis, extent in zip(self.taps, split.shape[-count:], strict=True) for taps in axis):
            first = image.dim() - count
            strides = image.stride()[first:]
            sizes = (*image.shape[:first], *split.shape[-2 * count :])
            steps = [a.dilation * s for a, s in zip(self.along, strides, strict=True)]
            moves = [a.stride * s for a, s in zip(self.along, strides, strict=True)]
            offset = image.storage_offset() + sum(taps[0][2] * s for taps, s in zip(self.taps, strides, strict=True))
            split.copy_(image.as_strided(sizes, (*image.stride()[:first], *steps, *moves), offset))
            return
        for pixels, window in self._pairs(image, split):
            window.copy_(pixels)

    def scatter(self, windows: Tensor, image: Tensor) -> None:
        """The adjoint: add windows to the image."""
        for pixels, window in self._pairs(image, self._split_pixels(image, windows)):
            pixels.add_(window)

    def max_addend_elements(self, windows: Slot) -> int:
        """Most elements that one addition of :meth:`scatter` adds."""
        counts = [max(count for _, count, _ in taps) for taps in self.taps]
        elements = math.prod(windows.shape[: -len(counts)]) // math.prod(len(taps) for taps in self.taps)
        return elements * math.prod(counts)

    def _split_pixels(self, image: Tensor, windows: Tensor) -> Tensor:
        """Windows with their pixels as separate dimensions, ``[N, channels..., kernel..., windows...]``."""
        count = len(self.along)
        return windows.view(*image.shape[: image.dim() - count], *(a.kernel for a in self.along), *windows.shape[-count:])

    def _pairs(self, image: Tensor, split: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each pixel of a window, a view of the image and a view of all windows at that pixel."""
        count = len(self.along)
        for taps in itertools.product(*map(range, (len(axis_taps) for axis_taps in self.taps))):
            window, pixels = split, image
            for axis, tap in enumerate(taps):
                first, number, start = self.taps[axis][tap]
                dim, stride = axis - count, self.along[axis].stride
                window = window.select(axis - 2 * count, tap).narrow(dim, first, number)
                pixels = aten.slice(pixels, dim, start, start + stride * (number - 1) + 1, stride)
            if window.numel():
                yield pixels, window


def _emit_fold(ctx: NodeContext, windows: Slot, grid: _WindowGrid, out: Slot) -> Slot:
    """Emit the addition of windows to ``out``."""
    # Adding a narrower type makes a wider copy of the addend.
    scratch_bytes = 0 if windows.dtype == out.dtype else grid.max_addend_elements(windows) * out.dtype.itemsize
    return ctx.builder.call(grid.scatter, windows, out, writes=out, scratch_bytes=scratch_bytes)


class Im2colRule(Rule):
    """Copies of the windows of the rows and columns read."""

    in_place = True

    def forward(self, ctx: NodeContext) -> Slot:
        (operand,) = refs_in(ctx.node.argument("self"))
        out = ctx.destination or ctx.builder.empty(ctx.out_shape, ctx.scope.dtype_of(ctx.node.name))
        return ctx.builder.call(_WindowGrid.of_im2col(ctx, operand).gather, ctx.strip(operand), out, writes=out)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image = ctx.node.argument("self")
        (operand,) = refs_in(image)
        sums = ctx.builder.zeros(ctx.strip(operand).shape, accumulation_dtype(grad.dtype))
        ctx.add_grad(image, _emit_fold(ctx, grad, _WindowGrid.of_im2col(ctx, operand), sums), owned=True)


class Col2imRule(Rule):
    """Sums of the windows that cover the rows and columns; in half precision they are rounded once."""

    in_place = True

    def forward(self, ctx: NodeContext) -> Slot:
        builder, (operand,) = ctx.builder, refs_in(ctx.node.argument("self"))
        dtype = ctx.scope.dtype_of(ctx.node.name)
        wide = accumulation_dtype(dtype)
        out = ctx.destination if ctx.destination is not None and wide == dtype else builder.empty(ctx.out_shape, wide)
        builder.call(aten.zero_.default, out, writes=out)
        if not ctx.has_empty_read(operand):
            _emit_fold(ctx, ctx.strip(operand), _WindowGrid.of_col2im(ctx, operand), out)
        return builder.cast(out, dtype)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image = ctx.node.argument("self")
        (operand,) = refs_in(image)
        if ctx.has_empty_read(operand):
            return
        windows = ctx.builder.zeros(ctx.strip(operand).shape, grad.dtype)
        ctx.builder.call(_WindowGrid.of_col2im(ctx, operand).gather, grad, windows, writes=windows)
        ctx.add_grad(image, windows, owned=True)
