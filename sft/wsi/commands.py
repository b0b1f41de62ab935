"""Commands of ``python -m sft.wsi`` that need a network; `sft.wsi.inspect_commands` has those about slides alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

import sft
from sft.api.weight_placement import available_device
from sft.common.errors import InputError, some_names
from sft.common.terminal import print_text
from sft.common.untrusted.trusted_code import Trust
from sft.wsi.config import Config
from sft.wsi.data.table import SlideRecord
from sft.wsi.errors import RunFolderError, RunInterrupted
from sft.wsi.eval.evaluate import evaluate_records, newer_best, note_filled
from sft.wsi.eval.heatmap import HeatmapMaker, output_numbers
from sft.wsi.eval.heatmap_folder import HeatmapFolder
from sft.wsi.eval.predict import InferenceRequest, LoadedModel, Predictor, load_trained
from sft.wsi.eval.report import plain_estimates
from sft.wsi.eval.run_summary import write_run_summary
from sft.wsi.eval.segmentation_masks import MaskMaker
from sft.wsi.eval.tile_maps import TileHeatmapMaker
from sft.wsi.run.files import counted, write_csv, write_json, write_text
from sft.wsi.run.folder import NullRunFolder, RunFolder
from sft.wsi.run.progress import Reporter
from sft.wsi.run.results import results_lock, staging_folder
from sft.wsi.train.auto_budgets import resolve_budgets
from sft.wsi.train.checkpoint import restore_weights
from sft.wsi.train.distributed import SINGLE_RANK, Ranks
from sft.wsi.train.experiment import Experiment, check_slides, load_experiment
from sft.wsi.train.run_state import RunProgress, config_fingerprint
from sft.wsi.train.run_work import estimate_text, plain_estimate, plain_training, run_work, step_text, training_text
from sft.wsi.train.signals import EndRequested, Interruption
from sft.wsi.train.size_plan import experiment_without_slides, plan_of_size, tiles_of_size
from sft.wsi.train.trainer import Trainer

__all__ = ["CommandResult", "evaluate", "heatmap", "plan", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Result of a command.

    Attributes:
        value: for ``--json``.
        num_failed: number of skipped slides.
    """

    value: Any
    num_failed: int = 0


def plan(config: Config, size: Sequence[int] | None, console: Console, ranks: Ranks = SINGLE_RANK, *, trust: Trust = ()) -> CommandResult:
    """The plan of a training step for the largest slide, or for a size, which needs no slide, no pretrained weights and no GPU.

    Args:
        config: of the run.
        size: height and width in px, instead of the largest slide's.
        console: output for the plan.
        ranks: those that share the slide. Default: this process alone
        trust: modules that ``model.backbone`` may name. Default: none

    Raises:
        BudgetError: it does not fit.
        InputError, SourceError: the configuration is wrong.
    """
    experiment: Experiment | None = None
    budgets = resolve_budgets(config, ranks)
    config = budgets.config
    if size is not None:
        plan = plan_of_size(experiment_without_slides(config, trust=trust), (size[0], size[1]), ranks)
        settings = config.model
        tiles = f", {tiles_of_size(settings, (size[0], size[1]))} tiles of {settings.side_px} px" if settings.takes_tiles else ""
        print_text(console, f"Slide of {size[1]} x {size[0]} px (width x height){tiles}, on {config.train.device}")
    else:
        experiment = load_experiment(config, trust=trust)
        with Reporter(console, 0) as reporter:
            failed = check_slides(experiment, ranks, reporter)
            trainer = Trainer(experiment, RunFolder(config.run), failed, reporter, ranks)
        plan = _plans(experiment, trainer, failed)[0]
    plan = budgets.noted(plan)
    print_text(console, plan.explain())
    if experiment is None:
        print_text(console, step_text(plan, config))
    else:
        print_text(console, estimate_text(run_work(experiment, plan, ranks), plan, config.train.device))
    return CommandResult(value=json.loads(plan.to_json()))


