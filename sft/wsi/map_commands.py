"""Commands of ``python -m sft.wsi`` that write maps of slides: ``predict``, and the maps of ``evaluate``."""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

import sft
from sft.common.errors import InputError, some_names
from sft.common.terminal import print_text
from sft.prediction.prediction_head import Kind
from sft.prediction.row_journal import default_journal_path
from sft.wsi.commands import CommandResult
from sft.wsi.data.table import SlideRecord
from sft.wsi.data.table_files import SEPARATOR
from sft.wsi.errors import RunFolderError
from sft.wsi.eval.evaluate import newer_best, note_filled
from sft.wsi.eval.predict import InferenceRequest, LoadedModel, Predictor, load_trained
from sft.wsi.eval.prediction_files import ConfusionCounter, MapWriter, SlideMap
from sft.wsi.eval.prediction_table import write_predictions
from sft.wsi.run.files import write_csv
from sft.wsi.run.results import results_lock, staging_folder
from sft.wsi.train.distributed import SINGLE_RANK

__all__ = ["predict", "write_evaluation_maps"]


def predict(
    selection: InferenceRequest,
    slides: Sequence[Path],
    console: Console,
    *,
    kind: Kind | None,
    formats: Sequence[str],
    dtype: str | None,
    overwrite: bool,
) -> CommandResult:
    """Write maps of slides, which need no labels; of a model with a pooled head also ``predictions.csv``.

    A slide is skipped if its map exists and is of the same weights, settings and file.

    Args:
        selection: the model.
        slides: files of the slides; empty for those of the selection.
        console: output.
        kind: of the maps; ``None`` for classes of a segmentation, or the evidence of a pooled head.
        formats: of the maps.
        dtype: element type.
        overwrite: True to compute existing maps again.

    Raises:
        SftError: the run or a slide is wrong.
    """
    with _table_of(slides) as table:
        if table is not None:
            if selection.csv is not None:
                raise InputError("predict takes slides or --csv, not both; leave one out")
            selection = replace(selection, csv=table, slides=None)
        loaded = load_trained(selection, console, SINGLE_RANK)
        folder = selection.folder("predictions")
        maps = MapWriter(loaded.experiment, loaded.weights, kind=kind, formats=formats, dtype=dtype)
        segments = loaded.experiment.task.kind == "segmentation"
        predictor = None if segments else Predictor(loaded.experiment)
        predictions = []
        written: list[SlideMap] = []
        with staging_folder(folder) as staged:
            for record in loaded.records:
                if record.name in loaded.failed:
                    continue
                with _skipping_damage(loaded, record):
                    written.append(_map_of(maps, record, staged, folder, overwrite=overwrite))
                    if predictor is not None:
                        predictions.append(predictor.predict(record))
                    print_text(console, _progress(written[-1]))
        if predictor is not None:
            write_predictions(folder / "predictions.csv", loaded.experiment.task, predictions)
        if loaded.failed:
            write_csv(folder / "failed.csv", ["slide", "problem"], list(loaded.failed.items()))
        newer = newer_best(selection.run, loaded.weights)
        if newer is not None:
            print_text(console, f"the run has a better model by now ({newer.text}); start predict again for its maps")
        filled = note_filled(loaded.experiment, folder / "damaged.csv", console, SINGLE_RANK)
        value = {"folder": str(folder), "maps": [asdict(each) for each in written], "weights": loaded.weights.as_dict()}
        return CommandResult(value={**value, "failed": loaded.failed, **filled}, num_failed=len(loaded.failed))


