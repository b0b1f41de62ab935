"""A dark dot on a white slide is under its drawn cell, inside of its crop, and at its position in the tables."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from PIL import Image
from torch import Tensor, nn

import sft
from sft.prediction.image_frame import ImageFrame
from sft.wsi.cli import read_config
from sft.wsi.data.augment import Augmentation
from sft.wsi.data.dataset import SlideFrame
from sft.wsi.eval.heatmap import HeatmapMaker, write_map_table
from sft.wsi.model.backbones import cut_before_pooling
from sft.wsi.model.heads import PooledHead, SlideModel
from sft.wsi.train.experiment import Experiment, load_experiment
from tests.helpers.wsi import write_config, write_slide, write_table

_DOT_PX = 8  # side of the dot


def _conv(kernel: int, stride: int, padding: int, channels: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, 1, kernel, stride=stride, padding=padding, bias=False)


class _Classifier(nn.Module):
    """A pooled classifier of padded, strided convolutions, to be cut before its pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stage, self.pool = (
            _conv(7, 4, 3, channels=3),
            nn.Sequential(_conv(3, 2, 1), _conv(3, 2, 1)),
            nn.AdaptiveAvgPool2d(1),
        )
        self.fc = nn.Linear(1, 3)

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.pool(self.stage(self.stem(image))).flatten(1))
        return scores


_BACKBONES: dict[str, Callable[[], nn.Module]] = {
    "padded": lambda: nn.Sequential(_conv(7, 2, 3, channels=3), nn.MaxPool2d(3, 2, 1), _conv(3, 2, 1), _conv(3, 2, 1)),
    "unpadded": lambda: nn.Sequential(_conv(7, 2, 0, channels=3), nn.MaxPool2d(3, 2), _conv(3, 2, 0), _conv(5, 2, 0)),
    "patches": lambda: nn.Sequential(_conv(4, 4, 0, channels=3), _conv(7, 1, 3), _conv(2, 2, 0), _conv(2, 2, 0)),
    "cut": lambda: cut_before_pooling(_Classifier(), "classifier"),
}


def _experiment(folder: Path, backbone: nn.Module, pixels: Any, **data: Any) -> Experiment:
    """An experiment on one slide, with a network of positive weights in which white is zero: only the dot responds."""
    write_slide(folder / "s.tif", pixels)
    row = {"slide": "s.tif", "label": "a", "patient": "p", "split": "train"}
    mask = data.pop("mask", None)
    if mask is not None:
        Image.fromarray(mask).save(folder / "mask.png")
        row["mask"] = "mask.png"
    table = write_table(folder / "t.csv", [row, {**row, "slide": "other.tif", "label": "b", "patient": "q"}])
    write_slide(folder / "other.tif", pixels)
    config = read_config(
        write_config(
            folder / "c.yaml",
            table,
            folder / "run",
            data={"csv": str(table), **data},
            model={"mean": [1.0, 1.0, 1.0], "std": [1.0, 1.0, 1.0]},
        )
    )
    experiment = load_experiment(config, trust="tests")
    head = PooledHead(1, 2)
    for parameter in (*backbone.parameters(), *head.parameters()):
        nn.init.ones_(parameter)
    nn.init.constant_(head.classifier.weight, -1.0)  # dark is negative
    return replace(experiment, model=SlideModel(backbone, head))


