"""Padding of a strip.

Constant, reflect and replicate padding are local: a strip computes its rows from its own input rows. Circular padding of rows is not: the
rows above the image are the last rows of the image. It takes two sweeps: the first collects these rows (``BorderRowsRule``), the second
inserts them (``CircularPadRule``). The rows that a strip collects or inserts depend on its position, which is bound when the program runs
(the ``origin`` port).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.graph import refs_in
from sft.analysis.ir.ops.padding import PadSpec
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.row_gather import RowGather
from sft.lower.rules.base import ReductionRule, Rule

__all__ = ["BorderRowsRule", "CircularPadRule", "PadRule"]

aten = torch.ops.aten


class PadRule(Rule):
    """``pad``: along each axis, rows of a constant are added to those read, or the rows read are gathered."""

    def forward(self, ctx: NodeContext) -> Slot:
        node, (operand,) = ctx.node, refs_in(ctx.node.argument("self"))
        row = ctx.scope.specs[node.name]
        assert isinstance(row, PadSpec)
        if row.mode(node) == "constant":
            return self._constant(ctx, row, operand)
        value = ctx.strip(operand)
        ctx.saved["gathered"] = []
        for axis, (start, length, first, count) in enumerate(_row_spans(ctx, operand)):
            extent, (low, _) = ctx.scope.extent(operand, axis), row.amounts(node, axis)
            gather = RowGather.of(_source_row(at - low, extent, row.mode(node)) - first for at in range(start, start + length))
            if not gather.is_identity(count):
                dim = ctx.scope.axes.dim(len(value.shape), axis)
                assert dim is not None
                ctx.saved["gathered"].append((dim, gather, value.shape))
                shape = (*value.shape[:dim], length, *value.shape[dim + 1 :])
                scratch_bytes = gather.scratch_rows * (value.num_bytes // value.shape[dim])
                value = ctx.builder.call(gather.gather, value, dim, shape=shape, scratch_bytes=scratch_bytes)
        return value if ctx.saved["gathered"] else ctx.builder.call(aten.clone.default, value, shape=value.shape)

    def _constant(self, ctx: NodeContext, row: PadSpec, operand: str) -> Slot:
        """The rows read, padded with the constant outside the image."""
        paddings, crops = [], []
        for axis, (start, length, first, count) in enumerate(_row_spans(ctx, operand)):
            low, _ = row.amounts(ctx.node, axis)
            before = max(0, min(length, first + low - start)) if count else length
            inside = min(length - before, first + count + low - start - before) if count else 0
            paddings.append((before, length - before - inside))
            crops.append((start + before - low - first, inside))
        ctx.saved.update(paddings=paddings, crops=crops, shape=ctx.strip(operand).shape)
        builder, fill = ctx.builder, ctx.node.argument("value") or 0.0
        if any(inside == 0 for _, inside in crops):
            out = builder.empty(ctx.out_shape, ctx.scope.dtype_of(ctx.node.name))
            return builder.call(aten.fill_.Scalar, out, fill, writes=out)
        value = ctx.strip(operand)
        for axis, (start, length) in enumerate(crops):
            value = ctx.narrow(value, axis, start, length)
        flat = [size for pair in reversed(paddings) for size in pair]
        return builder.call(aten.constant_pad_nd.default, value, flat, fill, shape=ctx.out_shape)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, image = ctx.builder, ctx.node.argument("self")
        (operand,) = refs_in(image)
        if ctx.has_empty_read(operand):
            return
        if "gathered" in ctx.saved:
            for dim, gather, shape in reversed(ctx.saved["gathered"]):
                scratch_bytes = gather.scratch_rows * (grad.num_bytes // grad.shape[dim])
                grad = builder.call(gather.adjoint, grad, dim, shape[dim], shape=shape, dtype=grad.dtype, scratch_bytes=scratch_bytes)
            ctx.add_grad(image, grad, owned=bool(ctx.saved["gathered"]) or owned)
            return
        paddings, crops = ctx.saved["paddings"], ctx.saved["crops"]
        if any(inside == 0 for _, inside in crops):
            return
        for axis, ((before, _), (_, inside)) in enumerate(zip(paddings, crops, strict=True)):
            grad = ctx.narrow(grad, axis, before, inside)
        lead = ctx.saved["shape"][: -len(crops)]
        shape = ctx.saved["shape"]
        if tuple(grad.shape) == tuple(shape):
            ctx.add_grad(image, grad, owned=False)
            return
        total = builder.zeros(shape, grad.dtype)
        cropped = total
        for axis, (start, length) in enumerate(crops):
            cropped = ctx.narrow(cropped, axis, start, length)
        assert cropped.shape[: len(lead)] == tuple(lead)
        builder.copy(cropped, grad)
        ctx.add_grad(image, total, owned=True)


def _source_row(at: int, extent: int, mode: str) -> int:
    """The image row that padding puts at row ``at``, which may be outside the image."""
    if mode == "replicate":
        return min(max(at, 0), extent - 1)
    if mode == "circular":
        return at % extent
    return abs(at) if at < extent else 2 * (extent - 1) - at


def _row_spans(ctx: NodeContext, operand: str) -> list[tuple[int, int, int, int]]:
    """For each axis: first row and number of rows computed, first row and number of rows read."""
    return [(new.start, len(new), rows.start, len(rows)) for new, rows in ctx.spans(operand)]


_RowSpans: TypeAlias = tuple[tuple[int, int, int], ...]
"""Intervals of image rows, each as start, stop, and the index of the first among the border rows."""


class BorderRowsRule(ReductionRule):
    """The image's last ``low`` and first ``high`` rows: each strip copies those that it holds into the accumulator."""

    def forward(self, ctx: NodeContext) -> Slot:
        builder, strip = ctx.builder, ctx.strip(next(refs_in(ctx.node.argument("self"))))
        running = builder.port("partial", ctx.node.name, ctx.global_shape(ctx.node.name), torch.float64)
        return builder.call(_save_border_rows, running, strip, *self._position(ctx), writes=running)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, image = ctx.builder, ctx.node.argument("self")
        out = builder.zeros(ctx.strip(next(refs_in(image))).shape, grad.dtype)
        ctx.add_grad(image, builder.call(_add_border_grads, out, grad, *self._position(ctx), writes=out), owned=True)

    @staticmethod
    def _position(ctx: NodeContext) -> tuple[Slot, _RowSpans, int]:
        low, rows, high = _border_heights(ctx)
        return ctx.builder.port("origin", ctx.node.name, ()), ((rows - low, rows, 0), (0, high, low)), ctx.scope.axes.count


