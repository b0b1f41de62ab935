"""How each row of the operator table runs on a strip and is differentiated: forward and backward as ATen calls.

``forward`` returns the slot of the new rows. It may write them into ``ctx.destination`` (the tail of the buffer behind the
carried rows, or an output) or over ``ctx.overwrite`` (an operand nobody else reads) where the operator has an in-place form;
otherwise the caller copies. ``backward`` takes the gradient of the new rows and reports gradients of the operands.

Padding is applied here, and only where the read interval leaves the image: where both image borders are in the strip the
operator's own symmetric padding does it, elsewhere the strip is padded explicitly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from sft.analysis.graph import Node, refs_in
from sft.analysis.operators import Window, window_of
from sft.lower.context import NodeContext
from sft.lower.program import Slot

__all__ = ["RULES", "Rule"]

aten = torch.ops.aten


class Rule(ABC):
    """The lowering of one family of operators.

    Attributes:
        saves_input: whether the backward reads the streamed operands' values.
        saves_output: whether the backward reads the operator's own value.
        in_place: whether ``forward`` can write into a destination.
        overwrites: whether ``forward`` can write over its only operand.
    """

    saves_input: ClassVar[bool] = True
    saves_output: ClassVar[bool] = False
    in_place: ClassVar[bool] = False
    overwrites: ClassVar[bool] = False

    @abstractmethod
    def forward(self, ctx: NodeContext) -> Slot:
        """Emit the computation of the new rows."""

    @abstractmethod
    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        """Emit the gradients of the operands; ``owned`` says whether ``grad`` may be overwritten."""


def _pad(ctx: NodeContext, strip: Slot, low: int, high: int, left: int, right: int, value: float) -> Slot:
    if not (low or high or left or right):
        return strip
    batch, channels, height, width = strip.shape
    shape = (batch, channels, height + low + high, width + left + right)
    if height and width:
        return ctx.emitter.call(aten.constant_pad_nd.default, strip, [left, right, low, high], value, shape=shape)
    out = ctx.emitter.empty(shape)
    return ctx.emitter.call(aten.fill_.Scalar, out, value, writes=out)


class _Windowed(Rule):
    """Shared by convolution and pooling: which padding the operator applies itself, and which is made explicit."""

    border_value: ClassVar[float] = 0.0

    def _padded(self, ctx: NodeContext, operand: str, windows: tuple[Window, Window]) -> tuple[Slot, tuple[int, int]]:
        """The padded strip and the symmetric paddings (height, width) left to the operator."""
        read, columns = ctx.read_of(operand), windows[1]
        own_height = read.pad_low if read.pad_low == read.pad_high and read.rows else 0
        own_width = columns.pad_low if columns.pad_low == columns.pad_high else 0
        if not self._own_padding_fits(own_height, own_width, windows):
            own_height = own_width = 0
        padded = _pad(
            ctx,
            ctx.strip(operand),
            read.pad_low - own_height,
            read.pad_high - own_height,
            columns.pad_low - own_width,
            columns.pad_high - own_width,
            self.border_value,
        )
        ctx.saved["padded"] = padded
        ctx.saved["offset"] = (read.pad_low - own_height, columns.pad_low - own_width)
        return padded, (own_height, own_width)

    def _own_padding_fits(self, height: int, width: int, windows: tuple[Window, Window]) -> bool:
        return True

    def _unpadded(self, ctx: NodeContext, operand: str, grad: Slot) -> Slot:
        """The gradient of the rows read, given the gradient of the padded strip."""
        top, left = ctx.saved["offset"]
        read = ctx.read_of(operand)
        inner = ctx.emitter.narrow(grad, 2, top, len(read.rows))
        return ctx.emitter.narrow(inner, 3, left, ctx.scope.shapes[operand][3])


def has_uneven_columns(node: Node) -> bool:
    """Whether a windowed operator pads left and right differently, which ATen's operators cannot."""
    columns = window_of(node, 1)
    return columns is None or columns.pad_low != columns.pad_high