def _slide(height_px: int, width_px: int, dot: tuple[int, int]) -> Any:
    """A white slide with a dot centred at (row, column)."""
    pixels = np.full((height_px, width_px, 3), 255, np.uint8)
    row, column = dot
    pixels[row - _DOT_PX // 2 : row + _DOT_PX // 2, column - _DOT_PX // 2 : column + _DOT_PX // 2] = 0
    return pixels


@pytest.mark.parametrize("kind", _BACKBONES)
@pytest.mark.parametrize("dot", [(132, 200), (171, 145)])
def test_a_dot_lies_under_its_cell_and_in_its_crop(
    kind: str, dot: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = _experiment(tmp_path, _BACKBONES[kind](), _slide(300, 380, dot))
    drawn: list[tuple[Any, Any]] = []
    imshow = Axes.imshow

    def record(axes: Axes, values: Any, **options: Any) -> Any:
        drawn.append((values, options["extent"]))
        return imshow(axes, values, **options)

    monkeypatch.setattr(Axes, "imshow", record)
    maker = HeatmapMaker(experiment, tmp_path / "maps")
    heatmap = maker.draw(experiment.table.records[0], 1, saliency=True, num_crops=1, crop_px=49)
    evidence, (left, right, bottom, top) = next((v, e) for v, e in drawn if v.ndim == 2)
    stride = (bottom - top) / evidence.shape[0], (right - left) / evidence.shape[1]
    assert stride == (16.0, 16.0) and evidence.min() >= 0
    for axis, start in enumerate((top, left)):
        profile = evidence.sum(axis=1 - axis)
        centroid = start + stride[axis] * ((profile * np.arange(len(profile))).sum() / profile.sum() + 0.5)
        assert abs(centroid - dot[axis]) <= stride[axis] / 4, (axis, centroid)
    row, column = np.unravel_index(evidence.argmax(), evidence.shape)
    for start, index, step, place in ((top, row, stride[0], dot[0]), (left, column, stride[1], dot[1])):
        assert start + index * step - _DOT_PX <= place <= start + (index + 1) * step + _DOT_PX
    with Image.open(tmp_path / "maps" / "s" / "crop-b-01.png") as crop:
        dark = np.argwhere(np.asarray(crop)[..., 0] == 0)
    assert len(dark) >= _DOT_PX**2 and np.abs(dark.mean(0) + 0.5 - 24.5).max() <= 16
    saliency, extent = drawn[-1]
    assert extent == (0.0, saliency.shape[1] * 4.0, saliency.shape[0] * 4.0, 0.0)  # blocks of 4 px from the corner on
    assert heatmap.stride_px == (16.0, 16.0) and heatmap.first_centre_px == (left + 8, top + 8)


@pytest.mark.parametrize("mpp", [None, 1.0])
def test_places_are_in_px_of_the_whole_slide(mpp: float | None, tmp_path: Path) -> None:
    dot = (252, 300)
    mask = np.zeros((50, 60), np.uint8)
    mask[15:45, 20:55] = 1  # the tissue begins at column 160, row 120 of 480 x 400 px
    data = {"tissue": "crop"} | ({} if mpp is None else {"mpp": mpp})
    experiment = _experiment(tmp_path, _BACKBONES["padded"](), _slide(400, 480, dot), mask=mask, **data)
    record, factor = experiment.table.records[0], 1.0 if mpp is None else 2.0
    frame = experiment.feed.frame(record)
    assert frame == SlideFrame(scale=(factor, factor), origin_px=(160.0, 120.0))
    seen = ImageFrame.of(experiment.feed.source(record))  # the position of predicted files
    assert (seen.scale, seen.origin_px) == (frame.scale, frame.origin_px)
    maker = HeatmapMaker(experiment, tmp_path / "maps")
    heatmap = maker.draw(record, 1, saliency=False, num_crops=1, crop_px=24)
    assert heatmap.stride_px == (16.0 * factor, 16.0 * factor)
    assert heatmap.first_centre_px == (160 + 0.5 * factor, 120 + 0.5 * factor)
    with (tmp_path / "maps" / "s" / "crops-b.csv").open(encoding="utf-8") as file:
        (crop,) = csv.DictReader(file)
    assert float(crop["slide_left_px"]) == 160 + factor * int(crop["left_px"])
    assert float(crop["slide_width_px"]) == 24 * factor
    for place, side in ((dot[0], "top"), (dot[1], "left")):
        assert float(crop[f"slide_{side}_px"]) < place < float(crop[f"slide_{side}_px"]) + 24 * factor


def test_the_table_of_maps_keeps_other_maps(tmp_path: Path) -> None:
    experiment = _experiment(tmp_path, _BACKBONES["patches"](), _slide(160, 160, (80, 80)))
    folder = tmp_path / "maps"
    maker = HeatmapMaker(experiment, folder)
    for record in (*experiment.table.records, experiment.table.records[0]):
        write_map_table(folder, maker.draw(record, 1, saliency=False, num_crops=0, crop_px=1))
    with (folder / "maps.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["slide"] for row in rows] == ["other", "s"]
    assert all(float(row["stride_x_px"]) == 16 and float(row["first_centre_y_px"]) == 8 for row in rows)
    assert all(np.load(folder / row["map"]).shape == (10, 10) for row in rows)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["padded", "unpadded"])
def test_a_turned_slide_has_its_dot_in_the_turned_cell(kind: str, quarters: int, mirrored: bool, tmp_path: Path) -> None:
    """Maps of a turned slide, turned back: the grids of axes that run backwards are reversed."""
    dot, size_px = (132, 200), (300, 380)
    experiment = _experiment(tmp_path, _BACKBONES[kind](), _slide(*size_px, dot))
    source = experiment.feed.source(experiment.table.records[0], Augmentation(quarters=quarters, mirrored=mirrored))
    net = sft.compile(experiment.model.backbone.eval(), source, budget="64MiB")
    with torch.no_grad():
        evidence = -net(source)[0, 0].numpy()
    grids = list(sft.position_grids(net, source)[0] or ())
    evidence = np.rot90(evidence, -quarters)
    rows, columns = (grids[1], grids[0]) if quarters % 2 else (grids[0], grids[1])
    if quarters in (2, 3):
        rows = rows.reversed(evidence.shape[0], size_px[0])
    if quarters in (1, 2):
        columns = columns.reversed(evidence.shape[1], size_px[1])
    if mirrored:
        evidence, columns = evidence[:, ::-1], columns.reversed(evidence.shape[1], size_px[1])
    for axis, grid in enumerate((rows, columns)):
        profile = evidence.sum(axis=1 - axis)
        centroid = (profile * np.arange(len(profile))).sum() / profile.sum()
        assert abs(float(grid.first_centre_px) + centroid * float(grid.stride_px) - dot[axis]) <= float(grid.stride_px) / 4
