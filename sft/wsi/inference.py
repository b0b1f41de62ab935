"""Predictions of slides, one after another, with what is wrong with those that cannot be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sft.nn import WithLoss
from sft.wsi.ahead import Inputs, SlidePrefetcher, decode_first_rows, decode_ahead
from sft.wsi.errors import TrainingError
from sft.wsi.experiment import Experiment, autocast_context, compile_model, segmentation_counts, segmentation_loss
from sft.wsi.interruption import Interruption
from sft.wsi.metrics import Prediction
from sft.wsi.norms import set_training
from sft.wsi.ranks import SINGLE_RANK, Ranks
from sft.wsi.table import SlideRecord
from sft.wsi.tasks import cox_gradients
from sft.wsi.together import SlideFailed, gather_results, next_items, scatter_items, open_on_all_ranks, reading_slide

__all__ = ["Predictor", "mean_loss"]


class Predictor:
    """A model that predicts slides inside the budget.

    Args:
        experiment: whose model, slides and task.
        net: what is compiled already: the model (or, for segmentation, the model with its loss). Default: `None`
        ranks: those that share the work. Default: this process alone
        ahead: opens slides ahead of their use, also for others that take turns with this. Default: `None` (one of its own)
    """

    def __init__(self, experiment: Experiment, net: Any = None, ranks: Ranks = SINGLE_RANK, ahead: SlidePrefetcher | None = None) -> None:
        self._experiment, self._ranks, self._ahead = experiment, ranks, ahead or SlidePrefetcher()
        self._segments = experiment.task.kind == "segmentation"
        model, config = experiment.model, experiment.config
        if self._segments:
            skips = experiment.paints
            self._net = net or compile_model(WithLoss(model, segmentation_loss), config, num_inputs=2, skip_repeats=skips, ranks=ranks)
            self._counts = compile_model(WithLoss(model, segmentation_counts), config, num_inputs=2, skip_repeats=skips, ranks=ranks)
        else:
            self._net = net or compile_model(model, config, skip_repeats=experiment.paints, ranks=ranks)

    def predict(self, record: SlideRecord) -> Prediction:
        """One slide, as it is: without augmentation. The ranks that share it call this together.

        Raises:
            SourceError: it cannot be read.
            BudgetError: it does not fit.
        """
        try:
            return gather_results(lambda: self._predict(record, None, None), self._ranks, among="bands")[0]
        except SlideFailed as failure:
            raise failure.error from None

    def _predict(self, record: SlideRecord, upcoming: SlideRecord | None, interruption: Interruption | None) -> Prediction:
        """The prediction of a slide, while the one that comes after it is opened."""
        experiment = self._experiment
        set_training(experiment.model, training=False, freeze_norms=experiment.freezes_norms)
        inputs = open_on_all_ranks(
            record, lambda: self._ahead.take(("as it is", record.name), lambda: self._begun(record)), self._ranks, interruption
        )
        if upcoming is not None:
            further = partial(decode_ahead, beside=inputs, num_bands=self._ranks.shape.num_bands)
            self._ahead.start(("as it is", upcoming.name), lambda: self._begun(upcoming), further)
        with reading_slide(record, self._ranks):
            return self._predicted(record, inputs)

    def _begun(self, record: SlideRecord) -> Inputs:
        feed = self._experiment.feed
        inputs: Inputs = (feed.source(record), feed.labels(record)) if self._segments else (feed.source(record),)
        for source in inputs:
            decode_first_rows(source)
        return inputs

    def _predicted(self, record: SlideRecord, inputs: Inputs) -> Prediction:
        experiment = self._experiment
        loss = math.nan
        with torch.no_grad(), autocast_context(experiment.config):
            if self._segments:
                loss = float(self._net.eval()(*inputs))
                output = tuple(self._counts.eval()(*inputs).double().tolist())
            else:
                scores = self._net.eval()(*inputs)
                output = experiment.task.probabilities(scores)
                if not all(map(math.isfinite, output)):
                    raise TrainingError(
                        f"the prediction for {record.name} is {output}: the weights have grown beyond bounds. Lower train.lr."
                    )
                if record.target is not None and experiment.task.kind != "cox":
                    loss = float(experiment.task.slide_loss(scores, record.target))
        return Prediction(
            name=record.name, patient=record.patient, split=record.split or "", target=record.target, output=output, loss=loss
        )

    def predict_all(
        self,
        records: Sequence[SlideRecord],
        failed: dict[str, str],
        *,
        after: Callable[[], None] | None = None,
        interruption: Interruption | None = None,
    ) -> list[Prediction]:
        """All slides that can be read; the others are added to ``failed``. Every rank gets all predictions.

        Args:
            records: the slides.
            failed: what is wrong with slides, by name; these are left out.
            after: called after each slide of this rank.
            interruption: asks to end. Default: `None` (nobody does)

        Raises:
            EndRequested: somebody asked to end.
            SourceError: a slide cannot be read, and ``train.on_error`` is not "skip".
            BudgetError: one does not fit.
        """
        mine = scatter_items([record for record in records if record.name not in failed], self._ranks)
        try:
            parts = gather_results(lambda: self._predict_some(mine, after, interruption), self._ranks, interruption)
        except SlideFailed as failure:
            raise failure.error from None
        finally:
            self._ahead.drop()  # what was begun when the last slide failed
        found: dict[str, Prediction] = {}
        problems: dict[str, str] = {}
        for predictions, unreadable in parts:
            found |= predictions
            problems |= unreadable
        failed |= {record.name: problems[record.name] for record in records if record.name in problems}
        return [found[record.name] for record in records if record.name in found]

    def _predict_some(
        self, mine: Sequence[SlideRecord], after: Callable[[], None] | None, interruption: Interruption | None
    ) -> tuple[dict[str, Prediction], dict[str, str]]:
        """Predictions of this rank's slides, and what is wrong with the others of them, by name."""
        found, problems = {}, {}
        for record, upcoming in zip(mine, next_items(mine), strict=True):
            try:
                # Bands that have lost each other over a slide meet again before the next.
                found[record.name] = gather_results(partial(self._predict, record, upcoming, interruption), self._ranks, among="bands")[0]
            except SlideFailed as failure:
                if self._experiment.config.train.on_error != "skip":
                    raise
                problems[record.name] = failure.slides[record.name].problem
            if after is not None:
                after()
        return found, problems


def mean_loss(kind: str, predictions: Sequence[Prediction]) -> float:
    """The loss over slides: their mean, or Cox's of all of them together."""
    known = [prediction for prediction in predictions if prediction.target is not None]
    if kind == "cox":
        targets = [p.target for p in known if p.target is not None]
        return cox_gradients([p.output[0] for p in known], targets)[0] if any(target[1] for target in targets) else math.nan
    losses = [prediction.loss for prediction in known]
    return sum(losses) / len(losses) if losses else math.nan