class Convolution(_Windowed):
    """``conv2d``; the explicitly padded strip is what the backward differentiates."""

    def forward(self, ctx: NodeContext) -> Slot:
        node = ctx.node
        operand = next(refs_in(node.argument("input")))
        bordered = None if has_uneven_columns(node) else ctx.bordered_strip(operand)
        if bordered is not None:
            padded, padding = bordered, (0, _windows(ctx)[1].pad_low)
            ctx.saved.update(padded=padded, offset=(ctx.read_of(operand).pad_low, 0))
        else:
            padded, padding = self._padded(ctx, operand, _windows(ctx))
        bias = node.argument("bias")
        ctx.saved["padding"] = padding
        return ctx.emitter.call(
            aten.convolution.default,
            padded,
            ctx.operand_slot(node.argument("weight")),
            ctx.operand_slot(bias),
            *self._geometry(ctx),
            shape=ctx.out_shape,
        )

    def _geometry(self, ctx: NodeContext) -> tuple[Any, ...]:
        rows, columns = _windows(ctx)
        return (
            [rows.stride, columns.stride],
            list(ctx.saved["padding"]),
            [rows.dilation, columns.dilation],
            False,
            [0, 0],
            ctx.node.argument("groups"),
        )

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        node, e, padded = ctx.node, ctx.emitter, ctx.saved["padded"]
        image, weight, bias = node.argument("input"), node.argument("weight"), node.argument("bias")
        operand = next(refs_in(image))
        weight_slot = ctx.operand_slot(weight)
        mask = [ctx.needs_grad(image) and bool(ctx.read_of(operand).rows), ctx.needs_grad(weight), ctx.needs_grad(bias)]
        if not any(mask):
            return
        out = tuple(
            e.slot(shape) if wanted else None
            for wanted, shape in zip(mask, (padded.shape, weight_slot.shape, (weight_slot.shape[0],)), strict=True)
        )
        sizes = None if bias is None else [weight_slot.shape[0]]
        e.call_many(aten.convolution_backward.default, (grad, padded, weight_slot, sizes, *self._geometry(ctx), mask), out)
        if out[0] is not None:
            ctx.add_grad(image, self._unpadded(ctx, operand, out[0]), owned=True)
        if out[1] is not None:
            ctx.add_grad(weight, out[1], owned=True)
        if out[2] is not None:
            ctx.add_grad(bias, out[2], owned=True)


class MaxPool(_Windowed):
    """``max_pool2d``.

    On a strip the indices, eight bytes an element, are found again in the backward pass instead of waiting for it: that costs no
    multiplication, and they would be the largest thing that a strip keeps. Kept whole they are saved, as in plain PyTorch.
    """

    border_value = float("-inf")

    def _own_padding_fits(self, height: int, width: int, windows: tuple[Window, Window]) -> bool:
        return 2 * height <= windows[0].kernel and 2 * width <= windows[1].kernel

    def forward(self, ctx: NodeContext) -> Slot:
        operand = next(refs_in(ctx.node.argument("self")))
        rows, columns = _windows(ctx)
        if ctx.is_whole:
            padded, padding = ctx.strip(operand), (rows.pad_low, columns.pad_low)
            ctx.saved.update(padded=padded, offset=(0, 0))
        else:
            padded, padding = self._padded(ctx, operand, (rows, columns))
        ctx.saved["geometry"] = (
            [rows.kernel, columns.kernel],
            [rows.stride, columns.stride],
            list(padding),
            [rows.dilation, columns.dilation],
            rows.ceil,
        )
        out, ctx.saved["indices"] = self._pool(ctx)
        return out

    def _pool(self, ctx: NodeContext) -> tuple[Slot, Slot]:
        out, indices = ctx.emitter.slot(ctx.out_shape), ctx.emitter.slot(ctx.out_shape, torch.int64)
        arguments = (ctx.saved["padded"], *ctx.saved["geometry"])
        ctx.emitter.call_many(aten.max_pool2d_with_indices.default, arguments, (out, indices))
        return out, indices

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image, padded = ctx.node.argument("self"), ctx.saved["padded"]
        operand = next(refs_in(image))
        if not ctx.read_of(operand).rows:
            return
        indices = ctx.saved["indices"] if ctx.is_whole else self._pool(ctx)[1]
        out = ctx.emitter.call(
            aten.max_pool2d_with_indices_backward.default,
            grad,
            padded,
            *ctx.saved["geometry"],
            indices,
            shape=padded.shape,
        )
        ctx.add_grad(image, self._unpadded(ctx, operand, out), owned=True)


