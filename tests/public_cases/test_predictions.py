"""Predictions of large images: no seams, no scores of the full image, and files that viewers open."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sft
from sft.prediction import PolygonWriter
from tests.helpers.models import image, seeded

_SIZE = 96, 80


def _net(norm: type[nn.Module], num_classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 5, padding=2), norm(6), nn.ReLU(), nn.Conv2d(6, 6, 5, padding=2), nn.Conv2d(6, num_classes, 1))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_no_tile_borders_panseg_190_and_napari_convpaint_67(norm: type[nn.Module], tmp_path: Path) -> None:
    """A tile has statistics and neighbourhoods other than the full image: ``kreshuklab/panseg#190``."""
    model = seeded(lambda: _net(norm)).eval()
    x = image(1, 3, *_SIZE)
    with torch.no_grad():
        full = model(x)
        halves = torch.cat([model(half) for half in x.split(48, 2)], 2)
    assert not torch.allclose(halves, full)  # two tiles differ, more so with norms over the image
    for rows in (5, 48):
        net = sft.compile(model, (1, 3, None, None), options=sft.Options(tile=(rows, None)))
        sft.predict(net, x, tmp_path / "scores.npy", kind="values", dtype="float64")
        np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), full[0].numpy(), rtol=1e-9, atol=1e-12)


def test_scores_of_many_classes_monai_6427(tmp_path: Path) -> None:
    """The arg max is taken per strip: scores of 100 classes are never complete."""
    model = seeded(lambda: _net(nn.BatchNorm2d, 100)).float().eval()
    x = image(1, 3, 400, 64).float()
    net = sft.compile(model, (1, 3, None, None), budget="2MiB")
    with sft.measure_peak("cpu") as peak:
        sft.predict(net, x, tmp_path / "classes.npy")
    assert peak.num_bytes < 2 * 2**20 < 4 * 100 * 400 * 64 / 4
    with torch.no_grad():
        assert (np.load(tmp_path / "classes.npy") == model(x).argmax(1)[0].numpy()).all()


def test_maps_are_pyramids_fast_pathology_64(tmp_path: Path) -> None:
    """QuPath crashed on a map without levels; ``labsyspharm/mcmicro#572`` asks how to write them."""
    tifffile = pytest.importorskip("tifffile")
    net = sft.compile(seeded(lambda: _net(nn.BatchNorm2d)), (1, 3, None, None), budget="8MiB")
    sft.predict(net, image(1, 3, 300, 280), sft.prediction.OmeTiffWriter(tmp_path / "classes.ome.tif", tile_px=64))
    with tifffile.TiffFile(tmp_path / "classes.ome.tif") as file:
        levels = file.series[0].levels
        assert [level.shape for level in levels] == [(300, 280), (150, 140), (75, 70), (38, 35)]
        assert all(level.keyframe.is_tiled for level in levels) and file.is_ome
        assert (levels[1].asarray() == levels[0].asarray()[::2, ::2]).all()


def test_polygons_for_qupath_tissuumaps_49(tmp_path: Path) -> None:
    """Closed rings, the colour in the classification, and no ``MultiPolygon`` of one polygon."""
    net = sft.compile(seeded(lambda: _net(nn.BatchNorm2d)), (1, 3, None, None), budget="8MiB")
    sft.predict(net, image(1, 3, *_SIZE), PolygonWriter(tmp_path / "classes.geojson"), names=["background", "tumour", "stroma"])
    features = json.loads((tmp_path / "classes.geojson").read_text())["features"]
    assert features
    for feature in features:
        assert feature["geometry"]["type"] == "Polygon"
        assert all(ring[0] == ring[-1] and len(ring) >= 4 for ring in feature["geometry"]["coordinates"])
        classification = feature["properties"]["classification"]
        assert classification["name"] in ("tumour", "stroma") and len(classification["color"]) == 3
