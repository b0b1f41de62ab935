"""Results in a run folder: complete, labelled with their weights, and never older than the replaced ones."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft.wsi.eval.predict import Predictor
from sft.wsi.eval.run_summary import write_run_summary
from sft.wsi.run.results import publish, read_weights_id, results_lock, staging_folder
from sft.wsi.train.checkpoint import CheckpointFolder, WeightsId
from tests.helpers.wsi import run_wsi as main
from tests.helpers.wsi import write_config, write_task


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    table = write_task(folder, num_slides=8, size_px=96)
    config = write_config(folder / "c.yaml", table, folder / "run", train={"epochs": 1})
    assert main(["train", "--config", str(config), "--bootstrap", "20"]) == 0
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run with files that a test may change."""
    shutil.copytree(trained / "run", tmp_path / "run")
    return tmp_path / "run"


def _best(run: Path) -> WeightsId:
    best = CheckpointFolder(run / "checkpoints").best_id()
    assert best is not None
    return best


def _improve(run: Path) -> WeightsId:
    """Another best checkpoint, of the second epoch, as saved by training."""
    folder = CheckpointFolder(run / "checkpoints")
    best = folder.load("best")
    assert best is not None
    weights = {name: value + 0.25 if value.is_floating_point() else value for name, value in best.weights.items()}
    model: Any = SimpleNamespace(state_dict=lambda: weights)
    folder.save("best", 2, model, {**best.state, "epoch": 2, "step": 99}, keep=1)
    return _best(run)


