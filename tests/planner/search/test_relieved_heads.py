"""Tiled heads with values that leave the device while the recomputed tail runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import sft
import sft.api.plan_search
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.materialize import ProjectedPlan
from sft.planner.options import Options
from sft.planner.planner import plan_segments
from sft.planner.problem import PlanningProblem
from sft.planner.search.auto import candidate_grids
from sft.planner.search.relieved_heads import relieved_head_plans
from sft.planner.search.tiled_head import TiledHeadRecompute
from sft.planner.stages import StagedModel
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded
from tests.helpers.stage_chains import deep, problem_of

_SHAPE = (2, 3, 64, 48)
_GPU = DeviceRates("cuda")


class _Block(nn.Module):
    """Residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(12, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return (y + x).relu()


def _residual() -> nn.Module:
    """Residual network with the stem of a ResNet, and dropout."""
    stem = (nn.Conv2d(3, 12, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *(_Block() for _ in range(4)), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3))


class _TwoStems(nn.Module):
    """Two convolutions of the input, which run in one segment, each with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(3, 12, size, padding=size // 2, bias=False) for size in (3, 5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(12) for _ in range(2))
        self.tail = nn.Sequential(*(_Block() for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tail(self.norms[0](self.first(x)).relu() + self.norms[1](self.second(x)).tanh())
        return y


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "batchnorm": lambda: deep(nn.BatchNorm2d),
    "groupnorm": lambda: deep(lambda channels: nn.GroupNorm(4, channels)),
    "residual": _residual,
    "two stems": _TwoStems,
}


def _relieved(problem: PlanningProblem, room_bytes: int) -> list[ProjectedPlan]:
    """All proposals for a room."""
    grids = [next(candidate_grids(problem, Options(), _GPU))]
    heads = TiledHeadRecompute(StagedModel(problem, _GPU), grids, room_bytes)
    return [*relieved_head_plans(problem, heads, room_bytes, problem.limits.num_idle_values)]


def _recomputes_head(plan: ProjectedPlan) -> bool:
    return any(op.kind == "forward" and op.segment == 0 and not op.keep for op in plan.region.schedule)


def _copies(plan: ProjectedPlan) -> bool:
    return any(op.is_copy for op in plan.region.schedule)


@pytest.mark.usefixtures("without_clones")
@pytest.mark.parametrize("is_wanted", [_recomputes_head, _copies], ids=["recomputed", "copied"])
@pytest.mark.parametrize("name", _MODELS)
def test_a_step_is_exact(name: str, is_wanted: Callable[[ProjectedPlan], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    model, wanted = seeded(_MODELS[name]), list[ProjectedPlan]()
    plain_bytes = sft.plan(model.double(), _SHAPE, budget="4GiB", options=sft.Options(strategy="none")).total_bytes

    def relieved(problem: PlanningProblem, budget_bytes: int, *_: Any) -> ProjectedPlan:
        room_bytes = budget_bytes - problem.resources.occupied_bytes
        rooms = (int(share * room_bytes) for share in (0.3, 0.4, 0.5, 0.6, 0.7))
        wanted[:] = [plan for room in rooms for plan in _relieved(problem, room) if is_wanted(plan)][:1]
        return wanted[0]

    monkeypatch.setattr(sft.api.plan_search, "plan_segments", relieved)
    options = sft.Options(host_budget="1GiB")
    report = assert_exact(model, image(*_SHAPE), budget=plain_bytes, options=options, input_grad=False)
    assert report.plan.flops == wanted[0].projection.flops


def test_plans_fit_their_room_and_stay_on_the_device_without_a_host_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(seeded(_residual), _SHAPE, monkeypatch)
    plain_bytes = plan_segments(problem, 2**32, sft.Options(strategy="none")).projection.peak_bytes
    assert problem.resources.host_budget_bytes == 0
    rooms = [int(share * plain_bytes) for share in (0.4, 0.5, 0.6)]
    plans = [(room, plan) for room in rooms for plan in _relieved(problem, room)]
    assert plans and all(plan.projection.peak_bytes <= room and not _copies(plan) for room, plan in plans)


def test_values_of_one_segment_are_recomputed_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(seeded(_TwoStems), _SHAPE, monkeypatch)
    plain_bytes = plan_segments(problem, 2**32, sft.Options(strategy="none")).projection.peak_bytes
    plans = [plan for share in (0.4, 0.5, 0.6) for plan in _relieved(problem, int(share * plain_bytes)) if _recomputes_head(plan)]
    runs = [sum(op.kind == "forward" and op.segment == 0 for op in plan.region.schedule) for plan in plans]
    assert runs and set(runs) == {2}


def test_a_proposal_without_a_plan_gives_no_room_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value between two norms can be neither recomputed nor, without a host budget, copied."""
    problem = problem_of(seeded(lambda: deep(nn.BatchNorm2d)), _SHAPE, monkeypatch)
    assert problem.resources.host_budget_bytes == 0
    room_bytes = plan_segments(problem, 2**32, sft.Options(strategy="none")).projection.peak_bytes // 2
    rooms: list[float] = []
    cheapest = TiledHeadRecompute.cheapest

    def noted(heads: TiledHeadRecompute, tail_room_bytes: float, *arguments: Any, **keywords: Any) -> Any:
        rooms.append(tail_room_bytes)
        return cheapest(heads, tail_room_bytes, *arguments, **keywords)

    monkeypatch.setattr(TiledHeadRecompute, "cheapest", noted)
    grids = [next(candidate_grids(problem, Options(), _GPU))]
    heads = TiledHeadRecompute(StagedModel(problem, _GPU), grids, room_bytes)
    assert not [*relieved_head_plans(problem, heads, room_bytes, (4,))]
    assert len(rooms) > 2 and set(rooms) == {room_bytes}
