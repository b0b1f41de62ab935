"""Table of steps, saved after each."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from task import StepResult

from sft.common.atomic_files import atomic_write

__all__ = ["write_metrics"]


def write_metrics(path: Path, steps: Sequence[StepResult], *, projected_peak_bytes: int, budget_bytes: int) -> None:
    """Write one row for each step so far."""
    with atomic_write(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss", "seconds", "measured_peak_bytes", "projected_peak_bytes", "budget_bytes"])
        for number, step in enumerate(steps, start=1):
            writer.writerow(
                [
                    number,
                    f"{step.loss:.9g}",
                    f"{step.seconds:.3f}",
                    step.peak_bytes,
                    projected_peak_bytes,
                    budget_bytes,
                ]
            )
