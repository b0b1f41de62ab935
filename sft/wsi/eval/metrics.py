"""Metrics with bootstrap intervals, resampled by patient, since slides of one patient are not independent."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from sklearn.metrics import average_precision_score, balanced_accuracy_score, confusion_matrix, mean_absolute_error, r2_score, roc_auc_score

from sft.common.array_types import FloatArray
from sft.wsi.model.tasks import Task
from sft.wsi.train.optim import philox_generator

__all__ = [
    "Estimate",
    "Prediction",
    "concordance_index",
    "confusion_counts",
    "evaluate_predictions",
    "is_measurable",
    "patient_predictions",
]

_Metric = Callable[[FloatArray, FloatArray], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction of one slide, or of one patient.

    Attributes:
        name: of the slide or patient.
        patient: name of the patient.
        split: of the slide.
        target: of its record; None where unknown.
        output: of `Task.probabilities`; for segmentation numbers of correct, predicted and true pixels, class after class.
        loss: of the slide; nan for an unknown target, or a loss of groups.
    """

    name: str
    patient: str
    split: str
    target: tuple[float, ...] | None
    output: tuple[float, ...]
    loss: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number and its 95 % interval (percentiles of the bootstrap); nan if it is undefined."""

    value: float
    low: float = math.nan
    high: float = math.nan


def evaluate_predictions(task: Task, predictions: Sequence[Prediction], *, seed: int = 0, num_draws: int = 1000) -> dict[str, Estimate]:
    """Metrics of the predictions that have a target.

    Args:
        task: of the predictions.
        predictions: of slides or patients.
        seed: of the bootstrap.
        num_draws: of the bootstrap; 0 for none.
    """
    labelled = [prediction for prediction in predictions if prediction.target is not None]
    losses = [prediction.loss for prediction in labelled if not math.isnan(prediction.loss)]
    estimates: dict[str, Estimate] = {}
    if losses:
        estimates["loss"] = Estimate(value=float(np.mean(losses)))
    if not labelled:
        return estimates
    targets = np.array([prediction.target for prediction in labelled], np.float64)
    outputs = np.array([prediction.output for prediction in labelled], np.float64)
    draws = _bootstrap_rows([prediction.patient for prediction in labelled], seed, num_draws)
    for name, metric in _metrics(task).items():
        value = metric(targets, outputs)
        with warnings.catch_warnings():  # sklearn warns of each draw without some class; with few slides these are many
            warnings.simplefilter("ignore", UserWarning)
            drawn = [metric(targets[rows], outputs[rows]) for rows in draws]
        drawn = [number for number in drawn if not math.isnan(number)]
        # An interval from a few draws that had both classes would look surer than it is.
        low, high = np.percentile(drawn, (2.5, 97.5)).tolist() if len(drawn) > num_draws / 2 else (math.nan, math.nan)
        estimates[name] = Estimate(value=value, low=low, high=high)
    return estimates


def patient_predictions(predictions: Sequence[Prediction]) -> list[Prediction]:
    """One prediction for each patient: the average over the slides. The target is the common one of the slides, else unknown."""
    grouped: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        grouped.setdefault(prediction.patient, []).append(prediction)
    result = []
    for patient, parts in grouped.items():
        targets = {each.target for each in parts}
        output = tuple(np.mean([each.output for each in parts], axis=0).tolist())
        target = parts[0].target if len(targets) == 1 else None
        result.append(replace(parts[0], name=patient, target=target, output=output, loss=math.nan))
    return result


def is_measurable(task: Task, name: str, targets: Sequence[tuple[float, ...]]) -> bool:
    """True if slides with these targets define a metric: an AUC needs both classes, Cox's loss an event."""
    if task.kind == "segmentation":
        return True
    if name == "loss":
        return task.kind != "cox" or any(target[1] for target in targets)
    value = _metrics(task)[name](np.array(targets, np.float64), np.zeros((len(targets), task.num_outputs)))
    return not math.isnan(value)


def confusion_counts(task: Task, predictions: Sequence[Prediction]) -> npt.NDArray[np.int64]:
    """Counts ``[true class, predicted class]``."""
    labelled = [prediction for prediction in predictions if prediction.target is not None]
    truth = [int(prediction.target[0]) for prediction in labelled if prediction.target is not None]
    guesses = [int(np.argmax(prediction.output)) for prediction in labelled]
    counts: npt.NDArray[np.int64] = confusion_matrix(truth, guesses, labels=range(len(task.classes)))
    return counts


