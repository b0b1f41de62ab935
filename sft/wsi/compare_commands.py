"""Commands over several runs: ``folds`` trains a cross-validation, ``compare`` tabulates runs, ``report`` writes the pages of one."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from sft.common.errors import InputError
from sft.common.terminal import print_text
from sft.common.untrusted.trusted_code import Trust
from sft.wsi.commands import CommandResult, train
from sft.wsi.config import Config
from sft.wsi.data.splits import assign_splits
from sft.wsi.data.table import read_table
from sft.wsi.errors import RunFolderError
from sft.wsi.eval.comparison import MetricRow, differing_settings, markdown_table, metric_rows, write_metric_rows
from sft.wsi.eval.metrics import Prediction
from sft.wsi.eval.prediction_table import read_predictions
from sft.wsi.eval.report import Evaluation, write_evaluation
from sft.wsi.eval.run_page import PAGE_NAME
from sft.wsi.eval.run_summary import write_run_summary
from sft.wsi.model.tasks import Task
from sft.wsi.run.files import counted, write_text
from sft.wsi.run.overview import RunOverview, read_overview
from sft.wsi.run.results import publish, read_weights_id, results_lock, staging_folder
from sft.wsi.run.trained_record import read_task
from sft.wsi.train.auto_budgets import resolve_budgets
from sft.wsi.train.checkpoint import CheckpointFolder
from sft.wsi.train.distributed import SINGLE_RANK, Ranks
from sft.wsi.train.run_state import complete_settings, config_fingerprint

__all__ = ["compare", "folds", "report"]

_SPLITS = ("val", "test")
#: Kinds whose outputs have another scale in each fold: predictions of several models cannot be compared with each other.
_WITHOUT_POOLING = ("cox", "hazard")


def folds(
    config: Config,
    console: Console,
    *,
    num_folds: int | None = None,
    num_draws: int = 1000,
    ranks: Ranks = SINGLE_RANK,
    trust: Trust = (),
) -> CommandResult:
    """Train, or resume, each fold of a cross-validation in a folder of its own; then write one table over the folds.

    Folds that are complete are not computed again.

    Args:
        config: of the runs; its folder has a subfolder for each fold.
        console: output; quiet on all ranks but the first.
        num_folds: number of folds. Default: `None` (``data.num_folds``)
        num_draws: of the bootstrap.
        ranks: that share the work. Default: this process alone
        trust: modules that ``model.backbone`` may name. Default: none

    Raises:
        InputError: the number of folds is not given.
        SftError: as `train`.
    """
    count = int(num_folds or config.data.num_folds or 0)
    if not count:
        raise InputError("the number of folds is not given: add --folds 5, or data.num_folds to the configuration")
    if config.data.fold:
        raise InputError(f"data.fold {config.data.fold}: folds trains all folds; leave it out, or train this one with train")
    config = resolve_budgets(config, ranks, run=_fold_config(config, count, 0).run).config
    configs = [_fold_config(config, count, number) for number in range(count)]
    if (config.run / "checkpoints").is_dir():
        raise RunFolderError(f"{config.run} is the folder of a run; give the folds another folder with --run")
    num_failed = 0
    for number, fold in enumerate(configs):
        if ranks.from_first(partial(_is_complete, fold)):
            print_text(console, f"fold {number} of {count}: complete, {fold.run}")
            continue
        print_text(console, f"fold {number} of {count}: {fold.run}")
        num_failed += train(fold, console, is_dry=False, num_draws=num_draws, ranks=ranks, trust=trust).num_failed
        gc.collect()  # the network of this fold, before that of the next
    value = ranks.from_first(lambda: _write_folds(config, configs, num_draws))
    print_text(console, "\n".join(value["lines"]))
    print_text(console, f"written to {config.run}: summary.md, folds.csv")
    return CommandResult(value={name: item for name, item in value.items() if name != "lines"}, num_failed=num_failed)


def compare(runs: Sequence[Path], console: Console, *, split: str | None = None, out: Path | None = None) -> CommandResult:
    """Table of the metrics of several runs, with the settings in which they differ.

    Args:
        runs: folders of runs; a folder of folds counts as its folds.
        console: output.
        split: folder of results to compare. Default: `None` (``val`` and ``test``)
        out: file for the table as CSV. Default: `None`

    Raises:
        RunFolderError: a folder is not a run, or has no results.
    """
    paths = [path for run in runs for path in _run_folders(run)]
    overviews = [read_overview(path) for path in paths]
    splits = _SPLITS if split is None else (split,)
    rows = metric_rows(overviews, splits)
    if not rows:
        raise RunFolderError(f"no results of {' or '.join(splits)} in {', '.join(map(str, paths))}. Run evaluate, or name another --split.")
    names = _names(paths)
    settings = differing_settings(overviews)
    for line in _comparison_lines(names, rows, splits, overviews, settings):
        print_text(console, line)
    if not all(row.is_comparable for row in rows):
        print_text(console, "no mean and sd: the runs have different tasks")
    if out is not None:
        write_metric_rows(out, names, rows)
        print_text(console, f"written to {out}")
    value = {
        "runs": [_plain_run(name, overview) for name, overview in zip(names, overviews, strict=True)],
        "metrics": [row.as_dict(names) for row in rows],
        "settings": {name: list(values) for name, values in settings.items()},
    }
    return CommandResult(value=value)


def report(run: Path, console: Console) -> CommandResult:
    """Write the pages of a run, summary.md and report.html, from the contents of its folder.

    Raises:
        RunFolderError: it is not a run, or its folder cannot be written.
    """
    if not (run / "checkpoints").is_dir():
        raise RunFolderError(f"{run} is not a folder of a run: it has no checkpoints. Give the folder that train wrote to.")
    with results_lock(run):
        overview = write_run_summary(run)
    print_text(console, f"written to {run}: summary.md, {PAGE_NAME}")
    return CommandResult(value={**_plain_run(run.name, overview), "page": str(run / PAGE_NAME)})


def _fold_config(config: Config, count: int, number: int) -> Config:
    return replace(config, data=replace(config.data, num_folds=count, fold=number), run=config.run / f"fold-{number}")


def _is_complete(config: Config) -> bool:
    """True if the folder has the finished run of this configuration, with results of its best model."""
    newest = CheckpointFolder(config.run / "checkpoints").newest_state("last")
    best = CheckpointFolder(config.run / "checkpoints").best_id()
    if newest is None or best is None:
        return False
    state = newest[1]
    progress = state["progress"]
    if progress["epoch"] < config.train.epochs and not progress["stopped"]:
        return False
    if complete_settings(state["settings"]) != config_fingerprint(config):
        return False
    table = assign_splits(
        read_table(config.data.csv, config.task, root=config.data.slides), config.data, config.task.kind, config.train.seed
    )
    splits = [split for split in _SPLITS if any(record.split == split for record in table.records)]
    return state["table"] == table.digest() and all(_has_results(config.run / split, best.sha256) for split in splits)


def _has_results(folder: Path, sha256: str) -> bool:
    weights = read_weights_id(folder)
    return weights is not None and weights.sha256 == sha256 and (folder / "predictions.csv").is_file()


def _write_folds(config: Config, configs: Sequence[Config], num_draws: int) -> dict[str, Any]:
    """Write the pooled predictions, folds.csv and summary.md of a cross-validation."""
    overviews = [read_overview(fold.run) for fold in configs]
    names = [fold.run.name for fold in configs]
    pooled: dict[str, Mapping[str, Any]] = {}
    if config.task.kind not in _WITHOUT_POOLING:
        task, predictions = _pooled_predictions(configs)
        weights = {name: None if each.best is None else each.best.as_dict() for name, each in zip(names, overviews, strict=True)}
        evaluation = Evaluation(
            title=f"pooled, test slides of {counted(len(configs), 'fold', 'folds')}",
            task=task,
            predictions=predictions,
            failed={name: problem for each in overviews for name, problem in each.failed.items()},
            weights=weights,
            num_draws=num_draws,
            seed=config.train.seed,
        )
        with staging_folder(config.run) as staged:
            write_evaluation(staged, evaluation)
            pooled["test"] = json.loads((staged / "metrics.json").read_text(encoding="utf-8"))
            with results_lock(config.run):
                publish(staged, config.run / "pooled")
    rows = metric_rows(overviews, _SPLITS, pooled)
    lines = _folds_lines(config, names, overviews, rows)
    with results_lock(config.run):
        write_metric_rows(config.run / "folds.csv", names, rows)
        write_text(config.run / "summary.md", "\n".join(lines).rstrip() + "\n")
    return {
        "run": str(config.run),
        "folds": [_plain_run(name, overview) for name, overview in zip(names, overviews, strict=True)],
        "metrics": [row.as_dict(names) for row in rows],
        "lines": [line for line in lines if line.startswith(("|", "## "))],
    }


def _pooled_predictions(configs: Sequence[Config]) -> tuple[Task, list[Prediction]]:
    """Test predictions of all folds: each slide once, by a model that was not trained on it."""
    tasks = [read_task(fold.run, {}) for fold in configs]
    predictions = []
    for fold, task in zip(configs, tasks, strict=True):
        if task.classes != tasks[0].classes:
            raise RunFolderError(f"{fold.run} has classes {task.classes}, and {configs[0].run} {tasks[0].classes}: not folds of one table")
        predictions += read_predictions(fold.run / "test" / "predictions.csv", task)
    return tasks[0], predictions


def _folds_lines(config: Config, names: Sequence[str], overviews: Sequence[RunOverview], rows: Sequence[MetricRow]) -> list[str]:
    is_pooled = config.task.kind not in _WITHOUT_POOLING
    lines = [f"# {config.run.name}", "", f"Cross-validation with {counted(len(names), 'fold', 'folds')}; task {config.task.kind}.", ""]
    for split in _SPLITS:
        of_split = [row for row in rows if row.split == split]
        if of_split:
            lines += [f"## {split}", "", *markdown_table(names, of_split, has_pooled=is_pooled and split == "test"), ""]
    lines += ["sd is the standard deviation of the folds. It is not an interval: the training slides of two folds are mostly the same.", ""]
    if is_pooled:
        lines += ["Pooled metrics are of the test predictions of all folds together, each slide once, with intervals over patients: "]
        lines += ["[pooled](pooled/summary.md).", ""]
    else:
        lines += [f"Predictions are not pooled: risks of task {config.task.kind} have another scale in each fold.", ""]
    for name, overview in zip(names, overviews, strict=True):
        best = "no best model" if overview.best is None else f"best model: {overview.best.text}"
        lines.append(f"- [{name}]({name}/summary.md): {counted(len(overview.epochs), 'epoch', 'epochs')}, {best}")
    return lines


def _comparison_lines(
    names: Sequence[str],
    rows: Sequence[MetricRow],
    splits: Sequence[str],
    overviews: Sequence[RunOverview],
    settings: Mapping[str, Sequence[Any]],
) -> list[str]:
    lines = []
    for split in splits:
        of_split = [row for row in rows if row.split == split]
        if of_split:
            lines += [f"## {split}", "", *markdown_table(names, of_split, has_pooled=False), ""]
    for name, overview in zip(names, overviews, strict=True):
        outdated = [results.name for results in overview.results if results.name in splits and overview.is_outdated(results)]
        note = f"; not of the best model: {', '.join(outdated)}" if outdated else ""
        lines.append(f"{name}: {'no best model' if overview.best is None else f'best model: {overview.best.text}'}{note}")
    lines += [f"{name}: {', '.join(map(str, values))}" for name, values in settings.items()]
    return lines


def _plain_run(name: str, overview: RunOverview) -> dict[str, Any]:
    best = None if overview.best is None else overview.best.as_dict()
    return {"name": name, "path": str(overview.path), "epochs": len(overview.epochs), "best": best, "failed": dict(overview.failed)}


def _run_folders(run: Path) -> list[Path]:
    """The run, or the folds in the folder of a cross-validation.

    Raises:
        RunFolderError: it is neither.
    """
    if (run / "checkpoints").is_dir():
        return [run]
    numbers = sorted(int(path.parent.name.removeprefix("fold-")) for path in run.glob("fold-*/checkpoints") if _is_fold(path.parent.name))
    if not numbers:
        raise RunFolderError(
            f"{run} is not a folder of a run, nor of folds: it has no checkpoints. Give folders that train or folds has written."
        )
    return [run / f"fold-{number}" for number in numbers]


def _is_fold(name: str) -> bool:
    return name.removeprefix("fold-").isdigit()


def _names(paths: Sequence[Path]) -> list[str]:
    """Short names of folders: as many of their last path components as make them distinct."""
    resolved = [path.resolve() for path in paths]
    for length in range(1, max(len(path.parts) for path in resolved) + 1):
        names = [str(Path(*path.parts[-length:])) for path in resolved]
        if len(set(names)) == len(names):
            return names
    raise InputError(f"{', '.join(map(str, paths))}: some are the same run; name each once")
