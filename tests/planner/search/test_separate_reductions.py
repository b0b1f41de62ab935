"""Reductions of cuts in segments of their own: exact, and one run of the operators before them fewer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import sft
import sft.api.plan_search
from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.planner import plan_segments
from sft.planner.problem import PlanningProblem
from sft.planner.search.separate_reductions import with_separate_reductions
from sft.runtime.moves import parse_schedule
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded
from tests.helpers.stage_chains import MODELS, deep, problem_of

_SHAPE = (2, 3, 48, 40)
_TILED = sft.Options(tile=(8, None))


class _Downsampled(nn.Module):
    """Two convolutions, each with statistics, in one phase, at half of the rows of its source."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.main = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8))
        self.skip = nn.Sequential(nn.Conv2d(6, 8, 1, stride=2), nn.BatchNorm2d(8))

    def forward(self, x: Any) -> Any:
        y = self.stem(x)
        return (self.main(y) + self.skip(y)).relu().mean((2, 3))


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "batchnorm": lambda: deep(nn.BatchNorm2d),
    "groupnorm": lambda: deep(lambda channels: nn.GroupNorm(4, channels)),
    "normed": MODELS["normed"],
    "downsampled": _Downsampled,
}


def _planned(change: Callable[[PlanningProblem, ProjectedPlan], ProjectedPlan], patch: pytest.MonkeyPatch) -> list[ProjectedPlan]:
    """Plans that are changed from now on."""
    plans: list[ProjectedPlan] = []

    def changed(problem: PlanningProblem, *arguments: Any) -> ProjectedPlan:
        plans[:] = [plan_segments(problem, *arguments)]
        plans.append(change(problem, plans[0]))
        return plans[-1]

    patch.setattr(sft.api.plan_search, "plan_segments", changed)
    return plans


def _separated(problem: PlanningProblem, plan: ProjectedPlan) -> ProjectedPlan:
    separated = with_separate_reductions(problem, plan)
    assert separated is not None
    return separated


@pytest.mark.parametrize("name", _MODELS)
def test_a_step_is_exact_with_fewer_flops_and_the_same_peak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = _planned(_separated, monkeypatch)
    assert_exact(seeded(_MODELS[name]), image(*_SHAPE), options=_TILED, to_the_byte=True)
    before, after = (plan.projection for plan in plans)
    assert after.flops < before.flops
    assert after.peak_bytes <= 1.01 * before.peak_bytes
    assert after.op_records[-1].end_bytes == before.op_records[-1].end_bytes


@pytest.mark.parametrize("tile", [(8, 16), (48, 40)])
def test_panels_and_a_single_strip(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    _planned(_separated, monkeypatch)
    assert_exact(seeded(_Downsampled), image(*_SHAPE), options=sft.Options(tile=tile), to_the_byte=True)


def test_strips_of_a_reduction_have_the_rows_that_its_image_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(seeded(_Downsampled), _SHAPE, monkeypatch)
    tiled = plan_segments(problem, 2**32, _TILED)
    separated = _separated(problem, tiled)
    rows = {choice.nodes: choice.strip_rows for choice in separated.choices if choice.mode == "tiled"}
    assert [(len(nodes), height) for nodes, height in rows.items()] == [(1, 8), (1, 8), (4, 8), (2, 4), (5, 4)]


def test_a_schedule_with_recomputation_and_copies_is_renumbered(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(seeded(_Downsampled), _SHAPE, monkeypatch)
    choices = plan_segments(problem, 2**32, _TILED).choices
    assert [choice.mode for choice in choices] == ["tiled", "whole", "tiled", "whole", "tiled"]
    entries = ["F0", "F1+", "F2+", "F3+", "F4+", "L", "B4", "B3", "B2", "F0+", ">conv2d", "~conv2d", "<conv2d", "B1", "B0"]
    order = parse_schedule(entries, 5)
    separated = _separated(problem, materialize(problem, choices, order))
    renumbered = "F0 F1 F2+ F3+ F4+ F5+ F6+ L B6 B5 B4 B3 F0+ F1+ >conv2d ~conv2d <conv2d B2 B1 B0"
    assert " ".join(map(str, separated.region.schedule)) == renumbered


def test_streamed_cuts_and_models_without_reductions_of_cuts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(seeded(_Downsampled), _SHAPE, monkeypatch)
    choices = list(plan_segments(problem, 2**32, _TILED).choices)
    choices[0] = type(choices[0])(nodes=choices[0].nodes, mode="tiled", strip_rows=8, batch_tile=1, streamed=("conv2d",))
    separated = _separated(problem, materialize(problem, choices))
    assert separated.choices[0] == choices[0]
    assert len(separated.choices) == len(choices) + 1

    plain = problem_of(seeded(lambda: deep(lambda channels: nn.Identity())), _SHAPE, monkeypatch)
    assert with_separate_reductions(plain, plan_segments(plain, 2**32, _TILED)) is None
