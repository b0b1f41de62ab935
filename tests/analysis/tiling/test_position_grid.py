"""Placements of access maps, and grids of positions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sft.analysis.ir.access import AxisMap, AxisPlacement
from sft.analysis.tiling.position_grid import PositionGrid


@given(st.integers(1, 6), st.integers(-9, 9), st.integers(0, 9), st.integers(1, 6))
def test_a_placement_is_the_mean_of_the_rows_that_are_read(scale: int, first: int, extra: int, divisor: int) -> None:
    access = AxisMap(scale=scale, first=first, last=first + extra, divisor=divisor)
    placement = AxisPlacement.of_access(access)
    rows = range(divisor)  # period of the rounding in rows
    low = [access.low(row) - placement.stride * row for row in rows]
    high = [(scale * row + access.last) // divisor - placement.stride * row for row in rows]
    assert (placement.first, placement.last) == (sum(low) / Fraction(divisor), sum(high) / Fraction(divisor))


@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 4), st.integers(1, 5), st.integers(1, 7), st.integers(0, 4))
def test_placements_compose_as_the_windows_do(s1: int, k1: int, p1: int, s2: int, k2: int, p2: int) -> None:
    inner = AxisMap.window(kernel=k1, stride=s1, padding=p1, dilation=1)
    outer = AxisMap.window(kernel=k2, stride=s2, padding=p2, dilation=1)
    both = AxisPlacement.of_access(inner).then(AxisPlacement.of_access(outer))
    for row in (0, 3):
        read = outer.low(row), outer.low(row) + k2 - 1
        assert both.stride * row + both.first == inner.low(read[0])
        assert both.stride * row + both.last == inner.low(read[1]) + k1 - 1


@given(st.fractions(min_value="1/8", max_value=64), st.fractions(min_value=-40, max_value=40), st.integers(0, 200))
def test_a_pixel_is_in_the_cell_of_its_position(stride: Fraction, first: Fraction, pixel: int) -> None:
    if stride <= 0:
        return
    grid = PositionGrid(stride_px=stride, first_centre_px=first)
    start, stop = grid.cell_px(grid.position_at(pixel))
    assert start <= pixel + Fraction(1, 2) < stop
    assert grid.cell_px(7)[1] == grid.cell_px(8)[0]
    assert sum(grid.cell_px(7)) / 2 == grid.centre_px(7)


def test_a_grid_has_a_positive_stride() -> None:
    with pytest.raises(ValueError, match="not a grid"):
        PositionGrid(stride_px=Fraction(0), first_centre_px=Fraction(1))
    with pytest.raises(ValueError, match="not a placement"):
        AxisPlacement(first=Fraction(1), last=Fraction(0))
