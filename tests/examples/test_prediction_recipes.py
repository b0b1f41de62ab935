"""The recipes of predictions run, and the documentation shows them as they are."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.common.model_zoo import import_library

_ROOT = Path(__file__).resolve().parents[2]
_PAGES = {
    "instead_of_sliding_window": "sliding-window",
    "satellite_scene": "satellite",
    "multichannel_zarr": "multichannel-zarr",
    "detection": "detection",
}


def _recipe(name: str) -> Any:
    return importlib.import_module(f"examples.recipes.{name}")


@pytest.mark.parametrize("name", _PAGES)
def test_the_documentation_shows_them(name: str) -> None:
    source = (_ROOT / "examples" / "recipes" / f"{name}.py").read_text()
    shown = textwrap.dedent(source.partition("# [recipe]\n")[2].partition("# [end]")[0]).rstrip()
    assert shown in (_ROOT / "docs" / "recipes" / f"{_PAGES[name]}.md").read_text()


def test_a_slide_without_a_sliding_window(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    paths = _recipe("instead_of_sliding_window").main(tmp_path)
    assert tifffile.imread(paths[0]).shape == (480, 640) and json.loads(paths[1].read_text())["features"]


def test_a_satellite_scene(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    _recipe("satellite_scene").main(tmp_path)
    with rasterio.open(tmp_path / "scene.tif") as scene, rasterio.open(tmp_path / "cover.tif") as cover:
        assert (cover.crs, cover.transform, cover.shape) == (scene.crs, scene.transform, scene.shape)
        counts = np.bincount(cover.read(1).ravel(), minlength=3)
    areas = (tmp_path / "cover.csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[-1]) for row in areas] == pytest.approx([100 * count for count in counts[1:]], rel=0.01)


def test_a_multichannel_image(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    _recipe("multichannel_zarr").main(tmp_path)
    values = zarr.open_group(str(tmp_path / "types.zarr"), mode="r")["0"][:]
    assert values.shape == (4, 300, 260) and np.abs(values.sum(0).astype(int) - 65535).max() <= 4


def test_a_detector_at_native_resolution() -> None:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    import_library("torchvision")
    assert all(loss.isfinite() for loss in _recipe("detection").main(128, 160).values())
