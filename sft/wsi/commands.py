"""What the commands of ``python -m sft.wsi`` do that are about a network; `sft.wsi.inspection` has those about slides alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import sft
from sft.errors import InputError
from sft.placing import usable
from sft.wsi.config import Config
from sft.wsi.errors import RunFolderError, RunInterrupted
from sft.wsi.experiment import Experiment, check_records, check_slides, load_experiment, plan_of_size
from sft.wsi.files import write_csv, write_json, write_text
from sft.wsi.heatmap import HeatmapMaker, output_numbers
from sft.wsi.inference import Predictor
from sft.wsi.interruption import EndRequested, Interruption
from sft.wsi.metrics import Estimate
from sft.wsi.progress import Reporter
from sft.wsi.ranks import ALONE, Ranks
from sft.wsi.report import draw_curves, write_evaluation
from sft.wsi.runfolder import RunFolder, UnwrittenFolder, add_damage
from sft.wsi.runstate import Progress, fingerprint
from sft.wsi.table import SlideRecord, SlideTable, read_table
from sft.wsi.tasks import Task
from sft.wsi.together import dealt
from sft.wsi.training import Trainer

__all__ = ["Result", "Selection", "config_path", "evaluate", "heatmap", "plan", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a command found.

    Attributes:
        value: for ``--json``.
        num_failed: slides that were left out.
    """

    value: Any
    num_failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
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


@dataclass(slots=True, kw_only=True)
class _Loaded:
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


def plan(config: Config, size: Sequence[int] | None, console: Console, ranks: Ranks = ALONE) -> Result:
    """The plan of a training step for the largest slide, or for a size.

    Args:
        config: of the run.
        size: height and width in px, instead of the largest slide's.
        console: is told the plan.
        ranks: those that share the slide. Default: this process alone

    Raises:
        BudgetError: it does not fit.
        InputError, SourceError: the configuration is wrong.
    """
    experiment = load_experiment(config)
    if size is not None:
        found = plan_of_size(experiment, (size[0], size[1]), ranks)
    else:
        with Reporter(console, 0) as reporter:
            failed = check_slides(experiment, ranks, reporter)
            trainer = Trainer(experiment, RunFolder(config.run), failed, reporter, ranks)
        found = _plans(experiment, trainer, failed)[0]
    console.print(found.explain(), markup=False, highlight=False, soft_wrap=True)
    return Result(value=json.loads(found.to_json()))


def train(config: Config, console: Console, *, is_dry: bool, num_draws: int, ranks: Ranks = ALONE) -> Result:
    """Train, or go on; then evaluate the best model on validation and test slides.

    Args:
        config: of the run; the same on all ranks.
        console: is told what happens; quiet on all ranks but the first.
        is_dry: whether to check everything, tell the plan, and write nothing.
        num_draws: of the bootstrap.
        ranks: those that share the work (`sft.wsi.ranks.joined`). Default: this process alone

    Returns:
        What was found; of several ranks, the first has all of it.

    Raises:
        SftError: as `Trainer.run`; everything that can be checked is checked before training.
    """
    usable(config.train.device)
    ranks.use_device(config.train.device)
    experiment = load_experiment(config)
    _check_same(experiment, ranks)
    counts = {split: len(experiment.records(split)) for split in ("train", "val", "test")}
    told = ", ".join(f"{count} {split}" for split, count in counts.items())
    console.print(
        f"{len(experiment.table.records)} slides ({told}); task {config.task.kind}", markup=False, highlight=False, soft_wrap=True
    )
    if is_dry:
        with Reporter(console, 0) as reporter:
            failed = check_slides(experiment, ranks, reporter)
            trainer = Trainer(experiment, RunFolder(config.run), failed, reporter, ranks)
        found = _plans(experiment, trainer, failed)[0]
        console.print(found.explain(), markup=False, highlight=False, soft_wrap=True)
        return Result(value={"slides": counts, "failed": failed, "plan": json.loads(found.to_json())}, num_failed=len(failed))
    is_first = ranks.rank == 0
    opened = RunFolder(config.run, needed_bytes=_checkpoint_bytes(experiment)) if is_first else UnwrittenFolder(config.run)
    with opened as folder:
        events = config.run / "tensorboard" if config.tensorboard and is_first else None
        with Reporter(console, config.train.epochs, events=events) as reporter:
            failed = check_slides(experiment, ranks, reporter)
            with Interruption() as interruption:
                trainer = Trainer(experiment, folder, failed, reporter, ranks)
                plans = _plans(experiment, trainer, failed)
                trainer.restore()
                if is_first:
                    _describe(folder, experiment, plans[0])
                progress = trainer.run(interruption)
        if is_first:
            draw_curves(config.run / "curves.png", progress.epochs)
        failed = dict(progress.failed)
        with Interruption() as interruption:
            try:
                value = _finish(trainer.predictor, experiment, folder, progress, failed, console, num_draws, ranks, interruption)
            except EndRequested as asked:
                ranks.gathered(None)  # a rank that has left makes torchrun end the others
                raise RunInterrupted(
                    f"{asked.signal.name}: trained, and not evaluated to the end. Start the same command again to go on."
                ) from None
    return Result(value=value, num_failed=len(failed))


