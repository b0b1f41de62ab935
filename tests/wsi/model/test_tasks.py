"""Losses of groups against the losses of batches; metrics against their definitions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sft.common.errors import InputError
from sft.wsi.config import TaskConfig, TrainConfig
from sft.wsi.data.table import SlideRecord
from sft.wsi.eval.metrics import (
    Prediction,
    concordance_index,
    confusion_counts,
    evaluate_predictions,
    is_measurable,
    patient_predictions,
)
from sft.wsi.eval.predict import mean_loss
from sft.wsi.model.tasks import Task, cox_gradients, make_task
from sft.wsi.train.optim import learning_rate


def _records(targets: Sequence[tuple[float, ...]]) -> list[SlideRecord]:
    return [
        SlideRecord(name=str(n), path=Path(str(n)), target=t, patient=str(n), split="train", mpp=None, mask=None, row=n)
        for n, t in enumerate(targets)
    ]


def _grouped(task: Task, outputs: torch.Tensor, records: list[SlideRecord]) -> torch.Tensor:
    """The loss as summed by the trainer, slide by slide."""
    total = sum(task.slide_weight(record) for record in records)
    shares = [
        task.slide_loss(outputs[number][None], record.target or ()) * task.slide_weight(record) / total
        for number, record in enumerate(records)
    ]
    return torch.stack(shares).sum()


def test_weighted_cross_entropy_of_a_group_is_that_of_a_batch() -> None:
    records = _records([(0.0,), (1.0,), (1.0,), (2.0,), (1.0,)])
    task = make_task(TaskConfig(class_weights="balanced", label_smoothing=0.1), ("a", "b", "c"), records)
    assert task.weights == pytest.approx((5 / 3, 5 / 9, 5 / 3))
    outputs, classes = torch.randn(5, 3), torch.tensor([0, 1, 1, 2, 1])
    weights = torch.tensor(task.weights)
    assert torch.allclose(_grouped(task, outputs, records), F.cross_entropy(outputs, classes, weights, label_smoothing=0.1))
    plain = make_task(TaskConfig(label_smoothing=0.1), ("a", "b", "c"), records)
    assert torch.allclose(_grouped(plain, outputs, records), F.cross_entropy(outputs, classes, label_smoothing=0.1))
    sharp = make_task(TaskConfig(class_weights="balanced"), ("a", "b", "c"), records)
    assert torch.allclose(_grouped(sharp, outputs, records), F.cross_entropy(outputs, classes, torch.tensor(sharp.weights)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_losses_are_as_precise_as_outputs_and_single_at_least(dtype: torch.dtype) -> None:
    exact = torch.randn(1, 2, dtype=torch.float64)
    cases: list[tuple[TaskConfig, tuple[float, ...]]] = [
        (TaskConfig(class_weights="balanced"), (1.0,)),
        (TaskConfig(kind="multilabel", class_weights="balanced"), (1.0, 0.0)),
        (TaskConfig(kind="regression"), (3.0,)),
        (TaskConfig(kind="hazard", num_intervals=2), (2.0, 1.0)),
    ]
    for config, target in cases:
        task = make_task(config, ("a", "b"), _records([target, (0.0, *target[1:])]))
        output = exact[:, : task.num_outputs].to(dtype)
        loss = task.slide_loss(output, target)
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        assert float(loss) == pytest.approx(float(task.slide_loss(output.double(), target)), rel=1e-6)


def test_multilabel_and_regression_losses_of_a_group_are_those_of_a_batch() -> None:
    targets = [(1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (1.0, 0.0)]
    task = make_task(TaskConfig(kind="multilabel", class_weights="balanced"), ("a", "b"), _records(targets))
    assert task.weights == pytest.approx((1 / 3, 3.0))
    outputs = torch.randn(4, 2)
    expected = F.binary_cross_entropy_with_logits(outputs, torch.tensor(targets), pos_weight=torch.tensor(task.weights))
    assert torch.allclose(_grouped(task, outputs, _records(targets)), expected)
    values: list[tuple[float, ...]] = [(1.0,), (5.0,), (9.0,)]
    task, outputs = make_task(TaskConfig(kind="regression"), (), _records(values)), torch.randn(3, 1)
    standard = (torch.tensor(values) - 5) / math.sqrt(32 / 3)
    assert torch.allclose(_grouped(task, outputs, _records(values)), F.huber_loss(outputs, standard))
    assert task.probabilities(torch.tensor([[0.5]])) == pytest.approx((5 + 0.5 * math.sqrt(32 / 3),))


def test_hazard_loss_is_minus_the_log_likelihood() -> None:
    records = _records([(float(time), 1.0) for time in (1, 2, 3, 4)])
    task = make_task(TaskConfig(kind="hazard", num_intervals=4), (), records)
    assert task.edges == pytest.approx((1.75, 2.5, 3.25))
    logits = torch.randn(1, 4, dtype=torch.float64)
    hazard = logits[0].sigmoid()
    survived = torch.cumprod(1 - hazard, 0)
    # An event in the third interval: the first two were survived.
    assert torch.allclose(task.slide_loss(logits, (3.0, 1.0)).double(), -(survived[1] * hazard[2]).log(), atol=1e-6)
    assert torch.allclose(task.slide_loss(logits, (3.0, 0.0)).double(), -survived[2].log(), atol=1e-6)
    assert torch.allclose(task.slide_loss(logits, (0.5, 1.0)).double(), -hazard[0].log(), atol=1e-6)
    assert task.probabilities(logits) == pytest.approx((-survived.sum().item(),))
    with pytest.raises(InputError, match="too few different times"):
        make_task(TaskConfig(kind="hazard"), (), _records([(1.0, 1.0)] * 6))


def test_cox_gradients_are_those_of_the_partial_likelihood() -> None:
    draw = np.random.default_rng(0)
    risks = torch.tensor(draw.normal(size=7), requires_grad=True)
    times, events = draw.integers(1, 5, 7).astype(float), draw.integers(0, 2, 7).astype(float)
    terms = []
    for i in range(7):
        if events[i]:
            at_risk = [risks[j].exp() for j in range(7) if times[j] >= times[i]]
            terms.append(-(risks[i] - torch.stack(at_risk).sum().log()))
    expected = torch.stack(terms).mean()
    expected.backward()
    loss, gradients = cox_gradients(risks.tolist(), list(zip(times, events, strict=True)))
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert risks.grad is not None and gradients == pytest.approx(risks.grad.tolist(), rel=1e-10, abs=1e-14)
    assert cox_gradients([1.0, 2.0], [(1.0, 0.0), (2.0, 0.0)]) == (0.0, (0.0, 0.0))


def _predictions(truth: list[int], scores: list[float], patients: list[str]) -> list[Prediction]:
    rows = zip(truth, scores, patients, strict=True)
    return [Prediction(name=str(n), patient=p, split="test", target=(float(t),), output=(1 - s, s)) for n, (t, s, p) in enumerate(rows)]


def test_intervals_draw_patients_and_hold_the_estimate() -> None:
    task, draw = Task(kind="classification", classes=("no", "yes"), num_outputs=2), np.random.default_rng(1)
    truth = draw.integers(0, 2, 80).tolist()
    scores = [min(0.99, max(0.01, 0.35 * t + 0.3 + 0.25 * draw.normal())) for t in truth]
    alone = evaluate_predictions(task, _predictions(truth, scores, [str(n) for n in range(80)]), num_draws=300)
    assert alone["auc"].low < alone["auc"].value < alone["auc"].high
    pairs = [(t, s) for t in (0, 1) for s in (0, 1)]
    by_hand = np.mean(
        [(scores[i] > scores[j]) + 0.5 * (scores[i] == scores[j]) for i in range(80) for j in range(80) if truth[i] > truth[j]]
    )
    assert alone["auc"].value == pytest.approx(by_hand) and len(pairs) == 4
    assert alone == evaluate_predictions(task, _predictions(truth, scores, [str(n) for n in range(80)]), num_draws=300)
    # Four copies of the same slides are no more evidence if they are of the same patients.
    many = evaluate_predictions(task, _predictions(truth * 4, scores * 4, [str(n) for n in range(80)] * 4), num_draws=300)
    naive = evaluate_predictions(task, _predictions(truth * 4, scores * 4, [str(n) for n in range(320)]), num_draws=300)
    widths = {name: metrics["auc"].high - metrics["auc"].low for name, metrics in (("alone", alone), ("many", many), ("naive", naive))}
    assert widths["many"] == pytest.approx(widths["alone"], rel=0.25) and widths["naive"] < 0.7 * widths["alone"]
    one_class = evaluate_predictions(task, _predictions([1] * 5, [0.5] * 5, list("abcde")), num_draws=20)
    assert math.isnan(one_class["auc"].value) and math.isnan(one_class["auc"].low)
    assert evaluate_predictions(task, []) == {}


def test_patients_are_averages_and_confusion_counts() -> None:
    task = Task(kind="classification", classes=("no", "yes"), num_outputs=2)
    slides = _predictions([1, 1, 0, 0, 1], [0.9, 0.2, 0.4, 0.1, 0.8], ["a", "a", "b", "c", "c"])
    patients = patient_predictions(slides)
    assert [(p.name, p.target) for p in patients] == [("a", (1.0,)), ("b", (0.0,)), ("c", None)]
    assert patients[0].output == pytest.approx((0.45, 0.55))
    assert confusion_counts(task, slides).tolist() == [[2, 0], [1, 2]]


def test_average_precision_by_hand() -> None:
    task = Task(kind="classification", classes=("a", "b"), num_outputs=2)
    rows = [
        Prediction(name=str(n), patient=str(n), split="test", target=(float(t),), output=(1 - p, p))
        for n, (t, p) in enumerate(zip((1, 0, 1, 0), (0.9, 0.8, 0.7, 0.6), strict=True))
    ]
    # Half of the positives at a precision of 1, the other half at 2 of 3.
    assert evaluate_predictions(task, rows, num_draws=0)["auprc"].value == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)


def test_concordance_counts_comparable_pairs() -> None:
    times, events, risks = np.array([2.0, 3.0, 3.0, 5.0]), np.array([1.0, 0.0, 1.0, 1.0]), np.array([1.0, 0.5, 1.0, 2.0])
    # Comparable: (0,1) right, (0,2) tie, (0,3) wrong, (2,3) wrong, and (2,1) right, since the censored patient has outlived the event.
    assert concordance_index(times, events, risks) == pytest.approx(2.5 / 5)
    assert math.isnan(concordance_index(times, np.zeros(4), risks))


def test_segmentation_and_multiclass_metrics() -> None:
    task = Task(kind="segmentation", classes=("a", "b"), num_outputs=2)
    prediction = Prediction(name="1", patient="1", split="test", target=(), output=(8.0, 10.0, 9.0, 1.0, 2.0, 3.0))
    metrics = evaluate_predictions(task, [prediction], num_draws=0)
    assert metrics["dice_a"].value == pytest.approx(16 / 19) and metrics["dice"].value == pytest.approx((16 / 19 + 2 / 5) / 2)
    task = Task(kind="classification", classes=("a", "b", "c"), num_outputs=3)
    outputs: list[Any] = [(0.8, 0.1, 0.1), (0.2, 0.5, 0.3), (0.3, 0.4, 0.3), (0.1, 0.2, 0.7)]
    rows = [
        Prediction(name=str(n), patient=str(n), split="test", target=(float(t),), output=o, loss=1.0)
        for n, (t, o) in enumerate(zip((0, 1, 2, 2), outputs, strict=True))
    ]
    metrics = evaluate_predictions(task, rows, num_draws=0)
    assert metrics["loss"].value == 1.0 and metrics["auc_a"].value == 1.0
    assert metrics["auc_c"].value == pytest.approx((0.5 + 1 + 1 + 1) / 4)
    assert metrics["balanced_accuracy"].value == pytest.approx((1 + 1 + 0.5) / 3)


def test_the_learning_rate_is_a_function_of_the_step() -> None:
    config = TrainConfig(lr=2.0, schedule="constant", warmup_steps=4)
    assert [learning_rate(config, step, 10) for step in (0, 3, 4, 9)] == [0.5, 2.0, 2.0, 2.0]


def test_a_loss_of_cox_takes_an_event() -> None:
    """A validation split with censored patients only has none. Regression: its loss of 0 was the best of a run."""
    task = make_task(TaskConfig(kind="cox"), (), _records([(1.0, 0.0), (2.0, 1.0)]))
    assert not is_measurable(task, "loss", [(1.0, 0.0), (2.0, 0.0)])
    assert is_measurable(task, "loss", [(1.0, 0.0), (2.0, 1.0)])
    censored = [Prediction(name="a", patient="a", split="validation", target=(1.0, 0.0), output=(0.5,), loss=math.nan)]
    assert math.isnan(mean_loss("cox", censored))


def test_draws_without_a_class_give_no_warning() -> None:
    """Most draws of five slides lack a class; sklearn would warn for each."""
    task = make_task(TaskConfig(), ("a", "b", "c"), _records([(0.0,), (1.0,), (2.0,)]))
    truth, scores = [0, 1, 2, 0, 1], [[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7], [0.3, 0.6, 0.1], [0.1, 0.8, 0.1]]
    predictions = [
        Prediction(name=str(n), patient=str(n), split="test", target=(float(t),), output=tuple(p))
        for n, (t, p) in enumerate(zip(truth, scores, strict=True))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = evaluate_predictions(task, predictions, num_draws=200)
    assert 0 <= metrics["balanced_accuracy"].value <= 1
