"""Input streaming: inputs that are read from the host while sweeps run, and never resident.

The rows that a sweep reads, and their order, are known before it runs: strip after strip in a forward sweep, the order of the checkpoint
actions in a backward sweep. Each sweep opens a loader with that list for every input that it reads, takes strip after strip, and closes the
loader in any case. An input is thus read once for each sweep over it: for each batch chunk, in each segment that reads it, forward and
again backward. Rows of restored strips in a backward sweep are read once more. Rows are read in full width; a panel takes its columns of
them, and each panel is a sweep of its own.

Strips that the strip policy leaves out are not read. The exception is a backward sweep with restored strips: without them, neighbours in
the list could have more rows in common than planned, so all strips are read as planned, and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Literal

import numpy as np

from sft.common.array_types import BoolArray, IntArray
from sft.common.interval import Interval
from sft.lower.lower_strip import StripKind
from sft.lower.program import Port
from sft.runtime.machine import Buffer, HostOps, StripLoader
from sft.runtime.strip_policy import ALL_STRIPS, StripSelection
from sft.runtime.tiled_layout import Sweep, TiledLayout
from sft.sources.strip_reader import reader_bytes_at, ring_bytes

__all__ = [
    "SweepDirection",
    "input_buffer_bytes",
    "input_grad_bytes",
    "input_staging_bytes",
    "largest_input_grad_bytes",
    "open_loaders",
    "reads_skipped_strips",
    "row_read_order",
]


#: Result of a sweep: outputs, states alone, or gradients.
SweepDirection = Literal["forward", "restore", "backward"]


def reads_skipped_strips(segment: TiledLayout, direction: SweepDirection) -> bool:
    """True if the loaders of a sweep also read the strips that it leaves out."""
    return direction == "backward" and any(action.kind == "forward" for action in segment.checkpoints.actions(segment.schedule.num_steps))


def row_read_order(
    segment: TiledLayout, direction: SweepDirection, sweep: Sweep, selection: StripSelection = ALL_STRIPS, *, first: int = 0
) -> dict[str, tuple[Interval, ...]]:
    """Rows of each strip that a sweep reads, in order, by input; inputs that it does not read are omitted.

    Args:
        segment: the segment.
        direction: result of the sweep.
        sweep: the sweep.
        selection: strips that run.
        first: first strip of a sweep that is not backward.
    """
    strips = _strips_read(segment, direction, sweep, selection, first)
    return {name: tuple(map(Interval, start.tolist(), stop.tolist())) for name, start, stop in strips}


def _strips_read(
    segment: TiledLayout, direction: SweepDirection, sweep: Sweep, selection: StripSelection = ALL_STRIPS, first: int = 0
) -> Iterator[tuple[str, IntArray, IntArray]]:
    """First and end row of each strip that is read, in order, by input."""
    num_steps = segment.schedule.num_steps
    if direction == "backward":
        actions = segment.checkpoints.actions(num_steps)
        steps = np.array([action.strip for action in actions], dtype=np.int64)
        restores = np.array([action.kind == "forward" for action in actions], dtype=bool)
        strips_by_kind: list[tuple[StripKind, BoolArray]] = [("restore", restores), ("joint", ~restores)]
    else:
        steps = np.arange(first, segment.num_sweep_strips(direction))
        strips_by_kind = [(direction, np.ones(len(steps), dtype=bool))]
    is_loaded = np.ones(len(steps), dtype=bool)
    if selection.skipped is not None and not reads_skipped_strips(segment, direction):
        is_loaded = ~selection.skipped[steps]
    kinds = segment.schedule.kinds[1][steps]
    for name in sorted(segment.from_source):
        start, stop = segment.rows_read(name, sweep)
        reads = _ReadsCache(segment, sweep, Port("source", name))
        is_read = np.zeros(len(steps), dtype=bool)
        for kind, is_kind in strips_by_kind:
            for signature in np.unique(kinds[is_kind & is_loaded]).tolist():
                is_read |= is_kind & (kinds == signature) & reads[kind, signature]
        is_read &= is_loaded
        if is_read.any():
            yield name, start[steps[is_read]], stop[steps[is_read]]


class _ReadsCache(dict[tuple[StripKind, int], bool]):
    """Cache, by strip kind and signature: True if the program of such strips reads an input."""

    def __init__(self, segment: TiledLayout, sweep: Sweep, port: Port) -> None:
        super().__init__()
        self._segment, self._sweep, self._port = segment, sweep, port
        self._first = segment.schedule.kinds[0].tolist()

    def __missing__(self, key: tuple[StripKind, int]) -> bool:
        kind, signature = key
        self[key] = reads = self._port in self._segment.program(kind, self._first[signature], self._sweep).ports
        return reads


@contextmanager
def open_loaders(
    machine: HostOps,
    segment: TiledLayout,
    sources: Mapping[str, Buffer],
    direction: SweepDirection,
    sweep: Sweep,
    *,
    first: int = 0,
    selection: StripSelection = ALL_STRIPS,
) -> Iterator[dict[str, StripLoader]]:
    """Context with open strip loaders of a sweep's inputs, by name."""
    loaders: dict[str, StripLoader] = {}
    with ExitStack() as stack:
        for name, order in row_read_order(segment, direction, sweep, selection, first=first).items():
            loader = machine.open_input(sources[name], sweep.chunk, order, segment.source_row_bytes(name, sweep))
            loaders[name] = stack.enter_context(closing(loader))
        yield loaders


