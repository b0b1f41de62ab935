"""Files that are whole or not there, whatever happens while they are written.

Everything is written under another name beside its target, flushed to the disk, and renamed. A crash leaves the target as it was,
and at most a file (or folder) whose name begins with ``.partial-``, which the next run removes.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sft.wsi.errors import RunFolderError

__all__ = ["PARTIAL", "clear_partial", "replacing", "safe_name", "sync_folder", "sync_tree", "write_csv", "write_json", "write_text"]

#: How names of unfinished files and folders begin.
PARTIAL = ".partial-"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside ``path``; what the block writes there takes the place of ``path`` if the block succeeds.

    Raises:
        RunFolderError: it cannot be written; ``path`` is as it was.
    """
    temporary = path.with_name(f"{PARTIAL}{os.getpid()}-{path.name}")  # the suffix stays last: image writers look at it
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        if isinstance(error, RunFolderError):
            raise
        raise RunFolderError(
            f"cannot write {path}: {error.strerror or error}. Make room, or give a run folder that is writable."
        ) from error
    finally:
        temporary.unlink(missing_ok=True) if temporary.parent.is_dir() else None


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush every file of a folder, and the folder, to the disk."""
    for path in sorted(folder.iterdir()):
        _sync(path)
    sync_folder(folder)


def clear_partial(folder: Path) -> None:
    """Remove what an interrupted run left unfinished."""
    for path in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people."""
    write_text(path, json.dumps(value, indent=2, allow_nan=True) + "\n")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table; floats in as many digits as bring the same number back."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([repr(value) if isinstance(value, float) else value for value in row] for row in rows)


def safe_name(text: str) -> str:
    """A file name made of a slide's name.

    >>> safe_name("a/b: c.svs"), safe_name("..")
    ('a_b_c.svs', '_')
    """
    kept = "".join(character if character.isalnum() or character in "-." else "_" for character in text)
    while "__" in kept:
        kept = kept.replace("__", "_")
    return kept if kept.strip(".") else "_"


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
