"""Record of the task and data that weights were trained on, in each checkpoint; the other files of a run folder are checked against it.

A run folder is a set of plain files that may be edited or mixed with those of another run: config.yaml, task.json, splits.csv. Predictions
depend on them as much as on the weights. The checkpoint has its own copy of the task, the settings and a digest of the table. A file that
contradicts it is refused with both values. Checkpoints of earlier versions have no task; it is compared with what can be derived: the
number of outputs, and the task that the run's own table gives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from sft.common.errors import InputError
from sft.wsi.config import Config
from sft.wsi.data.table import SlideTable
from sft.wsi.errors import RunFolderError
from sft.wsi.model.tasks import Task
from sft.wsi.run.overview import read_rows
from sft.wsi.train.checkpoint import Checkpoint, CheckpointFolder
from sft.wsi.train.run_state import CHANGEABLE_SETTINGS, changed_settings, complete_settings, config_fingerprint

__all__ = ["check_config", "check_network", "check_outputs", "check_splits", "check_table", "read_task", "recorded_state", "trained_record"]

#: Settings that another machine may need otherwise; they change no prediction beyond rounding.
_MACHINE_SETTINGS = frozenset({"train.device", *CHANGEABLE_SETTINGS})
_REMEDY = "Restore it, or copy the run folder again."


def trained_record(config: Config, task: Task, table: SlideTable, feature_shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Record of the training in a checkpoint; plain values."""
    return {
        "settings": config_fingerprint(config),
        "table": table.digest(),
        "task": {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(task).items()},
        "feature_shapes": [list(shape) for shape in feature_shapes],
    }


