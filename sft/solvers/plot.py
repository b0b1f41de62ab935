"""Pictures of schedules: memory and streams over time, and time against memory. Needs the extra ``plot``.

Time against memory: what each strategy makes of smaller and smaller budgets.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sft.common.atomic_files import atomic_write
from sft.common.errors import BudgetError, InputError
from sft.solvers.chain import HostLink, StageChain
from sft.solvers.registry import SOLVERS, get_solver
from sft.solvers.simulate import Simulation, StreamName, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "ParetoPoint",
    "check_drawable",
    "new_figure",
    "pareto_figure",
    "pareto_front",
    "points_to_csv",
    "save_figure",
    "sweep_budgets",
    "timeline_figure",
]


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


_LANES: tuple[tuple[StreamName, str], ...] = (("compute", "compute"), ("down", "to host"), ("up", "from host"))
_COLOURS = {"F": "tab:blue", "B": "tab:orange", "L": "tab:gray", ">": "tab:green", "<": "tab:purple"}
_GIB = 2**30


def timeline_figure(simulation: Simulation, *, budget_bytes: int | None = None, title: str = "") -> Figure:
    """Above, what the device holds over time; below, what the compute stream and the two directions of the link do."""
    figure = new_figure()
    memory, streams = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    seconds, held = zip(*((time, num_bytes / _GIB) for time, num_bytes in simulation.memory), strict=True)
    memory.step(seconds, held, where="post", color="tab:blue")
    memory.set_ylabel("device memory (GiB)")
    memory.set_ylim(bottom=0)
    if budget_bytes is not None:
        memory.axhline(budget_bytes / _GIB, color="tab:red", linestyle="--", label="budget")
        memory.legend(loc="lower center")
    if title:
        memory.set_title(title)
    for lane, (stream, _) in enumerate(_LANES):
        events = [event for event in simulation.events if event.stream == stream and event.end_seconds > event.start_seconds]
        streams.broken_barh(
            [(event.start_seconds, event.end_seconds - event.start_seconds) for event in events],
            (-lane - 0.4, 0.8),
            facecolors=[_COLOURS[event.label[0]] for event in events],
            edgecolor="white",
            linewidth=0.3,
        )
    streams.set_yticks([-lane for lane in range(len(_LANES))], [name for _, name in _LANES])
    streams.set_xlabel("seconds")
    return figure


def pareto_figure(points: Sequence[ParetoPoint], *, plain_seconds: float | None = None, title: str = "") -> Figure:
    """Each strategy's best times over the memory that they take; times as multiples of ``plain_seconds`` if that is given."""
    if not points:
        raise InputError("there are no points to draw; no strategy fits any budget of the sweep")
    figure = new_figure()
    axes = figure.subplots()
    unit = plain_seconds or 1.0
    for name in dict.fromkeys(point.strategy for point in points):
        best = pareto_front(point for point in points if point.strategy == name)
        heavy = name == "auto"
        axes.plot(
            [point.peak_bytes / _GIB for point in best],
            [point.seconds / unit for point in best],
            marker="o",
            markersize=3,
            label=name,
            linewidth=2.5 if heavy else 1.0,
            color="black" if heavy else None,
        )
    axes.set_xlabel("device memory (GiB)")
    axes.set_ylabel("time of a step / plain" if plain_seconds else "seconds")
    axes.legend(fontsize="small")
    if title:
        axes.set_title(title)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file of any format that matplotlib knows by its ending.

    Raises:
        InputError: the ending is none that matplotlib knows.
        SourceError: the file cannot be written; what was there before is untouched.
    """
    check_drawable(path)
    with atomic_write(path) as part:
        figure.savefig(part, dpi=150)


def check_drawable(path: str | os.PathLike[str]) -> None:
    """Say beforehand what would hinder drawing into a file.

    Raises:
        InputError: matplotlib is not installed, or knows no format of that ending.
    """
    endings = sorted(new_figure().canvas.get_supported_filetypes())
    if Path(path).suffix[1:].lower() not in endings:
        raise InputError(
            f"cannot draw {Path(path).name}: a picture's name ends with one of {', '.join(f'.{ending}' for ending in endings)}"
        )


def new_figure() -> Figure:
    """A figure of its own, not one of pyplot's global ones.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("drawing needs matplotlib: pip install 'sft-engine[plot]'") from error
    make: Callable[..., Figure] = Figure
    return make(figsize=(8, 5), layout="constrained")
