"""Prediction of a list of slides, with error records for unreadable ones; loading of trained models."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sft.api.weight_placement import available_device
from sft.common.errors import InputError, first_problems
from sft.common.terminal import print_text
from sft.common.untrusted.trusted_code import Trust
from sft.nn import WithLoss
from sft.wsi.config import Config, ModelConfig, TaskConfig
from sft.wsi.data.dataset import Inputs, SlidePrefetcher, decode_ahead, decode_first_rows
from sft.wsi.data.table import SlideRecord, SlideTable, read_table
from sft.wsi.errors import DatasetError, RunFolderError, TrainingError
from sft.wsi.eval.metrics import Prediction
from sft.wsi.model.backbones import backbone_library, check_backbone
from sft.wsi.model.heads import set_training
from sft.wsi.model.tasks import cox_gradients, make_task
from sft.wsi.run.folder import RunFolder
from sft.wsi.run.progress import Reporter
from sft.wsi.run.trained_record import (
    check_config,
    check_network,
    check_outputs,
    check_splits,
    check_table,
    read_task,
    recorded_state,
)
from sft.wsi.train.auto_budgets import resolve_budgets
from sft.wsi.train.checkpoint import WeightsId, restore_weights
from sft.wsi.train.distributed import SINGLE_RANK, Ranks
from sft.wsi.train.experiment import (
    Experiment,
    autocast_context,
    check_records,
    compile_model,
    load_experiment,
    mixed_codings_of,
    segmentation_counts,
)
from sft.wsi.train.rank_sync import SlideFailed, gather_results, next_items, open_on_all_ranks, reading_slide, scatter_items
from sft.wsi.train.signals import Interruption
from sft.wsi.train.slide_net import compile_slide_net

__all__ = ["InferenceRequest", "LoadedModel", "Predictor", "config_path", "load_trained", "mean_loss", "options_without_download"]


class Predictor:
    """Model that predicts slides inside the budget.

    Args:
        experiment: with the model, slides and task.
        net: the compiled model (or, for segmentation, the model with its loss). Default: `None`
        ranks: ranks that share the work. Default: this process alone
        ahead: prefetcher, possibly shared. Default: `None` (one of its own)
    """

    def __init__(self, experiment: Experiment, net: Any = None, ranks: Ranks = SINGLE_RANK, ahead: SlidePrefetcher | None = None) -> None:
        self._experiment, self._ranks, self._ahead = experiment, ranks, ahead or SlidePrefetcher()
        self._before: Callable[[SlideRecord, int], None] | None = None
        self._segments = experiment.task.kind == "segmentation"
        self._net = net or compile_slide_net(experiment, ranks=ranks)
        if self._segments:
            counting = WithLoss(experiment.model, segmentation_counts)
            self._counts = compile_model(counting, experiment.config, num_inputs=2, skip_repeats=experiment.paints, ranks=ranks)

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
            further = partial(decode_ahead, current=inputs, num_bands=self._ranks.shape.num_bands)
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
            if self._before is not None:
                nets = (self._net, self._counts) if self._segments else (self._net,)
                self._before(record, sum(net.eval().plan_for(*inputs).flops for net in nets))
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
        before: Callable[[SlideRecord, int], None] | None = None,
        after: Callable[[], None] | None = None,
        interruption: Interruption | None = None,
    ) -> list[Prediction]:
        """Predictions of all readable slides; the unreadable ones are added to ``failed``. Every rank gets all predictions.

        Args:
            records: the slides.
            failed: problems of slides, by name; these are skipped.
            before: called before each slide of this rank, with the FLOPs of its prediction. Default: `None`
            after: called after each slide of this rank. Default: `None`
            interruption: requests the end. Default: `None` (no request)

        Raises:
            EndRequested: a signal requested the end of the run.
            SourceError: a slide cannot be read, and ``train.on_error`` is not "skip".
            BudgetError: a slide does not fit.
        """
        own_records = scatter_items([record for record in records if record.name not in failed], self._ranks)
        self._before = before
        try:
            parts = gather_results(lambda: self._predict_some(own_records, after, interruption), self._ranks, interruption)
        except SlideFailed as failure:
            raise failure.error from None
        finally:
            self._ahead.drop()  # reading that began before the last slide failed
        merged: dict[str, Prediction] = {}
        problems: dict[str, str] = {}
        for predictions, unreadable in parts:
            merged |= predictions
            problems |= unreadable
        failed |= {record.name: problems[record.name] for record in records if record.name in problems}
        return [merged[record.name] for record in records if record.name in merged]

    def _predict_some(
        self, mine: Sequence[SlideRecord], after: Callable[[], None] | None, interruption: Interruption | None
    ) -> tuple[dict[str, Prediction], dict[str, str]]:
        """Predictions of this rank's slides, and its unreadable slides with their problems, by name."""
        predictions, problems = {}, {}
        for record, upcoming in zip(mine, next_items(mine), strict=True):
            try:
                # Bands that have lost each other over a slide meet again before the next.
                predictions[record.name] = gather_results(
                    partial(self._predict, record, upcoming, interruption), self._ranks, among="bands"
                )[0]
            except SlideFailed as failure:
                if self._experiment.config.train.on_error != "skip":
                    raise
                problems[record.name] = failure.slides[record.name].problem
            if after is not None:
                after()
        return predictions, problems


