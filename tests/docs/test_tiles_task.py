"""Numbers of the page about encoders of tiles are those of the newest committed result."""

from __future__ import annotations

import json
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def test_areas_and_bytes() -> None:
    path = max((_ROOT / "benchmarks" / "results").glob("*-cpu-tiles-task.json"))
    result = json.loads(path.read_text())
    page = (_ROOT / "docs" / "wsi-tiles.md").read_text()
    assert f"../benchmarks/results/{path.stem}.md" in page and "synthetic" in page.lower()
    for method, (middle, low, high) in result["auc"].items():
        assert f"| {method} | {middle:.3f} ({low:.3f} to {high:.3f}) |" in page, method
    for method, (middle, low, high) in result["excess"].items():
        assert f"{middle:.3f} ({low:.3f} to {high:.3f}) more than {method}" in " ".join(page.split()), method
    assert f"{result['projected_peak_bytes'] / 2**20:.1f} MiB instead of {result['plain_peak_bytes'] / 2**20:.1f} MiB" in " ".join(
        page.split()
    )
    assert f"{result['num_seeds']} seeds" in page