class CircularPadRule(PadRule):
    """The image with the rows of :class:`BorderRowsRule` above and below it."""

    def forward(self, ctx: NodeContext) -> Slot:
        out = super().forward(ctx)
        if not any(ctx.saved["paddings"][ROWS]):
            return out
        border = ctx.operand_slot(ctx.node.argument("border"))
        return ctx.builder.call(_insert_border_rows, out, border, *self._position(ctx), writes=out)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        border = ctx.node.argument("border")
        if any(ctx.saved["paddings"][ROWS]) and ctx.needs_grad(border):
            total = ctx.builder.zeros(ctx.operand_slot(border).shape, grad.dtype)
            ctx.add_grad(border, ctx.builder.call(_collect_border_grads, total, grad, *self._position(ctx), writes=total), owned=True)
        super().backward(ctx, grad, owned)

    @staticmethod
    def _position(ctx: NodeContext) -> tuple[Slot, _RowSpans, int]:
        low, rows, high = _border_heights(ctx)
        return ctx.builder.port("origin", ctx.node.name, ()), ((0, low, 0), (low + rows, low + rows + high, low)), ctx.scope.axes.count


def _border_heights(ctx: NodeContext) -> tuple[int, int, int]:
    """Number of rows above the image, in the image, and below it."""
    node = ctx.node
    return node.argument("low"), ctx.scope.extent(next(refs_in(node.argument("self"))), ROWS), node.argument("high")


def _common_rows(border: Tensor, strip: Tensor, origin: Sequence[int], spans: _RowSpans, axes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the border rows that a strip contains, paired with the strip's views."""
    _, first, column = origin
    dim = strip.dim() - axes
    if axes > 1:
        border = border.narrow(dim + 1, column, strip.shape[dim + 1])
    for begin, end, border_row in spans:
        start, stop = max(begin, first), min(end, first + strip.shape[dim])
        if start < stop:
            count = stop - start
            yield border.narrow(dim, border_row + start - begin, count), strip.narrow(dim, start - first, count)


def _save_border_rows(border: Tensor, strip: Tensor, origin: Sequence[int], spans: _RowSpans, axes: int) -> None:
    for border_rows, strip_rows in _common_rows(border, strip, origin, spans, axes):
        border_rows.copy_(strip_rows)


def _insert_border_rows(strip: Tensor, border: Tensor, origin: Sequence[int], spans: _RowSpans, axes: int) -> None:
    for border_rows, strip_rows in _common_rows(border, strip, origin, spans, axes):
        strip_rows.copy_(border_rows)


def _add_border_grads(strip: Tensor, border: Tensor, origin: Sequence[int], spans: _RowSpans, axes: int) -> None:
    for border_rows, strip_rows in _common_rows(border, strip, origin, spans, axes):
        strip_rows.add_(border_rows)


def _collect_border_grads(border: Tensor, strip: Tensor, origin: Sequence[int], spans: _RowSpans, axes: int) -> None:
    for border_rows, strip_rows in _common_rows(border, strip, origin, spans, axes):
        border_rows.add_(strip_rows)
