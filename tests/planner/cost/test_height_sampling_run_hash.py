"""Structural run keys: runs that differ only in names are sampled once, and no others are merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sft
from sft.analysis.passes.pipeline import run_passes
from sft.common.weighted_lru import WeightedLRU
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.cost.height_sampling import structural_run_key
from sft.planner.problem import PlanningProblem
from sft.planner.search.tiled import CandidateGrid
from tests.helpers.dag_nets import Dag, DagNet
from tests.helpers.dags import dags
from tests.helpers.examples import at_most
from tests.helpers.models import chain, seeded
from tests.helpers.problems import problem_of, with_resources, with_sized

_sampling = import_module("sft.planner.cost.height_sampling")


def _block(channels: int = 4, **options: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, **options), nn.BatchNorm2d(channels), nn.ReLU())


def _problem(*blocks: nn.Module) -> PlanningProblem:
    model = seeded(lambda: chain(nn.Conv2d(3, 4, 1), *blocks)).float()
    return problem_of(model, (1, 3, 64, 48), training=True, passes=run_passes)


def _likenesses(problem: PlanningProblem) -> list[Any]:
    return [structural_run_key(problem, phase.streamed, any_size=False) for phase in problem.sized.phases.phases if phase.streamed]


def test_equal_blocks_have_equal_keys() -> None:
    _, *inner, _ = _likenesses(_problem(*[_block() for _ in range(6)]))
    assert len(inner) >= 4
    assert len(set(inner)) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: _block(bias=False),
        lambda: _block(groups=2),
        lambda: _block(padding_mode="reflect"),
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=2, dilation=2), nn.BatchNorm2d(4), nn.ReLU()),
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU6()),
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(0.1)),
    ],
)
def test_different_blocks_have_different_keys(other: Callable[[], nn.Module]) -> None:
    same = _likenesses(_problem(*[_block() for _ in range(6)]))
    mixed = _likenesses(_problem(*[_block() for _ in range(3)], other(), *[_block() for _ in range(2)]))
    assert len(set(mixed)) > len(set(same))


def test_gradients_are_part_of_the_key() -> None:
    problem = _problem(*[_block() for _ in range(6)])
    weights = [node.name for node in problem.sized.graph.nodes if node.kind == "parameter" and len(node.shape) == 4]
    frozen = with_sized(problem, requires_grad=problem.sized.requires_grad - {weights[3]})
    assert len(set(_likenesses(frozen))) == len(set(_likenesses(problem))) + 1


def test_keys_for_any_size_are_equal_at_other_sizes() -> None:
    model = seeded(lambda: chain(nn.Conv2d(3, 4, 1), _block(), _block())).float()
    problems = [problem_of(model, (1, 3, height, 48), training=True, passes=run_passes) for height in (64, 80)]
    names = [next(phase.streamed for phase in problem.sized.phases.phases if phase.streamed) for problem in problems]
    at_any, at_own = (
        {structural_run_key(problem, run, any_size=any_size) for problem, run in zip(problems, names, strict=True)}
        for any_size in (True, False)
    )
    assert (len(at_any), len(at_own)) == (1, 2)


def test_equal_blocks_are_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = 0
    emit_strip = _sampling.emit_strip

    def counting(*arguments: object) -> object:
        nonlocal lowered
        lowered += 1
        return emit_strip(*arguments)

    monkeypatch.setattr(_sampling, "emit_strip", counting)

    def count(depth: int) -> int:
        nonlocal lowered
        problem, lowered = _problem(*[_block() for _ in range(depth)]), 0
        CandidateGrid(problem, sft.Options(), DeviceRates("cpu"))
        return lowered

    few, many = count(4), count(9)
    assert few
    assert many == few


@at_most(5, one_in=4)
@given(dag=dags(), num_panels=st.integers(1, 2), on_host=st.booleans())
def test_grids_equal_those_without_sharing_between_runs(dag: Dag, num_panels: int, on_host: bool) -> None:
    shape = tuple(dag.image().shape)
    assert len(shape) == 4
    problem = problem_of(DagNet(dag).float(), shape, training=True, passes=run_passes)
    problem = with_resources(problem, outputs_on_host=on_host)
    own = CandidateGrid(replace(problem, shared=WeightedLRU()), sft.Options(), DeviceRates("cpu"), num_panels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sampling, "structural_run_key", lambda problem, names, any_size: names)
        each = CandidateGrid(replace(problem, shared=WeightedLRU()), sft.Options(), DeviceRates("cpu"), num_panels)
    np.testing.assert_array_equal(own.estimates.peak_bytes, each.estimates.peak_bytes)
    np.testing.assert_array_equal(own.estimates.cost, each.estimates.cost)
