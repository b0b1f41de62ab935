"""Operators that join branches on a strip: elementwise arithmetic, concatenation, spatial side inputs; also casts and ``detach``.

A spatial side input is a global tensor that varies along the image (position embeddings, coordinate grids). Each strip reads the matching
slice as a view; its gradient is summed over broadcast dimensions and added to the same slice of the tensor's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sft.analysis.ir.graph import refs_in
from sft.common.errors import InternalError
from sft.common.interval import Interval
from sft.lower.concat import cat_slices, cat_slices_into
from sft.lower.context import NodeContext, accumulation_dtype
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["BinaryRule", "CastRule", "CatRule", "DetachRule", "SpatialSideInputRule"]

aten = torch.ops.aten


class BinaryRule(Rule):
    """``add``, ``sub``, ``mul``, ``div`` of two strips, of a strip and a tensor without spatial axes, or of a strip and a number."""

    in_place = True

    def forward(self, ctx: NodeContext) -> Slot:
        node, builder = ctx.node, ctx.builder
        left, right = ctx.operand_slot(node.argument("self")), ctx.operand_slot(node.argument("other"))
        name = node.target.split(".")[1]
        alpha = {"alpha": node.argument("alpha")} if name in ("add", "sub") and node.argument("alpha") != 1 else {}
        function = getattr(aten, name)
        if ctx.destination is not None and isinstance(right, Slot):
            return builder.call(function.out, left, right, writes=ctx.destination, keywords={"out": ctx.destination, **alpha})
        return builder.call(function.Tensor, left, right, shape=ctx.out_shape, keywords=alpha)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        node, builder = ctx.node, ctx.builder
        left, right = node.argument("self"), node.argument("other")
        name = node.target.split(".")[1]
        alpha = node.argument("alpha", 1)
        if name in ("add", "sub"):
            factor = alpha if name == "add" else -alpha
            self._report(ctx, left, grad, owned=False)
            if ctx.needs_grad(right):
                scaled = grad if factor == 1 else builder.call(aten.mul.Tensor, grad, factor, shape=grad.shape)
                self._report(ctx, right, scaled, owned=factor != 1)
            return
        function = aten.mul.Tensor if name == "mul" else aten.div.Tensor
        if ctx.needs_grad(left):
            self._report(ctx, left, builder.call(function, grad, ctx.operand_slot(right), shape=grad.shape), owned=True)
        if ctx.needs_grad(right):
            if name == "mul":
                product = builder.call(aten.mul.Tensor, grad, ctx.operand_slot(left), shape=grad.shape)
            else:  # -grad * (left / right) / right: a square would overflow half precision
                divisor = ctx.operand_slot(right)
                product = builder.call(aten.div.Tensor, ctx.operand_slot(left), divisor, shape=grad.shape)
                for function, other in ((aten.div_.Tensor, divisor), (aten.mul_.Tensor, grad)):
                    builder.call(function, product, other, writes=product)
                builder.call(aten.neg_.default, product, writes=product)
            self._report(ctx, right, product, owned=True)

    def _report(self, ctx: NodeContext, value: Any, grad: Slot, *, owned: bool) -> None:
        """Sum the gradient over the dimensions along which the operand was broadcast, then report it."""
        if not ctx.needs_grad(value):
            return
        (name,) = refs_in(value)
        shape = ctx.strip(name).shape if name in ctx.scope.streamed else ctx.global_shape(name)
        reduced = _sum_to_shape(ctx, grad, shape)
        ctx.add_grad(value, reduced, owned=owned or reduced is not grad)


def _sum_to_shape(ctx: NodeContext, grad: Slot, shape: tuple[int, ...]) -> Slot:
    missing = len(grad.shape) - len(shape)
    dims = [d for d in range(len(grad.shape)) if d < missing or (shape[d - missing] == 1 and grad.shape[d] != 1)]
    if not dims:
        if missing:
            return ctx.builder.call(aten.view.default, grad, list(shape), shape=shape, view_of=grad)
        return grad
    kept_shape = tuple(1 if d in dims else extent for d, extent in enumerate(grad.shape))
    wide = accumulation_dtype(grad.dtype)
    keywords = {"dtype": wide} if wide != grad.dtype else {}
    total = ctx.builder.call(aten.sum.dim_IntList, grad, dims, True, shape=kept_shape, dtype=wide, keywords=keywords)
    if kept_shape == tuple(shape):
        return total
    return ctx.builder.call(aten.view.default, total, list(shape), shape=shape, view_of=total)


class CatRule(Rule):
    """``cat`` along a dimension of channels."""

    in_place = True

    @staticmethod
    def _dim(ctx: NodeContext) -> int:
        return int(ctx.node.argument("dim", 0)) % len(ctx.scope.shapes[ctx.node.name])

    def forward(self, ctx: NodeContext) -> Slot:
        builder, dim = ctx.builder, self._dim(ctx)
        operands = [ctx.buffer_slices(name) for name in refs_in(ctx.node.argument("tensors"))]
        slots, spans = tuple(slot for slot, _ in operands), tuple(slices for _, slices in operands)
        if any(spans):
            if ctx.destination is not None:
                return builder.call(cat_slices_into, ctx.destination, slots, spans, dim, writes=ctx.destination)
            return builder.call(cat_slices, slots, spans, dim, shape=ctx.out_shape)
        if ctx.destination is not None:
            return builder.call(aten.cat.out, slots, dim, writes=ctx.destination, keywords={"out": ctx.destination})
        return builder.call(aten.cat.default, slots, dim, shape=ctx.out_shape)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        first, dim = 0, self._dim(ctx)
        for ref in ctx.node.argument("tensors"):
            (name,) = refs_in(ref)
            count = ctx.scope.shapes[name][dim]
            if ctx.needs_grad(ref) and dim == 1:
                ctx.add_grad(ref, grad, owned=False, channels=Interval(first, first + count))
            elif ctx.needs_grad(ref):
                ctx.add_grad(ref, ctx.builder.narrow(grad, dim, first, count), owned=False)
            first += count


class SpatialSideInputRule(Rule):
    """Views of a spatial side input; the strip's position is bound at run time (the ``origin`` port)."""

    def forward(self, ctx: NodeContext) -> Slot:
        value, shape = ctx.global_slot(ctx.node.operands[0]), ctx.out_shape
        return ctx.builder.call(_narrow_to_strip, value, *self._position(ctx), shape, shape=shape, view_of=value)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, name = ctx.builder, ctx.node.operands[0]
        _, split, order, _ = self._position(ctx)
        wide = accumulation_dtype(grad.dtype)
        repeated = [dim for dim, source in enumerate(order) if split[source] == 1 and grad.shape[dim] != 1]
        if repeated:
            shape = [1 if dim in repeated else extent for dim, extent in enumerate(grad.shape)]
            keywords = {"dtype": wide} if wide != grad.dtype else {}
            grad = builder.call(aten.sum.dim_IntList, grad, repeated, True, shape=shape, dtype=wide, keywords=keywords)
        target = ctx.global_grad(name)
        builder.call(_add_to_strip, target, grad, *self._position(ctx), writes=target)

    @staticmethod
    def _position(ctx: NodeContext) -> tuple[Slot, tuple[int, ...], tuple[int, ...], int]:
        node, order = ctx.node, ctx.node.argument("order")
        split = list(node.argument("split"))
        if ctx.is_per_sample(node.operands[0]):  # the samples of the sweep
            split[order[0]] = ctx.scope.batch
        return ctx.builder.port("origin", node.name, ()), tuple(split), order, ctx.scope.axes.count


