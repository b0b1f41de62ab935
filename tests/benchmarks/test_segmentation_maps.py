"""The benchmark of written maps runs at a small size, and its two maps differ only near borders of windows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import segmentation_maps
from segmentation_maps import MapCase, StripMaps, compare, predict_strips, predict_windows, tables, write_image


def test_a_small_map_in_strips_and_in_windows(tmp_path: Path) -> None:
    pytest.importorskip("rasterio")
    write_image(tmp_path / "image.npy", 640)
    case = MapCase(folder=tmp_path, budget="64MiB", threads=1)
    strips = predict_strips(case)
    assert {path.name for path in tmp_path.iterdir()} == {"image.npy", "strips.csv", "strips.geojson", "strips.ome.tif", "strips.tif"}
    assert 0 <= strips.hidden_share <= 1 and strips.projected_peak_bytes <= 64 * 2**20 and strips.process_peak_bytes > 0
    windows = predict_windows(case)
    compared = compare(tmp_path)
    assert compared.num_classes > 2 and 0 < compared.num_differing < 0.3 * compared.num_pixels
    assert compared.num_differing_at_seams == compared.num_differing
    shown = tables(640, strips, windows, compared)
    assert f"| {compared.num_differing:,} |" in shown[1].markdown()


def test_results_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strips = StripMaps(
        process_peak_bytes=2**30, projected_peak_bytes=2**20, total_seconds=2.0, read_seconds=0.5, read_wait_seconds=0.1,
        write_seconds={"COG": 0.4}, write_wait_seconds=0.1, hidden_share=0.75,
    )  # fmt: skip
    monkeypatch.setattr(segmentation_maps, "measure", lambda args, folder: (strips, None, None))
    monkeypatch.setattr(sys, "argv", [segmentation_maps.__file__])
    assert segmentation_maps.main(["--no-windows", "--out", str(tmp_path)]) == 0
    (page,) = tmp_path.glob("*-cpu-segmentation-maps.md")
    assert "| share of writing hidden by computing | 0.75 |" in page.read_text()
