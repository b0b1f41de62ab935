"""Sweeps that start below the first row: every row that is still missing depends on rows of the strips that run, and on sources."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.analysis.tiling.strips import build_schedule
from sft.analysis.tiling.sweep_start import SweepStart, sweep_start
from sft.common.interval import Interval
from tests.helpers.dags import dags
from tests.helpers.graphs import graph_of


@settings(max_examples=40)
@given(st.data())
def test_missing_rows_depend_on_no_strip_that_is_left_out(data: st.DataObject) -> None:
    dag = data.draw(dags())
    built = graph_of(dag)
    extents = built.extents()
    schedule = build_schedule(
        built.graph, built.run, built.rows, built.streamed, extents, data.draw(st.integers(1, dag.shape[2] + 3), label="strip rows")
    )
    operators = [name for name in schedule.names if name not in schedule.sources and extents.get(name)]
    read = {operand for reads in schedule.reads.values() for operand, _, _ in reads}
    known = {name: data.draw(st.integers(0, extents[name]), label=name) for name in operators if name not in read}
    start = sweep_start(schedule, known)
    assert 0 <= start.first <= start.complete <= schedule.num_steps
    is_exact = {name: np.ones(extents[name], bool) for name in schedule.sources}
    for name in operators:
        access = built.rows[name].access(built.graph[name], 0)
        rows = is_exact[name] = np.zeros(extents[name], bool)
        for row in range(int(schedule.frontier[name][start.first]), extents[name]):
            span = access.read(Interval(row, row + 1))
            operands = [operand for operand, _, _ in schedule.reads.get(name, ())]
            rows[row] = all(is_exact[each][slice(*_ends(span.clip(extents[each])))].all() for each in operands)
        assert rows[int(schedule.frontier[name][start.complete]) :].all()
        assert rows[known.get(name, extents[name]) :].all()
    nothing_missing = sweep_start(schedule, {name: extents[name] for name in known})
    assert nothing_missing == SweepStart(first=schedule.num_steps, complete=schedule.num_steps)


def _ends(rows: Interval) -> tuple[int, int]:
    return rows.start, rows.stop
