"""Tables of what was measured to be fastest: for one GPU and one Triton, an entry for each class of operations.

An entry is there only because the kernel was right: `TableEntry` holds the error against fp64 that it was accepted with, and refuses one
above the limit of its numbers and above ATen's own. So a class without an entry (never measured, or measured to be wrong) runs by ATen. A
table is for one name of a GPU and one version of Triton and its assembler, which decide both what a kernel costs and whether it is right;
another version's table is not looked at.

A file is JSON: a heading, and a list of entries. It is written beside its place and renamed, so there is never half a table.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from sft.backends.selector import NumberFormat, ShapeClass, storage_format
from sft.common.atomic_files import atomic_write
from sft.common.dataclass_json import dataclass_from_dict, parse_json_object
from sft.common.errors import InputError
from sft.kernels.common import LaunchVariant

__all__ = ["ERROR_LIMITS", "KernelTable", "TableEntry", "TableSelector", "error_limit", "find_table", "table_name"]

_FORMAT_VERSION = 1

#: Largest relative L2 error against fp64 of a kernel's results, by numbers. A half precision rounds results, and what lies between two
#: kernels of a backward pass. Products of ten bits must be as good as ATen's, which are no better: Hopper's matrix instructions cut bits
#: off that ATen rounds.
ERROR_LIMITS: dict[NumberFormat, float] = {"float32": 2e-5, "tf32": 2e-5, "bfloat16": 8e-3, "float16": 2e-3}
#: Of ATen's own error: where rounding is a lottery (equal maxima in half precision), a kernel may be so much further off.
_ERROR_TOLERANCE = 1.1
#: How far in pixels, in powers of four, a class may be from one that was measured.
_MAX_PIXEL_CLASS_DISTANCE = 2


def error_limit(numbers: NumberFormat, aten_error: float) -> float:
    """What error a kernel may have where ATen's calls have this one."""
    return max(ERROR_LIMITS[numbers], _ERROR_TOLERANCE * aten_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """One measurement.

    Attributes:
        shape_class: what was measured.
        error: relative L2 error of the kernel's results against fp64, on the GPU of the table.
        aten_error: the same of ATen's.
        triton_seconds: median time of the kernel.
        aten_seconds: median time of ATen's operators for the same, with all that is fused into the kernel.
        variant: how the kernel is split into programs: the fastest way that was right.
    """

    shape_class: ShapeClass
    error: float
    aten_error: float
    triton_seconds: float
    aten_seconds: float
    variant: LaunchVariant = "default"

    def __post_init__(self) -> None:
        limit = error_limit(self.shape_class.numbers, self.aten_error)
        problems = []
        if not 0 <= self.error <= limit:
            problems.append(f"its error {self.error:g} is above {limit:g}: a kernel that is wrong has no place in a table")
        if not (self._is_time(self.triton_seconds) and self._is_time(self.aten_seconds)):
            problems.append(f"times {self.triton_seconds!r} and {self.aten_seconds!r} are no times; measure again")
        if self.shape_class.pixels < 1:
            problems.append("it has no pixels")
        if problems:
            raise InputError(f"{self.shape_class.label}: " + "; ".join(problems))

    @staticmethod
    def _is_time(seconds: float) -> bool:
        return math.isfinite(seconds) and seconds > 0

    @property
    def fastest(self) -> Literal["triton", "aten"]:
        """Which implementation runs; of equals ATen's."""
        return "triton" if self.triton_seconds < self.aten_seconds else "aten"


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """Measurements on one GPU with one Triton.

    Attributes:
        device: the GPU's name, as ``torch.cuda.get_device_name`` has it.
        triton: version of Triton and of its assembler, as :func:`sft.backends.autotune.benchmark.compiler_version` has it.
        torch: version of PyTorch that the other side was measured with; a newer one makes the times old, not the kernels wrong.
        entries: one for each class.
    """

    device: str
    triton: str
    torch: str
    entries: tuple[TableEntry, ...] = ()

    def __post_init__(self) -> None:
        seen: set[ShapeClass] = set()
        for entry in self.entries:
            if entry.shape_class in seen:
                raise InputError(f"the table has two entries for {entry.shape_class.label}; leave one")
            seen.add(entry.shape_class)

    @cached_property
    def _by_kind(self) -> dict[ShapeClass, list[TableEntry]]:
        """Entries by their class but for the pixels, those of fewer pixels first."""
        found: dict[ShapeClass, list[TableEntry]] = {}
        for entry in sorted(self.entries, key=lambda one: one.shape_class.pixels):
            found.setdefault(entry.shape_class.of_pixels(0), []).append(entry)
        return found

    def entry(self, wanted: ShapeClass) -> TableEntry | None:
        """What was measured of a class, or of the nearest one that differs in pixels alone; of two as near the one of fewer."""

        def distance(one: TableEntry) -> float:
            return abs(math.log(one.shape_class.pixels / wanted.pixels, 4))

        nearest = min(self._by_kind.get(wanted.of_pixels(0), []), key=distance, default=None)
        return None if nearest is None or round(distance(nearest)) > _MAX_PIXEL_CLASS_DISTANCE else nearest

    def including(self, entries: Iterable[TableEntry]) -> KernelTable:
        """The table with these entries, in the place of older ones of their classes."""
        by_class = {entry.shape_class: entry for entry in (*self.entries, *entries)}
        return KernelTable(device=self.device, triton=self.triton, torch=self.torch, entries=tuple(by_class.values()))

    def to_json(self) -> str:
        """As text; :meth:`from_json` reads it."""
        return json.dumps({"format": _FORMAT_VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> KernelTable:
        """Read a table.

        Raises:
            InputError: the text is no table, or has an entry that cannot be trusted.
        """
        try:
            data = parse_json_object(text)
            if data.pop("format", None) != _FORMAT_VERSION:
                raise InputError(f"it is not of format {_FORMAT_VERSION}")
            if "entries" not in data:
                raise InputError("it has no entries")
            return dataclass_from_dict(cls, data)
        except InputError as error:
            raise InputError(f"cannot read the kernel table: {error}; make one with python -m sft tune") from error

    def save(self, path: Path) -> None:
        """Write the table, whole or not at all.

        Raises:
            SourceError: it cannot be written.
        """
        with atomic_write(path, parents=True) as part:
            part.write_text(self.to_json(), encoding="utf-8")


def table_name(device: str, triton: str) -> str:
    """Name of the file of a table.

    >>> table_name("NVIDIA H200", "3.6.0")
    'nvidia-h200-triton-3.6.0.json'
    """
    return f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}-triton-{triton}.json"


def find_table(folders: Sequence[Path], device: str, triton: str) -> KernelTable | None:
    """The table of a GPU and a Triton, from the first folder that has one; None where nobody has measured.

    Raises:
        InputError: a file cannot be read, or is about something else.
    """
    for folder in folders:
        path = folder / table_name(device, triton)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the kernel table {path}: {error}; delete it, or make another with python -m sft tune") from error
        try:
            found = KernelTable.from_json(text)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        if (found.device, found.triton) != (device, triton):
            raise InputError(f"{path} is for {found.device} and Triton {found.triton}, not for {device} and {triton}; delete it")
        return found
    return None


@dataclass(frozen=True, kw_only=True)
class TableSelector:
    """Takes the kernels that a table says are fastest.

    Attributes:
        table: the measurements.
        allows_tf32: whether products of fp32 numbers may be rounded.
    """

    table: KernelTable
    allows_tf32: bool = False

    def selects_kernel(self, wanted: ShapeClass) -> bool:
        """Whether the kernel was measured to be right and faster."""
        entry = self.table.entry(wanted)
        return entry is not None and entry.fastest == "triton"

    def launch_variant_of(self, wanted: ShapeClass) -> LaunchVariant:
        """The way that was measured to be fastest."""
        entry = self.table.entry(wanted)
        return "default" if entry is None else entry.variant

    def number_format_of(self, dtype: torch.dtype) -> NumberFormat | None:
        """As the elements are, or rounded where that is allowed."""
        return storage_format(dtype, allows_tf32=self.allows_tf32)
