"""Reports: tables of predictions, metrics with intervals, figures, and a summary page."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image
from sklearn.metrics import roc_curve

from sft.wsi.eval.metrics import Estimate, Prediction, confusion_counts, evaluate_predictions, patient_predictions
from sft.wsi.eval.prediction_table import output_columns, target_cells, target_columns, write_predictions
from sft.wsi.model.tasks import Task
from sft.wsi.run.files import atomic_write_with_parents, counted, write_csv, write_json, write_text
from sft.wsi.train.checkpoint import WeightsId

__all__ = ["MIN_INTERVAL_PATIENTS", "PLAIN_TEXT", "Evaluation", "draw_curves", "mark_outdated", "plain_estimates", "write_evaluation"]

_Estimates = Mapping[str, Mapping[str, Estimate]]

#: Characters of a class name in the confusion matrix.
_MAX_LABEL = 24
#: Of fewer patients the draws of a bootstrap are nearly the same, and its interval is too narrow.
MIN_INTERVAL_PATIENTS = 10

#: Settings of matplotlib: names of classes may have any characters, and ``$`` in them is not a formula.
PLAIN_TEXT: Any = {"text.parse_math": False}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Predictions of slides, with their metrics.

    Attributes:
        title: of the page.
        task: of the predictions.
        predictions: of the slides.
        failed: slides without a prediction, with their problems.
        weights: identity of the weights that the predictions are of, for metrics.json.
        num_draws: of the bootstrap.
        seed: of the bootstrap.
    """

    title: str
    task: Task
    predictions: Sequence[Prediction]
    failed: Mapping[str, str]
    weights: Any
    num_draws: int
    seed: int

    @cached_property
    def patients(self) -> Sequence[Prediction]:
        """Predictions of patients."""
        return patient_predictions(self.predictions)

    @property
    def num_patients(self) -> int:
        """Patients with a target."""
        return len({prediction.patient for prediction in self.predictions if prediction.target is not None})

    @cached_property
    def estimates(self) -> dict[str, dict[str, Estimate]]:
        """Metrics of slides and of patients."""
        levels = {"slides": self.predictions, "patients": self.patients}
        return {
            level: evaluate_predictions(self.task, predictions, seed=self.seed, num_draws=self.num_draws)
            for level, predictions in levels.items()
        }


