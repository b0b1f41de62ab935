"""Slide table: a CSV file with one row per slide, whose mistakes are all reported at once.

Columns have the names of published tables (`ALIASES`). Paths of slides are relative to the folder of the table, or to a root. With a root,
files outside of it are refused; without one, ``..`` is refused: a foreign table must not choose files from the full disk. The extension of
a slide may be left out if one file of the folder matches.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from sft.wsi.config import TaskConfig, TaskKind
from sft.wsi.errors import DatasetError
from sft.wsi.run.files import safe_name

__all__ = ["ALIASES", "SlideRecord", "SlideTable", "Split", "file_bytes", "read_table"]

Split = Literal["train", "val", "test"]
_Add = Callable[[str], None]

#: Names of a column; the first is the one that wins where a table has several.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "slide": (
        "slide",
        "slide_id",
        "slide_name",
        "slide_path",
        "wsi",
        "image",
        "image_id",
        "filename",
        "file",
        "file_name",
        "path",
        "filepath",
        "name",
    ),
    "label": ("label", "target", "class", "class_id", "type", "diagnosis", "isup_grade", "y"),
    "patient": ("patient", "patient_id", "case", "case_id", "subject", "subject_id"),
    "split": ("split", "set", "subset", "partition"),
    "mpp": ("mpp", "um_per_px", "microns_per_pixel"),
    "mask": ("mask", "mask_path", "segmentation"),
    "time": ("time", "survival_time", "survival_months", "months", "days", "os_time", "duration"),
    "event": ("event", "event_observed", "os_event", "status"),
    "censored": ("censored", "censorship"),
}
_SPLITS: Mapping[str, Split] = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "tune": "val",
    "test": "test", "testing": "test", "holdout": "test",
}  # fmt: skip
_EXTENSIONS = (".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".dcm", ".czi", ".svslide", ".zarr", ".npy")
_FLAGS = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}
_MAX_BYTES = 256 * 2**20
_WHOLE = re.compile("-?[0-9]+")
#: Sums of squares of numbers below this are numbers, too.
_LARGEST = 1e100
#: What pandas, R and spreadsheets write for a value that is missing.
_MISSING = frozenset({"nan", "na", "n/a", "<na>", "#n/a", "null"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideRecord:
    """One row of the slide table.

    Attributes:
        name: of the slide, once in a table, fit for a file name.
        path: of its file.
        target: class index; a 0 or 1 for each class (multilabel); a value (regression); time and event (survival). None for segmentation
            and for rows without a target.
        patient: name of the patient; the slide's name if the table has none.
        split: if the table has one.
        mpp: micrometres per px of the largest level, if the table has it; it overrides the file's value.
        mask: label map (segmentation) or tissue mask (other tasks).
        row: line of the file, for messages.
    """

    name: str
    path: Path
    target: tuple[float, ...] | None
    patient: str
    split: Split | None
    mpp: float | None
    mask: Path | None
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideTable:
    """All rows, and the classes that their targets count in."""

    records: tuple[SlideRecord, ...]
    classes: tuple[str, ...]

    def digest(self) -> str:
        """Digest of the table without the places of files; masks enter with their contents."""
        rows = [(r.name, r.target, r.patient, r.split, r.mpp, *([] if r.mask is None else [_mask_digest(r.mask)])) for r in self.records]
        return hashlib.sha256(json.dumps([rows, self.classes]).encode()).hexdigest()


def file_bytes(table: SlideTable) -> dict[str, int]:
    """Sizes of the slides' files by name; 0 for folders and for unreadable files."""
    sizes: dict[str, int] = {}
    for record in table.records:
        with suppress(OSError):
            if record.path.is_file():
                sizes[record.name] = record.path.stat().st_size
    return sizes


def _mask_digest(path: Path) -> str:
    """Digest of a file's contents; empty for an unreadable file, which is reported when it is opened."""
    try:
        facts = path.stat()
        return _digest_of(path, facts.st_mtime_ns, facts.st_size)
    except OSError:
        return ""


