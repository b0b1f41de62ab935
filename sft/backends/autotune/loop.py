"""Makes a table of what is fastest, trial by trial: verified first, then timed, then written down.

Convolutions can be split into programs in several ways; each is verified and timed, and the fastest that was right gets the entry. The
table is saved after every trial, so that an interrupted run goes on where it stopped. A kernel that is wrong on this GPU gets no entry, and
neither does one that does not run; both are named at the end, and tried again by the next run if none of their class was right.
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
    """What a run has found.

    Attributes:
        path: of the table.
        table: as it is now.
        measured: classes that were measured now.
        known: classes that were in the table before.
        left: classes that there was no time for.
        refused: kernels that are not taken, each with the reason.
    """

    path: Path
    table: KernelTable
    measured: list[TableEntry] = field(default_factory=list)
    known: int = 0
    left: int = 0
    refused: list[str] = field(default_factory=list)


def _ignore_progress(label: str) -> None:
    pass


def tune(
    trials: Iterable[TuningCase],
    benchmarker: Benchmarker,
    folder: Path,
    *,
    again: bool = False,
    limit_seconds: float = math.inf,
    advance: Callable[[str], None] = _ignore_progress,
) -> TuningReport:
    """Measure trials that are not in the table yet, and extend it.

    Args:
        trials: what to measure.
        benchmarker: where.
        folder: of the tables.
        again: whether to measure what is in the table, too.
        limit_seconds: no trial is begun later than this; another run goes on from here.
        advance: is called before each trial with its label.

    Raises:
        InputError: the table that is there cannot be read.
        SourceError: the table cannot be written.
    """
    device, triton = benchmarker.device_name, benchmarker.triton_version
    table = find_table([folder], device, triton) or KernelTable(device=device, triton=triton, torch=benchmarker.torch_version)
    found = TuningReport(path=folder / table_name(device, triton), table=table)
    present = {entry.shape_class for entry in table.entries}
    started = time.monotonic()
    for trial in trials:
        advance(trial.shape_class.label)
        if trial.shape_class in present and not again:
            found.known += 1
            continue
        if time.monotonic() - started > limit_seconds:
            found.left += 1
            continue
        entry = _fastest_variant(trial, benchmarker, found)
        if entry is not None:
            found.measured.append(entry)
            found.table = found.table.including([entry])
            found.table.save(found.path)
    return found


def _fastest_variant(trial: TuningCase, benchmarker: Benchmarker, found: TuningReport) -> TableEntry | None:
    """The fastest of the ways that are right; the others are named among what was refused."""
    entries = []
    for variant in launch_variants(trial.shape_class):
        entry = _measure_variant(trial, variant, benchmarker, found)
        entries += [] if entry is None else [entry]
    return min(entries, key=lambda entry: entry.triton_seconds, default=None)


def _measure_variant(trial: TuningCase, variant: LaunchVariant, benchmarker: Benchmarker, found: TuningReport) -> TableEntry | None:
    label = trial.shape_class.label + (f", {variant}" if variant != "default" else "")
    varied = trial.varied(variant)
    try:
        errors = benchmarker.verify(varied)
        limit = error_limit(trial.shape_class.numbers, errors.aten)
        if not errors.kernels <= limit:
            found.refused.append(f"{label}: wrong, error {errors.kernels:.2g} against fp64 where {limit:.2g} is allowed")
            return None
        triton_seconds, aten_seconds = benchmarker.time(varied)
    except SftError:
        raise
    except Exception as error:  # one kernel that does not compile or run on this GPU must not keep the others from being measured
        found.refused.append(f"{label}: {type(error).__name__}: {error}".splitlines()[0][:300])
        return None
    return TableEntry(
        shape_class=trial.shape_class,
        error=errors.kernels,
        aten_error=errors.aten,
        triton_seconds=triton_seconds,
        aten_seconds=aten_seconds,
        variant=variant,
    )
