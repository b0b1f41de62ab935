"""Run folder: checked before any computation, locked by one process at a time, and never half-written."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from torch import nn

from sft.common.atomic_files import LockedFile, folder_problem, lock_file, lock_holder
from sft.common.byte_units import format_bytes
from sft.common.untrusted.foreign_files import shortened
from sft.sources import BadTile
from sft.wsi.errors import RunFolderError
from sft.wsi.run.files import atomic_write_with_parents, clear_partial, write_csv, write_text
from sft.wsi.train.checkpoint import CheckpointFolder

__all__ = ["NullRunFolder", "RunFolder", "append_bad_tiles"]

_LOCK = ".lock"
_STEP_COLUMNS = ("step", "epoch", "loss", "lr", "grad_norm", "seconds", "waited_seconds", "skipped_share", "slides")
_DAMAGE_COLUMNS = ("slide", "level", "left_px", "top_px", "width_px", "height_px", "reason")


class RunFolder:
    """Folder of a run, locked by this process during the ``with`` block.

    ====================  ======================================================================
    config.yaml           settings; readable with ``--config`` splits.csv            slide, patient, split, target plan.txt, plan.json
    plan of the largest slide steps.csv             a row for each optimizer step metrics.csv           a row for each epoch damaged.csv
    filled tiles, if any checkpoints/          ``last-*``: to resume from; ``best-*``: the best validation
    ====================  ======================================================================

    Args:
        path: of the folder, created if missing.
        needed_bytes: free bytes required on its disk.

    Raises:
        RunFolderError: it cannot be written, is full, contains files of another program, or is in use by another process.
    """

    def __init__(self, path: Path, *, needed_bytes: int = 0) -> None:
        self.path = path
        self._needed_bytes = needed_bytes
        self._lock: LockedFile | None = None
        self._created: list[Path] = []
        self.checkpoints = CheckpointFolder(path / "checkpoints")

    def __enter__(self) -> RunFolder:
        try:
            self._refuse_others_files()
            self._created = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        except RunFolderError:
            raise
        except OSError as error:  # such as a name that is too long
            raise RunFolderError(
                f"cannot use {shortened(str(self.path))}: {error.strerror or error}. Give another folder with --run."
            ) from error
        try:
            self._open()
        except BaseException:
            self._withdraw()
            raise
        clear_partial(self.path)
        if self.checkpoints.path.is_dir():
            self.checkpoints.clear_partial()
        return self

    def _open(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with suppress(BlockingIOError):
                self._lock = lock_file(self.path / _LOCK, creates=True)
            probe = self.path / f".probe-{os.getpid()}"
            try:
                with probe.open("wb") as file:
                    file.write(b"0" * 4096)
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                probe.unlink(missing_ok=True)
            free_bytes = shutil.disk_usage(self.path).free
        except OSError as error:
            raise RunFolderError(
                f"cannot write to the run folder {self.path}: {folder_problem(self.path, error)}. Give another with --run."
            ) from error
        if self._lock is None:
            holder = lock_holder(self.path / _LOCK)
            raise RunFolderError(f"the run folder {self.path} is in use by {holder}. Wait for it, or give another with --run.")
        if free_bytes < self._needed_bytes:
            raise RunFolderError(
                f"the run folder {self.path} has {format_bytes(free_bytes)} free, and checkpoints need {format_bytes(self._needed_bytes)}. "
                "Make room, or give another with --run."
            )

    def _refuse_others_files(self) -> None:
        """Refuse a folder with files of another program: a run overwrites the files in its folder."""
        if (self.path / _LOCK).exists() or self.checkpoints.path.is_dir() or not self.path.is_dir():
            return
        foreign = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith("."))
        if foreign:
            file_names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
            raise RunFolderError(
                f"the folder {self.path} holds other files ({file_names}), which a run might overwrite. Give a new one with --run."
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._withdraw()
        self._close()

    def _withdraw(self) -> None:
        """Remove the lock of a run that was refused before it wrote anything, and the folders that were created for it."""
        with suppress(OSError):
            if self._lock is not None and {path.name for path in self.path.iterdir()} <= {_LOCK}:
                (self.path / _LOCK).unlink()
        self._close()
        for folder in self._created:
            with suppress(OSError):  # not empty
                folder.rmdir()

    def _close(self) -> None:
        if self._lock is not None:
            self._lock.close()  # the lock goes with the file, also when the process is killed
            self._lock = None

    def write_yaml(self, name: str, value: Any) -> None:
        """Write YAML.

        Raises:
            RunFolderError: it cannot be written.
        """
        write_text(self.path / name, yaml.safe_dump(value, sort_keys=False))

    def start_steps(self, last_step: int) -> None:
        """Keep only the rows of steps up to ``last_step``: later steps are computed again.

        Raises:
            RunFolderError: it cannot be written.
        """
        path = self.path / "steps.csv"
        rows: list[list[str]] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8", errors="replace") as file:
                reader = csv.reader(file)
                header = next(reader, [])
                # A row that the crash cut short has fewer cells; one of an earlier version has fewer columns.
                whole = [dict(zip(header, row, strict=True)) for row in reader if len(row) == len(header)]
                whole = _count_epochs_from_one(whole)
                kept = [row for row in whole if row.get("step", "").isdigit() and int(row["step"]) <= last_step]
                rows = [[row.get(name, "") for name in _STEP_COLUMNS] for row in kept]
        with atomic_write_with_parents(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([_STEP_COLUMNS, *rows])

    def add_step(self, row: Mapping[str, Any]) -> None:
        """Append a row to steps.csv.

        Raises:
            RunFolderError: it cannot be written.
        """
        try:
            with (self.path / "steps.csv").open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow([_cell(row[name]) for name in _STEP_COLUMNS])
        except OSError as error:
            raise RunFolderError(
                f"cannot write {self.path / 'steps.csv'}: {error.strerror}. The last checkpoint is complete: make room and start the same "
                "command again."
            ) from error

    def write_epochs(self, epochs: Sequence[Mapping[str, Any]]) -> None:
        """Write metrics.csv.

        Raises:
            RunFolderError: it cannot be written.
        """
        columns = list(dict.fromkeys(name for epoch in epochs for name in epoch))
        with atomic_write_with_parents(self.path / "metrics.csv") as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *([_cell(epoch.get(name, "")) for name in columns] for epoch in epochs)])

    def add_damage(self, tiles: Mapping[str, Sequence[BadTile]]) -> int:
        """Note filled tiles in damaged.csv; see :func:`append_bad_tiles`."""
        return append_bad_tiles(self.path / "damaged.csv", tiles)


class NullRunFolder(RunFolder):
    """Run folder of the ranks that do not write: the first rank writes it, possibly on another machine.

    Args:
        path: of the folder on the first rank.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.checkpoints = _NullCheckpointFolder(path / "checkpoints")

    def __enter__(self) -> NullRunFolder:
        return self

    def write_yaml(self, name: str, value: Any) -> None:
        pass

    def start_steps(self, last_step: int) -> None:
        pass

    def add_step(self, row: Mapping[str, Any]) -> None:
        pass

    def write_epochs(self, epochs: Sequence[Mapping[str, Any]]) -> None:
        pass

    def add_damage(self, tiles: Mapping[str, Sequence[BadTile]]) -> int:
        return 0


