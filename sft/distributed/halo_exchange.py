"""Rows on their way between bands, while segments run.

Strips run from the top to the bottom, so of a result the rows that the band above borrows are made first; and of what comes from below, the
last strips of the next segment are the first to read it. So the messages *upwards* are posted as soon as these rows are there, between two
strips, and waited for before the strip that reads what they bring. It is the other way round with the messages *downwards*: their rows are
made last and read first, so they are posted when the segment has run and waited for before the next one that reads them begins. In the
backward pass strips run from the bottom to the top, and upwards and downwards change places.

A message is waited for at the latest when the segment behind that which posted it has run, so that what is staged for a value that is read
much later does not wait for that. All bands post in one order: segment by segment, what is made first, then what is made last, and the
values of a segment in order. Whole images that everybody gathers are exchanged at once.

When rows of a value that crosses a segment's border are made and read, in strips of one band's walks.

Forward, strips run from the top to the bottom, walk after walk (parts of the batch, and panels). So the rows that go to the band above are
there when the last walk has made its first strips, and those that come from below are read by the last strips of the first walk. Back, the
strips run from the bottom to the top, and it is the other way round: gradients of rows that belong to the band below are complete
first, and those that come from above are needed last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from sft.analysis.tiling.strips import StripSchedule
from sft.common.interval import Interval
from sft.distributed.communicator import BandMachine, RowBuffer, RowExchange
from sft.distributed.ownership import OwnershipMap, RowOwnership, RowTransfer
from sft.runtime.machine import Buffer

__all__ = ["HaloExchange", "StripTimeline"]


@dataclass(frozen=True, kw_only=True)
class StripTimeline:
    """The strips of a segment on one band; all answers are numbers of strips that run before.

    Attributes:
        schedule: the strips of a walk.
        num_walks: walks in each direction.
    """

    schedule: StripSchedule
    num_walks: int

    @property
    def num_strips(self) -> int:
        """Strips of all walks."""
        return self.schedule.num_steps * self.num_walks

    def made(self, name: str, stop: int) -> int:
        """Forward, until the rows of a result before ``stop`` are made, in all walks."""
        if not self.schedule.num_steps:
            return 0
        return (self.num_walks - 1) * self.schedule.num_steps + int(np.searchsorted(self.schedule.frontier[name], stop))

    def read(self, name: str, start: int) -> int:
        """Forward, before the first of a walk that reads a row of a source from ``start`` on; all of them where none does."""
        _, stops = self.schedule.rows_read(name, self.schedule.names)
        reads = stops > start
        return int(reads.argmax()) if reads.any() else self.schedule.num_steps

    def settled(self, name: str, start: int) -> int:
        """Back, until nothing is added any more to the gradients of a source's rows from ``start`` on."""
        if not self.schedule.num_steps:
            return 0
        return self.num_walks * self.schedule.num_steps - self.read(name, start)

    def wanted(self, name: str, stop: int) -> int:
        """Back, before the first that takes the gradient of a row of a result before ``stop``."""
        if not self.schedule.num_steps:
            return 0
        return self.schedule.num_steps - int(np.searchsorted(self.schedule.frontier[name], stop))


