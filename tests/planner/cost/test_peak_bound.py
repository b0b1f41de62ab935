"""Bounds of a step's peak are never above the projected peak, and lower one strip of each tiled segment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sft
from examples.models import resnet18
from sft.analysis.passes.pipeline import run_passes
from sft.lower.lower_strip import StripKind
from sft.lower.program import Program
from sft.lower.strip_programs import StripPrograms
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.materialize import least_peak_bytes, materialize
from sft.planner.search.tiled import CandidateGrid
from tests.helpers.dag_nets import Dag, DagNet
from tests.helpers.dags import dags
from tests.helpers.examples import at_most
from tests.helpers.models import chain
from tests.helpers.problems import problem_of, with_resources


@given(dags(), st.booleans(), st.booleans(), st.booleans(), st.data())
@at_most(20)
def test_no_bound_exceeds_the_projected_peak(dag: Dag, training: bool, reads: bool, on_host: bool, data: st.DataObject) -> None:
    batch, channels, height_px, width_px = dag.image().shape
    problem = problem_of(DagNet(dag).float(), (batch, channels, height_px, width_px), training=training, passes=run_passes)
    problem = with_resources(problem, on_host=on_host, from_source=frozenset(problem.sized.graph.inputs if reads else ()))
    grid = CandidateGrid(problem, sft.Options(), DeviceRates("cpu"), data.draw(st.sampled_from((1, 2))))
    position, height, policy = (data.draw(st.integers(0, extent - 1)) for extent in grid.axes.shape)
    choices = grid._choices(position, height, policy)
    peak_bytes = materialize(problem, choices).projection.peak_bytes
    assert least_peak_bytes(problem, choices) <= peak_bytes
    assert problem.resources.step_end_bytes <= peak_bytes


def test_the_bound_lowers_one_strip_of_each_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(resnet18(10), (1, 3, 256, 128), training=True, passes=run_passes)
    grid = CandidateGrid(problem, sft.Options(), DeviceRates("cpu"))
    choices = grid._choices(grid.last.position, 0, 0)
    lowered: list[StripKind] = []
    lower = StripPrograms.lower

    def counted(programs: StripPrograms, kind: StripKind, index: int) -> Program:
        lowered.append(kind)
        return lower(programs, kind, index)

    monkeypatch.setattr(StripPrograms, "lower", counted)
    bound_bytes = least_peak_bytes(problem, choices)
    num_tiled = sum(choice.mode == "tiled" for choice in choices)
    num_lowered = len(lowered)
    assert 0 < num_lowered <= 2 * num_tiled
    plan = materialize(problem, choices)
    assert len(lowered) > 4 * num_lowered
    assert 0.8 * plan.projection.peak_bytes < bound_bytes <= plan.projection.peak_bytes


def test_decisions_of_two_rooms_are_projected_once() -> None:
    problem = problem_of(chain(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()), (1, 3, 64, 48), training=True)
    grid = CandidateGrid.of(problem, sft.Options(), DeviceRates("cuda"))
    other_room = problem.with_overhead(2**20).with_host_budget(0).with_replays()
    assert CandidateGrid.of(other_room, sft.Options(), DeviceRates("cuda", replays=True)) is grid
    choices = grid.choices(grid.last)
    assert materialize(other_room, choices) is materialize(problem, choices)
