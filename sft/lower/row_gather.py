"""Gathers of rows along an axis: by runs of rows (reflect, replicate and circular padding), and the upload of index tables.

:class:`RowGather` stores a gather as a few runs of rows: ascending, descending, or one row repeated. An index tensor would do in one call,
but on a GPU its upload waits for all queued work and cannot be recorded in a CUDA graph, and its adjoint adds in no fixed order.

:func:`upload_table` copies a small host table (indices, weights) that a program computes while it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["RowGather", "RowRun", "keep_tables", "upload_table"]

#: Tables on the host that were copied to a device, in the context of :func:`keep_tables`.
_KEPT_TABLES: ContextVar[list[Tensor] | None] = ContextVar("_KEPT_TABLES", default=None)


@dataclass(frozen=True, slots=True)
class RowRun:
    """A run of rows: ``first, first + step, ...``.

    Attributes:
        first: the first row read.
        count: number of rows gathered.
        step: difference between consecutive rows: 1, -1, or 0 for one row repeated.
    """

    first: int
    count: int
    step: int

    @property
    def rows(self) -> tuple[int, int]:
        """The lowest row read, and the number of rows read."""
        if self.step == 0:
            return self.first, 1
        return (self.first if self.step > 0 else self.first - self.count + 1), self.count


@dataclass(frozen=True, slots=True)
class RowGather:
    """A gather of rows of a strip into another strip.

    Attributes:
        runs: the runs, in the order of the gathered rows.
    """

    runs: tuple[RowRun, ...]

    @classmethod
    def of(cls, index: Iterable[int]) -> RowGather:
        """The gather of the rows of an index.

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
        """Number of gathered rows."""
        return sum(run.count for run in self.runs)

    @property
    def scratch_rows(self) -> int:
        """Most temporary rows at once: a descending run is flipped into a copy, and the adjoint of a repeated row sums into one row."""
        return max((1 if run.step == 0 else run.count for run in self.runs if run.step != 1), default=0)

    def is_identity(self, count: int) -> bool:
        """True if it gathers ``count`` rows in their order."""
        return self.runs == (RowRun(0, count, 1),)

    def gather(self, value: Tensor, dim: int) -> Tensor:
        """The gathered rows, in the memory layout of ``value``."""
        out = _empty_rows_like(value, dim, self.length)
        start = 0
        for run in self.runs:
            rows = value.narrow(dim, *run.rows)
            out.narrow(dim, start, run.count).copy_(rows.flip(dim) if run.step < 0 else rows)
            start += run.count
        return out

    def adjoint(self, grad: Tensor, dim: int, length: int) -> Tensor:
        """The gradient of the ``length`` rows read, from that of the gathered rows."""
        out = _empty_rows_like(grad, dim, length).zero_()
        start = 0
        for run in self.runs:
            rows = grad.narrow(dim, start, run.count)
            if run.step <= 0:
                rows = rows.sum(dim, keepdim=True) if run.step == 0 else rows.flip(dim)
            out.narrow(dim, *run.rows).add_(rows)
            start += run.count
        return out


def _empty_rows_like(value: Tensor, dim: int, length: int) -> Tensor:
    """An uninitialised tensor of ``length`` rows in the memory layout of ``value``."""
    if value.dim() > 3 and value.shape[1] > 1 and value.stride(1) == 1:
        shape = (*value.shape[:dim], length, *value.shape[dim + 1 :])
        return torch.empty((shape[0], *shape[2:], shape[1]), dtype=value.dtype, device=value.device).movedim(-1, 1)
    return value.new_empty((*value.shape[:dim], length, *value.shape[dim + 1 :]))


def upload_table(table: npt.NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of ``table`` on ``device``, as ``dtype`` if given.

    The copy is asynchronous. A copy from pageable memory would block the host at every strip until the GPU has finished all queued work.
    """
    is_pinned = device.type == "cuda" and _can_pin_memory()
    host = torch.from_numpy(np.ascontiguousarray(table)).to(dtype)
    host = host.pin_memory() if is_pinned else host
    kept = _KEPT_TABLES.get()
    if kept is not None:
        kept.append(host)
    return host.to(device, non_blocking=is_pinned)


@contextmanager
def keep_tables(tables: list[Tensor]) -> Iterator[None]:
    """Context that appends every table on the host that is copied in it.

    A CUDA graph copies from the memory of the recording again in each replay: its tables must live as long as the graph.
    """
    token = _KEPT_TABLES.set(tables)
    try:
        yield
    finally:
        _KEPT_TABLES.reset(token)


@functools.cache
def _can_pin_memory() -> bool:
    """True if page-locked memory is available: not without a GPU (where programs for a GPU may be traced), nor in every sandbox."""
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return False
    return True
