"""Pictures and pages of plans: well-formed, self-contained, of bounded size, and with the plan's numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import sft
from sft.cli.main import main
from sft.common.byte_units import format_bytes
from sft.planner.reports.budget_split import split_budget
from sft.planner.reports.plan_page import plan_page
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.models import TinyUNet, seeded

captures = one_capture_a_model()

_SHAPE = (2, 3, 40, 24)
_SVG = "{http://www.w3.org/2000/svg}"


def _tiled(**changes: object) -> sft.Plan:
    plan = sft.plan(seeded(TinyUNet), _SHAPE, budget="64MiB", options=sft.Options(tile=(8, None)))
    return replace(plan, **changes)  # type: ignore[arg-type]  # fields of the plan


def _texts(page: str) -> list[str]:
    """Texts of a page, which must be well-formed and self-contained."""
    tree = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    tags = {element.tag.removeprefix(_SVG) for element in tree.iter()}
    assert not tags & {"script", "link", "img", "iframe", "image", "foreignObject"}
    assert not [name for element in tree.iter() for name in element.attrib if name.startswith("on") or name in ("href", "src")]
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    return [element.text or "" for element in tree.iter()]


def test_shares_of_the_budget_are_those_of_the_plan() -> None:
    """The bytes of inputs and states, and a sum equal to the budget."""
    plan = _tiled()
    shares = {share.purpose: share.num_bytes for share in split_budget(plan)}
    assert sum(shares.values()) == plan.budget_bytes and shares["resident"] == plan.resident_bytes
    assert shares["inputs"] == 2 * 3 * 40 * 24 * 8 and shares["states"] == plan.segments[0].state_bytes
    assert shares["kept"] == 2 * plan.segments[0].output_bytes  # the output and its gradient
    texts = _texts(plan._repr_html_())
    assert {f"{share.label}: {share.num_bytes:,} bytes" for share in split_budget(plan)} <= set(texts)
    assert "63.68 MiB  free (drawn shorter)" in texts and "budget 64.00 MiB, above" in texts


@pytest.mark.parametrize("strategy", ["revolve", "none", "sft"])
def test_shares_of_any_plan_sum_to_the_budget(strategy: str) -> None:
    plan = sft.plan(seeded(TinyUNet), _SHAPE, budget="4MiB", options=sft.Options(strategy=strategy))
    assert sum(share.num_bytes for share in split_budget(plan)) == plan.budget_bytes
    on_gpu = replace(plan, overhead_bytes=1000, projected_peak_bytes=plan.projected_peak_bytes + 1000, weights_peak_bytes=10)
    shares = {share.purpose: share.num_bytes for share in split_budget(on_gpu)}
    assert sum(shares.values()) == plan.budget_bytes and (shares["overhead"], shares["weights"]) == (1000, 10)


def test_blocks_and_curve_follow_the_schedule() -> None:
    plan = _tiled()
    texts = _texts(plan._repr_html_())
    for kind in ("forward", "backward"):
        assert [text for text in texts if text.startswith(f"segment 0, {kind}: ")]
    tree = ElementTree.fromstring(plan._repr_html_())
    (curve,) = tree.iter(f"{_SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in curve.attrib["points"].split()]
    assert 4 <= len(points) <= 2 * len(plan.timeline.entries) and points == sorted(points, key=lambda point: point[0])
    lowest = min(height for _, height in points)
    (area,) = tree.iter(f"{_SVG}polygon")
    peak = min(float(point.split(",")[1]) for point in area.attrib["points"].split())
    base = max(float(point.split(",")[1]) for point in area.attrib["points"].split())
    scale = (base - peak) / plan.projected_peak_bytes  # pixels a byte
    alive = max(max(entry.begin_bytes, entry.end_bytes) for entry in plan.timeline.entries)
    assert base - lowest == pytest.approx(scale * alive, abs=0.2)


def test_hundreds_of_segments_stay_readable_and_small() -> None:
    """Thin blocks are merged; the picture's size is bounded, and each element has an extent."""
    plan = _tiled()
    entries = [entry for entry in plan.timeline.entries if entry.move != "L"]
    many = [replace(entry, move=entry.move.replace("0", str(number))) for entry in entries for number in range(800)]
    deep = replace(plan, segments=plan.segments * 800, timeline=sft.Timeline(entries=tuple(many)))
    picture = deep._repr_html_()
    assert len(picture) < 100_000 and any(re.match(r"\d+ segments, \d+ to \d+, forward", text) for text in _texts(picture))
    rects = [rect.attrib for rect in ElementTree.fromstring(picture).iter(f"{_SVG}rect")]
    assert all(float(rect["width"]) > 0 and -1 < float(rect["x"]) < 760 for rect in rects)
    assert len(plan_page(deep)) < 100_000 + 2500 * 800
    rows = [element for element in ElementTree.fromstring(plan_page(deep).partition("\n")[2]).iter("tr")]
    assert len(rows) == 801