def recorded_state(run: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """State of a checkpoint; for one of an earlier version, completed by that of the newest ``last`` checkpoint of the run."""
    if "settings" in checkpoint.state:
        return checkpoint.state
    newest = CheckpointFolder(run / "checkpoints").newest_state("last")
    last = {} if newest is None else newest[1]
    return {**{name: last[name] for name in ("settings", "table") if name in last}, **checkpoint.state}


def check_config(run: Path, state: Mapping[str, Any], config: Config) -> None:
    """Refuse a config.yaml with other settings than those of the training.

    Raises:
        RunFolderError: it has.
    """
    if "settings" not in state:
        return
    different = changed_settings(complete_settings(state["settings"]), config_fingerprint(config))
    listed = [f"{name} (trained with {was!r}, now {now!r})" for name, (was, now) in different.items() if name not in _MACHINE_SETTINGS]
    if listed:
        raise RunFolderError(f"{run / 'config.yaml'} contradicts the checkpoint: {', '.join(listed)}. {_REMEDY}")


def read_task(run: Path, state: Mapping[str, Any]) -> Task:
    """Task that the weights were trained for.

    Raises:
        RunFolderError: task.json is damaged or contradicts the checkpoint; or it is missing, and the checkpoint is of an earlier version.
    """
    path = run / "task.json"
    recorded = _as_task(state["task"]) if "task" in state else None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        task, digest = _as_task(saved["task"]), saved["table"]
    except FileNotFoundError as error:
        if recorded is not None:
            return recorded
        raise RunFolderError(f"{path} is missing, and the checkpoint does not have the task. Copy it from the run again.") from error
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunFolderError(f"{path} is damaged ({error}). Copy it again, or start the training again, which writes it.") from error
    if recorded is not None:
        _refuse_other_task(path, recorded, task)
    if "table" in state and digest != state["table"]:
        raise RunFolderError(f"{path} contradicts the checkpoint: table (trained with {state['table']!r}, now {digest!r}). {_REMEDY}")
    return task


def check_outputs(run: Path, checkpoint: Checkpoint, task: Task, kind: str) -> None:
    """Refuse a task with another number of outputs than the weights have, or of another kind than config.yaml has.

    Raises:
        RunFolderError: it has.
    """
    path = run / "task.json"
    of_kind = {"classification": len(task.classes), "multilabel": len(task.classes), "segmentation": len(task.classes)}
    of_kind |= {"regression": 1, "cox": 1, "hazard": len(task.edges) + 1}
    if task.kind not in of_kind:
        raise RunFolderError(f"{path}: kind {task.kind!r} is not one of {', '.join(of_kind)}. {_REMEDY}")
    if task.kind != kind:
        raise RunFolderError(f"{path} contradicts config.yaml: kind is {task.kind!r}, and task.kind {kind!r}. {_REMEDY}")
    if task.num_outputs != of_kind[task.kind]:
        raise RunFolderError(
            f"{path} contradicts itself: num_outputs is {task.num_outputs}, and kind {task.kind} with its classes or edges has "
            f"{of_kind[task.kind]}. {_REMEDY}"
        )
    weight = checkpoint.weights.get("head.classifier.weight")
    if weight is not None and weight.shape[0] != task.num_outputs:
        raise RunFolderError(
            f"{path} contradicts the checkpoint: num_outputs (trained with {weight.shape[0]}, now {task.num_outputs}). {_REMEDY}"
        )


def check_table(run: Path, state: Mapping[str, Any], table: SlideTable, task: Task, derived: Task) -> None:
    """Refuse a table of the run that has changed; for a checkpoint without a task, compare with the task that the table gives.

    Raises:
        InputError: the table differs.
        RunFolderError: the task differs.
    """
    if "table" in state and table.digest() != state["table"]:
        raise InputError(
            f"the table of {run} has changed since it was trained: other slides, labels or splits. Restore it, or give slides with --csv."
        )
    if "task" not in state:
        _refuse_other_task(run / "task.json", derived, task)


def check_splits(run: Path, table: SlideTable) -> None:
    """Refuse a splits.csv with other splits than those of the run.

    Raises:
        RunFolderError: it has.
    """
    path = run / "splits.csv"
    records = {record.name: record for record in table.records}
    for number, row in enumerate(read_rows(path), start=2):
        record = records.get(row.get("slide", ""))
        if record is None:
            raise RunFolderError(f"{path}, line {number}: slide {row.get('slide')!r} is not in the table of the run. {_REMEDY}")
        expected = {"patient": record.patient, "split": record.split or "", "target": ";".join(map(str, record.target or ()))}
        for name, value in expected.items():
            if name in row and row[name] != value:
                raise RunFolderError(
                    f"{path}, line {number} contradicts the run: {name} of slide {record.name} (trained with {value!r}, now "
                    f"{row[name]!r}). {_REMEDY} Give other slides with --csv."
                )


def check_network(run: Path, state: Mapping[str, Any], feature_shapes: Sequence[Sequence[int]]) -> None:
    """Refuse a network whose feature map has another size than in the training, such as another stride.

    Raises:
        RunFolderError: it has.
    """
    now = [list(shape) for shape in feature_shapes]
    if state.get("feature_shapes", now) != now:
        raise RunFolderError(
            f"the network of {run} has changed: its backbone gave feature maps {state['feature_shapes']} (channels, height, width) at two "
            f"image sizes, and gives {now}. Restore its code."
        )


def _as_task(value: Mapping[str, Any]) -> Task:
    plain: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
    return Task(**plain)


def _refuse_other_task(path: Path, recorded: Task, task: Task) -> None:
    for item in fields(Task):
        was, now = getattr(recorded, item.name), getattr(task, item.name)
        if not _is_same(was, now):
            raise RunFolderError(f"{path} contradicts the checkpoint: {item.name} (trained with {was!r}, now {now!r}). {_REMEDY}")


def _is_same(was: Any, now: Any) -> bool:
    """Equal values; numbers up to the rounding of another version of numpy."""
    if isinstance(was, tuple) and isinstance(now, tuple):
        return len(was) == len(now) and all(map(_is_same, was, now))
    if isinstance(was, float) and isinstance(now, (int, float)):
        return math.isclose(was, now, rel_tol=1e-9, abs_tol=1e-12)
    return type(was) is type(now) and bool(was == now)
