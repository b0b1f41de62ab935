"""Files of a run folder: written atomically (`sft.common.atomic_files`); partial files of a crash are removed by the next run."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from sft.common.atomic_files import PARTIAL_MARK, atomic_write, fsync_file, fsync_folder
from sft.wsi.errors import RunFolderError

__all__ = [
    "atomic_write_with_parents",
    "clear_partial",
    "counted",
    "safe_name",
    "safe_names",
    "sync_tree",
    "write_csv",
    "write_json",
    "write_text",
]

#: File systems end at 255 bytes; four for a character, and room for a prefix and a suffix.
_MAX_NAME_CHARACTERS = 50


def atomic_write_with_parents(path: Path) -> AbstractContextManager[Path]:
    """Context manager that writes a file atomically and creates its folders: see `sft.common.atomic_files.atomic_write`.

    Raises:
        RunFolderError: it cannot be written; ``path`` is unchanged.
    """
    remedy = "Make room, or give a folder that can be written."
    return atomic_write(path, parents=True, refusal=RunFolderError, remedy=remedy)


def sync_tree(folder: Path) -> None:
    """Flush every file of a folder, and the folder, to the disk."""
    for path in sorted(folder.iterdir()):
        fsync_file(path)
    fsync_folder(folder)


def clear_partial(folder: Path) -> None:
    """Remove partial files of an interrupted run."""
    for path in folder.glob(f"{PARTIAL_MARK}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text."""
    with atomic_write_with_parents(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON."""
    write_text(path, json.dumps(value, indent=2, allow_nan=True) + "\n")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table; floats in as many digits as bring the same number back."""
    with atomic_write_with_parents(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([repr(value) if isinstance(value, float) else value for value in row] for row in rows)


def counted(count: int, one: str, several: str) -> str:
    """A number with its noun.

    >>> counted(1, "slide was", "slides were"), counted(0, "slide was", "slides were")
    ('1 slide was', '0 slides were')
    """
    return f"{count} {one if count == 1 else several}"


def safe_name(text: str) -> str:
    """A file name made of a slide's name.

    >>> safe_name("a/b: c.svs"), safe_name("..")
    ('a_b_c.svs', '_')
    """
    safe_text = "".join(character if character.isalnum() or character in "-." else "_" for character in text)
    while "__" in safe_text:
        safe_text = safe_text.replace("__", "_")
    return safe_text if safe_text.strip(".") else "_"


def safe_names(texts: Sequence[str]) -> list[str]:
    """File-name components for arbitrary labels; numbered if two would be the same file on some system.

    >>> safe_names(["grade 3/4", "grade 5"]), safe_names(["a/b", "A b", "c"])
    (['grade_3_4', 'grade_5'], ['a_b-0', 'A_b-1', 'c-2'])
    """
    names = [safe_name(text)[:_MAX_NAME_CHARACTERS] for text in texts]
    if len({name.casefold() for name in names}) == len(names):
        return names
    return [f"{name}-{number}" for number, name in enumerate(names)]
