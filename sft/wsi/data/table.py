"""Slide table: a CSV file with one row per slide; all of its mistakes are reported at once.

Columns have the names of published tables (`ALIASES`). Paths of slides are relative to the folder of the table, or to a root. With a root,
files outside of it are refused; without one, ``..`` is refused: a foreign table must not choose files from the full disk. The extension of
a slide may be left out if one file of the folder matches. A cell of several paths, separated by semicolons, is one image.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from sft.common.errors import some_names
from sft.common.legacy_names import restore_fields
from sft.common.process_lock import gc_paused
from sft.common.untrusted.foreign_files import require_regular_file
from sft.wsi.config import TaskConfig, TaskKind
from sft.wsi.data.table_files import TableFiles
from sft.wsi.data_config import MAX_MPP
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
_FLAGS = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}
_MAX_BYTES = 256 * 2**20
_MAX_ROWS = 2_000_000
#: More labels are names or values, and a row of a multilabel table would have as many targets.
_MAX_CLASSES = 10_000
_WHOLE = re.compile("-?[0-9]+")
#: Sums of squares of numbers below this are numbers, too.
_LARGEST = 1e100
#: Texts of pandas, R and spreadsheets for a missing value.
_MISSING = frozenset({"nan", "na", "n/a", "<na>", "#n/a", "null"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideRecord:
    """One row of the slide table.

    Attributes:
        name: of the slide, once in a table, fit for a file name.
        path: of its file; of the first, where several files are one image.
        target: class index; a 0 or 1 for each class (multilabel); a value (regression); time and event (survival). None for segmentation
            and for rows without a target.
        patient: name of the patient; the slide's name if the table has none.
        split: if the table has one.
        mpp: micrometres per px of the largest level, if the table has it; it overrides the file's value.
        mask: label map (segmentation) or tissue mask (other tasks).
        row: line of the file, for messages.
        further_paths: further files of the image.
    """

    name: str
    path: Path
    target: tuple[float, ...] | None
    patient: str
    split: Split | None
    mpp: float | None
    mask: Path | None
    row: int
    further_paths: tuple[Path, ...] = ()

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Restore a pickle; one of an older release lacks the last field."""
        restore_fields(self, state)

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files of the image."""
        return (self.path, *self.further_paths)


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
            if all(path.is_file() for path in record.paths):
                sizes[record.name] = sum(path.stat().st_size for path in record.paths)
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
    with gc_paused():  # a row is some objects, and the collector would visit all of them again and again
        return _read(path, task, root, needs_targets)


def _read(path: Path, task: TaskConfig, root: Path | None, needs_targets: bool) -> SlideTable:
    if root is not None and not root.is_dir():
        raise DatasetError(
            str(path), [f"--data.slides {root} is {'no folder' if root.exists() else 'missing'}; give the folder of the slides"]
        )
    header, rows = _parse(path)
    problems: list[str] = []
    columns = _columns(header, task.kind, needs_targets, problems)
    if problems:
        raise DatasetError(str(path), problems)
    cells: list[tuple[int, dict[str, str]]] = []
    for number, row in rows:
        if len(row) != len(header):
            remedy = "quote cells that hold the separator" if len(row) > len(header) else "add the cells that are missing, also empty ones"
            problems.append(f"line {number}: {len(row)} cells under {len(header)} columns; {remedy}")
            continue
        cells.append((number, {name: row[index].strip() for name, index in columns.items()}))
    if not cells and not problems:
        problems.append("no slides; add a row for each")
    classes = _classes(task, [cell.get("label", "") for _, cell in cells])
    if len(classes) > _MAX_CLASSES:
        problems.append(
            f"{len(classes):,} different labels are not classes ({some_names(classes)}); give their column, or task.kind regression"
        )
        raise DatasetError(str(path), problems)
    if task.classes is None:
        problems += [
            f"line {number}: label {cell['label']!r} is what programs write for one that is missing; leave the cell empty, or "
            "name the class in task.classes"
            for number, cell in cells
            if classes and any(label.strip().lower() in _MISSING for label in cell.get("label", "").split(";"))
        ]
    files = TableFiles(path, root)
    numbers = {name: index for index, name in enumerate(classes)}
    records = [_record(number, cell, task.kind, numbers, files, needs_targets, problems) for number, cell in cells]
    _check_files(cells, files, problems)
    _check_patients(records, problems)
    if problems:
        raise DatasetError(str(path), problems)
    return SlideTable(records=tuple(_name_records(records)), classes=classes)


def _parse(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    try:
        require_regular_file(path)
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise DatasetError(str(path), [f"more than {_MAX_BYTES} bytes are too many for a table of slides; give the CSV file"])
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise DatasetError(str(path), [f"cannot be read: {error.strerror}; check the path"]) from error
    except UnicodeDecodeError as error:
        raise DatasetError(str(path), [f"byte {error.start} is not UTF-8; save the table as CSV UTF-8"]) from error
    if "\0" in text:
        raise DatasetError(str(path), ["holds zero bytes; save the table as CSV UTF-8"])
    first = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=first.count)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows = ((reader.line_num, row) for row in reader if any(cell.strip() for cell in row))
        lines = list(islice(rows, _MAX_ROWS + 2))
    except csv.Error as error:
        raise DatasetError(str(path), [f"line {reader.line_num}: {error}; close the quotes, or shorten the cell"]) from error
    if len(lines) > _MAX_ROWS + 1:
        raise DatasetError(str(path), [f"more than {_MAX_ROWS:,} rows are too many for a table of slides; give the CSV file"])
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
            problems.append(f"no column event (1: it happened, 0: censored); columns are {some_names(header)}")
    for name in needed:
        if name not in columns:
            problems.append(f"no column {name} (or {', '.join(ALIASES[name][1:4])}, ...); columns are {some_names(header)}")
    return columns


def _classes(task: TaskConfig, labels: Sequence[str]) -> tuple[str, ...]:
    if task.classes is not None:
        return tuple(task.classes)
    if task.kind == "classification":
        names = {label for label in labels if label}
    elif task.kind == "multilabel":
        names = {name_text.strip() for label in labels for name_text in label.split(";") if name_text.strip()}
    else:
        return ()
    numeric = all(_WHOLE.fullmatch(name) for name in names)
    return tuple(sorted(names, key=(lambda name: (int(name), name)) if numeric else (lambda name: (0, name))))


def _record(
    number: int,
    cell: Mapping[str, str],
    kind: TaskKind,
    classes: Mapping[str, int],
    files: TableFiles,
    needs_targets: bool,
    problems: list[str],
) -> SlideRecord:
    def add(text: str) -> None:
        problems.append(f"line {number}: {text}")

    slides = files.locate_all(cell["slide"], "slide")
    mask = files.locate(cell["mask"], "mask") if cell.get("mask") else None
    for file in (*slides, mask):
        if file is not None and file.problem:
            add(file.problem)
    if kind == "segmentation" and needs_targets and mask is None:
        add(f"slide {cell['slide']!r} has no mask; give the file of its label map")
    split = None
    if cell.get("split"):
        split = _SPLITS.get(cell["split"].lower())
        if split is None:
            add(f"split {cell['split']!r} is not one of train, val, test")
    if cell.get("patient", "").lower() in _MISSING:
        add(f"patient {cell['patient']!r} is what programs write for one that is missing; leave the cell empty, or name the patient")
    mpp = _number(cell.get("mpp", ""), "mpp", add)
    if mpp is not None and not 0 < mpp < MAX_MPP:
        add(f"mpp {cell['mpp']} is not a number of micrometres per pixel")
        mpp = None
    return SlideRecord(
        name=cell["slide"],
        path=slides[0].path,
        target=_target(cell, kind, classes, needs_targets, add),
        patient=cell.get("patient") or "",
        split=split,
        mpp=mpp,
        mask=None if mask is None else mask.path,
        row=number,
        further_paths=tuple(file.path for file in slides[1:]),
    )


def _target(cell: Mapping[str, str], kind: TaskKind, classes: Mapping[str, int], needed: bool, add: _Add) -> tuple[float, ...] | None:
    if kind == "segmentation":
        return ()
    if kind in ("cox", "hazard"):
        time = _number(cell.get("time", ""), "time", add)
        is_event = bool(cell.get("event"))
        flag = cell.get("event") or cell.get("censored", "")
        event = _FLAGS.get(flag.lower())
        if (needed and time is None) or (time is not None and time < 0):
            add(f"time {cell.get('time', '')!r} is not a time of at least 0")
        if event is not None and is_event and cell.get("censored") and _FLAGS.get(cell["censored"].lower()) == event:
            add(f"event {flag!r} and censored {cell['censored']!r} contradict each other; leave out one of the columns")
        if (needed or flag) and event is None:
            is_asked = is_event or "censored" not in cell
            add(f"event {flag!r} is neither 1 (it happened) nor 0 (censored)" if is_asked else f"censored {flag!r} is neither 1 nor 0")
        return None if time is None or event is None else (time, event if is_event else 1 - event)
    text = cell.get("label", "")
    if kind == "multilabel" and "label" in cell:
        names = {label.strip() for label in text.split(";") if label.strip()}
        unknown = sorted(names - classes.keys())
        if unknown:
            add(f"label {some_names(unknown)} is not one of {some_names(classes)}")
        return tuple(float(name in names) for name in classes)
    if not text:
        if needed:
            add(f"slide {cell['slide']!r} has no label")
        return None
    if kind == "regression":
        value = _number(text, "label", add)
        return None if value is None else (value,)
    if text not in classes:
        add(f"label {text!r} is not one of {some_names(classes)}")
        return None
    return (float(classes[text]),)


def _number(text: str, what: str, add: _Add) -> float | None:
    if not text:
        return None
    try:
        value = math.nan if "_" in text else float(text)  # Python also reads 1_000
    except ValueError:
        value = math.nan
    if not abs(value) < _LARGEST:
        add(f"{what} {text!r} is not a number")
        return None
    return value


def _check_files(cells: Sequence[tuple[int, Mapping[str, str]]], files: TableFiles, problems: list[str]) -> None:
    """Refuse duplicate files."""
    lines: dict[tuple[tuple[int, int] | str, ...], int] = {}
    for number, cell in cells:
        if not cell["slide"]:
            continue
        slides = files.locate_all(cell["slide"], "slide")
        first = lines.setdefault(tuple(file.identity for file in slides), number)
        if first != number:
            problems.append(f"line {number}: slide {slides[0].path.name} is on line {first} already; leave one")


def _name_records(records: Sequence[SlideRecord]) -> list[SlideRecord]:
    """Give each slide a name that is a file name; a slide without a patient is one of its own."""
    stems = Counter(safe_name(record.path.stem) for record in records)
    named, used_names = [], set[str]()
    for record in records:
        stem = safe_name(record.path.stem)
        name = stem if stems[stem] == 1 else safe_name(record.name)
        while name in used_names:
            name = f"{name}-{record.row}"
        used_names.add(name)
        named.append(replace(record, name=name, patient=record.patient or name))
    return named


def _check_patients(records: Sequence[SlideRecord], problems: list[str]) -> None:
    splits: dict[str, dict[Split, int]] = {}
    for record in records:
        if record.split is not None and record.patient:
            splits.setdefault(record.patient, {}).setdefault(record.split, record.row)
    for patient, rows in splits.items():
        if len(rows) > 1:
            where = ", ".join(f"{split} (line {row})" for split, row in rows.items())
            problems.append(f"patient {patient!r} is in {where}; keep a patient in one split")
    without = [str(record.row) for record in records if record.split is None]
    if len(without) not in (0, len(records)):
        problems.append(f"line {', '.join(without[:10])}: no split, while other lines have one; fill the column, or leave it out")