def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Write predictions.csv, patients.csv, metrics.json, failed.csv, figures and summary.md.

    Args:
        folder: output folder, created if missing.
        evaluation: the predictions.

    Raises:
        RunFolderError: a file cannot be written.
    """
    task, predictions = evaluation.task, evaluation.predictions
    write_predictions(folder / "predictions.csv", task, predictions)
    write_csv(
        folder / "patients.csv",
        ["patient", "slides", *target_columns(task), *output_columns(task)],
        [[p.name, sum(q.patient == p.patient for q in predictions), *target_cells(task, p), *p.output] for p in evaluation.patients],
    )
    write_csv(folder / "failed.csv", ["slide", "problem"], list(evaluation.failed.items()))
    metrics = plain_estimates(evaluation.estimates, evaluation.num_patients)
    write_json(folder / "metrics.json", {**metrics, "weights": evaluation.weights})
    figures = _draw_figures(folder, task, predictions)
    write_text(folder / "summary.md", _summary(evaluation, figures))


def plain_estimates(estimates: _Estimates, num_patients: int) -> dict[str, Any]:
    """Estimates for JSON: None in place of NaN.

    Args:
        estimates: of slides and patients.
        num_patients: with a target. Intervals of too few are marked as not reliable.
    """

    def number(value: float) -> float | None:
        return None if math.isnan(value) else value

    def plain(name: str, estimate: Estimate) -> dict[str, Any]:
        values: dict[str, Any] = {"value": number(estimate.value), "low": number(estimate.low), "high": number(estimate.high)}
        is_reliable = num_patients >= MIN_INTERVAL_PATIENTS and not math.isnan(estimate.low)
        return values if name == "loss" else {**values, "num_patients": num_patients, "interval_is_reliable": is_reliable}

    return {level: {name: plain(name, estimate) for name, estimate in by_name.items()} for level, by_name in estimates.items()}


def mark_outdated(folder: Path, newer: WeightsId) -> None:
    """State in metrics.json and summary.md that the run has better weights by now than those of the results.

    Raises:
        RunFolderError: they cannot be written.
    """
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    write_json(folder / "metrics.json", {**metrics, "newer_best": newer.as_dict()})
    title, _, rest = (folder / "summary.md").read_text(encoding="utf-8").partition("\n")
    note = f"Not of the best model of the run, which training improved while these slides were predicted: {newer.text}."
    write_text(folder / "summary.md", f"{title}\n\n{note}\n{rest}")


def draw_curves(path: Path, epochs: Sequence[Mapping[str, Any]]) -> None:
    """Losses of all epochs, with the other validation metrics.

    Nothing is drawn where the picture is of the same numbers, which it has as a comment.

    Raises:
        RunFolderError: it cannot be written.
    """
    digest = hashlib.sha256(repr([dict(epoch) for epoch in epochs]).encode()).hexdigest()
    if _comment_of(path) != digest:
        _draw_curves(path, epochs, digest)


def _comment_of(path: Path) -> str | None:
    """The comment of a picture; ``None`` without a picture or a comment."""
    with suppress(OSError), Image.open(path) as picture:
        comment: str | None = picture.info.get("Comment")
        return comment
    return None


@rc_context(PLAIN_TEXT)
def _draw_curves(path: Path, epochs: Sequence[Mapping[str, Any]], comment: str) -> None:
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
        figure.savefig(temporary, dpi=110, metadata={"Comment": comment})


@rc_context(PLAIN_TEXT)
def _draw_figures(folder: Path, task: Task, predictions: Sequence[Prediction]) -> list[str]:
    labelled = [prediction for prediction in predictions if prediction.target is not None]
    if task.kind not in ("classification", "multilabel") or not labelled:
        return []
    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], color="0.8")
    for number, name in enumerate(task.classes):
        if task.kind == "classification" and len(task.classes) == 2 and number == 0:
            continue  # the mirror image of the other
        truth = np.array([_is_positive(task, p, number) for p in labelled])
        if 0 < truth.sum() < len(truth):
            false_rate, true_rate, _ = roc_curve(truth, [p.output[number] for p in labelled])
            axis.plot(false_rate, true_rate, label=name)
    axis.set(xlabel="1 - specificity", ylabel="sensitivity", title="ROC, slides")
    if len(axis.lines) > 1:
        axis.legend()
    with atomic_write_with_parents(folder / "roc.png") as temporary:
        figure.savefig(temporary, dpi=110)
    if task.kind == "multilabel":
        return ["roc.png"]
    counts = confusion_counts(task, labelled)
    labels = [name if len(name) <= _MAX_LABEL else f"{name[: _MAX_LABEL - 3]}..." for name in task.classes]
    room = 0.1 * max(map(len, labels))  # inches, for the names
    figure = Figure(figsize=(1.2 + room + 0.7 * len(counts), 0.9 + room + 0.7 * len(counts)), layout="constrained")
    axis = figure.subplots()
    axis.imshow(counts, cmap="Blues", vmin=0)
    for (row, col), count in np.ndenumerate(counts):
        axis.text(col, row, str(count), ha="center", va="center", color="white" if count > counts.max() / 2 else "black")
    ticks = range(len(task.classes))
    axis.set(xlabel="predicted", ylabel="true", xticks=ticks, yticks=ticks, yticklabels=labels)
    axis.set_xticks(ticks, labels, rotation=90 if room > 0.7 else 0)
    with atomic_write_with_parents(folder / "confusion.png") as temporary:
        figure.savefig(temporary, dpi=110)
    return ["roc.png", "confusion.png"]


def _is_positive(task: Task, prediction: Prediction, number: int) -> bool:
    assert prediction.target is not None
    return bool(prediction.target[number]) if task.kind == "multilabel" else int(prediction.target[0]) == number


def _summary(evaluation: Evaluation, figures: Sequence[str]) -> str:
    predictions, patients, failed = evaluation.predictions, evaluation.patients, evaluation.failed
    estimates, num_patients = evaluation.estimates, evaluation.num_patients
    labelled = sum(prediction.target is not None for prediction in predictions)
    slides, owners = counted(len(predictions), "slide", "slides"), counted(len(patients), "patient", "patients")
    task_text = f"task {evaluation.task.kind}"
    lines = [f"# {evaluation.title}", "", f"{slides} ({labelled} with a target) of {owners}; {task_text}.", ""]
    mixed = [p.name for p in patients if p.target is None and any(q.patient == p.patient and q.target is not None for q in predictions)]
    if mixed:
        lines += [f"Patients whose slides have different targets do not count in their metrics: {len(mixed)}.", ""]
    names = list(dict.fromkeys(name for by_name in estimates.values() for name in by_name))
    if names:
        lines += ["| metric | slides | patients |", "| --- | --- | --- |"]
        lines += [
            f"| {name} | {' | '.join(_estimate_text(name, estimates[level].get(name), num_patients) for level in ('slides', 'patients'))} |"
            for name in names
        ]
        lines += ["", *_interval_note(estimates, num_patients)]
    else:
        lines += ["No metrics: no slide has a target.", ""]
    lines += [f"![{name.removesuffix('.png')}]({name})" for name in figures]
    if failed:
        lines += ["", f"## Left out: {counted(len(failed), 'slide', 'slides')}", ""]
        lines += [f"- {name}: {problem}" for name, problem in failed.items()]
    return "\n".join(lines).rstrip() + "\n"


def _interval_note(estimates: _Estimates, num_patients: int) -> list[str]:
    if not any(name != "loss" for by_name in estimates.values() for name in by_name):
        return []
    if num_patients >= MIN_INTERVAL_PATIENTS:
        if all(math.isnan(estimate.low) for by_name in estimates.values() for estimate in by_name.values()):
            return []
        return ["In brackets 95 % intervals: percentiles of a bootstrap that draws patients with all of their slides.", ""]
    return [
        f"No intervals: they need at least {MIN_INTERVAL_PATIENTS} patients. A bootstrap of fewer draws nearly the same patients each "
        "time, so its interval is too narrow. metrics.json has the numbers, marked as not reliable.",
        "",
    ]


def _estimate_text(name: str, estimate: Estimate | None, num_patients: int) -> str:
    if estimate is None or math.isnan(estimate.value):
        return "-"
    if num_patients < MIN_INTERVAL_PATIENTS and name != "loss":
        return f"{estimate.value:.4f} (n={num_patients}: no interval)"
    if math.isnan(estimate.low):
        return f"{estimate.value:.4f}"
    return f"{estimate.value:.4f} [{estimate.low:.3f}, {estimate.high:.3f}]"
