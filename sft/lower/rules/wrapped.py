"""Rows of the opposite border on a strip: collected in one walk, put above and below the image in the next.

Which of them a strip holds, or wants, depends on where it lies; that is bound when the program runs (the ``origin`` port).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from sft.analysis.axes import ROWS
from sft.analysis.graph import refs_in
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.rules.base import ReductionRule
from sft.lower.rules.borders import PadRule

__all__ = ["BorderRowsRule", "CircularPadRule"]

_RowSpans: TypeAlias = tuple[tuple[int, int, int], ...]
"""Rows of the image, from one to before another, and the row of the border that the first of them is."""


def _border_heights(ctx: NodeContext) -> tuple[int, int, int]:
    """Rows above the image, of the image, and below it."""
    node = ctx.node
    return node.argument("low"), ctx.scope.extent(next(refs_in(node.argument("self"))), ROWS), node.argument("high")


class BorderRowsRule(ReductionRule):
    """The image's last ``low`` and first ``high`` rows: each strip writes down those that it holds."""

    saves_input = False

    def forward(self, ctx: NodeContext) -> Slot:
        e, strip = ctx.emitter, ctx.strip(next(refs_in(ctx.node.argument("self"))))
        running = e.port("partial", ctx.node.name, ctx.side_shape(ctx.node.name), torch.float64)
        return e.call(_save_border_rows, running, strip, *self._place(ctx), writes=running)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        e, image = ctx.emitter, ctx.node.argument("self")
        out = e.zeros(ctx.strip(next(refs_in(image))).shape, grad.dtype)
        ctx.add_grad(image, e.call(_add_border_grads, out, grad, *self._place(ctx), writes=out), owned=True)

    @staticmethod
    def _place(ctx: NodeContext) -> tuple[Slot, _RowSpans, int]:
        low, rows, high = _border_heights(ctx)
        return ctx.emitter.port("origin", ctx.node.name, ()), ((rows - low, rows, 0), (0, high, low)), ctx.scope.axes.count


class CircularPadRule(PadRule):
    """The image with the border rows above and below it."""

    def forward(self, ctx: NodeContext) -> Slot:
        out = super().forward(ctx)
        if not any(ctx.saved["paddings"][ROWS]):
            return out
        border = ctx.operand_slot(ctx.node.argument("border"))
        return ctx.emitter.call(_emit_border_rows, out, border, *self._place(ctx), writes=out)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        border = ctx.node.argument("border")
        if any(ctx.saved["paddings"][ROWS]) and ctx.needs_grad(border):
            total = ctx.emitter.zeros(ctx.operand_slot(border).shape, grad.dtype)
            ctx.add_grad(border, ctx.emitter.call(_collect_border_grads, total, grad, *self._place(ctx), writes=total), owned=True)
        super().backward(ctx, grad, owned)

    @staticmethod
    def _place(ctx: NodeContext) -> tuple[Slot, _RowSpans, int]:
        low, rows, high = _border_heights(ctx)
        return ctx.emitter.port("origin", ctx.node.name, ()), ((0, low, 0), (low + rows, low + rows + high, low)), ctx.scope.axes.count


def _common_rows(border: Tensor, strip: Tensor, origin: Sequence[int], spans: _RowSpans, axes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of the border that a strip has, and the strip's, as views."""
    _, first, column = origin
    dim = strip.dim() - axes
    if axes > 1:
        border = border.narrow(dim + 1, column, strip.shape[dim + 1])
    for begin, end, place in spans:
        start, stop = max(begin, first), min(end, first + strip.shape[dim])
        if start < stop:
            count = stop - start
            yield border.narrow(dim, place + start - begin, count), strip.narrow(dim, start - first, count)


def _save_border_rows(border: Tensor, strip: Tensor, origin: Sequence[int], spans: _RowSpans, axes: int) -> None:
    for theirs, ours in _common_rows(border, strip, origin, spans, axes):
        theirs.copy_(ours)


def _emit_border_rows(strip: Tensor, border: Tensor, origin: Sequence[int], spans: _RowSpans, axes: int) -> None:
    for theirs, ours in _common_rows(border, strip, origin, spans, axes):
        ours.copy_(theirs)


def _add_border_grads(strip: Tensor, border: Tensor, origin: Sequence[int], spans: _RowSpans, axes: int) -> None:
    for theirs, ours in _common_rows(border, strip, origin, spans, axes):
        ours.add_(theirs)


def _collect_border_grads(border: Tensor, strip: Tensor, origin: Sequence[int], spans: _RowSpans, axes: int) -> None:
    for theirs, ours in _common_rows(border, strip, origin, spans, axes):
        theirs.add_(ours)
