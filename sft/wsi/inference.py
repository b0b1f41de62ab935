"""Predictions of slides, one after another, with what is wrong with those that cannot be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sft.errors import SourceError
from sft.nn import WithLoss
from sft.wsi.experiment import Experiment, autocast, compile_model, segmentation_counts, segmentation_loss
from sft.wsi.metrics import Prediction
from sft.wsi.norms import set_training
from sft.wsi.table import SlideRecord
from sft.wsi.tasks import cox_gradients

__all__ = ["Predictor", "mean_loss"]


class Predictor:
    """A model that predicts slides inside the budget.

    Args:
        experiment: whose model, slides and task.
        nets: what is compiled already: the model (or, for segmentation, the model with its loss). Default: `None`
    """

    def __init__(self, experiment: Experiment, net: Any = None) -> None:
        self._experiment = experiment
        self._segments = experiment.task.kind == "segmentation"
        model, config = experiment.model, experiment.config
        if self._segments:
            self._net = net or compile_model(WithLoss(model, segmentation_loss), config, num_inputs=2, skip_repeats=experiment.paints)
            self._counts = compile_model(WithLoss(model, segmentation_counts), config, num_inputs=2, skip_repeats=experiment.paints)
        else:
            self._net = net or compile_model(model, config, skip_repeats=experiment.paints)

    def predict(self, record: SlideRecord) -> Prediction:
        """One slide, as it is: without augmentation.

        Raises:
            SourceError: it cannot be read.
            BudgetError: it does not fit.
        """
        experiment = self._experiment
        set_training(experiment.model, training=False, freeze_norms=experiment.freezes_norms)
        source = experiment.feed.source(record)
        loss = math.nan
        with torch.no_grad(), autocast(experiment.config):
            if self._segments:
                labels = experiment.feed.labels(record)
                loss = float(self._net.eval()(source, labels))
                output = tuple(self._counts.eval()(source, labels).double().tolist())
            else:
                scores = self._net.eval()(source).float()
                output = experiment.task.probabilities(scores)
                if record.target is not None and experiment.task.kind != "cox":
                    loss = float(experiment.task.slide_loss(scores, record.target))
        return Prediction(
            name=record.name, patient=record.patient, split=record.split or "", target=record.target, output=output, loss=loss
        )

    def predict_all(
        self, records: Sequence[SlideRecord], failed: dict[str, str], *, after: Callable[[], None] | None = None
    ) -> list[Prediction]:
        """All slides that can be read; the others are added to ``failed``.

        Args:
            records: the slides.
            failed: what is wrong with slides, by name; these are left out.
            after: called after each slide.

        Raises:
            SourceError: a slide cannot be read, and ``train.on_error`` is not "skip".
            BudgetError: one does not fit.
        """
        predictions = []
        for record in records:
            if record.name in failed:
                continue
            try:
                predictions.append(self.predict(record))
            except SourceError as error:
                if self._experiment.config.train.on_error != "skip":
                    raise
                failed[record.name] = " ".join(str(error).split())
            if after is not None:
                after()
        return predictions


def mean_loss(kind: str, predictions: Sequence[Prediction]) -> float:
    """The loss over slides: their mean, or Cox's of all of them together."""
    known = [prediction for prediction in predictions if prediction.target is not None]
    if kind == "cox":
        return cox_gradients([p.output[0] for p in known], [p.target for p in known if p.target is not None])[0] if known else math.nan
    losses = [prediction.loss for prediction in known]
    return sum(losses) / len(losses) if losses else math.nan
