"""``unfold`` and ``fold`` on a strip (see :mod:`sft.analysis.passes.decompose_windows`): copies of windows, and their sums."""

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
    """Where windows lie in a part of an image, ``[N, channels..., axes...]``.

    Attributes:
        taps: for each axis, for each pixel of a window along it: the first window that has it in this part, how many have, and where the
            first one has it.
        along: for each axis how windows lie.
    """

    taps: tuple[tuple[tuple[int, int, int], ...], ...]
    along: tuple[TransposedWindow, ...]

    @classmethod
    def made(cls, ctx: NodeContext, operand: str) -> _WindowGrid:
        """Those that are computed, of the rows and columns read."""
        return cls._of(ctx, ctx.spans(operand))

    @classmethod
    def read(cls, ctx: NodeContext, operand: str) -> _WindowGrid:
        """Those that are read, on the rows and columns computed."""
        return cls._of(ctx, [(windows, pixels) for pixels, windows in ctx.spans(operand)])

    @classmethod
    def _of(cls, ctx: NodeContext, spans: Sequence[tuple[Interval, Interval]]) -> _WindowGrid:
        along = tuple(transposed_window_of(ctx.node, axis) for axis in range(len(spans)))
        return cls(tuple(tuple(a.tap_ranges(*span)) for a, span in zip(along, spans, strict=True)), along)

    def gather(self, image: Tensor, windows: Tensor) -> None:
        """Copy the image into windows, ``[N, channels..., windows...]``; pixels that are not in this part stay what they are."""
        apart, count = self._apart(image, windows), len(self.along)
        if all(taps == (0, extent, taps[2]) for axis, extent in zip(self.taps, apart.shape[-count:], strict=True) for taps in axis):
            first = image.dim() - count
            strides = image.stride()[first:]
            sizes = (*image.shape[:first], *apart.shape[-2 * count :])
            steps = [a.dilation * s for a, s in zip(self.along, strides, strict=True)]
            moves = [a.stride * s for a, s in zip(self.along, strides, strict=True)]
            offset = image.storage_offset() + sum(taps[0][2] * s for taps, s in zip(self.taps, strides, strict=True))
            apart.copy_(image.as_strided(sizes, (*image.stride()[:first], *steps, *moves), offset))
            return
        for pixels, window in self._pairs(image, apart):
            window.copy_(pixels)

    def scatter(self, windows: Tensor, image: Tensor) -> None:
        """The adjoint: add windows to the image."""
        for pixels, window in self._pairs(image, self._apart(image, windows)):
            pixels.add_(window)

    def most(self, windows: Slot) -> int:
        """The most elements that are added at once."""
        counts = [max(count for _, count, _ in taps) for taps in self.taps]
        elements = math.prod(windows.shape[: -len(counts)]) // math.prod(len(taps) for taps in self.taps)
        return elements * math.prod(counts)

    def _apart(self, image: Tensor, windows: Tensor) -> Tensor:
        """Windows with their pixels as dimensions of their own, ``[N, channels..., kernel..., windows...]``."""
        count = len(self.along)
        return windows.view(*image.shape[: image.dim() - count], *(a.kernel for a in self.along), *windows.shape[-count:])

    def _pairs(self, image: Tensor, apart: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each pixel of a window where these pixels lie in the image, and in the windows."""
        count = len(self.along)
        for places in itertools.product(*map(range, (len(taps) for taps in self.taps))):
            window, pixels = apart, image
            for axis, place in enumerate(places):
                first, number, start = self.taps[axis][place]
                dim, stride = axis - count, self.along[axis].stride
                window = window.select(axis - 2 * count, place).narrow(dim, first, number)
                pixels = aten.slice(pixels, dim, start, start + stride * (number - 1) + 1, stride)
            if window.numel():
                yield pixels, window


def _emit_fold(ctx: NodeContext, windows: Slot, lie: _WindowGrid, out: Slot) -> Slot:
    """Emit the sums of windows, into zeros."""
    # Adding a narrower type makes a wider copy of what is added.
    scratch_bytes = 0 if windows.dtype == out.dtype else lie.most(windows) * out.dtype.itemsize
    return ctx.builder.call(lie.scatter, windows, out, writes=out, scratch_bytes=scratch_bytes)


class Im2colRule(Rule):
    """Windows of the rows and columns read."""

    saves_input = False
    in_place = True

    def forward(self, ctx: NodeContext) -> Slot:
        (operand,) = refs_in(ctx.node.argument("self"))
        out = ctx.destination or ctx.builder.empty(ctx.out_shape, ctx.scope.dtype_of(ctx.node.name))
        return ctx.builder.call(_WindowGrid.made(ctx, operand).gather, ctx.strip(operand), out, writes=out)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image = ctx.node.argument("self")
        (operand,) = refs_in(image)
        sums = ctx.builder.zeros(ctx.strip(operand).shape, accumulation_dtype(grad.dtype))
        ctx.add_grad(image, _emit_fold(ctx, grad, _WindowGrid.made(ctx, operand), sums), owned=True)


class Col2imRule(Rule):
    """Sums of the windows that reach the rows and columns; in half precision they are rounded once."""

    saves_input = False
    in_place = True

    def forward(self, ctx: NodeContext) -> Slot:
        builder, (operand,) = ctx.builder, refs_in(ctx.node.argument("self"))
        dtype = ctx.scope.dtype_of(ctx.node.name)
        wide = accumulation_dtype(dtype)
        out = ctx.destination if ctx.destination is not None and wide == dtype else builder.empty(ctx.out_shape, wide)
        builder.call(aten.zero_.default, out, writes=out)
        if not ctx.has_empty_read(operand):
            _emit_fold(ctx, ctx.strip(operand), _WindowGrid.read(ctx, operand), out)
        return builder.cast(out, dtype)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image = ctx.node.argument("self")
        (operand,) = refs_in(image)
        if ctx.has_empty_read(operand):
            return
        windows = ctx.builder.zeros(ctx.strip(operand).shape, grad.dtype)
        ctx.builder.call(_WindowGrid.read(ctx, operand).gather, grad, windows, writes=windows)
        ctx.add_grad(image, windows, owned=True)
