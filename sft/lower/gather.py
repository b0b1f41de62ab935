"""Rows of a strip put together from its others, as paddings by the image itself are.

An index would say it in one call. On a GPU its upload waits for everything before it, and cannot be recorded in a CUDA graph; and the
adjoint adds in any order. What paddings gather are a few runs of rows: in order, backwards, or one row again and again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RowGather", "RowRun"]


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows that are next to each other.

    Attributes:
        first: the first row read.
        count: rows made.
        step: from a row read to the next: 1, -1, or 0.
    """

    first: int
    count: int
    step: int

    @property
    def rows(self) -> tuple[int, int]:
        """The lowest row read, and how many there are."""
        if self.step == 0:
            return self.first, 1
        return (self.first if self.step > 0 else self.first - self.count + 1), self.count


@dataclass(frozen=True, slots=True)
class RowGather:
    """Which rows of a strip make another.

    Attributes:
        runs: in the order of the rows made.
    """

    runs: tuple[RowRun, ...]

    @classmethod
    def of(cls, index: Iterable[int]) -> RowGather:
        """The runs of an index.

        >>> [(run.first, run.count, run.step) for run in RowGather.of([2, 1, 0, 1, 2, 3, 3, 3]).runs]
        [(2, 3, -1), (1, 3, 1), (3, 2, 0)]
        """
        runs: list[RowRun] = []
        for row in index:
            if runs:
                first, count, step = runs[-1].first, runs[-1].count, runs[-1].step
                if count == 1 and abs(row - first) <= 1:
                    runs[-1] = RowRun(first, 2, row - first)
                    continue
                if count > 1 and row == first + step * count:
                    runs[-1] = RowRun(first, count + 1, step)
                    continue
            runs.append(RowRun(row, 1, 1))
        return cls(tuple(runs))

    @property
    def length(self) -> int:
        """Rows made."""
        return sum(run.count for run in self.runs)

    @property
    def scratch_rows(self) -> int:
        """Most rows that stand beside what is read and made: a run backwards is turned round first, and sums of a row are one."""
        return max((1 if run.step == 0 else run.count for run in self.runs if run.step != 1), default=0)

    def takes_all_of(self, count: int) -> bool:
        """Whether it makes just what it reads, of so many rows."""
        return self.runs == (RowRun(0, count, 1),)

    def made(self, value: Tensor, dim: int) -> Tensor:
        """The rows made, in the layout of those read."""
        out = _empty_rows_like(value, dim, self.length)
        start = 0
        for run in self.runs:
            part = value.narrow(dim, *run.rows)
            out.narrow(dim, start, run.count).copy_(part.flip(dim) if run.step < 0 else part)
            start += run.count
        return out

    def adjoint(self, grad: Tensor, dim: int, length: int) -> Tensor:
        """The gradient of ``length`` rows read, given that of the rows made."""
        out = _empty_rows_like(grad, dim, length).zero_()
        start = 0
        for run in self.runs:
            part = grad.narrow(dim, start, run.count)
            if run.step <= 0:
                part = part.sum(dim, keepdim=True) if run.step == 0 else part.flip(dim)
            out.narrow(dim, *run.rows).add_(part)
            start += run.count
        return out


def _empty_rows_like(value: Tensor, dim: int, length: int) -> Tensor:
    """Room for so many rows, in the layout of a strip."""
    if value.dim() > 3 and value.shape[1] > 1 and value.stride(1) == 1:
        shape = (*value.shape[:dim], length, *value.shape[dim + 1 :])
        return torch.empty((shape[0], *shape[2:], shape[1]), dtype=value.dtype, device=value.device).movedim(-1, 1)
    return value.new_empty((*value.shape[:dim], length, *value.shape[dim + 1 :]))
