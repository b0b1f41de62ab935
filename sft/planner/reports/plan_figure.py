"""Figure of ``plan.plot()``, for image files. Needs the extra ``plot``.

It has two panels: device memory over time above, and the running segments below. A schedule op is one block: its height is the peak while
it runs, and the line in it leads from the bytes at its begin to those at its end; strips are not drawn one by one. Below, each segment is a
row, the caller's turn is a line, and copies to the host and back have a row each. For a recomputation schedule the picture is the staircase
of the checkpointing literature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sft.common.byte_units import format_bytes
from sft.common.errors import InputError
from sft.planner.timeline import TimelineKind
from sft.solvers.plot import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sft.planner.plan import Plan

__all__ = ["plan_figure"]

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_COLOURS = {"tiled": "tab:blue", "whole": "tab:orange", "link": "tab:green"}
#: Opacity and hatch of a segment's bar by kind of schedule op.
_STYLES: dict[TimelineKind, tuple[float, str]] = {
    "forward": (0.45, ""),
    "recompute": (0.45, "////"),
    "backward": (1.0, ""),
    "offload": (0.45, ""),
    "prefetch": (1.0, ""),
}
#: Rows of the copies to the host and back, below the segments.
_LANES: dict[TimelineKind, int] = {"offload": -1, "prefetch": -2}
_MAX_TICKS = 10
#: Least extent of a bar, as a share of the panel, and most segments whose bars have white outlines (of many, they would hide the bars).
_MIN_BAR_SHARE, _MIN_BAR_HEIGHT, _MAX_OUTLINED = 0.002, 0.02, 60
_RESIDENT_COLOUR, _ALIVE_COLOUR = "0.75", "tab:green"


def plan_figure(plan: Plan) -> Figure:
    """Draw memory over time with the budget, and the running segments.

    Raises:
        InputError: matplotlib is missing, or the plan has no operators.
    """
    if not plan.timeline.entries:
        raise InputError("nothing to draw: the plan has no operators")
    figure = new_figure()
    memory, moves = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_memory(memory, plan)
    _draw_moves(moves, plan)
    memory.set_title(_title(plan), fontsize="medium")
    moves.set_xlabel("measured seconds" if plan.timeline.is_measured else "seconds, estimated from FLOPs at a rate of the kind of device")
    moves.set_xlim(0, plan.timeline.seconds)
    return figure


def _title(plan: Plan) -> str:
    kind = "training step" if plan.training else "inference"
    shapes = ", ".join("x".join(map(str, shape)) for shape in plan.input_shapes)
    return f"{kind}, {shapes}, {plan.dtype}: {plan.redundancy:.3g} x the FLOPs of plain PyTorch"


def _draw_memory(axes: Axes, plan: Plan) -> None:
    # A budget far above the plan would squeeze the curve into the bottom of the panel.
    with_budget = plan.budget_bytes <= 3 * plan.total_bytes
    unit, size = next((pair for pair in _UNITS if plan.total_bytes >= pair[1]), _UNITS[-1])
    resident = plan.resident_bytes / size
    seconds: list[float] = []
    peaks: list[float] = []
    alive: list[float] = []
    for entry, (start, stop) in zip(plan.timeline.entries, plan.timeline.spans, strict=True):
        if entry.copied_bytes:  # copies overlap the other schedule ops, whose entries hold the bytes
            continue
        seconds += [start, stop]
        peaks += [resident + entry.peak_bytes / size] * 2
        alive += [resident + entry.begin_bytes / size, resident + entry.end_bytes / size]
    axes.fill_between([0, plan.timeline.seconds], 0, resident, color=_RESIDENT_COLOUR, linewidth=0, label="resident")
    axes.fill_between(seconds, resident, peaks, color=_ALIVE_COLOUR, alpha=0.3, linewidth=0, label="at most, during a move")
    axes.plot(seconds, alive, color=_ALIVE_COLOUR, linewidth=1, label="between moves")
    if with_budget:
        axes.axhline(plan.budget_bytes / size, color="tab:red", linestyle="--", label="budget")
    else:
        axes.plot([], [], color="tab:red", linestyle="--", label=f"budget: {format_bytes(plan.budget_bytes)}, above")
    axes.set_ylim(0, 1.08 * max(plan.total_bytes, plan.budget_bytes if with_budget else 0) / size)
    axes.set_ylabel(f"device memory ({unit})")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_moves(axes: Axes, plan: Plan) -> None:
    timeline = plan.timeline
    bars_of: dict[tuple[str, TimelineKind], list[tuple[int, float, float]]] = {}
    lanes = _LANES if any(entry.copied_bytes for entry in timeline.entries) else {}
    for entry, kind, (start, stop) in zip(timeline.entries, timeline.kinds, timeline.spans, strict=True):
        if kind in lanes:
            bars_of.setdefault(("link", kind), []).append((lanes[kind], start, stop))
        elif kind == "loss":
            axes.axvline(start, color="black", linestyle=":", label="loss")
        elif entry.segment is not None and stop > start:
            wide = max(stop - start, _MIN_BAR_SHARE * timeline.seconds)  # a shorter bar would be invisible
            bars_of.setdefault((plan.segments[entry.segment].mode, kind), []).append((entry.segment, start, start + wide))
    for (mode, kind), bars in bars_of.items():
        alpha, hatch = _STYLES[kind]
        numbers, starts, stops = zip(*bars, strict=True)
        axes.barh(
            numbers,
            [stop - start for start, stop in zip(starts, stops, strict=True)],
            left=starts,
            height=max(0.8, _MIN_BAR_HEIGHT * len(plan.segments)),
            color=_COLOURS[mode],
            alpha=alpha,
            hatch=hatch if len(plan.segments) <= _MAX_OUTLINED else "",
            edgecolor="white" if len(plan.segments) <= _MAX_OUTLINED else _COLOURS[mode],
            linewidth=0.3,
            label=f"{mode}, {kind}",
        )
    axes.set_ylim(-0.6 - len(lanes), len(plan.segments) - 0.4)
    axes.set_yticks(range(0, len(plan.segments), -(-len(plan.segments) // _MAX_TICKS)))
    axes.set_ylabel("segment")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
