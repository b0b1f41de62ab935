"""Evaluation: predict slides, compute metrics, write the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from sft.wsi.eval.metrics import Estimate
from sft.wsi.eval.predict import LoadedModel, Predictor
from sft.wsi.eval.report import write_evaluation
from sft.wsi.run.folder import append_bad_tiles
from sft.wsi.run.progress import Reporter
from sft.wsi.train.distributed import Ranks
from sft.wsi.train.experiment import Experiment
from sft.wsi.train.rank_sync import scatter_items
from sft.wsi.train.signals import Interruption

__all__ = ["as_plain", "evaluate_records", "note_filled"]


def evaluate_records(
    predictor: Predictor,
    loaded: LoadedModel,
    folder: Path,
    console: Console,
    *,
    title: str,
    num_draws: int,
    ranks: Ranks,
    interruption: Interruption | None = None,
) -> dict[str, dict[str, Estimate]]:
    """Predict slides; write and report the metrics of slides and of patients.

    Raises:
        EndRequested: the run was asked to end.
        SourceError: a slide cannot be read, and the run does not skip it.
    """
    experiment = loaded.experiment
    with Reporter(console, 0) as reporter:
        reporter.start_validation(len(scatter_items(loaded.records, ranks)))
        predictions = predictor.predict_all(loaded.records, loaded.failed, after=reporter.advance, interruption=interruption)
    names = {record.name for record in loaded.records}
    failed = {name: problem for name, problem in loaded.failed.items() if name in names}
    seed = experiment.config.train.seed
    estimates = ranks.from_first(
        lambda: write_evaluation(folder, experiment.task, predictions, failed, title=title, num_draws=num_draws, seed=seed)
    )
    told = ", ".join(f"{name} {estimate.value:.4f}" for name, estimate in estimates["slides"].items())
    console.print(f"{title}: {told or 'no targets'}", markup=False, highlight=False, soft_wrap=True)
    return estimates


def note_filled(experiment: Experiment, path: Path, console: Console, ranks: Ranks) -> dict[str, int]:
    """Record and report filled tiles, for runs with ``on_error: fill``."""
    if experiment.config.train.on_error != "fill":
        return {}
    tiles = ranks.gathered(experiment.feed.bad_tiles)
    count = ranks.from_first(lambda: [append_bad_tiles(path, theirs) for theirs in tiles][-1])
    if count:
        console.print(f"{count} damaged tiles are background: {path}", markup=False, highlight=False, soft_wrap=True)
    return {"filled_tiles": count}


def as_plain(estimates: Mapping[str, Mapping[str, Estimate]]) -> dict[str, Any]:
    """Estimates as JSON has them, which knows no NaN: None."""

    def number(value: float) -> float | None:
        return None if value != value else value

    return {
        level: {name: {"value": number(e.value), "low": number(e.low), "high": number(e.high)} for name, e in by_name.items()}
        for level, by_name in estimates.items()
    }
