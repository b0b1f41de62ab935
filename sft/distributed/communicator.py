"""What ranks say to each other, on any machine.

Like a walk, this code only moves handles: it asks a machine for buffers and views and a *link* to carry messages. On the machine of byte
counts the same code counts what the staging buffers hold and what crosses the link, so a plan's traffic is the step's.

Everything is point to point, and is posted first and waited for later, now or behind a few strips:

* *rows* go straight from one buffer into the other where they are one piece of memory, and through a staging buffer elsewhere
  (`RowExchange`).
  Where whole images are gathered, this is in rounds, so that what is staged is one peer's share at a time: in round ``k`` member ``i`` of a
  group sends to ``i + k`` and receives from ``i - k``;
* *sums* are taken in windows (``sums``), in one order;
* *running reductions* are small: everyone gets all of them and merges them in order.

What a rank does between the strips of a segment: post messages, wait for messages, go on with sums.

Before a segment runs, things to do are put on its agenda, each with the number of strips that are to run before it. The segment asks for
what is due before each strip, and whatever is left is done behind its last one, in the same order. So a segment that is only added up (by
the planner) does all of it at its end, and counts the same: the clock, by which messages are said to have been under way beside
arithmetic, shows for each entry the strips it was put down for. What the agenda needs (buffers to send from, buffers that arrive) is
allocated before the segment runs and held until it is through, so what is held while it runs does not depend on when messages arrive.
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
    """What is to be done while a segment runs, and how much a rank has computed in its step.

    Attributes:
        clock: strips, and segments on whole tensors, that have run so far.
        entries: what is on the agenda of the running segment: strips of it before each entry, and what to do; those done are held, too.
    """

    clock: int = 0
    entries: list[tuple[int, Callable[[], Any]]] = field(default_factory=list)
    _begin: int = 0
    _num_done: int = 0

    def put(self, num_strips: int, entry: Callable[[], Any]) -> None:
        """Do something when so many strips of the next segment have run, behind what has been put down for that time."""
        assert not self._num_done, "the agenda is made before the segment runs"
        self.entries.append((num_strips, entry))
        self.entries.sort(key=lambda other: other[0])

    def reach(self, num_strips: int) -> None:
        """Do what is due when so many strips of the segment have run."""
        while self._num_done < len(self.entries) and self.entries[self._num_done][0] <= num_strips:
            due, entry = self.entries[self._num_done]
            self._num_done += 1
            self.clock = self._begin + due
            entry()
        self.clock = self._begin + num_strips

    def finish(self, num_strips: int) -> None:
        """Do what is left when the segment, of so many strips, is through."""
        self.reach(num_strips)
        assert self._num_done == len(self.entries), "an entry is due behind the segment's last strip"
        self._begin = self.clock
        self.entries, self._num_done = [], 0


#: Small tensors that merging two running reductions holds at once, at most.
_NUM_MERGED = 8


class BandMachine(Machine, Protocol):
    """A machine of a rank in a mesh, for one step or one pass."""

    @property
    def comm(self) -> Communicator: ...

    @property
    def comm_queue(self) -> CommQueue:
        """What is to be done between strips."""

    @property
    def row_exchanges(self) -> dict[tuple[str, bool], RowExchange]:
        """Rows that are under way: by value, and by whether they are those that are made first."""

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Fill a buffer with another."""

    def scale(self, handle: Buffer, factor: Buffer) -> None:
        """Multiply in place, with a number or with a buffer that broadcasts."""

    def flat(self, handle: Buffer, start: int, length: int) -> Buffer:
        """Elements of a dense buffer in the order of its memory, as a view."""

    def merge(self, kind: str, parts: Sequence[Buffer], largest: bool, scratch_bytes: int) -> None:
        """Merge running reductions into the first."""

    def synchronized_share(self, moments: Buffer, num_elements: int) -> Buffer:
        """Which part of the elements behind moments over several images are those of one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBuffer:
    """A buffer of rows of an image.

    Attributes:
        handle: the buffer; ``None`` where it is made later.
        first_row: of the image, that the buffer begins with.
        shape: of a whole image.
        dtype: of its elements.
        axes: of the image.
        is_dense: whether a few rows of the buffer are one piece of memory.
    """

    handle: Buffer
    first_row: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: Axes
    is_dense: bool

    def view(self, machine: Machine, rows: Interval) -> Buffer:
        """Some of the rows."""
        return machine.view(self.handle, None, rows.shift(-self.first_row), axes=self.axes)

    def part_shape(self, rows: Interval) -> tuple[int, ...]:
        """Shape of some of the rows."""
        return self.axes.with_extent(self.shape, ROWS, len(rows))

    def num_bytes(self, rows: Interval) -> int:
        """Bytes of some of the rows."""
        return math.prod(self.part_shape(rows)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingMessages:
    """Messages that are under way.

    Attributes:
        ticket: the link's.
        topic: what they are about.
        sent_bytes: how much goes.
        received_bytes: how much comes.
        clock: what the agenda's clock showed when they were posted.
    """

    ticket: int
    topic: Topic
    sent_bytes: int
    received_bytes: int
    clock: int


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """One rank's part in all exchanges.

    Attributes:
        link: the way to the others.
        shape: of the mesh.
        replica: this rank's place.
        band: likewise.
    """

    transport: Transport
    shape: MeshShape
    replica: int
    band: int

    @property
    def traffic(self) -> RankTraffic:
        """What has been sent and received."""
        return self.transport.traffic

    def place(self, over: RankGroup) -> tuple[int, int]:
        """How many members a group has, and which of them this rank is."""
        num_bands, num_replicas = self.shape.num_bands, self.shape.num_replicas
        if over == "band":
            return num_bands, self.band
        return (num_replicas, self.replica) if over == "replica" else (num_replicas * num_bands, self.replica * num_bands + self.band)

    def rounds(self, over: RankGroup) -> Iterator[tuple[int, int]]:
        """Whom to send to and whom to receive from, round by round."""
        count, me = self.place(over)
        for distance in range(1, count):
            yield (me + distance) % count, (me - distance) % count

    def post(
        self, machine: BandMachine, over: RankGroup, topic: Topic, messages: Sequence[Message], sent_bytes: int, received_bytes: int
    ) -> PendingMessages:
        """Begin to send and to receive."""
        ticket = self.transport.post(over, topic, messages)
        return PendingMessages(
            ticket=ticket, topic=topic, sent_bytes=sent_bytes, received_bytes=received_bytes, clock=machine.comm_queue.clock
        )

    def wait(self, machine: BandMachine, posted: PendingMessages) -> None:
        """Wait until that is done."""
        self.transport.wait(posted.ticket)
        is_overlapped = machine.comm_queue.clock > posted.clock
        self.traffic.record(posted.topic, posted.sent_bytes, posted.received_bytes, is_overlapped=is_overlapped)

    def exchange(
        self, machine: BandMachine, value: RowBuffer, sends: Mapping[int, Interval], receives: Mapping[int, Interval], *, adds: bool
    ) -> None:
        """Send rows of a buffer to other bands and fill (or add to) rows of it with theirs, at once, round by round."""
        for target, source in self.rounds("band"):
            out = {target: sends[target]} if sends.get(target) else {}
            into = {source: receives[source]} if receives.get(source) else {}
            if out or into:
                parcel = RowExchange(value=value, sends=out, receives=into, adds=adds)
                parcel.make_room(machine)
                parcel.post(machine, value.handle)
                parcel.wait(machine)
                del parcel

    def merge(
        self, machine: BandMachine, running: Buffer, shape: tuple[int, ...], kind: str, over: RankGroup, *, largest: bool = True
    ) -> None:
        """Merge running reductions (fp64) over a group."""
        count, me = self.place(over)
        if count == 1:
            return
        length, num_bytes = math.prod(shape), math.prod(shape) * torch.float64.itemsize
        arrived = machine.allocate((count, *shape), torch.float64, zero=False, contiguous=True)
        parts = [machine.view(arrived, Interval(member, member + 1), None) for member in range(count)]
        machine.copy(machine.flat(parts[me], 0, length), machine.flat(running, 0, length))
        messages = [
            message
            for target, source in self.rounds(over)
            for message in (Message(target, parts[me], is_sent=True), Message(source, parts[source], is_sent=False))
        ]
        others_bytes = (count - 1) * num_bytes
        self.wait(machine, self.post(machine, over, "globals", messages, others_bytes, others_bytes))
        del messages
        machine.merge(kind, parts, largest, _NUM_MERGED * num_bytes)
        machine.copy(machine.flat(running, 0, length), machine.flat(parts[0], 0, length))


@dataclass(slots=True, kw_only=True)
class RowExchange:
    """Rows of one value that this band sends to others and gets from others.

    First room is made for what has to be staged, then the messages are posted, then they are waited for; the room is there until the
    parcel is dropped.

    Attributes:
        value: the buffer of rows; its handle is not needed before the messages are posted.
        sends: rows for other bands.
        receives: rows from other bands.
        adds: whether arriving rows are added to what is there.
    """

    value: RowBuffer
    sends: Mapping[int, Interval]
    receives: Mapping[int, Interval]
    adds: bool
    _outgoing: dict[int, Buffer] = field(default_factory=dict)
    _arriving: dict[int, Buffer] = field(default_factory=dict)
    _posted: PendingMessages | None = None

    def make_room(self, machine: BandMachine) -> None:
        """Allocate what goes out from, or comes into, another place than the buffer."""
        value = self.value
        if not value.is_dense:
            for target, rows in self.sends.items():
                self._outgoing[target] = machine.allocate(value.part_shape(rows), value.dtype, zero=False, contiguous=True)
        if self.adds or not value.is_dense:
            for source, rows in self.receives.items():
                shape = value.part_shape(rows)
                self._arriving[source] = machine.allocate(shape, value.dtype, zero=False, contiguous=not value.is_dense)

    def post(self, machine: BandMachine, handle: Buffer) -> None:
        """Begin to send rows of the buffer, and to receive."""
        value = self.value = replace(self.value, handle=handle)
        for target, staged in self._outgoing.items():
            machine.copy(staged, value.view(machine, self.sends[target]))
        messages = [
            Message(target, self._outgoing[target] if target in self._outgoing else value.view(machine, rows), is_sent=True)
            for target, rows in self.sends.items()
        ]
        messages += [
            Message(source, self._arriving[source] if source in self._arriving else value.view(machine, rows), is_sent=False)
            for source, rows in self.receives.items()
        ]
        sent_bytes, received_bytes = (sum(map(value.num_bytes, rows.values())) for rows in (self.sends, self.receives))
        self._posted = machine.comm.post(machine, "band", "rows", messages, sent_bytes, received_bytes)

    def wait(self, machine: BandMachine) -> None:
        """Wait for the messages, and put what arrived where it belongs, in the order of the bands' distance."""
        assert self._posted is not None, "a parcel is waited for that was not posted"
        machine.comm.wait(machine, self._posted)
        for source, staged in self._arriving.items():
            into = self.value.view(machine, self.receives[source])
            if self.adds:
                machine.add(into, staged)
            else:
                machine.copy(into, staged)

    @property
    def sent(self) -> Interval:
        """The rows that are sent, and what is between them."""
        return _bounding_interval(self.sends.values())

    @property
    def received(self) -> Interval:
        """The rows that are received, likewise."""
        return _bounding_interval(self.receives.values())


def _bounding_interval(parts: Iterable[Interval]) -> Interval:
    found = Interval(0, 0)
    for part in parts:
        found = found.hull(part)
    return found
