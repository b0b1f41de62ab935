"""Training on slides with a painted background: its strips are left out, and the run reports their share."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sft.wsi.run.folder import RunFolder
from tests.helpers.wsi import real_pixels, write_config, write_slide, write_table
from tests.helpers.wsi import run_wsi as main

_HEIGHT_PX, _WIDTH_PX = 1600, 160


def _steps(run: Path) -> list[dict[str, str]]:
    with (run / "steps.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _table(folder: Path) -> Path:
    """Four slides, of which a mask leaves a sixth at both ends."""
    mask = np.zeros((_HEIGHT_PX // 8, _WIDTH_PX // 8), np.uint8)
    mask[: len(mask) // 6] = mask[-len(mask) // 6 :] = 255
    Image.fromarray(mask).save(folder / "mask.png")
    rows = []
    for number in range(4):
        left = number * _WIDTH_PX
        crop = real_pixels()[:_HEIGHT_PX, left : left + _WIDTH_PX]
        write_slide(folder / f"s{number}.tif", crop[..., ::-1] if number % 2 else crop)
        split = ("train", "train", "val", "val")[number]
        row = {"slide": f"s{number}.tif", "label": str(number % 2), "patient": f"p{number}", "split": split, "mask": "mask.png"}
        rows.append(row)
    return write_table(folder / "slides.csv", rows)


def test_background_is_left_out_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slides turned or not; steps.csv and the epoch's lines have the skipped share."""
    config = write_config(
        tmp_path / "c.yaml",
        _table(tmp_path),
        tmp_path / "run",
        model={"budget": "1500KiB"},
        augment={"rotations": False},
        train={"accumulate": 1, "epochs": 1},
    )
    assert main(["train", "--config", str(config), "--bootstrap", "0"]) == 0
    with (tmp_path / "run" / "steps.csv").open(newline="") as file:
        shares = [float(row["skipped_share"]) for row in csv.DictReader(file)]
    assert len(shares) == 2
    assert all(0.1 < share < 0.66 for share in shares)
    assert "% of the FLOPs of its training steps were left out" in capsys.readouterr().out


def test_tiles_of_columns_leave_out_background_left_of_tissue(tmp_path: Path) -> None:
    """Tissue at the right of every row: no full-width strip is background, but tiles are."""
    height_px, width_px = 256, 1024
    mask = np.zeros((height_px // 8, width_px // 8), np.uint8)
    mask[:, -len(mask[0]) // 4 :] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    for number in range(2):
        crop = real_pixels()[height_px * number : height_px * (number + 1), :width_px]
        write_slide(tmp_path / f"s{number}.tif", crop[..., ::-1] if number else crop)
    rows = [{"slide": f"s{number}.tif", "label": str(number), "split": "train", "mask": "mask.png"} for number in range(2)]
    # Not painted are the cropped slide's columns only: a second piece of tissue at the left keeps them all.
    mask[:2, :2] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    table, shares = write_table(tmp_path / "slides.csv", rows), {}
    for name, tile in (("strips", [16, width_px]), ("tiles", [16, 128])):
        config = write_config(
            tmp_path / "c.yaml",
            table,
            tmp_path / name,
            model={"budget": "8MiB", "tile": tile},
            augment={"rotations": False},
            train={"accumulate": 1, "epochs": 1},
        )
        assert main(["train", "--config", str(config), "--bootstrap", "0"]) == 0
        shares[name] = [float(row["skipped_share"]) for row in _steps(tmp_path / name)]
    assert shares["strips"] == [0.0, 0.0]
    assert all(0.2 < share < 0.75 for share in shares["tiles"]), shares


def test_rows_of_earlier_versions_stay(tmp_path: Path) -> None:
    """A run started without the column continues with it; a truncated row is computed again."""
    (tmp_path / ".lock").touch()  # identifies a run
    (tmp_path / "steps.csv").write_text("step,epoch,loss\n1,0,0.5\n2,0,0.4\n3,0\n")
    with RunFolder(tmp_path, needed_bytes=0) as folder:
        folder.start_steps(2)
    with (tmp_path / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["skipped_share"]) for row in rows] == [("1", "0.5", ""), ("2", "0.4", "")]
