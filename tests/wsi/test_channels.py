"""Runs on images other than RGB slides: channels by name, pixel types, ranges of values, several files as one image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import yaml

from sft.common.errors import InputError, SourceError
from sft.common.interval import Interval
from sft.sources import open_image, percentile_range
from sft.wsi.cli import read_config
from sft.wsi.config import Config
from sft.wsi.data.dataset import SlideDataset
from sft.wsi.data.pixel_values import as_picture
from sft.wsi.data.table import SlideRecord, read_table
from sft.wsi.model.backbones import feature_shapes, load_backbone, load_weights
from sft.wsi.model.tile_encoders import load_tile_encoder, num_tile_features
from tests.helpers.wsi import run_wsi, write_config, write_table

_NAMES = ["DAPI", "CD3", "CD8", "Ki67"]
_OFF = {"augment": {"brightness": 0.0, "saturation": 0.0, "hed": 0.0}}


def _panel(seed: int, size_px: tuple[int, int] = (136, 128)) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.random.default_rng(seed).integers(0, 4000, (4, *size_px)).astype(np.uint16)


def _write_panel(path: Path, pixels: np.ndarray[Any, Any]) -> Path:
    metadata = {"axes": "CYX", "Channel": {"Name": _NAMES}, "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
    tifffile.imwrite(path, pixels, tile=(64, 64), photometric="minisblack", metadata=metadata)
    return path


def _record(*paths: Path) -> SlideRecord:
    return SlideRecord(
        name="a", path=paths[0], target=None, patient="p", split=None, mpp=None, mask=None, row=2, further_paths=tuple(paths[1:])
    )


def _config(folder: Path, **groups: dict[str, Any]) -> Config:
    return read_config(write_config(folder / "config.yaml", folder / "slides.csv", folder / "run", **{**_OFF, **groups}))


def _pixels(config: Config, *paths: Path) -> torch.Tensor:
    source = SlideDataset(config).source(_record(*paths))
    out = torch.empty(source.shape)
    source.rows(Interval(0, source.shape[2]), out)
    return out[0]


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A segmentation of two channels of four, of 16 bits, trained for an epoch."""
    folder = tmp_path_factory.mktemp("channels")
    rows = []
    for number in range(3):
        panel = _panel(number)
        _write_panel(folder / f"s{number}.ome.tif", panel)
        np.save(folder / f"m{number}.npy", (panel[3] > 2000).astype(np.uint8))
        rows.append({"slide": f"s{number}.ome.tif", "mask": f"m{number}.npy", "split": ("train", "val", "test")[number]})
    config = write_config(
        folder / "c.yaml",
        write_table(folder / "slides.csv", rows),
        folder / "run",
        data={"channels": ["Ki67", 0], "percentiles": [1, 99], "clip": True},
        task={"kind": "segmentation", "classes": ["low", "high"]},
        model={"head": "segmentation"},
        train={"epochs": 1, "accumulate": 1},
        **_OFF,
    )
    assert run_wsi(["train", "--config", str(config), "--bootstrap", "10"]) == 0
    return folder


