"""Time against memory: what each strategy makes of smaller and smaller budgets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass

from sft.errors import BudgetError, InputError
from sft.plan.chain.chain import StageChain
from sft.plan.chain.link import HostLink
from sft.plan.chain.simulate import simulate
from sft.plan.chain.strategies import SOLVERS, get_solver

__all__ = ["ParetoPoint", "pareto_front", "sweep_budgets", "points_to_csv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """What a strategy did with a budget.

    Attributes:
        strategy: its name.
        budget_bytes: the budget.
        seconds: simulated time of a step.
        peak_bytes: simulated bytes on the device.
        host_bytes: simulated bytes on the host.
    """

    strategy: str
    budget_bytes: int
    seconds: float
    peak_bytes: int
    host_bytes: int


def sweep_budgets(
    chain: StageChain,
    *,
    num_budgets: int = 12,
    names: Iterable[str] = tuple(SOLVERS),
    host_budget_bytes: int | None = None,
    link: HostLink | None = None,
) -> tuple[ParetoPoint, ...]:
    """Solve for budgets from plain training's need down to the smallest that each strategy can work with.

    Budgets fall by equal ratios between the largest need and the smallest of all strategies'; each strategy is also asked for its own
    smallest. A strategy that refuses a budget has no point there.

    Raises:
        InputError: fewer than two budgets, or no such strategy.
    """
    if num_budgets < 2:
        raise InputError(f"a sweep needs two budgets or more, got {num_budgets}")
    solvers = {name: get_solver(name) for name in names}
    needs = {name: _min_budget(chain, name, host_budget_bytes, link) for name in solvers}
    top = _min_budget(chain, "none", host_budget_bytes, link)
    low = min(needs.values(), default=top)
    grid = {round(top * (low / top) ** (step / (num_budgets - 1))) for step in range(num_budgets)}
    points = []
    for name, solver in solvers.items():
        for budget in sorted({*(budget for budget in grid if budget >= needs[name]), needs[name]}, reverse=True):
            try:
                schedule = solver(chain, budget_bytes=budget, host_budget_bytes=host_budget_bytes, link=link)
            except BudgetError:
                continue
            found = simulate(chain, schedule, link=link)
            points.append(
                ParetoPoint(
                    strategy=name,
                    budget_bytes=budget,
                    seconds=found.seconds,
                    peak_bytes=found.peak_bytes,
                    host_bytes=found.host_peak_bytes,
                )
            )
    return tuple(points)


def pareto_front(points: Iterable[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """The points that no other one equals or betters in both time and memory, by memory."""
    found: list[ParetoPoint] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.seconds)):
        if not found or point.seconds < found[-1].seconds:
            found.append(point)
    return tuple(found)


def points_to_csv(points: Iterable[ParetoPoint]) -> str:
    """The points as text, a line each, with a heading."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(ParetoPoint.__slots__)
    writer.writerows([getattr(point, name) for name in ParetoPoint.__slots__] for point in points)
    return out.getvalue()


def _min_budget(chain: StageChain, name: str, host_budget_bytes: int | None, link: HostLink | None) -> int:
    """The smallest budget that a strategy names."""
    try:
        get_solver(name)(chain, budget_bytes=1, host_budget_bytes=host_budget_bytes, link=link)
    except BudgetError as refusal:
        return refusal.needed_bytes
    return 1
