"""`sft.predict`: files equal the network's prediction on the full image, open in programs of their formats, and appear atomically."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import sft
from sft.prediction import CogWriter, NpyWriter, OmeTiffWriter, OmeZarrWriter, PolygonWriter, PredictedRaster
from sft.prediction.raster import RasterRows
from sft.sources import ArrayImage, Cropped, Normalized, WithMpp, open_image
from sft.sources.georeference import Georeference
from sft.tissue import AnnotationLabels, read_annotations, read_geojson

HEIGHT, WIDTH = 150, 130
NAMES = ["background", "stroma", "tumour", "necrosis"]


class Segmenter(nn.Module):
    """Smooth scores of four classes: large polygons."""

    def __init__(self, num_classes: int = 4, *, stride: int = 1) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 9, padding=4, stride=stride, bias=False), nn.BatchNorm2d(6), nn.Tanh())
        self.scores = nn.Conv2d(6, num_classes, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.features(x - 0.5))
        return scores


def build(factory: Callable[..., Segmenter], **arguments: int) -> Segmenter:
    """A network with initial weights that do not depend on other tests."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return factory(**arguments)


@pytest.fixture(scope="module")
def model() -> Segmenter:
    return build(Segmenter)


@pytest.fixture(scope="module")
def net(model: Segmenter) -> Segmenter:
    return sft.compile(model, (1, 3, None, None), budget="24MiB", options=sft.Options(tile=(16, None)))


@pytest.fixture(scope="module")
def pixels() -> npt.NDArray[np.uint8]:
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    waves = [np.sin(x / 13 + phase) * np.cos(y / 11 - phase) for phase in (0.0, 1.0, 2.0)]
    return ((np.stack(waves, axis=2) + 1) * 127).astype(np.uint8)


class Scene(WithMpp):
    """An image with map coordinates."""

    georeference = Georeference(crs_wkt="", transform=(10.0, 0.0, 399960.0, 0.0, -10.0, 5800020.0))


def expected(model: nn.Module, pixels: npt.NDArray[np.uint8]) -> Tensor:
    """Scores of the network on the full image."""
    flags = model.training
    with torch.no_grad():
        scores: Tensor = model.eval()(torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255)[0]
    model.train(flags)
    return scores


def test_files_of_all_formats_have_the_classes_of_the_full_image(
    net: Segmenter, model: Segmenter, pixels: npt.NDArray[np.uint8], tmp_path: Path
) -> None:
    tifffile, zarr, openslide = (pytest.importorskip(name) for name in ("tifffile", "zarr", "openslide"))
    model.train()
    image = WithMpp(ArrayImage(pixels), (0.5, 0.25))
    ome, zarr_4, zarr_5 = (tmp_path / name for name in ("map.ome.tif", "map.zarr", "new.zarr"))
    writers = [
        OmeTiffWriter(ome, tile_px=32),
        OmeZarrWriter(zarr_4, chunk_px=32),
        OmeZarrWriter(zarr_5, chunk_px=64, version="0.5"),
        NpyWriter(tmp_path / "map.npy"),
        PolygonWriter(tmp_path / "map.geojson"),
    ]
    prediction = sft.predict(net, image, writers, names=NAMES)
    assert model.training and all(module.training for module in model.modules())
    classes = np.load(tmp_path / "map.npy")
    assert np.array_equal(classes, expected(model, pixels).argmax(0).numpy()) and classes.dtype == np.uint8
    assert len(np.unique(classes)) > 2
    assert prediction.paths == tuple(writer.path for writer in writers) and 0 <= prediction.hidden_share <= 1

    levels = [classes, classes[::2, ::2], classes[::4, ::4], classes[::8, ::8]]
    with tifffile.TiffFile(ome) as file:
        assert file.series[0].axes == "YX" and 'PhysicalSizeX="0.5"' in file.ome_metadata and 'PhysicalSizeY="0.25"' in file.ome_metadata
        for level, values in zip(file.series[0].levels, levels, strict=True):
            assert np.array_equal(level.asarray(), values)
    with openslide.OpenSlide(str(ome)) as slide:
        seen = np.asarray(slide.read_region((0, 0), 0, (WIDTH, HEIGHT)))
        assert np.array_equal(seen[..., 0], classes)
    for path, shares_ome in ((zarr_4, False), (zarr_5, True)):
        group = zarr.open_group(str(path), mode="r")
        for number, values in enumerate(levels[: len(list(group.array_keys()))]):
            assert np.array_equal(group[str(number)][:], values)
        attributes: dict[str, Any] = dict(group.attrs)
        scale = (attributes["ome"] if shares_ome else attributes)["multiscales"][0]["datasets"][1]["coordinateTransformations"][0]
        assert scale == {"type": "scale", "scale": [0.5, 1.0]}
        reopened = open_image(path)
        assert reopened.mpp == (0.5, 0.25) and np.array_equal(reopened.read(0, 0, WIDTH, HEIGHT)[..., 0], classes)
    for number, name in enumerate(NAMES):
        if number and (classes == number).any():
            regions = read_geojson(tmp_path / "map.geojson", names=name)
            assert np.array_equal(regions.region(0, 0, WIDTH, HEIGHT), classes == number)
    with (tmp_path / "map.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [(int(row["class"]), row["name"], float(row["area_px"])) for row in rows] == [
        (number, NAMES[number], float((classes == number).sum())) for number in (1, 2, 3)
    ]
    assert float(rows[0]["area_um2"]) == float(rows[0]["area_px"]) * 0.125


