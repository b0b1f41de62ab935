"""Strip schedules of random networks: each row once, in order, with all operand rows available, and no unneeded carried row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sft.analysis.tiling.strips import NodeRows, OperandRead, StripSchedule, StripStep, build_schedule
from sft.common.interval import Interval
from tests.helpers.dag_nets import Dag
from tests.helpers.dags import dags
from tests.helpers.dependence import input_rows, operator_dependence
from tests.helpers.graphs import Built, GraphBuilder, graph_of


def _schedule(built: Built, strip_rows: int) -> StripSchedule:
    return build_schedule(built.run, built.extents(), strip_rows)


def _steps(schedule: StripSchedule) -> list[StripStep]:
    return [schedule.step(index) for index in range(schedule.num_steps)]


def _of(steps: list[StripStep], name: str) -> list[NodeRows]:
    return [next(node for node in step.nodes if node.name == name) for step in steps]


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Dag, Built, StripSchedule]:
    """A network and a strip height, from one row to more than the image."""
    dag = draw(dags())
    built = graph_of(dag)
    return dag, built, _schedule(built, draw(st.integers(1, dag.shape[2] + 3)))


@given(case=_cases())
def test_every_row_once_in_order(case: tuple[Dag, Built, StripSchedule]) -> None:
    _, built, schedule = case
    steps, extents = _steps(schedule), built.extents()
    for name in schedule.names:
        row = 0
        for node in _of(steps, name):
            assert node.new.start == row <= node.new.stop
            row = node.new.stop
        assert row == extents.get(name, 0)


@given(case=_cases())
def test_rows_are_available_when_read(case: tuple[Dag, Built, StripSchedule]) -> None:
    """A strip's reads are available in it; an available inner row is carried or computed in this strip."""
    _, _, schedule = case
    before: dict[str, Interval] = {}
    for step in _steps(schedule):
        available = {node.name: node.available for node in step.nodes}
        for node in step.nodes:
            assert all(available[read.operand].contains(read.rows) for read in node.reads)
            if node.name not in schedule.sources:
                assert node.carried == before.get(node.name, Interval(0, 0))
                assert node.available == Interval(node.carried.start, node.new.stop)
        before = {node.name: node.kept for node in step.nodes}
        assert {name: rows for name, rows in before.items() if rows and name not in schedule.sources} == schedule.carried_rows(
            step.index + 1
        )
    assert not schedule.carried_rows(schedule.num_steps)


@given(case=_cases())
def test_row_changes_turn_each_state_into_the_next(case: tuple[Dag, Built, StripSchedule]) -> None:
    _, _, schedule = case
    for index in range(schedule.num_steps):
        rows, following = schedule.carried_rows(index), schedule.carried_rows(index + 1)
        for name, before, after in schedule.row_changes(index):
            assert rows.pop(name, Interval(0, 0)) == (Interval(*before) or Interval(0, 0)) and before != after
            if Interval(*after):
                rows[name] = Interval(*after)
        assert rows == following


@given(case=_cases())
def test_no_unneeded_row_is_carried(case: tuple[Dag, Built, StripSchedule]) -> None:
    """Rows carried into a strip begin with the first row that this or a later strip reads; no row is carried without a read."""
    _, _, schedule = case
    first = {name: np.full(schedule.num_steps + 1, 2**40) for name in schedule.names}
    for step in reversed(_steps(schedule)):
        for rows in first.values():
            rows[step.index] = rows[step.index + 1]
        for node in step.nodes:
            for read in node.reads:
                if read.rows:
                    first[read.operand][step.index] = min(first[read.operand][step.index], read.rows.start)
    for index in range(schedule.num_steps + 1):
        carried = schedule.carried_rows(index)
        for name in schedule.names:
            if name not in schedule.sources:
                frontier = int(schedule.frontier[name][index])
                start = min(int(first[name][index]), frontier)
                assert carried.get(name, Interval(frontier, frontier)) == Interval(start, frontier), (name, index)


@given(case=_cases())
def test_reads_are_the_rows_that_eager_operators_depend_on(case: tuple[Dag, Built, StripSchedule]) -> None:
    """Every row that a new row depends on is read; rows and padding together are the windows' span, and both of its ends are used."""
    dag, built, schedule = case
    steps = _steps(schedule)
    for name, dependence in operator_dependence(dag).items():
        access = built.rows[name].access(built.graph[name], 0)
        for node in _of(steps, name):
            assert len(node.reads) == bool(node.new)
            for read in node.reads:
                touched = input_rows(dependence, node.new)
                assert set(touched) <= set(range(read.rows.start, read.rows.stop))
                span = access.read(node.new)
                assert read.pad_low + len(read.rows) + read.pad_high == len(span)
                assert (read.pad_low == 0) == (span.start >= 0) and (read.pad_high == 0) == (span.stop <= len(dependence))
                if touched:
                    assert read.pad_low or touched[0] == read.rows.start
                    assert read.pad_high or touched[-1] == read.rows.stop - 1


@given(case=_cases())
def test_rows_are_computed_as_early_as_possible(case: tuple[Dag, Built, StripSchedule]) -> None:
    """After each strip the next row of a value reads a missing row of an operand, or only padding above the image."""
    _, built, schedule = case
    extents = built.extents()
    for step in _steps(schedule):
        stop = {node.name: node.new.stop for node in step.nodes}
        for name in (n for n in built.run.names if n in built.streamed and stop[n] < extents[n]):
            node = built.graph[name]
            span = built.rows[name].access(node, 0).read(Interval(stop[name], stop[name] + 1))
            assert span.stop <= 0 or any(span.stop > stop[o] for o in node.operands if o in built.streamed)


