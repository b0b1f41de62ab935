"""The operator table: streaming rules of each operator (access map, extent, padding, dimension map)."""

from __future__ import annotations

from sft.analysis.ir.ops.base import Operator, Role
from sft.analysis.ir.ops.reductions import STATISTICS
from sft.analysis.ir.ops.table import (
    CASTS,
    DIMENSION_ARGUMENTS,
    ELEMENTWISE,
    WHOLE,
    differentiable_operands,
    operator_of,
    operator_table,
    refusal_reason,
    window_of,
)
from sft.analysis.ir.ops.windows import Window

__all__ = [
    "CASTS",
    "DIMENSION_ARGUMENTS",
    "ELEMENTWISE",
    "STATISTICS",
    "WHOLE",
    "Operator",
    "Role",
    "Window",
    "differentiable_operands",
    "operator_of",
    "operator_table",
    "refusal_reason",
    "window_of",
]
