"""What ranks say to each other, on any machine.

Like a walk, this code only moves handles: it asks a machine for buffers and views and a *link* to swap them with a peer. On the machine of
byte counts the same code counts what the staging buffers hold and what crosses the link, so a plan's traffic is the step's.

Everything is point to point and in rounds: in round ``k`` member ``i`` of a group sends to ``i + k`` and receives from ``i - k``. So no
two ranks ever wait for each other's later message, what is staged is one peer's share at a time, and sums are taken in one order:

* *rows* go straight from one buffer into the other where they are one piece of memory, and through a staging buffer elsewhere;
* *sums* are taken in windows of a few MiB, each member summing its share of the window in the members' order and handing the result round
  (a reduce-scatter and an all-gather: ``2 (n - 1) / n`` of the bytes for each rank). All ranks end up with the same bits;
* *running reductions* are small: everyone gets all of them and merges them in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from sft.analysis.axes import ROWS, Axes
from sft.analysis.interval import Interval
from sft.bands.mesh import MeshShape
from sft.walk.machine import Handle, Machine

__all__ = ["WINDOW_BYTES", "BandMachine", "Comm", "Link", "Over", "Rows", "Topic", "Traffic", "Whole"]

#: The ranks that share an image; those of all replicas that have the same band; or all of the mesh.
Over = Literal["band", "replica", "mesh"]
#: What is sent: rows of images and of their gradients, global values and their gradients, gradients of parameters.
Topic = Literal["rows", "globals", "parameters"]

#: Sums are taken in windows of so many bytes.
WINDOW_BYTES = 4 * 2**20
#: Small tensors that merging two running reductions holds at once, at most.
_NUM_MERGED = 8


@dataclass(slots=True)
class Traffic:
    """Bytes that a rank sent and received, by topic."""

    sent_bytes: dict[Topic, int] = field(default_factory=lambda: {"rows": 0, "globals": 0, "parameters": 0})
    received_bytes: dict[Topic, int] = field(default_factory=lambda: {"rows": 0, "globals": 0, "parameters": 0})
    num_messages: int = 0

    def note(self, topic: Topic, sent_bytes: int, received_bytes: int) -> None:
        """Count one swap."""
        self.sent_bytes[topic] += sent_bytes
        self.received_bytes[topic] += received_bytes
        self.num_messages += bool(sent_bytes) + bool(received_bytes)


class Link(Protocol):
    """The way to the other ranks."""

    traffic: Traffic

    def swap(self, over: Over, send: tuple[int, Handle] | None, receive: tuple[int, Handle] | None) -> None:
        """Send a dense buffer to one member of a group while filling one from another."""


class BandMachine(Machine, Protocol):
    """A machine of a rank in a mesh."""

    @property
    def comm(self) -> Comm: ...

    def copy(self, target: Handle, source: Handle) -> None:
        """Fill a buffer with another."""

    def scale(self, handle: Handle, factor: Handle) -> None:
        """Multiply in place, with a number or with a buffer that broadcasts."""

    def flat(self, handle: Handle, start: int, length: int) -> Handle:
        """Elements of a dense buffer in the order of its memory, as a view."""

    def merge(self, kind: str, parts: Sequence[Handle], largest: bool, scratch_bytes: int) -> None:
        """Merge running reductions into the first."""

    def synchronized_share(self, moments: Handle, num_elements: int) -> Handle:
        """Which part of the elements behind moments over several images are those of one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A buffer of rows of an image.

    Attributes:
        handle: the buffer.
        first_row: of the image, that the buffer begins with.
        shape: of a whole image.
        dtype: of its elements.
        axes: of the image.
        is_dense: whether a few rows of the buffer are one piece of memory.
    """

    handle: Handle
    first_row: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: Axes
    is_dense: bool

    def view(self, machine: Machine, rows: Interval) -> Handle:
        """Some of the rows."""
        return machine.view(self.handle, None, rows.shift(-self.first_row), axes=self.axes)

    def part_shape(self, rows: Interval) -> tuple[int, ...]:
        """Shape of some of the rows."""
        return self.axes.with_extent(self.shape, ROWS, len(rows))

    def num_bytes(self, rows: Interval) -> int:
        """Bytes of some of the rows."""
        return math.prod(self.part_shape(rows)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A dense buffer to be summed: its size and type."""

    handle: Handle
    num_elements: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Comm:
    """One rank's part in all exchanges.

    Attributes:
        link: the way to the others.
        shape: of the mesh.
        replica: this rank's place.
        band: likewise.
    """

    link: Link
    shape: MeshShape
    replica: int
    band: int

    @property
    def traffic(self) -> Traffic:
        """What has been sent and received."""
        return self.link.traffic

    def _place(self, over: Over) -> tuple[int, int]:
        """How many members a group has, and which of them this rank is."""
        num_bands = self.shape.num_bands
        places = {
            "band": (num_bands, self.band),
            "replica": (self.shape.num_replicas, self.replica),
            "mesh": (self.shape.num_ranks, self.replica * num_bands + self.band),
        }
        return places[over]

    def _rounds(self, over: Over) -> Iterator[tuple[int, int]]:
        """Whom to send to and whom to receive from, round by round."""
        count, me = self._place(over)
        for distance in range(1, count):
            yield (me + distance) % count, (me - distance) % count

    def exchange(
        self, machine: BandMachine, value: Rows, sends: Mapping[int, Interval], receives: Mapping[int, Interval], *, adds: bool
    ) -> None:
        """Send rows of a buffer to other bands, and fill (or add to) rows of it with theirs."""
        for target, source in self._rounds("band"):
            out, into = sends.get(target, Interval(0, 0)), receives.get(source, Interval(0, 0))
            if not out and not into:
                continue
            send = receive = None
            if out:
                send = value.view(machine, out)
                if not value.is_dense:
                    send = machine.allocate(value.part_shape(out), value.dtype, zero=False, contiguous=True)
                    machine.copy(send, value.view(machine, out))
            if into:
                receive = value.view(machine, into)
                if adds or not value.is_dense:
                    receive = machine.allocate(value.part_shape(into), value.dtype, zero=False, contiguous=not value.is_dense)
            self.link.swap("band", None if send is None else (target, send), None if receive is None else (source, receive))
            self.traffic.note("rows", value.num_bytes(out) if out else 0, value.num_bytes(into) if into else 0)
            del send
            if into and adds:
                machine.add(value.view(machine, into), receive)
            elif into and not value.is_dense:
                machine.copy(value.view(machine, into), receive)
            del receive

    def sum(self, machine: BandMachine, values: Sequence[Whole], over: Over, topic: Topic, *, factor: float = 1.0) -> None:
        """Replace buffers by their sums over a group, times a factor; the same buffers in the same order on all of its ranks."""
        count, _ = self._place(over)
        if count == 1:
            return
        for dtype in dict.fromkeys(value.dtype for value in values):
            of_type = [value for value in values if value.dtype == dtype]
            for pieces in _windows(of_type, WINDOW_BYTES // dtype.itemsize):
                self._sum_window(machine, pieces, dtype, over, topic, factor)

    def _sum_window(
        self, machine: BandMachine, pieces: Sequence[tuple[Whole, int, int]], dtype: torch.dtype, over: Over, topic: Topic, factor: float
    ) -> None:
        """Sum elements of some buffers: pieces are (buffer, first element, number of elements)."""
        count, me = self._place(over)
        # The last share is filled up, so that all ranks send as much.
        share = -(-sum(number for _, _, number in pieces) // count)
        window = machine.allocate((count * share,), dtype, zero=False)
        for (value, start, number), at in zip(pieces, _starts(pieces), strict=True):
            machine.copy(machine.flat(window, at, number), machine.flat(value.handle, start, number))
        arrived = machine.allocate((count, share), dtype, zero=False)
        machine.copy(machine.flat(arrived, me * share, share), machine.flat(window, me * share, share))
        for target, source in self._rounds(over):
            sent, received = machine.flat(window, target * share, share), machine.flat(arrived, source * share, share)
            self.link.swap(over, (target, sent), (source, received))
            self.traffic.note(topic, share * dtype.itemsize, share * dtype.itemsize)
        total = machine.flat(arrived, 0, share)
        for member in range(1, count):
            machine.add(total, machine.flat(arrived, member * share, share))
        if factor != 1.0:
            machine.scale(total, factor)
        machine.copy(machine.flat(window, me * share, share), total)
        del total, arrived, sent, received
        for target, source in self._rounds(over):
            mine, other = machine.flat(window, me * share, share), machine.flat(window, source * share, share)
            self.link.swap(over, (target, mine), (source, other))
            self.traffic.note(topic, share * dtype.itemsize, share * dtype.itemsize)
        for (value, start, number), at in zip(pieces, _starts(pieces), strict=True):
            machine.copy(machine.flat(value.handle, start, number), machine.flat(window, at, number))

    def merge(self, machine: BandMachine, running: Handle, shape: tuple[int, ...], kind: str, over: Over, *, largest: bool = True) -> None:
        """Merge running reductions (fp64) over a group."""
        count, me = self._place(over)
        if count == 1:
            return
        length, num_bytes = math.prod(shape), math.prod(shape) * torch.float64.itemsize
        arrived = machine.allocate((count, *shape), torch.float64, zero=False, contiguous=True)
        parts = [machine.view(arrived, Interval(member, member + 1), None) for member in range(count)]
        machine.copy(machine.flat(parts[me], 0, length), machine.flat(running, 0, length))
        for target, source in self._rounds(over):
            self.link.swap(over, (target, parts[me]), (source, parts[source]))
            self.traffic.note("globals", num_bytes, num_bytes)
        machine.merge(kind, parts, largest, _NUM_MERGED * num_bytes)
        machine.copy(machine.flat(running, 0, length), machine.flat(parts[0], 0, length))


def _starts(pieces: Sequence[tuple[Whole, int, int]]) -> list[int]:
    """Where each piece begins in the window."""
    found, at = [], 0
    for _, _, number in pieces:
        found.append(at)
        at += number
    return found


def _windows(values: Sequence[Whole], most: int) -> Iterator[list[tuple[Whole, int, int]]]:
    """Buffers one behind the other, in windows of at most so many elements."""
    pieces: list[tuple[Whole, int, int]] = []
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
