"""Selection of plans by measured times; the times are simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.lower.program import Program
from sft.planner.measured.step_timer import TimingMachine, time_step
from sft.planner.problem import PlanningProblem
from sft.runtime.region import Region
from tests.helpers.exactness import assert_exact
from tests.helpers.plans import least_budget

_SHAPE = (1, 3, 96, 64)


def _model() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def _budget(model: nn.Module) -> int:
    """Budget halfway between the smallest plan and plain PyTorch."""
    plain = sft.plan(model, _SHAPE, options=sft.Options(strategy="none")).total_bytes
    return (plain + least_budget(model, _SHAPE)) // 2


class _Judge:
    """Simulated step timer: returns a list of seconds in the order of the calls, and records the timed regions."""

    def __init__(self, best: int | None = None) -> None:
        self.best = best
        self.regions: list[Region] = []

    def __call__(self, problem: PlanningProblem, region: Region, device: torch.device, **options: Any) -> tuple[float, ...] | None:
        if "max_seconds" not in options:
            self.regions.clear()  # the planner's own choice comes first
        self.regions.append(region)
        number = len(self.regions) - 1
        if number and number != self.best:
            return None
        return ((0.5 if number else 1.0) / len(region.schedule),) * len(region.schedule)


def test_the_fastest_of_the_plans_that_fit_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = _model().double()
    budget = _budget(model)
    usual = sft.plan(model, _SHAPE, budget=budget)
    asked = _Judge()
    monkeypatch.setattr("sft.api.plan_search.time_step", asked)
    assert sft.plan(model, _SHAPE, budget=budget, options=sft.Options(profile="measure")).segments == usual.segments
    num_rivals = len(asked.regions) - 1
    assert num_rivals >= 3
    chosen = []
    for best in range(1, num_rivals + 1):
        monkeypatch.setattr("sft.api.plan_search.time_step", _Judge(best))
        plan = sft.plan(model, _SHAPE, budget=budget, options=sft.Options(profile="measure"))
        assert plan.total_bytes <= budget and plan.projected_seconds == pytest.approx(0.5)
        assert (plan.segments, plan.order) != (usual.segments, usual.order)
        chosen.append((plan.segments, plan.order))
    assert len(set(chosen)) == num_rivals
    # The tiles of strategy sft are among them.
    assert any(segment.halo == "recompute" for segments in (usual.segments, *(each for each, _ in chosen)) for segment in segments)
    monkeypatch.setattr("sft.api.plan_search.time_step", _Judge(1))
    report = assert_exact(model, torch.randn(_SHAPE), budget=budget, options=sft.Options(profile="measure"), to_the_byte=True)
    assert report.plan.projected_seconds is not None


@pytest.mark.parametrize("options", [{"strategy": "none"}, {"tile": (16, None)}, {"strategy": "sqrt"}])
def test_forced_options_have_no_timed_alternatives(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _Judge()
    monkeypatch.setattr("sft.api.plan_search.time_step", asked)
    sft.plan(_model(), _SHAPE, options=sft.Options(profile="measure", **options))
    assert len(asked.regions) == 1


def test_a_slower_step_is_not_timed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _Judge()
    seen: list[tuple[PlanningProblem, Region]] = []

    def note(problem: PlanningProblem, region: Region, device: torch.device, **options: Any) -> tuple[float, ...] | None:
        seen.append((problem, region))
        return asked(problem, region, device, **options)

    monkeypatch.setattr("sft.api.plan_search.time_step", note)
    sft.plan(_model(), _SHAPE, options=sft.Options(profile="measure", tile=(8, None)))
    problem, region = seen[0]
    ran: list[Program] = []

    def slow(_: TimingMachine, program: Program, first: Program | None) -> float:
        ran.append(program)
        return 1000.0

    monkeypatch.setattr(TimingMachine, "_program_seconds", slow)
    assert sum(time_step(problem, region, torch.device("cpu"))) > 1000 * (len(ran) - 1)
    num_programs = len(ran)
    ran.clear()
    assert time_step(problem, region, torch.device("cpu"), max_seconds=2500.0) is None
    assert len(ran) == 3 < num_programs