class _NullCheckpointFolder(CheckpointFolder):
    def save(self, kind: str, number: int, model: nn.Module, state: Mapping[str, Any], *, keep: int) -> Path:
        return self.path


def append_bad_tiles(path: Path, tiles: Mapping[str, Sequence[BadTile]]) -> int:
    """Add filled tiles, by slide, to a table; existing rows stay and are not repeated.

    Returns:
        Number of tiles in the table; 0 if the table does not exist.

    Raises:
        RunFolderError: it cannot be written.
    """
    before: dict[tuple[str, ...], str] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            before = {tuple(row[:-1]): row[-1] for row in list(csv.reader(file))[1:]}
    filled = {
        tuple(map(str, (name, tile.level, tile.x, tile.y, tile.width_px, tile.height_px))): " ".join(tile.reason.split())
        for name, some in tiles.items()
        for tile in some
    }
    if not filled.keys() <= before.keys():
        rows = sorted({**before, **filled}.items(), key=lambda row: (row[0][0], *map(int, row[0][1:])))
        write_csv(path, _DAMAGE_COLUMNS, [[*place, reason] for place, reason in rows])
    return len({**before, **filled})


def _count_epochs_from_one(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows of steps.csv; files of earlier versions count epochs from 0."""
    if not any(row.get("epoch") == "0" for row in rows):
        return rows
    return [{**row, "epoch": str(int(row["epoch"]) + 1)} if row.get("epoch", "").isdigit() else row for row in rows]


def _cell(value: Any) -> Any:
    return repr(value) if isinstance(value, float) else value