def concordance_index(times: FloatArray, events: FloatArray, risks: FloatArray) -> float:
    """Harrell's C (1982): the share of comparable pairs whose higher risk has the earlier event; ties of risk count half.

    A patient censored at the time of another's event has outlived it.

    >>> concordance_index(np.array([1.0, 2.0, 3.0]), np.array([1.0, 0.0, 1.0]), np.array([3.0, 2.0, 1.0]))
    1.0
    """
    outlived = (times[:, None] < times[None, :]) | ((times[:, None] == times[None, :]) & (events[None, :] <= 0))
    comparable = outlived & (events[:, None] > 0)
    if not comparable.any():
        return math.nan
    right = (risks[:, None] > risks[None, :]) + 0.5 * (risks[:, None] == risks[None, :])
    return float(right[comparable].mean())


def _metrics(task: Task) -> dict[str, _Metric]:
    if task.kind == "classification" and len(task.classes) == 2:
        return {"auc": _column(_auc, 1), "auprc": _column(_auprc, 1), "balanced_accuracy": _balanced_accuracy}
    if task.kind == "classification":
        each = [(lambda y, p, k=k: _auc((y[:, 0] == k).astype(float), p[:, k])) for k in range(len(task.classes))]
        precise = [(lambda y, p, k=k: _auprc((y[:, 0] == k).astype(float), p[:, k])) for k in range(len(task.classes))]
        by_class = {f"auc_{name}": metric for name, metric in zip(task.classes, each, strict=True)}
        return {"auc": _mean(each), "auprc": _mean(precise), "balanced_accuracy": _balanced_accuracy, **by_class}
    if task.kind == "multilabel":
        each = [(lambda y, p, k=k: _auc(y[:, k], p[:, k])) for k in range(len(task.classes))]
        precise = [(lambda y, p, k=k: _auprc(y[:, k], p[:, k])) for k in range(len(task.classes))]
        by_class = {f"auc_{name}": metric for name, metric in zip(task.classes, each, strict=True)}
        return {"auc": _mean(each), "auprc": _mean(precise), **by_class}
    if task.kind == "regression":
        return {
            "r2": lambda y, p: float(r2_score(y, p)) if len(np.unique(y)) > 1 else math.nan,
            "mae": lambda y, p: float(mean_absolute_error(y, p)),
        }
    if task.kind == "segmentation":
        dice = [(lambda y, p, k=k: _dice(p, k)) for k in range(len(task.classes))]
        iou = [(lambda y, p, k=k: _iou(p, k)) for k in range(len(task.classes))]
        return {
            "dice": _mean(dice),
            **{f"dice_{name}": metric for name, metric in zip(task.classes, dice, strict=True)},
            "iou": _mean(iou),
            **{f"iou_{name}": metric for name, metric in zip(task.classes, iou, strict=True)},
        }
    return {"c_index": lambda y, p: concordance_index(y[:, 0], y[:, 1], p[:, 0])}


def _auc(truth: FloatArray, scores: FloatArray) -> float:
    return float(roc_auc_score(truth, scores)) if 0 < truth.sum() < len(truth) else math.nan


def _auprc(truth: FloatArray, scores: FloatArray) -> float:
    return float(average_precision_score(truth, scores)) if 0 < truth.sum() < len(truth) else math.nan


def _balanced_accuracy(targets: FloatArray, outputs: FloatArray) -> float:
    return float(balanced_accuracy_score(targets[:, 0], outputs.argmax(1))) if len(np.unique(targets)) > 1 else math.nan


def _dice(counts: FloatArray, number: int) -> float:
    right, predicted, true = counts[:, 3 * number : 3 * number + 3].sum(0)
    return float(2 * right / (predicted + true)) if predicted + true else math.nan


def _iou(counts: FloatArray, number: int) -> float:
    right, predicted, true = counts[:, 3 * number : 3 * number + 3].sum(0)
    union = predicted + true - right
    return float(right / union) if union else math.nan


def _column(metric: _Metric, number: int) -> _Metric:
    return lambda targets, outputs: metric(targets[:, 0], outputs[:, number])


def _mean(metrics: Sequence[_Metric]) -> _Metric:
    """Mean over the classes that have a value."""

    def mean(targets: FloatArray, outputs: FloatArray) -> float:
        values = [value for value in (metric(targets, outputs) for metric in metrics) if not math.isnan(value)]
        return float(np.mean(values)) if values else math.nan

    return mean


def _bootstrap_rows(patients: Sequence[str], seed: int, num_draws: int) -> list[npt.NDArray[np.intp]]:
    """Rows of each bootstrap sample: patients drawn with replacement, with all of their slides."""
    names, owners = np.unique(np.array(patients), return_inverse=True)
    rows = [np.flatnonzero(owners == number) for number in range(len(names))]
    draw = philox_generator(seed, "bootstrap")
    return [np.concatenate([rows[number] for number in draw.integers(len(names), size=len(names))]) for _ in range(num_draws)]