@pytest.mark.parametrize(("kind", "dtype", "scale"), [("softmax", None, 255), ("sigmoid", "uint16", 65535), ("values", "float32", 1)])
def test_probabilities_and_values(
    net: Segmenter, model: Segmenter, pixels: npt.NDArray[np.uint8], tmp_path: Path, kind: Any, dtype: str | None, scale: int
) -> None:
    tifffile, zarr = (pytest.importorskip(name) for name in ("tifffile", "zarr"))
    paths = [tmp_path / name for name in ("map.npy", "map.ome.tif", "map.zarr")]
    prediction = sft.predict(net, ArrayImage(pixels), paths, kind=kind, dtype=dtype, names=NAMES)
    scores = expected(model, pixels)
    reference = (scores.softmax(0) if kind == "softmax" else scores.sigmoid() if kind == "sigmoid" else scores).numpy() * scale
    values = np.load(paths[0])
    assert values.shape == (4, HEIGHT, WIDTH) and np.abs(values - reference).max() <= (0.51 if scale > 1 else 1e-5)
    assert prediction.raster.value_scale == scale
    with tifffile.TiffFile(paths[1]) as file:
        assert file.series[0].axes == "CYX" and np.array_equal(file.asarray(), values) and 'Name="tumour"' in file.ome_metadata
    group = zarr.open_group(str(paths[2]), mode="r")
    assert np.array_equal(group["0"][:], values)
    assert [channel["label"] for channel in group.attrs["omero"]["channels"]] == NAMES


