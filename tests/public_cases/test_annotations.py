"""Annotations of QuPath and other programs, from public threads about missing classes and lists of names as classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import sft
from sft.sources import ZarrImage
from sft.tissue import read_geojson


def _square(left: int) -> dict[str, Any]:
    corners = [[left, 0], [left + 10, 0], [left + 10, 10], [left, 10], [left, 0]]
    return {"type": "Polygon", "coordinates": [corners]}


def _export(folder: Path, *features: Any) -> Path:
    """A FeatureCollection of squares next to each other, with these properties."""
    content = {
        "type": "FeatureCollection",
        "features": [
            {"type": "Feature", "geometry": _square(20 * number), "properties": properties} for number, properties in enumerate(features)
        ],
    }
    path = folder / "export.geojson"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (["Tumor"], 3),  # the base class, with all derived ones
        ("Tumor", 3),
        (["Tumor: Positive"], 2),
        (["Positive"], 3),
        (["Tumor: Negative"], 1),
        (["Stroma", "Tumor: Negative"], 2),
        (["Stroma: Positive"], 1),
        (["region 7"], 1),
    ],
)
def test_derived_classes_pathology_whole_slide_data_41_and_51(names: Any, count: int, tmp_path: Path) -> None:
    """DIAGNijmegen/pathology-whole-slide-data#41 and #51."""
    path = _export(
        tmp_path,
        {"objectType": "annotation", "classification": {"names": ["Tumor", "Positive"], "color": [200, 0, 0]}},
        {"objectType": "annotation", "classification": {"name": "Tumor: Positive", "colorRGB": -65536}},
        {"objectType": "annotation", "classification": {"name": "Tumor: Negative"}},
        {"objectType": "annotation", "classification": {"names": ["Stroma", "Positive"]}, "name": "region 7"},
        {"objectType": "annotation", "name": None},
    )
    assert len(read_geojson(path, names=names).polygons) == count
    assert len(read_geojson(path).polygons) == 5


@pytest.mark.parametrize("names", [["Tumour"], ["Tumor", "Necrosis"], ["tumor"], "Tum"])
def test_unknown_classes_are_listed_pathology_whole_slide_data_51(names: Any, tmp_path: Path) -> None:
    """DIAGNijmegen/pathology-whole-slide-data#51: an empty region would make the slide pure background."""
    path = _export(tmp_path, {"classification": {"names": ["Tumor", "Positive"]}}, {"classification": {"name": "Stroma"}}, {}, {})
    with pytest.raises(sft.InputError) as caught:
        read_geojson(path, names=names)
    assert "Its 4 features are (no class) (2), 'Tumor: Positive' (1), 'Stroma' (1)" in str(caught.value)
    assert len(read_geojson(path, names=names, required=False).polygons) == (names == ["Tumor", "Necrosis"])


def test_a_long_list_of_classes_is_cut(tmp_path: Path) -> None:
    path = _export(tmp_path, *({"classification": {"name": f"class {number}"}} for number in range(30)))
    with pytest.raises(sft.InputError, match=r"'class 19' \(1\), and 10 more\. Correct"):
        read_geojson(path, names=["Tumor"])
    with pytest.raises(sft.InputError, match="selects nothing"):
        read_geojson(path, names=[])


def test_a_class_of_points_only_has_no_area(tmp_path: Path) -> None:
    path = _export(tmp_path, {"classification": {"name": "Cells"}}, {"classification": {"name": "Tumor"}})
    content = json.loads(path.read_text())
    content["features"][0]["geometry"] = {"type": "MultiPoint", "coordinates": [[1, 2], [3, 4]]}
    path.write_text(json.dumps(content))
    with pytest.raises(sft.InputError, match="no feature called 'Cells' has an area"):
        read_geojson(path, names=["Cells"])


@pytest.mark.parametrize("at", [{"q": 0}, {"t": 1}, {"z": 0, "channel": 1}, {"c": 0}, {"z": 0, "x": 3}])
def test_an_axis_that_an_array_lacks_is_refused(at: dict[str, int], tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "s.zarr"), mode="w", zarr_format=2)
    group.create_array("0", data=np.zeros((3, 2, 8, 8), np.uint8), chunks=(3, 1, 8, 8))
    group.attrs["multiscales"] = [{"version": "0.4", "axes": [{"name": n} for n in "czyx"], "datasets": [{"path": "0"}]}]
    assert ZarrImage(tmp_path / "s.zarr", at={"z": 1}).read(0, 0, 8, 8).shape == (8, 8, 3)
    with pytest.raises(sft.InputError, match="one index is chosen along 'z'"):
        _ = ZarrImage(tmp_path / "s.zarr", at=at).level_dimensions
