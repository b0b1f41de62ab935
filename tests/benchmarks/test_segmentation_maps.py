"""The benchmark of written maps runs at a small size, and its two maps differ only near borders of windows."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


def test_a_small_map_in_strips_and_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rasterio")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    benchmark = importlib.import_module("segmentation_maps")
    benchmark.write_image(tmp_path / "image.npy", 640)
    strips = benchmark.predict_strips(tmp_path, "64MiB")
    assert {path.name for path in tmp_path.iterdir()} == {"image.npy", "strips.csv", "strips.geojson", "strips.ome.tif", "strips.tif"}
    assert 0 <= strips["hidden_share_of_writing"] <= 1 and strips["projected_peak_bytes"] <= 64 * 2**20
    benchmark.predict_windows(tmp_path)
    compared = benchmark.compare(tmp_path)
    assert compared["classes"] > 2 and 0 < compared["differing_pixels"] < 0.3 * compared["pixels"]
    assert benchmark.process_peak_bytes() > 0
