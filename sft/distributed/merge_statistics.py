"""Merge of the bands' running reductions, in the order of the bands: bitwise the same on every rank.

Sums add. Moments merge like those of strips (Chan, Golub and LeVeque, 1983). A band without rows has the neutral element of its reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["MERGES", "merge_statistics"]


def _add(total: Tensor, part: Tensor) -> Tensor:
    return total.add_(part)


def _merge_moments(total: Tensor, part: Tensor) -> Tensor:
    """Merge mean, sum of squared deviations, and count (Chan, Golub and LeVeque, 1983)."""
    mean, squares, count = total.unbind(-1)
    other_mean, other_squares, other_count = part.unbind(-1)
    delta, sum_count = other_mean - mean, count + other_count
    fraction = torch.where(sum_count > 0, other_count / sum_count, 0.0)
    squares.add_(other_squares).add_(delta * delta * count * fraction)
    mean.add_(delta * fraction)
    count.copy_(sum_count)
    return total


def _merge_minmax(total: Tensor, part: Tensor, largest: bool) -> Tensor:
    """Merge extreme values, with the number of elements that have them."""
    value, count = total.unbind(-1)
    other, other_count = part.unbind(-1)
    best = torch.maximum(value, other) if largest else torch.minimum(value, other)
    # The neutral element has an infinite count.
    merged = torch.where(value == best, count.nan_to_num(posinf=0.0, neginf=0.0), 0.0)
    merged += torch.where(other == best, other_count.nan_to_num(posinf=0.0, neginf=0.0), 0.0)
    value.copy_(best)
    count.copy_(merged)
    return total


def _merge_argmax(total: Tensor, part: Tensor) -> Tensor:
    """Merge extreme values with their positions; of equal values the first position wins, and NaN wins always."""
    value, position = total.unbind(-1)
    other, other_position = part.unbind(-1)
    # The neutral element has an infinite position, after all other positions.
    is_earlier = other_position.nan_to_num(neginf=math.inf) < position.nan_to_num(neginf=math.inf)
    is_better = (other > value) | ((other == value) & is_earlier) | other.isnan()
    position.copy_(torch.where(is_better, other_position, position))
    value.copy_(torch.where(is_better, other, value))
    return total


def _merge_logsumexp(total: Tensor, part: Tensor) -> Tensor:
    return torch.logaddexp(total, part, out=total)


#: Merge functions, by the reduction's name in the operator table.
MERGES: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("sum", "mean", "fixed_size_avg_pool", "spatial_contraction", "border_rows", "axis_sum"), _add),
    "moments": _merge_moments,
    "minmax": _merge_minmax,
    "axis_minmax": _merge_minmax,
    "argmax": _merge_argmax,
    "logsumexp": _merge_logsumexp,
}


def merge_statistics(kind: str, parts: Sequence[Tensor], *, largest: bool = True) -> Tensor:
    """Merge running reductions into the first one.

    Args:
        kind: a key of :data:`MERGES`.
        parts: running reductions (fp64) in the order of the bands; the first is overwritten with the result.
        largest: of ``"extremes"``, True for maxima.
    """
    options = {"largest": largest} if kind in ("minmax", "axis_minmax") else {}
    total = parts[0]
    for part in parts[1:]:
        total = MERGES[kind](total, part, **options)
    return total
