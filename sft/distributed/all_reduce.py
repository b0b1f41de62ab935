"""Sums of buffers over a group of ranks, at once or beside a segment's strips.

Sums are taken in windows of a few MiB, in two phases: each member gets its share of the window from all others and adds them up in the
members' order (a reduce-scatter), and hands the result round (an all-gather): ``2 (n - 1) / n`` of the bytes for each rank. All ranks
end up with the same bits, and these do not depend on where windows begin.

Beside a segment the messages of a phase are under way while strips run. One window follows the other, in one order on all ranks, and
all are through when the segment is. So at each border between segments all ranks have come equally far, however many strips each of them
has, and none ever waits for a message that another posts behind a border at which it waits itself.
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

#: Sums are taken in windows of so many bytes.
WINDOW_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseBuffer:
    """A dense buffer to be summed: its size and type."""

    handle: Buffer
    num_elements: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _StagingBuffers:
    """Staging for the windows of one element type: what a rank sends, and what arrives."""

    window: Buffer
    arrived: Buffer


@dataclass(slots=True)
class _ReduceWindow:
    """Elements of some buffers: pieces are (buffer, first element, number of elements)."""

    pieces: Sequence[tuple[DenseBuffer, int, int]]
    over: RankGroup
    topic: Topic
    factor: float
    _posted: PendingMessages | None = field(default=None, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0][0].dtype

    def share(self, count: int) -> int:
        """Elements that each member sums up; the last share is filled up, so that all ranks send as much."""
        return -(-sum(number for _, _, number in self.pieces) // count)

    def scatter(self, machine: BandMachine, room: _StagingBuffers) -> None:
        """Begin to give each member its share."""
        count, me = machine.comm.place(self.over)
        share = self.share(count)
        for (value, start, number), at in zip(self.pieces, self._starts(), strict=True):
            machine.copy(machine.flat(room.window, at, number), machine.flat(value.handle, start, number))
        machine.copy(machine.flat(room.arrived, me * share, share), machine.flat(room.window, me * share, share))
        self._post(
            machine,
            [(target, machine.flat(room.window, target * share, share)) for target, _ in machine.comm.rounds(self.over)],
            [(source, machine.flat(room.arrived, source * share, share)) for _, source in machine.comm.rounds(self.over)],
        )

    def gather(self, machine: BandMachine, room: _StagingBuffers) -> None:
        """Add up the own share, and begin to hand it round."""
        self._wait(machine)
        count, me = machine.comm.place(self.over)
        share = self.share(count)
        total = machine.flat(room.arrived, 0, share)
        for member in range(1, count):
            machine.add(total, machine.flat(room.arrived, member * share, share))
        if self.factor != 1.0:
            machine.scale(total, self.factor)
        mine = machine.flat(room.window, me * share, share)
        machine.copy(mine, total)
        self._post(
            machine,
            [(target, mine) for target, _ in machine.comm.rounds(self.over)],
            [(source, machine.flat(room.window, source * share, share)) for _, source in machine.comm.rounds(self.over)],
        )

    def end(self, machine: BandMachine, room: _StagingBuffers) -> None:
        """Put the sums in the place of the summands."""
        self._wait(machine)
        for (value, start, number), at in zip(self.pieces, self._starts(), strict=True):
            machine.copy(machine.flat(value.handle, start, number), machine.flat(room.window, at, number))

    def _post(self, machine: BandMachine, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]]) -> None:
        count, _ = machine.comm.place(self.over)
        num_bytes = (count - 1) * self.share(count) * self.dtype.itemsize
        messages = [
            message
            for (target, out), (source, into) in zip(sends, receives, strict=True)
            for message in (Message(target, out, is_sent=True), Message(source, into, is_sent=False))
        ]
        self._posted = machine.comm.post(machine, self.over, self.topic, messages, num_bytes, num_bytes)

    def _wait(self, machine: BandMachine) -> None:
        assert self._posted is not None, "a window is waited for that was not posted"
        machine.comm.wait(machine, self._posted)
        self._posted = None

    def _starts(self) -> list[int]:
        """Where each piece begins in the window."""
        return [0, *accumulate(number for _, _, number in self.pieces[:-1])]


def all_reduce_buffers(machine: BandMachine, values: Sequence[DenseBuffer], over: RankGroup, topic: Topic, *, factor: float = 1.0) -> None:
    """Replace buffers by their sums over a group, times a factor; the same buffers in the same order on all of its ranks."""
    for window in _reduce_windows(machine, values, over, topic, factor):
        room = _allocate_staging(machine, [window])[window.dtype]
        window.scatter(machine, room)
        window.gather(machine, room)
        window.end(machine, room)
        del room


def queue_all_reduce(machine: BandMachine, values: Sequence[DenseBuffer], over: RankGroup, topic: Topic, *, num_strips: int) -> None:
    """The same, beside the strips of the segment that runs next: on its agenda, evenly spread."""
    windows = _reduce_windows(machine, values, over, topic, 1.0)
    rooms = _allocate_staging(machine, windows)
    steps: list[Callable[[BandMachine, _StagingBuffers], None]] = []
    for window in windows:
        steps += [window.scatter, window.gather, window.end]
    for number, step in enumerate(steps):
        # A window ends where the next one begins, so between all messages and the wait for them there is as much time.
        turn, phase = divmod(number, 3)
        due = (2 * turn + phase) * num_strips // (2 * len(windows))
        machine.comm_queue.put(due, partial(step, machine, rooms[windows[turn].dtype]))


def _allocate_staging(machine: BandMachine, windows: Sequence[_ReduceWindow]) -> dict[torch.dtype, _StagingBuffers]:
    """Staging for the largest window of each type."""
    found = {}
    for dtype in dict.fromkeys(window.dtype for window in windows):
        sizes = [machine.comm.place(window.over)[0] for window in windows]
        most = max(count * window.share(count) for count, window in zip(sizes, windows, strict=True) if window.dtype == dtype)
        found[dtype] = _StagingBuffers(*(machine.allocate((most,), dtype, zero=False) for _ in range(2)))
    return found


def _reduce_windows(
    machine: BandMachine, values: Sequence[DenseBuffer], over: RankGroup, topic: Topic, factor: float
) -> list[_ReduceWindow]:
    """Windows of all buffers, type by type; none where a group has one member."""
    if machine.comm.place(over)[0] == 1:
        return []
    found = []
    for dtype in dict.fromkeys(value.dtype for value in values):
        of_type = [value for value in values if value.dtype == dtype]
        found += [_ReduceWindow(pieces, over, topic, factor) for pieces in _pack_windows(of_type, WINDOW_BYTES // dtype.itemsize)]
    return found


def _pack_windows(values: Sequence[DenseBuffer], most: int) -> Iterator[list[tuple[DenseBuffer, int, int]]]:
    """Buffers one behind the other, in windows of at most so many elements."""
    pieces: list[tuple[DenseBuffer, int, int]] = []
    room = most
    for value in values:
        start = 0
        while start < value.num_elements:
            number = min(room, value.num_elements - start)
            pieces.append((value, start, number))
            start, room = start + number, room - number
            if not room:
                yield pieces
                pieces, room = [], most
    if pieces:
        yield pieces