def _strip_slice(
    value: Tensor, origin: Sequence[int], split: Sequence[int], order: Sequence[int], axes: int, shape: Sequence[int]
) -> Tensor:
    """The slice of a side input for a strip; dimensions of extent 1 stay."""
    image = value.view(tuple(split)).permute(tuple(order))
    for dim, start in zip((0, image.dim() - axes, image.dim() - axes + 1), origin[: 1 + min(axes, 2)], strict=False):
        if image.shape[dim] not in (1, shape[dim]):
            image = image.narrow(dim, start, shape[dim])
    return image


def _narrow_to_strip(
    value: Tensor, origin: Sequence[int], split: Sequence[int], order: Sequence[int], axes: int, shape: Sequence[int]
) -> Tensor:
    return _strip_slice(value, origin, split, order, axes, shape).expand(tuple(shape))


def _add_to_strip(target: Tensor, grad: Tensor, origin: Sequence[int], split: Sequence[int], order: Sequence[int], axes: int) -> None:
    _strip_slice(target, origin, split, order, axes, grad.shape).add_(grad)


class CastRule(Rule):
    """``x.to(dtype)``; the gradient is cast back.

    The gradient of a half-precision copy of a weight is accumulated over strips in fp32, and added to the fp32 weight's gradient unrounded.
    """

    in_place = True
    accepts_wide_grad = True

    def forward(self, ctx: NodeContext) -> Slot:
        operand = ctx.operand_slot(ctx.node.argument("self"))
        if ctx.destination is not None:
            return ctx.builder.copy(ctx.destination, operand)
        return ctx.builder.cast(operand, ctx.scope.dtype_of(ctx.node.name))

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image = ctx.node.argument("self")
        dtype = ctx.dtype_of(image)
        # Emitted also for equal types: a global gradient may have either of two types.
        back = ctx.builder.call(aten._to_copy.default, grad, shape=grad.shape, dtype=dtype, keywords={"dtype": dtype})
        ctx.add_grad(image, back, owned=True)


class DetachRule(Rule):
    """``x.detach()``: an alias of the operand without a gradient."""

    in_place = True

    def forward(self, ctx: NodeContext) -> Slot:
        operand = ctx.operand_slot(ctx.node.argument("self"))
        if ctx.destination is not None:
            return ctx.builder.copy(ctx.destination, operand)
        # A view, not an owner of the storage: readers must not overwrite it.
        return ctx.builder.call(aten.alias.default, operand, shape=operand.shape, view_of=operand)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        raise InternalError(f"{ctx.node.label}: a gradient arrives at a detached value")
