"""Exchange of halo rows between bands while segments run.

Forward, strips run from top to bottom, sweep after sweep (a sweep covers a chunk of the batch and a panel). The halo of the band *above* is
computed by the first strips of the last sweep, and rows from the band *below* are first read by the last strips of the next segment's first
sweep. So messages *upwards* are posted between two strips, as soon as their rows exist, and waited for before the strip that reads them.
Messages *downwards* have rows that are computed last and read first: they are posted after the segment and waited for before the next
segment that reads them. In the backward pass strips run from bottom to top, and upwards and downwards exchange roles: gradients of rows
that belong to the band below are complete first, and gradients from the band above are needed last.

A message is waited for at the latest when the segment after the one that posted it has run, so that staging memory does not wait for a late
reader. All bands post in the same order: segment by segment, rows computed first before rows computed last, and the values of a segment in
order. Images that all bands gather are exchanged at once.

`StripTimeline` answers when rows are computed and read, in numbers of strips; `HaloExchange` posts the messages and waits for them.
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
    """Order of the strips of a segment on one band. All methods return the number of strips that run before the event.

    Attributes:
        schedule: the strips of a sweep.
        num_sweeps: sweeps in each direction.
    """

    schedule: StripSchedule
    num_sweeps: int

    @property
    def num_strips(self) -> int:
        """Strips of all sweeps."""
        return self.schedule.num_steps * self.num_sweeps

    def strips_until_computed(self, name: str, stop: int) -> int:
        """Forward: strips until the rows of a result before ``stop`` are computed in all sweeps."""
        if not self.schedule.num_steps:
            return 0
        return (self.num_sweeps - 1) * self.schedule.num_steps + int(np.searchsorted(self.schedule.frontier[name], stop))

    def strips_before_read(self, name: str, start: int) -> int:
        """Forward: strips before the first of a sweep that reads a row of a source from ``start`` on; all strips if none does."""
        _, stops = self.schedule.rows_read(name, self.schedule.names)
        reads = stops > start
        return int(reads.argmax()) if reads.any() else self.schedule.num_steps

    def strips_until_grad_complete(self, name: str, start: int) -> int:
        """Backward: strips until the gradients of a source's rows from ``start`` on are complete."""
        if not self.schedule.num_steps:
            return 0
        return self.num_sweeps * self.schedule.num_steps - self.strips_before_read(name, start)

    def strips_before_grad_read(self, name: str, stop: int) -> int:
        """Backward: strips before the first that reads the gradient of a row of a result before ``stop``."""
        if not self.schedule.num_steps:
            return 0
        return self.schedule.num_steps - int(np.searchsorted(self.schedule.frontier[name], stop))


