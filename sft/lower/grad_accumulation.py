"""Accumulation of gradient contributions: the sum of all gradients that reach a value in one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sft.common.interval import Interval
from sft.lower.builder import ProgramBuilder
from sft.lower.concat import DimSlice, add_slices, dim_slices
from sft.lower.context import GradContribution, SegmentInfo
from sft.lower.program import Slot

__all__ = ["add_contributions", "contribution_slot", "sum_contributions", "sum_global_gradients"]

aten = torch.ops.aten


def contribution_slot(builder: ProgramBuilder, term: GradContribution) -> Slot:
    """The slot of a contribution, narrowed to its channels."""
    return term.slot if term.channels is None else builder.narrow(term.slot, 1, term.channels.start, len(term.channels))


def sum_contributions(
    scope: SegmentInfo, builder: ProgramBuilder, name: str, rows: Interval, terms: Sequence[GradContribution], dtype: torch.dtype
) -> tuple[Slot, bool]:
    """Emit the sum of contributions over rows of a streamed value.

    If a contribution has a wider type than the result, the sum is made in the wider type and rounded once.

    Args:
        scope: the segment.
        builder: takes the instructions.
        name: the value.
        rows: the rows of the sum.
        terms: its gradient contributions.
        dtype: element type of the sum.

    Returns:
        The sum, and true if its storage may be overwritten.
    """
    wide = max((dtype, *(term.slot.dtype for term in terms)), key=lambda kind: kind.itemsize)
    columns = scope.columns[name].new
    full = [term.rows == rows and term.columns == columns for term in terms]
    if len(terms) == 1 and full[0]:
        slot = contribution_slot(builder, terms[0])
        return builder.cast(slot, dtype), terms[0].owned or slot.dtype != dtype
    base = next((i for i, term in enumerate(terms) if term.owned and full[i] and term.slot.dtype == wide), None)
    total = builder.zeros(scope.strip_shape(name, len(rows)), wide) if base is None else terms[base].slot
    add_contributions(scope, builder, name, total, rows, [term for i, term in enumerate(terms) if i != base])
    return builder.cast(total, dtype), True


def add_contributions(
    scope: SegmentInfo, builder: ProgramBuilder, name: str, target: Slot, rows: Interval, terms: Sequence[GradContribution]
) -> None:
    """Add contributions to a gradient of the panel's columns and ``rows``; those that are channel slices last, in one instruction."""
    channel_slices = [term for term in terms if term.channels is not None]
    separate = terms if len(channel_slices) < 2 else [term for term in terms if term.channels is None]
    for term in separate:
        view = target
        for span in _slices_of(scope, name, target, rows, term):
            view = builder.narrow(view, *span)
        builder.add_into(view, contribution_slot(builder, term))
    if len(channel_slices) > 1:
        targets = tuple(_slices_of(scope, name, target, rows, term) for term in channel_slices)
        spans = tuple((DimSlice(1, term.channels.start, len(term.channels)),) for term in channel_slices if term.channels is not None)
        builder.call(add_slices, target, targets, tuple(term.slot for term in channel_slices), spans, writes=target)


def _slices_of(scope: SegmentInfo, name: str, target: Slot, rows: Interval, term: GradContribution) -> tuple[DimSlice, ...]:
    """The slices of a gradient of the panel's columns and ``rows`` that a contribution covers."""
    assert term.rows is not None and term.columns is not None
    first_row, first_column = term.rows.start - rows.start, term.columns.start - scope.columns[name].new.start
    return dim_slices(scope.axes, target, first_row, len(term.rows), first_column, len(term.columns))


def sum_global_gradients(builder: ProgramBuilder, gradients: Sequence[tuple[Slot, bool]]) -> tuple[Slot, bool]:
    """Emit the sum of gradients of a global value, all of one shape.

    Args:
        builder: takes the instructions.
        gradients: pairs of a gradient and a flag, true if its storage may be overwritten.

    Returns:
        The sum, and true if its storage may be overwritten.
    """
    first, *others = sorted(gradients, key=lambda gradient: -gradient[0].dtype.itemsize)  # widest type first, which is the type of the sum
    if not others:
        return first
    base = next((gradient for gradient in (first, *others) if gradient[1] and gradient[0].dtype == first[0].dtype), None)
    if base is None:
        total = builder.call(aten.add.Tensor, first[0], others[0][0], shape=first[0].shape, dtype=first[0].dtype)
        addends = others[1:]
    else:
        total, addends = base[0], [gradient for gradient in (first, *others) if gradient is not base]
    for slot, _ in addends:
        builder.add_into(total, slot)
    return total, True
