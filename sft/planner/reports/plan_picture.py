"""Picture of a plan as one SVG element, for notebooks and HTML pages: no scripts, no style sheets, no other files.

From top to bottom: the budget as a bar of its shares (``sft.planner.reports.budget_split``), device memory over the time of a step, and the
segments as blocks in the order of the schedule, one lane for each kind of schedule op.

The number of elements is bounded, whatever the number of segments: blocks narrower than a few pixels are merged with their neighbours, and
the memory curve has at most four points for each pixel. Text and axes take the colour of the surrounding page, so that the picture can be
read on light and dark backgrounds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from sft.common.byte_units import format_bytes, format_seconds
from sft.planner.reports.budget_split import SharePurpose, split_budget
from sft.planner.reports.lane_blocks import BlockMode, LaneBlock, lane_blocks, op_spans
from sft.planner.timeline import TimelineKind

if TYPE_CHECKING:
    from sft.planner.plan import Plan

__all__ = ["add_element", "clean_text", "plan_picture"]

_WIDTH, _MARGIN, _LABELS = 760, 12, 84
#: Left edge and width of the panels with a time axis.
_LEFT, _SPAN = _MARGIN + _LABELS, _WIDTH - 2 * _MARGIN - _LABELS
_BAR_HEIGHT, _CURVE_HEIGHT, _LANE_HEIGHT, _LINE_HEIGHT = 26, 150, 26, 17
#: Pixels: width below which blocks are merged, and width of a character in a block.
_MIN_BLOCK, _CHARACTER_WIDTH = 4.0, 7.0
#: A budget of more than this multiple of the plan is drawn shortened.
_MAX_BUDGET_RATIO = 2.5

_COLOURS: dict[SharePurpose, str] = {
    "resident": "#8a8f98",
    "inputs": "#2aa198",
    "kept": "#3f7fbf",
    "states": "#8f6bc1",
    "weights": "#b58900",
    "working": "#4f9d4f",
    "overhead": "#c0688f",
    "free": "none",
}
_MODE_COLOURS: dict[BlockMode, str] = {"tiled": "#3f7fbf", "whole": "#d9822b", "copy": "#4f9d4f"}
_BUDGET_COLOUR = "#d64545"
_LANES: tuple[tuple[TimelineKind, str], ...] = (
    ("forward", "forward"),
    ("recompute", "recompute"),
    ("backward", "backward"),
    ("offload", "to the host"),
    ("prefetch", "from the host"),
)


def clean_text(text: object) -> str:
    """Text without characters that XML excludes."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", str(text))


def add_element(parent: ElementTree.Element, tag: str, text: object = None, /, **attributes: object) -> ElementTree.Element:
    """Append an element with text and attributes; ``font_size=12`` becomes ``font-size="12"``."""
    values = {
        name.replace("_", "-"): f"{value:.2f}" if isinstance(value, float) else clean_text(value) for name, value in attributes.items()
    }
    element = ElementTree.SubElement(parent, tag, values)
    element.text = None if text is None else clean_text(text)
    return element


def plan_picture(plan: Plan) -> ElementTree.Element:
    """Picture of a plan."""
    svg = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "width": str(_WIDTH)})
    for name, value in (("font-family", "sans-serif"), ("font-size", "12"), ("fill", "currentColor")):
        svg.set(name, value)
    svg.set("style", "max-width: 100%; height: auto")
    kind = "training step" if plan.training else "inference"
    label = f"Plan of a {kind}: {format_bytes(plan.total_bytes)} of a budget of {format_bytes(plan.budget_bytes)}"
    svg.set("aria-label", label)
    add_element(svg, "title", label)
    bottom = _draw_budget(svg, plan, _MARGIN)
    if plan.timeline.entries:
        bottom = _draw_curve(svg, plan, bottom + 14)
        bottom = _draw_lanes(svg, plan, bottom + 10)
    height = round(bottom + _MARGIN)
    svg.set("height", str(height))
    svg.set("viewBox", f"0 0 {_WIDTH} {height}")
    return svg