@dataclass(frozen=True, kw_only=True)
class HaloExchange:
    """Messages of one band about values between segments.

    Attributes:
        band: index of the band.
        ownership: row ownership of the values.
        strip_timelines: timeline of each segment in strips.
        reads: for each segment the values that it reads from outside.
        writes: for each segment the values that other segments or the caller read.
        last_contributors: for values with gradients of halo rows that return between strips, the segment that adds to them last.
        row_buffer: the rows of a value around a buffer; with True the rows of its gradient.
    """

    band: int
    ownership: OwnershipMap
    strip_timelines: Sequence[StripTimeline | None]
    reads: Sequence[tuple[str, ...]]
    writes: Sequence[tuple[str, ...]]
    last_contributors: Mapping[str, int]
    row_buffer: Callable[[str, Buffer, bool], RowBuffer]

    @contextmanager
    def forward(self, machine: BandMachine, index: int, values: Mapping[str, Buffer]) -> Iterator[None]:
        """Run a segment forward inside: rows that it reads arrive, rows that other bands read of its results are sent."""
        timeline, pending = self.strip_timelines[index], list(machine.row_exchanges)
        for name in self.reads[index]:
            self._await_rows(machine, name, timeline, _due_before_read)
        sent = {
            name: value for name in self.writes[index] if (value := self.ownership.values.get(name)) is not None and value.halo_transfers
        }
        first_exchanges = self._row_exchanges(
            {name: value.halo_transfers for name, value in sent.items() if not value.is_gathered}, upwards=True
        )
        due = max(
            (
                _require_timeline(timeline).strips_until_computed(name, exchange.sent_span.stop)
                for name, exchange in first_exchanges.items()
            ),
            default=0,
        )
        self._queue_post(machine, first_exchanges, due, values)
        yield
        machine.comm_queue.finish(1 if timeline is None else timeline.num_strips)
        self._wait_for(machine, pending)
        for name, value in sent.items():
            if value.is_gathered:
                self._gather(machine, name, values[name], value)
        self._post(
            machine,
            self._row_exchanges({n: value.halo_transfers for n, value in sent.items() if not value.is_gathered}, upwards=False),
            values,
        )

    @contextmanager
    def backward(self, machine: BandMachine, index: int, grads: Mapping[str, Buffer], *, is_run: bool) -> Iterator[None]:
        """Run a segment backward inside (if it has a backward pass): gradients of sent rows arrive, gradients of halo rows return."""
        timeline, pending = self.strip_timelines[index], list(machine.row_exchanges)
        for name in self.writes[index]:
            self._await_rows(machine, name, timeline, _due_before_grad_read)
        complete = {name: self.ownership.values[name].grad_transfers for name, last in self.last_contributors.items() if last == index}
        first_exchanges = self._row_exchanges(complete, upwards=False, returns=True)
        due = max(
            (
                _require_timeline(timeline).strips_until_grad_complete(name, exchange.sent_span.start)
                for name, exchange in first_exchanges.items()
                if exchange.sends
            ),
            default=0,
        )
        self._queue_post(machine, first_exchanges, due, grads)
        yield
        machine.comm_queue.finish((1 if timeline is None else timeline.num_strips) if is_run else 0)
        self._wait_for(machine, pending)
        self._post(machine, self._row_exchanges(complete, upwards=True, returns=True), grads)

    def end(self, machine: BandMachine) -> None:
        """Wait for all pending messages."""
        self._wait_for(machine, list(machine.row_exchanges))

    def _row_exchanges(
        self, transfers: Mapping[str, Sequence[RowTransfer]], *, upwards: bool, returns: bool = False
    ) -> dict[str, RowExchange]:
        """Exchanges in one direction, by value."""
        exchanges = {}
        for name, both_directions in transfers.items():
            ordered = sorted(both_directions, key=lambda t: abs(t.source - t.target))
            sends = {t.target: t.rows for t in ordered if t.source == self.band and (t.target < t.source) == upwards}
            receives = {t.source: t.rows for t in ordered if t.target == self.band and (t.target < t.source) == upwards}
            if sends or receives:
                exchanges[name] = RowExchange(value=self.row_buffer(name, None, returns), sends=sends, receives=receives, adds=returns)
        return exchanges

    def _queue_post(self, machine: BandMachine, row_exchanges: Mapping[str, RowExchange], due: int, handles: Mapping[str, Buffer]) -> None:
        """Queue the post of rows that are computed first, between strips of the segment that runs next."""
        if not row_exchanges:
            return
        for name, exchange in row_exchanges.items():
            exchange.allocate_staging(machine)
            machine.row_exchanges[name, True] = exchange

        def post() -> None:
            for name, exchange in row_exchanges.items():
                exchange.post(machine, handles[name])

        machine.comm_queue.put(due, post)

    def _post(self, machine: BandMachine, row_exchanges: Mapping[str, RowExchange], handles: Mapping[str, Buffer]) -> None:
        """Post rows that are computed last."""
        for name, exchange in row_exchanges.items():
            exchange.allocate_staging(machine)
            exchange.post(machine, handles[name])
            machine.row_exchanges[name, False] = exchange

    def _await_rows(
        self, machine: BandMachine, name: str, timeline: StripTimeline | None, due: Callable[[StripTimeline, str, Interval], int]
    ) -> None:
        """Wait now for rows that were computed last, and queue the wait for rows computed first, before the strip that reads them.

        Exchanges that only send are completed at the end of the segment.
        """
        for is_first in (False, True):
            exchange = machine.row_exchanges.pop((name, is_first), None)
            if exchange is None:
                continue
            if timeline is None or (exchange.receives and not is_first):
                exchange.wait(machine)
            else:
                machine.comm_queue.put(
                    due(timeline, name, exchange.received_span) if exchange.receives else timeline.num_strips,
                    partial(exchange.wait, machine),
                )

    def _wait_for(self, machine: BandMachine, keys: Sequence[tuple[str, bool]]) -> None:
        """Wait for the given exchanges, if they are still pending."""
        for key in keys:
            exchange = machine.row_exchanges.pop(key, None)
            if exchange is not None:
                exchange.wait(machine)

    def _gather(self, machine: BandMachine, name: str, handle: Buffer, ownership: RowOwnership) -> None:
        """Send the owned rows of an image to all bands, and receive theirs."""
        sends = {t.target: t.rows for t in ownership.halo_transfers if t.source == self.band}
        receives = {t.source: t.rows for t in ownership.halo_transfers if t.target == self.band}
        machine.comm.exchange(machine, self.row_buffer(name, handle, False), sends, receives, adds=False)


def _due_before_read(timeline: StripTimeline, name: str, rows: Interval) -> int:
    return timeline.strips_before_read(name, rows.start)


def _due_before_grad_read(timeline: StripTimeline, name: str, rows: Interval) -> int:
    return timeline.strips_before_grad_read(name, rows.stop)


def _require_timeline(timeline: StripTimeline | None) -> StripTimeline:
    assert timeline is not None, "rows are exchanged between strips of a segment without strips"
    return timeline
