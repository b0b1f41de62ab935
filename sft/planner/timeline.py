"""Timelines: the schedule ops of a step with their times, bytes and FLOPs.

An entry is one schedule op (``sft.runtime.moves``): a segment forward, the caller's turn, a segment back. Strips are not listed: a record
that is read, drawn and stored as JSON would become too large. The peak of an entry covers all strips of its segment. Bytes and FLOPs come
from the plan's projection, so the largest peak is the plan's and the FLOPs sum to the plan's.

Copies to the host and back are schedule ops, too, and overlap the computation: each direction of the link has a clock of its own, as in the
event simulation of a chain (``sft.solvers.simulate``). A copy begins when its direction is free and all earlier ops of the schedule have
completed; a release waits for the copy, and so does the first op that reads a prefetched value.

Seconds are of two kinds, which are never mixed. Estimated seconds exist for every plan: FLOPs and calls at a rate that is known to the
nearest power of ten for the kind of device (``sft.planner.cost.device_rates``). They rank plans and give the share of a step that a segment
takes, not its duration. Measured seconds come from timing the plan's programs on the device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sft.common.errors import InputError
from sft.runtime.moves import COPY_SIGNS

__all__ = ["SegmentCost", "Timeline", "TimelineEntry", "TimelineKind"]

#: Kind of a schedule op. A forward op after the loss is a recomputation.
TimelineKind = Literal["forward", "loss", "recompute", "backward", "offload", "release", "prefetch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    """One schedule op.

    Attributes:
        move: ``"F3"``, ``"F3+"``, ``"L"``, ``"B3"``, ``">add"``, ``"~add"`` or ``"<add"``; see `sft.Plan`.
        begin_bytes: bytes alive when it begins, above the resident bytes, as all bytes of a timeline.
        peak_bytes: peak bytes while it runs.
        end_bytes: bytes alive when it has completed and values after their last use are freed.
        flops: its FLOPs.
        estimated_seconds: seconds at the rates of the kind of device.
        measured_seconds: seconds measured on the device; ``None`` if not measured.
        copied_bytes: bytes that it copies to the host, or back.
        waits_for: prefetched targets that must have arrived: values, or ``"3+"`` for the residuals of segment 3.
        weight_bytes: link traffic of streamed weights, their gradients, and the reads and writes of their updates.
    """

    move: str
    begin_bytes: int
    peak_bytes: int
    end_bytes: int
    flops: int
    estimated_seconds: float
    measured_seconds: float | None = None
    copied_bytes: int = 0
    waits_for: tuple[str, ...] = ()
    weight_bytes: int = 0

    def __post_init__(self) -> None:
        if re.fullmatch(r"L|F\d+\+?|B\d+|[>~<]\S+", self.move) is None:
            raise InputError(
                f"{self.move!r} is not a move of a timeline: expected F3, F3+, L, B3, >x, ~x or <x; make a new plan with sft.plan(...)"
            )
        if not 0 <= max(self.begin_bytes, self.end_bytes) <= self.peak_bytes:
            raise InputError(
                f"timeline, {self.move}: a peak of {self.peak_bytes} bytes, but {self.begin_bytes} at its begin and {self.end_bytes} at "
                "its end; make a new plan with sft.plan(...)"
            )

    @property
    def segment(self) -> int | None:
        """Number of the segment that runs; ``None`` for the caller's turn and for copies."""
        return int(self.move.strip("FB+")) if self.move[0] in "FB" else None

    @property
    def seconds(self) -> float:
        """Measured seconds if known, otherwise estimated ones."""
        return self.estimated_seconds if self.measured_seconds is None else self.measured_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCost:
    """Seconds and FLOPs of one segment in a step.

    Attributes:
        segment: its number.
        forward_seconds: seconds of its first forward run.
        recompute_seconds: seconds of its later forward runs as schedule ops of their own; recomputation within the backward pass of a
            tiled segment is part of that pass.
        backward_seconds: seconds of its backward pass.
        share: share of all seconds of the step.
        flops: FLOPs of all these runs.
    """

    segment: int
    forward_seconds: float
    recompute_seconds: float
    backward_seconds: float
    share: float
    flops: int

    @property
    def seconds(self) -> float:
        """Sum of forward, recomputation and backward."""
        return self.forward_seconds + self.recompute_seconds + self.backward_seconds

    @property
    def flops_per_second(self) -> float:
        """FLOPs per second; 0 if it takes no time."""
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The schedule ops of a step in order.

    Attributes:
        entries: one entry per schedule op.
    """

    entries: tuple[TimelineEntry, ...]

    @property
    def is_measured(self) -> bool:
        """True if all entries have measured seconds."""
        return bool(self.entries) and all(entry.measured_seconds is not None for entry in self.entries)

    @property
    def estimated_seconds(self) -> float:
        """Seconds of the step at the rates of the kind of device."""
        return _end_seconds(self._simulate_spans([entry.estimated_seconds for entry in self.entries]))

    @property
    def seconds(self) -> float:
        """Seconds of the step: measured if all entries are, otherwise estimated."""
        return _end_seconds(self.spans)

    @property
    def idle_seconds(self) -> float:
        """Seconds of the step that only wait for copies, without computation.

        Time that a segment waits for its streamed boundary tensors belongs to the seconds of its ops, and is not included.
        """
        computing = (duration for entry, duration in zip(self.entries, self._seconds(), strict=True) if entry.move[0] not in COPY_SIGNS)
        return max(0.0, self.seconds - sum(computing))

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the step."""
        return max((entry.peak_bytes for entry in self.entries), default=0)

    @property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """Begin and end of each entry, in seconds."""
        return self._simulate_spans(self._seconds())

    def _simulate_spans(self, durations: Sequence[float]) -> tuple[tuple[float, float], ...]:
        """Begin and end of each entry for these durations; computation and both directions of the link run concurrently."""
        spans: list[tuple[float, float]] = []
        now = 0.0
        free = {">": 0.0, "<": 0.0}
        done: dict[str, float] = {}
        for entry, duration in zip(self.entries, durations, strict=True):
            sign, target = entry.move[0], entry.move[1:]
            if sign in free:
                start = max(now, free[sign])
                done[target] = free[sign] = start + duration
                spans.append((start, start + duration))
                continue
            start = now if sign == "~" else max([now, *(done[awaited] for awaited in entry.waits_for)])
            now = max(now, done[target]) if sign == "~" else start + duration
            spans.append((start, now))
        return tuple(spans)

    @property
    def kinds(self) -> tuple[TimelineKind, ...]:
        """Kind of each entry."""
        kinds: list[TimelineKind] = []
        is_after_loss = False
        for entry in self.entries:
            is_after_loss = is_after_loss or entry.move == "L"
            if entry.move == "L":
                kinds.append("loss")
            elif entry.move[0] in COPY_SIGNS:
                kinds.append(COPY_SIGNS[entry.move[0]])
            elif entry.move.startswith("B"):
                kinds.append("backward")
            else:
                kinds.append("recompute" if is_after_loss else "forward")
        return tuple(kinds)

    def costs(self) -> tuple[SegmentCost, ...]:
        """Cost of each segment, by number."""
        seconds: dict[int, dict[TimelineKind, float]] = {}
        flops: dict[int, int] = {}
        for entry, kind, duration in zip(self.entries, self.kinds, self._seconds(), strict=True):
            if entry.segment is not None:
                of_kind = seconds.setdefault(entry.segment, {"forward": 0.0, "recompute": 0.0, "backward": 0.0})
                of_kind[kind] += duration
                flops[entry.segment] = flops.get(entry.segment, 0) + entry.flops
        total = self.seconds
        return tuple(
            SegmentCost(
                segment=segment,
                forward_seconds=of_kind["forward"],
                recompute_seconds=of_kind["recompute"],
                backward_seconds=of_kind["backward"],
                share=sum(of_kind.values()) / total if total else 0.0,
                flops=flops[segment],
            )
            for segment, of_kind in sorted(seconds.items())
        )

    def measured(self, seconds: Sequence[float]) -> Timeline:
        """The timeline with a measured time for each entry.

        Raises:
            ValueError: the number of times differs from the number of entries.
        """
        entries = (replace(entry, measured_seconds=measured) for entry, measured in zip(self.entries, seconds, strict=True))
        return Timeline(entries=tuple(entries))

    def _seconds(self) -> tuple[float, ...]:
        if self.is_measured:
            return tuple(entry.seconds for entry in self.entries)
        return tuple(entry.estimated_seconds for entry in self.entries)


def _end_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """End of the last span, in seconds."""

    return max((stop for _, stop in spans), default=0.0)
