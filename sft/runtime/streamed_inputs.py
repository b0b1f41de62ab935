"""Input streaming: inputs that are read from the host while sweeps run, and never resident.

The rows that a sweep reads, and their order, are known before it runs: strip after strip in a forward sweep, the order of the checkpoint
actions in a backward sweep. Each sweep opens a loader with that list for every input that it reads, takes strip after strip, and closes the
loader in any case. An input is thus read once for each sweep over it: for each batch chunk, in each segment that reads it, forward and
again backward. Rows of restored strips in a backward sweep are read once more. Rows are read in full width; a panel takes its columns of
them, and each panel is a sweep of its own.

Gradients of direct outputs (``sft.runtime.region``) are read in the same way.

Strips that the strip policy leaves out are not read. The exception is a backward sweep with restored strips: without them, neighbours in
the list could have more rows in common than planned, so all strips are read as planned, and dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
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
from sft.sources.strip_reader import pixel_staging_bytes, read_chunks, reader_bytes, reader_bytes_at, ring_bytes

__all__ = [
    "SweepDirection",
    "grad_buffer_bytes",
    "input_buffer_bytes",
    "input_grad_bytes",
    "input_pixel_bytes",
    "input_staging_bytes",
    "largest_input_grad_bytes",
    "open_grad_loaders",
    "open_loaders",
    "reads_skipped_strips",
    "returned_bytes",
    "returned_rows_bytes",
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
    return {name: tuple(map(Interval, start.tolist(), stop.tolist())) for name, (start, stop), _ in strips}


def _strips_read(
    segment: TiledLayout, direction: SweepDirection, sweep: Sweep, selection: StripSelection = ALL_STRIPS, first: int = 0
) -> Iterator[tuple[str, tuple[IntArray, IntArray], IntArray]]:
    """First and end rows of the strips that are read, in order, and their positions in the sweep, by input."""
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
            yield name, (start[steps[is_read]], stop[steps[is_read]]), np.flatnonzero(is_read)


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
            row_bytes, dtype = segment.source_row_bytes(name, sweep), segment.scope.dtype_of(name)
            loader = machine.open_input(sources[name], sweep.chunk, order, row_bytes, dtype)
            loaders[name] = stack.enter_context(closing(loader))
        yield loaders


def _grads_read(segment: TiledLayout, sweep: Sweep) -> dict[str, tuple[Interval, ...]]:
    """Rows of the gradients of direct outputs that a backward sweep reads, in order."""
    joints = [action.strip for action in segment.checkpoints.actions(segment.schedule.num_steps) if action.kind == "joint"]
    kinds, order = segment.schedule.kinds[1].tolist(), dict[str, tuple[Interval, ...]]()
    for name in sorted(segment.to_host & segment.direct):
        reads = _ReadsCache(segment, sweep, Port("grad_out", name))
        rows = tuple(segment.output_region(name, segment.step(strip), sweep)[0] for strip in joints if reads["joint", kinds[strip]])
        if rows:
            order[name] = rows
    return order


@contextmanager
def open_grad_loaders(
    machine: HostOps, segment: TiledLayout, gradients: Mapping[str, Buffer], sweep: Sweep
) -> Iterator[dict[str, StripLoader]]:
    """Context with open loaders of the gradients of a segment's direct outputs for a backward sweep, by name."""
    loaders: dict[str, StripLoader] = {}
    with ExitStack() as stack:
        for name, order in _grads_read(segment, sweep).items():
            row_bytes, dtype = segment.source_row_bytes(name, sweep, gradient=True), segment.scope.sink_dtype(name)
            loaders[name] = stack.enter_context(closing(machine.open_input(gradients[name], sweep.chunk, order, row_bytes, dtype)))
        yield loaders


def grad_buffer_bytes(segment: TiledLayout, sweep: Sweep) -> int:
    """Bytes of these loaders' buffers on the device."""
    total = 0
    for name, order in _grads_read(segment, sweep).items():
        num_buffers, buffer_bytes, _ = reader_bytes(order, segment.source_row_bytes(name, sweep, gradient=True))
        total += num_buffers * buffer_bytes
    return total


def input_buffer_bytes(segment: TiledLayout, direction: SweepDirection, sweep: Sweep, *, on_host: bool) -> int:
    """Bytes of the loaders' buffers on the device during a sweep: two strips, and rows for the next one if its memory is the host's."""
    total = 0
    for name, (start, stop), _ in _strips_read(segment, direction, sweep):
        num_buffers, buffer_bytes, carry_bytes = reader_bytes_at(start, stop, segment.source_row_bytes(name, sweep))
        total += num_buffers * buffer_bytes + (carry_bytes if on_host else 0)
    return total


