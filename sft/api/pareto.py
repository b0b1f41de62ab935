"""Pareto front of time against memory: plans for decreasing budgets.

A plan fits one budget and keeps no model, so it cannot be adapted to another budget. ``sft.pareto`` takes the arguments of ``sft.plan``,
captures the model once (a :class:`PlanningSession`), and plans for each budget and strategy.

Default budgets form a geometric sequence, from plain PyTorch's need down to the smallest budget that each strategy supports; every curve
ends at its own minimum.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import nn

from sft.api.compile import compile
from sft.api.compiled_handle import of
from sft.common.byte_units import is_integer, parse_bytes
from sft.common.errors import BudgetError, InputError, SftError, UnsupportedError, typed
from sft.planner.options import STRATEGIES, Options
from sft.planner.plan import Plan
from sft.solvers.plot import ParetoPoint, check_drawable, pareto_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PlanningSession", "TradeoffRow", "pareto", "tradeoff_figure"]

_UNLIMITED_BYTES = 2**62


class PlanningSession:
    """A model at one size, captured once, for plans with many budgets and options.

    Args:
        model: as for `sft.plan`.
        input_shape: as for `sft.plan`; every extent is needed.
        compile_arguments: other arguments of `sft.compile`, except plan, budget and options.

    Attributes:
        plain: the plan that keeps all activations, for an unlimited budget.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: the model cannot be compiled.
    """

    def __init__(self, model: nn.Module, input_shape: Any, **compile_arguments: Any) -> None:
        # No budget: the capture must not fail for lack of memory.
        net = compile(model, input_shape, budget=_UNLIMITED_BYTES, options=Options(strategy="none"), **compile_arguments)
        self._engine = of(net).engine
        plain = self._engine.last_plan
        if plain is None:
            raise InputError(f"every extent is needed to plan, got input_shape {input_shape!r}")
        self.plain: Plan = plain

    def plan(self, budget_bytes: int, options: Options) -> Plan:
        """The plan for a budget and options.

        Raises:
            BudgetError, UnsupportedError: as `sft.plan`.
        """
        return self._engine.replan(budget_bytes, options)


#: Ratio of the longest to the shortest time from which the plot has a logarithmic scale.
_LOG_SCALE_RATIO = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffRow:
    """Bytes and time of one strategy at one budget.

    Attributes:
        strategy: its name.
        budget_bytes: the budget.
        total_bytes: bytes of the plan: resident bytes and the projected peak.
        flops: FLOPs of a step.
        plain_flops: FLOPs of a step of plain PyTorch.
        estimated_seconds: of a step, at rates of the kind of device; see `sft.Plan.estimated_seconds`.
        projected_seconds: of a step, measured with ``Options(profile="measure")``; otherwise ``None``.
    """

    strategy: str
    budget_bytes: int
    total_bytes: int
    flops: int
    plain_flops: int
    estimated_seconds: float
    projected_seconds: float | None

    @property
    def redundancy(self) -> float:
        """FLOPs relative to plain PyTorch."""
        return self.flops / self.plain_flops if self.plain_flops else 1.0

    @property
    def seconds(self) -> float:
        """Measured seconds if available, otherwise estimated ones."""
        return self.estimated_seconds if self.projected_seconds is None else self.projected_seconds


def pareto(
    model: nn.Module,
    input_shape: Any,
    *,
    budgets: int | str | Sequence[int | str] | None = None,
    num_budgets: int = 6,
    strategies: str | Iterable[str] = ("auto", "none"),
    options: Options | None = None,
    path: str | os.PathLike[str] | None = None,
    **compile_arguments: Any,
) -> tuple[TradeoffRow, ...]:
    """Plan for several budgets, and plot time against memory.

    Args:
        model: as for `sft.plan`.
        input_shape: as for `sft.plan`; every extent is needed.
        budgets: device memory, each in bytes or as ``"11GiB"``; or one of them. Default: `None`, ``num_budgets`` from plain PyTorch's need
            down to the smallest that works.
        num_budgets: number of default budgets, at least two.
        strategies: names of strategies, see `sft.Options`; or one name.
        options: other options of the plans. With ``profile="measure"`` each plan is timed, in the memory that it plans with: give budgets
            that the device has. Default: `None`
        path: a file for the plot, with an extension that matplotlib supports. Default: `None`, no plot
        compile_arguments: other arguments of `sft.compile`.

    Returns:
        A row for each strategy and budget for which it has a plan, by strategy and from the largest budget to the smallest.

    Raises:
        InputError: an argument is wrong; matplotlib is missing or does not support the extension.
        BudgetError: no strategy has a plan for any of the budgets.
        UnsupportedError: the model cannot be compiled.
        SourceError: the plot cannot be written.
    """
    base = options or Options()
    names = _entries("strategies", (strategies,) if isinstance(strategies, str) else strategies, "('auto', 'revolve')")
    requests = [replace(base, strategy=name) for name in dict.fromkeys(names)]  # refuses a wrong name before planning
    if not requests:
        raise InputError(f"strategies is empty: name one of {', '.join(STRATEGIES)}")
    budget_list: list[int] | None = None
    if budgets is not None:
        entries = _entries("budgets", [budgets] if isinstance(budgets, (str, Real)) else budgets, "['4GiB', '11GiB']")
        budget_list = sorted(set(map(parse_bytes, entries)), reverse=True)
    if budget_list is not None and not budget_list:
        raise InputError("budgets is empty: name some, or leave it out")
    if budget_list is None and not (is_integer(num_budgets) and num_budgets >= 2):
        raise InputError(f"num_budgets {num_budgets!r}: choose two or more, or give budgets")
    if path is not None:
        check_drawable(path)  # planning takes long: report obstacles to plotting first
    sweep = _BudgetSweep(model, input_shape, compile_arguments)
    chosen = sweep.default_budgets(requests, num_budgets) if budget_list is None else [budget_list] * len(requests)
    rows = tuple(
        row for request, budgets_of_request in zip(requests, chosen, strict=True) for row in sweep.rows(request, budgets_of_request)
    )
    if not rows:
        raise min(sweep.refusals, key=lambda refusal: refusal.needed_bytes if isinstance(refusal, BudgetError) else math.inf)
    if path is not None:
        # Estimates are only meaningful relative to another estimate.
        plain_seconds = None if _is_measured(rows) else sweep.plain.estimated_seconds
        save_figure(tradeoff_figure(rows, plain_seconds=plain_seconds), path)
    return rows


def _entries(name: str, values: Any, example: str) -> list[Any]:
    """The entries of an argument that is a sequence."""
    if not isinstance(values, Iterable) or isinstance(values, (bytes, Mapping)):
        raise InputError(f"{name} is {values!r}, {typed(values)}: give a list, as {example}")
    return list(values)


def tradeoff_figure(rows: Sequence[TradeoffRow], *, plain_seconds: float | None = None) -> Figure:
    """Plot each strategy's best times over bytes.

    Args:
        rows: rows of a sweep.
        plain_seconds: time of plain PyTorch, by the same clock; times are then multiples of it. Default: `None`
    """
    points = [ParetoPoint(strategy=row.strategy, seconds=row.seconds, peak_bytes=row.total_bytes) for row in rows]
    figure = pareto_figure(points, plain_seconds=plain_seconds, title="measured" if _is_measured(rows) else "estimated from FLOPs")
    if max(row.seconds for row in rows) > _LOG_SCALE_RATIO * min(row.seconds for row in rows):
        figure.axes[0].set_yscale("log")  # strips of one or two rows would flatten all other points
    return figure


def _is_measured(rows: Sequence[TradeoffRow]) -> bool:
    return all(row.projected_seconds is not None for row in rows)


class _BudgetSweep:
    """Plans of one model for a sequence of budgets."""

    def __init__(self, model: nn.Module, input_shape: Any, compile_arguments: dict[str, Any]) -> None:
        refused = sorted({"plan", "budget"}.intersection(compile_arguments))
        if refused:
            raise InputError(f"{', '.join(refused)}: a sweep makes plans for budgets of its own; give budgets=[...], or leave it out")
        self._session = PlanningSession(model, input_shape, **compile_arguments)
        self.plain = self._session.plain
        self.refusals: list[SftError] = []

    def rows(self, options: Options, budgets: Sequence[int]) -> Iterator[TradeoffRow]:
        """A row for each budget for which the strategy has a plan."""
        for budget_bytes in budgets:
            try:
                plan = self._session.plan(budget_bytes, options)
            except (BudgetError, UnsupportedError) as refusal:
                self.refusals.append(refusal)
                continue
            yield TradeoffRow(
                strategy=options.strategy,
                budget_bytes=budget_bytes,
                total_bytes=plan.total_bytes,
                flops=plan.flops,
                plain_flops=plan.plain_flops,
                estimated_seconds=plan.estimated_seconds,
                projected_seconds=plan.projected_seconds,
            )

    def default_budgets(self, requests: Sequence[Options], num_budgets: int) -> list[list[int]]:
        """Budgets for each strategy, from the largest to its minimum."""
        least = [self._least_bytes(options) for options in requests]
        top = max(self.plain.total_bytes, *least)
        lowest = min(least)
        grid = {round(top * (lowest / top) ** (step / (num_budgets - 1))) for step in range(num_budgets)}
        return [sorted({minimum, *(budget for budget in grid if budget > minimum)}, reverse=True) for minimum in least]

    def _least_bytes(self, options: Options) -> int:
        """The smallest budget that a strategy reports."""
        try:
            return self._session.plan(1, replace(options, profile="auto")).total_bytes
        except BudgetError as refusal:
            return refusal.needed_bytes
        except UnsupportedError:  # it has no plan for this model
            return self.plain.total_bytes
