"""Reports: tables of predictions, metrics with intervals, figures, and a summary page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from sklearn.metrics import roc_curve

from sft.wsi.eval.metrics import Estimate, Prediction, confusion_counts, evaluate_predictions, patient_predictions
from sft.wsi.model.tasks import Task
from sft.wsi.run.files import atomic_write_with_parents, write_csv, write_json, write_text

__all__ = ["PLAIN_TEXT", "draw_curves", "write_evaluation"]

_Estimates = Mapping[str, Mapping[str, Estimate]]

#: Of matplotlib: names of classes are anybody's, and ``$`` in them is no formula.
PLAIN_TEXT: Any = {"text.parse_math": False}


def write_evaluation(
    folder: Path, task: Task, predictions: Sequence[Prediction], failed: Mapping[str, str], *, title: str, num_draws: int, seed: int
) -> dict[str, dict[str, Estimate]]:
    """Write predictions.csv, patients.csv, metrics.json, failed.csv, figures and summary.md.

    Args:
        folder: output folder, created if missing.
        task: of the predictions.
        predictions: of the slides.
        failed: slides without a prediction, with their problems.
        title: of the page.
        num_draws: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        Metrics of slides and patients.

    Raises:
        RunFolderError: a file cannot be written.
    """
    patients = patient_predictions(predictions)
    estimates = {
        "slides": evaluate_predictions(task, predictions, seed=seed, num_draws=num_draws),
        "patients": evaluate_predictions(task, patients, seed=seed, num_draws=num_draws),
    }
    if task.kind == "segmentation":
        columns: list[str] = [f"{name}_{what}_px" for name in task.classes for what in ("right", "predicted", "true")]
    else:
        columns = list(task.columns())
    names = _target_columns(task)
    write_csv(
        folder / "predictions.csv",
        ["slide", "patient", "split", *names, *columns, "loss"],
        [[p.name, p.patient, p.split, *_target(task, p), *p.output, p.loss] for p in predictions],
    )
    write_csv(
        folder / "patients.csv",
        ["patient", "slides", *names, *columns],
        [[p.name, sum(q.patient == p.patient for q in predictions), *_target(task, p), *p.output] for p in patients],
    )
    write_csv(folder / "failed.csv", ["slide", "problem"], list(failed.items()))
    write_json(folder / "metrics.json", {level: {name: _plain(e) for name, e in by_name.items()} for level, by_name in estimates.items()})
    with rc_context(PLAIN_TEXT):
        figures = _draw_figures(folder, task, predictions)
    write_text(folder / "summary.md", _summary(title, task, predictions, patients, failed, estimates, figures))
    return estimates


def draw_curves(path: Path, epochs: Sequence[Mapping[str, Any]]) -> None:
    """Losses of all epochs, with the other validation metrics.

    Raises:
        RunFolderError: it cannot be written.
    """
    with rc_context(PLAIN_TEXT):
        _draw_curves(path, epochs)


def _draw_curves(path: Path, epochs: Sequence[Mapping[str, Any]]) -> None:
    metrics = [name for name in (epochs[-1] if epochs else {}) if name.startswith("val_") and name != "val_loss"]
    figure = Figure(figsize=(10 if metrics else 5, 3.6), layout="constrained")
    axes = figure.subplots(1, 2 if metrics else 1, squeeze=False)[0]
    for names, axis in zip((["train_loss", "val_loss"], metrics), axes, strict=False):
        for name in names:
            points = [(epoch["epoch"], epoch[name]) for epoch in epochs if name in epoch and not math.isnan(epoch[name])]
            if points:
                axis.plot(*zip(*points, strict=True), marker=".", label=name)
        axis.set(xlabel="epoch")
        if axis.lines:
            axis.legend()
    with atomic_write_with_parents(path) as temporary:
        figure.savefig(temporary, dpi=110)


def _draw_figures(folder: Path, task: Task, predictions: Sequence[Prediction]) -> list[str]:
    known = [prediction for prediction in predictions if prediction.target is not None]
    if task.kind not in ("classification", "multilabel") or not known:
        return []
    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], color="0.8")
    for number, name in enumerate(task.classes):
        if task.kind == "classification" and len(task.classes) == 2 and number == 0:
            continue  # the mirror image of the other
        truth = np.array([_is_positive(task, p, number) for p in known])
        if 0 < truth.sum() < len(truth):
            false_rate, true_rate, _ = roc_curve(truth, [p.output[number] for p in known])
            axis.plot(false_rate, true_rate, label=name)
    axis.set(xlabel="1 - specificity", ylabel="sensitivity", title="ROC, slides")
    if len(axis.lines) > 1:
        axis.legend()
    with atomic_write_with_parents(folder / "roc.png") as temporary:
        figure.savefig(temporary, dpi=110)
    if task.kind == "multilabel":
        return ["roc.png"]
    counts = confusion_counts(task, known)
    figure = Figure(figsize=(1.8 + 0.7 * len(counts), 1.5 + 0.7 * len(counts)), layout="constrained")
    axis = figure.subplots()
    axis.imshow(counts, cmap="Blues", vmin=0)
    for (row, col), count in np.ndenumerate(counts):
        axis.text(col, row, str(count), ha="center", va="center", color="white" if count > counts.max() / 2 else "black")
    ticks = range(len(task.classes))
    axis.set(xlabel="predicted", ylabel="true", xticks=ticks, yticks=ticks, xticklabels=task.classes, yticklabels=task.classes)
    with atomic_write_with_parents(folder / "confusion.png") as temporary:
        figure.savefig(temporary, dpi=110)
    return ["roc.png", "confusion.png"]


def _is_positive(task: Task, prediction: Prediction, number: int) -> bool:
    assert prediction.target is not None
    return bool(prediction.target[number]) if task.kind == "multilabel" else int(prediction.target[0]) == number


def _summary(
    title: str,
    task: Task,
    predictions: Sequence[Prediction],
    patients: Sequence[Prediction],
    failed: Mapping[str, str],
    estimates: _Estimates,
    figures: Sequence[str],
) -> str:
    labelled = sum(prediction.target is not None for prediction in predictions)
    lines = [f"# {title}", "", f"{len(predictions)} slides ({labelled} with a target) of {len(patients)} patients; task {task.kind}.", ""]
    mixed = [p.name for p in patients if p.target is None and any(q.patient == p.patient and q.target is not None for q in predictions)]
    if mixed:
        lines += [f"Patients whose slides have different targets do not count in their metrics: {len(mixed)}.", ""]
    names = list(dict.fromkeys(name for by_name in estimates.values() for name in by_name))
    lines += ["| metric | slides | patients |", "| --- | --- | --- |"]
    lines += [
        f"| {name} | {_estimate_text(estimates['slides'].get(name))} | {_estimate_text(estimates['patients'].get(name))} |"
        for name in names
    ]
    lines += ["", "In brackets 95 % intervals: percentiles of a bootstrap that draws patients with all of their slides.", ""]
    lines += [f"![{name.removesuffix('.png')}]({name})" for name in figures]
    if failed:
        lines += ["", f"## Left out: {len(failed)} slides", "", *(f"- {name}: {problem}" for name, problem in failed.items())]
    return "\n".join(lines).rstrip() + "\n"


def _estimate_text(estimate: Estimate | None) -> str:
    if estimate is None or math.isnan(estimate.value):
        return "-"
    interval = "" if math.isnan(estimate.low) else f" [{estimate.low:.3f}, {estimate.high:.3f}]"
    return f"{estimate.value:.4f}{interval}"


def _plain(estimate: Estimate) -> dict[str, float | None]:
    values = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def _target_columns(task: Task) -> list[str]:
    if task.kind in ("cox", "hazard"):
        return ["time", "event"]
    return [] if task.kind == "segmentation" else ["target"]


def _target(task: Task, prediction: Prediction) -> list[Any]:
    target = prediction.target
    if task.kind == "segmentation":
        return []
    if target is None:
        return [""] * len(_target_columns(task))
    if task.kind == "classification":
        return [task.classes[int(target[0])]]
    if task.kind == "multilabel":
        return [";".join(name for name, flag in zip(task.classes, target, strict=True) if flag)]
    return list(target)