def evaluate(selection: Selection, console: Console, *, num_draws: int, ranks: Ranks = ALONE) -> Result:
    """Predict slides and measure.

    Args:
        selection: the model and the slides; the same on all ranks.
        console: is told the metrics; quiet on all ranks but the first.
        num_draws: of the bootstrap.
        ranks: those that share the work (`sft.wsi.ranks.joined`). Default: this process alone

    Returns:
        What was found; of several ranks, the first has all of it.

    Raises:
        SftError: the run, the table or a slide is wrong.
    """
    loaded = _load(selection, console, ranks)
    folder = selection.out or selection.run / (f"evaluation-{selection.csv.stem}" if selection.csv else selection.split)
    title = f"{folder.name}, {selection.checkpoint} model (epoch {loaded.epoch})"
    predictor = Predictor(loaded.experiment, ranks=ranks)
    estimates = _evaluate(predictor, loaded, folder, console, title=title, num_draws=num_draws, ranks=ranks)
    value = {"folder": str(folder), "metrics": _plain(estimates), "failed": loaded.failed}
    filled = _filled(loaded.experiment, folder / "damaged.csv", console, ranks)
    return Result(value={**value, **filled}, num_failed=len(loaded.failed))


def heatmap(
    selection: Selection,
    console: Console,
    *,
    names: Sequence[str] | None,
    classes: Sequence[str] | None,
    saliency: bool,
    num_crops: int,
    crop_px: int,
) -> Result:
    """Draw maps of slides.

    Raises:
        SftError: the run, the table or a slide is wrong.
    """
    if num_crops < 0 or crop_px < 1:
        raise InputError(f"--crops {num_crops}, --crop-px {crop_px}: give numbers of at least 0 and 1")
    loaded = _load(selection, console, ALONE)
    unknown = sorted(set(names or ()) - {record.name for record in loaded.records})
    if unknown:
        raise InputError(f"--names {', '.join(unknown)}: not among the slides of {selection.csv or selection.split}; see predictions.csv")
    folder = selection.out or selection.run / "heatmaps"
    maker = HeatmapMaker(loaded.experiment, folder)
    outputs = output_numbers(loaded.experiment, classes)
    drawn = []
    for record in loaded.records:
        if (names and record.name not in names) or record.name in loaded.failed:
            continue
        try:
            for output in outputs:
                found = maker.draw(record, output, saliency=saliency, num_crops=num_crops, crop_px=crop_px)
                drawn.append({**asdict(found), "files": [str(path) for path in found.files]})
                console.print(f"{found.slide}, {found.output}: {found.files[1]}", markup=False, highlight=False, soft_wrap=True)
        except sft.SourceError as error:
            if isinstance(error, RunFolderError) or loaded.experiment.config.train.on_error != "skip":
                raise
            loaded.failed[record.name] = " ".join(str(error).split())
    filled = _filled(loaded.experiment, folder / "damaged.csv", console, ALONE)
    return Result(value={"heatmaps": drawn, "failed": loaded.failed, **filled}, num_failed=len(loaded.failed))


def _plans(experiment: Experiment, trainer: Trainer, failed: Mapping[str, str]) -> list[sft.Plan]:
    """Plans of the largest, widest and highest training slide, as they are and turned: whether they fit shows before anything runs."""
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
    return [trainer.plan(record, turned=turned) for record, turned in wanted.values()]


def _check_same(experiment: Experiment, ranks: Ranks) -> None:
    """Refuse ranks that were asked for different runs."""
    own = {**fingerprint(experiment.config), "run": str(experiment.config.run), "slides, labels or splits": experiment.table.digest()}
    for rank, other in enumerate(ranks.gathered(own)):
        differing = [name for name in own if own[name] != other[name]]
        if differing:
            raise InputError(
                f"ranks {ranks.rank} and {rank} were started with different {', '.join(differing)}. Start all with the same command."
            )


def _checkpoint_bytes(experiment: Experiment) -> int:
    """Three checkpoints and the one being written: weights, and for each two numbers of the optimizer."""
    weights: int = sum(tensor.nbytes for tensor in experiment.model.state_dict().values())
    return 4 * 3 * weights + 16 * 2**20


def _describe(folder: RunFolder, experiment: Experiment, found: sft.Plan) -> None:
    """Write what is known before training."""
    folder.write_yaml("config.yaml", experiment.config.to_dict())
    write_json(folder.path / "task.json", {"task": asdict(experiment.task), "table": experiment.table.digest()})
    write_text(folder.path / "plan.txt", found.explain() + "\n")
    write_text(folder.path / "plan.json", found.to_json() + "\n")
    columns = ["slide", "path", "patient", "split", "target"]
    rows = [[r.name, r.path, r.patient, r.split, ";".join(map(str, r.target or ()))] for r in experiment.table.records]
    write_csv(folder.path / "splits.csv", columns, rows)


