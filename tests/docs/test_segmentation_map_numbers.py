"""Numbers of the page about whole slides are those of the newest committed result."""

from __future__ import annotations

import json
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def test_maps_of_a_large_image() -> None:
    path = max((_ROOT / "benchmarks" / "results").glob("*-cpu-segmentation-maps.json"))
    result = json.loads(path.read_text())
    page = (_ROOT / "docs" / "benchmarks" / "slides.md").read_text()
    strips, windows, comparison = result["strips"], result["windows"], result["comparison"]
    assert f"../../benchmarks/results/{path.stem}.md" in page and f"{result['size_px']:,} x {result['size_px']:,} px" in page
    rows = (
        ("peak of the process, GiB", strips["process_peak_bytes"] / 2**30, windows["process_peak_bytes"] / 2**30, ".2f"),
        ("time, s", strips["total_seconds"], windows["total_seconds"], ".0f"),
    )
    for name, own, other, digits in rows:
        assert f"| {name} | {own:{digits}} | {other:{digits}} |" in page
    writing = sum(strips["write_seconds"].values())
    share = comparison["num_differing"] / comparison["num_pixels"]
    at_seams = comparison["num_differing_at_seams"] / comparison["num_differing"]
    text = " ".join(page.split())
    assert f"{writing:.0f} s of writing, {strips['hidden_share']:.0%} of it while the network computes" in text
    assert f"{share:.1%} of the pixels have another class, {at_seams:.0%} of them within" in text
