"""Plans with a tiled head and recomputed stages after it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from torch import Tensor, nn

import sft
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.planner import plan_segments
from sft.planner.search.auto import candidate_grids
from sft.planner.search.staged import cheapest_tiled_head
from sft.planner.search.tiled_head import TiledHeadRecompute
from sft.planner.stages import StagedModel
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.exactness import assert_exact
from tests.helpers.models import Residual, TinyUNet, image, seeded
from tests.helpers.plans import least_budget
from tests.helpers.stage_chains import deep, problem_of

pytestmark = pytest.mark.usefixtures("without_proposals")

captures = one_capture_a_model("name")

_SHAPE = (2, 3, 64, 48)


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "identity": lambda: deep(lambda channels: nn.Identity()),
    "batchnorm": lambda: deep(nn.BatchNorm2d),
    "groupnorm": lambda: deep(lambda channels: nn.GroupNorm(4, channels)),
    "residual": Residual,
    "unet": TinyUNet,
}


def _least(model: nn.Module, strategy: str) -> int:
    return least_budget(model, _SHAPE, options=sft.Options(strategy=strategy))


@pytest.mark.parametrize("name", _MODELS)
def test_auto_is_exact_at_every_budget_and_no_worse_than_its_parts(name: str) -> None:
    model = seeded(_MODELS[name])
    least = _least(model, "auto")
    plain = sft.plan(model, _SHAPE, budget="4GiB", options=sft.Options(strategy="none")).total_bytes
    assert least <= _least(model, "optimal")
    for share in (0.0, 0.4):
        budget = int(least + share * (plain - least))
        report = assert_exact(model, image(*_SHAPE), budget=budget, input_grad=False)
        for strategy in ("optimal", "sqrt"):
            try:
                other = sft.plan(model, _SHAPE, budget=budget, options=sft.Options(strategy=strategy))
            except sft.BudgetError:
                continue
            assert report.plan.flops <= 1.05 * other.flops


def test_a_tiled_head_with_recomputed_stages() -> None:
    model = seeded(_MODELS["identity"])
    least, optimal = _least(model, "auto"), _least(model, "optimal")
    plans = [sft.plan(model, _SHAPE, budget=least + (optimal - least) * i // 8) for i in range(8)]
    mixed = [plan for plan in plans if plan.order and plan.segments[0].mode == "tiled"]
    assert mixed
    plan = mixed[0]
    assert {segment.mode for segment in plan.segments} == {"tiled", "whole"}
    assert plan.segments[0].num_forwards == 1
    assert max(segment.num_forwards for segment in plan.segments) > 1
    again = sft.Plan.from_json(plan.to_json())
    assert again == plan
    assert sft.compile(model, _SHAPE, budget=plan.budget_bytes, plan=again).plan == plan
    assert "order" in plan.explain()
    report = assert_exact(model, image(*_SHAPE), budget=plan.budget_bytes, input_grad=False)
    assert report.plan.order


@pytest.mark.parametrize("share", [0.36, 0.4, 0.44])
def test_a_head_that_does_not_fit_is_left_for_a_lower_one(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the same head was proposed with tails of smaller and smaller rooms, and no plan fitted."""
    problem, rates = problem_of(seeded(_MODELS["batchnorm"]), _SHAPE, monkeypatch), DeviceRates("cuda")
    room_bytes = int(share * plan_segments(problem, 2**32, sft.Options(strategy="none")).projection.peak_bytes)
    grids = [next(candidate_grids(problem, sft.Options(), rates))]
    cheapest = cheapest_tiled_head(problem, TiledHeadRecompute(StagedModel(problem, rates), grids, room_bytes), room_bytes, math.inf)
    assert cheapest is not None
    assert cheapest[1].projection.peak_bytes <= room_bytes
    assert cheapest[1].choices[0].mode == "tiled"


class _TwoScales(nn.Module):
    """Two branches with a batch norm each (or the same one): the first one's statistics are complete before the second has begun."""

    def __init__(self, *, is_shared: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.other = self.norm if is_shared else nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.stem(x)
        return self.norm(self.head(y)), self.other(self.head(nn.functional.avg_pool2d(y, 2)))


@pytest.mark.parametrize("is_shared", [False, True])
def test_buffer_updates_after_a_head_are_kept(is_shared: bool) -> None:
    """Regression: running statistics are updated in the tail of a phase; if a head ended inside the phase they were in no segment."""
    model = seeded(lambda: _TwoScales(is_shared=is_shared))
    least = least_budget(model, _SHAPE)
    plain = sft.plan(model, _SHAPE, budget="4GiB", options=sft.Options(strategy="none")).total_bytes
    plans = [sft.plan(model, _SHAPE, budget=least + (plain - least) * i // 12) for i in range(12)]
    in_front = [plan for plan in plans if plan.segments[0].mode == "tiled" and len(plan.segments[0].nodes) < 6]
    assert in_front
    for plan in {plan.segments: plan for plan in (*in_front, plans[0])}.values():
        assert_exact(model, image(*_SHAPE), budget=plan.budget_bytes, input_grad=False, steps=2)
