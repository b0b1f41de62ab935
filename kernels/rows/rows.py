"""Rows from buffer to buffer: the carried rows and a strip's new rows put together, and the adjoint, in one launch.

Buffers are channels-last views with any strides along samples, rows and columns. At a batch of more than one a slice of rows is not
contiguous, and a general concatenation allocates, and copies both parts each on its own; here one kernel moves two slices
to where they belong, or adds them there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sft.common.errors import InputError
from sft.kernels.common import empty_channels_last, uses_triton
from sft.kernels.geometry import is_channels_last, raise_problems

__all__ = ["RowMove", "join_rows", "move_rows", "split_rows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowMove:
    """Rows ``source`` to ``target``, both ``[N, C, rows, columns]``, channels-last, of one dtype."""

    source: Tensor
    target: Tensor
    #: to what is there, in fp32 for half precisions
    add: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.source.shape != self.target.shape or self.source.dtype != self.target.dtype:
            ours, theirs = ((tuple(t.shape), t.dtype) for t in (self.source, self.target))
            problems.append(f"the source is {ours}, the target {theirs}; give both alike")
        problems += [
            f"{name} has strides {t.stride()}; make it channels-last: .contiguous(memory_format=torch.channels_last)"
            for name, t in (("the source", self.source), ("the target", self.target))
            if not is_channels_last(t)
        ]
        if not problems and _overlap(self.source, self.target):
            problems.append("source and target share memory; move the rows by way of another buffer")
        raise_problems("these rows cannot be moved", problems)


def move_rows(first: RowMove, second: RowMove | None = None) -> None:
    """Carry out one move, or two at once: neither may read or write what the other writes.

    Raises:
        InputError: the moves are of different samples, channels, columns or dtypes.

    >>> buffer = torch.arange(6.0).view(1, 1, 6, 1)
    >>> move_rows(RowMove(source=buffer[:, :, 4:], target=buffer[:, :, :2]))
    >>> buffer.flatten().tolist()
    [4.0, 5.0, 2.0, 3.0, 4.0, 5.0]
    """
    moves = [first] if second is None else [first, second]
    alike = {(m.source.shape[0], m.source.shape[1], m.source.shape[3], m.source.dtype, m.source.device) for m in moves}
    if len(alike) > 1:
        raise InputError(f"two moves differ in samples, channels, columns or dtype: {sorted(map(str, alike))}; call move_rows for each")
    if second is not None:
        clashes = [(first.target, second.source), (first.source, second.target), (first.target, second.target)]
        if any(_overlap(ours, theirs) for ours, theirs in clashes):
            raise InputError("one move writes what the other reads or writes; call move_rows for each, in order")
    moves = [move for move in moves if move.source.numel()]
    if not moves:
        return
    if uses_triton(moves[0].source):
        from sft.kernels.rows.rows_triton import launch_move_rows  # not above: it imports Triton

        launch_move_rows([(move.source, move.target, move.add) for move in moves])
        return
    for move in moves:
        if move.add:
            move.target.add_(move.source)
        else:
            move.target.copy_(move.source)


def join_rows(kept: Tensor, new: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``kept`` above ``new``, both ``[N, C, rows, columns]``, channels-last. Differentiable once if ``out`` is None.

    >>> join_rows(torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 2, 2)).flatten().tolist()
    [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    """
    if out is not None:
        return _join(kept, new, out)
    result: Tensor = _JoinRows.apply(kept, new)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return result


def split_rows(gradient: Tensor, kept: Tensor, new: Tensor, *, add: tuple[bool, bool] = (True, True)) -> None:
    """The adjoint of ``join_rows``: add the rows of ``gradient`` to ``kept`` and ``new``, or write them there.

    Args:
        add: for each target, whether what it holds is kept.
    """
    top = _rows_above(gradient, kept, new)
    above = RowMove(source=gradient[:, :, :top], target=kept, add=add[0])
    move_rows(above, RowMove(source=gradient[:, :, top:], target=new, add=add[1]))


class _JoinRows(torch.autograd.Function):
    """Saves nothing: the gradients are views."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, new: Tensor) -> Tensor:
        ctx.top = kept.shape[2]
        shape = (*kept.shape[:2], kept.shape[2] + new.shape[2], kept.shape[3])
        return _join(kept, new, empty_channels_last(kept, shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0][:, :, : ctx.top], gradients[0][:, :, ctx.top :]


def _join(kept: Tensor, new: Tensor, out: Tensor) -> Tensor:
    top = _rows_above(out, kept, new)
    move_rows(RowMove(source=kept, target=out[:, :, :top]), RowMove(source=new, target=out[:, :, top:]))
    return out


def _rows_above(whole: Tensor, kept: Tensor, new: Tensor) -> int:
    if kept.dim() != 4 or new.dim() != 4 or whole.dim() != 4 or kept.shape[2] + new.shape[2] != whole.shape[2]:
        shapes = tuple(kept.shape), tuple(new.shape), tuple(whole.shape)
        raise InputError(f"rows of {shapes[0]} and {shapes[1]} do not make {shapes[2]}; give parts whose rows add up")
    return kept.shape[2]


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views may have an element in common; exact for rows of one buffer."""
    if not a.numel() or not b.numel() or a.device != b.device or a.device.type == "meta":
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    offset, row = int(b.storage_offset() - a.storage_offset()), a.stride(2)
    beside = a.shape[0] == 1 or abs(offset) < a.stride(0)
    if a.stride() == b.stride() and a.shape[3] == b.shape[3] and row > 0 and offset % row == 0 and beside:
        return -b.shape[2] < offset // row < a.shape[2]
    ends = [sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) for t in (a, b)]
    return -ends[1] <= offset <= ends[0]
