"""One model asked again and again: plans for many budgets and wishes, on one capture."""

from __future__ import annotations

from typing import Any

from torch import nn

from sft.compile import compile
from sft.engine import Engine
from sft.errors import InputError
from sft.options import Options
from sft.plan.types import Plan

__all__ = ["PlanningSession"]

_UNLIMITED_BYTES = 2**62


class PlanningSession:
    """A model at one size, captured once.

    Args:
        model: as for `sft.plan`.
        input_shape: as for `sft.plan`; every extent is needed.
        compile_arguments: others of `sft.compile`, but for plan, budget and options.

    Attributes:
        plain: the plan that keeps everything, whatever it needs.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: the model cannot be compiled.
    """

    def __init__(self, model: nn.Module, input_shape: Any, **compile_arguments: Any) -> None:
        # Nothing is refused for want of memory.
        net = compile(model, input_shape, budget=_UNLIMITED_BYTES, options=Options(strategy="none"), **compile_arguments)
        self._engine: Engine = net._sft_engine
        plain = self._engine.last_plan
        if plain is None:
            raise InputError(f"every extent is needed to plan, got input_shape {input_shape!r}")
        self.plain: Plan = plain

    def plan(self, budget_bytes: int, options: Options) -> Plan:
        """The plan for a budget and wishes.

        Raises:
            BudgetError, UnsupportedError: as `sft.plan`.
        """
        return self._engine.planned_again(budget_bytes, options)