class AvgPool(_Windowed):
    """``avg_pool2d``.

    The divisor counts elements inside the image (or the image and its declared padding). A strip that holds no border, or only
    counted padding, has the operator's own divisor. At other borders the strip is padded, summed, and divided by the sums of a
    mask that is one where elements count.
    """

    def forward(self, ctx: NodeContext) -> Slot:
        operand = next(refs_in(ctx.node.argument("self")))
        windows = _windows(ctx)
        rows, columns = windows
        read = ctx.read_of(operand)
        override, counted = ctx.node.argument("divisor_override"), ctx.node.argument("count_include_pad")
        whole = ctx.is_whole and 2 * rows.pad_low <= rows.kernel and 2 * columns.pad_low <= columns.kernel
        native = whole or override is not None or (not (read.pad_low or read.pad_high) or (counted and read.pad_high <= rows.pad_high))
        e = ctx.emitter
        if native:
            if whole:
                padded, padding = ctx.strip(operand), (rows.pad_low, columns.pad_low)
                ctx.saved["offset"] = (0, 0)
            else:
                padded = _pad(ctx, ctx.strip(operand), read.pad_low, read.pad_high, 0, 0, 0.0)
                padding = (0, columns.pad_low)
                ctx.saved["offset"] = (read.pad_low, 0)
            ctx.saved.update(padded=padded, counts=None, geometry=self._arguments(windows, padding, rows.ceil, counted, override))
            return e.call(aten.avg_pool2d.default, padded, *ctx.saved["geometry"], shape=ctx.out_shape)
        width = ctx.scope.shapes[operand][3]
        out_width = ctx.out_shape[3]
        right = max(0, (out_width - 1) * columns.stride + columns.kernel - columns.pad_low - width)
        padded = _pad(ctx, ctx.strip(operand), read.pad_low, read.pad_high, columns.pad_low, right, 0.0)
        mask = e.zeros((1, 1, *padded.shape[2:]))
        extra = (rows.pad_low, rows.pad_high, columns.pad_low, columns.pad_high) if counted else (0, 0, 0, 0)
        top = max(0, read.pad_low - extra[0])
        bottom = read.pad_low + len(read.rows) + min(read.pad_high, extra[1])
        left, end = columns.pad_low - extra[2], columns.pad_low + width + min(right, extra[3])
        inner = e.narrow(e.narrow(mask, 2, top, bottom - top), 3, left, end - left)
        e.call(aten.fill_.Scalar, inner, 1.0, writes=inner)
        geometry = self._arguments(windows, (0, 0), False, True, 1)
        counts = e.call(aten.avg_pool2d.default, mask, *geometry, shape=(1, 1, ctx.new_rows, out_width))
        ctx.saved.update(padded=padded, counts=counts, offset=(read.pad_low, columns.pad_low), geometry=geometry)
        total = e.call(aten.avg_pool2d.default, padded, *geometry, shape=ctx.out_shape)
        return e.call(aten.div_.Tensor, total, counts, writes=total)

    @staticmethod
    def _arguments(
        windows: tuple[Window, Window], padding: tuple[int, int], ceil: bool, counted: bool, override: int | None
    ) -> tuple[Any, ...]:
        rows, columns = windows
        return ([rows.kernel, columns.kernel], [rows.stride, columns.stride], list(padding), ceil, counted, override)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image, padded, e = ctx.node.argument("self"), ctx.saved["padded"], ctx.emitter
        operand = next(refs_in(image))
        if not ctx.read_of(operand).rows:
            return
        if ctx.saved["counts"] is not None:
            grad = e.call(aten.div.Tensor, grad, ctx.saved["counts"], shape=grad.shape)
        out = e.call(aten.avg_pool2d_backward.default, grad, padded, *ctx.saved["geometry"], shape=padded.shape)
        ctx.add_grad(image, self._unpadded(ctx, operand, out), owned=True)


