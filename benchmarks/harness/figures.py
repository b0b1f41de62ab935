"""The plots: step time against memory, and peak against image height."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from harness.cases import METHODS, MODELS

__all__ = ["Line", "Point", "growth_figure", "tradeoff_figure"]

MARKERS = dict(zip(METHODS, ("*", "s", "o"), strict=True))
COLORS = dict(zip(MODELS, ("tab:blue", "tab:orange", "tab:green"), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One method on one model and size, against plain."""

    model: str
    size: int
    """Side of the image, pixels."""
    method: str
    memory_ratio: float
    time_ratios: tuple[float, ...]
    """One a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Peaks of one kind over image heights."""

    label: str
    style: str
    """Matplotlib's format string."""
    peaks_bytes: dict[int, int]
    """Height to bytes; heights without a value are left out."""


def tradeoff_figure(points: Sequence[Point]) -> Figure:
    """Time ratio against activation peak ratio; plain is the star at (1, 1). Bars span the rounds."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot(xlabel="activation peak / plain's", ylabel="step time / plain's")
    axes.plot(1, 1, MARKERS["plain"], color="black", markersize=12)
    axes.annotate("plain", (1, 1), xytext=(-6, 8), textcoords="offset points", ha="right")
    for point in points:
        middle = statistics.median(point.time_ratios)
        spread = [[middle - min(point.time_ratios)], [max(point.time_ratios) - middle]]
        color = COLORS[point.model]
        axes.errorbar(point.memory_ratio, middle, yerr=spread, fmt=MARKERS[point.method], color=color, capsize=3)
        label = f"{point.model} {point.size}² {point.method}"
        axes.annotate(label, (point.memory_ratio, middle), xytext=(7, 3), textcoords="offset points", fontsize=7, color=color)
    axes.axhline(1, color="gray", linewidth=0.5)
    axes.axvline(1, color="gray", linewidth=0.5)
    axes.set_xlim(left=0, right=1.25)
    return figure


def growth_figure(lines: Sequence[Line], width: int) -> Figure:
    """Activation peak in MiB against image height."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot(xlabel=f"image height, px (width {width} px)", ylabel="peak above the step's start, MiB")
    for line in lines:
        if line.peaks_bytes:
            heights = sorted(line.peaks_bytes)
            axes.plot(heights, [line.peaks_bytes[height] / 2**20 for height in heights], line.style, label=line.label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure
