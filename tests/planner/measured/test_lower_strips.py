"""Plans in lower strips: the same segments and schedule, in whole strides."""

from __future__ import annotations

import pytest

import sft
from sft.planner.measured.fitted_plan import FittedPlan
from sft.planner.measured.lower_strips import with_lower_strips
from sft.planner.planner import plan_segments
from tests.helpers.models import seeded
from tests.helpers.stage_chains import Normed, problem_of

_SHAPE = (1, 3, 128, 64)


def _fitted(rows: int, patch: pytest.MonkeyPatch) -> FittedPlan:
    problem = problem_of(seeded(Normed), _SHAPE, patch)
    return FittedPlan(problem, plan_segments(problem, 2**32, sft.Options(tile=(rows, None))))


def test_strips_are_lower_and_all_else_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = _fitted(64, monkeypatch)
    variants = [*with_lower_strips(fitted)]
    rows = [[choice.strip_rows for choice in each.projected.choices if choice.mode == "tiled"] for each in (fitted, *variants)]
    assert len(variants) == 2
    for share, lower in zip((0.75, 0.625), rows[1:], strict=True):
        assert lower == [int(share * height) for height in rows[0]]
    for variant in variants:
        assert variant.projected.region.schedule == fitted.projected.region.schedule
        assert [choice.nodes for choice in variant.projected.choices] == [choice.nodes for choice in fitted.projected.choices]
        assert variant.projected.projection.peak_bytes < fitted.projected.projection.peak_bytes


def test_the_lowest_strips_have_no_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [*with_lower_strips(_fitted(1, monkeypatch))]
