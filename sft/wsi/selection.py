"""Trained models, and the slides that are wanted for them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from sft.errors import InputError
from sft.placing import available_device
from sft.wsi.backbones import backbone_library
from sft.wsi.checkpoint import restore_weights
from sft.wsi.config import Config, ModelConfig
from sft.wsi.errors import RunFolderError
from sft.wsi.experiment import Experiment, check_records, load_experiment
from sft.wsi.progress import Reporter
from sft.wsi.ranks import Ranks
from sft.wsi.runfolder import RunFolder
from sft.wsi.table import SlideRecord, SlideTable, read_table
from sft.wsi.tasks import Task

__all__ = ["LoadedModel", "InferenceRequest", "config_path", "load_trained"]


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

    def folder(self, name: str) -> Path:
        """Where results go: where that was asked for, else a folder of this name in the run's; what the last weights give, beside it.

        Raises:
            InputError: results would lie among the run's own files.
        """
        if self.out is not None and os.path.realpath(self.out) == os.path.realpath(self.run):
            raise InputError(f"--out {self.out} is the run's own folder, whose results it would replace; name another, or leave it out")
        return self.out or self.run / (name if self.checkpoint == "best" else f"{name}-{self.checkpoint}")


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """A model with its weights, and its slides.

    Attributes:
        experiment: with the model.
        records: the slides that were asked for.
        epoch: that the weights are of.
        failed: what is wrong with slides that are left out, by name.
    """

    experiment: Experiment
    records: list[SlideRecord]
    epoch: int
    failed: dict[str, str] = field(default_factory=dict)


def config_path(run: Path) -> Path:
    """The configuration of a run.

    Raises:
        RunFolderError: there is none.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise RunFolderError(f"{run} is no folder of a run: it has no config.yaml. Give the folder that train wrote to.")
    return path


def _task_of(path: Path) -> tuple[dict[str, Any], Task]:
    """What a run's task.json holds, and the task.

    Raises:
        RunFolderError: it is damaged.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in saved["task"].items()}
        return saved, Task(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path} is damaged ({error}). Copy it again, or start the training again, which writes it.") from error


def load_trained(selection: InferenceRequest, console: Console, ranks: Ranks) -> LoadedModel:
    """The model of a run, and the slides that it is wanted for; the first rank reads the run's folder.

    Raises:
        RunFolderError: the run is not complete enough.
        InputError: its table has changed.
    """
    saved, task = ranks.from_first(lambda: _task_of(selection.run / "task.json"))
    config = selection.config
    config = replace(
        config,
        train=replace(config.train, device=selection.device or config.train.device),
        model=replace(config.model, budget=selection.budget or config.model.budget, weights=None, options=_without_download(config.model)),
    )
    available_device(config.train.device)
    ranks.use_device(config.train.device)
    if selection.csv is not None:
        settings = replace(config.task, classes=list(task.classes) or None)
        table = read_table(selection.csv, settings, root=selection.slides, needs_targets=config.task.kind == "segmentation")
        config = replace(config, data=replace(config.data, csv=selection.csv, slides=selection.slides))
        experiment = load_experiment(config, table=SlideTable(records=table.records, classes=task.classes), task=task)
        records = list(table.records)
    else:
        if selection.slides is not None:
            config = replace(config, data=replace(config.data, slides=selection.slides))
        experiment = load_experiment(config, task=task)
        if experiment.table.digest() != saved["table"]:
            raise InputError(f"{config.data.csv} has changed since the run was trained, and its splits with it. Give slides with --csv.")
        records = [r for r in experiment.table.records if selection.split in ("all", r.split)]
    if not records:
        raise InputError(f"the run has no slides of split {selection.split!r}; choose another with --split, or give --csv")
    with_weights = ranks.from_first(lambda: RunFolder(selection.run).checkpoints.load(selection.checkpoint))
    if with_weights is None:
        raise RunFolderError(
            f"{selection.run} has no {selection.checkpoint} checkpoint yet. Train for an epoch, or choose --checkpoint last."
        )
    restore_weights(experiment.model, with_weights.weights, selection.run)
    state = with_weights.state
    loaded = LoadedModel(experiment=experiment, records=records, epoch=state["epoch"] if "epoch" in state else state["progress"]["epoch"])
    with Reporter(console, 0) as reporter:
        loaded.failed |= check_records(experiment, records, ranks, reporter)
    if loaded.failed and config.train.on_error != "skip":
        raise InputError("; ".join(loaded.failed.values()))
    return loaded


#: What torchvision's builders set where weights are given.
_BUILT_WITH_WEIGHTS: dict[str, dict[str, Any]] = {
    "googlenet": {"transform_input": True, "aux_logits": False},
    "inception_v3": {"transform_input": True},
}


def _without_download(model: ModelConfig) -> dict[str, Any]:
    """The backbone's options, but for pretrained weights: a trained model brings its own.

    What a library builds otherwise where weights are asked for is asked for by name. Options of other backbones are their own.
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
