"""Inputs that are read while a walk runs, and never resident.

A walk knows beforehand which rows it reads and in which order: strip after strip forwards, and by its checkpoints' actions backwards. Each
walk opens a reader with that list for every input that it reads, takes strip after strip, and closes it whatever happens. So an
input is read once for each walk over it: for each chunk of the batch, in each segment that reads it, forwards and again backwards.
Where restored strips make the backward walk turn round, their rows are read once more. Rows are read in full width: panels take their
columns of them, and each panel is a walk of its own.

Strips that are left out of a walk (``sft.runtime.skip_constant``) are not read, unless the walk turns round: then neighbours in the list
could have more rows in common than was planned for, so all strips are read as planned, and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Literal

import numpy as np
import numpy.typing as npt

from sft.analysis.tiling.constant_strips import BoolArray
from sft.common.interval import Interval
from sft.lower.lower_strip import StripKind
from sft.lower.program import Port
from sft.runtime.machine import Buffer, Machine, StripLoader
from sft.runtime.tiled_layout import Sweep, TiledLayout
from sft.sources.strip_reader import reader_bytes_at

__all__ = ["SweepDirection", "input_buffer_bytes", "input_strip_bytes", "open_loaders", "reads_skipped_strips", "row_read_order"]

Ints = npt.NDArray[np.int64]

#: What a walk is for: results, states alone, or gradients.
SweepDirection = Literal["forward", "restore", "backward"]


def reads_skipped_strips(segment: TiledLayout, direction: SweepDirection) -> bool:
    """Whether strips that are left out of a walk are read all the same."""
    return direction == "backward" and any(action.kind == "forward" for action in segment.checkpoints.actions(segment.schedule.num_steps))


def row_read_order(
    segment: TiledLayout, direction: SweepDirection, walk: Sweep, skipped: BoolArray | None = None
) -> dict[str, tuple[Interval, ...]]:
    """The rows that a walk reads of each input that is not resident, in order; inputs that it does not read are left out.

    Args:
        segment: what walks.
        direction: what for.
        walk: the walk.
        skipped: strips that are left out.
    """
    found = {}
    for name, start, stop in _strips_read(segment, direction, walk, skipped):
        found[name] = tuple(map(Interval, start.tolist(), stop.tolist()))
    return found


def _strips_read(
    segment: TiledLayout, direction: SweepDirection, walk: Sweep, skipped: BoolArray | None = None
) -> Iterator[tuple[str, Ints, Ints]]:
    """Of each input that is read where its strips begin and end, in order."""
    num_steps = segment.schedule.num_steps
    if direction == "backward":
        actions = segment.checkpoints.actions(num_steps)
        steps = np.array([action.strip for action in actions], dtype=np.int64)
        restores = np.array([action.kind == "forward" for action in actions], dtype=bool)
        parts: list[tuple[StripKind, BoolArray]] = [("restore", restores), ("joint", ~restores)]
    else:
        steps = np.arange(segment.walked(direction))
        parts = [(direction, np.ones(len(steps), dtype=bool))]
    stays = np.ones(len(steps), dtype=bool)
    if skipped is not None and not reads_skipped_strips(segment, direction):
        stays = ~skipped[steps]
    kinds = segment.schedule.kinds[1][steps]
    for name in sorted(segment.from_source):
        start, stop = segment.rows_read(name, walk)
        reads = _ReadsCache(segment, walk, Port("source", name))
        is_read = np.zeros(len(steps), dtype=bool)
        for kind, among in parts:
            for of_step in np.unique(kinds[among & stays]).tolist():
                is_read |= among & (kinds == of_step) & reads[kind, of_step]
        is_read &= stays
        if is_read.any():
            yield name, start[steps[is_read]], stop[steps[is_read]]


class _ReadsCache(dict[tuple[StripKind, int], bool]):
    """Whether strips of a kind have the port of an input; strips of one signature share their program, so each is asked once."""

    def __init__(self, segment: TiledLayout, walk: Sweep, port: Port) -> None:
        super().__init__()
        self._segment, self._walk, self._port = segment, walk, port
        self._first = segment.schedule.kinds[0].tolist()

    def __missing__(self, key: tuple[StripKind, int]) -> bool:
        kind, signature = key
        self[key] = found = self._port in self._segment.program(kind, self._first[signature], self._walk).ports
        return found


@contextmanager
def open_loaders(
    machine: Machine,
    segment: TiledLayout,
    handles: Mapping[str, Buffer],
    direction: SweepDirection,
    walk: Sweep,
    *,
    skipped: BoolArray | None = None,
) -> Iterator[dict[str, StripLoader]]:
    """Readers of a walk's inputs by name, for the time of the walk."""
    readers: dict[str, StripLoader] = {}
    with ExitStack() as stack:
        for name, order in row_read_order(segment, direction, walk, skipped).items():
            reader = machine.read(handles[name], walk.chunk, order, segment.source_row_bytes(name, walk))
            readers[name] = stack.enter_context(closing(reader))
        yield readers


def input_buffer_bytes(segment: TiledLayout, direction: SweepDirection, walk: Sweep) -> int:
    """Bytes of the buffers that reading holds during a walk, where they are in the device's memory."""
    total = 0
    for name, start, stop in _strips_read(segment, direction, walk):
        count, buffer_bytes, carry_bytes = reader_bytes_at(start, stop, segment.source_row_bytes(name, walk))
        total += count * buffer_bytes + carry_bytes
    return total


def input_strip_bytes(segment: TiledLayout, kind: StripKind, role: str, steps: Ints, walk: Sweep) -> Ints:
    """Bytes of the strips of inputs that are not resident, at each of some steps.

    Args:
        segment: what walks.
        kind: which program of the steps.
        role: of the ports: ``"source"`` for the strips themselves, ``"grad_source"`` for their gradients.
        steps: indices.
        walk: the walk.
    """
    total = np.zeros(len(steps), dtype=np.int64)
    kinds = segment.schedule.kinds[1][steps].tolist()
    for name in sorted(segment.from_source):
        start, stop = segment.rows_read(name, walk)
        reads = _ReadsCache(segment, walk, Port(role, name))
        is_bound = np.array([reads[kind, of_step] for of_step in kinds], dtype=bool)
        total += is_bound * (stop - start)[steps] * segment.source_row_bytes(name, walk, gradient=role == "grad_source")
    return total
