"""Where bands begin and end, so that the rank that computes most computes as little as possible.

Bands of equal rows do not cost the same: the first and the last have one neighbour whose rows they compute again, the others have two, and
where bands begin at multiples of the network's stride some get more rows than others. A band's cost is taken to be a part of its own (those
rows, and what all ranks compute) and a price for each row, the same for all; the bounds that level this are tried, and what they cost
exactly says whether they are taken, and what to level next.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

from sft.analysis.bands import BandPartition

__all__ = ["balance_bands", "balanced_bounds"]

#: Corrections of the bounds that are tried, one after the other.
_NUM_CORRECTIONS = 2


class _BandCosts(Protocol):
    """Decisions for all bands, projected."""

    @property
    def shares(self) -> BandPartition: ...
    @property
    def flops_by_band(self) -> Sequence[int]: ...
    @property
    def row_flops(self) -> float: ...
    @property
    def peak_bytes(self) -> int: ...


Found = TypeVar("Found", bound=_BandCosts)


def balance_bands(found: Found, project: Callable[[BandPartition], Found], multiple: int, room_bytes: int) -> Found:
    """The same decisions on bands whose largest cost is smaller, where there are such that fit; or what was found.

    Args:
        found: the decisions on bands of some bounds.
        project: what they cost on bands of others.
        multiple: rows that bands are multiples of.
        room_bytes: what each band may hold.
    """
    for _ in range(_NUM_CORRECTIONS):
        bounds = balanced_bounds(found.shares.bounds, found.flops_by_band, found.row_flops, multiple)
        if bounds == found.shares.bounds:
            break
        other = project(BandPartition(bounds))
        if max(other.flops_by_band) >= max(found.flops_by_band) or other.peak_bytes > room_bytes:
            break
        found = other
    return found


def balanced_bounds(bounds: Sequence[int], costs: Sequence[float], row_cost: float, multiple: int = 1) -> tuple[int, ...]:
    """Bounds of bands, each of at least ``multiple`` rows, with the least largest cost.

    >>> balanced_bounds((0, 30, 60, 90), (33, 36, 33), 1)
    (0, 31, 59, 90)
    >>> balanced_bounds((0, 32, 64, 90), (33, 36, 27), 1, 4)
    (0, 32, 60, 90)

    Args:
        bounds: as they are: what lies between two of them is a band.
        costs: of the bands as they are.
        row_cost: what a row more costs.
        multiple: rows that bands are multiples of; the last one has the rest, too.
    """
    num_units, rest = divmod(bounds[-1], multiple)
    unit = row_cost * multiple
    if num_units <= len(costs) or unit <= 0:
        return tuple(bounds)
    own = [cost - row_cost * (stop - start) for cost, (start, stop) in zip(costs, pairwise(bounds), strict=True)]
    own[-1] += row_cost * rest
    # What all would cost if rows could be divided; bands get what is surely below, and the rows that are left go where they cost least.
    level = (sum(own) + unit * num_units) / len(own)
    units = [max(1, int((level - each) // unit)) for each in own]
    while sum(units) > num_units:
        units[max((each + unit * number, band) for band, (each, number) in enumerate(zip(own, units, strict=True)) if number > 1)[1]] -= 1
    heap = [(each + unit * (number + 1), band) for band, (each, number) in enumerate(zip(own, units, strict=True))]
    heapq.heapify(heap)
    for _ in range(num_units - sum(units)):
        cost, band = heap[0]
        units[band] += 1
        heapq.heapreplace(heap, (cost + unit, band))
    return (*accumulate((number * multiple for number in units[:-1]), initial=0), bounds[-1])
