"""Communication of one rank, written once for simulated and real machines.

Like the code of a sweep, this module only passes buffers around: it asks a machine for buffers and views and a *transport* to carry
messages. On a simulated machine the same code counts staging bytes and traffic, so the traffic of a plan equals that of the step.

All communication is point to point. Messages are posted first and waited for later, immediately or after some strips:

* *rows* (`RowExchange`) go directly from one buffer into the other where they are contiguous, otherwise through a staging buffer. Gathers
  of full images take rounds, so that one peer's share is staged at a time: in round ``k`` member ``i`` of a group sends to ``i + k`` and
  receives from ``i - k``;
* *sums* are reduced in windows (`all_reduce`), in one order;
* *running reductions* are small: every member receives all of them and merges them in order.

`CommQueue` holds the communication between the strips of a segment. Before a segment runs, entries are queued, each with the number of
strips that run before it. The segment runs the due entries before each strip, and the remaining ones after its last strip, in the same
order. A segment that is only costed (by the planner) runs all of them at its end, with the same counts: the clock, which decides if a
message overlapped with computation, shows the queued number of strips for each entry. Buffers of queued entries (to send from, to receive
into) are allocated before the segment runs and freed after it, so its memory does not depend on the time at which messages arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from sft.analysis.ir.axes import ROWS, Axes
from sft.common.interval import Interval
from sft.distributed.mesh import MeshShape
from sft.distributed.transport import Message, RankGroup, RankTraffic, Topic, Transport
from sft.runtime.machine import Buffer, Machine

__all__ = ["BandMachine", "CommQueue", "Communicator", "PendingMessages", "RowBuffer", "RowExchange"]


@dataclass(slots=True)
class CommQueue:
    """Communication to do while a segment runs, and the progress of the rank in its step.

    Attributes:
        clock: strips and untiled segments that have run so far.
        entries: (number of strips before it, function) of the running segment; finished entries stay until the segment ends.
    """

    clock: int = 0
    entries: list[tuple[int, Callable[[], Any]]] = field(default_factory=list)
    _begin: int = 0
    _num_done: int = 0

    def put(self, num_strips: int, entry: Callable[[], Any]) -> None:
        """Queue an entry after so many strips of the next segment, after the entries queued for the same time."""
        assert not self._num_done, "entries are queued before the segment runs"
        self.entries.append((num_strips, entry))
        self.entries.sort(key=lambda queued: queued[0])

    def reach(self, num_strips: int) -> None:
        """Run the entries that are due after so many strips of the segment."""
        while self._num_done < len(self.entries) and self.entries[self._num_done][0] <= num_strips:
            due, entry = self.entries[self._num_done]
            self._num_done += 1
            self.clock = self._begin + due
            entry()
        self.clock = self._begin + num_strips

    def finish(self, num_strips: int) -> None:
        """Run the remaining entries when the segment, of so many strips, has finished."""
        self.reach(num_strips)
        assert self._num_done == len(self.entries), "no entry is due after the segment's last strip"
        self._begin = self.clock
        self.entries, self._num_done = [], 0


#: Most small tensors that exist at once while two running reductions are merged.
_NUM_MERGE_TENSORS = 8


class BandMachine(Machine, Protocol):
    """Machine of a rank in a mesh, for one step or one pass."""

    @property
    def comm(self) -> Communicator:
        """The communicator of the rank."""

    @property
    def comm_queue(self) -> CommQueue:
        """Communication to do between strips."""

    @property
    def row_exchanges(self) -> dict[tuple[str, bool], RowExchange]:
        """Pending exchanges, by value and by whether their rows are computed first."""

    def scale(self, handle: Buffer, factor: Buffer) -> None:
        """Multiply in place, by a number or by a buffer that broadcasts."""

    def flat(self, handle: Buffer, start: int, length: int) -> Buffer:
        """Elements of a dense buffer in memory order, as a view."""

    def merge(self, kind: str, parts: Sequence[Buffer], largest: bool, scratch_bytes: int) -> None:
        """Merge running reductions into the first one."""

    def synchronized_share(self, moments: Buffer, num_elements: int) -> Buffer:
        """Fraction of one image's elements among those of moments over several images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBuffer:
    """A buffer of rows of an image.

    Attributes:
        handle: the buffer; ``None`` if it is allocated later.
        first_row: the buffer's first row, in the full image.
        shape: shape of the full image.
        dtype: element type.
        axes: axes of the image.
        is_dense: True if consecutive rows of the buffer are contiguous in memory.
    """

    handle: Buffer
    first_row: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: Axes
    is_dense: bool

    def view(self, machine: Machine, rows: Interval) -> Buffer:
        """View of some rows."""
        return machine.view(self.handle, None, rows.shift(-self.first_row), axes=self.axes)

    def rows_shape(self, rows: Interval) -> tuple[int, ...]:
        """Shape of some rows."""
        return self.axes.with_extent(self.shape, ROWS, len(rows))

    def num_bytes(self, rows: Interval) -> int:
        """Bytes of some rows."""
        return math.prod(self.rows_shape(rows)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingMessages:
    """Posted messages that have not been waited for.

    Attributes:
        ticket: ticket of the transport.
        topic: topic of the messages.
        sent_bytes: bytes to send.
        received_bytes: bytes to receive.
        clock: clock of the queue at the time of posting.
    """

    ticket: int
    topic: Topic
    sent_bytes: int
    received_bytes: int
    clock: int


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """Communication of one rank.

    Attributes:
        transport: carries the messages.
        shape: extents of the mesh.
        replica: index of this rank's replica.
        band: index of this rank's band.
    """

    transport: Transport
    shape: MeshShape
    replica: int
    band: int

    @property
    def traffic(self) -> RankTraffic:
        """Bytes sent and received."""
        return self.transport.traffic

    def size_and_index(self, over: RankGroup) -> tuple[int, int]:
        """Number of members of a group, and this rank's index in it."""
        num_bands, num_replicas = self.shape.num_bands, self.shape.num_replicas
        if over == "band":
            return num_bands, self.band
        return (num_replicas, self.replica) if over == "replica" else (num_replicas * num_bands, self.replica * num_bands + self.band)

    def rounds(self, over: RankGroup) -> Iterator[tuple[int, int]]:
        """(receiver, sender) of each round."""
        count, me = self.size_and_index(over)
        for distance in range(1, count):
            yield (me + distance) % count, (me - distance) % count

    def post(
        self, machine: BandMachine, over: RankGroup, topic: Topic, messages: Sequence[Message], sent_bytes: int, received_bytes: int
    ) -> PendingMessages:
        """Start to send and to receive."""
        ticket = self.transport.post(over, topic, messages)
        return PendingMessages(
            ticket=ticket, topic=topic, sent_bytes=sent_bytes, received_bytes=received_bytes, clock=machine.comm_queue.clock
        )

    def wait(self, machine: BandMachine, posted: PendingMessages) -> None:
        """Wait for posted messages."""
        self.transport.wait(posted.ticket)
        is_overlapped = machine.comm_queue.clock > posted.clock
        self.traffic.record(posted.topic, posted.sent_bytes, posted.received_bytes, is_overlapped=is_overlapped)

    def exchange(
        self, machine: BandMachine, value: RowBuffer, sends: Mapping[int, Interval], receives: Mapping[int, Interval], *, adds: bool
    ) -> None:
        """Exchange rows with other bands immediately, round by round: send the rows ``sends``, and fill (or add to) the rows
        ``receives``.
        """
        for target, source in self.rounds("band"):
            out = {target: sends[target]} if sends.get(target) else {}
            into = {source: receives[source]} if receives.get(source) else {}
            if out or into:
                exchange = RowExchange(value=value, sends=out, receives=into, adds=adds)
                exchange.allocate_staging(machine)
                exchange.post(machine, value.handle)
                exchange.wait(machine)
                del exchange

    def merge(
        self, machine: BandMachine, running: Buffer, shape: tuple[int, ...], kind: str, over: RankGroup, *, largest: bool = True
    ) -> None:
        """Merge running reductions (fp64) over a group."""
        count, me = self.size_and_index(over)
        if count == 1:
            return
        length, num_bytes = math.prod(shape), math.prod(shape) * torch.float64.itemsize
        arrived = machine.allocate((count, *shape), torch.float64, zero=False, contiguous=True)
        views = [machine.view(arrived, Interval(member, member + 1), None) for member in range(count)]
        machine.copy(machine.flat(views[me], 0, length), machine.flat(running, 0, length))
        messages = [
            message
            for target, source in self.rounds(over)
            for message in (Message(target, views[me], is_sent=True), Message(source, views[source], is_sent=False))
        ]
        remote_bytes = (count - 1) * num_bytes
        self.wait(machine, self.post(machine, over, "globals", messages, remote_bytes, remote_bytes))
        del messages
        machine.merge(kind, views, largest, _NUM_MERGE_TENSORS * num_bytes)
        machine.copy(machine.flat(running, 0, length), machine.flat(views[0], 0, length))


@dataclass(slots=True, kw_only=True)
class RowExchange:
    """Rows of one value that a band sends to and receives from other bands.

    Staging is allocated first, then messages are posted, then waited for. Staging lives as long as the exchange.

    Attributes:
        value: the buffer of rows; its handle is not needed before the messages are posted.
        sends: rows for other bands.
        receives: rows from other bands.
        adds: True if received rows are added to the buffer.
    """

    value: RowBuffer
    sends: Mapping[int, Interval]
    receives: Mapping[int, Interval]
    adds: bool
    _send_staging: dict[int, Buffer] = field(default_factory=dict)
    _receive_staging: dict[int, Buffer] = field(default_factory=dict)
    _pending: PendingMessages | None = None

    def allocate_staging(self, machine: BandMachine) -> None:
        """Allocate staging for rows that are not contiguous in the buffer, or that are added to it."""
        value = self.value
        if not value.is_dense:
            for target, rows in self.sends.items():
                self._send_staging[target] = machine.allocate(value.rows_shape(rows), value.dtype, zero=False, contiguous=True)
        if self.adds or not value.is_dense:
            for source, rows in self.receives.items():
                shape = value.rows_shape(rows)
                self._receive_staging[source] = machine.allocate(shape, value.dtype, zero=False, contiguous=not value.is_dense)

    def post(self, machine: BandMachine, handle: Buffer) -> None:
        """Start to send rows of the buffer, and to receive."""
        value = self.value = replace(self.value, handle=handle)
        for target, staged in self._send_staging.items():
            machine.copy(staged, value.view(machine, self.sends[target]))
        messages = [
            Message(target, self._send_staging[target] if target in self._send_staging else value.view(machine, rows), is_sent=True)
            for target, rows in self.sends.items()
        ]
        messages += [
            Message(source, self._receive_staging[source] if source in self._receive_staging else value.view(machine, rows), is_sent=False)
            for source, rows in self.receives.items()
        ]
        sent_bytes, received_bytes = (sum(map(value.num_bytes, rows.values())) for rows in (self.sends, self.receives))
        self._pending = machine.comm.post(machine, "band", "rows", messages, sent_bytes, received_bytes)

    def wait(self, machine: BandMachine) -> None:
        """Wait for the messages, and copy or add the received rows, in order of the distance between the bands."""
        assert self._pending is not None, "messages are posted before the wait"
        machine.comm.wait(machine, self._pending)
        for source, staged in self._receive_staging.items():
            into = self.value.view(machine, self.receives[source])
            if self.adds:
                machine.add(into, staged)
            else:
                machine.copy(into, staged)

    @property
    def sent_span(self) -> Interval:
        """Span of all sent rows."""
        return _bounding_interval(self.sends.values())

    @property
    def received_span(self) -> Interval:
        """Span of all received rows."""
        return _bounding_interval(self.receives.values())


def _bounding_interval(intervals: Iterable[Interval]) -> Interval:
    hull = Interval(0, 0)
    for interval in intervals:
        hull = hull.hull(interval)
    return hull