def mean_loss(kind: str, predictions: Sequence[Prediction]) -> float:
    """The loss over slides: their mean, or Cox's of all of them together."""
    labelled = [prediction for prediction in predictions if prediction.target is not None]
    if kind == "cox":
        targets = [p.target for p in labelled if p.target is not None]
        return cox_gradients([p.output[0] for p in labelled], targets)[0] if any(target[1] for target in targets) else math.nan
    losses = [prediction.loss for prediction in labelled]
    return sum(losses) / len(losses) if losses else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """A trained model, and slides for it.

    Attributes:
        run: folder of the run.
        config: of the run.
        split: of the run's table.
        csv: another table, instead.
        slides: folder of its slides.
        checkpoint: "best" or "last".
        device, budget: instead of the run's.
        out: folder for results.
        trust: modules that ``model.backbone`` may name.
        needs_masks: False for predictions of a segmentation that are not compared with label maps.
    """

    run: Path
    config: Config
    split: str = "val"
    csv: Path | None = None
    slides: Path | None = None
    checkpoint: str = "best"
    device: str | None = None
    budget: str | None = None
    out: Path | None = None
    trust: Trust = ()
    needs_masks: bool = True

    def folder(self, name: str) -> Path:
        """Folder of the results: the requested one, else a folder of this name in the run's; results of the last weights go next to it.

        Raises:
            InputError: results would mix with the run's own files.
        """
        if self.out is not None and os.path.realpath(self.out) == os.path.realpath(self.run):
            raise InputError(f"--out {self.out} is the run's own folder, whose results it would replace; name another, or leave it out")
        checkpoints = Path(os.path.realpath(self.run / "checkpoints"))
        if self.out is not None and checkpoints in (place := Path(os.path.realpath(self.out)), *place.parents):
            raise InputError(f"--out {self.out} is among the checkpoints of the run; name another, or leave it out")
        return self.out or self.run / (name if self.checkpoint == "best" else f"{name}-{self.checkpoint}")


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """Model with its weights, and its slides.

    Attributes:
        experiment: with the model.
        records: the selected slides.
        weights: identity of the weights.
        failed: problems of skipped slides, by name.
    """

    experiment: Experiment
    records: list[SlideRecord]
    weights: WeightsId
    failed: dict[str, str] = field(default_factory=dict)