@cache  # a run asks for it at each checkpoint
def _digest_of(path: Path, mtime_ns: int, num_bytes: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_table(path: Path, task: TaskConfig, *, root: Path | None = None, needs_targets: bool = True) -> SlideTable:
    """Read and check a table.

    Args:
        path: the CSV file: UTF-8 with or without a mark, separated by commas, semicolons or tabs.
        task: meaning of the labels.
        root: folder that slides are relative to. Default: `None` (that of the table)
        needs_targets: True if every row must have a target.

    Raises:
        DatasetError: all problems of the table.
    """
    header, rows = _parse(path)
    problems: list[str] = []
    columns = _columns(header, task.kind, needs_targets, problems)
    if problems:
        raise DatasetError(str(path), problems)
    cells: list[tuple[int, dict[str, str]]] = []
    for number, row in rows:
        if len(row) != len(header):
            problems.append(f"line {number}: {len(row)} cells under {len(header)} columns; quote cells that hold the separator")
            continue
        cells.append((number, {name: row[index].strip() for name, index in columns.items()}))
    if not cells and not problems:
        problems.append("no slides; add a row for each")
    classes = _classes(task, [cell.get("label", "") for _, cell in cells])
    if task.classes is None:
        problems += [
            f"line {number}: label {cell['label']!r} is what programs write for one that is missing; leave the cell empty, or "
            "name the class in task.classes"
            for number, cell in cells
            if classes and any(part.strip().lower() in _MISSING for part in cell.get("label", "").split(";"))
        ]
    records = [_record(number, cell, task.kind, classes, path, root, needs_targets, problems) for number, cell in cells]
    records = _name_records(records, problems)
    _check_patients(records, problems)
    if problems:
        raise DatasetError(str(path), problems)
    return SlideTable(records=tuple(records), classes=classes)


def _parse(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    try:
        num_bytes = path.stat().st_size
        if num_bytes > _MAX_BYTES:
            raise DatasetError(str(path), [f"{num_bytes} bytes are no table of slides; give the CSV file"])
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DatasetError(str(path), [f"cannot be read: {error.strerror}; check the path"]) from error
    except UnicodeDecodeError as error:
        raise DatasetError(str(path), [f"byte {error.start} is no UTF-8; save the table as CSV UTF-8"]) from error
    if "\0" in text:
        raise DatasetError(str(path), ["holds zero bytes; save the table as CSV UTF-8"])
    first = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=first.count)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        lines = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise DatasetError(str(path), [f"line {reader.line_num}: {error}; close the quotes"]) from error
    if not lines:
        raise DatasetError(str(path), ["empty; write a header and a row for each slide"])
    return [cell.strip() for cell in lines[0][1]], lines[1:]


def _columns(header: Sequence[str], kind: TaskKind, needs_targets: bool, problems: list[str]) -> dict[str, int]:
    lowered = [cell.lower() for cell in header]
    columns: dict[str, int] = {}
    for name, aliases in ALIASES.items():
        present = [alias for alias in aliases if alias in lowered]
        if present:
            columns[name] = lowered.index(present[0])
            if lowered.count(present[0]) > 1:
                problems.append(f"column {present[0]!r} is there {lowered.count(present[0])} times; leave one")
    needed = ["slide"]
    if needs_targets:
        needed += ["time"] if kind in ("cox", "hazard") else ["mask"] if kind == "segmentation" else ["label"]
        if kind in ("cox", "hazard") and not {"event", "censored"} & set(columns):
            problems.append(f"no column event (1: it happened, 0: censored); columns are {', '.join(header)}")
    for name in needed:
        if name not in columns:
            problems.append(f"no column {name} (or {', '.join(ALIASES[name][1:4])}, ...); columns are {', '.join(header)}")
    return columns


def _classes(task: TaskConfig, labels: Sequence[str]) -> tuple[str, ...]:
    if task.classes is not None:
        return tuple(task.classes)
    if task.kind == "classification":
        names = {label for label in labels if label}
    elif task.kind == "multilabel":
        names = {part.strip() for label in labels for part in label.split(";") if part.strip()}
    else:
        return ()
    numeric = all(_WHOLE.fullmatch(name) for name in names)
    return tuple(sorted(names, key=(lambda name: (int(name), name)) if numeric else (lambda name: (0, name))))


def _record(
    number: int,
    cell: Mapping[str, str],
    kind: TaskKind,
    classes: tuple[str, ...],
    table: Path,
    root: Path | None,
    needs_targets: bool,
    problems: list[str],
) -> SlideRecord:
    def add(text: str) -> None:
        problems.append(f"line {number}: {text}")

    path = _locate(cell["slide"], "slide", table, root, add)
    mask = _locate(cell["mask"], "mask", table, root, add) if cell.get("mask") else None
    if kind == "segmentation" and needs_targets and mask is None and not cell.get("mask"):
        add(f"slide {cell['slide']!r} has no mask; give the file of its label map")
    split = None
    if cell.get("split"):
        split = _SPLITS.get(cell["split"].lower())
        if split is None:
            add(f"split {cell['split']!r} is none of train, val, test")
    if cell.get("patient", "").lower() in _MISSING:
        add(f"patient {cell['patient']!r} is what programs write for one that is missing; leave the cell empty, or name the patient")
    mpp = _number(cell.get("mpp", ""), "mpp", add)
    if mpp is not None and not 0 < mpp < 1000:
        add(f"mpp {cell['mpp']} is no number of micrometres per pixel")
        mpp = None
    return SlideRecord(
        name=cell["slide"],
        path=path or Path(cell["slide"]),
        target=_target(cell, kind, classes, needs_targets, add),
        patient=cell.get("patient") or "",
        split=split,
        mpp=mpp,
        mask=mask,
        row=number,
    )


def _locate(text: str, what: str, table: Path, root: Path | None, add: _Add) -> Path | None:
    """File named by a cell, or None after recording the problem."""
    if not text:
        add(f"no {what}; give its file")
        return None
    given, base = Path(text), Path(os.path.abspath(root or table.parent))
    path = Path(os.path.normpath(base / given))
    if (root is not None or not given.is_absolute()) and not path.is_relative_to(base):
        add(f"{what} {text!r} is outside of {base}; move it there, or give another --data.slides")
        return None
    if not os.path.exists(path):  # and not Path.exists, which raises where a name is too long for one
        fits = [fit for extension in _EXTENSIONS if os.path.exists(fit := path.with_name(path.name + extension))]
        if len(fits) != 1:
            why = f"could be {', '.join(fit.name for fit in fits)}" if fits else "is missing"
            add(f"{what} {path} {why}; check the name and --data.slides")
            return None
        path = fits[0]
    if path.is_file() and path.stat().st_size == 0:
        add(f"{what} {path} has no bytes; copy it again")
        return None
    if not os.access(path, os.R_OK):
        add(f"{what} {path} may not be read; change its permissions")
        return None
    return path


def _target(cell: Mapping[str, str], kind: TaskKind, classes: tuple[str, ...], needed: bool, add: _Add) -> tuple[float, ...] | None:
    if kind == "segmentation":
        return ()
    if kind in ("cox", "hazard"):
        time = _number(cell.get("time", ""), "time", add)
        is_event = bool(cell.get("event"))
        flag = cell.get("event") or cell.get("censored", "")
        event = _FLAGS.get(flag.lower())
        if (needed and time is None) or (time is not None and time < 0):
            add(f"time {cell.get('time', '')!r} is no time of at least 0")
        if event is not None and is_event and cell.get("censored") and _FLAGS.get(cell["censored"].lower()) == event:
            add(f"event {flag!r} and censored {cell['censored']!r} contradict each other; leave out one of the columns")
        if (needed or flag) and event is None:
            is_asked = is_event or "censored" not in cell
            add(f"event {flag!r} is neither 1 (it happened) nor 0 (censored)" if is_asked else f"censored {flag!r} is neither 1 nor 0")
        return None if time is None or event is None else (time, event if is_event else 1 - event)
    text = cell.get("label", "")
    if kind == "multilabel" and "label" in cell:
        parts = {part.strip() for part in text.split(";") if part.strip()}
        unknown = sorted(parts - set(classes))
        if unknown:
            add(f"label {', '.join(unknown)} is none of {', '.join(classes)}")
        return tuple(float(name in parts) for name in classes)
    if not text:
        if needed:
            add(f"slide {cell['slide']!r} has no label")
        return None
    if kind == "regression":
        value = _number(text, "label", add)
        return None if value is None else (value,)
    if text not in classes:
        add(f"label {text!r} is none of {', '.join(classes)}")
        return None
    return (float(classes.index(text)),)


def _number(text: str, what: str, add: _Add) -> float | None:
    if not text:
        return None
    try:
        value = math.nan if "_" in text else float(text)  # Python reads 1_000, which nobody means
    except ValueError:
        value = math.nan
    if not abs(value) < _LARGEST:
        add(f"{what} {text!r} is no number")
        return None
    return value


def _name_records(records: Sequence[SlideRecord], problems: list[str]) -> list[SlideRecord]:
    """Give each slide a name that is a file name; refuse duplicate files."""
    lines: dict[object, int] = {}
    for record in records:
        file = _file_identity(record.path)
        if file in lines:
            problems.append(f"line {record.row}: slide {record.path.name} is on line {lines[file]} already; leave one")
        lines.setdefault(file, record.row)
    stems = Counter(safe_name(record.path.stem) for record in records)
    named, taken = [], set[str]()
    for record in records:
        name = safe_name(record.path.stem if stems[safe_name(record.path.stem)] == 1 else record.name)
        while name in taken:
            name = f"{name}-{record.row}"
        taken.add(name)
        named.append(
            SlideRecord(
                name=name,
                path=record.path,
                target=record.target,
                patient=record.patient or name,
                split=record.split,
                mpp=record.mpp,
                mask=record.mask,
                row=record.row,
            )
        )
    return named


def _file_identity(path: Path) -> object:
    """Identity of a file, equal for all paths and links to it."""
    try:
        facts = path.stat()
    except OSError:
        return path
    return (facts.st_dev, facts.st_ino) if facts.st_ino else path.resolve()


def _check_patients(records: Sequence[SlideRecord], problems: list[str]) -> None:
    splits: dict[str, dict[Split, int]] = {}
    for record in records:
        if record.split is not None:
            splits.setdefault(record.patient, {}).setdefault(record.split, record.row)
    for patient, rows in splits.items():
        if len(rows) > 1:
            where = ", ".join(f"{split} (line {row})" for split, row in rows.items())
            problems.append(f"patient {patient!r} is in {where}; keep a patient in one split")
    without = [str(record.row) for record in records if record.split is None]
    if splits and without:
        problems.append(f"line {', '.join(without[:10])}: no split, while other lines have one; fill the column, or leave it out")
