"""Concatenation of slices of many tensors, and addition of slices of many gradients, in one instruction each.

In a dense block every layer reads the concatenation of the outputs of all previous layers (Huang et al. 2017). A view and an addition for
each slice would make the number of instructions quadratic in the depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sft.analysis.ir.axes import COLUMNS, ROWS, Axes
from sft.lower.program import Slot

__all__ = ["DimSlice", "add_slices", "cat_slices", "cat_slices_into", "dim_slices"]


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


def _narrow_each(tensors: Sequence[torch.Tensor], spans: Sequence[Sequence[DimSlice]]) -> list[torch.Tensor]:
    return [_narrow(tensor, span) for tensor, span in zip(tensors, spans, strict=True)]


def _narrow(tensor: torch.Tensor, spans: Sequence[DimSlice]) -> torch.Tensor:
    for dim, start, length in spans:
        tensor = tensor.narrow(dim, start, length)
    return tensor
