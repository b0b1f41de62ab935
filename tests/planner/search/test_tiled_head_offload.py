"""Plans with a tiled head, and stages and states that are offloaded to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sft
from examples.models import vgg16
from sft.planner.materialize import materialize
from sft.runtime.moves import ScheduleOp
from sft.solvers.lower_bounds import stage_bound_bytes
from sft.torch_runtime.machine import TorchMachine
from tests.helpers.exactness import assert_exact
from tests.helpers.models import Residual, TinyUNet, image, seeded
from tests.helpers.plans import least_budget
from tests.helpers.stage_chains import deep

pytestmark = pytest.mark.usefixtures("without_proposals")

_SHAPE = (1, 3, 64, 48)
_HOST = sft.Options(host_budget="1GiB", link_bandwidth=1e9)
_MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: deep(lambda channels: nn.Identity()),
    "groupnorm": lambda: deep(lambda channels: nn.GroupNorm(4, channels)),
    "residual": Residual,
    "unet": TinyUNet,
}
#: Each example plans and takes several steps.
_FEW = settings(max_examples=max(2, (settings.default or settings()).max_examples // 10), deadline=None)


@cache
def _limits(name: str) -> tuple[int, int]:
    """Smallest working budget, and the bytes of plain PyTorch."""
    model = seeded(_MODELS[name])
    return least_budget(model, _SHAPE, options=_HOST), sft.plan(
        model, _SHAPE, budget="4GiB", options=sft.Options(strategy="none")
    ).total_bytes


def _budget(name: str, share: float) -> int:
    least, plain = _limits(name)
    return int(least + share * (plain - least))


def _copied(plan: sft.Plan) -> set[str]:
    return {entry[1:] for entry in plan.order if entry[0] == ">"}


def test_a_tiled_head_with_offloaded_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(_MODELS["plain"])
    plans = [sft.plan(model, _SHAPE, budget=_budget("plain", share), options=_HOST) for share in (0.02, 0.1, 0.2, 0.35)]
    offloading = [plan for plan in plans if plan.segments[0].mode == "tiled" and plan.host_bytes]
    assert offloading
    assert any("0+" in _copied(plan) for plan in offloading)  # the states of the head's strips
    assert any(name in plan.segments[0].nodes for plan in offloading for name in _copied(plan))  # the outputs of the head
    assert any(name in segment.nodes for plan in offloading for name in _copied(plan) for segment in plan.segments[1:])
    plan = next(plan for plan in offloading if "0+" in _copied(plan))
    assert sft.Plan.from_json(plan.to_json()) == plan
    report = assert_exact(model, image(*_SHAPE), budget=plan.budget_bytes, options=_HOST, input_grad=False)
    assert report.plan.order == plan.order
    assert report.plan.host_bytes <= 2**30
    # The executed moves are the planned ones.
    executed: list[str] = []
    begin = TorchMachine.start_op

    def noting(machine: Any, move: ScheduleOp) -> None:
        executed.append(str(move))
        begin(machine, move)

    monkeypatch.setattr(TorchMachine, "start_op", noting)
    net = sft.compile(seeded(_MODELS["plain"]), _SHAPE, budget=plan.budget_bytes, plan=plan, options=_HOST)
    net(image(*_SHAPE).to(next(net.parameters()).dtype)).sum().backward()
    assert tuple(executed) == plan.order


@pytest.mark.parametrize("name", ["plain", "residual"])
def test_the_host_never_makes_a_plan_slower_and_lets_smaller_budgets_work(name: str) -> None:
    model = seeded(_MODELS[name])
    faster = 0
    for share in (0.05, 0.2, 0.5):
        budget = _budget(name, share)
        plan = sft.plan(model, _SHAPE, budget=budget, options=_HOST)
        assert plan.total_bytes <= budget
        try:
            at_home = sft.plan(model, _SHAPE, budget=budget, options=replace(_HOST, host_budget=0))
        except sft.BudgetError:
            faster += 1
            continue
        assert plan.estimated_seconds <= 1.0001 * at_home.estimated_seconds
        faster += plan.estimated_seconds < 0.99 * at_home.estimated_seconds
        for strategy in ("offload-dp", "vdnn", "optimal"):
            try:
                other = sft.plan(model, _SHAPE, budget=budget, options=replace(_HOST, strategy=strategy))
            except sft.BudgetError:
                continue
            assert plan.estimated_seconds <= 1.0001 * other.estimated_seconds or not plan.host_bytes
    assert faster or name == "residual"  # a shorter one, for which the host gains nothing


def test_a_small_host_budget_is_kept() -> None:
    model = seeded(_MODELS["groupnorm"])
    for host_bytes in (1, 100_000):
        least_bytes = least_budget(model, _SHAPE, options=replace(_HOST, host_budget=host_bytes))
        plan = sft.plan(model, _SHAPE, budget=least_bytes, options=replace(_HOST, host_budget=host_bytes))
        assert plan.total_bytes <= least_bytes
        assert plan.host_bytes <= host_bytes
    model, budget = seeded(_MODELS["plain"]), _budget("plain", 0.2)
    plan = sft.plan(model, _SHAPE, budget=budget, options=_HOST)
    assert plan.host_bytes
    small = sft.plan(model, _SHAPE, budget=budget, options=replace(_HOST, host_budget=plan.host_bytes // 2))
    assert small.host_bytes <= plan.host_bytes // 2
    slow = sft.plan(model, _SHAPE, budget=budget, options=replace(_HOST, link_bandwidth="1KB"))
    assert slow.host_bytes == 0  # recomputation is faster


@_FEW
@given(name=st.sampled_from(sorted(_MODELS)), share=st.floats(0, 0.6), link=st.sampled_from([1e8, 1e9, 1e12]))
def test_any_budget_is_exact(name: str, share: float, link: float) -> None:
    options = replace(_HOST, link_bandwidth=link)
    assert_exact(seeded(_MODELS[name]), image(*_SHAPE), budget=_budget(name, share), options=options, input_grad=False, steps=1)


def test_heads_that_surely_do_not_fit_are_not_materialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: heads with stages that need several times the room were projected once each, which took most of the planning time."""
    staged = import_module("sft.planner.search.staged")
    peaks: list[int] = []

    def noted(*arguments: Any) -> Any:
        planned = materialize(*arguments)
        peaks.append(planned.projection.peak_bytes)
        return planned

    monkeypatch.setattr(staged, "materialize", noted)
    with torch.device("meta"):
        model = vgg16(10)
    sft.plan(model, (1, 3, 16_384, 20_480), budget="11GiB")
    assert peaks and max(peaks) < 1.5 * 11 * 2**30


def test_no_solver_runs_on_stages_that_surely_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a stage of DenseNet-201 needed twenty times the room; the search of its chain took half of a second size's time."""
    staged = import_module("sft.planner.search.staged")
    asked: list[float] = []
    cheapest = staged._cheapest_tail

    def noted(tail: Any, name: str, room_bytes: int) -> Any:
        asked.append(stage_bound_bytes(tail.chain) / (room_bytes - tail.base_bytes))
        return cheapest(tail, name, room_bytes)

    monkeypatch.setattr(staged, "_cheapest_tail", noted)
    with torch.device("meta"):
        model = vgg16(10)
    sft.plan(model, (1, 3, 8192, 8192), budget="4GiB")
    assert asked and max(asked) <= 1.5
