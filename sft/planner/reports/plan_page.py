"""HTML of plans: the picture with a caption for notebooks, and a page of one file with the table of segments and the text report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from sft.analysis.ir.graph import label_range
from sft.common.atomic_files import atomic_write
from sft.common.byte_units import format_bytes, format_seconds
from sft.common.errors import InputError
from sft.planner.reports.plan_picture import add_element, plan_picture
from sft.planner.reports.plan_text import plan_line, plan_report

if TYPE_CHECKING:
    from sft.planner.plan import Plan

__all__ = ["check_page_name", "plan_fragment", "plan_page", "save_page"]

_SUFFIXES = (".html", ".htm")
_STYLE = """
:root { color-scheme: light dark; }
body { font-family: sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.4; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: 0.85rem; } .wide { overflow-x: auto; }
th, td { padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid #8886; white-space: nowrap; }
.text { text-align: left; } pre { overflow-x: auto; font-size: 0.85rem; }
"""
_HEADERS = ("segment", "operators", "runs", "panels", "outputs", "working set", "states", "FLOPs", "forward", "again", "backward", "share")
_NUM_TEXTS = 3
#: Characters of a caption or title.
_MAX_CAPTION = 240


def plan_fragment(plan: Plan) -> str:
    """Picture and caption as an HTML element, for notebooks."""
    block = ElementTree.Element("div")
    add_element(block, "div", _shortened(plan_line(plan)))
    block.append(plan_picture(plan))
    add_element(block, "div", "print(plan) and plan.save_html(path) show each segment", style="font-size: 0.85em; opacity: 0.7")
    return _serialized(block)


def plan_page(plan: Plan) -> str:
    """Page of a plan: picture, table of all segments with their seconds, and the text report."""
    page = ElementTree.Element("html", {"lang": "en"})
    head = add_element(page, "head")
    add_element(head, "meta", charset="utf-8")
    add_element(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    add_element(head, "title", f"Plan: {_shortened(plan_line(plan))}")
    add_element(head, "style", _STYLE)
    body = add_element(page, "body")
    add_element(body, "h1", f"Plan: {plan_line(plan)}")
    add_element(body, "div", **{"class": "wide"}).append(plan_picture(plan))
    timeline = plan.timeline
    add_element(body, "h2", "Segments")
    seconds = "measured" if timeline.is_measured else "estimated from FLOPs, to compare plans by"
    add_element(body, "p", f"Bytes are projected; seconds are {seconds}. Strips of a segment are recomputed within its backward pass.")
    _add_table(add_element(body, "div", **{"class": "wide"}), _HEADERS, _rows(plan))
    add_element(body, "h2", "Report")
    add_element(body, "pre", plan_report(plan))
    return f"<!DOCTYPE html>\n{_serialized(page)}\n"


def save_page(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the page of a plan to a file.

    Raises:
        InputError: the suffix is not that of an HTML file.
        SourceError: the file cannot be written; an existing file stays untouched.
    """
    check_page_name(path)
    with atomic_write(path) as temporary:
        temporary.write_text(plan_page(plan), encoding="utf-8")


def check_page_name(path: str | os.PathLike[str]) -> None:
    """Check that a page can be written to a file of this name.

    Raises:
        InputError: the suffix is not that of an HTML file.
    """
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise InputError(f"cannot write {os.fspath(path)!r}: an HTML file ends with {' or '.join(_SUFFIXES)}; name it plan.html")


def _rows(plan: Plan) -> list[tuple[str, ...]]:
    """Cells of each segment."""
    costs = {cost.segment: cost for cost in plan.timeline.costs()}
    rows = []
    for number, segment in enumerate(plan.segments):
        strips = f"{segment.num_steps} strips of {segment.strip_rows} rows" if segment.mode == "tiled" else "whole"
        if segment.takes_samples:
            strips = f"{segment.num_steps} times {segment.batch_tile} samples"
        if segment.takes_windows:
            strips = f"{segment.num_steps} times {segment.strip_rows} {segment.chunk_unit}"
        again = f", forward {segment.num_forwards} times" if segment.num_forwards > 1 else ""
        times: tuple[str, ...] = ("-",) * 4
        if (cost := costs.get(number)) is not None:
            seconds = (cost.forward_seconds, cost.recompute_seconds, cost.backward_seconds)
            times = (*map(format_seconds, seconds), f"{100 * cost.share:.1f} %")
        sizes = map(format_bytes, (segment.output_bytes, segment.working_bytes, segment.state_bytes))
        layers = label_range(*segment.layers)
        rows.append((str(number), layers, strips + again, str(segment.num_panels), *sizes, f"{segment.flops:.3g}", *times))
    return rows


def _add_table(parent: ElementTree.Element, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Append a table; its first columns are text."""
    table = add_element(parent, "table")
    head = add_element(add_element(table, "thead"), "tr")
    body = add_element(table, "tbody")
    for tag, cells, line in [("th", headers, head), *(("td", row, add_element(body, "tr")) for row in rows)]:
        for column, cell in enumerate(cells):
            add_element(line, tag, cell, **({"class": "text"} if column < _NUM_TEXTS else {}))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CAPTION else f"{text[: _MAX_CAPTION - 3]}..."


def _serialized(element: ElementTree.Element) -> str:
    # With end tags for all elements: HTML has no self-closing ones.
    return ElementTree.tostring(element, encoding="unicode", short_empty_elements=False)
