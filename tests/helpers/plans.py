"""Queries of plans in tests."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

import sft
from tests.helpers.exactness import ExactReport

__all__ = ["assert_tiled", "least_budget"]


def least_budget(model: nn.Module, input_shape: Any, options: sft.Options | None = None, **arguments: Any) -> int:
    """Smallest budget in bytes, from the refusal of one byte; plans with other settings are not tried."""
    with patch("sft.api.engine.propose", lambda error, *_: error), pytest.raises(sft.BudgetError) as refused:
        sft.plan(model, input_shape, budget=1, options=options, **arguments)
    return refused.value.needed_bytes


def assert_tiled(report: ExactReport, *operators: str) -> None:
    """Assert that the plan has tiled segments with these operators in them, by parts of their names."""
    names = {name for segment in report.plan.segments if segment.mode == "tiled" for name in segment.nodes}
    for operator in operators:
        assert any(operator in name for name in names), f"{operator} is not among the tiled operators {sorted(names)}"