def train(
    config: Config, console: Console, *, is_dry: bool, num_draws: int, ranks: Ranks = SINGLE_RANK, trust: Trust = ()
) -> CommandResult:
    """Train, or resume; then evaluate the best model on validation and test slides.

    Args:
        config: of the run; the same on all ranks.
        console: output; quiet on all ranks but the first.
        is_dry: True to run all checks and print the plan without writing.
        num_draws: of the bootstrap.
        ranks: ranks that share the work (`sft.wsi.train.distributed.joined`). Default: this process alone
        trust: modules that ``model.backbone`` may name. Default: none

    Returns:
        Results; with several ranks, the first has all of them.

    Raises:
        SftError: as `Trainer.run`; all checks that need no training come first.
    """
    available_device(config.train.device)
    ranks.use_device(config.train.device)
    budgets = resolve_budgets(config, ranks, run=config.run)
    config = budgets.config
    experiment = load_experiment(config, trust=trust)
    _check_same(experiment, ranks)
    counts = {split: len(experiment.records(split)) for split in ("train", "val", "test")}
    counts_text = ", ".join(f"{count} {split}" for split, count in counts.items())
    print_text(console, f"{counted(len(experiment.table.records), 'slide', 'slides')} ({counts_text}); task {config.task.kind}")
    for line in (*budgets.lines, *training_text(experiment)):
        print_text(console, line)
    if is_dry:
        with Reporter(console, 0) as reporter:
            failed = check_slides(experiment, ranks, reporter)
            trainer = Trainer(experiment, RunFolder(config.run), failed, reporter, ranks)
        plan = budgets.noted(_plans(experiment, trainer, failed)[0])
        print_text(console, plan.explain())
        work = run_work(experiment, plan, ranks)
        print_text(console, estimate_text(work, plan, config.train.device))
        value = {"slides": counts, "failed": failed, "plan": json.loads(plan.to_json()), "estimate": plain_estimate(work, plan)}
        return CommandResult(value={**value, "training": plain_training(experiment)}, num_failed=len(failed))
    is_first = ranks.rank == 0
    opened = RunFolder(config.run, needed_bytes=_checkpoint_bytes(experiment)) if is_first else NullRunFolder(config.run)
    with opened as folder:
        events = config.run / "tensorboard" if config.tensorboard and is_first else None
        with Reporter(console, config.train.epochs, events=events) as reporter:
            failed = check_slides(experiment, ranks, reporter)
            with Interruption() as interruption:
                trainer = Trainer(experiment, folder, failed, reporter, ranks)
                plans = _plans(experiment, trainer, failed)
                trainer.restore()
                if is_first:
                    _describe(folder, experiment, budgets.noted(plans[0]))
                print_text(console, estimate_text(run_work(experiment, plans[0], ranks), plans[0], config.train.device))
                progress = trainer.run(interruption, plan=plans[0])
        failed = dict(progress.failed)
        with Interruption() as interruption:
            try:
                value = _finish(
                    trainer,
                    folder=folder,
                    progress=progress,
                    failed=failed,
                    console=console,
                    num_draws=num_draws,
                    ranks=ranks,
                    interruption=interruption,
                )
            except EndRequested as request:
                ranks.gathered(None)  # a rank that has left makes torchrun end the others
                raise RunInterrupted(
                    f"{request.signal.name}: trained, and not evaluated to the end. Start the same command again to resume."
                ) from None
    return CommandResult(value=value, num_failed=len(failed))


def evaluate(
    selection: InferenceRequest, console: Console, *, num_draws: int, ranks: Ranks = SINGLE_RANK, maps: Sequence[str] = ()
) -> CommandResult:
    """Predict slides and measure.

    Args:
        selection: the model and the slides; the same on all ranks.
        console: output of the metrics; quiet on all ranks but the first.
        num_draws: of the bootstrap.
        ranks: ranks that share the work (`sft.wsi.train.distributed.joined`). Default: this process alone
        maps: formats in which the maps of a segmentation are written as well. Default: none

    Returns:
        Results; with several ranks, the first has all of them.

    Raises:
        SftError: the run, the table or a slide is wrong.
    """
    loaded = load_trained(selection, console, ranks)
    folder = selection.folder(f"evaluation-{selection.csv.stem}" if selection.csv else selection.split)
    if maps and (loaded.experiment.task.kind != "segmentation" or ranks.shape.num_ranks > 1):
        raise InputError("--maps is for segmentations, in one process; leave it out, or start python -m sft.wsi predict")
    predictor = Predictor(loaded.experiment, ranks=ranks)
    result = evaluate_records(
        predictor,
        loaded,
        folder,
        console,
        run=selection.run,
        title=folder.resolve().name,
        num_draws=num_draws,
        ranks=ranks,
        lists_damage=True,
    )
    value: dict[str, Any] = {
        "folder": str(result.folder),
        "weights": loaded.weights.as_dict(),
        "metrics": plain_estimates(result.estimates, result.num_patients),
        "failed": loaded.failed,
    }
    if result.newer is not None:
        value["newer_best"] = result.newer.as_dict()
    if result.num_filled is not None:
        value["filled_tiles"] = result.num_filled
    if maps:
        from sft.wsi.map_commands import write_evaluation_maps

        value["maps"] = [asdict(each) for each in write_evaluation_maps(loaded, result.folder, maps, console)]
    if result.num_filled:
        filled_text = counted(result.num_filled, "damaged tile is", "damaged tiles are")
        print_text(console, f"{filled_text} background: {result.folder / 'damaged.csv'}")
    print_text(console, f"written to {result.folder}: summary.md, metrics.json, predictions.csv")
    return CommandResult(value=value, num_failed=len(loaded.failed))


