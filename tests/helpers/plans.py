"""Queries of plans in tests."""

from __future__ import annotations

from tests.helpers.exactness import ExactReport

__all__ = ["assert_tiled"]


def assert_tiled(report: ExactReport, *operators: str) -> None:
    """Assert that the plan has tiled segments with these operators in them, by parts of their names."""
    names = {name for segment in report.plan.segments if segment.mode == "tiled" for name in segment.nodes}
    for operator in operators:
        assert any(operator in name for name in names), f"{operator} is not among the tiled operators {sorted(names)}"
