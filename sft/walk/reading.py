"""Inputs that are read while a walk runs, and never resident.

A walk knows beforehand which rows it reads and in which order: strip after strip forwards, and by `backward_actions` backwards. Each
walk opens a reader with that list for every input that it reads, takes strip after strip, and closes it whatever happens. So an
input is read once for each walk over it: for each chunk of the batch, in each segment that reads it, forwards and again backwards.
Where restored strips make the backward walk turn round, their rows are read once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from sft.analysis.interval import Interval
from sft.analysis.schedule import Schedule
from sft.lower.program import Port
from sft.lower.step import StripKind
from sft.sources.readahead import reader_bytes
from sft.walk.checkpoints import backward_actions
from sft.walk.machine import Handle, Machine, Strips

if TYPE_CHECKING:
    from sft.walk.segments import TiledSegment

__all__ = ["Direction", "opened", "reading_bytes", "reading_order", "rows_read", "strip_bytes"]

Ints = npt.NDArray[np.int64]

#: Which of a segment's two walks.
Direction = Literal["forward", "backward"]


def rows_read(schedule: Schedule, name: str) -> tuple[Ints, Ints]:
    """First row, and the one behind the last, that each step reads of a value; both 0 where it reads none."""
    extent = schedule.extents[name]
    start = np.full(schedule.num_steps, extent, dtype=np.int64)
    stop = np.zeros(schedule.num_steps, dtype=np.int64)
    for reads in schedule.reads.values():
        for operand, low, high in reads:
            if operand == name:
                first, end = np.clip(low, 0, extent), np.clip(high, 0, extent)
                is_read = (high > low) & (end > first)
                start = np.where(is_read, np.minimum(start, first), start)
                stop = np.where(is_read, np.maximum(stop, end), stop)
    start = np.where(stop > start, start, 0)
    return start, stop


def reading_order(segment: TiledSegment, direction: Direction, chunk: Interval) -> dict[str, tuple[Interval, ...]]:
    """The rows that a walk reads of each input that is not resident, in order; inputs that it does not read are left out."""
    num_steps = segment.schedule.num_steps
    events: list[tuple[StripKind, int]] = [("forward", index) for index in range(num_steps)]
    if direction == "backward":
        actions = backward_actions(num_steps, segment.state_every)
        events = [("restore" if action.kind == "forward" else "joint", action.strip) for action in actions]
    found = {}
    for name in sorted(segment.from_source):
        start, stop = (rows.tolist() for rows in rows_read(segment.schedule, name))
        port = Port("source", name)
        order = tuple(Interval(start[index], stop[index]) for kind, index in events if port in segment.program(kind, index, chunk).ports)
        if order:
            found[name] = order
    return found


@contextmanager
def opened(
    machine: Machine, segment: TiledSegment, handles: Mapping[str, Handle], direction: Direction, chunk: Interval
) -> Iterator[dict[str, Strips]]:
    """Readers of a walk's inputs by name, for the time of the walk."""
    readers: dict[str, Strips] = {}
    with ExitStack() as stack:
        for name, order in reading_order(segment, direction, chunk).items():
            reader = machine.read(handles[name], chunk, order, segment.row_bytes(name, len(chunk)))
            readers[name] = stack.enter_context(closing(reader))
        yield readers


def reading_bytes(segment: TiledSegment, direction: Direction, chunk: Interval) -> int:
    """Bytes of the buffers that reading holds during a walk, where they are in the device's memory."""
    total = 0
    for name, order in reading_order(segment, direction, chunk).items():
        count, buffer_bytes, carry_bytes = reader_bytes(order, segment.row_bytes(name, len(chunk)))
        total += count * buffer_bytes + carry_bytes
    return total


def strip_bytes(segment: TiledSegment, kind: StripKind, role: str, steps: Ints, chunk: Interval) -> Ints:
    """Bytes of the strips of inputs that are not resident, at each of some steps.

    Args:
        segment: what walks.
        kind: which program of the steps.
        role: of the ports: ``"source"`` for the strips themselves, ``"grad_source"`` for their gradients.
        steps: indices.
        chunk: the batch elements of the walk.
    """
    total = np.zeros(len(steps), dtype=np.int64)
    for name in sorted(segment.from_source):
        start, stop = rows_read(segment.schedule, name)
        port = Port(role, name)
        is_bound = np.array([port in segment.program(kind, int(step), chunk).ports for step in steps], dtype=bool)
        total += is_bound * (stop - start)[steps] * segment.row_bytes(name, len(chunk))
    return total
