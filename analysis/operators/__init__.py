"""The table of operators: what each one means for streaming."""

from __future__ import annotations

from sft.analysis.operators.base import Border, Operator, Role
from sft.analysis.operators.reductions import STATISTICS
from sft.analysis.operators.table import (
    DIMENSION_ARGUMENTS,
    CASTS,
    ELEMENTWISE,
    WHOLE,
    differentiable_operands,
    operator_of,
    refusal_reason,
    operator_table,
    window_of,
)
from sft.analysis.operators.windows import Window

__all__ = [
    "DIMENSION_ARGUMENTS",
    "CASTS",
    "ELEMENTWISE",
    "STATISTICS",
    "WHOLE",
    "Border",
    "Operator",
    "Role",
    "Window",
    "differentiable_operands",
    "operator_of",
    "refusal_reason",
    "operator_table",
    "window_of",
]
