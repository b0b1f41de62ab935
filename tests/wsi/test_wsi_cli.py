"""The command line from a table of slides to heatmaps, and its error messages."""

from __future__ import annotations

import json
import re
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import sft
from sft.prediction import NpyWriter
from sft.sources import BadTile, open_image
from sft.tissue import TissueMask, read_geojson
from sft.wsi.data.tissue import read_area
from sft.wsi.run.folder import RunFolder
from sft.wsi.train.checkpoint import CheckpointFolder
from tests.helpers.fork_server import run_module
from tests.helpers.slides import SLIDE
from tests.helpers.wsi import damage_tile, read_rows, real_pixels, tissue_places, write_config, write_slide, write_table, write_task
from tests.helpers.wsi import run_wsi as main

_ROOT = Path(__file__).resolve().parents[2]


def _printed_json(capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    output, errors = capsys.readouterr()
    return json.loads(output), errors


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in a process of its own; a training slide and a test slide have an undecodable tile."""
    folder = tmp_path_factory.mktemp("trained")
    table = write_task(folder, num_slides=10)
    for name in ("s5.tif", "s9.tif"):
        damage_tile(folder / name)
    config = write_config(folder / "c.yaml", table, folder / "run", train={"on_error": "skip", "epochs": 3, "monitor": "auc"})
    arguments = ["train", "--config", str(config), "--bootstrap", "50", "--json", "--trust", "tests"]
    done = run_module("sft.wsi", arguments, tmp_path_factory.mktemp("output"))
    assert done.returncode == 3, done.stderr
    told = json.loads(done.stdout)
    assert sorted(told["failed"]) == ["s5", "s9"] and told["steps"] == 9 and told["epochs"] == 3
    assert "Traceback" not in done.stderr
    return folder


def test_a_run_writes_its_documented_files(trained: Path) -> None:
    run = trained / "run"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["train"]["lr"] == 0.01 and config["model"]["norm"] == "auto"
    assert [row["epoch"] for row in read_rows(run / "metrics.csv")] == ["1", "2", "3"]
    assert {"train_loss", "val_loss", "val_auc"} <= set(read_rows(run / "metrics.csv")[0])
    assert len(read_rows(run / "steps.csv")) == 9 and len(read_rows(run / "splits.csv")) == 10
    assert "budget" in (run / "plan.txt").read_text() and json.loads((run / "plan.json").read_text())
    for name in ("curves.png", "val/roc.png", "val/confusion.png"):
        with Image.open(run / name) as picture:
            assert min(picture.size) > 200, name
    summary = (run / "summary.md").read_text()
    assert "| auc |" in summary and "(val/roc.png)" in summary and "## Left out" not in summary.split("## test")[0]
    assert [row["slide"] for row in read_rows(run / "failed.csv")] == ["s5", "s9"]
    predictions = read_rows(run / "val" / "predictions.csv")
    assert [row["slide"] for row in predictions] == ["s6", "s7"] and predictions[0]["target"] == "plain"
    assert all(abs(float(row["p_plain"]) + float(row["p_swapped"]) - 1) < 1e-6 for row in predictions)
    assert not any("s5" in row["slides"].split() for row in read_rows(run / "steps.csv"))
    losses = [float(row["train_loss"]) for row in read_rows(run / "metrics.csv")]
    assert losses[-1] < losses[0]


def test_starting_a_finished_run_again_changes_nothing(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    weights = {path.parent.name: path.read_bytes() for path in run.rglob("*.safetensors")}
    arguments = ["train", "--config", str(trained / "c.yaml"), "--run", str(run), "--bootstrap", "0"]
    assert main(arguments) == 3
    assert weights == {path.parent.name: path.read_bytes() for path in run.rglob("*.safetensors")}
    capsys.readouterr()
    assert main([*arguments, "--train.lr", "0.5"]) == 1
    assert "train.lr (was 0.01, is 0.5)" in capsys.readouterr().err
    table = trained / "other.csv"
    table.write_text((trained / "slides.csv").read_text().replace("plain", "x").replace("swapped", "plain"))
    assert main([*arguments, "--data.csv", str(table)]) == 1
    assert "other slides, labels or splits" in capsys.readouterr().err


def test_evaluate_the_runs_own_slides_and_others_without_labels(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(trained / "run"), "--bootstrap", "0", "--json", "--out", str(tmp_path / "val")]) == 0
    told, _ = _printed_json(capsys)
    assert read_rows(tmp_path / "val" / "predictions.csv") == read_rows(trained / "run" / "val" / "predictions.csv")
    assert told["metrics"]["slides"]["loss"]["value"] > 0
    table = write_table(trained / "new.csv", [{"slide": "s0"}, {"slide": "s1"}])
    assert main(["evaluate", str(trained / "run"), "--csv", str(table), "--json", "--out", str(tmp_path / "new")]) == 0
    told, _ = _printed_json(capsys)
    assert told["metrics"] == {"slides": {}, "patients": {}}
    assert [row["slide"] for row in read_rows(tmp_path / "new" / "predictions.csv")] == ["s0", "s1"]
    assert main(["evaluate", str(trained / "run"), "--split", "test", "--bootstrap", "0"]) == 3
    # Results of the last weights do not replace those of the best ones, and none replace the run's own files.
    best = (trained / "run" / "val" / "predictions.csv").read_bytes()
    capsys.readouterr()
    assert main(["evaluate", str(trained / "run"), "--checkpoint", "last", "--bootstrap", "0", "--json"]) == 0
    told, _ = _printed_json(capsys)
    assert told["folder"] == str(trained / "run" / "val-last")
    assert (trained / "run" / "val" / "predictions.csv").read_bytes() == best
    assert main(["evaluate", str(trained / "run"), "--bootstrap", "0", "--out", str(trained / "run")]) == 1
    assert "the run's own folder" in capsys.readouterr().err


def test_heatmaps_are_the_decision(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--names", "s6", "--saliency", "--crops", "2", "--crop-px", "32", "--out", str(tmp_path), "--json"]
    assert main(["heatmap", str(trained / "run"), *options]) == 0
    told, _ = _printed_json(capsys)
    (drawn,) = told["heatmaps"]
    assert {Path(name).name for name in drawn["files"]} == {
        "map-swapped.npy", "map-swapped.png", "saliency-swapped.npy", "saliency-swapped.png",
        "crop-swapped-01.png", "crop-swapped-02.png", "crops-swapped.csv"
    }  # fmt: skip
    best = CheckpointFolder(trained / "run" / "checkpoints").load("best")
    assert best is not None
    evidence = np.load(tmp_path / "s6" / "map-swapped.npy")
    assert evidence.sum() + float(best.weights["head.classifier.bias"][1]) == pytest.approx(drawn["score"], rel=1e-4)
    assert main(["predict", str(trained / "run"), "--formats", "npy", "ome.tif", "--out", str(tmp_path / "maps"), "--json"]) == 0
    told, _ = _printed_json(capsys)  # the same maps as files of all classes
    (written,) = (each for each in told["maps"] if each["slide"] == "s6")
    assert np.allclose(np.load(written["files"][0])[1], evidence, atol=1e-5 * np.abs(evidence).max())
    assert {row["slide"] for row in read_rows(tmp_path / "maps" / "predictions.csv")} == {each["slide"] for each in told["maps"]}
    assert main(["predict", str(trained / "run"), "--kind", "classes"]) == 1
    assert "whose maps are its evidence" in capsys.readouterr().err
    row = read_rows(trained / "run" / "val" / "predictions.csv")[0]
    logits = [float(np.log(float(row[name]))) for name in ("p_plain", "p_swapped")]
    assert main(["heatmap", str(trained / "run"), *options, "--classes", "plain", "swapped"]) == 0
    told, _ = _printed_json(capsys)
    plain, swapped = (item["score"] for item in told["heatmaps"])
    assert swapped - plain == pytest.approx(logits[1] - logits[0], rel=1e-4)
    crops = read_rows(tmp_path / "s6" / "crops-swapped.csv")
    assert float(crops[0]["contribution"]) >= float(crops[1]["contribution"])
    with Image.open(tmp_path / "s6" / "crop-swapped-01.png") as crop:
        assert crop.size == (32, 32)
        pixels = real_pixels()[tissue_places(168)[6][0] + int(crops[0]["top_px"]) :, tissue_places(168)[6][1] + int(crops[0]["left_px"]) :]
        assert np.array_equal(np.asarray(crop), pixels[:32, :32])
    assert not list(tmp_path.rglob(".partial-*"))


def test_a_real_slide_from_the_table_to_the_heatmap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"slide_id": f"s{number}", "label": "ab"[number % 2], "case_id": f"c{number}"} for number in range(6)]
    for row in rows:
        shutil.copy(SLIDE, tmp_path / f"{row['slide_id']}.svs")
    config = write_config(
        tmp_path / "c.yaml",
        write_table(tmp_path / "t.csv", rows),
        tmp_path / "run",
        data={"mpp": 4.0, "tissue": "mask", "val_fraction": 0.34},
        model={"head": "attention"},
        augment={"stain": "macenko"},
        train={"epochs": 1},
    )
    assert main(["train", "--config", str(config), "--bootstrap", "0", "--json"]) == 0
    told, _ = _printed_json(capsys)
    assert told["steps"] == 2 and not told["failed"]
    validated = read_rows(tmp_path / "run" / "val" / "predictions.csv")
    assert len(validated) == 2 and {row["target"] for row in validated} == {"a", "b"}
    assert main(["heatmap", str(tmp_path / "run"), "--names", validated[0]["slide"], "--saliency", "--crops", "0", "--json"]) == 0
    told, _ = _printed_json(capsys)
    (drawn,) = told["heatmaps"]
    evidence = np.load(drawn["files"][0])
    best = CheckpointFolder(tmp_path / "run" / "checkpoints").load("best")
    assert best is not None
    assert evidence.sum() + float(best.weights["head.classifier.bias"][1]) == pytest.approx(drawn["score"], rel=1e-3, abs=1e-5)


def test_saliency_is_the_gradient_of_the_input(trained: Path, tmp_path: Path) -> None:
    from sft.wsi.cli import read_config
    from sft.wsi.eval.heatmap import HeatmapMaker
    from sft.wsi.model.heads import set_training
    from sft.wsi.train.experiment import load_experiment

    experiment = load_experiment(read_config(trained / "run" / "config.yaml"), trust="tests")
    record, factor = experiment.records("val")[0], 16
    saliency = HeatmapMaker(experiment, tmp_path).saliency(record, 1, factor)
    set_training(experiment.model, training=False, freeze_norms=True)
    source = experiment.feed.source(record)
    pixels = torch.empty(source.shape)
    from sft.common.interval import Interval

    source.rows(Interval(0, source.shape[2]), pixels)
    experiment.model(pixels.requires_grad_())[0, 1].backward()
    assert pixels.grad is not None
    squares = pixels.grad[0].double().square().sum(0)
    height, width = (extent // factor * factor for extent in squares.shape)
    expected = squares[:height, :width].unflatten(0, (-1, factor)).unflatten(2, (-1, factor)).mean((1, 3)).sqrt()
    assert torch.allclose(torch.from_numpy(saliency).double()[: height // factor, : width // factor], expected, rtol=1e-4)
    assert all(parameter.requires_grad for parameter in experiment.model.parameters())


_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "regression": ({"label": ["1.5", "2.5", "-1", "0"]}, {}, {"monitor": "r2", "optimizer": "sgd", "precision": "bf16"}),
    "cox": ({"time": ["1", "2", "3", "4"], "event": ["1", "0", "1", "1"]}, {}, {"accumulate": 4, "monitor": "c_index"}),
    "hazard": ({"time": ["1", "2", "3", "4"], "event": ["1", "1", "0", "1"]}, {"num_intervals": 2}, {"patience": 1}),
    "segmentation": ({"mask": ["m0.npy", "m1.npy", "m0.npy", "m1.npy"]}, {"classes": ["light", "dark"]}, {"monitor": "dice"}),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_every_kind_of_task_trains_and_evaluates(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns, task, train = _KINDS[kind]
    for number, (top, left) in enumerate(tissue_places(104)[:2]):
        pixels = real_pixels()[top : top + 104, left : left + 96]
        write_slide(tmp_path / f"s{number}.tif", pixels)
        shutil.copy(tmp_path / f"s{number}.tif", tmp_path / f"s{number + 2}.tif")
        mask = (pixels.mean(2) < 170).astype(np.uint8)
        mask[:5] = 255
        np.save(tmp_path / f"m{number}.npy", mask)
    rows = []
    for number in range(8):
        shutil.copy(tmp_path / f"s{number % 4}.tif", tmp_path / f"t{number}.tif")
        rows.append({"slide": f"t{number}", "split": "train" if number < 4 else "val", **{k: v[number % 4] for k, v in columns.items()}})
    table = write_table(tmp_path / "t.csv", rows)
    model = {"head": "segmentation"} if kind == "segmentation" else {}
    train = {"epochs": 1, **train}
    config = write_config(tmp_path / "c.yaml", table, tmp_path / "run", task={"kind": kind, **task}, model=model, train=train)
    assert main(["train", "--config", str(config), "--bootstrap", "10", "--json"]) == 0
    told, _ = _printed_json(capsys)
    names = {"regression": "r2", "cox": "c_index", "hazard": "c_index", "segmentation": "dice"}
    value = told["metrics"]["val"]["slides"][names[kind]]["value"]
    assert value is not None and np.isfinite(value)
    predictions = read_rows(tmp_path / "run" / "val" / "predictions.csv")
    assert len(predictions) == 4
    if kind == "segmentation":
        dark = sum(float(row["dark_true_px"]) for row in predictions)
        assert dark == 2 * sum(float((np.load(tmp_path / f"m{number}.npy") == 1).sum()) for number in range(2))
        _check_predicted_masks(tmp_path, table, predictions, capsys)


def _fail_to_finish(writer: NpyWriter) -> None:
    raise sft.SourceError(28, f"cannot write {writer.path}: no space left")


def _check_maps(folder: Path, masks: Sequence[Path], table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Maps of slides without labels equal the masks; a second command keeps them; an evaluation counts the confusion of the pixels."""
    run, slides = str(folder / "run"), [str(folder / f"t{number}.tif") for number in range(4, 8)]
    command = ["predict", run, *slides[:2], "--formats", "ome.tif", "npy", "geojson", "--json"]
    assert main(command) == 0
    told, _ = _printed_json(capsys)
    assert [each["slide"] for each in told["maps"]] == ["t4", "t5"] and all(each["is_new"] for each in told["maps"])
    for each, mask in zip(told["maps"], masks, strict=False):
        expected, (image, classes, outlines, areas) = np.load(mask), map(Path, each["files"])
        assert image.name == "classes.ome.tif" and np.array_equal(np.load(classes), expected)
        assert np.array_equal(read_geojson(outlines).region(0, 0, *expected.shape[::-1]), expected == 1)
        assert float(read_rows(areas)[0]["area_px"]) == (expected == 1).sum()
    changed = [path.stat().st_mtime_ns for path in (folder / "run" / "predictions").rglob("*.npy")]
    assert main([*command[:4], slides[2], *command[4:]]) == 0
    told, _ = _printed_json(capsys)
    assert [each["is_new"] for each in told["maps"]] == [False, False, True]
    assert set(changed) <= {path.stat().st_mtime_ns for path in (folder / "run" / "predictions").rglob("*.npy")}
    assert (
        main(["predict", run, slides[0], "--kind", "softmax", "--formats", "npy", "--dtype", "float16", "--out", str(folder / "soft")]) == 0
    )
    with pytest.MonkeyPatch.context() as patch:  # as on a disk that is full at the end
        patch.setattr(NpyWriter, "finish", _fail_to_finish)
        assert main([*command[:2], slides[3], *command[4:]]) == 1 and "cannot write the map of t7" in capsys.readouterr().err
    (journal,) = (folder / "run" / "predictions").glob(".partial-*.rows")
    assert main([*command[:2], slides[3], *command[4:]]) == 0
    told, _ = _printed_json(capsys)
    assert told["maps"][0]["num_resumed_rows"] == np.load(told["maps"][0]["files"][1]).shape[0] and not journal.exists()
    soft = np.load(folder / "soft" / "t4" / "softmax.npy")
    assert soft.dtype == np.float16 and np.abs(soft.sum(0) - 1).max() < 2e-3
    assert main(["predict", run, "missing.tif"]) == 1 and "no such slides: missing.tif" in capsys.readouterr().err
    assert main(["evaluate", run, "--maps", "npy", "--bootstrap", "0", "--json"]) == 0
    told, _ = _printed_json(capsys)
    confusion = read_rows(folder / "run" / "val" / "pixel_confusion.csv")
    metrics = told["metrics"]["slides"]
    assert float(confusion[1]["iou"]) == pytest.approx(metrics["iou_dark"]["value"])
    assert np.array_equal(np.load(folder / "run" / "val" / "maps" / "t4" / "classes.npy"), np.load(masks[0]))
    assert main(["evaluate", run, "--bootstrap", "0"]) == 0  # results are replaced as a whole
    assert not (folder / "run" / "val" / "maps").exists() and not (folder / "run" / "val" / "pixel_confusion.csv").exists()


def _check_predicted_masks(folder: Path, table: Path, predictions: Sequence[dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    """Masks have the pixels that the evaluation has counted, also of slides without label maps, and as polygons."""
    run, out = str(folder / "run"), folder / "masks"
    new = write_table(folder / "new.csv", [{"slide": f"t{number}.tif"} for number in range(4, 8)])
    capsys.readouterr()
    assert main(["heatmap", run, "--csv", str(new), "--out", str(out), "--json"]) == 0
    told, _ = _printed_json(capsys)
    for heatmap, row in zip(told["heatmaps"], predictions, strict=True):
        classes, (true,) = np.load(heatmap["files"][0]), (np.load(folder / f"m{int(row['slide'][1:]) % 2}.npy"),)
        assert classes.shape == true.shape and classes.dtype == np.uint8
        assert ((classes == 1) & (true != 255)).sum() == float(row["dark_predicted_px"])
        assert heatmap["score"] == (classes == 1).mean() and f"dark {(classes == 1).mean():.1%}" in heatmap["note"]
        if (classes == 1).any():  # the picture is not downsampled, so the polygons are exact
            regions = read_geojson(heatmap["files"][2], names="dark")
            assert np.array_equal(regions.region(0, 0, *classes.shape[::-1]), classes == 1)
        with Image.open(heatmap["files"][1]) as picture:
            assert min(picture.size) > 400
    assert any(len(heatmap["files"]) == 3 for heatmap in told["heatmaps"]) and not list(out.rglob(".partial-*"))
    _check_maps(folder, [Path(heatmap["files"][0]) for heatmap in told["heatmaps"]], table, capsys)
    assert main(["evaluate", run, "--csv", str(new)]) == 1
    assert "predict writes the maps of slides without any" in capsys.readouterr().err
    assert main(["heatmap", run, "--saliency"]) == 1
    assert "are for models that pool" in capsys.readouterr().err
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))  # as on a full disk
    try:
        assert main(["heatmap", run, "--out", str(folder / "full")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot write the mask of t4 to" in capsys.readouterr().err and not list((folder / "full").rglob(".partial-*"))


@pytest.mark.usefixtures("without_proposals")
def test_the_budget_that_a_refusal_names_works(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The optimizer's state and all slides count. Regression: the named budget was refused with the same advice."""
    arguments = ["train", "--config", str(trained / "c.yaml"), "--run", str(tmp_path / "none"), "--dry-run", "--json", "--model.budget"]
    assert main([*arguments, "50000"]) == 1
    named = re.search(r"Raise the budget to [\d.]+ \w+ \((\d+) bytes\) with --model\.budget", capsys.readouterr().err)
    assert named is not None and main([*arguments, named[1]]) == 0
    assert _printed_json(capsys)[0]["plan"]["budget_bytes"] == int(named[1])
    assert main([*arguments, str(int(named[1]) - 1)]) == 1


def test_a_dry_run_writes_nothing_and_prints_the_plan(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(trained / "c.yaml"), "--run", str(tmp_path / "none"), "--json"]
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", *arguments, "--dry-run"]) == 0
    told, shown = _printed_json(capsys)
    assert told["slides"] == {"train": 6, "val": 2, "test": 2} and told["plan"] and "budget" in shown
    assert main(["plan", *arguments, "--size", "4096", "4096", "--model.budget", "40MiB"]) == 0
    assert "4096x4096" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("without_proposals")
def test_mistakes_are_one_line_each(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run = str(trained / "c.yaml"), str(tmp_path / "run")
    (tmp_path / "file").write_text("")
    broken = write_table(trained / "broken.csv", [{"slide": "gone.tif", "label": "a"}, {"slide": "s0.tif", "label": ""}])
    splits = ("train", "train", "val", "test")
    one_class = [{"slide": f"s{n}.tif", "label": "ab"[n % 2], "patient": f"p{n}", "split": split} for n, split in enumerate(splits)]
    table = write_table(trained / "one.csv", one_class)
    cases = [
        (
            ["train", "--config", config, "--run", run, "--data.csv", str(table)],
            1,
            "train.monitor auc is undefined on the 1 validation slides",
        ),
        (["train", "--config", config, "--train.learning_rate", "1"], 2, "unrecognized arguments"),
        (["train", "--config", config, "--train.epochs", "many"], 2, "train.epochs"),
        (["train", "--config", config, "--bootstrap", "-1"], 2, "bootstrap"),
        (["train", "--config", str(tmp_path / "no.yaml")], 2, "does not exist"),
        (["train"], 2, "data.csv"),
        (["train", "--config", config, "--run", run, "--train.epochs", "0"], 1, "train.epochs 0: give at least 1"),
        (
            ["train", "--config", config, "--run", run, "--train.accumulate", "1", "--train.monitor", "loss", "--task.kind", "cox"],
            1,
            "a risk set needs several slides",
        ),
        (
            ["train", "--config", config, "--run", run, "--train.accumulate", "1", "--task.class_weights", "balanced"],
            1,
            "in a weighted mean over one slide its weight changes nothing",
        ),
        (["train", "--config", config, "--run", run, "--data.csv", str(broken)], 1, "line 3: slide 's0.tif' has no label"),
        (["train", "--config", config, "--run", run, "--model.backbone", "no.such:net"], 1, "cannot import no.such"),
        (["train", "--config", config, "--run", run, "--model.budget", "20KiB"], 1, "Raise the budget"),
        (["train", "--config", config, "--run", run, "--data.mpp", "0.1"], 1, "no training slide can be read"),
        (["train", "--config", config, "--run", str(tmp_path / "file" / "run")], 1, "cannot write to the run folder"),
        (["train", "--config", config, "--run", "/proc/sft-run"], 1, "cannot write to the run folder"),
        (["evaluate", str(tmp_path)], 1, "is not a folder of a run"),
        (["heatmap", str(trained / "run"), "--names", "nobody"], 1, "--names nobody"),
        (["heatmap", str(trained / "run"), "--classes", "nothing"], 1, "the model's are plain, swapped"),
        (["slide-info", str(trained / "s0.tif"), str(tmp_path / "file")], 3, "file"),
    ]
    for arguments, code, message in cases:
        assert main(arguments) == code, arguments
        output, errors = capsys.readouterr()
        assert message in " ".join((output + errors).split()) and "Traceback" not in errors, (arguments, errors)
        if code != 3 and "broken" not in str(arguments) and "0.1" not in arguments:
            assert len([line for line in errors.splitlines() if not line.startswith("warning")]) == 1, (arguments, errors)
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    assert main(["train", "--config", config, "--run", run, "--train.epochs", "0", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_stops_the_run_before_or_loses_nothing(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["train", "--config", str(trained / "c.yaml"), "--run", str(tmp_path / "run"), "--bootstrap", "0", "--train.epochs", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**5))
        assert main(arguments) == 1
        assert "has 97.66 KiB free, and checkpoints need" in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()
    # Files of this process cannot grow beyond the size of the weights: the second half of a checkpoint fails.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, before[1]))
    try:
        assert main(arguments) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    errors = capsys.readouterr().err
    assert "cannot write checkpoint" in errors and "as on a full disk" in errors and "It is the first one: make room" in errors
    assert not list((tmp_path / "run").rglob(".partial-*")) and not list((tmp_path / "run").rglob("*.safetensors"))
    assert main(arguments) == 3
    assert (tmp_path / "run" / "summary.md").exists()


def test_a_full_disk_is_reported_before_a_gradient_is_computed(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: the process was killed by a signal, without a message, if the mapped file did not fit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (290_000, before[1]))
    try:
        assert main(["heatmap", str(trained / "run"), "--split", "val", "--saliency", "--out", str(tmp_path / "maps")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    errors = capsys.readouterr().err
    assert "cannot write the gradient of slide s6, 300.00 KiB" in errors and "leave out --saliency" in errors, errors
    assert not list(tmp_path.rglob(".partial-*"))


def test_a_computed_tissue_mask_is_drawn_and_accepted_as_a_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.svs").write_bytes(b"no slide")
    slide = _ROOT / "examples" / "data" / "CMU-1-Small-Region.svs"
    assert main(["tissue", str(slide), str(tmp_path / "none.svs"), "--out", str(tmp_path / "out"), "--json"]) == 3
    (record, failed), _ = _printed_json(capsys)
    assert "none.svs" in failed["error"] and 0.3 < record["share"] < 0.42 and record["box_px"]["h"] > 2500
    with Image.open(record["files"][2]) as picture:
        drawn = np.asarray(picture)
    assert drawn.shape == (1484, 1110, 3) and drawn[:200, :200].min() >= 128  # glass, paler; dust on it, too
    assert 1000 < (drawn == (20, 150, 40)).all(2).sum() < 0.05 * 1484 * 1110  # lines
    whole = open_image(slide)
    mask, polygons = (read_area(Path(name), whole) for name in record["files"][:2])
    assert isinstance(mask, TissueMask) and mask.share == record["share"] and not list((tmp_path / "out").glob(".*"))
    # The outline follows the borders of the mask's px, each of which covers several of the slide's: both agree on all of them.
    assert np.array_equal(mask.region(700, 900, 300, 200), polygons.region(700, 900, 300, 200))
    assert main(["tissue", str(slide), "--out", str(tmp_path / "out"), "--mpp", "0"]) == 1
    # An edited mask is kept, unless its replacement is requested.
    Path(record["files"][0]).write_bytes(b"mended")
    again = ["tissue", str(slide), "--out", str(tmp_path / "out"), "--json"]
    assert main(again) == 3
    assert "may have been edited: name another --out, or give --overwrite" in _printed_json(capsys)[0][0]["error"]
    assert Path(record["files"][0]).read_bytes() == b"mended"
    assert main([*again, "--overwrite"]) == 0
    assert _printed_json(capsys)[0][0]["share"] == record["share"]


def test_a_run_with_damage_filled_and_tissue_cropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_task(tmp_path, num_slides=6, size_px=264)
    damage_tile(tmp_path / "s1.tif")
    damage_tile(tmp_path / "s4.tif", 0)
    np.save(tmp_path / "s2.npy", open_image(tmp_path / "s2.tif").read(0, 0, 264, 264))
    (tmp_path / "s2.tif").unlink()
    table.write_text(table.read_text().replace("s2.tif", "s2.npy"))
    data = {"tissue": "crop", "host_budget": "1MiB", "csv": str(table)}
    config = write_config(tmp_path / "c.yaml", table, tmp_path / "run", data=data, train={"on_error": "fill", "epochs": 1})
    assert main(["train", "--config", str(config), "--bootstrap", "0", "--json"]) == 0
    told, _ = _printed_json(capsys)
    rows = read_rows(tmp_path / "run" / "damaged.csv")
    assert told["filled_tiles"] == len(rows) and not told["failed"] and {row["slide"] for row in rows} == {"s1", "s4"}
    assert {(row["left_px"], row["top_px"]) for row in rows if row["slide"] == "s4" and row["level"] == "0"} == {("0", "0")}
    assert "could not be decoded" in (tmp_path / "run" / "summary.md").read_text()
    folder = RunFolder(tmp_path / "run")  # a continued run keeps its records
    assert folder.add_damage({}) == len(rows)
    more = {"s0": (BadTile(level=0, x=128, y=0, width_px=128, height_px=128, reason="said\nso"),)}
    assert folder.add_damage(more) == folder.add_damage(more) == len(rows) + 1
    assert read_rows(tmp_path / "run" / "damaged.csv")[0] == {
        "slide": "s0", "level": "0", "left_px": "128", "top_px": "0", "width_px": "128", "height_px": "128", "reason": "said so"
    }  # fmt: skip


@pytest.mark.usefixtures("frozen_objects")
def test_a_run_folder_belongs_to_one_process(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder(trained / "run"):
        assert main(["train", "--config", str(trained / "c.yaml")]) == 1
        assert "in use by this process" in capsys.readouterr().err


def test_damaged_files_of_a_run_are_named(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    for damage in ('{"task": ', "[" * 100_000, "9" * 5000):
        (run / "task.json").write_text(damage)
        assert main(["evaluate", str(run), "--bootstrap", "0"]) == 1
        assert "task.json is damaged" in capsys.readouterr().err
    shutil.copy(trained / "run" / "task.json", run)
    text = (run / "config.yaml").read_text()
    assert "attention_dim: " in text
    (run / "config.yaml").write_text(re.sub("head: gap", "head: attention", re.sub("attention_dim: .*", "attention_dim: 7", text)))
    assert main(["evaluate", str(run), "--bootstrap", "0"]) == 1
    errors = capsys.readouterr().err
    assert "contradicts the checkpoint: model.head (trained with 'gap', now 'attention'), model.attention_dim (trained with 128" in errors
    assert "Traceback" not in errors
    with RunFolder(run) as folder:
        (run / "steps.csv").write_bytes((run / "steps.csv").read_bytes() + b"\xff\xfe,\n")
        folder.start_steps(1)
    assert [row["step"] for row in read_rows(run / "steps.csv")] == ["1"]


def test_a_damaged_checkpoint_is_replaced_by_the_previous_one(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run" / "checkpoints", tmp_path / "c")
    folder = CheckpointFolder(tmp_path / "c")
    newest = folder.load("last")
    assert newest is not None
    weights = newest.path / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="is not what was written"):
        older = folder.load("last")
    assert older is not None and older.path != newest.path
    (older.path / "state.pt").unlink()
    from sft.wsi.errors import RunFolderError

    with pytest.warns(RuntimeWarning), pytest.raises(RunFolderError, match="all 2 checkpoints of kind 'last' in "):
        folder.load("last")


def test_the_ready_configuration_is_valid() -> None:
    from sft.wsi.cli import read_config

    path = _ROOT / "examples" / "wsi" / "config.yaml"
    written, read = yaml.safe_load(path.read_text()), read_config(path).to_dict()
    for name, group in written.items():
        assert group == (read[name] if name == "run" else {key: read[name][key] for key in group}), name


def test_the_doctor_finds_everything_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    told, _ = _printed_json(capsys)
    assert told["torch"] == torch.__version__ and told["safetensors"]
    assert all(told[name] for name in ("tifffile", "imagecodecs", "simplejpeg", "zarr", "scikit-image", "shapely"))


def test_no_command_shows_five_examples(capsys: pytest.CaptureFixture[str]) -> None:
    from sft.wsi.parsers import make_parser

    assert main([]) == 0
    printed = capsys.readouterr()
    examples = [line.split() for line in printed.out.splitlines() if line.startswith("  python -m sft.wsi ")]
    assert len(examples) == 5 and not printed.err
    help_text = make_parser(None).format_help()
    assert all(words[3] in help_text for words in examples)
    assert main(["--json"]) == 2
    assert "--json" in capsys.readouterr().err