def write_evaluation_maps(loaded: LoadedModel, folder: Path, formats: Sequence[str], console: Console) -> list[SlideMap]:
    """Write the maps of an evaluated segmentation to ``maps``, and the confusion of the pixels to ``pixel_confusion.csv``.

    The table has a row for each true class: the pixels of each predicted class, and the intersection over union. Counts are added up over
    all slides while their maps are written.

    Args:
        loaded: the model and its slides.
        folder: of the results.
        formats: of the maps.
        console: output.

    Raises:
        SftError: a slide cannot be read, or a file cannot be written.
    """
    experiment = loaded.experiment
    maps = MapWriter(experiment, loaded.weights, formats=formats)
    names = experiment.task.classes
    total: npt.NDArray[np.int64] = np.zeros((len(names), len(names)), np.int64)
    written = []
    with staging_folder(folder / "maps") as staged:
        for record in loaded.records:
            if record.name in loaded.failed:
                continue
            with _skipping_damage(loaded, record):
                counter = ConfusionCounter(experiment.feed.labels(record), len(names))
                written.append(_map_of(maps, record, staged, folder / "maps", overwrite=True, counter=counter))
                total += counter.counts
                print_text(console, _progress(written[-1]))
    union = total.sum(0) + total.sum(1) - np.diag(total)
    rows = [[name, *total[number].tolist(), _share(total[number, number], union[number])] for number, name in enumerate(names)]
    write_csv(folder / "pixel_confusion.csv", ["true", *(f"predicted_{name}" for name in names), "iou"], rows)
    return written


def _map_of(
    maps: MapWriter, record: SlideRecord, staged: Path, folder: Path, *, overwrite: bool, counter: ConfusionCounter | None = None
) -> SlideMap:
    """The map of a slide in its folder: the existing one, or a new one, which replaces the folder as a whole."""
    target = folder / record.name
    existing = None if overwrite else maps.existing(record, target)
    if existing is not None:
        default_journal_path(target).unlink(missing_ok=True)
        return existing
    place = staged / record.name
    # The labels of a counter are not part of the identity of a prediction, and filled tiles are listed as they are read.
    journal = default_journal_path(target) if counter is None and not maps.fills_damage else None
    result = maps.write(record, place, *([] if counter is None else [counter]), journal=journal)
    with results_lock(folder):
        try:
            if target.exists():
                os.rename(target, staged / f"replaced-{record.name}")
            os.rename(place, target)
        except OSError as error:
            raise RunFolderError(f"cannot move the map of {record.name} to {target}: {error.strerror}. Name another folder.") from error
    return replace(result, files=tuple(str(target / Path(path).name) for path in result.files))


@contextmanager
def _skipping_damage(loaded: LoadedModel, record: SlideRecord) -> Iterator[None]:
    """Record a slide that cannot be read, if the run skips those."""
    try:
        yield
    except sft.SourceError as error:
        if isinstance(error, RunFolderError) or loaded.experiment.config.train.on_error != "skip":
            raise
        loaded.failed[record.name] = " ".join(str(error).split())


@contextmanager
def _table_of(slides: Sequence[Path]) -> Iterator[Path | None]:
    """A table of slide files; ``None`` for no files.

    Raises:
        InputError: a file does not exist.
    """
    several = {str(path): [path] if path.exists() else [Path(name) for name in str(path).split(SEPARATOR)] for path in slides}
    missing = [str(path) for paths in several.values() for path in paths if not path.exists()]
    if missing:
        raise InputError(f"no such slides: {some_names(missing)}; check the paths")
    if not slides:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "slides.csv"
        with table.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerows([["slide"], *([SEPARATOR.join(map(os.path.abspath, several[str(path)]))] for path in slides)])
        yield table


def _progress(slide_map: SlideMap) -> str:
    files = ", ".join(slide_map.files)
    if not slide_map.is_new:
        return f"{slide_map.slide}: exists, of the same weights and settings: {files}"
    resumed = f" (below row {slide_map.num_resumed_rows} of an interrupted command)" if slide_map.num_resumed_rows else ""
    return f"{slide_map.slide}: {slide_map.seconds:.1f} s{resumed}, {slide_map.hidden_share:.0%} of the writing hidden: {files}"


def _share(count: int, total: int) -> float | str:
    return float(count / total) if total else ""