class Nearest(Rule):
    """``upsample_nearest2d`` by whole factors: a strip starts at a whole input row, so it is the operator on a smaller image."""

    saves_input = False

    def forward(self, ctx: NodeContext) -> Slot:
        strip = ctx.strip(next(refs_in(ctx.node.argument("input"))))
        factors = ctx.node.argument("factors")
        assert strip.shape[2] * factors[0] == ctx.new_rows, "a strip of an upsampled value begins and ends at input rows"
        ctx.saved["shape"] = strip.shape
        return ctx.emitter.call(aten.upsample_nearest2d.default, strip, list(ctx.out_shape[2:]), *map(float, factors), shape=ctx.out_shape)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        shape = ctx.saved["shape"]
        out = ctx.emitter.call(
            aten.upsample_nearest2d_backward.default,
            grad,
            list(ctx.out_shape[2:]),
            list(shape),
            *map(float, ctx.node.argument("factors")),
            shape=shape,
        )
        ctx.add_grad(ctx.node.argument("input"), out, owned=True)


class Binary(Rule):
    """``add``, ``sub``, ``mul``, ``div`` of strips, of a strip and a tensor without height and width, or of a strip and a number."""

    saves_input = True
    in_place = True

    def forward(self, ctx: NodeContext) -> Slot:
        node, e = ctx.node, ctx.emitter
        left, right = ctx.operand_slot(node.argument("self")), ctx.operand_slot(node.argument("other"))
        name = node.target.split(".")[1]
        alpha = {"alpha": node.argument("alpha")} if name in ("add", "sub") and node.argument("alpha") != 1 else {}
        function = getattr(aten, name)
        if ctx.destination is not None and isinstance(right, Slot):
            return e.call(function.out, left, right, writes=ctx.destination, keywords={"out": ctx.destination, **alpha})
        return e.call(function.Tensor, left, right, shape=ctx.out_shape, keywords=alpha)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        node, e = ctx.node, ctx.emitter
        left, right = node.argument("self"), node.argument("other")
        name = node.target.split(".")[1]
        alpha = node.argument("alpha", 1)
        if name in ("add", "sub"):
            factor = alpha if name == "add" else -alpha
            self._report(ctx, left, grad, owned=False)
            if ctx.needs_grad(right):
                scaled = grad if factor == 1 else e.call(aten.mul.Tensor, grad, factor, shape=grad.shape)
                self._report(ctx, right, scaled, owned=factor != 1)
            return
        function = aten.mul.Tensor if name == "mul" else aten.div.Tensor
        if ctx.needs_grad(left):
            self._report(ctx, left, e.call(function, grad, ctx.operand_slot(right), shape=grad.shape), owned=True)
        if ctx.needs_grad(right):
            part = e.call(aten.mul.Tensor, grad, ctx.operand_slot(left), shape=grad.shape)
            if name == "div":
                divisor = ctx.operand_slot(right)
                square = e.call(aten.mul.Tensor, divisor, divisor, shape=divisor.shape)
                part = e.call(aten.div.Tensor, part, square, shape=grad.shape)
                part = e.call(aten.neg.default, part, shape=grad.shape)
            self._report(ctx, right, part, owned=True)

    def _report(self, ctx: NodeContext, value: Any, grad: Slot, *, owned: bool) -> None:
        """Sum the gradient over the dimensions along which the operand was broadcast, then report it."""
        if not ctx.needs_grad(value):
            return
        (name,) = refs_in(value)
        shape = ctx.strip(name).shape if name in ctx.scope.streamed else ctx.scope.shapes[name]
        reduced = _sum_to(ctx, grad, shape)
        ctx.add_grad(value, reduced, owned=owned or reduced is not grad)