def heatmap(
    selection: InferenceRequest,
    console: Console,
    *,
    names: str | Sequence[str] | None,
    classes: str | Sequence[str] | None,
    saliency: bool,
    num_crops: int,
    crop_px: int,
) -> CommandResult:
    """Draw maps of slides: class-activation maps, or the predicted masks of a segmentation.

    Raises:
        SftError: the run, the table or a slide is wrong.
    """
    if num_crops < 0 or crop_px < 1:
        raise InputError(f"--crops {num_crops}, --crop-px {crop_px}: give numbers of at least 0 and 1")
    loaded = load_trained(selection, console, SINGLE_RANK)
    names = (names,) if isinstance(names, str) else names
    unknown = sorted(set(names or ()) - {record.name for record in loaded.records})
    if unknown:
        raise InputError(f"--names {some_names(unknown)}: not among the slides of {selection.csv or selection.split}; see predictions.csv")
    place = HeatmapFolder(selection.run, selection.folder("heatmaps"), loaded.weights)
    segments = loaded.experiment.task.kind == "segmentation"
    if segments and (saliency or classes):
        raise InputError("--saliency and --classes are for models that pool; a predicted mask has all classes of a segmentation")
    outputs = [] if segments else output_numbers(loaded.experiment, classes)
    drawn = []
    with staging_folder(place.root) as staged:
        masks = MaskMaker(loaded.experiment, staged, label=loaded.weights.text) if segments else None
        make = TileHeatmapMaker if loaded.experiment.config.model.takes_tiles else HeatmapMaker
        maker = None if segments else make(loaded.experiment, staged, label=loaded.weights.text)
        for record in loaded.records:
            if (names and record.name not in names) or record.name in loaded.failed:
                continue
            try:
                maps = [masks.draw(record)] if masks is not None else []
                if maker is not None:
                    maps = [maker.draw(record, output, saliency=saliency, num_crops=num_crops, crop_px=crop_px) for output in outputs]
                    weights = maker.draw_weights(record)
                    maps += [] if weights is None else [weights]
            except sft.SourceError as error:
                if isinstance(error, RunFolderError) or loaded.experiment.config.train.on_error != "skip":
                    raise
                loaded.failed[record.name] = " ".join(str(error).split())
                continue
            for heatmap in place.publish(staged, maps):
                drawn.append({**asdict(heatmap), "files": [str(path) for path in heatmap.files]})
                print_text(console, f"{heatmap.slide}, {heatmap.note or heatmap.output}: {heatmap.files[1]}")
    if place.is_in_run:
        with results_lock(place.root):
            write_run_summary(selection.run)
    newer = newer_best(selection.run, loaded.weights)
    if newer is not None:
        print_text(console, f"the run has a better model by now ({newer.text}); start heatmap again for its maps")
    filled = note_filled(loaded.experiment, selection.folder("heatmaps") / "damaged.csv", console, SINGLE_RANK)
    value = {"heatmaps": drawn, "weights": loaded.weights.as_dict(), "failed": loaded.failed, **filled}
    return CommandResult(value=value, num_failed=len(loaded.failed))


