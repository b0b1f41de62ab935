"""Rematerialization: images that cross the first barrier are computed again, exactly, for budgets without room for them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
import sft.api.capture_cache
from sft.analysis.passes.pipeline import run_passes
from sft.analysis.tiling.phases import PhasedGraph
from sft.analysis.tiling.rematerialization import rematerialize
from tests.helpers.exactness import assert_exact
from tests.helpers.models import chain, image, seeded
from tests.helpers.plans import least_budget
from tests.helpers.problems import problem_of

_SHAPE = (1, 3, 64, 48)


def _stem() -> nn.Module:
    """A stem that enlarges its image, and a small remainder."""
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(16, 4, 3), nn.BatchNorm2d(4)
    return chain(*layers)


def _long_stem() -> nn.Module:
    """A norm after three operators."""
    return chain(
        nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 16, 3, 2), nn.GroupNorm(4, 16), nn.ReLU(), nn.AvgPool2d(4), nn.Conv2d(16, 2, 1)
    )


class _Gate(nn.Module):
    """A squeeze-and-excitation gate: a mean over the image, read with the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.last = nn.Conv2d(3, 16, 3), nn.Linear(16, 16), nn.Conv2d(16, 2, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x))
        gate = torch.sigmoid(self.fc(y.mean((2, 3))))
        out: Tensor = self.last(y * gate[:, :, None, None])
        return out


class _Skip(nn.Module):
    """The stem's image is read in two later phases, one of them a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.other = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 2, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.other(self.second(torch.relu(self.norm(y))))
        out: Tensor = self.last(torch.relu(z + y))
        return out


class _Deep(nn.Module):
    """A norm after a deep network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Conv2d(3, 3, 1), nn.ReLU())))
        self.norm, self.last = nn.GroupNorm(1, 3), nn.Conv2d(3, 2, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.layers(x)))
        return out


class _Dropout(nn.Module):
    """Random numbers in the first phase, which are drawn once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop, self.norm, self.last = nn.Conv2d(3, 16, 3), nn.Dropout(0.5), nn.BatchNorm2d(16), nn.Conv2d(16, 2, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.norm(self.drop(self.conv(x)))))
        return out


_MODELS: dict[str, Callable[[], nn.Module]] = {"stem": _stem, "long stem": _long_stem, "gate": _Gate, "skip": _Skip}


def _phases(model: nn.Module) -> PhasedGraph:
    return problem_of(model.train(), _SHAPE, training=True, passes=run_passes).sized.phases


@pytest.mark.parametrize("name", _MODELS)
def test_no_image_crosses_the_first_barrier(name: str) -> None:
    phases = _phases(seeded(_MODELS[name]).float())
    again = rematerialize(phases)
    assert again is not None and again.clones
    graph, first = again.graph, set(again.phases[0].streamed)
    crossing = [n for n in first if n in again.streamed and not first.union(again.phases[0].tail).issuperset(graph.users[n])]
    assert not crossing
    assert first.isdisjoint(again.clones)
    assert {node.name for node in graph.nodes} - again.clones == {node.name for node in phases.graph.nodes}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: chain(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3)), id="no barrier"),
        pytest.param(lambda: chain(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3)), id="norm of the input"),
        pytest.param(_Dropout, id="random numbers"),
        pytest.param(_Deep, id="many operators"),
    ],
)
def test_other_graphs_have_no_clones(make: Callable[[], nn.Module]) -> None:
    assert rematerialize(_phases(seeded(make).float())) is None


@pytest.mark.parametrize("name", _MODELS)
def test_the_least_budget_is_smaller_and_exact(name: str) -> None:
    model = seeded(_MODELS[name])
    needed = least_budget(model, _SHAPE, sft.Options())
    with patch.object(sft.api.capture_cache, "rematerialize", lambda phases: None):
        assert needed < least_budget(model, _SHAPE, sft.Options())
    report = assert_exact(model, image(*_SHAPE), budget=needed, input_grad=False)
    assert any("in_phase" in node for segment in report.plan.segments for node in segment.nodes)


@given(
    name=st.sampled_from([*_MODELS, "dropout"]),
    share=st.floats(0, 1),
    batch=st.integers(1, 2),
    sides=st.tuples(st.integers(33, 60), st.integers(33, 50)),
    has_input_grad=st.booleans(),
)
def test_any_budget_is_exact(name: str, share: float, batch: int, sides: tuple[int, int], has_input_grad: bool) -> None:
    """Clones and originals contribute to the gradients of the same weights, and of the input."""
    model, shape = seeded({**_MODELS, "dropout": _Dropout}[name]), (batch, 3, *sides)
    if name == "dropout":
        model = model.eval()
    x = image(*shape)
    least = least_budget(model, x.clone().requires_grad_(has_input_grad), sft.Options())
    assert_exact(model, x, budget=least + int(share * least), steps=1, input_grad=has_input_grad)


def test_a_plan_lists_recomputed_operators() -> None:
    model = seeded(_stem).float().train()
    plan = sft.plan(model, _SHAPE, budget=least_budget(model, _SHAPE, sft.Options()))
    text = " ".join(plan.explain().split())
    assert "0: conv2d runs again after the reduction that reads its image, so that the 192.00 KiB of the image are not kept" in text
    assert "runs again" not in sft.plan(model, _SHAPE, budget="1GiB").explain()


def test_flops_are_compared_with_those_of_the_model_without_clones() -> None:
    model = seeded(_stem).float().train()
    tight = sft.plan(model, _SHAPE, budget=least_budget(model, _SHAPE, sft.Options()))
    assert tight.plain_flops == sft.plan(model, _SHAPE, budget="1GiB").plain_flops
    assert tight.flops > tight.plain_flops


def test_a_saved_plan_with_clones_is_used_again() -> None:
    model = seeded(_stem).float().train()
    plan = sft.plan(model, _SHAPE, budget=least_budget(model, _SHAPE, sft.Options()))
    net: Any = sft.compile(model, _SHAPE, budget=plan.total_bytes, plan=pickle.loads(pickle.dumps(plan)))
    assert [segment.nodes for segment in net.plan.segments] == [segment.nodes for segment in plan.segments]
    net(torch.randn(_SHAPE)).sum().backward()
