"""Pages of results: no table without metrics, and no interval of few patients."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sft.wsi.eval.metrics import Prediction
from sft.wsi.eval.report import Evaluation, draw_curves, mark_outdated, write_evaluation
from sft.wsi.model.tasks import Task
from sft.wsi.train.checkpoint import WeightsId

_TASK = Task(kind="classification", classes=("a", "b"), num_outputs=2)
_WEIGHTS = WeightsId(checkpoint="best", epoch=3, step=12, sha256="0123456789abcdef")


def _predictions(num_patients: int, *, targets: bool = True) -> list[Prediction]:
    return [
        Prediction(
            name=f"s{n}",
            patient=f"p{n}",
            split="val",
            target=(float(n % 2),) if targets else None,
            output=(0.4, 0.6) if n % 3 else (0.7, 0.3),
            loss=0.5,
        )
        for n in range(num_patients)
    ]


def _write(folder: Path, predictions: list[Prediction]) -> tuple[str, dict[str, Any]]:
    weights = _WEIGHTS.as_dict()
    evaluation = Evaluation(title="val", task=_TASK, predictions=predictions, failed={}, weights=weights, num_draws=100, seed=0)
    write_evaluation(folder, evaluation)
    return (folder / "summary.md").read_text(), json.loads((folder / "metrics.json").read_text())


@pytest.mark.parametrize(("num_patients", "is_reliable"), [(4, False), (9, False), (10, True)])
def test_intervals_of_few_patients_are_not_shown(tmp_path: Path, num_patients: int, is_reliable: bool) -> None:
    page, metrics = _write(tmp_path, _predictions(num_patients))
    auc = metrics["slides"]["auc"]
    assert auc["low"] <= auc["value"] <= auc["high"], "the numbers are in the file for programs"
    assert auc["interval_is_reliable"] is is_reliable and auc["num_patients"] == num_patients
    assert (f"(n={num_patients}: no interval)" in page) is not is_reliable and (re.search(r"\[[01]\.", page) is not None) is is_reliable
    assert ("at least 10 patients" in page) is not is_reliable and ("In brackets 95 % intervals" in page) is is_reliable


def test_slides_of_one_patient_are_one_patient(tmp_path: Path) -> None:
    predictions = [
        *_predictions(9),
        *(Prediction(name=f"t{n}", patient="p0", split="val", target=(0.0,), output=(0.5, 0.5)) for n in range(5)),
    ]
    page, metrics = _write(tmp_path, predictions)
    assert metrics["slides"]["auc"]["num_patients"] == 9 and "n=9: no interval" in page


def test_without_targets_there_is_no_table(tmp_path: Path) -> None:
    page, metrics = _write(tmp_path, _predictions(3, targets=False))
    assert metrics["slides"] == {} and "|" not in page and "interval" not in page and "No metrics: no slide has a target." in page
    page, _ = _write(tmp_path, _predictions(1, targets=False))
    assert "1 slide (0 with a target) of 1 patient;" in page


def test_results_of_an_older_model_are_marked(tmp_path: Path) -> None:
    page, metrics = _write(tmp_path, _predictions(4))
    newer = WeightsId(checkpoint="best", epoch=5, step=20, sha256="fedcba9876543210")
    mark_outdated(tmp_path, newer)
    marked = (tmp_path / "summary.md").read_text()
    assert marked.splitlines()[0] == page.splitlines()[0] and "epoch 5, weights fedcba987654" in marked
    after = json.loads((tmp_path / "metrics.json").read_text())
    assert after == {**metrics, "newer_best": newer.as_dict()} and after["weights"] == _WEIGHTS.as_dict()


def test_curves_of_the_same_epochs_are_drawn_once(tmp_path: Path) -> None:
    """A run writes its pages after each split that it evaluates."""
    path, epochs = tmp_path / "curves.png", [{"epoch": 1, "train_loss": 2.0, "val_loss": float("nan"), "val_auc": 0.5}]
    path.write_bytes(b"damaged")
    draw_curves(path, epochs)
    drawn = path.read_bytes()
    path.touch()
    before = path.stat()
    draw_curves(path, [dict(epoch) for epoch in epochs])
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    draw_curves(path, [*epochs, {**epochs[0], "epoch": 2}])
    assert path.read_bytes() != drawn
