"""Reductions of the rows of a matrix with many rows and few columns: sums and moments of the channels of images channels last.

ATen reduces such a matrix with staging buffers and a second phase between blocks of threads. For the sums of 4 million elements in 128
columns it takes 34 microseconds and 32 MiB on an H200; larger ones take up to 144 MiB, whatever their size
(``benchmarks/results/2026-11-28-h200-gpu-row-sums.md``). Up to 512 rows are reduced without them. So rows are taken together to few wide
rows, the wide rows are reduced first, and then what is left of each column, in the same way: 10 microseconds and 0.1 MiB.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["row_moments", "row_moments_bytes", "sum_rows", "sum_rows_bytes"]

#: Most wide rows, which ATen reduces within a block of threads.
_MOST_WIDE_ROWS = 512
#: Least number of rows in a wide row, so that its columns occupy the device.
_LEAST_WIDTH = 128
#: Most rows that are reduced as they are.
_MOST_ROWS = 1024


@dataclass(frozen=True, slots=True)
class _WideRows:
    """Division of rows.

    Attributes:
        num_wide: number of wide rows.
        width: rows in each.
        num_left: rows that are left at the end.
    """

    num_wide: int
    width: int
    num_left: int

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, num_rows: int) -> _WideRows | None:
        """The division that leaves fewest rows, of the larger half of possible numbers; ``None`` to reduce the rows as they are."""
        most = min(_MOST_WIDE_ROWS, num_rows // _LEAST_WIDTH)
        if num_rows <= _MOST_ROWS or most < 2:
            return None
        num_wide = min(range(most, most // 2, -1), key=lambda number: num_rows % number)
        return cls(num_wide, num_rows // num_wide, num_rows % num_wide)


def sum_rows(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of the rows of a contiguous matrix, in a type that is no narrower than its own."""
    rows, columns = _WideRows.of(len(matrix)), matrix.shape[1]
    if rows is None:
        return matrix.sum(0, dtype=dtype)
    num_whole = rows.num_wide * rows.width
    partial = matrix[:num_whole].view(rows.num_wide, -1).sum(0, dtype=dtype).view(rows.width, columns)
    total = sum_rows(partial, dtype)
    return total + matrix[num_whole:].sum(0, dtype=dtype) if rows.num_left else total


def sum_rows_bytes(num_rows: int, num_columns: int, itemsize: int) -> int:
    """Most bytes that :func:`sum_rows` takes besides its result.

    Args:
        num_rows, num_columns: shape of the matrix.
        itemsize: bytes of an element of the sums.
    """
    rows = _WideRows.of(num_rows)
    if rows is None:
        return 0
    partial_bytes, vector_bytes = rows.width * num_columns * itemsize, num_columns * itemsize
    return partial_bytes + vector_bytes + max(vector_bytes, sum_rows_bytes(rows.width, num_columns, itemsize))


def row_moments(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Variance, divided by the number of rows, and mean of each column of a contiguous matrix.

    Moments of the parts of a column are merged with the update of Chan, Golub and LeVeque (1983).
    """
    rows, columns = _WideRows.of(len(matrix)), matrix.shape[1]
    if rows is None:
        variance, mean = torch.var_mean(matrix, 0, correction=0)
        return variance, mean
    num_whole = rows.num_wide * rows.width
    variances, means = torch.var_mean(matrix[:num_whole].view(rows.num_wide, -1), 0, correction=0)
    spread, mean = row_moments(means.view(rows.width, columns))
    variance = sum_rows(variances.view(rows.width, columns), variances.dtype) / rows.width + spread
    if rows.num_left:
        share = rows.num_left / len(matrix)
        rest_variance, rest_mean = torch.var_mean(matrix[num_whole:], 0, correction=0)
        delta = rest_mean - mean
        mean = mean + share * delta
        variance = (1 - share) * variance + share * (rest_variance + (1 - share) * delta.square())
    return variance, mean


def row_moments_bytes(num_rows: int, num_columns: int, itemsize: int) -> int:
    """Most bytes that :func:`row_moments` takes besides its results; arguments as of :func:`sum_rows_bytes`."""
    rows = _WideRows.of(num_rows)
    if rows is None:
        return 0
    partial_bytes, vector_bytes = rows.width * num_columns * itemsize, num_columns * itemsize
    inner_bytes = max(row_moments_bytes(rows.width, num_columns, itemsize), sum_rows_bytes(rows.width, num_columns, itemsize))
    return 2 * partial_bytes + inner_bytes + 8 * vector_bytes