def config_path(run: Path) -> Path:
    """The configuration of a run.

    Raises:
        RunFolderError: the run has none.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise RunFolderError(f"{run} is not a folder of a run: it has no config.yaml. Give the folder that train wrote to.")
    return path


def load_trained(selection: InferenceRequest, console: Console, ranks: Ranks) -> LoadedModel:
    """The model of a run, and the slides that it is wanted for; the first rank reads the run's folder.

    Raises:
        RunFolderError: the run is not complete enough, or one of its files contradicts the checkpoint.
        InputError: there are no such slides, or they cannot be used.
    """
    run = selection.run
    check_backbone(selection.config.model.backbone, trust=selection.trust)  # first: the folder may be of unknown origin
    checkpoint = ranks.from_first(lambda: RunFolder(run).checkpoints.load(selection.checkpoint))
    if checkpoint is None:
        raise RunFolderError(f"{run} has no {selection.checkpoint} checkpoint yet. Train for an epoch, or choose --checkpoint last.")
    state = ranks.from_first(lambda: recorded_state(run, checkpoint))
    check_config(run, state, selection.config)
    task = ranks.from_first(lambda: read_task(run, state))
    check_outputs(run, checkpoint, task, selection.config.task.kind)
    config = _evaluation_config(selection)
    available_device(config.train.device)
    ranks.use_device(config.train.device)
    budgets = resolve_budgets(config, ranks)
    config = budgets.config
    for line in budgets.lines:
        print_text(console, line)
    if selection.csv is not None:
        settings = replace(config.task, classes=list(task.classes) or None)
        table = _other_table(selection, settings)
        experiment = load_experiment(
            config, table=SlideTable(records=table.records, classes=task.classes), task=task, trust=selection.trust
        )
        records = list(table.records)
    else:
        experiment = load_experiment(config, task=task, trust=selection.trust)
        table = experiment.table
        derived = make_task(config.task, table.classes, experiment.records("train"))
        check_table(run, state, table, task, derived)
        ranks.from_first(lambda: check_splits(run, table))
        records = [r for r in table.records if selection.split in ("all", r.split)]
    if not records:
        raise InputError(f"the run has no slides of split {selection.split!r}; choose another with --split, or give --csv")
    restore_weights(experiment.model, checkpoint.weights, run)
    check_network(run, state, experiment.feature_shapes)
    loaded = LoadedModel(experiment=experiment, records=records, weights=checkpoint.weights_id)
    with Reporter(console, 0) as reporter:
        loaded.failed |= check_records(experiment, records, ranks, reporter)
        mixed = mixed_codings_of(experiment, records)
        if mixed is not None:
            reporter.note(f"warning: {mixed}. Convert the masks to one coding.")
    if loaded.failed and config.train.on_error != "skip":
        raise InputError("; ".join(first_problems([*loaded.failed.values()])))
    return loaded


def _other_table(selection: InferenceRequest, task: TaskConfig) -> SlideTable:
    """The table of ``--csv``; only metrics of a segmentation need its masks.

    Raises:
        DatasetError: all problems of the table.
    """
    assert selection.csv is not None
    needs_masks = task.kind == "segmentation" and selection.needs_masks
    try:
        return read_table(selection.csv, task, root=selection.slides, needs_targets=needs_masks)
    except DatasetError as error:
        if not needs_masks or not any("mask" in problem for problem in error.problems):
            raise
        remedy = "metrics of a segmentation need masks; python -m sft.wsi predict writes the maps of slides without any"
        raise DatasetError(str(selection.csv), [*error.problems, remedy]) from error


def _evaluation_config(selection: InferenceRequest) -> Config:
    """Configuration of the run with the device, budget and slides of the request; no weights to download."""
    config = selection.config
    data = config.data
    if selection.csv is not None:
        data = replace(data, csv=selection.csv, slides=selection.slides)
    elif selection.slides is not None:
        data = replace(data, slides=selection.slides)
    return replace(
        config,
        data=data,
        train=replace(config.train, device=selection.device or config.train.device),
        model=replace(
            config.model, budget=selection.budget or config.model.budget, weights=None, options=options_without_download(config.model)
        ),
    )


#: Options that torchvision's builders set if weights are given.
_BUILT_WITH_WEIGHTS: dict[str, dict[str, Any]] = {
    "googlenet": {"transform_input": True, "aux_logits": False},
    "inception_v3": {"transform_input": True},
}


def options_without_download(model: ModelConfig) -> dict[str, Any]:
    """Options of the backbone without pretrained weights: a trained model brings its own.

    Options that a library sets because of pretrained weights are kept by name. Options of other backbones are unchanged.
    """
    library, _, name = model.backbone.rpartition(":")
    options = model.options
    if library not in ("", "timm", "torchvision"):
        return options
    kept = {key: value for key, value in options.items() if key not in ("pretrained", "weights")}
    is_pretrained = any(options.get(key) for key in ("pretrained", "weights"))
    if is_pretrained and name in _BUILT_WITH_WEIGHTS and (library or backbone_library(name)) == "torchvision":
        return {**_BUILT_WITH_WEIGHTS[name], **kept}
    return kept
