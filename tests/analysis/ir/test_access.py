"""Access maps, frontiers, and the normal form that keeps frontiers of deep networks small."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TypeVar

import pytest
import sympy as sp
from hypothesis import example, given
from hypothesis import strategies as st

from sft.analysis.ir.access import AxisMap, FloorTerm, Frontier
from sft.common.interval import Interval
from tests.helpers.dag_nets import Dag
from tests.helpers.dags import dags
from tests.helpers.dependence import input_rows, operator_dependence
from tests.helpers.graphs import graph_of

_ROWS = range(-60, 400)
_F = TypeVar("_F", Frontier, "_Rows")


@st.composite
def _maps(draw: st.DrawFn) -> AxisMap:
    """Windows of convolutions and poolings, rarely an upsampling."""
    if draw(st.integers(0, 4)) == 0:
        return AxisMap(divisor=draw(st.integers(1, 3)))
    kernel, stride, dilation = draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return AxisMap.window(kernel=kernel, stride=stride, padding=draw(st.integers(0, kernel)), dilation=dilation)


_chains = st.lists(_maps(), min_size=1, max_size=8)


def _nested(chain: Sequence[AxisMap], rows: int) -> int:
    for access in chain:
        rows = access.frontier(rows)
    return rows


def _composed(chain: Sequence[AxisMap]) -> Frontier:
    frontier = Frontier()
    for access in chain:
        frontier = frontier.compose(access)
    return frontier


# -- one map --------------------------------------------------------------------------------------------------------------


@given(access=_maps())
def test_frontier_is_its_definition(access: AxisMap) -> None:
    """The largest n such that every output row below n reads input rows below R only."""
    for rows in range(-20, 60):
        n = access.frontier(rows)
        assert access.read(Interval(n - 1, n)).stop <= rows < access.read(Interval(n, n + 1)).stop


@given(access=_maps(), start=st.integers(-20, 40), length=st.integers(1, 9))
def test_read_is_the_hull_of_its_rows(access: AxisMap, start: int, length: int) -> None:
    hull = access.read(Interval(start, start + length))
    each = [access.read(Interval(row, row + 1)) for row in range(start, start + length)]
    assert hull == Interval(min(i.start for i in each), max(i.stop for i in each))
    assert access.low(start) == hull.start
    assert not access.read(Interval(start, start))


@pytest.mark.parametrize("bad", [{"scale": 0}, {"divisor": 0}, {"first": 1, "last": 0}])
def test_invalid_access_maps_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="not an access map"):
        AxisMap(**bad)


@given(dag=dags(), axis=st.integers(0, 1))
def test_maps_of_the_table_are_those_of_eager_operators(dag: Dag, axis: int) -> None:
    """Each operator of a random network alone: dependence of output rows on input rows, and number of output rows."""
    built = graph_of(dag)
    for name, dependence in operator_dependence(dag, axis).items():
        operand = built.graph[name].operands[0]
        assert dependence.shape == (built.extents(axis)[operand], built.extents(axis)[name])
        access = built.rows[name].access(built.graph[name], axis)
        for row in range(dependence.shape[1]):
            touched = input_rows(dependence, Interval(row, row + 1))
            read = access.read(Interval(row, row + 1))
            assert set(touched) <= set(range(read.start, read.stop))
            # Both ends of a read are used, unless they lie in the padding.
            if read.start >= 0 and touched:
                assert touched[0] == read.start
            if read.stop <= dependence.shape[0] and touched:
                assert touched[-1] == read.stop - 1


# -- composition ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "c"), list(product(range(1, 6), repeat=2)))
def test_nested_floors_are_one_floor(a: int, c: int) -> None:
    """floor((floor(x / a) + b) / c) = floor((x + a b) / (a c)), proved for these a and c, every b and every integer x.

    Write x = a c q + r and b = c p + s. SymPy pulls the integers q and p out of both sides, and finitely many r and s are left.
    """
    q, p = sp.symbols("q p", integer=True)
    for r, s in product(range(a * c), range(c)):
        x, b = a * c * q + r, c * p + s
        left = sp.floor((sp.floor(sp.expand(x / sp.Integer(a))) + b) / sp.Integer(c))
        right = sp.floor(sp.expand((x + a * b) / sp.Integer(a * c)))
        assert sp.simplify(left - right) == 0


@given(chain=_chains)
@example(chain=[AxisMap(divisor=2), AxisMap.window(kernel=3, stride=3, padding=1, dilation=1)])  # 3 and 2 do not divide: no normal form
def test_normal_form_equals_the_nested_floors(chain: list[AxisMap]) -> None:
    frontier = _composed(chain)
    if frontier.terms:
        assert [frontier(rows) for rows in _ROWS] == [_nested(chain, rows) for rows in _ROWS]
        assert all(0 <= term.advance < term.period for term in frontier.terms)
    else:
        assert any(access.divisor > 1 for access in chain)  # windows alone always close


@given(chain=_chains)
def test_period_is_a_period(chain: list[AxisMap]) -> None:
    frontier = _composed(chain)
    if frontier.terms:
        gains = {frontier(rows + frontier.period) - frontier(rows) for rows in _ROWS}
        assert len(gains) == 1


@given(branches=st.lists(_chains, min_size=2, max_size=4), after=_chains)
def test_meets_are_minima_and_pruning_keeps_them(branches: list[list[AxisMap]], after: list[AxisMap]) -> None:
    """Joins, and operators after them: a monotone map commutes with the minimum."""
    frontiers = [_composed(branch) for branch in branches]
    meet = frontiers[0]
    for other in frontiers[1:]:
        meet = meet.meet(other)
    for access in after:
        meet = meet.compose(access)
    if meet.terms:
        for rows in _ROWS:
            assert meet(rows) == _nested(after, min(_nested(branch, rows) for branch in branches))
    else:
        assert any(access.divisor > 1 for branch in (after, *branches) for access in branch)


@given(chain=_chains, row=st.integers(-40, 200))
def test_frontier_expression_equals_the_frontier(chain: list[AxisMap], row: int) -> None:
    frontier, symbol = _composed(chain), sp.Symbol("R", integer=True)
    if frontier.terms:
        assert frontier.expr(symbol).subs(symbol, row) == frontier(row)


@given(
    terms=st.tuples(
        *[st.builds(FloorTerm, st.just(2), st.integers(0, 5), st.just(6), st.integers(-8, 8)) for _ in range(2)],
    )
)
def test_dominance_is_exact_at_one_slope(terms: tuple[FloorTerm, FloorTerm]) -> None:
    term, other = terms
    assert term.dominates(other) == all(term(rows) <= other(rows) for rows in range(12))


def test_no_dominance_between_slopes() -> None:
    assert not FloorTerm().dominates(FloorTerm(rate=2, bonus=9))


class _Rows(int):
    """A number of rows that passes through operators like a frontier: reference of the normal form."""

    def compose(self, access: AxisMap) -> _Rows:
        return _Rows(access.frontier(self))

    def meet(self, other: _Rows) -> _Rows:
        return min(self, other)


def _bottleneck(frontier: _F, stride: int) -> _F:
    """ResNet's block: 1x1, 3x3, 1x1 around an identity or a strided 1x1 convolution."""
    point = AxisMap.window(kernel=1, stride=1, padding=0, dilation=1)
    body = frontier.compose(point).compose(AxisMap.window(kernel=3, stride=stride, padding=1, dilation=1)).compose(point)
    return body.meet(frontier.compose(AxisMap.window(kernel=1, stride=stride, padding=0, dilation=1)))


