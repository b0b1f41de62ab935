"""Max pooling on a strip.

Where all that a window holds is minus infinity, its gradient belongs to the first element. Beyond the border there is none: ATen knows that
of padding of its own, but not of the rows and columns that a strip was padded with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sft.analysis.axes import ROWS
from sft.analysis.graph import refs_in
from sft.analysis.operators import Window
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.rules.windowed import PoolRule, as_two_axes, as_own_axes, kernel_windows

__all__ = ["MaxPoolRule", "correct_infinite_indices"]

aten = torch.ops.aten


class MaxPoolRule(PoolRule):
    """``max_pool1d``, ``max_pool2d``, ``max_pool3d``.

    On a strip the indices, eight bytes an element, are found again in the backward pass instead of waiting for it: that costs no
    multiplication, and they would be the largest thing that a strip keeps. Kept whole they are saved, as in plain PyTorch.
    """

    border_value = float("-inf")

    def own_padding_fits(self, own: Sequence[int], windows: Sequence[Window]) -> bool:
        return all(2 * size <= window.kernel for size, window in zip(own, windows, strict=True))

    def forward(self, ctx: NodeContext) -> Slot:
        operand = next(refs_in(ctx.node.argument("self")))
        windows = kernel_windows(ctx)
        if ctx.is_whole:
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
        out, indices = ctx.emitter.slot(shape), ctx.emitter.slot(shape, torch.int64)
        function = aten.max_pool3d_with_indices if ctx.scope.axes.count == 3 else aten.max_pool2d_with_indices
        ctx.emitter.call_many(function.default, (ctx.saved["spread"], *ctx.saved["geometry"]), (out, indices))
        if ctx.scope.axes.count == 3:
            starts = _first_slices(kernel_windows(ctx)[ROWS], ctx.saved["geometry"][2][ROWS], shape[2])
            correct_infinite_indices(ctx, out, indices, starts, ctx.saved["spread"])
        return out, indices

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image, value = ctx.node.argument("self"), ctx.saved["spread"]
        operand = next(refs_in(image))
        if ctx.reads_nothing(operand):
            return
        indices = ctx.saved["indices"] if ctx.is_whole else self._pool(ctx)[1]
        is_volume = ctx.scope.axes.count == 3
        grad = as_two_axes(ctx, grad)
        if is_volume and ctx.scope.deterministic:  # ATen's adds where windows overlap in any order
            scratch_bytes = grad.num_bytes + indices.num_bytes
            out = ctx.emitter.call(_max_pool3d_grad, grad, value, indices, shape=value.shape, scratch_bytes=scratch_bytes)
        else:
            function = aten.max_pool3d_with_indices_backward if is_volume else aten.max_pool2d_with_indices_backward
            out = ctx.emitter.call(function.default, grad, value, *ctx.saved["geometry"], indices, shape=value.shape)
        out = as_own_axes(ctx, out)
        self._give_inwards(ctx, out)
        ctx.add_grad(image, self.unpadded(ctx, operand, out), owned=True)

    @staticmethod
    def _give_inwards(ctx: NodeContext, grad: Slot) -> None:
        """Add what explicit padding got to the first pixels inside.

        Of a window that holds nothing but minus infinity ATen takes the first element. Padding of its own is none, ours is one.
        """
        for axis, (window, offset) in enumerate(zip(kernel_windows(ctx), ctx.saved["offset"], strict=True)):
            starts = range(0, offset, window.stride)[: ctx.scope.axes.of(ctx.out_shape)[axis]]
            for start in starts:
                first = offset + (start - offset) % window.dilation
                inside = ctx.narrow(grad, axis, first, 1)
                ctx.emitter.call(aten.add_.Tensor, inside, ctx.narrow(grad, axis, start, 1), writes=inside)


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
    ctx.emitter.call(_correct_indices, indices, value, tuple(starts), area, writes=indices, scratch_bytes=scratch_bytes)


def _correct_indices(indices: Tensor, value: Tensor, starts: Sequence[int], area: int) -> None:
    if indices.device.type != "cpu":
        return
    for index, largest, start in zip(indices.unbind(2), value.unbind(2), starts, strict=True):
        index.copy_(torch.where(largest == -math.inf, index.remainder(area).add_(start * area), index))
