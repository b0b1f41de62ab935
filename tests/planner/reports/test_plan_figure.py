"""Figures of plans: bars and curves equal the timeline, and files are written atomically."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sft
from sft.planner.reports.plan_figure import plan_figure
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.models import TinyUNet, seeded
from tests.helpers.plans import least_budget

pytest.importorskip("matplotlib")
captures = one_capture_a_model()

_SHAPE = (2, 3, 40, 24)


def _tiled() -> sft.Plan:
    return sft.plan(seeded(TinyUNet), _SHAPE, budget="64MiB", options=sft.Options(tile=(8, None)))


def test_a_recomputing_plan_is_drawn_op_by_op() -> None:
    model, options = seeded(TinyUNet), sft.Options(strategy="revolve")
    plan = sft.plan(model, _SHAPE, budget=least_budget(model, _SHAPE, options=options), options=options)
    memory, moves = plan_figure(plan).axes
    (curve, budget) = memory.get_lines()
    assert np.asarray(budget.get_ydata()).tolist() == [plan.budget_bytes / 2**10] * 2  # in KiB
    seconds = np.asarray(curve.get_xdata())
    assert len(seconds) == 2 * len(plan.timeline.entries) and seconds[-1] == pytest.approx(plan.estimated_seconds)
    heights = [np.asarray(path.vertices)[:, 1].max() for fill in memory.collections for path in fill.get_paths()]
    assert max(heights) == pytest.approx(plan.total_bytes / 2**10) and min(heights) == pytest.approx(plan.resident_bytes / 2**10)
    legend = moves.get_legend()
    assert legend is not None
    assert {text.get_text() for text in legend.get_texts()} == {"loss", "whole, forward", "whole, recompute", "whole, backward"}
    assert len(moves.patches) == len(plan.timeline.entries) - 1
    assert "estimated" in moves.get_xlabel()


def test_measured_seconds_are_drawn_if_present() -> None:
    plan = _tiled()
    timed = replace(plan, timeline=plan.timeline.measured([0.5] * len(plan.timeline.entries)))
    memory, moves = plan_figure(timed).axes
    assert moves.get_xlim() == (0, 0.5 * len(plan.timeline.entries)) and moves.get_xlabel() == "measured seconds"
    assert memory.get_ylim()[1] < timed.budget_bytes / 2**10  # with a line so far above, all else would be too small
    assert {bar.get_width() for bar in moves.patches} == {0.5}  # type: ignore[attr-defined]  # they are rectangles


def test_bars_of_many_segments_can_be_seen() -> None:
    """A bar has at least a fiftieth of the panel's height and 1/500 of its width, and no outline in another colour."""
    blocks: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(35):
        blocks += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    with torch.device("meta"):
        model = nn.Sequential(*blocks)
    plan = sft.plan(model.to("meta"), (1, 3, 512, 512), budget="64MiB", device="cuda", options=sft.Options(cuda_graphs=False))
    assert len(plan.segments) > 60
    _, moves = plan_figure(plan).axes
    width, height = moves.get_xlim()[1], moves.get_ylim()[1] - moves.get_ylim()[0]
    bars: Any = [bar for bar in moves.patches if bar.get_y() > 0]  # type: ignore[attr-defined]  # they are rectangles
    assert bars and all(bar.get_height() > 0.015 * height and bar.get_width() > 0.0019 * width for bar in bars)
    assert all(bar.get_edgecolor()[:3] == bar.get_facecolor()[:3] for bar in bars)


def test_files_are_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _tiled()
    plan.plot(tmp_path / "plan.png")
    plan.plot(str(tmp_path / "plan.svg"))
    png = (tmp_path / "plan.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 5000 and b"<svg" in (tmp_path / "plan.svg").read_bytes()
    for name in ("plan.strange", "plan"):
        with pytest.raises(sft.InputError, match=rf"{name}: .*\.png"):
            plan.plot(tmp_path / name)
    with pytest.raises(sft.SourceError, match="nowhere"):
        plan.plot(tmp_path / "nowhere" / "plan.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(sft.InputError, match=r"pip install .*\[plot\]"):
        plan.plot(tmp_path / "plan.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.png", "plan.svg"]
    assert (tmp_path / "plan.png").read_bytes() == png


def test_a_plan_without_operators_is_not_drawn(tmp_path: Path) -> None:
    plan = replace(_tiled(), timeline=sft.Timeline(entries=()))
    with pytest.raises(sft.InputError, match="nothing to draw"):
        plan.plot(tmp_path / "plan.png")
    assert not [*tmp_path.iterdir()]


def test_a_loaded_plan_is_drawn(tmp_path: Path) -> None:
    sft.Plan.from_json(sft.plan(nn.Conv2d(3, 2, 3), _SHAPE).to_json()).plot(tmp_path / "plan.pdf")
    assert (tmp_path / "plan.pdf").read_bytes().startswith(b"%PDF")
