"""Files that the cells of a slide table name, each looked up once: tables repeat names, and folders may be on a network."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from sft.common.untrusted.foreign_files import shortened

__all__ = ["SEPARATOR", "TableFile", "TableFiles"]

#: Separator of the files of one image.
SEPARATOR = ";"
_EXTENSIONS = (".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".dcm", ".czi", ".svslide", ".zarr", ".npy")


@dataclass(frozen=True, slots=True)
class TableFile:
    """File named by a cell.

    Attributes:
        path: of the file; as written in the cell, if there is none.
        identity: equal for all paths and links to a file: device and inode, or a path.
        problem: why it cannot be used; empty if it can.
    """

    path: Path
    identity: tuple[int, int] | str
    problem: str


class TableFiles:
    """Files of a table.

    Args:
        table: path of the table.
        root: folder that the files are relative to, and must lie in. None for the table's own folder.
    """

    def __init__(self, table: Path, root: Path | None) -> None:
        self._root, self._base = root, os.path.abspath(root or table.parent)
        self._located: dict[tuple[str, str], TableFile] = {}
        self._folders: dict[str, dict[str, list[str]]] = {}

    def locate(self, text: str, column: str) -> TableFile:
        """File named by a cell of a column."""
        key = text, column
        located = self._located.get(key)
        if located is None:
            located = self._located[key] = self._look_up(text, column)
        return located

    def locate_all(self, text: str, column: str) -> tuple[TableFile, ...]:
        """Files named by a cell of a column: one, or several that are separated by semicolons and are one image."""
        whole = self.locate(text, column)
        parts = [name.strip() for name in text.split(SEPARATOR)]
        return (whole,) if not whole.problem or len(parts) < 2 else tuple(self.locate(name, column) for name in parts)

    def _look_up(self, text: str, column: str) -> TableFile:
        def refused(problem: str) -> TableFile:
            return TableFile(Path(text), path, f"{column} {problem}")

        is_name = os.sep not in text and text not in (".", "..")
        path = f"{self._base}{os.sep}{text}" if is_name else os.path.normpath(os.path.join(self._base, text))
        if not text:
            return TableFile(Path(text), path, f"no {column}; give its file")
        if not is_name and (self._root is not None or not os.path.isabs(text)):
            is_inside = path == self._base or path.startswith(os.path.join(self._base, ""))
            if not is_inside:
                return refused(f"{shortened(text)!r} is outside of {self._base}; move it there, or give another --data.slides")
        facts = self._facts(path)
        if facts is None:
            folder, name = os.path.split(path)
            fits = self._entries(folder).get(name, [])
            if len(fits) != 1:
                reason = f"could be {', '.join(fits)}" if fits else "is missing"
                return refused(f"{shortened(path)} {reason}; check the name and --data.slides")
            path = os.path.join(folder, fits[0])
            facts = self._facts(path)
        if facts is None or not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):
            return refused(f"{shortened(path)} is neither a file nor a folder; give the file of a slide")
        if stat.S_ISREG(facts.st_mode) and facts.st_size == 0:
            return refused(f"{shortened(path)} has no bytes; copy it again")
        if not os.access(path, os.R_OK):
            return refused(f"{shortened(path)} may not be read; change its permissions")
        return TableFile(Path(path), (facts.st_dev, facts.st_ino) if facts.st_ino else os.path.realpath(path), "")

    def _facts(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(path)
        except (OSError, ValueError):  # a name may be too long for one
            return None

    def _entries(self, folder: str) -> dict[str, list[str]]:
        """Names in a folder by the name without an extension of slides; none if it cannot be listed."""
        entries = self._folders.get(folder)
        if entries is None:
            entries = self._folders[folder] = {}
            try:
                names = os.listdir(folder)
            except OSError:
                names = []
            for extension in _EXTENSIONS:
                for name in names:
                    if name.endswith(extension):
                        entries.setdefault(name.removesuffix(extension), []).append(name)
        return entries
