"""Slices of a tensor along one dimension: ``x[:, 1:]``, ``x[0]``, ``chunk``, ``split`` and ``unbind``.

Autograd's derivative of a slice is a tensor of zeros as large as the operand, with the gradient in the slice. Queries, keys and values
that are slices of one product would be three such tensors and two sums. Here a slice reports its own gradient and its place, and the
gradient of the operand is concatenated from all (:func:`sft.lower.concat.sum_slices`).
"""

from __future__ import annotations

import torch

from sft.lower.concat import DimSlice
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.rules.traced import TracedWholeRule

__all__ = ["DIM_SLICES", "DimSliceRule"]

aten = torch.ops.aten

_SELECT = "aten.select.int"
#: The operators.
DIM_SLICES = frozenset({_SELECT, "aten.slice.Tensor"})


class DimSliceRule(TracedWholeRule):
    """A slice of full tensors, or of the channels of a strip; a slice with a step is differentiated by autograd."""

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        operand = ctx.node.argument("self")
        value = ctx.operand_slot(operand)
        span = _span(ctx, value)
        if span is None:
            super().backward(ctx, grad, owned)
        elif ctx.needs_grad(operand):
            if ctx.node.target == _SELECT:
                shape = (*grad.shape[: span.dim], 1, *grad.shape[span.dim :])
                grad = ctx.builder.call(aten.unsqueeze.default, grad, span.dim, shape=shape, view_of=grad)
            ctx.add_grad(operand, grad, owned=owned, span=None if span.length == value.shape[span.dim] else span)


def _span(ctx: NodeContext, value: Slot) -> DimSlice | None:
    """The slice that a node takes; ``None`` for one with a step."""
    node = ctx.node
    dim = node.argument("dim", 0) % len(value.shape)
    extent = value.shape[dim]
    if node.target == _SELECT:
        return DimSlice(dim, node.argument("index") % extent, 1)
    start, stop, step = slice(node.argument("start", None), node.argument("end", None), node.argument("step", 1)).indices(extent)
    return DimSlice(dim, start, max(0, stop - start)) if step == 1 else None
