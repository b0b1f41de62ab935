"""Slices: of a tensor along one dimension (``x[:, 1:]``, ``x[0]``, ``chunk``, ``split``, ``unbind``), and of an image along an axis.

Autograd's derivative of a slice is a tensor of zeros as large as the operand, with the gradient in the slice. Queries, keys and values
that are slices of one product would be three such tensors and two sums. Here a slice reports its own gradient and its place, and the
gradient of the operand is concatenated from all (:func:`sft.lower.concat.sum_slices`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from sft.analysis.ir.graph import Node, refs_in
from sft.analysis.ir.ops.padding import SliceSpec
from sft.lower.concat import DimSlice
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.rules.base import Rule
from sft.lower.rules.traced import TracedWholeRule

__all__ = ["DIM_SLICES", "AssignSliceRule", "DimSliceRule", "SliceRule"]

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


class SliceRule(Rule):
    """A slice of a strip along one axis, with a step."""

    def forward(self, ctx: NodeContext) -> Slot:
        (operand,) = refs_in(ctx.node.argument("self"))
        view = self._slice(ctx, operand, ctx.strip(operand))
        return ctx.builder.call(aten.clone.default, view, shape=view.shape, dtype=view.dtype)

    def _slice(self, ctx: NodeContext, operand: str, slot: Slot) -> Slot:
        row = ctx.scope.specs[ctx.node.name]
        assert isinstance(row, SliceSpec)
        for axis, (new, rows) in enumerate(ctx.spans(operand)):
            begin, _, step = row.span(ctx.node, axis)
            length, at = len(new), begin + step * new.start - rows.start
            if step == 1:
                slot = ctx.narrow(slot, axis, at, length)
                continue
            dim = ctx.scope.axes.dim(len(slot.shape), axis)
            assert dim is not None
            shape = (*slot.shape[:dim], length, *slot.shape[dim + 1 :])
            arguments: tuple[Any, ...] = (dim, at, at + step * (length - 1) + 1, step)
            slot = ctx.builder.call(aten.slice.Tensor, slot, *arguments, shape=shape, view_of=slot, dtype=slot.dtype)
        return slot

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        image = ctx.node.argument("self")
        (operand,) = refs_in(image)
        strip, row, spans = ctx.strip(operand), ctx.scope.specs[ctx.node.name], []
        assert isinstance(row, SliceSpec)
        steps = [row.span(ctx.node, axis)[2] for axis in range(ctx.scope.axes.count)]
        for axis, (new, rows) in enumerate(ctx.spans(operand)):
            dim = ctx.scope.axes.dim(len(strip.shape), axis)
            if dim is not None and len(new) != strip.shape[dim]:
                spans.append(DimSlice(dim, row.span(ctx.node, axis)[0] + new.start - rows.start, len(new)))
        if set(steps) == {1} and len(spans) <= 1:  # without a tensor of zeros as large as the operand
            ctx.add_grad(image, grad, owned=owned, span=spans[0] if spans else None)
            return
        total = ctx.builder.zeros(strip.shape, grad.dtype)
        ctx.builder.copy(self._slice(ctx, operand, total), grad)
        ctx.add_grad(image, total, owned=True)


class AssignSliceRule(Rule):
    """Rows (columns, slices) of one image in another; the strip's position is bound when the program runs (the ``origin`` port)."""

    def forward(self, ctx: NodeContext) -> Slot:
        image, source = (ctx.strip(next(refs_in(ctx.node.argument(key)))) for key in ("self", "src"))
        if ctx.overwrite is not None:
            return ctx.builder.call(_copy_around_slice, ctx.overwrite, image, *self._span(ctx), writes=ctx.overwrite)
        return ctx.builder.call(_assign_slice, image, source, *self._span(ctx), shape=ctx.out_shape)

    def overwritten(self, node: Node, streamed: Collection[str], *, untiled: bool) -> str | None:
        """The padded source of a full image: its padding is free for the other image."""
        image, source = node.argument("self").name, node.argument("src").name
        return source if untiled and source in streamed and source != image else None

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, image, source = ctx.builder, ctx.node.argument("self"), ctx.node.argument("src")
        if ctx.needs_grad(source):  # the padding around the source takes the remaining rows, and has no gradient
            ctx.add_grad(source, grad, owned=False)
        if ctx.needs_grad(image):
            out = builder.call(_without_slice, grad, *self._span(ctx), shape=grad.shape, dtype=grad.dtype)
            ctx.add_grad(image, out, owned=True)

    @staticmethod
    def _span(ctx: NodeContext) -> tuple[Slot, int, int, int, int, int]:
        origin, node = ctx.builder.port("origin", ctx.node.name, ()), ctx.node
        axis, start, stop, step = map(node.argument, ("axis", "start", "stop", "step"))
        return origin, axis, start, stop, step, ctx.scope.axes.count


def _slice_in_strip(strip: Tensor, origin: Sequence[int], axis: int, start: int, stop: int, step: int, axes: int) -> tuple[int, range]:
    """The dimension of an axis, and the indices of a slice's rows inside a strip."""
    dim, first = strip.dim() - axes + axis, (*origin[1:], 0)[axis]
    low = start - first if start >= first else (start - first) % step
    return dim, range(low, max(low, min(stop - first, strip.shape[dim])), step)


def _rows_of(strip: Tensor, dim: int, rows: range) -> Tensor:
    view: Tensor = aten.slice.Tensor(strip, dim, rows.start, rows.stop, rows.step)
    return view


def _assign_slice(image: Tensor, source: Tensor, *span: Any) -> Tensor:
    dim, rows = _slice_in_strip(image, *span)
    out = image.clone()
    if rows:
        _rows_of(out, dim, rows).copy_(_rows_of(source, dim, rows))
    return out


def _copy_around_slice(target: Tensor, image: Tensor, *span: Any) -> Tensor:
    dim, rows = _slice_in_strip(image, *span)
    extent = image.shape[dim]
    between = [range(rows.start + phase, min(rows.stop, extent), rows.step) for phase in range(1, rows.step)]
    for others in (range(min(rows.start, extent)), *between, range(rows.stop, extent)):
        if others:
            _rows_of(target, dim, others).copy_(_rows_of(image, dim, others))
    return target


def _without_slice(grad: Tensor, *span: Any) -> Tensor:
    dim, rows = _slice_in_strip(grad, *span)
    out = grad.clone()
    if rows:
        _rows_of(out, dim, rows).zero_()
    return out