def _draw_budget(svg: ElementTree.Element, plan: Plan, top: float) -> float:
    """Draw the bar and its legend; returns the lower edge."""
    shares = split_budget(plan)
    drawn_budget = min(max(plan.budget_bytes, plan.total_bytes, 1), _MAX_BUDGET_RATIO * max(plan.total_bytes, 1))
    width = _WIDTH - 2 * _MARGIN
    left = float(_MARGIN)
    rank = " of the busiest rank" if plan.mesh is not None else ""
    heading = f"budget {format_bytes(plan.budget_bytes)}, at the largest peak{rank}"
    add_element(svg, "text", heading, x=_MARGIN, y=top + 10, font_weight="bold")
    if plan.host_bytes:
        text = f"and {format_bytes(plan.host_bytes)} of host memory"
        add_element(svg, "text", text, x=_WIDTH - _MARGIN, y=top + 10, text_anchor="end")
    top += 18
    for share in shares:
        is_free = share.purpose == "free"
        extent = _MARGIN + width - left if is_free else width * share.num_bytes / drawn_budget
        block = add_element(
            svg,
            "rect",
            x=left,
            y=top,
            width=max(extent, 0.0),
            height=_BAR_HEIGHT,
            fill=_COLOURS[share.purpose],
            stroke=_BUDGET_COLOUR if is_free else "none",
            stroke_dasharray="4 3",
        )
        add_element(block, "title", f"{share.label}: {share.num_bytes:,} bytes")
        left += extent
    top += _BAR_HEIGHT + 6
    columns, column_width = 2, width / 2
    for number, share in enumerate(shares):
        x, y = _MARGIN + (number % columns) * column_width, top + (number // columns) * _LINE_HEIGHT
        is_free = share.purpose == "free"
        stroke = _BUDGET_COLOUR if is_free else "none"
        add_element(svg, "rect", x=x, y=y + 2, width=10, height=10, fill=_COLOURS[share.purpose], stroke=stroke, stroke_dasharray="2 2")
        shortened = " (drawn shorter)" if is_free and drawn_budget < plan.budget_bytes else ""
        add_element(svg, "text", f"{format_bytes(share.num_bytes)}  {share.label}{shortened}", x=x + 16, y=y + 11)
    return top + -(-len(shares) // columns) * _LINE_HEIGHT


def _draw_keys(svg: ElementTree.Element, keys: Sequence[tuple[str, str, float]], top: float) -> None:
    """Draw a legend of texts, colours and opacities at the right edge, in the line of a heading."""
    x = _WIDTH - _MARGIN - sum(_CHARACTER_WIDTH * len(text) + 26 for text, _, _ in keys)
    for text, colour, opacity in keys:
        add_element(svg, "rect", x=x, y=top + 1, width=10, height=10, fill=colour, fill_opacity=opacity)
        add_element(svg, "text", text, x=x + 15, y=top + 10, font_size=11)
        x += _CHARACTER_WIDTH * len(text) + 26


def _x(seconds: float, total_seconds: float) -> float:
    return _LEFT + _SPAN * seconds / total_seconds


def _draw_curve(svg: ElementTree.Element, plan: Plan, top: float) -> float:
    """Draw device memory over time with the budget; returns the lower edge."""
    spans = op_spans(plan)
    end = max(stop for _, stop in spans)
    with_budget = plan.budget_bytes <= _MAX_BUDGET_RATIO * plan.total_bytes
    limit = 1.08 * max(plan.total_bytes, plan.budget_bytes if with_budget else 0, 1)
    bottom = top + 18 + _CURVE_HEIGHT

    def y(num_bytes: float) -> float:
        return bottom - _CURVE_HEIGHT * num_bytes / limit

    add_element(svg, "text", "device memory over the step", x=_MARGIN, y=top + 10, font_weight="bold")
    ground = "resident and overhead" if plan.overhead_bytes else "resident"
    peak_colour, alive_colour, ground_colour = _COLOURS["working"], _COLOURS["kept"], _COLOURS["resident"]
    keys = [("at most, during an operation", peak_colour, 0.35), ("between operations", alive_colour, 1.0), (ground, ground_colour, 0.6)]
    _draw_keys(svg, keys, top)
    base = plan.resident_bytes + plan.overhead_bytes
    peaks: list[tuple[float, float]] = []
    alive: list[tuple[float, float]] = []
    for entry, (start, stop) in zip(plan.timeline.entries, spans, strict=True):
        if entry.copied_bytes:  # copies overlap the other schedule ops, whose entries hold the bytes
            continue
        peaks += [(_x(start, end), y(base + entry.peak_bytes)), (_x(stop, end), y(base + entry.peak_bytes))]
        alive += [(_x(start, end), y(base + entry.begin_bytes)), (_x(stop, end), y(base + entry.end_bytes))]
    outline = [(float(_LEFT), y(base)), *_thinned(peaks), (float(_LEFT + _SPAN), y(base))]
    fill = add_element(svg, "polygon", points=_points(outline), fill=peak_colour, fill_opacity=0.35)
    add_element(fill, "title", "peak of each operation of the schedule")
    rest = add_element(svg, "rect", x=_LEFT, y=y(base), width=_SPAN, height=bottom - y(base), fill=ground_colour, fill_opacity=0.6)
    add_element(rest, "title", f"{ground}: {base:,} bytes")
    line = add_element(svg, "polyline", points=_points(_thinned(alive)), fill="none", stroke=alive_colour, stroke_width=1.5)
    add_element(line, "title", "bytes alive between operations")
    add_element(
        svg, "path", d=f"M{_LEFT} {top + 18:.1f}V{bottom:.1f}H{_LEFT + _SPAN}", fill="none", stroke="currentColor", stroke_opacity=0.5
    )
    marks = [(0, "0"), (plan.total_bytes, f"{format_bytes(plan.total_bytes)}")]
    if with_budget:
        height = y(plan.budget_bytes)
        add_element(
            svg, "path", d=f"M{_LEFT} {height:.1f}H{_LEFT + _SPAN}", stroke=_BUDGET_COLOUR, stroke_dasharray="6 4", stroke_width=1.5
        )
        add_element(svg, "text", f"budget {format_bytes(plan.budget_bytes)}", x=_LEFT + 6, y=height - 4, fill=_BUDGET_COLOUR)
    else:
        text = f"budget {format_bytes(plan.budget_bytes)}, above"
        add_element(svg, "text", text, x=_LEFT + 6, y=top + 28, fill=_BUDGET_COLOUR)
    for num_bytes, text in marks:
        add_element(svg, "text", text, x=_LEFT - 6, y=y(num_bytes) + 4, text_anchor="end", font_size=11)
    return bottom


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points of a curve: of each pixel the first, the lowest, the highest and the last."""
    groups: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        groups.setdefault(int(point[0]), []).append(point)
    kept: list[tuple[float, float]] = []
    for group in groups.values():
        lowest, highest = (choose(range(len(group)), key=lambda index: group[index][1]) for choose in (min, max))
        kept += [group[index] for index in sorted({0, lowest, highest, len(group) - 1})]
    return kept


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _draw_lanes(svg: ElementTree.Element, plan: Plan, top: float) -> float:
    """Draw the schedule, one lane for each kind of op; returns the lower edge."""
    spans, kinds = op_spans(plan), plan.timeline.kinds
    end = max(stop for _, stop in spans)
    add_element(svg, "text", "segments in the order of the schedule", x=_MARGIN, y=top + 10, font_weight="bold")
    _draw_keys(svg, [("in strips", _MODE_COLOURS["tiled"], 1.0), ("full tensors", _MODE_COLOURS["whole"], 1.0)], top)
    top += 18
    first = top
    for kind, name in _LANES:
        if kind not in kinds:
            continue
        add_element(svg, "text", name, x=_LEFT - 6, y=top + 17, text_anchor="end", font_size=11)
        for block in lane_blocks(plan, kind, spans, min_seconds=end * _MIN_BLOCK / _SPAN):
            _draw_block(svg, block, _x(block.start, end), _x(block.stop, end), name, top)
        top += _LANE_HEIGHT
    for kind, (start, _) in zip(kinds, spans, strict=True):
        if kind == "loss":
            path = f"M{_x(start, end):.1f} {first:.1f}V{top:.1f}"
            line = add_element(svg, "path", d=path, stroke="currentColor", stroke_dasharray="2 3")
            add_element(line, "title", "loss")
    duration = "~" if not plan.timeline.is_measured else ""
    source = "measured" if plan.timeline.is_measured else "estimated from FLOPs"
    add_element(svg, "text", "0", x=_LEFT, y=top + 14, font_size=11)
    text = f"{duration}{format_seconds(plan.timeline.seconds)}, {source}"
    add_element(svg, "text", text, x=_LEFT + _SPAN, y=top + 14, text_anchor="end", font_size=11)
    return top + 16


def _draw_block(svg: ElementTree.Element, block: LaneBlock, left: float, right: float, name: str, top: float) -> None:
    """Draw a block, with the numbers of its segments where they fit."""
    width = max(right - left, _MIN_BLOCK / 2)
    gap = 0.75 if width > _MIN_BLOCK else 0.0
    rect = add_element(svg, "rect", x=left, y=top + 2, width=width - gap, height=_LANE_HEIGHT - 4, fill=_MODE_COLOURS[block.mode])
    text, segments = "", ""
    if numbers := sorted(set(block.segments)):
        alone = len(numbers) == 1
        text = str(numbers[0]) if alone else f"{numbers[0]}\N{EN DASH}{numbers[-1]}"
        segments = f"segment {text}, " if alone else f"{len(numbers)} segments, {numbers[0]} to {numbers[-1]}, "
    add_element(rect, "title", f"{segments}{name}: {format_seconds(block.seconds)}")
    if text and width >= _CHARACTER_WIDTH * (len(text) + 1):
        add_element(svg, "text", text, x=(left + right) / 2, y=top + 17, text_anchor="middle", font_size=11, fill="#ffffff")
