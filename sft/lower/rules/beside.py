"""The part of a whole value that lies beside a strip: a view, whose gradient is added where it lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sft.lower.context import NodeContext, accumulation_dtype
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["SpatialSideInputRule"]

aten = torch.ops.aten


class SpatialSideInputRule(Rule):
    """Where the strip lies is bound when the program runs (the ``origin`` port)."""

    saves_input = False

    def forward(self, ctx: NodeContext) -> Slot:
        value, shape = ctx.whole(ctx.node.operands[0]), ctx.out_shape
        return ctx.emitter.call(_narrow_to_strip, value, *self._place(ctx), shape, shape=shape, view_of=value)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        e, name = ctx.emitter, ctx.node.operands[0]
        _, split, order, _ = self._place(ctx)
        wide = accumulation_dtype(grad.dtype)
        repeated = [dim for dim, place in enumerate(order) if split[place] == 1 and grad.shape[dim] != 1]
        if repeated:
            shape = [1 if dim in repeated else extent for dim, extent in enumerate(grad.shape)]
            keywords = {"dtype": wide} if wide != grad.dtype else {}
            grad = e.call(aten.sum.dim_IntList, grad, repeated, True, shape=shape, dtype=wide, keywords=keywords)
        target = ctx.side_gradient(name)
        e.call(_add_to_strip, target, grad, *self._place(ctx), writes=target)

    @staticmethod
    def _place(ctx: NodeContext) -> tuple[Slot, tuple[int, ...], tuple[int, ...], int]:
        node, order = ctx.node, ctx.node.argument("order")
        split = list(node.argument("split"))
        if ctx.is_per_sample(node.operands[0]):  # the walk's own samples
            split[order[0]] = ctx.scope.batch
        return ctx.emitter.port("origin", node.name, ()), tuple(split), order, ctx.scope.axes.count


def _strip_part(
    value: Tensor, origin: Sequence[int], split: Sequence[int], order: Sequence[int], axes: int, shape: Sequence[int]
) -> Tensor:
    """The strip's part of a value, one entry where the value has one."""
    image = value.view(tuple(split)).permute(tuple(order))
    for dim, start in zip((0, image.dim() - axes, image.dim() - axes + 1), origin[: 1 + min(axes, 2)], strict=False):
        if image.shape[dim] not in (1, shape[dim]):
            image = image.narrow(dim, start, shape[dim])
    return image


def _narrow_to_strip(
    value: Tensor, origin: Sequence[int], split: Sequence[int], order: Sequence[int], axes: int, shape: Sequence[int]
) -> Tensor:
    return _strip_part(value, origin, split, order, axes, shape).expand(tuple(shape))


def _add_to_strip(target: Tensor, grad: Tensor, origin: Sequence[int], split: Sequence[int], order: Sequence[int], axes: int) -> None:
    _strip_part(target, origin, split, order, axes, grad.shape).add_(grad)
