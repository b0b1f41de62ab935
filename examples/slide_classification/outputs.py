"""Files that are either whole or not there."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from task import StepResult

__all__ = ["replacing", "write_metrics"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; rename it to `path` if the block succeeds, remove it if not."""
    # The suffix stays last: image writers choose the format by it.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_metrics(path: Path, steps: Sequence[StepResult], *, projected_peak_bytes: int, budget_bytes: int) -> None:
    """Write one row for each step so far."""
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
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