@dataclass(frozen=True, kw_only=True)
class HaloExchange:
    """What one band sends and receives of the values between segments.

    Attributes:
        band: which.
        layout: who holds what.
        strip_timelines: of each segment in strips.
        reads: for each segment the values it takes from outside.
        makes: for each segment the values that others need.
        returned: of values whose borrowed rows' gradients return beside strips the segment that adds to these last.
        rows: the buffer of a value's rows, or (``True``) of their gradients, around a handle.
    """

    band: int
    layout: OwnershipMap
    strip_timelines: Sequence[StripTimeline | None]
    reads: Sequence[tuple[str, ...]]
    makes: Sequence[tuple[str, ...]]
    returned: Mapping[str, int]
    rows: Callable[[str, Buffer, bool], RowBuffer]

    @contextmanager
    def forward(self, machine: BandMachine, index: int, values: Mapping[str, Buffer]) -> Iterator[None]:
        """Run a segment forward inside: what it reads arrives, what others read of its results goes."""
        table, earlier = self.strip_timelines[index], list(machine.row_exchanges)
        for name in self.reads[index]:
            self._take(machine, name, table, _strips_before_read)
        lent = {name: held for name in self.makes[index] if (held := self.layout.held.get(name)) is not None and held.borrowed}
        ahead = self._row_exchanges({name: held.borrowed for name, held in lent.items() if not held.is_gathered}, upwards=True)
        due = max((_require_timeline(table).made(name, parcel.sent.stop) for name, parcel in ahead.items()), default=0)
        self._send_ahead(machine, ahead, due, values)
        yield
        machine.comm_queue.finish(1 if table is None else table.num_strips)
        self._end(machine, earlier)
        for name, held in lent.items():
            if held.is_gathered:
                self._gather(machine, name, values[name], held)
        self._send(
            machine, self._row_exchanges({n: held.borrowed for n, held in lent.items() if not held.is_gathered}, upwards=False), values
        )

    @contextmanager
    def backward(self, machine: BandMachine, index: int, grads: Mapping[str, Buffer], *, is_run: bool) -> Iterator[None]:
        """Run a segment back inside (if it has a backward pass): gradients of lent rows arrive, those of borrowed rows go."""
        table, earlier = self.strip_timelines[index], list(machine.row_exchanges)
        for name in self.makes[index]:
            self._take(machine, name, table, _strips_before_needed)
        complete = {name: self.layout.held[name].lent for name, last in self.returned.items() if last == index}
        ahead = self._row_exchanges(complete, upwards=False, returns=True)
        due = max((_require_timeline(table).settled(name, parcel.sent.start) for name, parcel in ahead.items() if parcel.sends), default=0)
        self._send_ahead(machine, ahead, due, grads)
        yield
        machine.comm_queue.finish((1 if table is None else table.num_strips) if is_run else 0)
        self._end(machine, earlier)
        self._send(machine, self._row_exchanges(complete, upwards=True, returns=True), grads)

    def end(self, machine: BandMachine) -> None:
        """Wait for all that is still under way."""
        self._end(machine, list(machine.row_exchanges))

    def _row_exchanges(
        self, transfers: Mapping[str, Sequence[RowTransfer]], *, upwards: bool, returns: bool = False
    ) -> dict[str, RowExchange]:
        """What goes one way, by value."""
        found = {}
        for name, crossing in transfers.items():
            crossing = sorted(crossing, key=lambda t: abs(t.source - t.target))
            sends = {t.target: t.rows for t in crossing if t.source == self.band and (t.target < t.source) == upwards}
            receives = {t.source: t.rows for t in crossing if t.target == self.band and (t.target < t.source) == upwards}
            if sends or receives:
                found[name] = RowExchange(value=self.rows(name, None, returns), sends=sends, receives=receives, adds=returns)
        return found

    def _send_ahead(self, machine: BandMachine, row_exchanges: Mapping[str, RowExchange], due: int, handles: Mapping[str, Buffer]) -> None:
        """Post what is made first, between strips of the segment that runs next."""
        if not row_exchanges:
            return
        for name, parcel in row_exchanges.items():
            parcel.make_room(machine)
            machine.row_exchanges[name, True] = parcel

        def post() -> None:
            for name, parcel in row_exchanges.items():
                parcel.post(machine, handles[name])

        machine.comm_queue.put(due, post)

    def _send(self, machine: BandMachine, row_exchanges: Mapping[str, RowExchange], handles: Mapping[str, Buffer]) -> None:
        """Post what is made last."""
        for name, parcel in row_exchanges.items():
            parcel.make_room(machine)
            parcel.post(machine, handles[name])
            machine.row_exchanges[name, False] = parcel

    def _take(
        self, machine: BandMachine, name: str, table: StripTimeline | None, due: Callable[[StripTimeline, str, Interval], int]
    ) -> None:
        """Wait for rows that were made last now, and for those that were made first before the strip that needs them.

        What has only been sent nobody here waits for, and is left to the end of the segment.
        """
        for is_first in (False, True):
            parcel = machine.row_exchanges.pop((name, is_first), None)
            if parcel is None:
                continue
            if table is None or (parcel.receives and not is_first):
                parcel.wait(machine)
            else:
                machine.comm_queue.put(
                    due(table, name, parcel.received) if parcel.receives else table.num_strips, partial(parcel.wait, machine)
                )

    def _end(self, machine: BandMachine, which: Sequence[tuple[str, bool]]) -> None:
        """Wait for those of some row_exchanges that are still under way."""
        for key in which:
            parcel = machine.row_exchanges.pop(key, None)
            if parcel is not None:
                parcel.wait(machine)

    def _gather(self, machine: BandMachine, name: str, handle: Buffer, held: RowOwnership) -> None:
        """Give everybody the own rows of an image, and take theirs."""
        sends = {t.target: t.rows for t in held.borrowed if t.source == self.band}
        receives = {t.source: t.rows for t in held.borrowed if t.target == self.band}
        machine.comm.exchange(machine, self.rows(name, handle, False), sends, receives, adds=False)


def _strips_before_read(table: StripTimeline, name: str, rows: Interval) -> int:
    return table.read(name, rows.start)


def _strips_before_needed(table: StripTimeline, name: str, rows: Interval) -> int:
    return table.wanted(name, rows.stop)


def _require_timeline(table: StripTimeline | None) -> StripTimeline:
    assert table is not None, "rows cross beside strips, and the segment has none"
    return table
