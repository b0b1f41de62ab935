"""Tasks: outputs, losses and probabilities of classification, regression, survival and segmentation.

A slide is a step of its own in memory, but ``accumulate`` slides make one optimizer step. Losses are therefore sums over slides:
``slide_loss``, times its weight, over the sum of the group's weights. Its gradient is that of the loss of the full group as a batch. Cox's
partial likelihood (1972) does not split like that: every slide's term needs the risks of the other slides. `cox_gradients` gives the
derivative of the group's loss in each slide's risk, from a first pass without gradients; the second pass then goes slide by slide (as
GradCache does for contrastive losses; Gao et al., 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sft.common.errors import InputError
from sft.wsi.config import TaskConfig, TaskKind
from sft.wsi.data.table import SlideRecord

__all__ = ["Task", "cox_gradients", "make_task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Task: its kind, and its statistics of the training slides.

    Attributes:
        kind: of task.
        classes: names of the classes; empty for tasks without classes.
        num_outputs: number of outputs of the model.
        weights: of each class (classification), or of each class's positives (multilabel); empty: all 1.
        label_smoothing: of the cross-entropy.
        edges: times between the intervals of the hazard.
        shift, scale: of the values of a regression, which the network predicts as ``(value - shift) / scale``.
    """

    kind: TaskKind
    classes: tuple[str, ...] = ()
    num_outputs: int = 1
    weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0
    edges: tuple[float, ...] = ()
    shift: float = 0.0
    scale: float = 1.0

    def slide_weight(self, record: SlideRecord) -> float:
        """The weight of a slide in the mean over its group."""
        if self.kind == "classification" and self.weights and record.target:
            return self.weights[int(record.target[0])]
        return 1.0

    def slide_loss(self, output: Tensor, target: Sequence[float]) -> Tensor:
        """Loss of one slide, before its weight: PyTorch's loss of a batch of this slide.

        Args:
            output: ``[1, K]``.
            target: of its record.

        Raises:
            InputError: the task has no loss of single slides.
        """
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        number = partial(torch.tensor, dtype=output.dtype, device=output.device)
        if self.kind == "classification":
            index = torch.tensor([int(target[0])], device=output.device)
            weights = number(self.weights) if self.weights else None  # smoothing counts those of all classes
            return F.cross_entropy(output, index, weights, label_smoothing=self.label_smoothing)
        if self.kind == "multilabel":
            positive = number(self.weights) if self.weights else None
            return F.binary_cross_entropy_with_logits(output, number([list(target)]), pos_weight=positive)
        if self.kind == "regression":
            return F.huber_loss(output, number([[(target[0] - self.shift) / self.scale]]))
        if self.kind == "hazard":
            return self._hazard_loss(output[0], target)
        raise InputError(f"task {self.kind} has no loss of a single slide; this is a mistake of the caller")

    def probabilities(self, output: Tensor) -> tuple[float, ...]:
        """Predictions to report, from ``[1, K]``: probabilities, the value (regression), the risk (survival; higher is earlier)."""
        row = output.detach().double().cpu()[0]
        if self.kind == "classification":
            row = row.softmax(0)
        elif self.kind == "multilabel":
            row = row.sigmoid()
        elif self.kind == "regression":
            row = row * self.scale + self.shift
        elif self.kind == "hazard":
            row = -torch.cumprod(1 - row.sigmoid(), 0).sum()[None]  # minus the expected number of intervals survived
        return tuple(row.tolist())

    def columns(self) -> tuple[str, ...]:
        """Names of the columns of `probabilities`."""
        if self.kind in ("classification", "multilabel"):
            return tuple(f"p_{name}" for name in self.classes)
        return ("value",) if self.kind == "regression" else ("risk",)

    def _hazard_loss(self, logits: Tensor, target: Sequence[float]) -> Tensor:
        """Minus the log-likelihood of a discrete-time hazard (Zadeh and Schmid, 2020)."""
        time, event = target
        interval = int(np.searchsorted(self.edges, time, side="right"))
        survived = F.logsigmoid(-logits)
        if event:
            return -(survived[:interval].sum() + F.logsigmoid(logits[interval]))
        # A censored slide is known to have survived its interval.
        return -survived[: interval + 1].sum()


def make_task(config: TaskConfig, classes: tuple[str, ...], training: Sequence[SlideRecord]) -> Task:
    """A task for the training slides: class weights, intervals, scale.

    Raises:
        InputError: the slides do not suffice.
    """
    targets = [record.target for record in training if record.target is not None]
    kind = config.kind
    if kind == "classification":
        counts = np.bincount([int(target[0]) for target in targets], minlength=len(classes))
        weights = tuple((len(targets) / (len(classes) * np.maximum(counts, 1))).tolist()) if config.class_weights == "balanced" else ()
        return Task(kind=kind, classes=classes, num_outputs=len(classes), weights=weights, label_smoothing=config.label_smoothing)
    if kind == "multilabel":
        positives = np.sum(targets, axis=0)
        weights = tuple(((len(targets) - positives) / np.maximum(positives, 1)).tolist()) if config.class_weights == "balanced" else ()
        return Task(kind=kind, classes=classes, num_outputs=len(classes), weights=weights)
    if kind == "regression":
        values = np.array([target[0] for target in targets])
        return Task(kind=kind, shift=float(values.mean()), scale=float(values.std()) or 1.0)
    if kind == "hazard":
        times = [target[0] for target in targets if target[1]]
        edges = np.unique(np.quantile(times, np.arange(1, config.num_intervals) / config.num_intervals)).tolist()
        if len(edges) != config.num_intervals - 1:
            raise InputError(
                f"task.num_intervals {config.num_intervals}: the {len(times)} events of the training slides have too few different times. "
                "Give fewer."
            )
        return Task(kind=kind, num_outputs=config.num_intervals, edges=tuple(edges))
    if kind == "segmentation":
        return Task(kind=kind, classes=classes, num_outputs=len(classes))
    return Task(kind=kind)


def cox_gradients(risks: Sequence[float], targets: Sequence[Sequence[float]]) -> tuple[float, tuple[float, ...]]:
    """Minus the log partial likelihood of a group, over its events, and its derivative in each risk.

    Ties are handled as Breslow (1974) does. A group without an event has a loss of 0 and no gradient.

    >>> loss, gradients = cox_gradients([0.0, 0.0], [(1.0, 1.0), (2.0, 0.0)])
    >>> round(loss, 6), gradients
    (0.693147, (-0.5, 0.5))
    """
    values = torch.tensor(list(risks), dtype=torch.float64, device="cpu", requires_grad=True)
    times = torch.tensor([target[0] for target in targets], dtype=torch.float64, device="cpu")
    events = torch.tensor([target[1] for target in targets], dtype=torch.bool, device="cpu")
    if not events.any():
        return 0.0, (0.0,) * len(times)
    at_risk = times[None, :] >= times[:, None]
    totals = values.expand(len(times), -1).masked_fill(~at_risk, -torch.inf).logsumexp(1)
    loss = -(values - totals)[events].mean()
    (gradient,) = torch.autograd.grad(loss, values)
    return loss.item() + 0.0, tuple(gradient.tolist())  # no -0.0, for a group in which only one is at risk