def _resnet152(frontier: _F) -> list[_F]:
    """Frontiers after the stem and each block."""
    for kernel in (7, 3):
        frontier = frontier.compose(AxisMap.window(kernel=kernel, stride=2, padding=kernel // 2, dilation=1))
    frontiers = [frontier]
    for stage, depth in enumerate((3, 8, 36, 3)):
        frontiers += [frontier := _bottleneck(frontier, 2 if stage > 0 and index == 0 else 1) for index in range(depth)]
    return frontiers


def test_a_resnet152_stays_one_floor() -> None:
    """Fifty joins, 152 layers: the skip's frontier is never below the body's, so one term remains, and it is the nested evaluation's."""
    frontiers = _resnet152(Frontier())
    assert len(frontiers) == 51
    assert {len(frontier.terms) for frontier in frontiers} == {1}
    assert frontiers[-1].period == 32
    assert len(str(frontiers[-1].expr(sp.Symbol("R")))) < 40
    for rows in range(-2000, 4000, 7):
        assert [frontier(rows) for frontier in frontiers] == _resnet152(_Rows(rows))


@pytest.mark.parametrize("levels", [2, 4, 6])
def test_a_unet_stays_small(levels: int) -> None:
    """Rates of all levels divide one another, and at each level the skip's frontier is ahead of the upsampled one."""
    conv, pool, up = AxisMap.window(kernel=3, stride=1, padding=1, dilation=1), AxisMap(scale=2, last=1), AxisMap(divisor=2)

    def level(frontier: Frontier, depth: int) -> Frontier:
        here = frontier.compose(conv).compose(conv)
        if depth == 0:
            return here
        return level(here.compose(pool), depth - 1).compose(up).meet(here).compose(conv).compose(conv)

    def nested(rows: int, depth: int) -> int:
        here = rows - 2
        return here if depth == 0 else min(2 * nested(here // 2, depth - 1), here) - 2

    frontier = level(Frontier(), levels)
    assert 1 <= len(frontier.terms) <= levels + 1
    assert frontier.period == 2**levels
    assert [frontier(rows) for rows in _ROWS] == [nested(rows, levels) for rows in _ROWS]
