"""Slices of many tensors in one instruction: their concatenation, and sums of gradients of slices.

In a dense block every layer reads the concatenation of the outputs of all previous layers (Huang et al. 2017). A view and an addition for
each slice would make the number of instructions quadratic in the depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sft.analysis.ir.axes import COLUMNS, ROWS, Axes
from sft.lower.program import Slot

__all__ = ["DimSlice", "add_slices", "cat_slices", "cat_slices_into", "dim_slices", "partition_dim", "sum_slices"]


class DimSlice(NamedTuple):
    """A range of indices of a tensor along a dimension."""

    dim: int
    start: int
    length: int


def dim_slices(axes: Axes, slot: Slot, first_row: int, num_rows: int, first_column: int, num_columns: int) -> tuple[DimSlice, ...]:
    """The slices of a slot for a block of rows and columns, counted from the slot's first; a full axis needs no slice."""
    shape = slot.shape
    rows, columns = axes.dim(len(shape), ROWS), axes.dim(len(shape), COLUMNS)
    slices: tuple[DimSlice, ...] = ()
    if rows is not None and (first_row or num_rows != shape[rows]):
        slices = (DimSlice(rows, first_row, num_rows),)
    if columns is not None and (first_column or num_columns != shape[columns]):
        slices += (DimSlice(columns, first_column, num_columns),)
    return slices


def cat_slices(tensors: Sequence[torch.Tensor], spans: Sequence[Sequence[DimSlice]], dim: int) -> torch.Tensor:
    """Concatenate a slice of each tensor.

    Args:
        tensors: the tensors.
        spans: the slices of each; dimensions without a slice are taken in full.
        dim: the dimension of the concatenation.
    """
    return torch.cat(_narrow_each(tensors, spans), dim)


def cat_slices_into(out: torch.Tensor, tensors: Sequence[torch.Tensor], spans: Sequence[Sequence[DimSlice]], dim: int) -> None:
    """Concatenate a slice of each tensor into ``out``."""
    torch.cat(_narrow_each(tensors, spans), dim, out=out)


def add_slices(
    total: torch.Tensor, targets: Sequence[Sequence[DimSlice]], tensors: Sequence[torch.Tensor], spans: Sequence[Sequence[DimSlice]]
) -> None:
    """Add a slice of each tensor to a slice of ``total``, in order.

    Args:
        total: the accumulator.
        targets: for each tensor, the slices of ``total`` to add to.
        tensors: the tensors.
        spans: the slices of each.
    """
    for target, tensor, span in zip(targets, tensors, spans, strict=True):
        _narrow(total, target).add_(_narrow(tensor, span))


def sum_slices(
    tensors: Sequence[torch.Tensor], spans: Sequence[DimSlice], shape: Sequence[int], order: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The sum of tensors, each in its slice, with zeros outside of all slices.

    Args:
        tensors: the tensors.
        spans: the slice of each.
        shape: shape of the sum.
        order: dimensions of the sum in the order of its memory, outermost first.
        dtype: element type of the sum.
    """
    dim = partition_dim(spans, shape)
    make = tensors[0].new_zeros if dim is None else tensors[0].new_empty
    out = make([shape[each] for each in order], dtype=dtype).permute([order.index(each) for each in range(len(order))])
    if dim is not None:
        pairs = sorted(zip(spans, tensors, strict=True), key=lambda pair: pair[0].start)
        return torch.cat([tensor for _, tensor in pairs], dim, out=out)
    for span, tensor in zip(spans, tensors, strict=True):
        out.narrow(*span).add_(tensor)
    return out


def partition_dim(spans: Sequence[DimSlice], shape: Sequence[int]) -> int | None:
    """The dimension that adjacent slices cover without overlap; ``None`` if they do not.

    >>> partition_dim((DimSlice(1, 2, 3), DimSlice(1, 0, 2)), (4, 5))
    1
    >>> partition_dim((DimSlice(1, 2, 3), DimSlice(1, 0, 1)), (4, 5)) is None
    True
    """
    dim, stop = spans[0].dim, 0
    for span in sorted(spans, key=lambda span: span.start):
        if span.dim != dim or span.start != stop:
            return None
        stop += span.length
    return dim if stop == shape[dim] else None


def _narrow_each(tensors: Sequence[torch.Tensor], spans: Sequence[Sequence[DimSlice]]) -> list[torch.Tensor]:
    return [_narrow(tensor, span) for tensor, span in zip(tensors, spans, strict=True)]


def _narrow(tensor: torch.Tensor, spans: Sequence[DimSlice]) -> torch.Tensor:
    for dim, start, length in spans:
        tensor = tensor.narrow(dim, start, length)
    return tensor
