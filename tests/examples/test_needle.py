"""The slides of the needle example: the deciding texture exists at full resolution only; the other two training methods run."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.needle.baselines import Settings, load_slides, train_downsampled, train_on_patches
from examples.needle.network import needle_net
from examples.needle.slides import BLOCK_PX, _shuffled, make_slides
from sft.sources import open_image
from sft.wsi import TaskConfig, read_table

pytest.importorskip("openslide")

_MAIN = Path(__file__).resolve().parents[2] / "examples" / "needle" / "main.py"


def test_shuffled_blocks_keep_their_pixels_and_no_others() -> None:
    draw = np.random.default_rng(0)
    square = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    shuffled = _shuffled(square, draw)
    assert not np.array_equal(square, shuffled)
    for top in range(0, 32, BLOCK_PX):
        for left in range(0, 32, BLOCK_PX):
            before, after = (image[top : top + BLOCK_PX, left : left + BLOCK_PX].reshape(-1, 3) for image in (square, shuffled))
            assert np.array_equal(before[np.lexsort(before.T)], after[np.lexsort(after.T)])


def test_slides_have_a_pyramid_of_means_and_a_table(tmp_path: Path) -> None:
    table = make_slides(tmp_path, num_slides=6, size_px=256, needle_px=16, seed=0)
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["split"] for row in rows] == ["train", "train", "train", "val", "test", "test"]
    assert {row["label"] for row in rows} == {"intact", "shuffled"}
    image = open_image(tmp_path / rows[0]["slide"])
    assert image.level_dimensions == ((256, 256), (128, 128), (64, 64), (32, 32)) and image.mpp == pytest.approx((0.5, 0.5))
    full, small = image.read(0, 0, 256, 256), image.read(0, 0, 32, 32, 3)
    means = full.reshape(32, BLOCK_PX, 32, BLOCK_PX, 3).mean((1, 3))
    assert np.abs(small - means).max() <= 0.5
    with pytest.raises(ValueError, match="multiples of"):
        make_slides(tmp_path, num_slides=1, size_px=250, needle_px=16, seed=0)


def test_the_first_filters_see_no_brightness() -> None:
    first = next(needle_net(4).children())
    with torch.no_grad():
        assert float(first(torch.full((1, 3, 8, 8), 3.0)).abs().max()) < 1e-5


def test_the_other_methods_predict_each_slide_outside_of_training(tmp_path: Path) -> None:
    table = read_table(make_slides(tmp_path, num_slides=6, size_px=128, needle_px=16, seed=0), TaskConfig())
    settings = Settings(size_px=128, num_steps=2, slides_per_step=1, learning_rate=1e-3, head="max", seed=0)
    names = [record.name for record in table.records if record.split != "train"]
    by_method = {
        "small": train_downsampled(table, load_slides(table, 3), settings),
        **train_on_patches(table, load_slides(table, 0), settings, 32),
    }
    assert set(by_method) == {"small", "mean", "max"}
    for predictions in by_method.values():
        assert [prediction.name for prediction in predictions] == names
        assert all(sum(prediction.output) == pytest.approx(1) for prediction in predictions)


@pytest.mark.slow
def test_the_script_trains_with_three_methods_and_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--slides", "8", "--size", "128", "--needle", "16", "--epochs", "1", "--patch", "64", "--baseline-lr", "1e-3", "--more", "2"]
    monkeypatch.setattr(sys, "argv", [str(_MAIN), *options, "--out", str(tmp_path)])
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script changes it
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(_MAIN), run_name="__main__")
    assert end.value.code == 0
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert all(way in page for way in ("| whole slides, sft |", "| downsampled 8 x 8 |", "| random patches of 64 px", "2 times the pixels"))
