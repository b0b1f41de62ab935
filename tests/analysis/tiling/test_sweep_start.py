"""Sweeps that start below the first row: every missing row depends on rows of the strips that run, and on sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.analysis.tiling.strips import StripSchedule, build_schedule
from sft.analysis.tiling.sweep_start import SweepStart, sweep_start
from sft.common.interval import Interval
from tests.helpers.dags import dags
from tests.helpers.graphs import Built, GraphBuilder, graph_of


@settings(max_examples=40)
@given(st.data())
def test_missing_rows_depend_on_no_strip_that_is_left_out(data: st.DataObject) -> None:
    dag = data.draw(dags())
    built = graph_of(dag)
    extents = built.extents()
    schedule = build_schedule(built.run, extents, data.draw(st.integers(1, dag.shape[2] + 3), label="strip rows"))
    operators = [name for name in schedule.names if name not in schedule.sources and extents.get(name)]
    read = {operand for reads in schedule.reads.values() for operand, _, _ in reads}
    known = {name: data.draw(st.integers(0, extents[name]), label=name) for name in operators if name not in read}
    _check_start(built, schedule, known)
    nothing_missing = sweep_start(schedule, {name: extents[name] for name in known})
    assert nothing_missing == SweepStart(first=schedule.num_steps, complete=schedule.num_steps)


def test_values_without_missing_rows_may_stay_wrong() -> None:
    """All rows of ``late`` exist. It is computed again after the start, from a row that only an earlier strip computes."""
    b = GraphBuilder((1, 3, 5, 4))
    b.relu("tall", "x")
    b.conv("low", "x", 2, 1, stride=4, padding=0)
    b.conv("late", "low", 2)
    built = b.build("tall", "late")
    schedule, known = build_schedule(built.run, built.extents(), 1), {"tall": 1, "late": 2}
    assert sweep_start(schedule, known) == SweepStart(first=1, complete=1)
    _check_start(built, schedule, known)


def _check_start(built: Built, schedule: StripSchedule, known: Mapping[str, int]) -> None:
    """Check that a missing row depends on exact rows only: rows from the first strip on that depend on rows of these strips alone."""
    start, extents = sweep_start(schedule, known), built.extents()
    operators = [name for name in schedule.names if name not in schedule.sources and extents.get(name)]
    assert 0 <= start.first <= start.complete <= schedule.num_steps

    def read(name: str, row: int) -> Iterator[tuple[str, slice]]:
        span = built.rows[name].access(built.graph[name], 0).read(Interval(row, row + 1))
        for operand, _, _ in schedule.reads.get(name, ()):
            rows = span.clip(extents[operand])
            yield operand, slice(rows.start, rows.stop)

    is_needed = {name: np.arange(extents[name]) >= known.get(name, extents[name]) for name in (*schedule.sources, *operators)}
    for name in reversed(operators):
        for row in np.flatnonzero(is_needed[name]).tolist():
            for operand, rows in read(name, row):
                is_needed[operand][rows] = True
    is_exact = {name: np.ones(extents[name], bool) for name in schedule.sources}
    for name in operators:
        exact = is_exact[name] = np.zeros(extents[name], bool)
        for row in range(int(schedule.frontier[name][start.first]), extents[name]):
            exact[row] = all(is_exact[operand][rows].all() for operand, rows in read(name, row))
        assert exact[is_needed[name]].all()
        assert not is_needed[name].any() or exact[int(schedule.frontier[name][start.complete]) :].all()
