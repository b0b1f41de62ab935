"""Sweeps over budgets: rows agree with `sft.plan`, within every budget, and the model is captured once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import sft
import sft.api.capture_cache
from sft.api.pareto import TradeoffRow, tradeoff_figure
from tests.helpers.capture_cache import remembered_captures
from tests.helpers.plans import least_budget

_SHAPE = (2, 3, 40, 24)
_STRATEGIES = ("auto", "none")


def _model() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Captured models."""
    seen: list[object] = []
    capture: Callable[..., Any] = sft.api.capture_cache.capture  # type: ignore[attr-defined]  # imported there

    def note(model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        seen.append(model)
        return capture(model, *arguments, **keywords)

    monkeypatch.setattr(sft.api.capture_cache, "capture", note)
    return seen


def test_rows_match_the_plans(captured: list[object], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = _model()
    rows = sft.pareto(model, _SHAPE, num_budgets=3, strategies=_STRATEGIES, path=tmp_path / "front.png")
    assert len(captured) == 1 and (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
    by_name = {name: [row for row in rows if row.strategy == name] for name in _STRATEGIES}
    assert [row.strategy for row in rows] == [name for name, points in by_name.items() for _ in points]
    (plain,) = by_name["none"]
    assert plain.redundancy == 1 and plain.total_bytes == plain.budget_bytes
    for points in by_name.values():
        assert all(row.total_bytes <= row.budget_bytes for row in points)
        assert all(before.budget_bytes > after.budget_bytes and before.flops <= after.flops for before, after in pairwise(points))
    assert len(by_name["auto"]) >= 3 and by_name["auto"][-1].total_bytes < plain.total_bytes
    row = by_name["auto"][1]
    with remembered_captures():
        for name, points in by_name.items():  # the last one is the smallest budget of the strategy
            assert points[-1].budget_bytes == least_budget(model, _SHAPE, options=sft.Options(strategy=name))
        plan = sft.plan(model, _SHAPE, budget=row.budget_bytes)
    assert (plan.total_bytes, plan.flops, plan.plain_flops) == (row.total_bytes, row.flops, row.plain_flops)
    assert row.seconds == row.estimated_seconds == plan.estimated_seconds and row.projected_seconds is None


def test_one_strategy_and_one_budget_need_no_list() -> None:
    rows = sft.pareto(_model(), _SHAPE, budgets="1MiB", strategies="auto")
    assert rows == sft.pareto(_model(), _SHAPE, budgets=["1MiB"], strategies=("auto",)) and [row.strategy for row in rows] == ["auto"]
    assert sft.pareto(_model(), _SHAPE, budgets=2**20, strategies="auto") == rows


def test_a_list_of_budgets_replaces_the_default_and_infeasible_strategies_are_left_out() -> None:
    with remembered_captures():
        plain_bytes = sft.plan(_model(), _SHAPE, options=sft.Options(strategy="none")).total_bytes
        budgets: list[int | str] = [plain_bytes - 1, f"{plain_bytes}B", plain_bytes]
        rows = sft.pareto(_model(), _SHAPE, budgets=budgets, strategies=("none", "auto"))
        points = [(row.strategy, row.budget_bytes) for row in rows]
        assert points == [("none", plain_bytes), ("auto", plain_bytes), ("auto", plain_bytes - 1)]
        with pytest.raises(sft.BudgetError, match="10 B") as refused:
            sft.pareto(_model(), _SHAPE, budgets=[10])
        with pytest.raises(sft.BudgetError) as least:
            sft.plan(_model(), _SHAPE, budget=10)
    assert refused.value.needed_bytes == least.value.needed_bytes < plain_bytes


def test_plans_of_a_sweep_may_be_timed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU())
    (row,) = sft.pareto(model, _SHAPE, budgets=["1MiB"], strategies=("auto",), options=sft.Options(profile="measure"))
    assert row.projected_seconds is not None and row.seconds == row.projected_seconds > 0


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"strategies": ()}, "strategies is empty"),
        ({"strategies": ("fastest",)}, "strategy 'fastest'"),
        ({"strategies": "fastest"}, "strategy 'fastest'"),
        ({"budgets": "much"}, "'much'"),
        ({"num_budgets": 1}, "num_budgets 1"),
        ({"num_budgets": "5"}, "num_budgets '5'"),
        ({"strategies": None}, "strategies is None, a NoneType: give a list"),
        ({"budgets": {"1GiB": 1}}, "budgets is .* a dict: give a list"),
        ({"budgets": -1e9}, "must be positive"),
        ({"path": 3}, "the picture: its path is 3, an int"),
        ({"path": b"a.png"}, "the picture: its path is b'a.png'"),
        ({"path": "a\0.png"}, "without zero bytes"),
        ({"budgets": ["much"]}, "much"),
        ({"budgets": []}, "budgets is empty"),
        ({"path": "front.strange"}, r"front\.strange.*\.png"),
        ({"path": "front"}, r"front.*\.png"),
        ({"budget": "1GiB"}, "budget"),
        ({"options": sft.Options(tile=(8, None))}, "tile is about strips"),
    ],
)
def test_mistakes_are_refused_before_anything_is_planned(wishes: dict[str, Any], words: str, captured: list[object]) -> None:
    with pytest.raises(sft.InputError, match=words):
        sft.pareto(nn.ReLU(), _SHAPE, **wishes)
    assert not captured


def test_a_sweep_needs_every_extent_and_a_library_to_draw(monkeypatch: pytest.MonkeyPatch, captured: list[object]) -> None:
    with pytest.raises(sft.InputError, match="every extent"):
        sft.pareto(nn.ReLU(), (1, 3, None, 8))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(sft.InputError, match=r"pip install .*\[plot\]"):
        sft.pareto(nn.ReLU(), _SHAPE, path="front.png")
    assert not captured


def test_curves_are_drawn_over_bytes() -> None:
    pytest.importorskip("matplotlib")
    rows = [
        TradeoffRow(
            strategy=name,
            budget_bytes=4 * 2**30,
            total_bytes=total_gib * 2**30,
            flops=flops,
            plain_flops=10,
            estimated_seconds=flops / 10,
            projected_seconds=None,
        )
        for name, total_gib, flops in [("auto", 1, 20), ("auto", 2, 15), ("none", 3, 10)]
    ]
    (axes,) = tradeoff_figure(rows, plain_seconds=0.5).axes
    first, second = axes.get_lines()
    assert np.asarray(first.get_xydata()).tolist() == [[1, 4], [2, 3]]
    assert np.asarray(second.get_xydata()).tolist() == [[3, 2]]
    assert axes.get_yscale() == "linear"
    (axes,) = tradeoff_figure([*rows, replace(rows[0], total_bytes=2**28, estimated_seconds=100.0)]).axes
    assert axes.get_yscale() == "log"
    (axes,) = tradeoff_figure(rows, plain_seconds=0.5).axes
    assert "plain" in axes.get_ylabel() and "estimated" in axes.get_title()
