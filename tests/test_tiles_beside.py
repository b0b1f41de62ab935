"""The paper's independent tiles among the planner's candidates: what they compute is known before they are lowered, and none is missed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import sft
from examples.models import freeze_norm, resnet18, vgg16
from sft.options import Options
from sft.plan.carried import carry_out
from sft.plan.strategy_sft import grids, partition_choices
from sft.plan.survey import Survey
from sft.plan.tiles import flops_in_tiles

from .helpers.captured import one_capture_a_model
from .helpers.exactness import assert_exact
from .helpers.models import TinyUNet, image, seeded
from .helpers.problems import problem_of

captures = one_capture_a_model()


def _vgg() -> nn.Module:
    body: nn.Module = vgg16(2).features
    return body


def _resnet() -> nn.Module:
    model = resnet18(2)
    freeze_norm(model)
    return model


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("build", [_vgg, _resnet])
def test_what_tiles_compute_is_known_before_they_are_lowered(build: Callable[[], nn.Module], training: bool) -> None:
    problem = problem_of(build(), (1, 3, 768, 640), training=training)
    survey = Survey(problem, Options(), "cpu")
    seen = 0
    for partitioned in list(partition_choices(problem, Options()))[:4]:
        for grid in grids(Options())[:4]:
            choices = partitioned(grid)
            counted = flops_in_tiles(problem, choices, survey.forward_flops, survey.flops)
            exact = carry_out(problem, choices).projection.flops
            assert counted == pytest.approx(exact, rel=0.005)
            seen += any(choice.mode == "tiled" for choice in choices)
    assert seen >= 4


@pytest.mark.parametrize(("size", "memory"), [(5120, 0.7), (5120, 0.12), (20_480, 0.019)])
def test_no_plan_of_the_paper_takes_less_time_than_the_planners(size: int, memory: float) -> None:
    """At 20,480 x 20,480 and 11 GiB VGG-16 was planned in strips that restored states, 2 % slower than in tiles."""
    with torch.device("meta"):
        model = _vgg()
    shape = (1, 3, size, size)
    plain = sft.plan(model, shape, budget=2**50, options=Options(strategy="none")).total_bytes
    budget = int(memory * plain)
    ours = sft.plan(model, shape, budget=budget)
    theirs = sft.plan(model, shape, budget=budget, options=Options(strategy="sft"))
    assert ours.estimated_seconds <= theirs.estimated_seconds
    if size == 20_480:
        assert any(segment.halo == "recompute" and segment.num_panels > 1 for segment in ours.segments)


def test_tiles_are_found_where_no_strips_fit() -> None:
    """Independent tiles hold no states: the smallest plan of this network is one of them, and any budget from there on is enough."""
    model, shape = seeded(TinyUNet).double(), (1, 3, 96, 64)
    with pytest.raises(sft.BudgetError) as refused:
        sft.plan(model, shape, budget=1)
    with pytest.raises(sft.BudgetError) as strips:
        sft.plan(model, shape, budget=1, options=Options(halo="carry"))
    least, least_of_strips = refused.value.needed_bytes, strips.value.needed_bytes
    assert least < least_of_strips
    for budget in (least, (least + least_of_strips) // 2):
        report = assert_exact(model, image(*shape), budget=budget, steps=1, input_grad=False)
        assert all(segment.halo == "recompute" for segment in report.plan.segments if segment.mode == "tiled")