def _finish(
    predictor: Predictor,
    experiment: Experiment,
    folder: RunFolder,
    progress: Progress,
    failed: dict[str, str],
    console: Console,
    num_draws: int,
    ranks: Ranks,
    interruption: Interruption,
) -> dict[str, Any]:
    """Evaluate the best model on what it was not trained on, and write the page of the run.

    Raises:
        EndRequested: somebody asked to end.
    """
    best = ranks.from_first(lambda: folder.checkpoints.load("best"))
    if best is not None:
        experiment.model.load_state_dict(best.weights)
    epoch = progress.best[1] if progress.best else progress.epoch
    lines = [f"# {folder.path.name}", "", f"Best epoch: {epoch} of {progress.epoch}; {progress.step} optimizer steps.", ""]
    lines += ["![losses and metrics](curves.png)", ""]
    metrics = {}
    for split in ("val", "test"):
        records = experiment.records(split)
        if records:
            loaded = _Loaded(experiment=experiment, records=records, epoch=epoch, failed=failed)
            title = f"{split}, best model (epoch {epoch})"
            estimates = _evaluate(
                predictor, loaded, folder.path / split, console, title=title, num_draws=num_draws, ranks=ranks, interruption=interruption
            )
            metrics[split] = _plain(estimates)
            if ranks.rank == 0:
                page = (folder.path / split / "summary.md").read_text(encoding="utf-8")
                lines += [page.replace("# ", "## ", 1).replace("](", f"]({split}/"), ""]
    filled = _filled(experiment, folder.path / "damaged.csv", console, ranks)
    if filled.get("filled_tiles"):
        lines += [f"{filled['filled_tiles']} tiles could not be decoded and are background: [damaged.csv](damaged.csv).", ""]
    if ranks.rank == 0:
        write_text(folder.path / "summary.md", "\n".join(lines).rstrip() + "\n")
        write_csv(folder.path / "failed.csv", ["slide", "problem"], list(failed.items()))
    console.print(f"written to {folder.path}: summary.md", markup=False, highlight=False, soft_wrap=True)
    return {
        "run": str(folder.path),
        "epochs": progress.epoch,
        "steps": progress.step,
        "best_epoch": epoch,
        "metrics": metrics,
        "failed": failed,
        **filled,
    }


def _filled(experiment: Experiment, path: Path, console: Console, ranks: Ranks) -> dict[str, int]:
    """Note and tell which tiles were filled, where that is what a run does about damage."""
    if experiment.config.train.on_error != "fill":
        return {}
    tiles = ranks.gathered(experiment.feed.bad_tiles)
    count = ranks.from_first(lambda: [add_damage(path, theirs) for theirs in tiles][-1])
    if count:
        console.print(f"{count} damaged tiles are background: {path}", markup=False, highlight=False, soft_wrap=True)
    return {"filled_tiles": count}


def _evaluate(
    predictor: Predictor,
    loaded: _Loaded,
    folder: Path,
    console: Console,
    *,
    title: str,
    num_draws: int,
    ranks: Ranks,
    interruption: Interruption | None = None,
) -> dict[str, dict[str, Estimate]]:
    experiment = loaded.experiment
    with Reporter(console, 0) as reporter:
        reporter.start_validation(len(dealt(loaded.records, ranks)))
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


def _load(selection: Selection, console: Console, ranks: Ranks) -> _Loaded:
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
        model=replace(config.model, budget=selection.budget or config.model.budget, weights=None, options=_without_download(config)),
    )
    usable(config.train.device)
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
    try:
        experiment.model.load_state_dict(with_weights.weights)
    except RuntimeError as error:
        raise RunFolderError(
            f"{selection.run}: its weights are not those of the model that its config.yaml describes, which was changed since: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    state = with_weights.state
    loaded = _Loaded(experiment=experiment, records=records, epoch=state["epoch"] if "epoch" in state else state["progress"]["epoch"])
    with Reporter(console, 0) as reporter:
        loaded.failed |= check_records(experiment, records, ranks, reporter)
    if loaded.failed and config.train.on_error != "skip":
        raise InputError("; ".join(loaded.failed.values()))
    return loaded


def _without_download(config: Config) -> dict[str, Any]:
    """The backbone's options, but for pretrained weights: a trained model brings its own."""
    return {name: value for name, value in config.model.options.items() if name not in ("pretrained", "weights")}


def _plain(estimates: Mapping[str, Mapping[str, Estimate]]) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return None if value != value else value

    return {
        level: {name: {"value": number(e.value), "low": number(e.low), "high": number(e.high)} for name, e in found.items()}
        for level, found in estimates.items()
    }
