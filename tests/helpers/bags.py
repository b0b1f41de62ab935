"""Bags of tiles: vision transformers and poolings of the benchmarks, and plans that take some tiles at a time."""

from __future__ import annotations

from typing import Literal

import pytest
from harness.bags import AttentionBag, VisionTransformer

from sft.planner.cost.device_rates import DeviceRates
from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.options import Options
from sft.planner.problem import PlanningProblem
from sft.planner.search import auto
from sft.planner.search.idle_values import idle_gaps, with_copies
from sft.planner.search.samples import SamplePlans
from sft.planner.search.window_plans import WindowPlans, has_window_runs

__all__ = ["AttentionBag", "Copies", "VisionTransformer", "take_samples", "take_windows"]

#: Copies of idle values to the host: none, those that overlap with computation, or those that free most memory.
Copies = Literal["none", "ahead", "tight"]


def take_samples(monkeypatch: pytest.MonkeyPatch, num_samples: int, num_checkpoints: int = 0) -> None:
    """Let every search return the plan with this number of samples at a time and of checkpoints within them."""

    def fastest(search: auto.AutoSearch, room_bytes: int) -> ProjectedPlan:
        problem: PlanningProblem = search._problem
        return SamplePlans(problem, Options(), DeviceRates("cpu")).plan(num_samples, num_checkpoints)

    monkeypatch.setattr(auto.AutoSearch, "fastest", fastest)


def take_windows(
    monkeypatch: pytest.MonkeyPatch,
    num_windows: int,
    height: int = 0,
    num_checkpoints: int = 0,
    *,
    repeats: bool = False,
    copies: Copies = "none",
) -> None:
    """Let every search return the plan with this number of windows at a time, strip height of the grid and checkpoints within a chunk.

    With copies, all values that wait for their next use wait on the host.
    """

    def fastest(search: auto.AutoSearch, room_bytes: int) -> ProjectedPlan:
        assert has_window_runs(search._problem), "the model has no windows"
        grid = next(auto.candidate_grids(search._problem, Options(), DeviceRates("cpu")))
        plans, strips = WindowPlans(search._problem, grid, DeviceRates("cpu")), min(height, len(grid.axes.strip_rows) - 1)
        plan = plans.plan(num_windows, strips, 0, num_checkpoints, repeats=repeats)
        gaps = [gap for each in idle_gaps(plan.region).values() for gap in each]
        if copies == "none" or not gaps:
            return plan
        return materialize(search._problem, plan.choices, with_copies(plan.region.schedule, gaps, ahead=copies == "ahead"))

    monkeypatch.setattr(auto.AutoSearch, "fastest", fastest)
