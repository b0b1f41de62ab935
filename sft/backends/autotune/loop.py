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

from sft.backends.autotune.benchmark import Benchmarker
from sft.backends.autotune.cases import TuningCase
from sft.backends.autotune.table import KernelTable, TableEntry, error_limit, find_table, table_name
from sft.backends.selector import launch_variants
from sft.common.errors import SftError
from sft.kernels.common import LaunchVariant

__all__ = ["TuningReport", "tune"]


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
    """Entry of the fastest correct variant; the report gets the refused ones."""
    entries = []
    for variant in launch_variants(case.shape_class):
        entry = _measure_variant(case, variant, benchmarker, report)
        entries += [] if entry is None else [entry]
    return min(entries, key=lambda entry: entry.triton_seconds, default=None)


def _measure_variant(case: TuningCase, variant: LaunchVariant, benchmarker: Benchmarker, report: TuningReport) -> TableEntry | None:
    label = case.shape_class.label + (f", {variant}" if variant != "default" else "")
    varied = case.with_variant(variant)
    try:
        errors = benchmarker.verify(varied)
        limit = error_limit(case.shape_class.numbers, errors.aten)
        if not errors.kernels <= limit:
            report.refused.append(f"{label}: wrong, error {errors.kernels:.2g} against fp64 where {limit:.2g} is allowed")
            return None
        triton_seconds, aten_seconds = benchmarker.time(varied)
    except SftError:
        raise
    except Exception as error:  # a kernel that does not compile or run must not stop the loop
        report.refused.append(f"{label}: {type(error).__name__}: {error}".splitlines()[0][:300])
        return None
    return TableEntry(
        shape_class=case.shape_class,
        error=errors.kernels,
        aten_error=errors.aten,
        triton_seconds=triton_seconds,
        aten_seconds=aten_seconds,
        variant=variant,
    )