def test_a_page_has_the_table_and_the_report(tmp_path: Path) -> None:
    plan = sft.Plan.from_json(_tiled().to_json())
    plan.save_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    texts, segment = _texts(page), plan.segments[0]
    assert plan.explain() in texts
    assert {f"{segment.num_steps} strips of 8 rows", format_bytes(segment.working_bytes), f"{segment.flops:.3g}", "100.0 %"} <= set(texts)


def test_names_of_modules_cannot_add_markup(tmp_path: Path) -> None:
    plan = _tiled()
    hostile = replace(plan.segments[0], layers=("<script>alert(1)</script>\x00", '"&\ud800'))
    page = replace(plan, segments=(hostile,), notes=("</pre><script>",), budget_note="<b>", order=("F0+", "L", "B0"))
    page.save_html(tmp_path / "plan.htm")
    assert any("<script>alert(1)</script>\ufffd" in text for text in _texts((tmp_path / "plan.htm").read_text(encoding="utf-8")))


@pytest.mark.parametrize("kind", ["no operators", "no seconds", "many inputs", "over budget"])
def test_unusual_plans_are_drawn(kind: str) -> None:
    plan = _tiled()
    still = plan.timeline.measured([0.0] * len(plan.timeline.entries))
    plan = {
        "no operators": replace(plan, timeline=sft.Timeline(entries=()), segments=()),
        "no seconds": replace(plan, timeline=still, projected_seconds=0.0),
        "many inputs": replace(plan, input_shapes=plan.input_shapes * 500),
        "over budget": replace(plan, budget_bytes=1),
    }[kind]
    assert len(plan._repr_html_()) < 20_000 and _texts(plan._repr_html_()) and _texts(plan_page(plan))
    assert not re.search(r"\b(nan|inf)\b", plan_page(plan))


def test_a_plan_for_a_gpu_shows_its_overhead() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    plan = sft.plan(model, (1, 3, 256, 256), budget="256MiB", device="cuda")
    texts = _texts(plan._repr_html_())
    assert f"{format_bytes(plan.overhead_bytes)}  allocator and libraries" in texts and "resident and overhead" in texts


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    plan = _tiled()
    for name in ("plan.pdf", "plan", ""):
        with pytest.raises(sft.InputError, match=r"\.html"):
            plan.save_html(tmp_path / name)
    with pytest.raises(sft.SourceError, match="nowhere"):
        plan.save_html(tmp_path / "nowhere" / "plan.html")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(sft.SourceError, match=r"folder\.html"):
        plan.save_html(tmp_path / "folder.html")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def test_the_command_line_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    network = ("examples.models:unet", "--model-args", "num_classes=2", "width=4", "levels=2", "--input", "1x3x96x64")
    assert main(["plan", *network, "--budget", "64MiB", "--html", str(page), "--out", str(tmp_path / "plan.json")]) == 0
    assert "Plan for a training step" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") == plan_page(sft.Plan.from_json((tmp_path / "plan.json").read_text()))