def _sum_to(ctx: NodeContext, grad: Slot, shape: tuple[int, ...]) -> Slot:
    missing = len(grad.shape) - len(shape)
    dims = [d for d in range(len(grad.shape)) if d < missing or (shape[d - missing] == 1 and grad.shape[d] != 1)]
    if not dims:
        if missing:
            return ctx.emitter.call(aten.view.default, grad, list(shape), shape=shape, view_of=grad)
        return grad
    kept = tuple(1 if d in dims else extent for d, extent in enumerate(grad.shape))
    total = ctx.emitter.call(aten.sum.dim_IntList, grad, dims, True, shape=kept)
    if kept == tuple(shape):
        return total
    return ctx.emitter.call(aten.view.default, total, list(shape), shape=shape, view_of=total)


class Cat(Rule):
    """``cat`` along channels."""

    saves_input = False
    in_place = True

    def forward(self, ctx: NodeContext) -> Slot:
        strips = tuple(ctx.strip(name) for name in refs_in(ctx.node.argument("tensors")))
        if ctx.destination is not None:
            return ctx.emitter.call(aten.cat.out, strips, 1, writes=ctx.destination, keywords={"out": ctx.destination})
        return ctx.emitter.call(aten.cat.default, strips, 1, shape=ctx.out_shape)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        first = 0
        for ref in ctx.node.argument("tensors"):
            (name,) = refs_in(ref)
            channels = ctx.scope.shapes[name][1]
            if ctx.needs_grad(ref):
                ctx.add_grad(ref, ctx.emitter.narrow(grad, 1, first, channels), owned=False)
            first += channels


class FrozenNorm(Rule):
    """BatchNorm with its running statistics: an affine map of each channel."""

    def forward(self, ctx: NodeContext) -> Slot:
        node = ctx.node
        arguments = [ctx.operand_slot(node.argument(name)) for name in ("input", "weight", "bias", "running_mean", "running_var")]
        out = ctx.emitter.slot(ctx.out_shape)
        ctx.emitter.call_many(
            aten._native_batch_norm_legit_no_training.default,
            (*arguments, node.argument("momentum"), node.argument("eps")),
            (out, None, None),
        )
        return out

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        node, e = ctx.node, ctx.emitter
        image, weight, bias = node.argument("input"), node.argument("weight"), node.argument("bias")
        strip = ctx.operand_slot(image)
        mask = [ctx.needs_grad(image), ctx.needs_grad(weight), ctx.needs_grad(bias)]
        channels = (strip.shape[1],)
        out = tuple(e.slot(s) if m else None for m, s in zip(mask, (strip.shape, channels, channels), strict=True))
        mean, variance = (ctx.operand_slot(node.argument(name)) for name in ("running_mean", "running_var"))
        e.call_many(
            aten.native_batch_norm_backward.default,
            (grad, strip, ctx.operand_slot(weight), mean, variance, None, None, False, node.argument("eps"), mask),
            out,
        )
        for value, slot in zip((image, weight, bias), out, strict=True):
            if slot is not None:
                ctx.add_grad(value, slot, owned=True)