def input_buffer_bytes(segment: TiledLayout, direction: SweepDirection, sweep: Sweep, *, on_host: bool) -> int:
    """Bytes of the loaders' buffers on the device during a sweep: two strips, and rows for the next one if its memory is the host's."""
    total = 0
    for name, start, stop in _strips_read(segment, direction, sweep):
        num_buffers, buffer_bytes, carry_bytes = reader_bytes_at(start, stop, segment.source_row_bytes(name, sweep))
        total += num_buffers * buffer_bytes + (carry_bytes if on_host else 0)
    return total


def input_staging_bytes(segment: TiledLayout, direction: SweepDirection, sweep: Sweep) -> list[int]:
    """Page-locked bytes of each loader of a sweep on a device whose memory is not the host's, in the order in which they open."""
    return [ring_bytes(start, stop, segment.source_row_bytes(name, sweep)) for name, start, stop in _strips_read(segment, direction, sweep)]


def input_grad_bytes(segment: TiledLayout, kind: StripKind, steps: IntArray, sweep: Sweep) -> IntArray:
    """Bytes of the gradients of inputs that are not resident, for each of some strips.

    Args:
        segment: the segment.
        kind: program of the strips.
        steps: indices of the strips.
        sweep: the sweep.
    """
    total = np.zeros(len(steps), dtype=np.int64)
    kinds = segment.schedule.kinds[1][steps].tolist()
    for name in sorted(segment.from_source):
        start, stop = segment.rows_read(name, sweep)
        reads = _ReadsCache(segment, sweep, Port("grad_source", name))
        is_bound = np.array([reads[kind, signature] for signature in kinds], dtype=bool)
        total += is_bound * (stop - start)[steps] * segment.source_row_bytes(name, sweep, gradient=True)
    return total


def largest_input_grad_bytes(segment: TiledLayout, sweep: Sweep) -> int:
    """Bytes of the largest strip of the gradient of one input that is not resident, in a backward sweep."""
    steps, largest = np.arange(segment.schedule.num_steps), 0
    kinds = segment.schedule.kinds[1].tolist()
    for name in sorted(segment.from_source):
        start, stop = segment.rows_read(name, sweep)
        reads = _ReadsCache(segment, sweep, Port("grad_source", name))
        rows = [int(stop[step] - start[step]) for step in steps.tolist() if reads["joint", kinds[step]]]
        largest = max(largest, max(rows, default=0) * segment.source_row_bytes(name, sweep, gradient=True))
    return largest
