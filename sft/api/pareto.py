"""Time against memory: what smaller and smaller budgets cost.

A plan is the answer to one budget and holds no model, so it cannot be asked about another; ``sft.pareto`` takes what ``sft.plan`` takes and
plans once for each budget and strategy. The model is captured once.

Budgets that are not given fall by equal ratios, from what plain PyTorch needs to the smallest that each strategy names as working. So every
curve ends at its own least.

One model asked again and again: plans for many budgets and wishes, on one capture.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from sft.api.compile import compile
from sft.api.engine import Engine
from sft.common.byte_units import parse_bytes
from sft.common.errors import BudgetError, InputError, SftError, UnsupportedError
from sft.planner.options import STRATEGIES, Options
from sft.planner.plan import Plan
from sft.solvers.plot import ParetoPoint, check_drawable, pareto_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PlanningSession", "TradeoffRow", "pareto", "tradeoff_figure"]

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
        return self._engine.replan(budget_bytes, options)


#: Times further apart than this are drawn on a logarithmic scale.
_WIDE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffRow:
    """What a strategy makes of a budget.

    Attributes:
        strategy: its name.
        budget_bytes: the budget.
        total_bytes: what the plan needs of it: resident bytes and the projected peak.
        flops: what a step computes.
        plain_flops: what plain PyTorch computes.
        estimated_seconds: of a step, at rates of the kind of device; see `sft.Plan.estimated_seconds`.
        projected_seconds: of a step, measured with ``Options(profile="measure")``; else ``None``.
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
        """FLOPs over those of plain PyTorch."""
        return self.flops / self.plain_flops if self.plain_flops else 1.0

    @property
    def seconds(self) -> float:
        """Measured seconds, where there are any; else the estimated ones."""
        return self.estimated_seconds if self.projected_seconds is None else self.projected_seconds


def pareto(
    model: nn.Module,
    input_shape: Any,
    *,
    budgets: Sequence[int | str] | None = None,
    num_budgets: int = 6,
    strategies: Iterable[str] = ("auto", "none"),
    options: Options | None = None,
    path: str | os.PathLike[str] | None = None,
    **compile_arguments: Any,
) -> tuple[TradeoffRow, ...]:
    """Plan for several budgets, and draw time against memory.

    Args:
        model: as for `sft.plan`.
        input_shape: as for `sft.plan`; every extent is needed.
        budgets: what the device may hold, each in bytes or as ``"11GiB"``. Default: `None`, ``num_budgets`` from what plain
            PyTorch needs down to the least that works.
        num_budgets: how many budgets to choose, two at least.
        strategies: names of strategies, see `sft.Options`.
        options: other wishes about the plans. With ``profile="measure"`` each plan is timed, in the memory that it plans with: give budgets
            that the device has. Default: `None`
        path: a file for the picture, with an ending that matplotlib knows. Default: `None`, no picture
        compile_arguments: others of `sft.compile`.

    Returns:
        A row for each strategy and budget that it can work with, by strategy and from the largest budget to the smallest.

    Raises:
        InputError: an argument is wrong; matplotlib is missing or knows no such ending.
        BudgetError: no strategy can work with any of the budgets.
        UnsupportedError: the model cannot be compiled.
        SourceError: the picture cannot be written.
    """
    wishes = options or Options()
    asked = [replace(wishes, strategy=name) for name in dict.fromkeys(strategies)]  # refuses a wrong name before anything is planned
    if not asked:
        raise InputError(f"strategies is empty: name one of {', '.join(STRATEGIES)}")
    given = None if budgets is None else sorted({parse_bytes(budget) for budget in budgets}, reverse=True)
    if given is not None and not given:
        raise InputError("budgets is empty: name some, or leave it out")
    if given is None and num_budgets < 2:
        raise InputError(f"num_budgets {num_budgets}: choose two or more, or give budgets")
    if path is not None:
        check_drawable(path)  # planning takes long: what hinders drawing is said before
    sweep = _BudgetSweep(model, input_shape, compile_arguments)
    chosen = sweep.chosen(asked, num_budgets) if given is None else [given] * len(asked)
    rows = tuple(row for wish, wanted in zip(asked, chosen, strict=True) for row in sweep.rows(wish, wanted))
    if not rows:
        raise min(sweep.refusals, key=lambda refusal: refusal.needed_bytes if isinstance(refusal, BudgetError) else math.inf)
    if path is not None:
        # An estimate is worth something beside another one.
        plain_seconds = None if _is_measured(rows) else sweep.plain.estimated_seconds
        save_figure(tradeoff_figure(rows, plain_seconds=plain_seconds), path)
    return rows


def tradeoff_figure(rows: Sequence[TradeoffRow], *, plain_seconds: float | None = None) -> Figure:
    """Each strategy's best times over the bytes that they take.

    Args:
        rows: of a sweep.
        plain_seconds: what plain PyTorch takes, by the same clock; times are then multiples of it. Default: `None`
    """
    points = [
        ParetoPoint(strategy=row.strategy, budget_bytes=row.budget_bytes, seconds=row.seconds, peak_bytes=row.total_bytes, host_bytes=0)
        for row in rows
    ]
    figure = pareto_figure(points, plain_seconds=plain_seconds, title="measured" if _is_measured(rows) else "estimated from FLOPs")
    if max(row.seconds for row in rows) > _WIDE * min(row.seconds for row in rows):
        figure.axes[0].set_yscale("log")  # strips of a row or two would leave nothing else to see
    return figure


def _is_measured(rows: Sequence[TradeoffRow]) -> bool:
    return all(row.projected_seconds is not None for row in rows)


class _BudgetSweep:
    """One model, asked again and again."""

    def __init__(self, model: nn.Module, input_shape: Any, compile_arguments: dict[str, Any]) -> None:
        refused = sorted({"plan", "budget"}.intersection(compile_arguments))
        if refused:
            raise InputError(f"{', '.join(refused)}: a sweep makes plans for budgets of its own; give budgets=[...], or leave it out")
        self._session = PlanningSession(model, input_shape, **compile_arguments)
        self.plain = self._session.plain
        self.refusals: list[SftError] = []

    def rows(self, options: Options, budgets: Sequence[int]) -> Iterator[TradeoffRow]:
        """A row for each budget that the strategy can work with."""
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

    def chosen(self, asked: Sequence[Options], num_budgets: int) -> list[list[int]]:
        """Budgets for each strategy, from the largest to its smallest."""
        least = [self._least_bytes(options) for options in asked]
        top = max(self.plain.total_bytes, *least)
        low = min(least)
        grid = {round(top * (low / top) ** (step / (num_budgets - 1))) for step in range(num_budgets)}
        return [sorted({own, *(budget for budget in grid if budget > own)}, reverse=True) for own in least]

    def _least_bytes(self, options: Options) -> int:
        """The smallest budget that a strategy names."""
        try:
            return self._session.plan(1, replace(options, profile="auto")).total_bytes
        except BudgetError as refusal:
            return refusal.needed_bytes
        except UnsupportedError:  # it has no plan for this model at all
            return self.plain.total_bytes
