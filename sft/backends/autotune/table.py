"""Tuning tables: measured kernel choices per operation class, for one GPU model and one Triton version.

Only correct kernels have entries. A `TableEntry` has the error against fp64 that it was accepted with, and refuses an error above both the
limit of its number format and ATen's error. A class without an entry (never measured, or wrong) runs by ATen. A table belongs to one GPU
name and one version of Triton and its assembler, since these determine the speed and the correctness of a kernel; tables of other versions
are ignored.

A file is JSON: a header and a list of entries. It is written to a temporary file and renamed, so a table is never incomplete. The library
comes with tables of GPUs that it was measured on; entries of ``python -m sft tune`` replace theirs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from sft.backends.selector import NumberFormat, ShapeClass, multiplies, storage_format
from sft.common.atomic_files import atomic_write
from sft.common.dataclass_json import dataclass_from_dict, parse_json_object
from sft.common.errors import InputError
from sft.kernels.common import LaunchVariant

__all__ = ["ERROR_LIMITS", "KernelTable", "TableEntry", "TableSelector", "error_limit", "find_table", "known_table", "table_name"]

_FORMAT_VERSION = 1
#: Tables that come with the library.
_PROVIDED_FOLDER = Path(__file__).resolve().with_name("tables")


def _truncation_error(num_bits: int) -> float:
    """Expected relative L2 error of sums of products whose two operands are truncated to ``num_bits`` bits after the leading one.

    Truncation of a mantissa ``m`` in [1, 2), of density ``1 / (m ln 2)``, by a number uniform in [0, u), ``u = 2**-num_bits``, is a
    relative error ``e`` of mean ``u / (4 ln 2)`` and mean square ``u**2 / (8 ln 2)``. A product has the error ``e1 + e2``. Its mean scales
    the sum and its deviations are independent, so the relative L2 error of a sum is the root of the mean square,
    ``sqrt(2 * E[e**2] + 2 * E[e]**2)``: 7.7e-4 for ten bits.
    """
    unit = 2.0**-num_bits
    mean, mean_square = unit / (4 * math.log(2)), unit**2 / (8 * math.log(2))
    return math.sqrt(2 * mean_square + 2 * mean**2)


#: Largest ratio of an error to the expected one: sums of few products, and mantissas of another density.
_TRUNCATION_TOLERANCE = 1.3
#: Largest relative L2 error of a kernel's results against fp64, by number format. Half precisions round results and the values between two
#: kernels of a backward pass. Products in tf32 truncate their operands to ten bits, as Hopper's matrix instructions do. The error of ATen's
#: calls is no measure for them: cuDNN rounds operands to nearest (3.5e-4 on an H100), or multiplies small tensors in fp32.
ERROR_LIMITS: dict[NumberFormat, float] = {
    "float32": 2e-5,
    "tf32": _TRUNCATION_TOLERANCE * _truncation_error(10),
    "bfloat16": 8e-3,
    "float16": 2e-3,
}
#: Largest ratio of a kernel's error to ATen's, where rounding decides between equal values (maxima in half precision).
_ERROR_TOLERANCE = 1.1
#: Largest share of ATen's time that the time of a kernel that runs has: less gain than 5 % is within the differences of two measurements.
_LARGEST_SHARE = 0.95
#: Largest distance from a measured class, in powers of four of the number of pixels.
_MAX_PIXEL_CLASS_DISTANCE = 2


def error_limit(numbers: NumberFormat, aten_error: float) -> float:
    """Largest accepted error of a kernel, given the error of ATen's calls."""
    return max(ERROR_LIMITS[numbers], _ERROR_TOLERANCE * aten_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """One measurement.

    Attributes:
        shape_class: the class.
        error: relative L2 error of the kernel's results against fp64, on the GPU of the table.
        aten_error: the same error of ATen's results.
        triton_seconds: median time of the kernel.
        aten_seconds: median time of ATen's operators for the same, with all that is fused into the kernel.
        variant: the fastest correct launch variant.
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
            problems.append(f"its error {self.error:g} is above {limit:g}: a wrong kernel gets no entry")
        if not (self._is_time(self.triton_seconds) and self._is_time(self.aten_seconds)):
            problems.append(f"times {self.triton_seconds!r} and {self.aten_seconds!r} are not times; measure again")
        if self.shape_class.pixels < 1:
            problems.append("it has no pixels")
        if problems:
            raise InputError(f"{self.shape_class.label}: " + "; ".join(problems))

    @staticmethod
    def _is_time(seconds: float) -> bool:
        return math.isfinite(seconds) and seconds > 0

    @property
    def fastest(self) -> Literal["triton", "aten"]:
        """The implementation that runs; ATen's for nearly equal times."""
        return "triton" if self.triton_seconds < _LARGEST_SHARE * self.aten_seconds else "aten"


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """Measurements on one GPU with one Triton.

    Attributes:
        device: name of the GPU, from ``torch.cuda.get_device_name``.
        triton: version of Triton and its assembler, from :func:`sft.backends.autotune.benchmark.compiler_version`.
        torch: version of PyTorch that ATen's times were measured with. With a newer one the times are outdated; the kernels stay correct.
        entries: one entry for each class.
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
        """Entries by their class at 0 pixels, those of fewer pixels first."""
        by_kind: dict[ShapeClass, list[TableEntry]] = {}
        for entry in sorted(self.entries, key=lambda each: each.shape_class.pixels):
            by_kind.setdefault(entry.shape_class.at_any_size(), []).append(entry)
        return by_kind

    def entry(self, shape_class: ShapeClass) -> TableEntry | None:
        """Entry of a class, or of the nearest class that differs only in pixels; of two equally near ones the one of fewer pixels."""

        def distance(entry: TableEntry) -> float:
            return abs(math.log(entry.shape_class.pixels / shape_class.pixels, 4))

        nearest = min(self._by_kind.get(shape_class.at_any_size(), []), key=distance, default=None)
        return None if nearest is None or round(distance(nearest)) > _MAX_PIXEL_CLASS_DISTANCE else nearest

    def including(self, entries: Iterable[TableEntry]) -> KernelTable:
        """The table with these entries; they replace older entries of their classes."""
        by_class = {entry.shape_class: entry for entry in (*self.entries, *entries)}
        return KernelTable(device=self.device, triton=self.triton, torch=self.torch, entries=tuple(by_class.values()))

    def to_json(self) -> str:
        """The table as JSON; :meth:`from_json` reads it."""
        return json.dumps({"format": _FORMAT_VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> KernelTable:
        """Read a table.

        Raises:
            InputError: the text is not a table, or an entry is invalid.
        """
        try:
            data = parse_json_object(text)
            if data.pop("format", None) != _FORMAT_VERSION:
                raise InputError(f"it is not of format {_FORMAT_VERSION}")
            if "entries" not in data:
                raise InputError("it has no entries")
            table = dataclass_from_dict(cls, data)
        except InputError as error:
            raise InputError(f"cannot read the kernel table: {error}; make one with python -m sft tune") from error
        renamed = {_stored_class(entry.shape_class): entry for entry in table.entries}
        return replace(table, entries=tuple(replace(entry, shape_class=shape_class) for shape_class, entry in renamed.items()))

    def save(self, path: Path) -> None:
        """Write the table atomically.

        Raises:
            SourceError: the file cannot be written.
        """
        with atomic_write(path, parents=True) as temporary:
            temporary.write_text(self.to_json(), encoding="utf-8")


def _stored_class(shape_class: ShapeClass) -> ShapeClass:
    """The class, in the format that elements are stored in if nothing is multiplied: older tables have ``tf32`` there."""
    is_stored = shape_class.numbers == "tf32" and not multiplies(shape_class.operator)
    return replace(shape_class, numbers="float32") if is_stored else shape_class


def table_name(device: str, triton: str) -> str:
    """File name of a table.

    >>> table_name("NVIDIA H200", "3.6.0")
    'nvidia-h200-triton-3.6.0.json'
    """
    return f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}-triton-{triton}.json"


def find_table(folders: Sequence[Path], device: str, triton: str) -> KernelTable | None:
    """The table of a GPU and a Triton version, from the first folder that has one; None if no folder has.

    Raises:
        InputError: a file cannot be read, or is for another GPU or version.
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
            table = KernelTable.from_json(text)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        if (table.device, table.triton) != (device, triton):
            raise InputError(f"{path} is for {table.device} and Triton {table.triton}, not for {device} and {triton}; delete it")
        return table
    return None


def known_table(folders: Sequence[Path], device: str, triton: str) -> KernelTable | None:
    """The table that comes with the library, with the entries of the one in the folders; None if there is neither.

    Raises:
        InputError: as :func:`find_table`.
    """
    measured, provided = find_table(folders, device, triton), find_table([_PROVIDED_FOLDER], device, triton)
    if measured is None or provided is None:
        return measured or provided
    return provided.including(measured.entries)


@dataclass(frozen=True, kw_only=True)
class TableSelector:
    """Selects the kernels that are the fastest by a table.

    Attributes:
        table: the measurements.
        allows_tf32: true if products of fp32 numbers may round operands to ten bits.
    """

    table: KernelTable
    allows_tf32: bool = False

    def selects_kernel(self, shape_class: ShapeClass) -> bool:
        """True if the class has an entry with the kernel faster than ATen."""
        entry = self.table.entry(shape_class)
        return entry is not None and entry.fastest == "triton"

    def launch_variant_of(self, shape_class: ShapeClass) -> LaunchVariant:
        """The launch variant of the entry."""
        entry = self.table.entry(shape_class)
        return "default" if entry is None else entry.variant

    def number_format_of(self, dtype: torch.dtype, *, multiplies: bool = False) -> NumberFormat | None:
        """The format that elements are stored in, or tf32 for products of fp32 where allowed."""
        return storage_format(dtype, allows_tf32=self.allows_tf32 and multiplies)
