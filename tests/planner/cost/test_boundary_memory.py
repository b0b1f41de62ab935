"""Boundary memory of candidates, counted incrementally, against the segments of each candidate."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.analysis.passes.pipeline import run_passes
from sft.planner.cost.boundary_memory import BoundaryTracker, untiled_memory
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.cost.step_time import source_bytes
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import segment_borders
from sft.planner.search.tiled import CandidateGrid
from sft.planner.sized_graph import SizedGraph
from sft.planner.streamed_cuts import stream_seconds, streamable_values, with_streamed
from tests.helpers.dag_nets import Dag, DagNet
from tests.helpers.dags import dags
from tests.helpers.examples import at_most
from tests.helpers.host_cuts import Normed
from tests.helpers.models import chain, seeded
from tests.helpers.problems import problem_of, with_resources

Floats = npt.NDArray[np.float64]


def _check(problem: PlanningProblem, num_panels: int, *, streams: bool) -> None:
    """Check every candidate of a grid."""
    survey = CandidateGrid(problem, sft.Options(), DeviceRates("cpu"), num_panels, streams=streams)
    order = problem.sized.operators
    places = survey.axes.cut_at
    crossings = BoundaryTracker(problem, survey.tiling, survey.axes.strip_rows, streams=streams).advance(places)
    for position, (crossed, untiled, place) in enumerate(zip(crossings, untiled_memory(problem, places), places, strict=True)):
        own = [_of_segments(survey, position, height) for height in range(len(survey.axes.strip_rows))]
        np.testing.assert_array_equal(crossed.made_bytes, own[0][0])
        np.testing.assert_allclose(crossed.strip_bytes.T, [strips for _, strips, _ in own], rtol=1e-12)
        assert crossed.link_seconds == pytest.approx(own[0][2], rel=1e-12)
        assert untiled.source_bytes == source_bytes(problem, order[place:])
        assert untiled.exchanged_bytes == _exchanged_whole(problem, order[place:])


def _of_segments(survey: CandidateGrid, position: int, height: int) -> tuple[list[int], list[float], float]:
    """Boundary bytes of a candidate's tiled segments, bytes of its streamed strips, and link seconds."""
    problem = survey.problem
    choices = survey._choices(position, height, 0)
    streamed = set(streamable_values(problem, choices)) if survey.streams else set()
    ends = segment_borders(problem.sized.graph, choices)
    away = (
        set(problem.sized.graph.results) - problem.resources.host_outputs.intersection(name for reads, _ in ends for name in reads)
        | streamed
    )
    made, strips = [], []
    for choice, (reads, makes) in zip(choices, ends, strict=True):
        if choice.mode != "tiled":
            continue
        made.append(sum(problem.sized.value_bytes(name) for name in makes if name not in away))
        # Two buffers of a reader and the strip of the gradient; one strip of each result, or of its gradient.
        share = min(1.0, choice.strip_rows / problem.sized.run_height(choice.nodes)) * choice.batch_tile / problem.sized.num_batch
        read, made_bytes = (sum(problem.sized.value_bytes(name) for name in streamed.intersection(names)) for names in (reads, makes))
        strips.append(share * ((2 + problem.sized.training) * read + made_bytes))
    return made, strips, stream_seconds(problem, with_streamed(choices, streamed))


def _exchanged_whole(problem: PlanningProblem, names: tuple[str, ...]) -> int:
    operands = {operand for name in names for operand in problem.sized.graph[name].operands}
    made = problem.resources.host_outputs.intersection(names)
    loaded = (problem.resources.host_outputs & operands & problem.sized.requires_grad) - made
    made_bytes = sum(max(problem.sized.value_bytes(name), problem.sized.grad_bytes(name)) for name in made)
    return made_bytes + sum(map(problem.sized.grad_bytes, loaded))


class _Twice(nn.Module):
    """A model that returns an intermediate value, and reads another one several runs after its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.next = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.last = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.first(x)
        second = self.next(first)
        return first, self.last(second) + first, second.mean((2, 3))


@pytest.mark.parametrize("make", [Normed, _Twice, lambda: chain(nn.Conv2d(3, 2, 3), nn.ReLU())], ids=["norms", "outputs", "one run"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("on_host", [True, False])
def test_candidates_of_networks(make: type[nn.Module], training: bool, streams: bool, on_host: bool) -> None:
    problem = problem_of(seeded(make).float(), (2, 3, 32, 24), training=training, passes=run_passes)
    if on_host:
        problem = with_resources(problem, from_source=frozenset(problem.sized.graph.inputs), outputs_on_host=True)
    for num_panels in (1, 3):
        _check(problem, num_panels, streams=streams)


@at_most(5, one_in=4)
@given(dag=dags(), training=st.booleans(), streams=st.booleans(), on_host=st.booleans(), num_panels=st.integers(1, 3))
def test_candidates_of_any_network(dag: Dag, training: bool, streams: bool, on_host: bool, num_panels: int) -> None:
    shape = tuple(dag.image().shape)
    assert len(shape) == 4
    problem = problem_of(DagNet(dag).float(), shape, training=training, passes=run_passes)
    _check(with_resources(problem, outputs_on_host=on_host), num_panels, streams=streams)


def test_candidates_are_visited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of n norms has about n runs and n candidates, so work per candidate must not grow with its segments."""
    asked = 0
    num_panels = SizedGraph.num_panels

    def counted(*arguments: Any) -> int:
        nonlocal asked
        asked += 1
        return num_panels(*arguments)

    def count(depth: int) -> int:
        nonlocal asked
        blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(depth)]
        problem = problem_of(seeded(lambda: chain(nn.Conv2d(3, 4, 1), *blocks)).float(), (1, 3, 64, 64), training=True, passes=run_passes)
        survey = CandidateGrid(problem, sft.Options(), DeviceRates("cpu"), 2, streams=True)
        asked = 0
        list(BoundaryTracker(problem, survey.tiling, survey.axes.strip_rows, streams=True).advance(survey.axes.cut_at))
        return asked

    monkeypatch.setattr(SizedGraph, "num_panels", counted)
    few, many = count(4), count(8)
    assert few and many <= 2.5 * few
