"""Results of trained weights: built in a staging folder, published under a lock, and labelled with the weights that they are of.

Several commands write to one run folder: ``train`` at its end, ``evaluate`` and ``heatmap`` at any time, also while the run trains. Each
builds its results in a folder of its own. A short lock covers the moment in which they replace earlier results. Every folder of results
has a file ``weights.json``, the epoch and the hash of the weights. Results of newer weights are not replaced by those of older ones.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sft.common.atomic_files import folder_problem, fsync_folder
from sft.wsi.errors import RunFolderError
from sft.wsi.run.files import write_json
from sft.wsi.train.checkpoint import WeightsId

__all__ = [
    "WEIGHTS_FILE",
    "as_weights_id",
    "place_for_weights",
    "publish",
    "publish_files",
    "read_weights_id",
    "remove_results",
    "results_lock",
    "staging_folder",
    "write_weights_id",
]

WEIGHTS_FILE = "weights.json"
_LOCK, _STAGED, _REPLACED = ".results.lock", ".staged-", ".replaced-"
#: Files that an evaluation writes; other files in a folder of results are the user's and stay.
_RESULT_FILES = frozenset(
    (
        "predictions.csv", "patients.csv", "metrics.json", "failed.csv", "damaged.csv", "summary.md", "roc.png", "confusion.png",
        "pixel_confusion.csv", "maps", WEIGHTS_FILE,
    )
)  # fmt: skip


@contextmanager
def results_lock(folder: Path) -> Iterator[None]:
    """Lock of the results in a folder, for the moment in which one process replaces them.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _LOCK).open("w")
    except OSError as error:
        raise _refusal(folder, error) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """New folder inside ``parent`` to build results in; removed at the end unless it was published.

    Staging folders of processes that have died are removed first.

    Raises:
        RunFolderError: ``parent`` cannot be written.
    """
    staged = parent / f"{_STAGED}{secrets.token_hex(8)}"
    with results_lock(parent):
        try:
            _remove_abandoned(parent)
            staged.mkdir()
            lock = (staged / _LOCK).open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise _refusal(parent, error) from error
    try:
        with lock:
            yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def publish(staged: Path, target: Path) -> None:
    """Replace a folder of results by a staged one, as a whole; the caller has the lock. Files of other programs in ``target`` stay.

    Raises:
        RunFolderError: it cannot be replaced.
    """
    replaced = target.with_name(f"{_REPLACED}{target.name}")
    try:
        if replaced.exists():  # a process died between the two renames, or after them
            _keep_others_files(replaced, target) if target.exists() else os.rename(replaced, target)
        if target.exists():
            os.rename(target, replaced)
        os.rename(staged, target)
        (target / _LOCK).unlink()
        if replaced.exists():
            _keep_others_files(replaced, target)
        fsync_folder(target.parent)
    except OSError as error:
        raise _refusal(target, error) from error


def publish_files(staged: Path, target: Path, *, label: str = WEIGHTS_FILE) -> None:
    """Move staged files to a folder that may have other files; the caller has the lock.

    The label is removed first and written last, so a folder with a label is complete.

    Raises:
        RunFolderError: they cannot be moved.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / label).unlink(missing_ok=True)
        names = sorted(path.name for path in staged.iterdir() if path.name not in (_LOCK, label))
        for name in [*names, *([label] if (staged / label).exists() else [])]:
            os.replace(staged / name, target / name)
        fsync_folder(target)
    except OSError as error:
        raise _refusal(target, error) from error


def remove_results(folder: Path) -> None:
    """Remove the files of an earlier evaluation; the caller has the lock."""
    for name in _RESULT_FILES:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_weights_id(folder: Path, weights: WeightsId) -> None:
    """Label a folder of results."""
    write_json(folder / WEIGHTS_FILE, weights.as_dict())


def read_weights_id(folder: Path) -> WeightsId | None:
    """Weights that a folder of results is of; None for a folder without a label, such as one of an earlier version."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return as_weights_id(json.loads((folder / WEIGHTS_FILE).read_text(encoding="utf-8")))
    return None


def as_weights_id(value: Mapping[str, Any]) -> WeightsId:
    """Identity of weights from its plain values.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    step = value["step"]
    return WeightsId(
        checkpoint=str(value["checkpoint"]),
        epoch=int(value["epoch"]),
        step=None if step is None else int(step),
        sha256=str(value["sha256"]),
    )


def place_for_weights(target: Path, weights: WeightsId) -> Path:
    """Folder for results: ``target``, or one named after the epoch if ``target`` has results of newer weights of the same run."""
    published = read_weights_id(target)
    if published is None or published.checkpoint != weights.checkpoint:
        return target
    is_newer = (published.epoch, published.step or 0) > (weights.epoch, weights.step or 0)
    return target.with_name(f"{target.name}-epoch{weights.epoch}") if is_newer else target


def _refusal(folder: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"cannot write results to {folder}: {folder_problem(folder, error)}. Make room, or name another folder with --out."
    )


def _keep_others_files(replaced: Path, target: Path) -> None:
    """Move files of other programs from a replaced folder of results to the new one, and remove the replaced one."""
    for path in replaced.iterdir():
        if path.name not in _RESULT_FILES and path.name != _LOCK and not (target / path.name).exists():
            os.rename(path, target / path.name)
    shutil.rmtree(replaced)


def _remove_abandoned(parent: Path) -> None:
    """Remove staging folders of processes that have died: their lock is free."""
    for path in parent.glob(f"{_STAGED}*"):
        with suppress(OSError), (path / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
