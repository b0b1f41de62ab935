"""Running reductions of several bands merged into one, in the bands' order: the same on every rank, to the last bit.

Sums add up. Moments merge as those of strips do (Chan, Golub and LeVeque, 1983). A band without rows has what a running reduction
starts from, which changes nothing.
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
    mean, squares, count = total.unbind(-1)
    other_mean, other_squares, other_count = part.unbind(-1)
    delta, sum_count = other_mean - mean, count + other_count
    share = torch.where(sum_count > 0, other_count / sum_count, 0.0)
    squares.add_(other_squares).add_(delta * delta * count * share)
    mean.add_(delta * share)
    count.copy_(sum_count)
    return total


def _merge_minmax(total: Tensor, part: Tensor, largest: bool) -> Tensor:
    value, count = total.unbind(-1)
    other, other_count = part.unbind(-1)
    best = torch.maximum(value, other) if largest else torch.minimum(value, other)
    # A band without rows counts infinitely many.
    merged = torch.where(value == best, count.nan_to_num(posinf=0.0, neginf=0.0), 0.0)
    merged += torch.where(other == best, other_count.nan_to_num(posinf=0.0, neginf=0.0), 0.0)
    value.copy_(best)
    count.copy_(merged)
    return total


def _merge_argmax(total: Tensor, part: Tensor) -> Tensor:
    value, place = total.unbind(-1)
    other, other_place = part.unbind(-1)
    # The place of a band without rows is as infinite as its value, and comes behind all others.
    is_earlier = other_place.nan_to_num(neginf=math.inf) < place.nan_to_num(neginf=math.inf)
    is_better = (other > value) | ((other == value) & is_earlier) | other.isnan()
    place.copy_(torch.where(is_better, other_place, place))
    value.copy_(torch.where(is_better, other, value))
    return total


def _merge_logsumexp(total: Tensor, part: Tensor) -> Tensor:
    return torch.logaddexp(total, part, out=total)


#: How running reductions merge, by the operator table's name.
MERGES: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("sum", "mean", "fixed_size_avg_pool", "spatial_contraction", "border_rows"), _add),
    "moments": _merge_moments,
    "minmax": _merge_minmax,
    "argmax": _merge_argmax,
    "logsumexp": _merge_logsumexp,
}


def merge_statistics(kind: str, parts: Sequence[Tensor], *, largest: bool = True) -> Tensor:
    """The running reduction of all parts; the first one is written to.

    Args:
        kind: a key of :data:`MERGES`.
        parts: running reductions (fp64) in the bands' order.
        largest: of ``"minmax"``, whether they are the largest.
    """
    options = {"largest": largest} if kind == "minmax" else {}
    total = parts[0]
    for part in parts[1:]:
        total = MERGES[kind](total, part, **options)
    return total
