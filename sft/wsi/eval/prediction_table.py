"""Table of predictions, predictions.csv: written by an evaluation, read back to pool the folds of a cross-validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sft.wsi.errors import RunFolderError
from sft.wsi.eval.metrics import Prediction
from sft.wsi.model.tasks import Task
from sft.wsi.run.files import write_csv
from sft.wsi.run.overview import read_rows

__all__ = ["output_columns", "read_predictions", "target_cells", "target_columns", "write_predictions"]


def write_predictions(path: Path, task: Task, predictions: Sequence[Prediction]) -> None:
    """Write predictions of slides.

    Raises:
        RunFolderError: the file cannot be written.
    """
    write_csv(
        path,
        ["slide", "patient", "split", *target_columns(task), *output_columns(task), "loss"],
        [[p.name, p.patient, p.split, *target_cells(task, p), *p.output, p.loss] for p in predictions],
    )


def read_predictions(path: Path, task: Task) -> list[Prediction]:
    """Predictions of slides in a file that :func:`write_predictions` has written.

    Raises:
        RunFolderError: the file is missing, damaged, or of another task.
    """
    columns = output_columns(task)
    try:
        return [
            Prediction(
                name=row["slide"],
                patient=row["patient"],
                split=row["split"],
                target=_target(task, row),
                output=tuple(float(row[name]) for name in columns),
                loss=float(row["loss"] or math.nan),
            )
            for row in read_rows(path)
        ]
    except (KeyError, ValueError) as error:
        raise RunFolderError(f"{path} is damaged, or of another task: {error}. Start evaluate again, which writes it.") from error


def output_columns(task: Task) -> list[str]:
    """Names of the columns of outputs."""
    if task.kind == "segmentation":
        return [f"{name}_{what}_px" for name in task.classes for what in ("right", "predicted", "true")]
    return list(task.columns())


def target_columns(task: Task) -> list[str]:
    """Names of the columns of targets."""
    if task.kind in ("cox", "hazard"):
        return ["time", "event"]
    return [] if task.kind == "segmentation" else ["target"]


def target_cells(task: Task, prediction: Prediction) -> list[Any]:
    """Cells of a prediction's target; empty ones for an unknown target."""
    target = prediction.target
    if task.kind == "segmentation":
        return []
    if target is None:
        return [""] * len(target_columns(task))
    if task.kind == "classification":
        return [task.classes[int(target[0])]]
    if task.kind == "multilabel":
        return [";".join(name for name, flag in zip(task.classes, target, strict=True) if flag)]
    return list(target)


def _target(task: Task, row: dict[str, str]) -> tuple[float, ...] | None:
    """Target in the cells of a row.

    A multilabel slide without any class and one without a target have the same cell; the loss tells them apart.
    """
    if task.kind == "segmentation":
        return ()
    cells = [row[name] for name in target_columns(task)]
    if task.kind == "multilabel":
        names = [name for name in cells[0].split(";") if name]
        for name in names:
            task.classes.index(name)
        return None if math.isnan(float(row["loss"] or math.nan)) else tuple(float(name in names) for name in task.classes)
    if not all(cells):
        return None
    return (float(task.classes.index(cells[0])),) if task.kind == "classification" else tuple(map(float, cells))