def test_cog_has_the_map_coordinates_of_the_input(net: Segmenter, pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    wkt = rasterio.crs.CRS.from_epsg(32632).to_wkt()
    scene = Scene(ArrayImage(pixels), 1.0)
    scene.georeference = Georeference(crs_wkt=wkt, transform=Scene.georeference.transform)
    writers = [CogWriter(tmp_path / "map.tif", tile_px=128), PolygonWriter(tmp_path / "map.geojson"), NpyWriter(tmp_path / "map.npy")]
    sft.predict(net, scene, writers, names=NAMES)
    classes = np.load(tmp_path / "map.npy")
    with rasterio.open(tmp_path / "map.tif") as file:
        assert np.array_equal(file.read(1), classes) and file.crs.to_epsg() == 32632
        assert tuple(file.transform)[:6] == scene.georeference.transform
        assert file.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG" and file.overviews(1) and file.tags()["CLASS_2"] == "tumour"
    document = json.loads((tmp_path / "map.geojson").read_text())
    assert document["crs"]["properties"]["name"] == "urn:ogc:def:crs:EPSG::32632"
    x, y = np.concatenate([feature["geometry"]["coordinates"][0] for feature in document["features"]]).T
    assert x.min() >= 399960 and x.max() <= 399960 + 10 * WIDTH and y.max() <= 5800020 and y.min() >= 5800020 - 10 * HEIGHT
    assert document["features"][0]["properties"]["measurements"]["Area map units^2"] % 100 == 0
    reopened: Any = open_image(tmp_path / "map.tif")
    assert np.array_equal(reopened.read(0, 0, WIDTH, HEIGHT)[..., 0], classes)
    assert reopened.georeference.transform == scene.georeference.transform and len(reopened.level_dimensions) == 2
    named = {name: number for number, name in enumerate(NAMES) if number}
    layers = read_annotations(tmp_path / "map.geojson", named, georeference=reopened.georeference, required=False)
    assert np.array_equal(AnnotationLabels(layers, width_px=WIDTH, height_px=HEIGHT).read(0, 0, WIDTH, HEIGHT)[..., 0], classes)
    pyogrio, shapely = pytest.importorskip("pyogrio"), pytest.importorskip("shapely")
    _, _, shapes, _ = pyogrio.raw.read(tmp_path / "map.geojson")
    assert sum(shapely.area(shapely.from_wkb(shapes))) == 100 * (classes > 0).sum()


def test_a_list_of_paths_is_one_image(net: Segmenter, pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", pixels[..., number])
    sft.predict(net, [tmp_path / f"{number}.npy" for number in range(3)], tmp_path / "stack.npy")
    sft.predict(net, ArrayImage(pixels), tmp_path / "map.npy")
    assert np.array_equal(np.load(tmp_path / "stack.npy"), np.load(tmp_path / "map.npy"))


def test_coarse_outputs_and_crops_keep_their_place(pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    model = build(Segmenter, stride=2)
    net = sft.compile(model, (1, 3, None, None), budget="24MiB")
    crop = Cropped(WithMpp(ArrayImage(pixels), 0.5), x=20, y=10, w=64, h=48)
    raster = sft.predict(net, Normalized(crop, mean=[0.5] * 3, std=[0.2] * 3), tmp_path / "map.geojson").raster
    assert (raster.height_px, raster.width_px, raster.scale, raster.mpp) == (24, 32, (2.0, 2.0), (1.0, 1.0))
    assert raster.origin_px == (19.5, 9.5)  # position 0 is centred on the crop's first pixel
    corners = [feature["geometry"]["coordinates"][0] for feature in json.loads((tmp_path / "map.geojson").read_text())["features"]]
    x, y = np.concatenate(corners).T
    assert x.min() >= 19.5 and x.max() <= 83.5 and y.min() >= 9.5 and y.max() <= 57.5


def test_panels_are_assembled(model: Segmenter, pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    net = sft.compile(model, (1, 3, None, None), budget="24MiB", options=sft.Options(tile=(32, 40)))
    sft.predict(net, ArrayImage(pixels), tmp_path / "map.npy")
    assert "panels" in sft.of(net).plan_for(ArrayImage(pixels)).explain()
    assert np.array_equal(np.load(tmp_path / "map.npy"), expected(model, pixels).argmax(0).numpy())


def test_one_score_is_a_class_above_zero(pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    model = build(Segmenter, num_classes=1)
    net = sft.compile(model, (1, 3, None, None), budget="24MiB")
    sft.predict(net, ArrayImage(pixels), tmp_path / "map.npy")
    assert np.array_equal(np.load(tmp_path / "map.npy"), (expected(model, pixels)[0] > 0).numpy())
    sft.predict(net, ArrayImage(pixels), tmp_path / "map.geojson", names=NAMES[:2])
    with pytest.raises(sft.InputError, match="divides pixels into two classes: give 2 names, or none"):
        sft.predict(net, ArrayImage(pixels), tmp_path / "map.npy", names=NAMES[:1])


def test_simplified_polygons_are_near_the_exact_ones(net: Segmenter, pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    exact, smooth = tmp_path / "exact.geojson", tmp_path / "smooth.geojson"
    sft.predict(net, ArrayImage(pixels), [PolygonWriter(exact, min_area_px=4), PolygonWriter(smooth, min_area_px=4, simplify_px=1.5)])
    first, second = (json.loads(path.read_text())["features"] for path in (exact, smooth))
    assert len(first) == len(second) and len(smooth.read_text()) < len(exact.read_text())
    assert exact.with_suffix(".csv").read_text() == smooth.with_suffix(".csv").read_text()


class Failing(NpyWriter):
    """Writer with a disk that is full after some rows."""

    def write(self, rows: RasterRows) -> None:
        raise sft.SourceError(28, "cannot write: no space left on device")


def test_a_failed_prediction_leaves_earlier_files(net: Segmenter, pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    earlier = tmp_path / "map.geojson"
    earlier.write_text("earlier")
    with pytest.raises(sft.SourceError, match="no space left"):
        sft.predict(net, ArrayImage(pixels), [earlier, OmeTiffWriter(tmp_path / "map.ome.tif"), Failing(tmp_path / "map.npy")])
    assert earlier.read_text() == "earlier" and [path.name for path in tmp_path.iterdir()] == ["map.geojson"]
    sft.predict(net, ArrayImage(pixels), earlier)
    assert earlier.read_text() != "earlier" and sorted(path.name for path in tmp_path.iterdir()) == ["map.csv", "map.geojson"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"writer": "map.png"}, "its suffix names no format"),
        ({"writer": []}, "writer is empty"),
        ({"writer": ["a.npy", "a.npy"]}, "two writers have the same path"),
        ({"writer": "missing/map.npy"}, "is not a folder"),
        ({"kind": "labels"}, "kind 'labels': choose one of"),
        ({"names": "abc"}, "names 'abc': give a list of names"),
        ({"names": NAMES[:2]}, "names has 2 names, and the network has 4 output channels: give 4 names, or none"),
        ({"names": [*NAMES, "other"], "kind": "softmax"}, "names has 5 names, and the network has 4 output channels"),
        ({"kind": "softmax", "dtype": "int8"}, "choose one of 'uint8', 'uint16'"),
        ({"kind": "softmax", "writer": "map.geojson"}, "polygons outline classes"),
        ({"kind": "values", "dtype": "float16", "writer": "map.ome.tif"}, "OME-TIFF has no pixels of float16"),
        ({"source": torch.rand(2, 3, 20, 20)}, "predict writes one image"),
        ({"source": torch.full((1, 3, 20, 20), torch.nan), "kind": "softmax"}, "not finite"),
    ],
)
def test_refusals_leave_no_file(
    net: Segmenter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    call = {"source": torch.rand(1, 3, 20, 20), "writer": "map.npy", **arguments}
    with pytest.raises(sft.InputError, match=message):
        sft.predict(net, call.pop("source"), call.pop("writer"), **call)
    assert list(tmp_path.iterdir()) == []


def test_networks_that_predict_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(sft.InputError, match="not a compiled model"):
        sft.predict(nn.Conv2d(3, 2, 1), torch.rand(1, 3, 8, 8), tmp_path / "map.npy")
    pooled = nn.Sequential(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(sft.InputError, match="has 2 dimensions"):
        sft.predict(sft.compile(pooled, (1, 3, None, None), budget="8MiB"), torch.rand(1, 3, 8, 8), tmp_path / "map.npy")


def test_index_names_an_output(pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    class Auxiliary(Segmenter):
        def forward(self, x: Tensor) -> Any:
            scores = super().forward(x)
            return {"out": scores, "aux": -scores}

    model = build(Auxiliary)
    net = sft.compile(model, (1, 3, None, None), budget="24MiB")
    with pytest.raises(sft.InputError, match="it has 'out', 'aux'"):
        sft.predict(net, ArrayImage(pixels), tmp_path / "map.npy")
    sft.predict(net, ArrayImage(pixels), tmp_path / "map.npy", index="out")
    plain = build(Segmenter)
    plain.load_state_dict(model.state_dict())
    assert np.array_equal(np.load(tmp_path / "map.npy"), expected(plain, pixels).argmax(0).numpy())


def test_writers_outside_of_predict(tmp_path: Path) -> None:
    """A writer takes any rows, such as those of another program."""
    raster = PredictedRaster(height_px=5, width_px=4, num_channels=1, dtype=np.dtype("uint8"), is_classes=True)
    writer = NpyWriter(tmp_path / "map.npy")
    values = np.arange(20, dtype=np.uint8).reshape(1, 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer.begin(raster)
        writer.write(values[:, :3])
        writer.write(values[:, 3:])
        writer.finish()
        assert not writer.path.exists()
        writer.publish()
    assert np.array_equal(np.load(tmp_path / "map.npy"), values[0])


_KILLED = """
import sys, time
import torch
from torch import nn
import sft
from sft.prediction import NpyWriter, OmeTiffWriter

class Slow(NpyWriter):
    def write(self, rows):
        super().write(rows)
        print("written", flush=True)
        time.sleep(60)

net = sft.compile(nn.Conv2d(3, 2, 3, padding=1), (1, 3, None, None), budget="8MiB", options=sft.Options(tile=(16, None)))
sft.predict(net, torch.rand(1, 3, 128, 64), [OmeTiffWriter("map.ome.tif"), Slow("map.npy")])
"""


@pytest.mark.slow
def test_a_killed_prediction_leaves_no_file_at_its_path(tmp_path: Path) -> None:
    earlier = np.zeros(3)
    np.save(tmp_path / "map.npy", earlier)
    with subprocess.Popen([sys.executable, "-c", _KILLED], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        process.kill()
    assert np.array_equal(np.load(tmp_path / "map.npy"), earlier)
    names = {path.name for path in tmp_path.iterdir()} - {"map.npy"}
    assert names and all(name.startswith((".partial-", ".sft-")) for name in names)
