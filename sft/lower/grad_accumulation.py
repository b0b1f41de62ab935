"""Contributions to the gradient of a value, added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sft.common.interval import Interval
from sft.lower.builder import ProgramBuilder
from sft.lower.concat import DimSlice, add_slices, dim_slices
from sft.lower.context import GradContribution, SegmentInfo
from sft.lower.program import Slot

__all__ = ["add_contributions", "contribution_slot", "sum_contributions", "sum_whole_gradients"]

aten = torch.ops.aten


def contribution_slot(builder: ProgramBuilder, patch: GradContribution) -> Slot:
    """A patch as a slot of its own."""
    return patch.slot if patch.channels is None else builder.narrow(patch.slot, 1, patch.channels.start, len(patch.channels))


def sum_contributions(
    scope: SegmentInfo, builder: ProgramBuilder, name: str, held: Interval, patches: Sequence[GradContribution], dtype: torch.dtype
) -> tuple[Slot, bool]:
    """The sum of patches over the rows held, and whether its storage may be written to.

    A patch in a wider type than the result makes the sum wide, so that it is rounded once.
    """
    wide = max((dtype, *(patch.slot.dtype for patch in patches)), key=lambda kind: kind.itemsize)
    columns = scope.columns[name].new
    full = [patch.rows == held and patch.columns == columns for patch in patches]
    if len(patches) == 1 and full[0]:
        slot = contribution_slot(builder, patches[0])
        return builder.cast(slot, dtype), patches[0].owned or slot.dtype != dtype
    base = next((i for i, patch in enumerate(patches) if patch.owned and full[i] and patch.slot.dtype == wide), None)
    total = builder.zeros(scope.strip_shape(name, len(held)), wide) if base is None else patches[base].slot
    add_contributions(scope, builder, name, total, held, [patch for i, patch in enumerate(patches) if i != base])
    return builder.cast(total, dtype), True


def add_contributions(
    scope: SegmentInfo, builder: ProgramBuilder, name: str, target: Slot, rows: Interval, patches: Sequence[GradContribution]
) -> None:
    """Add patches to a gradient of the panel's columns and ``rows``; parts of other gradients last, in one instruction."""
    parts = [patch for patch in patches if patch.channels is not None]
    for patch in patches if len(parts) < 2 else [patch for patch in patches if patch.channels is None]:
        place = target
        for span in _slices_of(scope, name, target, rows, patch):
            place = builder.narrow(place, *span)
        builder.add_into(place, contribution_slot(builder, patch))
    if len(parts) > 1:
        places = tuple(_slices_of(scope, name, target, rows, patch) for patch in parts)
        spans = tuple((DimSlice(1, p.channels.start, len(p.channels)),) for p in parts if p.channels is not None)
        builder.call(add_slices, target, places, tuple(patch.slot for patch in parts), spans, writes=target)


def _slices_of(scope: SegmentInfo, name: str, target: Slot, rows: Interval, patch: GradContribution) -> tuple[DimSlice, ...]:
    """Where a patch lies in a gradient of the panel's columns and ``rows``."""
    assert patch.rows is not None and patch.columns is not None
    first_row, first_column = patch.rows.start - rows.start, patch.columns.start - scope.columns[name].new.start
    return dim_slices(scope.axes, target, first_row, len(patch.rows), first_column, len(patch.columns))


def sum_whole_gradients(builder: ProgramBuilder, parts: Sequence[tuple[Slot, bool]]) -> tuple[Slot, bool]:
    """The sum of tensors of one shape, of each of which is known whether its storage may be written to; likewise of the sum."""
    first, *others = sorted(parts, key=lambda part: -part[0].dtype.itemsize)  # the wide ones first, so that the sum is wide
    if not others:
        return first
    base = next((part for part in (first, *others) if part[1] and part[0].dtype == first[0].dtype), None)
    if base is None:
        total = builder.call(aten.add.Tensor, first[0], others[0][0], shape=first[0].shape, dtype=first[0].dtype)
        rest = others[1:]
    else:
        total, rest = base[0], [part for part in (first, *others) if part is not base]
    for slot, _ in rest:
        builder.add_into(total, slot)
    return total, True
