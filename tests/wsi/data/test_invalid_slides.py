"""Invalid slides and folders: reported in one list, before any computation or write."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.slides import SLIDE
from tests.helpers.wsi import real_pixels, write_config, write_slide, write_table, write_task
from tests.helpers.wsi import run_wsi as main


def _printed(capsys: pytest.CaptureFixture[str]) -> str:
    output, errors = capsys.readouterr()
    assert "Traceback" not in errors
    return " ".join((output + errors).split())


def test_files_that_are_no_slides_are_listed_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_slide(tmp_path / "good.tif", real_pixels()[:160, :160])
    (tmp_path / "cut.svs").write_bytes(SLIDE.read_bytes()[: 1 << 19])
    (tmp_path / "renamed.svs").write_text("slide,label\nthis is a table\n")
    (tmp_path / "picture.tif").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    np.save(tmp_path / "grey.npy", np.zeros((50, 50), np.uint8))
    names = ["good.tif", "cut.svs", "renamed.svs", "picture.tif", "grey.npy"]
    table = write_table(
        tmp_path / "t.csv", [{"slide": name, "label": "ab"[number % 2], "split": "train"} for number, name in enumerate(names)]
    )
    config = write_config(tmp_path / "c.yaml", table, tmp_path / "run")
    assert main(["train", "--config", str(config)]) == 1
    told = _printed(capsys)
    for line, name in enumerate(names[1:], 3):
        assert f"line {line}:" in told and name in told, told
    assert "line 2:" not in told
    assert not list((tmp_path / "run").rglob("*.safetensors")) and not (tmp_path / "run" / "steps.csv").exists()


def test_missing_and_empty_slides_and_patients_in_two_splits_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_slide(tmp_path / "a.tif", real_pixels()[:160, :160])
    shutil.copy(tmp_path / "a.tif", tmp_path / "b.tif")
    (tmp_path / "empty.tif").touch()
    table = tmp_path / "t.csv"
    table.write_bytes(
        b"\xef\xbb\xbfslide,label,patient,split\r\n"  # a byte order mark, and the line ends of another system
        b"a.tif,x,p1,train\r\nb.tif,y,p1,val\r\ngone.tif,x,p2,train\r\nempty.tif,y,p3,train\r\n../a.tif,y,p4,train\r\n"
    )
    config = write_config(tmp_path / "c.yaml", table, tmp_path / "run")
    assert main(["train", "--config", str(config)]) == 1
    told = _printed(capsys)
    for problem in ("patient 'p1' is in train (line 2), val (line 3)", "line 4:", "is missing", "line 5:", "has no bytes", "line 6:"):
        assert problem in told, (problem, told)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is the device")
def test_a_missing_device_is_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_slide(tmp_path / "a.tif", real_pixels()[:64, :64])
    table = tmp_path / "t.csv"
    table.write_text("slide,label,patient,split\na.tif,x,p1,train\n", encoding="utf-8")
    config = write_config(tmp_path / "c.yaml", table, tmp_path / "run")
    assert main(["train", "--config", str(config), "--train.device", "cuda"]) == 1
    told = _printed(capsys)
    assert "device 'cuda' cannot be used here" in told and "Traceback" not in told


def test_labels_are_no_paths_and_no_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_task(tmp_path, num_slides=6, size_px=96)
    table.write_text(table.read_text().replace("plain", "x/../../../../evil").replace("swapped", r"$\foo$"))
    run = tmp_path / "run"
    config = write_config(tmp_path / "c.yaml", table, run, train={"epochs": 1})
    before = {*tmp_path.rglob("*")}
    assert main(["train", "--config", str(config), "--bootstrap", "0"]) == 0
    options = ["--names", "s2", "--classes", "x/../../../../evil", r"$\foo$", "--saliency", "--crops", "1", "--crop-px", "16"]
    assert main(["heatmap", str(run), *options]) == 0
    _printed(capsys)
    made = {*tmp_path.rglob("*")} - before
    assert all(path == run or path.is_relative_to(run) for path in made)
    names = [f"{kind}-{name}" for name in ("_foo_", "x_.._.._.._.._evil") for kind in ("crop", "crops", "map", "saliency")]
    drawn = sorted(path.name for path in made if path.is_relative_to(run / "heatmaps" / "s2") and path.is_file())
    drawn.remove("heatmap.json")
    assert len(drawn) == 2 * 6 and all(any(name.startswith(start) for start in names) for name in drawn), drawn
    saliency = np.load(run / "heatmaps" / "s2" / "saliency-_foo_.npy")
    assert saliency.ndim == 2 and saliency.max() > 0
    assert (run / "val" / "confusion.png").exists() and (run / "summary.md").exists()


def test_a_slide_that_vanishes_during_a_run_is_left_out_or_ends_it_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sft.wsi.train.trainer import Trainer

    table = write_task(tmp_path, num_slides=8)
    plain = Trainer.run

    def vanishing(self: Trainer, interruption: object, **keywords: object) -> object:
        (tmp_path / "s1.tif").unlink(missing_ok=True)
        return plain(self, interruption, **keywords)  # type: ignore[arg-type] # passed on as it came

    monkeypatch.setattr(Trainer, "run", vanishing)
    config = write_config(tmp_path / "c.yaml", table, tmp_path / "run", train={"epochs": 1, "accumulate": 2})
    assert main(["train", "--config", str(config), "--bootstrap", "0"]) == 1
    assert "s1.tif" in _printed(capsys)
    write_task(tmp_path, num_slides=8)
    arguments = ["train", "--config", str(config), "--bootstrap", "0", "--run", str(tmp_path / "skip"), "--train.on_error", "skip"]
    assert main(arguments) == 3
    _printed(capsys)
    failed = (tmp_path / "skip" / "failed.csv").read_text(encoding="utf-8")
    assert failed.count("s1") >= 1 and (tmp_path / "skip" / "summary.md").exists()
