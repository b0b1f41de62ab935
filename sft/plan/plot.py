"""The picture of a plan: above, the bytes that the device holds over time; below, which segment runs. Needs the extra ``plot``.

A segment's strips are not drawn one by one: a move is a block, as high as the most that it holds, with a line in it from what is held when
it begins to what is held when it is through. Below, segments are rows and the caller's turn is a line; copies to the host and back have a
row each. Where stages run again the
picture is the staircase of the checkpointing literature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sft.errors import InputError
from sft.plan.chain.plot import new_figure
from sft.plan.timeline import TimelineKind
from sft.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sft.plan.types import Plan

__all__ = ["plan_figure"]

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_COLOURS = {"tiled": "tab:blue", "whole": "tab:orange", "link": "tab:green"}
#: How strongly a segment's colour is drawn, and the pattern over it.
_STYLES: dict[TimelineKind, tuple[float, str]] = {
    "forward": (0.45, ""),
    "recompute": (0.45, "////"),
    "backward": (1.0, ""),
    "offload": (0.45, ""),
    "prefetch": (1.0, ""),
}
#: The rows below the segments, of copies to the host and back.
_LANES: dict[TimelineKind, int] = {"offload": -1, "prefetch": -2}
_MAX_TICKS = 10
_RESIDENT, _HELD = "0.75", "tab:green"


def plan_figure(plan: Plan) -> Figure:
    """Memory over time with the budget, and what runs.

    Raises:
        InputError: matplotlib is missing, or the plan has no operators.
    """
    if not plan.timeline.entries:
        raise InputError("there is nothing to draw: the plan has no operators")
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
    # Of a budget far above the plan the line would leave nothing else to see.
    with_budget = plan.budget_bytes <= 3 * plan.total_bytes
    unit, size = next((pair for pair in _UNITS if plan.total_bytes >= pair[1]), _UNITS[-1])
    resident = plan.resident_bytes / size
    seconds: list[float] = []
    peaks: list[float] = []
    held: list[float] = []
    for entry, (start, stop) in zip(plan.timeline.entries, plan.timeline.spans, strict=True):
        if entry.copied_bytes:  # beside the others, which say what is held
            continue
        seconds += [start, stop]
        peaks += [resident + entry.peak_bytes / size] * 2
        held += [resident + entry.begin_bytes / size, resident + entry.end_bytes / size]
    axes.fill_between([0, plan.timeline.seconds], 0, resident, color=_RESIDENT, linewidth=0, label="resident")
    axes.fill_between(seconds, resident, peaks, color=_HELD, alpha=0.3, linewidth=0, label="at most, during a move")
    axes.plot(seconds, held, color=_HELD, linewidth=1, label="between moves")
    if with_budget:
        axes.axhline(plan.budget_bytes / size, color="tab:red", linestyle="--", label="budget")
    else:
        axes.plot([], [], color="tab:red", linestyle="--", label=f"budget: {format_bytes(plan.budget_bytes)}, above")
    axes.set_ylim(0, 1.08 * max(plan.total_bytes, plan.budget_bytes if with_budget else 0) / size)
    axes.set_ylabel(f"device memory ({unit})")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_moves(axes: Axes, plan: Plan) -> None:
    timeline = plan.timeline
    drawn: dict[tuple[str, TimelineKind], list[tuple[int, float, float]]] = {}
    lanes = _LANES if any(entry.copied_bytes for entry in timeline.entries) else {}
    for entry, kind, (start, stop) in zip(timeline.entries, timeline.kinds, timeline.spans, strict=True):
        if kind in lanes:
            drawn.setdefault(("link", kind), []).append((lanes[kind], start, stop))
        elif kind == "loss":
            axes.axvline(start, color="black", linestyle=":", label="loss")
        elif entry.segment is not None and stop > start:
            drawn.setdefault((plan.segments[entry.segment].mode, kind), []).append((entry.segment, start, stop))
    for (mode, kind), bars in drawn.items():
        alpha, hatch = _STYLES[kind]
        numbers, starts, stops = zip(*bars, strict=True)
        axes.barh(
            numbers,
            [stop - start for start, stop in zip(starts, stops, strict=True)],
            left=starts,
            height=0.8,
            color=_COLOURS[mode],
            alpha=alpha,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.3,
            label=f"{mode}, {kind}",
        )
    axes.set_ylim(-0.6 - len(lanes), len(plan.segments) - 0.4)
    axes.set_yticks(range(0, len(plan.segments), -(-len(plan.segments) // _MAX_TICKS)))
    axes.set_ylabel("segment")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
