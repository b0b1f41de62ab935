"""Files of a run folder that contradict its checkpoint are refused, with the field and both values."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.wsi import TinyNet, write_config, write_task
from tests.helpers.wsi import run_wsi as main


class _FinerNet(TinyNet):
    """The same parameters with another stride."""

    def forward(self, image: Tensor) -> Tensor:
        first = self.features[0]
        assert isinstance(first, nn.Conv2d)
        first.stride = (2, 2)
        return super().forward(image)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    table = write_task(folder, num_slides=8, size_px=96)
    config = write_config(folder / "c.yaml", table, folder / "run", train={"epochs": 1})
    assert main(["train", "--config", str(config), "--bootstrap", "0"]) == 0
    return folder


@pytest.fixture(params=["with a record", "of an earlier version"])
def run(trained: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the run; the best checkpoint with and without the record that earlier versions did not write."""
    shutil.copytree(trained / "run", tmp_path / "run")
    if request.param == "of an earlier version":
        for path in (tmp_path / "run").rglob("state.pt"):
            state = torch.load(path, weights_only=True)
            dropped = {"task", "feature_shapes"} | ({"settings", "table", "step"} if "best" in path.parent.name else set())
            torch.save({name: value for name, value in state.items() if name not in dropped}, path)
    return tmp_path / "run"


def _refusal(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str, command: str = "evaluate") -> str:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main([command, str(run), *arguments]) == 1
    errors = capsys.readouterr().err
    assert "Traceback" not in errors and len(set(errors.splitlines())) == 1, errors
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}, "a refused command writes nothing"
    return errors


def test_an_untouched_run_is_evaluated(run: Path) -> None:
    assert main(["evaluate", str(run), "--bootstrap", "0"]) == 0


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("classes", ["swapped", "plain"], "classes (trained with ('plain', 'swapped'), now ('swapped', 'plain'))"),
        ("classes", ["plain", "swapped", "other"], "classes"),
        ("num_outputs", 3, "num_outputs"),
        ("kind", "multilabel", "kind"),
        ("weights", [1.0, 2.0], "weights (trained with (), now (1.0, 2.0))"),
        ("label_smoothing", 0.1, "label_smoothing (trained with 0.0, now 0.1)"),
        ("shift", 3.0, "shift (trained with 0.0, now 3.0)"),
        ("scale", 2.0, "scale (trained with 1.0, now 2.0)"),
        ("edges", [1.0], "edges"),
    ],
)
def test_an_edited_task_is_refused(run: Path, field: str, value: Any, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: a run of three classes had other metrics after its task was edited to two."""
    saved = json.loads((run / "task.json").read_text())
    saved["task"][field] = value
    (run / "task.json").write_text(json.dumps(saved))
    errors = _refusal(run, capsys)
    assert "task.json" in errors and told in errors, errors


def test_a_task_of_another_table_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = json.loads((run / "task.json").read_text())
    (run / "task.json").write_text(json.dumps({**saved, "table": "0" * 64}))
    for command in ("evaluate", "heatmap"):
        assert "table (trained with" in _refusal(run, capsys, command=command)


@pytest.mark.parametrize(
    ("line", "edited", "told"),
    [
        ("mpp: null", "mpp: 2.0", "data.mpp (trained with None, now 2.0)"),
        ("stain: none", "stain: reinhard", "augment.stain (trained with 'none', now 'reinhard')"),
        ("tissue: none", "tissue: crop", "data.tissue (trained with 'none', now 'crop')"),
        ("- 0.485", "- 0.5", "model.mean"),
        ("precision: fp32", "precision: bf16", "train.precision (trained with 'fp32', now 'bf16')"),
        ("seed: 0", "seed: 1", "train.seed (trained with 0, now 1)"),
        ("head: gap", "head: max", "model.head (trained with 'gap', now 'max')"),
        ("classes: null", "classes: [swapped, plain]", "task.classes (trained with None, now ['swapped', 'plain'])"),
        ("kind: classification", "kind: multilabel", "task.kind"),
        ("val_fraction: 0.2", "val_fraction: 0.4", "data.val_fraction"),
    ],
)
def test_an_edited_configuration_is_refused(run: Path, line: str, edited: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / "config.yaml").read_text()
    assert line in text
    (run / "config.yaml").write_text(text.replace(line, edited, 1))
    errors = _refusal(run, capsys)
    assert "config.yaml contradicts the checkpoint" in errors and told in errors, errors


def test_settings_of_the_machine_may_be_edited(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    edited = text.replace("budget: 64MiB", "budget: 65MiB").replace("on_error: raise", "on_error: skip")
    (run / "config.yaml").write_text(edited.replace("checkpoint_every: 1", "checkpoint_every: 3"))
    assert edited != text and main(["evaluate", str(run), "--bootstrap", "0"]) == 0


def test_edited_splits_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / "splits.csv").read_text()
    (run / "splits.csv").write_text(re.sub("(?m)^(s0,.*),train,", r"\1,val,", text))
    assert "line 2 contradicts the run: split of slide s0 (trained with 'train', now 'val')" in _refusal(run, capsys)
    (run / "splits.csv").write_text(text.replace("\ns1,", "\nother,"))
    assert "line 3: slide 'other' is not in the table" in _refusal(run, capsys)
    (run / "splits.csv").unlink()  # for readers only, not used by the code
    assert main(["evaluate", str(run), "--bootstrap", "0"]) == 0


def test_a_missing_task_is_in_the_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "task.json").unlink()
    state = torch.load(next(run.rglob("best-*/state.pt")), weights_only=True)
    if "task" in state:
        assert main(["evaluate", str(run), "--bootstrap", "0"]) == 0
    else:
        assert "task.json is missing, and the checkpoint does not have the task" in _refusal(run, capsys)


def test_a_task_for_another_table_has_the_outputs_of_the_weights(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a table of other slides the run's own table cannot be compared."""
    saved = json.loads((run / "task.json").read_text())
    saved["task"] |= {"classes": ["plain", "swapped", "other"], "num_outputs": 3}
    (run / "task.json").write_text(json.dumps(saved))
    table = tmp_path / "new.csv"
    table.write_text("slide\ns0.tif\n")
    errors = _refusal(run, capsys, "--csv", str(table))
    assert "contradicts the checkpoint" in errors and ("num_outputs (trained with 2, now 3)" in errors or "classes" in errors)


def test_a_network_with_another_stride_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    monkeypatch.setattr("tests.helpers.wsi.tiny_net", _FinerNet)
    errors = _refusal(tmp_path / "run", capsys)
    assert "its backbone gave feature maps [[8, 16, 16], [8, 24, 24]]" in errors and "[8, 32, 32]" in errors
    assert main(["train", "--config", str(trained / "c.yaml"), "--run", str(tmp_path / "run")]) == 1
    assert "gave feature maps" in capsys.readouterr().err