def test_a_run_on_channels_trains_predicts_and_draws(segmented: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = segmented / "run"
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert stored["data"]["channels"] == ["Ki67", 0] and stored["model"]["mean"] == [0.0, 0.0] and stored["model"]["std"] == [1.0, 1.0]
    assert run_wsi(["predict", str(run), str(segmented / "s2.ome.tif"), "--formats", "npy"]) == 0
    assert np.load(run / "predictions" / "s2.ome" / "classes.npy").shape[-2:] == (136, 128)
    assert run_wsi(["heatmap", str(run), "--split", "test"]) == 0
    assert list((run / "heatmaps").rglob("*.png"))
    capsys.readouterr()
    other = _write_panel(segmented / "other.ome.tif", _panel(9))
    tifffile.imwrite(segmented / "few.tif", _panel(9)[:2], tile=(64, 64), photometric="minisblack", planarconfig="separate")
    assert run_wsi(["predict", str(run), str(segmented / "few.tif"), "--json"]) == 1
    told = capsys.readouterr().err
    assert "'Ki67'" in told and "Traceback" not in told
    assert run_wsi(["slide-info", str(other)]) == 0
    assert "4 channels of uint16 (DAPI, CD3, CD8, Ki67)" in capsys.readouterr().out


def test_the_network_reads_the_channels_in_their_order_and_range(tmp_path: Path) -> None:
    panel, path = _panel(0), tmp_path / "a.ome.tif"
    _write_panel(path, panel)
    config = _config(tmp_path, data={"channels": ["CD8", 0], "value_range": [[0, 4000], [0, 2000]], "clip": True})
    expected = np.stack([panel[2] / 4000, np.minimum(panel[0] / 2000, 1)])
    assert np.allclose(_pixels(config, path).numpy(), expected, atol=1e-6)
    low, high = np.array(percentile_range(open_image(path, channels=[1]), 5, 95)[0])
    config = _config(tmp_path, data={"channels": [1], "percentiles": [5, 95]}, model={"mean": [0.5], "std": [0.5]})
    assert np.allclose(_pixels(config, path).numpy()[0], ((panel[1] - low) / (high - low) - 0.5) / 0.5, atol=1e-5)


def test_several_files_are_one_image(tmp_path: Path) -> None:
    panel = _panel(0)
    for number in range(2):
        tifffile.imwrite(tmp_path / f"b{number}.tif", panel[number], tile=(64, 64), photometric="minisblack")
    np.save(tmp_path / "m.npy", np.zeros((136, 128), np.uint8))
    config = _config(tmp_path, data={"channels": [1, 0]})
    assert np.allclose(_pixels(config, tmp_path / "b0.tif", tmp_path / "b1.tif").numpy(), panel[[1, 0]] / 65535, atol=1e-6)
    table = write_table(tmp_path / "slides.csv", [{"slide": "b0.tif;b1.tif", "label": "x", "split": "train"}])
    records = read_table(table, config.task).records
    assert [path.name for path in records[0].paths] == ["b0.tif", "b1.tif"] and records[0].name == "b0"


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ({"data": {"channels": []}}, "data.channels []: give each channel once"),
        ({"data": {"channels": [0, 0]}}, "give each channel once"),
        ({"data": {"channels": [0, 1], "value_range": [[0, 1]]}}, "1 pairs for 2 channels"),
        ({"data": {"channels": [0], "value_range": [3, 1]}}, "low < high"),
        ({"data": {"channels": [0], "percentiles": [99, 1]}}, "0 <= low < high <= 100"),
        ({"data": {"channels": [0], "percentiles": [1, 99], "value_range": [0, 1]}}, "leave one of them out"),
        ({"data": {"channels": [0, 1]}, "model": {"mean": [0.5], "std": [0.5]}}, "2 finite numbers, one for each of data.channels"),
        ({"data": {"channels": [0]}, "augment": {"brightness": 0.0, "saturation": 0.0, "hed": 0.1}}, "augment.hed with data.channels"),
        ({"data": {"fill_value": 3.0}}, "data.invalid_pixels fill"),
        ({"data": {"at": {"z": -1}}}, "data.at"),
        ({"data": {"mask_column": "land"}}, "data.mask_column land with task.kind classification: it is for segmentation"),
        ({"data": {"ignore_other_classes": True}}, "data.ignore_other_classes true with task.kind classification"),
        ({"data": {"channels": "DAPI"}}, "data.channels 'DAPI': give texts or whole numbers in brackets"),
        ({"data": {"value_range": 3}}, "data.value_range '3': give numbers in brackets"),
    ],
)
def test_settings_of_channels_that_contradict(tmp_path: Path, groups: dict[str, dict[str, Any]], told: str) -> None:
    with pytest.raises(InputError) as caught:
        _config(tmp_path, **groups)
    assert told in str(caught.value)