class Mean(Rule):
    """Mean over height and width: each strip adds its sum to a running sum; the walk's end divides it by the image's size."""

    saves_input = False

    def forward(self, ctx: NodeContext) -> Slot:
        operand = next(refs_in(ctx.node.argument("self")))
        strip = ctx.strip(operand)
        total = ctx.emitter.call(aten.sum.dim_IntList, strip, [2, 3], shape=strip.shape[:2])
        running = ctx.emitter.port("partial", ctx.node.name, strip.shape[:2], torch.float64)
        return ctx.emitter.add_into(running, total)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image, e = ctx.node.argument("self"), ctx.emitter
        operand = next(refs_in(image))
        _, channels, height, width = ctx.scope.shapes[operand]
        rows = ctx.read_of(operand).rows
        scaled = e.call(aten.div.Scalar, grad, height * width, shape=grad.shape)
        flat = e.call(
            aten.view.default,
            scaled,
            [grad.shape[0], channels, 1, 1],
            shape=(grad.shape[0], channels, 1, 1),
            view_of=scaled,
        )
        shape = (grad.shape[0], channels, len(rows), width)
        ctx.add_grad(image, e.call(aten.expand.default, flat, list(shape), shape=shape, view_of=flat), owned=False)


class WholeMean(Mean):
    """The same on a whole tensor: the operator itself."""

    def forward(self, ctx: NodeContext) -> Slot:
        shape = ctx.scope.shapes[ctx.node.name]
        strip = ctx.strip(next(refs_in(ctx.node.argument("self"))))
        return ctx.emitter.call(aten.mean.dim, strip, [2, 3], len(shape) == 4, shape=shape)


class ResultActivation(Rule):
    """``relu`` and ``leaky_relu``: differentiated from their result, so the operand can be overwritten."""

    saves_input = False
    saves_output = True
    in_place = True
    overwrites = True

    def _slope(self, ctx: NodeContext) -> float | None:
        return None if ctx.node.target == "aten.relu.default" else float(ctx.node.argument("negative_slope"))

    def forward(self, ctx: NodeContext) -> Slot:
        operand = next(refs_in(ctx.node.argument("self")))
        strip, slope, e = ctx.strip(operand), self._slope(ctx), ctx.emitter
        target = ctx.destination if ctx.destination is not None else ctx.overwrite
        if slope is None:
            if target is None:
                return e.call(aten.relu.default, strip, shape=ctx.out_shape)
            if target is ctx.overwrite:
                return e.call(aten.relu_.default, target, writes=target)
            return e.call(aten.clamp_min.out, strip, 0, writes=target, keywords={"out": target})
        if target is None:
            return e.call(aten.leaky_relu.default, strip, slope, shape=ctx.out_shape)
        return e.call(aten.leaky_relu.out, strip, slope, writes=target, keywords={"out": target})

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        value, first_row = ctx.values[ctx.node.name]
        result = ctx.emitter.narrow(value, 2, ctx.step.new.start - first_row, ctx.new_rows)
        slope, e, image = self._slope(ctx), ctx.emitter, ctx.node.argument("self")
        if slope is None:
            arguments: tuple[Any, ...] = (grad, result, 0)
            plain, into = aten.threshold_backward.default, aten.threshold_backward.grad_input
        else:
            arguments = (grad, result, slope, True)
            plain, into = aten.leaky_relu_backward.default, aten.leaky_relu_backward.grad_input
        if owned:
            ctx.add_grad(image, e.call(into, *arguments, writes=grad, keywords={"grad_input": grad}), owned=True)
        else:
            ctx.add_grad(image, e.call(plain, *arguments, shape=grad.shape), owned=True)


def _windows(ctx: NodeContext) -> tuple[Window, Window]:
    rows, columns = window_of(ctx.node, 0), window_of(ctx.node, 1)
    assert rows is not None and columns is not None
    return rows, columns


RULES: dict[str, Rule] = {
    "convolution": Convolution(),
    "max_pool": MaxPool(),
    "avg_pool": AvgPool(),
    "nearest": Nearest(),
    "binary": Binary(),
    "cat": Cat(),
    "frozen_norm": FrozenNorm(),
    "mean": Mean(),
}
