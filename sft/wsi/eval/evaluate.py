"""Evaluation: predict slides, compute metrics, and publish the report with the identity of the weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sft.common.terminal import print_text
from sft.sources import BadTile
from sft.wsi.data.table import SlideRecord
from sft.wsi.eval.metrics import Estimate, Prediction
from sft.wsi.eval.predict import LoadedModel, Predictor
from sft.wsi.eval.report import Evaluation, mark_outdated, write_evaluation
from sft.wsi.eval.run_summary import write_run_summary
from sft.wsi.run.estimate import RunEstimate, RunWork
from sft.wsi.run.files import counted
from sft.wsi.run.folder import append_bad_tiles
from sft.wsi.run.progress import Reporter
from sft.wsi.run.results import (
    place_for_weights,
    publish,
    publish_files,
    remove_results,
    results_lock,
    staging_folder,
    write_weights_id,
)
from sft.wsi.train.checkpoint import CheckpointFolder, WeightsId
from sft.wsi.train.distributed import Ranks
from sft.wsi.train.experiment import Experiment
from sft.wsi.train.rank_sync import scatter_items
from sft.wsi.train.signals import Interruption

__all__ = ["EvaluationResult", "evaluate_records", "newer_best", "note_filled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Result of an evaluation.

    Attributes:
        folder: the results are in.
        estimates: metrics of slides and of patients.
        num_patients: with a target, of which the metrics are.
        newer: best weights of the run, if training has found better ones in the meantime.
        num_filled: number of damaged tiles, if the folder lists them.
    """

    folder: Path
    estimates: dict[str, dict[str, Estimate]]
    num_patients: int
    newer: WeightsId | None = None
    num_filled: int | None = None


def evaluate_records(
    predictor: Predictor,
    loaded: LoadedModel,
    folder: Path,
    console: Console,
    *,
    run: Path,
    title: str,
    num_draws: int,
    ranks: Ranks,
    interruption: Interruption | None = None,
    lists_damage: bool = False,
) -> EvaluationResult:
    """Predict slides; publish and report the metrics of slides and of patients.

    Args:
        predictor: of the model.
        loaded: the model and its slides.
        folder: for the results. If it has results of newer weights, these stay, and a folder next to it is used.
        console: output.
        run: folder of the run.
        title: of the page, without the weights.
        num_draws: of the bootstrap.
        ranks: that share the work.
        interruption: requests the end. Default: `None` (no request)
        lists_damage: True to list filled tiles in the folder. Default: `False`

    Raises:
        EndRequested: a signal requested the end of the run.
        SourceError: a slide cannot be read, and the run does not skip it.
        RunFolderError: the results cannot be written.
    """
    experiment = loaded.experiment
    ranks.from_first(lambda: _check_writable(_lock_place(folder, run)))
    with Reporter(console, 0) as reporter:
        own_records = scatter_items(loaded.records, ranks)
        reporter.start_predictions(len(own_records))
        reporter.start_run(RunEstimate(_prediction_work(experiment, own_records)))
        predictions = predictor.predict_all(
            loaded.records,
            loaded.failed,
            before=lambda record, flops: reporter.start_slide(experiment.work_of(record, predicts=True), flops),
            after=reporter.advance,
            interruption=interruption,
        )
    tiles = ranks.gathered(experiment.feed.bad_tiles) if lists_damage and experiment.config.train.on_error == "fill" else None
    weights = loaded.weights
    title = f"{title}, {weights.checkpoint} model (epoch {weights.epoch}), weights {weights.short_hash}"
    result = ranks.from_first(lambda: _publish(loaded, predictions, folder, run, title=title, num_draws=num_draws, tiles=tiles))
    estimates_text = ", ".join(f"{name} {estimate.value:.4f}" for name, estimate in result.estimates["slides"].items())
    print_text(console, f"{title}: {estimates_text or 'no targets'}")
    if result.newer is not None:
        text = f"the run has a better model by now ({result.newer.text}); start evaluate again for its results"
        print_text(console, text)
    return result


def _prediction_work(experiment: Experiment, records: Sequence[SlideRecord]) -> RunWork:
    """Work of this process's predictions; its duration is known after the first slide."""
    work = sum(experiment.work_of(record, predicts=True) for record in records)
    return RunWork(
        num_epochs=0, num_slides=len(records), epoch_work=0.0, final_work=work, num_replicas=1, planned_seconds=0.0, host_bytes=0
    )


def _publish(
    loaded: LoadedModel,
    predictions: Sequence[Prediction],
    folder: Path,
    run: Path,
    *,
    title: str,
    num_draws: int,
    tiles: Sequence[dict[str, tuple[BadTile, ...]]] | None,
) -> EvaluationResult:
    """Write the results to a staging folder, and move it to its final path."""
    experiment, weights = loaded.experiment, loaded.weights
    names = {record.name for record in loaded.records}
    failed = {name: problem for name, problem in loaded.failed.items() if name in names}
    root = _lock_place(folder, run)
    is_in_run = root != folder
    evaluation = Evaluation(
        title=title,
        task=experiment.task,
        predictions=predictions,
        failed=failed,
        weights=weights.as_dict(),
        num_draws=num_draws,
        seed=experiment.config.train.seed,
    )
    with staging_folder(root) as staged:
        write_evaluation(staged, evaluation)
        num_filled = [append_bad_tiles(staged / "damaged.csv", some) for some in tiles][-1] if tiles else None
        write_weights_id(staged, weights)
        with results_lock(root):
            newer = newer_best(run, weights)
            if newer is not None:
                mark_outdated(staged, newer)
            if is_in_run:
                place = place_for_weights(folder, weights)
                publish(staged, place)
                write_run_summary(run)
            else:
                place = folder
                remove_results(place)
                publish_files(staged, place)
    return EvaluationResult(
        folder=place, estimates=evaluation.estimates, num_patients=evaluation.num_patients, newer=newer, num_filled=num_filled
    )


def _lock_place(folder: Path, run: Path) -> Path:
    """Folder whose lock covers results: the run's for its own folders, otherwise the results' folder itself."""
    return folder.parent if os.path.realpath(folder.parent) == os.path.realpath(run) else folder


def _check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written, before hours of prediction."""
    with staging_folder(folder):
        pass


def newer_best(run: Path, weights: WeightsId) -> WeightsId | None:
    """Best weights of a run, if they are others than the ones that were evaluated as its best."""
    current = CheckpointFolder(run / "checkpoints").best_id() if weights.checkpoint == "best" else None
    return None if current is None or current.sha256 == weights.sha256 else current


def note_filled(experiment: Experiment, path: Path, console: Console, ranks: Ranks) -> dict[str, int]:
    """Record and report filled tiles, for runs with ``on_error: fill``."""
    if experiment.config.train.on_error != "fill":
        return {}
    tiles = ranks.gathered(experiment.feed.bad_tiles)
    count = ranks.from_first(lambda: [append_bad_tiles(path, theirs) for theirs in tiles][-1])
    if count:
        problem = f"{counted(count, 'damaged tile is', 'damaged tiles are')} background: {path}"
        print_text(console, problem)
    return {"filled_tiles": count}
