"""All-reduce of buffers over a group of ranks: at once, or overlapped with the strips of a segment.

Buffers are summed in windows of a few MiB, in two phases. Reduce-scatter: each member receives its share of the window from all members and
adds the summands in the order of the members. All-gather: each member sends its sums to all members. A rank sends ``2 (n - 1) / n`` of the
bytes. All ranks get the same bits, and these do not depend on the borders of windows.

An overlapped all-reduce has the messages of a phase pending while strips run. Windows follow each other in the same order on all ranks, and
all complete with the segment. So all ranks have made the same progress at each border between segments, however many strips each has, and
no rank waits for a message that its sender posts only after a border at which it waits itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch

from sft.distributed.communicator import BandMachine, PendingMessages
from sft.distributed.transport import Message, RankGroup, Topic
from sft.runtime.machine import Buffer

__all__ = ["WINDOW_BYTES", "DenseBuffer", "all_reduce_buffers", "queue_all_reduce"]

#: Size of a window.
WINDOW_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseBuffer:
    """A dense buffer to sum: its size and type."""

    handle: Buffer
    num_elements: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _StagingBuffers:
    """Staging for windows of one element type: data to send, and data received."""

    window: Buffer
    arrived: Buffer


@dataclass(slots=True)
class _ReduceWindow:
    """One window of an all-reduce; a piece is (buffer, first element, number of elements)."""

    pieces: Sequence[tuple[DenseBuffer, int, int]]
    over: RankGroup
    topic: Topic
    factor: float
    _pending: PendingMessages | None = field(default=None, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the window."""
        return self.pieces[0][0].dtype

    def share(self, count: int) -> int:
        """Elements that each member sums. The last share is padded, so that all ranks send the same amount."""
        return -(-sum(number for _, _, number in self.pieces) // count)

    def scatter(self, machine: BandMachine, staging: _StagingBuffers) -> None:
        """Start the reduce-scatter."""
        count, me = machine.comm.size_and_index(self.over)
        share = self.share(count)
        for (value, start, number), at in zip(self.pieces, self._starts(), strict=True):
            machine.copy(machine.flat(staging.window, at, number), machine.flat(value.handle, start, number))
        machine.copy(machine.flat(staging.arrived, me * share, share), machine.flat(staging.window, me * share, share))
        self._post(
            machine,
            [(target, machine.flat(staging.window, target * share, share)) for target, _ in machine.comm.rounds(self.over)],
            [(source, machine.flat(staging.arrived, source * share, share)) for _, source in machine.comm.rounds(self.over)],
        )

    def gather(self, machine: BandMachine, staging: _StagingBuffers) -> None:
        """Sum this rank's share, and start the all-gather."""
        self._wait(machine)
        count, me = machine.comm.size_and_index(self.over)
        share = self.share(count)
        total = machine.flat(staging.arrived, 0, share)
        for member in range(1, count):
            machine.add(total, machine.flat(staging.arrived, member * share, share))
        if self.factor != 1.0:
            machine.scale(total, self.factor)
        mine = machine.flat(staging.window, me * share, share)
        machine.copy(mine, total)
        self._post(
            machine,
            [(target, mine) for target, _ in machine.comm.rounds(self.over)],
            [(source, machine.flat(staging.window, source * share, share)) for _, source in machine.comm.rounds(self.over)],
        )

    def end(self, machine: BandMachine, staging: _StagingBuffers) -> None:
        """Copy the sums into the buffers."""
        self._wait(machine)
        for (value, start, number), at in zip(self.pieces, self._starts(), strict=True):
            machine.copy(machine.flat(value.handle, start, number), machine.flat(staging.window, at, number))

    def _post(self, machine: BandMachine, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]]) -> None:
        count, _ = machine.comm.size_and_index(self.over)
        num_bytes = (count - 1) * self.share(count) * self.dtype.itemsize
        messages = [
            message
            for (target, out), (source, into) in zip(sends, receives, strict=True)
            for message in (Message(target, out, is_sent=True), Message(source, into, is_sent=False))
        ]
        self._pending = machine.comm.post(machine, self.over, self.topic, messages, num_bytes, num_bytes)

    def _wait(self, machine: BandMachine) -> None:
        assert self._pending is not None, "the messages of a window are posted before the wait"
        machine.comm.wait(machine, self._pending)
        self._pending = None

    def _starts(self) -> list[int]:
        """Offset of each piece in the window."""
        return [0, *accumulate(number for _, _, number in self.pieces[:-1])]


def all_reduce_buffers(machine: BandMachine, values: Sequence[DenseBuffer], over: RankGroup, topic: Topic, *, factor: float = 1.0) -> None:
    """Replace buffers by their sums over a group, times a factor. All ranks of the group pass the same buffers in the same order."""
    for window in _reduce_windows(machine, values, over, topic, factor):
        staging = _allocate_staging(machine, [window])[window.dtype]
        window.scatter(machine, staging)
        window.gather(machine, staging)
        window.end(machine, staging)
        del staging


def queue_all_reduce(machine: BandMachine, values: Sequence[DenseBuffer], *, num_strips: int) -> None:
    """Queue the sum of parameters' gradients over the bands, evenly spread over the strips of the segment that runs next."""
    windows = _reduce_windows(machine, values, "band", "parameters", 1.0)
    staging_by_dtype = _allocate_staging(machine, windows)
    steps: list[Callable[[BandMachine, _StagingBuffers], None]] = []
    for window in windows:
        steps += [window.scatter, window.gather, window.end]
    for number, step in enumerate(steps):
        # A window ends where the next one begins, so all messages have the same time between post and wait.
        turn, phase = divmod(number, 3)
        due = (2 * turn + phase) * num_strips // (2 * len(windows))
        machine.comm_queue.put(due, partial(step, machine, staging_by_dtype[windows[turn].dtype]))


def _allocate_staging(machine: BandMachine, windows: Sequence[_ReduceWindow]) -> dict[torch.dtype, _StagingBuffers]:
    """Staging for the largest window of each element type."""
    staging = {}
    for dtype in dict.fromkeys(window.dtype for window in windows):
        sizes = [machine.comm.size_and_index(window.over)[0] for window in windows]
        max_elements = max(count * window.share(count) for count, window in zip(sizes, windows, strict=True) if window.dtype == dtype)
        staging[dtype] = _StagingBuffers(*(machine.allocate((max_elements,), dtype, zero=False) for _ in range(2)))
    return staging


def _reduce_windows(
    machine: BandMachine, values: Sequence[DenseBuffer], over: RankGroup, topic: Topic, factor: float
) -> list[_ReduceWindow]:
    """Windows of all buffers, type by type; none if the group has one member."""
    if machine.comm.size_and_index(over)[0] == 1:
        return []
    windows = []
    for dtype in dict.fromkeys(value.dtype for value in values):
        of_type = [value for value in values if value.dtype == dtype]
        windows += [_ReduceWindow(pieces, over, topic, factor) for pieces in _pack_windows(of_type, WINDOW_BYTES // dtype.itemsize)]
    return windows


def _pack_windows(values: Sequence[DenseBuffer], max_elements: int) -> Iterator[list[tuple[DenseBuffer, int, int]]]:
    """Pack buffers one after the other into windows of at most ``max_elements`` elements."""
    pieces: list[tuple[DenseBuffer, int, int]] = []
    free = max_elements
    for value in values:
        start = 0
        while start < value.num_elements:
            number = min(free, value.num_elements - start)
            pieces.append((value, start, number))
            start, free = start + number, free - number
            if not free:
                yield pieces
                pieces, free = [], max_elements
    if pieces:
        yield pieces
