"""Rows of a strip put together from its others, as paddings by the image itself are.

An index would say it in one call. On a GPU its upload waits for everything before it, and cannot be recorded in a CUDA graph; and the
adjoint adds in any order. What paddings gather are a few runs of rows: in order, backwards, or one row again and again.

Small tables that a program computes on the host when it runs: indices and weights of the rows that a strip reads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["RowGather", "RowRun", "upload_table"]


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


def upload_table(table: npt.NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of ``table`` on ``device``, as ``dtype`` if one is given.

    The host does not wait for it: a copy from pageable memory would hold it until all that a GPU has queued is done, at every strip.
    """
    host = torch.from_numpy(np.ascontiguousarray(table)).to(dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and _can_pin_memory() else host.to(device)


@functools.cache
def _can_pin_memory() -> bool:
    """Whether there is page-locked memory: not without a GPU, where programs are traced for one, and not in every sandbox."""
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return False
    return True
