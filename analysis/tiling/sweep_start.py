"""Start of a forward sweep below the first row: the strips that must run for the result rows that are still missing.

A strip reads rows that earlier strips carry. From the missing rows of the results, the requirement goes back along the operators: an
operator whose rows count from strip ``c`` on reads rows of its operand from ``low`` on, so those of the operand count from the strip that
computes row ``low``. The sweep starts at the smallest of these strips, with carried rows of any value: no row that counts reads them.

>>> from sft.analysis.tiling.sweep_start import SweepStart
>>> SweepStart(first=3, complete=5)  # strips 3 and 4 compute some rows without meaning
SweepStart(first=3, complete=5)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sft.analysis.tiling.independent_tiles import TileSchedule
from sft.analysis.tiling.strips import StripSchedule

__all__ = ["FULL_SWEEP", "SweepStart", "sweep_start"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStart:
    """Start of a sweep.

    Attributes:
        first: first strip that runs; the number of strips if none must.
        complete: first strip from which on every row is that of a full sweep, for values on which a missing row depends.
    """

    first: int
    complete: int


#: A sweep over all strips.
FULL_SWEEP = SweepStart(first=0, complete=0)


def sweep_start(schedule: StripSchedule | TileSchedule, known_rows: Mapping[str, int]) -> SweepStart:
    """Start of a sweep of which no result needs rows above the known ones.

    Args:
        schedule: the strips; their operators are streamed, without reductions.
        known_rows: for each result the number of its leading rows that are not needed.
    """
    if isinstance(schedule, TileSchedule):
        missing = (step.index for step in schedule.steps if any(step[name].owned.stop > known for name, known in known_rows.items()))
        first = next(missing, schedule.num_steps)
        return SweepStart(first=first, complete=first)
    counts_from = {name: _strip_of(schedule, name, known) for name, known in known_rows.items()}
    for name in reversed(schedule.names):
        strip = counts_from.get(name, schedule.num_steps)
        for operand, low, high in schedule.reads.get(name, ()):
            is_read = high[strip:] > low[strip:]
            if operand not in schedule.sources and is_read.any():
                needed = _strip_of(schedule, operand, max(0, int(low[strip:][is_read].min())))
                counts_from[operand] = min(needed, counts_from.get(operand, schedule.num_steps))
    strips = [strip for strip in counts_from.values() if strip < schedule.num_steps]
    return SweepStart(first=min(strips, default=schedule.num_steps), complete=max(strips, default=schedule.num_steps))


def _strip_of(schedule: StripSchedule, name: str, row: int) -> int:
    """The strip that computes a row of a value; the number of strips for a row below the last."""
    return int(np.searchsorted(schedule.frontier[name], row, side="right")) - 1
