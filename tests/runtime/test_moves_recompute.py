"""Segment schedules: stages that run forward again are exact, in the planned bytes and FLOPs, for every schedule."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sft
from sft.planner.projection import run_step
from sft.planner.search.published import RECOMPUTE_STRATEGIES
from sft.planner.stages import StagedModel
from sft.runtime.moves import default_schedule, parse_schedule
from sft.runtime.simulated_machine import SimulatedMachine
from sft.solvers.reversal import reversal
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.exactness import assert_exact, assert_within_budget
from tests.helpers.models import ConvNet, Residual, image, seeded
from tests.helpers.plans import least_budget
from tests.helpers.stage_chains import MODELS, Normed, plain_plan, staged_models, step

pytestmark = pytest.mark.usefixtures("without_proposals")

captures = one_capture_a_model("name")

_SHAPE = (2, 3, 40, 32)


_MODELS: dict[str, Callable[[], nn.Module]] = {**MODELS, "conv": ConvNet}


@pytest.mark.parametrize(
    ("name", "strategy"), [*((name, "optimal") for name in _MODELS), *(("normed", other) for other in ("sqrt", "revolve", "bisect", "acg"))]
)
def test_published_schedules_are_exact(name: str, strategy: str) -> None:
    model = seeded(_MODELS[name])
    least, plain = least_budget(model, _SHAPE, sft.Options(strategy=strategy)), plain_plan(model, _SHAPE)
    assert least <= 1.005 * plain.total_bytes
    options = sft.Options(strategy=strategy)
    report = assert_exact(model, image(*_SHAPE), budget=least, options=options, input_grad=False)
    assert report.plan.total_bytes == least
    if name in ("residual", "unet", "normed"):  # the others are as small as their first stage
        assert least < plain.total_bytes
        assert report.plan.flops > plain.flops
        assert report.plan.order
    middle = max(least, (least + plain.total_bytes) // 2)
    assert sft.plan(model, _SHAPE, budget=middle, options=options).flops <= report.plan.flops


@pytest.mark.parametrize("strategy", RECOMPUTE_STRATEGIES)
def test_budgets_of_the_errors_work_and_more_of_it_never_costs_more(strategy: str) -> None:
    model, options = seeded(Normed), sft.Options(strategy=strategy)
    least, plain = least_budget(model, _SHAPE, sft.Options(strategy=strategy)), plain_plan(model, _SHAPE)
    with pytest.raises(sft.BudgetError, match=str(least)):
        sft.plan(model, _SHAPE, budget=least - 1, options=options)
    budgets = [least + (plain.total_bytes - least) * i // 4 for i in range(6)]
    plans = [sft.plan(model, _SHAPE, budget=budget, options=options) for budget in budgets]
    assert all(plan.total_bytes <= budget for plan, budget in zip(plans, budgets, strict=True))
    assert all(later.flops <= earlier.flops for earlier, later in pairwise(plans))
    assert plans[-1].flops == plain.plain_flops


def test_optimal_needs_no_more_flops_than_any_other() -> None:
    model = seeded(Residual)
    for strategy in ("sqrt", "revolve", "bisect", "acg"):
        budget = least_budget(model, _SHAPE, sft.Options(strategy=strategy))
        flops = [sft.plan(model, _SHAPE, budget=budget, options=sft.Options(strategy=name)).flops for name in ("optimal", strategy)]
        assert flops[0] <= 1.1 * flops[1]  # it is optimal for the chain, which differs a little from the model


@pytest.fixture(scope="module")
def staged() -> dict[str, StagedModel]:
    return staged_models(_MODELS, _SHAPE)


def _random_order(staged: StagedModel, seed: int) -> tuple[str, ...]:
    rng = random.Random(seed)

    def decide(i: int, j: int, pending: bool, state: int) -> tuple[int, int, int]:
        return rng.choice([i, *range(i + 1, j)]), 0, 0

    return tuple(map(str, staged.segment_schedule(reversal(staged.chain, decide))))


@given(name=st.sampled_from(sorted(_MODELS)), seed=st.integers(0, 2**20))
def test_any_persistent_order_is_exact(staged: dict[str, StagedModel], name: str, seed: int) -> None:
    stages = staged[name]
    model = seeded(_MODELS[name])
    order = _random_order(stages, seed)
    made = _plan_with_order(model, stages, order)
    eager = seeded(_MODELS[name])
    net: Any = sft.compile(model, _SHAPE, budget="4GiB", plan=made)
    assert net.plan.order in (order, ())  # none for the plain order
    x = image(*_SHAPE, seed=seed).requires_grad_()
    step(net, x, seed)
    if not any(isinstance(module, (nn.Dropout, nn.Dropout2d)) for module in eager.modules()):
        y = x.detach().clone().requires_grad_()
        step(eager, y, seed)
        assert x.grad is not None
        assert y.grad is not None
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-10)
    else:  # the untiled model in the plain order has the same masks
        eager = sft.compile(eager, _SHAPE, budget="4GiB")
        y = x.detach().clone().requires_grad_()
        step(eager, y, seed)
    for (key, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9, msg=key)
    for (key, buffer), other in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=1e-10, atol=1e-10, msg=key)
    assert_within_budget(net, x.detach(), budget="4GiB", to_the_byte=True)


def _plan_with_order(model: nn.Module, staged: StagedModel, order: tuple[str, ...]) -> sft.Plan:
    """Plan of stages with a schedule."""
    options = sft.Options(strategy="sqrt")
    plan = sft.plan(model, _SHAPE, budget="4GiB", options=options)
    assert [segment.nodes for segment in plan.segments] == [choice.nodes for choice in staged.choices]
    text = plan.to_json().replace('"order": []', '"order": ' + str(list(order)).replace("'", '"'))
    if plan.order:
        raise AssertionError("a plan that fits has the plain order")
    return sft.Plan.from_json(text)


@given(name=st.sampled_from(sorted(_MODELS)), seed=st.integers(0, 2**20))
def test_execution_and_frees_follow_the_schedule(staged: dict[str, StagedModel], name: str, seed: int) -> None:
    """Segments run the ops of the schedule, and a cut lives from its write to its last read."""
    stages = staged[name]
    region = stages.with_schedule(parse_schedule(_random_order(stages, seed), len(stages.choices)))
    log: list[str] = []

    class Noting:
        def __init__(self, index: int, segment: Any) -> None:
            self.index, self.segment = index, segment

        def __getattr__(self, key: str) -> Any:
            return getattr(self.segment, key)

        def forward(self, machine: Any, values: Any, *, keep: bool) -> Any:
            log.append(f"F{self.index}{'+' if keep else ''}")
            alive = set(values.by_name)
            assert alive.issuperset(name for name in region.reads[self.index] if name not in region.writes[self.index])
            return self.segment.forward(machine, values, keep=keep)

        def backward(self, machine: Any, values: Any, saved: Any, grads: Any, *, consume: bool = True) -> None:
            log.append(f"B{self.index}")
            later = {int(entry.strip("FB+")) for entry in map(str, region.schedule[len(log) :]) if entry != "L"}
            for cut in set(values.by_name) - set(region.reads[self.index]):
                assert any(cut in region.reads[i] for i in later), f"{cut} outlives its readers"
            self.segment.backward(machine, values, saved, grads, consume=consume)

    noting = [Noting(i, segment) for i, segment in enumerate(region.segments)]
    run_step(stages.problem, replace(region, segments=noting), SimulatedMachine())
    run = [str(move) for move in region.schedule if move.kind != "loss"]
    idle = {f"B{i}" for i, choice in enumerate(stages.choices) if stages.problem.sized.requires_grad.isdisjoint(choice.nodes)}
    assert [entry.rstrip("+") for entry in log] == [move.rstrip("+") for move in run if move not in idle]


def test_the_default_order_is_the_plain_one() -> None:
    assert tuple(map(str, default_schedule(3))) == ("F0+", "F1+", "F2+", "L", "B2", "B1", "B0")


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (["F0", "F1+", "L", "B1", "B0"], "without F0"),
        (["F0+", "F1+", "B1", "B0"], "one loss"),
        (["F1+", "F0+", "L", "B1", "B0"], "each once"),
        (["F0+", "F1+", "L", "B0", "B1"], "next to run back"),
        (["F0+", "F1+", "L", "B1", "F1", "B0"], "already"),
        (["F0+", "F1+", "L", "B1"], "never run back"),
        (["F0+", "F1+", "L", "X1", "B0"], "not an op"),
    ],
)
def test_orders_that_cannot_run_are_refused(order: list[str], problem: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.ReLU())
    plan = sft.plan(model, (1, 3, 16, 16), budget="1GiB", options=sft.Options(strategy="sqrt"))
    assert len(plan.segments) == 2
    text = plan.to_json().replace('"order": []', '"order": ' + str(order).replace("'", '"'))
    with pytest.raises(sft.InputError, match=problem):
        sft.compile(model, (1, 3, 16, 16), plan=sft.Plan.from_json(text))


def test_a_step_may_be_repeated_and_its_graph_retained() -> None:
    model = seeded(Normed).eval()
    options = sft.Options(strategy="optimal")
    tight = sft.plan(model, _SHAPE, budget=least_budget(model, _SHAPE, sft.Options(strategy="optimal")), options=options)
    net: Any = sft.compile(model, _SHAPE, budget="4GiB", plan=tight)  # a graph that is retained needs more
    assert net.plan.order == tight.order != ()
    x = image(*_SHAPE).requires_grad_()
    y = net(x).square().sum()
    y.backward(retain_graph=True)
    assert x.grad is not None
    first = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * first, rtol=1e-12, atol=1e-12)
    net(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 3 * first, rtol=1e-12, atol=1e-12)


def test_inference_recomputes_nothing() -> None:
    model = seeded(Residual)
    with torch.no_grad():
        plan = sft.plan(model, _SHAPE, budget="1GiB", options=sft.Options(strategy="revolve"))
        net = sft.compile(model, _SHAPE, budget="1GiB", options=sft.Options(strategy="revolve"))
        x = image(*_SHAPE)
        torch.testing.assert_close(net(x), model(x), rtol=1e-12, atol=1e-12)
    assert not plan.order
    assert plan.flops == plan.plain_flops