def input_pixel_bytes(segment: TiledLayout, direction: SweepDirection, sweep: Sweep) -> IntArray:
    """Bytes for pixels of inputs of which one strip is read, on a device whose memory is not the host's: until it is taken.

    Returns:
        Bytes before each strip of the sweep and after the last one.
    """
    total = np.zeros(_num_strips(segment, direction) + 1, dtype=np.int64)
    for name, (start, stop), positions in _strips_read(segment, direction, sweep):
        row_bytes = segment.source_row_bytes(name, sweep)
        num_buffers, strip_bytes, _ = reader_bytes_at(start, stop, row_bytes)
        if num_buffers == 1 and segment.scope.graph[name].kind == "input":
            total[: positions[stop > start][0] + 1] += pixel_staging_bytes(strip_bytes, row_bytes, segment.scope.dtype_of(name))
    return total


def _num_strips(segment: TiledLayout, direction: SweepDirection) -> int:
    """Strips of a sweep; in a backward sweep each counts as often as it runs."""
    if direction == "backward":
        return len(segment.checkpoints.actions(segment.schedule.num_steps))
    return segment.num_sweep_strips(direction)


def input_staging_bytes(segment: TiledLayout, direction: SweepDirection, sweep: Sweep) -> list[int]:
    """Page-locked bytes of each loader of a sweep on a device whose memory is not the host's, in the order in which they open.

    Loaders of direct cuts have none.
    """
    strips = (strips for strips in _strips_read(segment, direction, sweep) if strips[0] not in segment.direct)
    return [ring_bytes(start, stop, segment.source_row_bytes(name, sweep)) for name, (start, stop), _ in strips]


def returned_rows_bytes(num_bytes: int, num_rows: int) -> int:
    """Device bytes for rows of a gradient that come back from the host, to be added to rows of a sample that take ``num_bytes``."""
    return len(read_chunks(num_rows, num_bytes // num_rows)[0]) * (num_bytes // num_rows) if num_bytes else 0


def input_grad_bytes(
    segment: TiledLayout, kind: StripKind, steps: IntArray, sweep: Sweep, names: Collection[str] | None = None
) -> IntArray:
    """Bytes of the gradients of inputs that are not resident, for each of some strips.

    Args:
        segment: the segment.
        kind: program of the strips.
        steps: indices of the strips.
        sweep: the sweep.
        names: the inputs. Default: `None` (all)
    """
    total = np.zeros(len(steps), dtype=np.int64)
    kinds = segment.schedule.kinds[1][steps].tolist()
    for name in sorted(segment.from_source if names is None else names):
        start, stop = segment.rows_read(name, sweep)
        reads = _ReadsCache(segment, sweep, Port("grad_source", name))
        is_bound = np.array([reads[kind, signature] for signature in kinds], dtype=bool)
        total += is_bound * (stop - start)[steps] * segment.source_row_bytes(name, sweep, gradient=True)
    return total


def largest_input_grad_bytes(segment: TiledLayout, sweep: Sweep, names: Collection[str]) -> int:
    """Bytes of the largest strip of the gradient of one of these inputs that are not resident, in a backward sweep."""
    rows = ((name, _tallest_grad_rows(segment, sweep, name)) for name in names)
    return max((num_rows * segment.source_row_bytes(name, sweep, gradient=True) for name, num_rows in rows), default=0)


def returned_bytes(segment: TiledLayout, steps: IntArray, sweep: Sweep) -> IntArray:
    """The most :func:`returned_rows_bytes` of a direct cut, for each of some strips in a backward sweep."""
    largest = np.zeros(len(steps), dtype=np.int64)
    kinds = segment.schedule.kinds[1][steps].tolist()
    for name in sorted(segment.from_source & segment.direct):
        start, stop = segment.rows_read(name, sweep)
        reads = _ReadsCache(segment, sweep, Port("grad_source", name))
        row_bytes = segment.source_row_bytes(name, sweep, gradient=True) // len(sweep.chunk)
        num_rows = [rows if reads["joint", kind] else 0 for rows, kind in zip((stop - start)[steps].tolist(), kinds, strict=True)]
        largest = np.maximum(largest, [returned_rows_bytes(rows * row_bytes, rows) for rows in num_rows])
    return largest


def _tallest_grad_rows(segment: TiledLayout, sweep: Sweep, name: str) -> int:
    """Rows of the tallest strip of the gradient of an input that is not resident."""
    start, stop = segment.rows_read(name, sweep)
    kinds = segment.schedule.kinds[1].tolist()
    reads = _ReadsCache(segment, sweep, Port("grad_source", name))
    return max((int(stop[step] - start[step]) for step in range(segment.schedule.num_steps) if reads["joint", kinds[step]]), default=0)
