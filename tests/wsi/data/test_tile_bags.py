"""Tiles of the slides of a run: those of the tissue, on a grid that augmentation does not move."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.common.errors import InputError
from sft.common.interval import Interval
from sft.wsi.config import AugmentConfig, Config, DataConfig, ModelConfig, TaskConfig, TrainConfig
from sft.wsi.data.augment import Augmentation
from sft.wsi.data.table import SlideRecord
from sft.wsi.data.tile_bags import SlideTiles, TileDataset
from tests.helpers.wsi import write_slide

_PIXELS = np.random.default_rng(0).integers(0, 256, (70, 100, 3), dtype=np.uint8)


def _feed(data: dict[str, Any] | None = None, **model: Any) -> TileDataset:
    config = Config(
        data=DataConfig(csv=Path("t.csv"), **(data or {})),
        task=TaskConfig(),
        model=ModelConfig(encoder="tiles", **{"tile_px": 16, "mean": [0.0] * 3, "std": [1.0] * 3, **model}),
        augment=AugmentConfig(),
        train=TrainConfig(),
        run=Path("run"),
    )
    return TileDataset(config)


def _record(folder: Path, **changes: Any) -> SlideRecord:
    write_slide(folder / "s.tif", _PIXELS, num_levels=1)
    known = {"name": "s", "path": folder / "s.tif", "patient": "p", "row": 2, "target": (0.0,), "split": "train", "mpp": None, "mask": None}
    return SlideRecord(**{**known, **changes})


def _pixels(tiles: SlideTiles) -> np.ndarray[Any, Any]:
    out = torch.empty(tiles.shape)
    tiles.rows(Interval(0, tiles.shape[2]), out)
    return (255 * out).round().byte().permute(0, 2, 3, 1).numpy()


def test_augmentation_turns_tiles_and_leaves_them_in_their_places(tmp_path: Path) -> None:
    record, feed = _record(tmp_path), _feed(stride_px=24)
    upright = feed.source(record)
    assert len(upright) == 12 and upright.record is record
    for quarters, mirrored in product(range(4), (False, True)):
        turned = _pixels(feed.source(record, Augmentation(quarters=quarters, mirrored=mirrored)))
        for tile, (x, y) in zip(turned, upright.positions_px, strict=True):
            expected = _PIXELS[y : y + 16, x : x + 16]
            assert np.array_equal(tile, np.rot90(expected[:, ::-1] if mirrored else expected, quarters)), (quarters, mirrored, x, y)


def test_tissue_chooses_tiles_and_nothing_is_cropped(tmp_path: Path) -> None:
    mask = np.zeros((70, 100), np.uint8)
    mask[30:60, 20:80] = 1
    np.save(tmp_path / "m.npy", mask)
    record = _record(tmp_path, mask=tmp_path / "m.npy")
    feed = _feed()
    tiles = feed.source(record)
    share = {(x, y): mask[y : y + 16, x : x + 16].mean() for y in range(0, 55, 16) for x in range(0, 85, 16)}
    assert [tuple(place) for place in tiles.positions_px.tolist()] == [place for place, value in share.items() if value >= 0.5]
    assert feed.frame(record).origin_px == (0, 0) and feed.check(record) is None
    assert feed.sizes == {"s": (16, 16 * len(tiles))}
    assert len(_feed(min_tissue=0.0).source(record)) == sum(value > 0 for value in share.values())
    painted = np.where(mask[..., None] > 0, _PIXELS, 255)
    for tile, (x, y) in zip(_pixels(tiles), tiles.positions_px, strict=True):
        assert np.array_equal(tile, painted[y : y + 16, x : x + 16])
    mask[:] = 0
    mask[0, 0] = 1
    np.save(tmp_path / "m.npy", mask)
    problem = feed.check(record)
    assert problem is not None and "none has a share of 0.5 of tissue" in problem and "Lower min_tissue" in problem


def test_a_slide_smaller_than_a_tile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot take tiles of 128 x 128 px .*it has 100 x 70 px"):
        _feed(tile_px=128).source(_record(tmp_path))
