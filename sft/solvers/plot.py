"""Time-memory plots of schedules, saved as image files. Needs the extra ``plot`` (matplotlib).

Each strategy is a curve: its Pareto-optimal points over the bytes that they need.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sft.common.atomic_files import as_path, atomic_write
from sft.common.errors import InputError
from sft.common.installation import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "ParetoPoint",
    "check_drawable",
    "new_figure",
    "pareto_figure",
    "pareto_front",
    "save_figure",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """Time and memory of one strategy under one budget.

    Attributes:
        strategy: name of the strategy.
        seconds: time of a step.
        peak_bytes: most bytes on the device.
    """

    strategy: str
    seconds: float
    peak_bytes: int


def pareto_front(points: Iterable[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """Pareto-optimal points, by memory: no other point equals or betters both their time and their memory."""
    front: list[ParetoPoint] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.seconds)):
        if not front or point.seconds < front[-1].seconds:
            front.append(point)
    return tuple(front)


_GIB = 2**30


def pareto_figure(points: Sequence[ParetoPoint], *, plain_seconds: float | None = None, title: str = "") -> Figure:
    """Draw each strategy's Pareto front.

    Args:
        points: points of all strategies.
        plain_seconds: the unit of time; None draws seconds. Default: `None`
        title: the figure's title. Default: no title

    Raises:
        InputError: the list of points is empty.
    """
    if not points:
        raise InputError("no points to draw: no strategy fits any budget of the sweep")
    figure = new_figure()
    axes = figure.subplots()
    unit = plain_seconds or 1.0
    for name in dict.fromkeys(point.strategy for point in points):
        front = pareto_front(point for point in points if point.strategy == name)
        is_auto = name == "auto"
        axes.plot(
            [point.peak_bytes / _GIB for point in front],
            [point.seconds / unit for point in front],
            marker="o",
            markersize=3,
            label=name,
            linewidth=2.5 if is_auto else 1.0,
            color="black" if is_auto else None,
        )
    axes.set_xlabel("device memory (GiB)")
    axes.set_ylabel("time of a step / plain" if plain_seconds else "seconds")
    axes.legend(fontsize="small")
    if title:
        axes.set_title(title)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file; the suffix chooses the format.

    Raises:
        InputError: matplotlib does not know the suffix.
        SourceError: the file cannot be written; a file of that name stays as it was.
    """
    check_drawable(path)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=150)


def check_drawable(path: str | os.PathLike[str]) -> None:
    """Check that a figure can be drawn into a file of this name.

    Raises:
        InputError: it is not a path, or matplotlib is missing or does not know the suffix.
    """
    file = as_path(path, "the picture")
    suffixes = sorted(new_figure().canvas.get_supported_filetypes())
    if file.suffix[1:].lower() not in suffixes:
        raise InputError(f"cannot draw {file.name}: a picture's name ends with one of {', '.join(f'.{suffix}' for suffix in suffixes)}")


def new_figure() -> Figure:
    """Create a figure outside pyplot's global state.

    Raises:
        InputError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"drawing needs matplotlib: {install_command('plot')}") from error
    make: Callable[..., Figure] = Figure
    return make(figsize=(8, 5), layout="constrained")