def test_the_configuration_of_the_page_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "wsi-channels.md").read_text()
    (tmp_path / "c.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    assert read_config(tmp_path / "c.yaml").num_channels == 3


def test_slides_without_the_channels_are_named_with_those_that_they_have(tmp_path: Path) -> None:
    path = _write_panel(tmp_path / "a.ome.tif", _panel(0))
    problem = SlideDataset(_config(tmp_path, data={"channels": ["CD20"]})).check(_record(path))
    assert problem is not None and all(name in problem for name in _NAMES)
    problem = SlideDataset(_config(tmp_path)).check(_record(path))
    assert problem is not None and "4 channels of uint16" in problem and "data.channels" in problem and "DAPI" in problem
    constant = _write_panel(tmp_path / "c.ome.tif", np.zeros((4, 64, 64), np.uint16))
    problem = SlideDataset(_config(tmp_path, data={"channels": [0], "percentiles": [1, 99]})).check(_record(constant))
    assert problem is not None and "both are 0" in problem


@pytest.mark.parametrize("num_channels", [1, 2, 5])
def test_first_layers_follow_the_channels(tmp_path: Path, num_channels: int) -> None:
    encoder = load_tile_encoder("tests.helpers.wsi:tile_net", {"width": 5}, tile_px=16, num_channels=num_channels, trust="tests")
    assert num_tile_features(encoder, "n", 16, num_channels) == 5
    plain = load_backbone("tests.helpers.wsi:tiny_net", {}, trust="tests")
    torch.save(plain.state_dict(), tmp_path / "w.pt")
    network = load_backbone("tests.helpers.wsi:tiny_net", {}, num_channels=num_channels, trust="tests")
    load_weights(network, tmp_path / "w.pt")
    assert feature_shapes(network, "n", num_channels) == feature_shapes(plain, "n")
    image = torch.rand(1, num_channels, 64, 64)  # the rule is linear: the RGB network on sums of channels
    shares = [image[:, number::3].sum(1) * (3 / num_channels if num_channels > 1 else 1) for number in range(3)]
    rgb = torch.stack([image[:, 0]] * 3 if num_channels == 1 else shares, 1)
    assert torch.allclose(network.eval()(image), plain.eval()(rgb), atol=1e-5)


def test_a_mask_of_valid_pixels_is_a_channel(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    bands = np.random.default_rng(0).integers(1, 4000, (2, 96, 64)).astype(np.uint16)
    bands[:, :10] = 0
    profile = {"driver": "GTiff", "height": 96, "width": 64, "count": 2, "dtype": "uint16", "nodata": 0, "crs": "EPSG:32632"}
    with rasterio.open(tmp_path / "a.tif", "w", transform=rasterio.Affine(10, 0, 6e5, 0, -10, 5e6), **profile) as file:
        file.write(bands)
    data = {"channels": [0, 1, 2], "invalid_pixels": "channel", "percentiles": [0, 100], "mpp": 20e6}
    pixels = _pixels(_config(tmp_path, data=data), tmp_path / "a.tif")
    assert pixels.shape == (3, 48, 32) and pixels[2, :5].max() == 0 and pixels[2, 5:].min() == 1


def test_errors_of_readers_name_settings_of_the_run(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    bands = np.random.default_rng(0).integers(1, 255, (4, 32, 32)).astype(np.uint8)  # rasterio declares the fourth as alpha
    profile = {"driver": "GTiff", "height": 32, "width": 32, "count": 4, "dtype": "uint8", "crs": "EPSG:32632"}
    with rasterio.open(tmp_path / "a.tif", "w", transform=rasterio.Affine(10, 0, 6e5, 0, -10, 5e6), **profile) as file:
        file.write(bands)
    data = {"channels": [3, 0]}
    with pytest.raises(SourceError, match=r"data.invalid_pixels: fill \(invalid ones get data.fill_value\).*data.invalid_pixels: band"):
        _pixels(_config(tmp_path, data=data), tmp_path / "a.tif")
    pixels = _pixels(_config(tmp_path, data={**data, "invalid_pixels": "band"}), tmp_path / "a.tif")
    assert np.array_equal(pixels.mul(255).round().numpy(), bands[[3, 0]])


def test_label_maps_are_at_their_map_coordinates(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    profile = {"driver": "GTiff", "height": 32, "width": 32, "count": 1, "crs": "EPSG:32632"}
    values = np.random.default_rng(0).integers(0, 2, (32, 32)).astype(np.uint8)
    for name, left, dtype in (("a.tif", 6e5, "uint16"), ("labels.tif", 6e5 + 80, "uint8")):
        with rasterio.open(tmp_path / name, "w", transform=rasterio.Affine(10, 0, left, 0, -10, 5e6), dtype=dtype, **profile) as file:
            file.write(values.astype(dtype), 1)
    record = replace(_record(tmp_path / "a.tif"), mask=tmp_path / "labels.tif")
    groups: dict[str, Any] = {"task": {"kind": "segmentation", "classes": ["a", "b"]}, "model": {"head": "segmentation"}}
    with pytest.raises(InputError, match=r"so 8 columns and 0 rows have no label.*data.mask_outside: 255"):
        SlideDataset(_config(tmp_path, data={"channels": [0]}, **groups)).labels(record)
    labels = SlideDataset(_config(tmp_path, data={"channels": [0], "mask_outside": 255, "mpp": 20e6}, **groups)).labels(record)
    out = torch.empty(1, 1, 16, 16, dtype=torch.int64)
    labels.rows(Interval(0, 16), out)
    assert (out[0, 0, :, :4] == 255).all() and np.array_equal(out[0, 0, :, 4:].numpy(), values[1::2, 1:24:2])
    with pytest.raises(InputError, match=r"data.mask_outside 255 with task.kind classification"):
        _config(tmp_path, data={"mask_outside": 255})


def test_pictures_of_channels_are_rgb(tmp_path: Path) -> None:
    path = _write_panel(tmp_path / "a.ome.tif", _panel(0))
    picture = as_picture(open_image(path))
    pixels = picture.read(0, 0, 128, 136)
    assert pixels.dtype == np.uint8 and pixels.shape == (136, 128, 3) and pixels.min() == 0 and pixels.max() == 255
    grey = as_picture(open_image(path, channels=["CD3"])).read(0, 0, 8, 8)
    assert (grey[..., 0] == grey[..., 2]).all()


def test_predictions_of_several_files_keep_the_map_coordinates(segmented: Path, tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    profile = {"driver": "GTiff", "height": 96, "width": 64, "count": 4, "dtype": "uint16", "crs": "EPSG:32632", "tiled": True}
    profile |= {"blockxsize": 64, "blockysize": 64}
    for number in range(2):
        bands, place = _panel(number, (96, 64)), rasterio.Affine(10, 0, 6e5 + 640 * number, 0, -10, 5e6)
        with rasterio.open(tmp_path / f"t{number}.tif", "w", transform=place, **profile) as file:
            file.write(bands)
            file.descriptions = _NAMES
    pair = f"{tmp_path / 't0.tif'};{tmp_path / 't1.tif'}"
    out = tmp_path / "out"
    assert run_wsi(["predict", str(segmented / "run"), pair, "--formats", "tif", "--out", str(out)]) == 0
    with rasterio.open(out / "t0" / "classes.tif") as file:
        assert file.crs.to_epsg() == 32632 and (file.width, file.height) == (128, 96)
        assert file.transform.c == 6e5 and file.transform.f == 5e6
