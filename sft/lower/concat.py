"""Joining parts of many values, and adding parts of many gradients, in one instruction each.

A dense block concatenates what all its layers have made, in front of every layer (Huang et al. 2017). A view and an addition for each part
would be instructions in the square of its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sft.analysis.ir.axes import COLUMNS, ROWS, Axes
from sft.lower.program import Slot

__all__ = ["DimSlice", "add_slices", "cat_slices", "cat_slices_into", "dim_slices"]


class DimSlice(NamedTuple):
    """Some indices of a tensor along a dimension."""

    dim: int
    start: int
    length: int


def dim_slices(axes: Axes, slot: Slot, first_row: int, num_rows: int, first_column: int, num_columns: int) -> tuple[DimSlice, ...]:
    """Where rows and columns lie in a slot, counted from its first ones; of an axis that is meant as a whole there is no span."""
    shape = slot.shape
    rows, columns = axes.dim(len(shape), ROWS), axes.dim(len(shape), COLUMNS)
    found: tuple[DimSlice, ...] = ()
    if rows is not None and (first_row or num_rows != shape[rows]):
        found = (DimSlice(rows, first_row, num_rows),)
    if columns is not None and (first_column or num_columns != shape[columns]):
        found += (DimSlice(columns, first_column, num_columns),)
    return found


def cat_slices(tensors: Sequence[torch.Tensor], spans: Sequence[Sequence[DimSlice]], dim: int) -> torch.Tensor:
    """Concatenate a part of each tensor.

    Args:
        tensors: what they are parts of.
        spans: where each lies in its tensor; of dimensions that are not named all.
        dim: along which they are concatenated.
    """
    return torch.cat(_narrow_each(tensors, spans), dim)


def cat_slices_into(out: torch.Tensor, tensors: Sequence[torch.Tensor], spans: Sequence[Sequence[DimSlice]], dim: int) -> None:
    """The same into a tensor."""
    torch.cat(_narrow_each(tensors, spans), dim, out=out)


def add_slices(
    total: torch.Tensor, places: Sequence[Sequence[DimSlice]], tensors: Sequence[torch.Tensor], spans: Sequence[Sequence[DimSlice]]
) -> None:
    """Add a part of each tensor to a part of ``total``, in order.

    Args:
        total: is added to.
        places: where in it each is added.
        tensors: what the addends are parts of.
        spans: where each lies in its tensor.
    """
    for place, tensor, part in zip(places, tensors, spans, strict=True):
        _narrow(total, place).add_(_narrow(tensor, part))


def _narrow_each(tensors: Sequence[torch.Tensor], spans: Sequence[Sequence[DimSlice]]) -> list[torch.Tensor]:
    return [_narrow(tensor, part) for tensor, part in zip(tensors, spans, strict=True)]


def _narrow(tensor: torch.Tensor, spans: Sequence[DimSlice]) -> torch.Tensor:
    for dim, start, length in spans:
        tensor = tensor.narrow(dim, start, length)
    return tensor
