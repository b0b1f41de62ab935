"""Retained graphs: the bytes of the backward pass are counted before it begins, and refused if they exceed the budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.planner.repeat_budgets import RetainedGraphCheck
from tests.helpers.models import image, seeded
from tests.helpers.plans import least_budget

pytestmark = pytest.mark.usefixtures("without_proposals")

_SHAPE = (2, 3, 45, 37)


def _model() -> nn.Module:
    layers = (
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1)),
        *(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )
    return nn.Sequential(*layers, nn.Linear(16, 3)).double()


def _retained(net: Any, *, input_grad: bool) -> RetainedGraphCheck:
    x = image(*_SHAPE).requires_grad_(input_grad)
    plan = net.plan_for(x)
    (check,) = [ready.retain_check for ready in net._sft_engine.plan_cache.prepared.values() if ready.plan == plan]
    assert isinstance(check, RetainedGraphCheck)
    return check


def _backward_twice(net: nn.Module, *, input_grad: bool) -> tuple[int, Tensor]:
    """The peak of a step with three backward passes, and the gradient of the first weight."""
    net.zero_grad()
    with sft.measure_peak("cpu") as peak:
        x = image(*_SHAPE).requires_grad_(input_grad)
        y = net(x)
        for retain in (True, True, False):
            y.backward(torch.ones_like(y), retain_graph=retain)
    gradient = next(net.parameters()).grad
    assert gradient is not None
    return peak.num_bytes, gradient.clone()


def _least() -> int:
    return least_budget(seeded(_model), _SHAPE)


@pytest.mark.parametrize("input_grad", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        sft.Options(),
        sft.Options(strategy="none"),
        sft.Options(tile=(7, None)),
        sft.Options(tile=(7, 11), batch_tile=1, state_every=2),
        sft.Options(strategy="sqrt"),
        sft.Options(strategy="offload-greedy"),
    ],
    ids=str,
)
def test_retained_bytes_are_counted(options: sft.Options, input_grad: bool) -> None:
    model = seeded(_model)
    net = sft.compile(copy.deepcopy(model), _SHAPE, options=options)
    retained = _retained(net, input_grad=input_grad)
    measured, gradient = _backward_twice(net, input_grad=input_grad)
    allowed = retained.needed_bytes - retained.plan.resident_bytes
    grads = sum(p.numel() * p.element_size() for p in model.parameters())  # in .grad they are resident, and measured here
    assert allowed // 2 < measured <= allowed + grads
    torch.testing.assert_close(gradient, _backward_twice(model, input_grad=input_grad)[1], rtol=1e-10, atol=1e-12)


def test_a_budget_too_small_for_a_retained_graph_refuses() -> None:
    model, budget = seeded(_model), _least()
    net = sft.compile(model, _SHAPE, budget=budget)
    y = net(image(*_SHAPE)).sum()
    with pytest.raises(sft.BudgetError, match="retain_graph=True") as refused:
        y.backward(retain_graph=True)
    assert refused.value.needed_bytes > budget
    assert all(parameter.grad is None for parameter in model.parameters())
    y.backward()  # nothing is lost
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_budget_that_is_named_works() -> None:
    budget = _least()
    net: Any = sft.compile(seeded(_model), _SHAPE, budget=budget)
    with pytest.raises(sft.BudgetError) as refused:
        net(image(*_SHAPE)).sum().backward(retain_graph=True)
    needed = refused.value.needed_bytes
    roomy: Any = sft.compile(seeded(_model), _SHAPE, budget=needed, plan=net.plan)
    measured, _ = _backward_twice(roomy, input_grad=False)
    parameters = sum(p.numel() * p.element_size() for p in roomy.parameters())
    assert measured + parameters <= needed