def _metrics(folder: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return metrics


def test_all_results_name_their_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = _best(run)
    assert best.epoch == 1 and best.step == 2
    for split in ("val", "test"):
        assert read_weights_id(run / split) == best and _metrics(run / split)["weights"] == best.as_dict()
        assert f"best model (epoch 1), weights {best.short_hash}" in (run / split / "summary.md").read_text().splitlines()[0]
    page = (run / "summary.md").read_text()
    assert page.count(best.short_hash) == 3 and "Best epoch: 1 of 1; 2 optimizer steps" in page and "Not of the best" not in page
    capsys.readouterr()
    assert main(["heatmap", str(run), "--crops", "3"]) == 0
    assert main(["heatmap", str(run), "--crops", "1", "--classes", "plain"]) == 0
    assert main(["heatmap", str(run), "--crops", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["weights"] == best.as_dict()
    folder = Path(told["heatmaps"][0]["files"][0]).parent
    outputs = json.loads((folder / "heatmap.json").read_text())["outputs"]
    assert {name: entry["weights"] for name, entry in outputs.items()} == dict.fromkeys(("swapped", "plain"), best.as_dict())
    # Files of an earlier call that this call does not write are removed: the folder has the files of its list.
    listed = {name for entry in outputs.values() for name in entry["files"]}
    assert {path.name for path in folder.iterdir()} == {*listed, "heatmap.json"} and "crop-swapped-02.png" not in listed


def test_evaluate_prints_its_folder_and_updates_the_top_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "val" / "notes.txt").write_text("mine")
    before = (run / "val" / "predictions.csv").read_bytes()
    assert main(["evaluate", str(run), "--bootstrap", "0"]) == 0
    assert f"written to {run / 'val'}: summary.md" in capsys.readouterr().out
    assert (run / "val" / "predictions.csv").read_bytes() == before and (run / "val" / "notes.txt").read_text() == "mine"
    assert main(["evaluate", str(run), "--split", "train", "--bootstrap", "0"]) == 0
    assert f"- [train](train/summary.md): best model, {_best(run).text}" in (run / "summary.md").read_text()
    assert not [path for path in run.iterdir() if path.name.startswith((".staged", ".replaced", ".partial"))]


def _during_prediction(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> None:
    """Run a change of the folder after the predictions of an evaluation."""
    predict_all = Predictor.predict_all

    def predicted(self: Predictor, *arguments: Any, **options: Any) -> Any:
        predictions = predict_all(self, *arguments, **options)
        monkeypatch.setattr(Predictor, "predict_all", predict_all)
        act()
        return predictions

    monkeypatch.setattr(Predictor, "predict_all", predicted)


def test_an_evaluation_that_training_overtakes_does_not_replace_newer_results(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: pages of the folder were of epoch 1 and of epoch 2 for the same slides."""
    old = _best(run)

    def overtake() -> None:  # training ends with another best model, and evaluates it
        _improve(run)
        assert main(["evaluate", str(run), "--bootstrap", "0"]) == 0

    _during_prediction(monkeypatch, overtake)
    assert main(["evaluate", str(run), "--bootstrap", "0"]) == 0
    new = _best(run)
    assert new.sha256 != old.sha256
    assert read_weights_id(run / "val") == new and read_weights_id(run / "val-epoch1") == old
    assert _metrics(run / "val-epoch1")["newer_best"] == new.as_dict() and "newer_best" not in _metrics(run / "val")
    assert "Not of the best model" in (run / "val-epoch1" / "summary.md").read_text()
    assert "the run has a better model by now (epoch 2" in capsys.readouterr().out
    page = (run / "summary.md").read_text()
    assert f"val, best model (epoch 2), weights {new.short_hash}" in page and f"val-epoch1/summary.md): best model, {old.text}" in page
    # The results of the test slides are still those of the old model, and the page states it.
    assert page.count("**Not of the best model of this run") == 1 and page.index("**Not of") > page.index("## test")


def test_an_evaluation_overtaken_by_a_better_model_is_marked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _best(run)
    _during_prediction(monkeypatch, lambda: _improve(run))
    assert main(["evaluate", str(run), "--bootstrap", "0"]) == 0
    assert read_weights_id(run / "val") == old and _metrics(run / "val")["newer_best"] == _best(run).as_dict()
    assert "Not of the best model of the run" in (run / "val" / "summary.md").read_text()
    assert "**Not of the best model of this run" in (run / "summary.md").read_text()


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sft.wsi.train import checkpoint

    read = checkpoint._read

    def replaced(path: Path) -> Any:
        monkeypatch.setattr(checkpoint, "_read", read)
        _improve(run)
        return read(path)

    monkeypatch.setattr(checkpoint, "_read", lambda path: replaced(path))
    loaded = CheckpointFolder(run / "checkpoints").load("best")
    assert loaded is not None and loaded.weights_id.epoch == 2


def test_a_process_that_died_between_two_renames_loses_nothing(run: Path) -> None:
    content = (run / "val" / "predictions.csv").read_bytes()
    (run / "val" / "notes.txt").write_text("mine")
    os.rename(run / "val", run / ".replaced-val")  # the earlier results were moved away, and the new ones not yet in place
    with staging_folder(run) as staged, results_lock(run):
        (staged / "predictions.csv").write_bytes(b"new")
        publish(staged, run / "val")
    assert (run / "val" / "predictions.csv").read_bytes() == b"new" != content
    assert (run / "val" / "notes.txt").read_text() == "mine" and not (run / ".replaced-val").exists()
    shutil.copytree(run / "val", run / ".replaced-val")  # killed after both renames
    (run / ".replaced-val" / "more.txt").write_text("mine")
    with staging_folder(run) as staged, results_lock(run):
        (staged / "predictions.csv").write_bytes(b"newer")
        publish(staged, run / "val")
    assert (run / "val" / "more.txt").exists() and (run / "val" / "predictions.csv").read_bytes() == b"newer"


def test_staging_folders_of_dead_processes_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / ".staged-dead").mkdir()
    (tmp_path / ".staged-dead" / "map.npy").write_bytes(b"")
    with staging_folder(tmp_path) as folder:
        assert not (tmp_path / ".staged-dead").exists()
        with staging_folder(tmp_path) as other:
            assert folder.is_dir() and other.is_dir() and folder != other
    assert [path.name for path in tmp_path.iterdir()] == [".results.lock"]


def test_results_elsewhere_replace_only_their_own_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    (out / "roc.png").write_bytes(b"of an earlier evaluation")
    table = out / "new.csv"
    table.write_text(f"slide\n{run.parent / 'none.tif'}\n")
    assert main(["evaluate", str(run), "--out", str(out), "--bootstrap", "0"]) == 0
    assert (out / "mine.txt").exists() and (out / "roc.png").stat().st_size > 1000 and read_weights_id(out) == _best(run)
    file = tmp_path / "file"
    file.write_text("")
    capsys.readouterr()
    assert main(["evaluate", str(run), "--out", str(file), "--bootstrap", "0"]) == 1
    assert "cannot write results to" in capsys.readouterr().err


def test_results_among_the_checkpoints_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out in ("checkpoints", "checkpoints/best"):
        assert main(["evaluate", str(run), "--out", str(run / out)]) == 1
        assert "is among the checkpoints of the run" in capsys.readouterr().err
    (run / "file").write_text("")
    assert main(["evaluate", str(run), "--out", str(run / "file" / "out")]) == 1
    assert "file is a file, not a folder" in capsys.readouterr().err


def test_checkpoints_that_may_not_be_read_are_not_missing(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = os.listdir

    def refused(path: Any) -> list[str]:
        if Path(path).name == "checkpoints":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", refused)
    assert main(["evaluate", str(run)]) == 1
    assert "checkpoints: Permission denied" in capsys.readouterr().err


@pytest.mark.filterwarnings("always::RuntimeWarning")
@pytest.mark.parametrize("state", [[1], {"format": 1}, {"format": 1, "weights_sha256": "", "progress": "x"}, {"format": 1, "settings": 5}])
def test_a_state_of_another_structure_is_damage(state: Any, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run / "checkpoints").glob("*/state.pt"):
        torch.save(state, path)
    assert main(["evaluate", str(run)]) == 1
    errors = capsys.readouterr().err
    assert re.search(r"is damaged \((state\.pt |format )[^)]*\); the one before is used", errors) and "checkpoints of kind 'best'" in errors


def test_the_top_page_of_a_run_without_results(run: Path) -> None:
    for split in ("val", "test"):
        shutil.rmtree(run / split)
    shutil.rmtree(run / "checkpoints")
    overview = write_run_summary(run)
    assert overview.best is None and overview.results == ()
    assert "Epochs: 1; 2 optimizer steps." in (run / "summary.md").read_text()
