"""Models as chains of stages, for tests of recomputation and of copies to the host."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
import sft.api.plan_search
from sft.common.torch_internals import pytree
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.materialize import ProjectedPlan
from sft.planner.planner import plan_segments
from sft.planner.problem import PlanningProblem
from sft.planner.stages import StagedModel
from tests.helpers.models import Branches, Residual, TinyUNet, seeded
from tests.helpers.plans import least_budget

__all__ = ["MODELS", "Normed", "assert_same_bits_in_stages", "deep", "plain_plan", "problem_of", "staged_models", "step"]


class Normed(nn.Module):
    """Norms with running statistics, dropout, a skip, and a shared layer, which a recomputed forward must not update or draw twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.shared = nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8), nn.SiLU(), nn.Dropout2d(0.2))
        self.last = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Sigmoid(), nn.Conv2d(8, 5, 1))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = torch.relu(self.norm(self.shared(y)) + y)
        y = self.drop(torch.relu(self.shared(y)))
        y = self.last(self.down(y))
        output: Tensor = self.head(y.mean((2, 3)))
        return output


MODELS: dict[str, Callable[[], nn.Module]] = {"residual": Residual, "branches": Branches, "unet": TinyUNet, "normed": Normed}


def plain_plan(model: nn.Module, shape: tuple[int, ...]) -> sft.Plan:
    """The plan of a step that neither recomputes nor copies."""
    return sft.plan(model, shape, budget="4GiB", options=sft.Options(strategy="none"))


def problem_of(model: nn.Module, shape: tuple[int, ...], patch: pytest.MonkeyPatch) -> PlanningProblem:
    """Planning problem of a training step of the model."""
    seen: list[PlanningProblem] = []

    def noting(problem: PlanningProblem, *arguments: Any) -> ProjectedPlan:
        seen.append(problem)
        return plan_segments(problem, *arguments)

    patch.setattr(sft.api.plan_search, "plan_segments", noting)
    plain_plan(model, shape)
    return seen[-1]


def staged_models(makers: Mapping[str, Callable[[], nn.Module]], shape: tuple[int, ...]) -> dict[str, StagedModel]:
    """Each model as a chain of stages, for an image of that shape."""
    with pytest.MonkeyPatch.context() as patch:
        return {name: StagedModel(problem_of(seeded(make), shape, patch), DeviceRates("cpu")) for name, make in makers.items()}


def step(net: Any, x: Tensor, seed: int) -> None:
    """A step with a loss of every output, with the masks of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sum(y.square().sum() for y in pytree.tree_leaves(net(x))).backward()


def deep(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """A few wide layers at full size, then many at half of it: strips save memory in the first, recomputation in the second."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 16, 3, padding=1),
        norm(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    for _ in range(8):
        layers += [nn.Conv2d(16, 16, 3, padding=1), norm(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


def assert_same_bits_in_stages(original: nn.Module, shape: tuple[int, ...], strategy: Any) -> None:
    """Assert that a step of a strategy at its least budget computes the bits of the untiled model: outputs, buffers, gradients."""
    options = sft.Options(strategy=strategy)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    steps = []
    for budget, chosen in ((least_budget(original, shape, options), options), ("1GiB", sft.Options())):
        model = copy.deepcopy(original)
        net: Any = sft.compile(model, shape, budget=budget, options=chosen)
        y = net(x)
        y.square().sum().backward()
        steps.append((len(net.plan.segments), [y.detach(), *model.buffers(), *(param.grad for param in model.parameters())]))
    (num_stages, staged), (num_whole, whole) = steps
    assert num_stages > num_whole == 1
    assert all(torch.equal(staged_value, other) for staged_value, other in zip(staged, whole, strict=True))