def _plans(experiment: Experiment, trainer: Trainer, failed: Mapping[str, str]) -> list[sft.Plan]:
    """Plans of the largest, widest and highest training slide, unrotated and rotated, so that a budget error comes before any training.

    Raises:
        BudgetError: some do not fit; the message has a budget for all of them.
    """
    sizes = experiment.feed.sizes
    records = [record for record in experiment.records("train") if record.name not in failed]
    by_area, by_width, by_height = (
        lambda record: sizes[record.name][0] * sizes[record.name][1],
        lambda record: sizes[record.name][0],
        lambda record: sizes[record.name][1],
    )
    wanted: dict[tuple[int, int], tuple[SlideRecord, bool]] = {}  # the first is the largest as it is
    for measure in (by_area, by_width, by_height):
        record = max(records, key=measure)
        width_px, height_px = sizes[record.name]
        wanted.setdefault((width_px, height_px), (record, False))
        if experiment.config.augment.rotations:
            wanted.setdefault((height_px, width_px), (record, True))
    plans: list[sft.Plan] = []
    refusals: list[sft.BudgetError] = []
    for record, turned in wanted.values():
        try:
            plans.append(trainer.plan(record, turned=turned))
        except sft.BudgetError as refusal:
            refusals.append(refusal)
    if refusals:
        raise max(refusals, key=lambda refusal: refusal.needed_bytes)
    return plans


def _check_same(experiment: Experiment, ranks: Ranks) -> None:
    """Refuse ranks that were started with different commands."""
    identity = {
        **config_fingerprint(experiment.config),
        "run": str(experiment.config.run),
        "slides, labels or splits": experiment.table.digest(),
    }
    for rank, other in enumerate(ranks.gathered(identity)):
        differing = [name for name in identity if identity[name] != other[name]]
        if differing:
            raise InputError(
                f"ranks {ranks.rank} and {rank} were started with different {', '.join(differing)}. Start all with the same command."
            )


def _checkpoint_bytes(experiment: Experiment) -> int:
    """Three checkpoints and the one being written: weights, and for each two numbers of the optimizer."""
    weights: int = sum(tensor.nbytes for tensor in experiment.model.state_dict().values())
    return 4 * 3 * weights + 16 * 2**20


def _describe(folder: RunFolder, experiment: Experiment, plan: sft.Plan) -> None:
    """Write the files that are known before training."""
    folder.write_yaml("config.yaml", experiment.config.to_dict())
    write_json(folder.path / "task.json", {"task": asdict(experiment.task), "table": experiment.table.digest()})
    write_text(folder.path / "plan.txt", plan.explain() + "\n")
    write_text(folder.path / "plan.json", plan.to_json() + "\n")
    columns = ["slide", "path", "patient", "split", "target"]
    rows = [[r.name, r.path, r.patient, r.split, ";".join(map(str, r.target or ()))] for r in experiment.table.records]
    write_csv(folder.path / "splits.csv", columns, rows)


def _finish(
    trainer: Trainer,
    *,
    folder: RunFolder,
    progress: RunProgress,
    failed: dict[str, str],
    console: Console,
    num_draws: int,
    ranks: Ranks,
    interruption: Interruption,
) -> dict[str, Any]:
    """Evaluate the best model on validation and test slides, and write the page of the run.

    Raises:
        EndRequested: a signal requested the end of the run.
    """
    experiment = trainer.experiment
    best = ranks.from_first(lambda: folder.checkpoints.load("best") or folder.checkpoints.load("last"))
    assert best is not None  # training has saved the last one
    restore_weights(experiment.model, best.weights, folder.path)
    metrics = {}
    for split in ("val", "test"):
        records = experiment.records(split)
        if records:
            loaded = LoadedModel(experiment=experiment, records=records, weights=best.weights_id, failed=failed)
            result = evaluate_records(
                trainer.predictor,
                loaded,
                folder.path / split,
                console,
                run=folder.path,
                title=split,
                num_draws=num_draws,
                ranks=ranks,
                interruption=interruption,
            )
            metrics[split] = plain_estimates(result.estimates, result.num_patients)
    filled = note_filled(experiment, folder.path / "damaged.csv", console, ranks)
    if ranks.rank == 0:
        write_csv(folder.path / "failed.csv", ["slide", "problem"], list(failed.items()))
        with results_lock(folder.path):
            write_run_summary(folder.path)
    print_text(console, f"written to {folder.path}: summary.md, report.html")
    return {
        "run": str(folder.path),
        "epochs": progress.epoch,
        "steps": progress.step,
        "best_epoch": progress.best[1] if progress.best else progress.epoch,
        "weights": best.weights_id.as_dict(),
        "metrics": metrics,
        "failed": failed,
        **filled,
    }
