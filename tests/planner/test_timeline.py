"""Timeline of a plan: bytes and FLOPs equal the plan's, entries equal its schedule, and JSON round-trips."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.planner.problem import PlanningProblem
from sft.planner.projection import Projection, ScheduleOpRecord, project_step
from sft.planner.timeline import Timeline, TimelineEntry
from sft.runtime.region import Region
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.models import TinyUNet, seeded
from tests.helpers.plans import least_budget

captures = one_capture_a_model("options", "training")

_SHAPE = (2, 3, 40, 24)


class _Model(nn.Module):
    """Two phases of strips, and a tail on full tensors."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3))
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.body(x))
        return output


def _runs(lap: ScheduleOpRecord) -> Counter[tuple[int, int, int]]:
    """Number of runs of each program. Programs that finish a reduction are lowered anew each time, so they are compared by content."""
    runs: Counter[tuple[int, int, int]] = Counter()
    for program, count in lap.runs:
        runs[len(program.instructions), program.flops, program.peak_bytes] += count
    return runs


_OPTIONS: list[dict[str, Any]] = [
    {"tile": (8, None)},
    {"tile": (8, 10), "batch_tile": 1},
    {"tile": (8, None), "state_slots": 2},
    {"strategy": "none"},
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", _OPTIONS, ids=str)
def test_peak_and_flops_of_a_timeline_are_the_plans(options: dict[str, Any], training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = import_module("sft.planner.materialize")  # `sft.plan` is the function

    def both(problem: PlanningProblem, region: Region) -> Projection:
        summed, walked = project_step(problem, region), project_step(problem, region, exactly=True)
        assert summed.op_records == walked.op_records
        assert [_runs(lap) for lap in summed.op_records] == [_runs(lap) for lap in walked.op_records]
        return summed

    monkeypatch.setattr(carried, "project_step", both)
    with torch.set_grad_enabled(training):
        plan = sft.plan(_Model(), _SHAPE, options=sft.Options(**options))
    timeline = plan.timeline
    assert timeline.peak_bytes == plan.projected_peak_bytes
    assert sum(entry.flops for entry in timeline.entries) == plan.flops == sum(segment.flops for segment in plan.segments)
    numbers = range(len(plan.segments))
    forward, backward = [f"F{i}+" if training else f"F{i}" for i in numbers], [f"B{i}" for i in reversed(numbers)]
    assert [entry.move for entry in timeline.entries] == ([*forward, "L", *backward] if training else forward)
    assert all(before.end_bytes == after.begin_bytes for before, after in zip(timeline.entries, timeline.entries[1:], strict=False))
    assert timeline.entries[0].begin_bytes == 2 * 3 * 40 * 24 * 4
    assert plan.estimated_seconds == timeline.seconds > 0 and plan.projected_seconds is None and not timeline.is_measured
    assert [cost.flops for cost in timeline.costs()] == [segment.flops for segment in plan.segments]


def test_recomputations_differ_from_first_runs() -> None:
    model, options = seeded(TinyUNet), sft.Options(strategy="revolve")
    plan = sft.plan(model, _SHAPE, budget=least_budget(model, _SHAPE, options=options), options=options)
    timeline = plan.timeline
    assert tuple(entry.move for entry in timeline.entries) == plan.order
    assert timeline.peak_bytes == plan.projected_peak_bytes
    again = [entry for entry, kind in zip(timeline.entries, timeline.kinds, strict=True) if kind == "recompute"]
    assert len(again) == sum(segment.num_forwards - 1 for segment in plan.segments) > 0
    assert sum(entry.flops for entry in timeline.entries) == plan.flops
    assert sum(entry.flops for entry in again) == plan.flops - plan.plain_flops
    costs = timeline.costs()
    assert sum(cost.recompute_seconds for cost in costs) == pytest.approx(sum(entry.seconds for entry in again))
    assert sum(cost.share for cost in costs) == pytest.approx(1)


def _timeline(*, measured: bool = False) -> Timeline:
    """Two segments, of which the first runs again."""
    rows = [("F0", 1.0, 30), ("F1+", 2.0, 60), ("L", 0.0, 0), ("B1", 3.0, 120), ("F0+", 1.0, 30), ("B0", 2.0, 60)]
    entries = (
        TimelineEntry(move=move, begin_bytes=8, peak_bytes=9, end_bytes=8, flops=flops, estimated_seconds=seconds)
        for move, seconds, flops in rows
    )
    timeline = Timeline(entries=tuple(entries))
    return timeline.measured([10 * entry.estimated_seconds for entry in timeline.entries]) if measured else timeline


def test_costs_are_sums_over_moves() -> None:
    timeline = _timeline()
    first, second = timeline.costs()
    assert (first.forward_seconds, first.recompute_seconds, first.backward_seconds, first.flops) == (1, 1, 2, 120)
    assert (second.forward_seconds, second.recompute_seconds, second.backward_seconds, second.flops) == (2, 0, 3, 180)
    assert (first.share, second.share) == (4 / 9, 5 / 9) and first.flops_per_second == 30
    assert [*timeline.spans] == [(0, 1), (1, 3), (3, 3), (3, 6), (6, 7), (7, 9)]
    assert timeline.kinds == ("forward", "forward", "loss", "backward", "recompute", "backward")
    assert Timeline(entries=()).costs() == () and Timeline(entries=()).peak_bytes == 0


def test_idle_seconds_are_waits_for_copies() -> None:
    assert _timeline().idle_seconds == 0
    rows: list[tuple[str, float, int, tuple[str, ...]]] = [
        ("F0+", 1.0, 0, ()),
        (">x", 5.0, 8, ()),  # from 1 to 6
        ("F1+", 2.0, 0, ()),
        ("~x", 0.0, 0, ()),  # from 3, complete at 6: three seconds
        ("L", 0.0, 0, ()),
        ("<x", 4.0, 8, ()),  # from 6 to 10
        ("B1", 3.0, 0, ()),
        ("B0", 1.0, 0, ("x",)),  # at 9, begins at 10: one more
    ]
    entries = (
        TimelineEntry(
            move=move, begin_bytes=8, peak_bytes=9, end_bytes=8, flops=0, estimated_seconds=seconds, copied_bytes=copied, waits_for=waits
        )
        for move, seconds, copied, waits in rows
    )
    timeline = Timeline(entries=tuple(entries))
    assert timeline.seconds == 11 and timeline.idle_seconds == 4


def test_measured_seconds_are_not_mixed_with_estimated_ones() -> None:
    timeline = _timeline(measured=True)
    assert timeline.is_measured and timeline.seconds == 90 and timeline.estimated_seconds == 9
    half = Timeline(entries=(*timeline.entries[:3], *_timeline().entries[3:]))
    assert not half.is_measured and half.seconds == 9
    with pytest.raises(ValueError):
        timeline.measured([1.0])


def test_a_timeline_survives_json_and_is_frozen() -> None:
    plan = sft.plan(_Model(), _SHAPE, options=sft.Options(tile=(8, None)))
    measured = replace(plan, timeline=plan.timeline.measured([0.1 * number for number in range(len(plan.timeline.entries))]))
    for each in (plan, measured):
        assert sft.Plan.from_json(each.to_json()) == each
    with pytest.raises(FrozenInstanceError):
        plan.timeline.entries = ()  # type: ignore[misc]  # what must raise
    damages: list[dict[str, Any]] = [{"peak_bytes": 1}, {"move": "X3"}, {"move": None}, {"peak_bytes": "much"}, {"other": 1}]
    for damage in damages:
        data = json.loads(plan.to_json())
        data["timeline"]["entries"][0].update(damage)
        with pytest.raises(sft.InputError, match=r"sft\.plan|has fields"):
            sft.Plan.from_json(json.dumps(data))
    data = json.loads(plan.to_json())
    data["timeline"] = None
    with pytest.raises(sft.InputError, match=r"sft\.plan"):
        sft.Plan.from_json(json.dumps(data))


def test_explain_lists_seconds_of_segments() -> None:
    plan = sft.plan(_Model(), _SHAPE, options=sft.Options(tile=(8, None)))
    assert "estimated time" in plan.explain() and "Seconds of a step" not in plan.explain()
    text = plan.explain(costs=True)
    assert "Seconds of a step, estimated" in text and "GFLOP/s" not in text
    table = text[text.index("Seconds of a step") : text.index("\n\nSegment 0")].splitlines()[2:-1]
    assert [line.split()[0] for line in table] == [str(number) for number in range(len(plan.segments))]
    timed = replace(plan, timeline=plan.timeline.measured([1.0] * len(plan.timeline.entries)), projected_seconds=5.0)
    text = timed.explain(costs=True)
    assert "Seconds of a step, measured" in text and "GFLOP/s" in text and "estimated" not in text