@given(case=_cases())
def test_the_flush_ends_with_the_last_row(case: tuple[Dag, Built, StripSchedule]) -> None:
    """The last step computes or reads a row; the number of flush steps is that of the deepest value's delay."""
    _, built, schedule = case
    extents = built.extents()
    last = schedule.step(schedule.num_steps - 1)
    assert any(node.new for node in last.nodes)

    def done(num_steps: int) -> bool:
        """Definition: frontiers without borders, for an input that continues past its end."""
        front = {name: num_steps * schedule.strip_rows for name in schedule.sources}
        for name in built.run.names:
            if name in built.streamed:
                node = built.graph[name]
                front[name] = min(built.rows[name].access(node, 0).frontier(front[o]) for o in node.operands if o in front)
        return all(front[name] >= extents[name] for name in front)

    assert done(schedule.num_steps) and not done(schedule.num_steps - 1)


@given(case=_cases())
def test_kinds_distinguish_strips_with_different_programs(case: tuple[Dag, Built, StripSchedule]) -> None:
    """Two strips share a program only if their geometry, relative to each value's first row, is equal."""
    _, _, schedule = case

    def relative(step: StripStep) -> tuple[object, ...]:
        base = {node.name: node.available.start for node in step.nodes}
        reads = [
            tuple(
                (r.operand, r.rows.start - base[r.operand] if r.rows else 0, len(r.rows), r.pad_low, r.pad_high, r.phase)
                for r in node.reads
            )
            for node in step.nodes
        ]
        return tuple((len(node.new), len(node.carried), len(node.kept), read) for node, read in zip(step.nodes, reads, strict=True))

    first, kinds = schedule.kinds
    looks = [relative(step) for step in _steps(schedule)]
    for index, look in enumerate(looks):
        assert look == looks[first[kinds[index]]]


# -- by hand --------------------------------------------------------------------------------------------------------------


def test_two_convolutions_in_full() -> None:
    """Five rows in strips of two. Each convolution has a delay of one row; the third step reads the last row and flushes."""
    b = GraphBuilder((1, 1, 5, 4))
    b.conv("a", "x", 1)
    b.conv("b", "a", 1)
    schedule = _schedule(b.build(), 2)
    i = Interval
    strips = [
        [(node.name, node.new, node.carried, [(r.rows, r.pad_low, r.pad_high) for r in node.reads]) for node in step.nodes[1:]]
        for step in _steps(schedule)
    ]
    assert strips == [
        [("a", i(0, 1), i(0, 0), [(i(0, 2), 1, 0)]), ("b", i(0, 0), i(0, 0), [])],
        [("a", i(1, 3), i(0, 1), [(i(0, 4), 0, 0)]), ("b", i(0, 2), i(0, 0), [(i(0, 3), 1, 0)])],
        [("a", i(3, 5), i(1, 3), [(i(2, 5), 0, 1)]), ("b", i(2, 4), i(2, 2), [(i(1, 5), 0, 0)])],
        [("a", i(5, 5), i(3, 5), []), ("b", i(4, 5), i(4, 4), [(i(3, 5), 0, 1)])],
    ]


def test_a_strip_taller_than_the_image_is_the_image() -> None:
    b = GraphBuilder((1, 1, 9, 4))
    b.conv("a", "x", 1, 1)
    schedule = _schedule(b.build(), 100)
    assert (schedule.num_steps, schedule.strip_rows) == (1, 9)


@pytest.mark.parametrize(("strip_rows", "num_steps"), [(1, 67), (2, 34), (3, 23), (5, 14), (64, 2)])
def test_a_delay_of_three_rows_costs_its_strips(strip_rows: int, num_steps: int) -> None:
    """All 64 rows are computed when the input has advanced to row 67."""
    b = GraphBuilder((1, 1, 64, 4))
    b.conv("a", "x", 1, 7)
    assert _schedule(b.build(), strip_rows).num_steps == num_steps


def test_a_skip_keeps_rows_for_its_reader() -> None:
    """The sum reads row o of both; the 7x7 body has a delay of 3 rows, which the skip carries."""
    b = GraphBuilder((1, 1, 32, 4))
    b.relu("skip", "x")
    b.conv("body", "skip", 1, 7)
    b.join("sum", "body", "skip")
    schedule = _schedule(b.build(), 4)
    assert schedule.carried_rows(4) == {"skip": Interval(10, 16)}  # the next row of the body, 13, reads from 10 on
    assert schedule.step(4).nodes[-1].reads[1] == OperandRead(operand="skip", rows=Interval(13, 17), pad_low=0, pad_high=0)


@pytest.mark.parametrize("strip_rows", [1, 3, 8, 40])
def test_sources_of_different_heights(strip_rows: int) -> None:
    """An image and one of half its size, joined after an upsampling: each is read once, the smaller one at half the rate."""
    b = GraphBuilder((1, 2, 32, 24))
    b.image("small", (1, 2, 16, 12))
    b.conv("a", "x", 2)
    b.upsample("up", "small", 2)
    b.join("sum", "a", "up")
    built = b.build()
    schedule = _schedule(built, strip_rows)
    steps = _steps(schedule)
    assert schedule.sources == ("x", "small")
    for name, extent in (("x", 32), ("small", 16), ("sum", 32)):
        assert [row for node in _of(steps, name) for row in range(node.new.start, node.new.stop)] == list(range(extent))
    for step in steps:
        available = {node.name: node.available for node in step.nodes}
        assert all(available[read.operand].contains(read.rows) for node in step.nodes for read in node.reads)
