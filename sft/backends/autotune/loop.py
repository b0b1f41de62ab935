"""Tuning loop: verifies and times the cases one by one, and extends the table of the GPU.

Convolutions have several launch variants. Each is verified and timed, and the fastest correct one gets the entry of the class. The table is
saved after every case, so an interrupted run can be continued. A kernel that is wrong on this GPU, or does not run, gets no entry; the
report lists it, and the next run tries it again if its class has no entry.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from sft.backends.autotune.benchmark import Benchmarker, RelativeErrors
from sft.backends.autotune.cases import TuningCase
from sft.backends.autotune.table import KernelTable, TableEntry, error_limit, find_table, table_name
from sft.backends.selector import launch_variants
from sft.common.errors import SftError
from sft.kernels.common import LaunchVariant

__all__ = ["TuningReport", "tune"]

_Result = TypeVar("_Result")


@dataclass(slots=True)
class TuningReport:
    """Result of a tuning run.

    Attributes:
        path: file of the table.
        table: the table after the run.
        measured: entries measured by this run.
        num_known: classes that were in the table before.
        num_left: classes that the time limit left out.
        refused: kernels without an entry, each with the reason.
    """

    path: Path
    table: KernelTable
    measured: list[TableEntry] = field(default_factory=list)
    num_known: int = 0
    num_left: int = 0
    refused: list[str] = field(default_factory=list)


def _ignore_progress(label: str) -> None:
    pass


def tune(
    cases: Iterable[TuningCase],
    benchmarker: Benchmarker,
    folder: Path,
    *,
    again: bool = False,
    limit_seconds: float = math.inf,
    advance: Callable[[str], None] = _ignore_progress,
) -> TuningReport:
    """Measure the cases that the table lacks, and add them to it.

    Args:
        cases: cases to measure.
        benchmarker: verifies and times them.
        folder: folder of the tables.
        again: true to measure the classes of the table as well.
        limit_seconds: seconds after which no case is started; another run can continue.
        advance: called before each case with its label.

    Raises:
        InputError: the existing table cannot be read.
        SourceError: the table cannot be written.
    """
    device, triton = benchmarker.device_name, benchmarker.triton_version
    table = find_table([folder], device, triton) or KernelTable(device=device, triton=triton, torch=benchmarker.torch_version)
    report = TuningReport(path=folder / table_name(device, triton), table=table)
    present = {entry.shape_class for entry in table.entries}
    started = time.monotonic()
    for case in cases:
        advance(case.shape_class.label)
        if case.shape_class in present and not again:
            report.num_known += 1
            continue
        if time.monotonic() - started > limit_seconds:
            report.num_left += 1
            continue
        entry = _fastest_variant(case, benchmarker, report)
        if entry is not None:
            report.measured.append(entry)
            report.table = report.table.including([entry])
            report.table.save(report.path)
    return report


def _fastest_variant(case: TuningCase, benchmarker: Benchmarker, report: TuningReport) -> TableEntry | None:
    """Entry of the fastest correct variant; the report gets the refused ones.

    All variants are verified before the first is timed, so the exact results are computed once and freed before the timing.
    """
    verified = [(variant, _verify_variant(case, variant, benchmarker, report)) for variant in launch_variants(case.shape_class)]
    entries = [_time_variant(case, variant, errors, benchmarker, report) for variant, errors in verified if errors is not None]
    return min((entry for entry in entries if entry is not None), key=lambda entry: entry.triton_seconds, default=None)


def _verify_variant(case: TuningCase, variant: LaunchVariant, benchmarker: Benchmarker, report: TuningReport) -> RelativeErrors | None:
    """Errors of a variant; ``None`` if it is wrong or does not run."""
    errors = _attempt(lambda: benchmarker.verify(case.with_variant(variant)), case, variant, report)
    if errors is None:
        return None
    limit = error_limit(case.shape_class.numbers, errors.aten)
    if errors.kernels <= limit:
        return errors
    report.refused.append(f"{_label(case, variant)}: wrong, error {errors.kernels:.2g} against fp64 where {limit:.2g} is allowed")
    return None


def _time_variant(
    case: TuningCase, variant: LaunchVariant, errors: RelativeErrors, benchmarker: Benchmarker, report: TuningReport
) -> TableEntry | None:
    """Entry of a correct variant; ``None`` if it fails while it is timed."""
    seconds = _attempt(lambda: benchmarker.time(case.with_variant(variant)), case, variant, report)
    if seconds is None:
        return None
    return TableEntry(
        shape_class=case.shape_class,
        error=errors.kernels,
        aten_error=errors.aten,
        triton_seconds=seconds[0],
        aten_seconds=seconds[1],
        variant=variant,
    )


def _attempt(measure: Callable[[], _Result], case: TuningCase, variant: LaunchVariant, report: TuningReport) -> _Result | None:
    """Measure; a kernel that does not compile or run becomes a line of the report, and does not stop the loop."""
    try:
        return measure()
    except SftError:
        raise
    except Exception as error:
        report.refused.append(f"{_label(case, variant)}: {type(error).__name__}: {error}".splitlines()[0][:300])
        return None


def _label(case: TuningCase, variant: LaunchVariant) -> str:
    return case.shape_class.label + (f", {variant}" if variant != "default" else "")
