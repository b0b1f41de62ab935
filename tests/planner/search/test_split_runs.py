"""Runs that are cut where the resolution changes: exact, and a step of a U-Net in a small budget that takes a sixth of the time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
import sft.api.plan_search
from sft import parse_bytes
from sft.planner.materialize import ProjectedPlan
from sft.planner.problem import PlanningProblem
from sft.planner.search.split_runs import level_groups, split_run_plans
from tests.helpers.exactness import assert_exact
from tests.helpers.fake_cuda_steps import gpu_steps
from tests.helpers.host_cuts import copy_directly
from tests.helpers.models import TinyUNet, chain, image, seeded
from tests.helpers.stage_chains import MODELS, problem_of

_SHAPE = (2, 3, 48, 40)


def _smallest_split(problem: PlanningProblem) -> ProjectedPlan:
    """The last plan of ever smaller rooms."""
    room_bytes, plans = 2**32, list[ProjectedPlan]()
    while fitting := [*split_run_plans(problem, room_bytes)]:
        plans += fitting
        room_bytes = min(plan.projection.peak_bytes for plan in fitting) * 15 // 16
    return plans[-1]


@pytest.mark.parametrize("name", ["unet", "normed", "branches"])
def test_a_step_with_split_runs_is_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[ProjectedPlan] = []

    def split(problem: PlanningProblem, *arguments: Any) -> ProjectedPlan:
        plans.append(_smallest_split(problem))
        return plans[-1]

    monkeypatch.setattr(sft.api.plan_search, "plan_segments", split)
    assert_exact(seeded(MODELS[name]), image(*_SHAPE), options=sft.Options(host_budget="1GiB"), to_the_byte=True)
    tiled = [choice for choice in plans[-1].choices if choice.mode == "tiled"]
    assert len(tiled) > 1
    assert any(choice.streamed for choice in tiled) == (name != "branches")  # its cuts are outputs
    assert any(choice.strip_rows < 12 for choice in tiled)


def test_cuts_are_at_the_side_of_the_lower_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(seeded(TinyUNet), _SHAPE, monkeypatch)
    groups = level_groups(problem)
    assert [is_tiled for _, is_tiled in groups] == [True] * len(groups)
    assert tuple(name for names, _ in groups for name in names) == problem.sized.operators
    heights = problem.sized.extents(0)
    for (names, _), (later, _) in pairwise(groups):
        rows = [heights[name] for name in names]
        assert len({*rows[:-1]}) <= 1
        assert rows[-1] < rows[0] or heights[later[0]] > rows[-1]


def test_a_run_of_one_resolution_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    problem = problem_of(model, _SHAPE, monkeypatch)
    assert not [*split_run_plans(problem.with_host_budget(2**30), 2**32)]


def test_plans_fit_their_room_and_stream_less_in_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(seeded(TinyUNet), _SHAPE, monkeypatch).with_host_budget(2**30)
    smallest = _smallest_split(problem).projection.peak_bytes
    host_bytes = []
    for room_bytes in (smallest, 2 * smallest, 2**32):
        plans = [*split_run_plans(problem, room_bytes)]
        assert plans and all(plan.projection.peak_bytes <= room_bytes for plan in plans)
        host_bytes.append(plans[0].projection.host_bytes)
    assert host_bytes[0] > host_bytes[-1] == 0
    assert host_bytes == sorted(host_bytes, reverse=True)


def test_a_u_net_in_a_small_budget_computes_little_again() -> None:
    """Regression: tiles of all levels at once took 21 times as long as plain PyTorch in 600 MiB, split runs take 3.3 times as long."""
    import gpu_plans

    case = gpu_plans.Case(network="unet", size_px=2048, budget="600MiB")
    result = gpu_plans.measure(case)
    assert result.seconds < 3.6 * result.plain_seconds
    assert result.flops_ratio < 1.4
    assert result.host_bytes and result.reserved_bytes <= parse_bytes("600MiB")


def test_plans_that_compute_little_again_are_not_compared_with_split_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their projections would take the planner's time."""
    import sft.planner.search.auto as auto

    monkeypatch.setattr(auto, "split_run_plans", lambda *_: pytest.fail("split"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1))
    plan = sft.plan(model, (1, 3, 512, 512), budget="64MiB", device="cuda")
    assert plan.redundancy < 1.3


def test_direct_cuts_between_strips_of_several_heights_have_the_bits_of_staged_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fake GPU, where a copy that does not wait for its strip is a race."""
    problems: list[PlanningProblem] = []

    def split(problem: PlanningProblem, *arguments: Any) -> ProjectedPlan:
        problems.append(problem)
        return _smallest_split(problem)

    monkeypatch.setattr(sft.api.plan_search, "plan_segments", split)
    x = image(*_SHAPE).requires_grad_()
    nets: list[Any] = [sft.compile(seeded(TinyUNet), x, budget="4GiB", options=sft.Options(host_budget="1GiB")) for _ in range(2)]
    plans = [net.plan_for(x) for net in nets]
    assert len({segment.strip_rows for segment in plans[0].segments}) > 1
    copy_directly(nets[0], problems[0])
    staged = _step(nets[1], x)
    with gpu_steps() as gpu:
        direct = _step(nets[0], x)
    assert not gpu.blocking_copies
    assert not gpu.checker.races, "\n".join(gpu.checker.races[:5])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(direct, staged, strict=True))


def _step(net: Any, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    y = net(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(parameter.grad for parameter in net.parameters())]
