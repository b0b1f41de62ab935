"""A step over time: which move of its order runs when, for how long, and what is held meanwhile.

An entry is a move (``sft.runtime.moves``): a segment forward, the caller's turn, a segment back. The strips of a segment are too fine for a
record that is read, drawn and kept as JSON; what they hold at most is the entry's peak. Bytes and FLOPs come from the run that projects
the plan, so the highest peak is the plan's and the FLOPs sum to the plan's.

Copies to the host and back are moves, too, and run beside the others: each direction of the link has a clock of its own, as in the event
simulation of a chain (``sft.solvers.simulate``). A copy begins when its direction is free and everything before it in the order is
through; a release waits for one, and so does the first move that reads what comes back.

Seconds are of two kinds, which are never mixed. Estimated ones are there for every plan: FLOPs, and calls, at a rate that is known of the
kind of device to the nearest power of ten (``sft.planner.cost.roofline``). They say which of two plans is faster and what share of a step
a segment takes, not how long it takes. Measured ones come from timing the plan's programs on the device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sft.common.errors import InputError
from sft.runtime.moves import COPY_SIGNS

__all__ = ["SegmentCost", "Timeline", "TimelineEntry", "TimelineKind"]

#: What a move does. A forward move behind the loss is a recomputation.
TimelineKind = Literal["forward", "loss", "recompute", "backward", "offload", "release", "prefetch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    """One move.

    Attributes:
        move: ``"F3"``, ``"F3+"``, ``"L"``, ``"B3"``, ``">add"``, ``"~add"`` or ``"<add"``; see `sft.Plan`.
        begin_bytes: held when it begins, above the resident bytes, as everywhere in a timeline.
        peak_bytes: most that is held while it lasts.
        end_bytes: held when it is through, and what nobody reads again is gone.
        flops: what it computes.
        estimated_seconds: how long it takes at the rates of the kind of device.
        measured_seconds: how long it took on the device; ``None`` where nobody measured.
        copied_bytes: what it copies to the host, or back.
        waits_for: what is on its way back and has to be there: values, or ``"3+"`` for what segment 3 kept.
        weight_bytes: what passes over the link meanwhile of streamed weights, their gradients, and what updates read and write.
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
                f"{self.move!r} is no move of a timeline: expected F3, F3+, L, B3, >x, ~x or <x; make a new plan with sft.plan(...)"
            )
        if not 0 <= max(self.begin_bytes, self.end_bytes) <= self.peak_bytes:
            raise InputError(
                f"timeline, {self.move}: a peak of {self.peak_bytes} bytes, but {self.begin_bytes} at its begin and {self.end_bytes} at "
                "its end; make a new plan with sft.plan(...)"
            )

    @property
    def segment(self) -> int | None:
        """The number of the segment that runs; none where the caller has its turn, or something is copied."""
        return int(self.move.strip("FB+")) if self.move[0] in "FB" else None

    @property
    def seconds(self) -> float:
        """Measured seconds, where there are any; else the estimated ones."""
        return self.estimated_seconds if self.measured_seconds is None else self.measured_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCost:
    """What a segment takes of a step.

    Attributes:
        segment: its number.
        forward_seconds: of its first run forward.
        recompute_seconds: of its later runs forward, as moves of their own; what a tiled segment computes again within its backward pass
            is in that one.
        backward_seconds: of its backward pass.
        share: of all seconds of the step.
        flops: of all of these.
    """

    segment: int
    forward_seconds: float
    recompute_seconds: float
    backward_seconds: float
    share: float
    flops: int

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.forward_seconds + self.recompute_seconds + self.backward_seconds

    @property
    def flops_per_second(self) -> float:
        """FLOPs a second; 0 where it takes no time."""
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The moves of a step in order.

    Attributes:
        entries: one for each.
    """

    entries: tuple[TimelineEntry, ...]

    @property
    def is_measured(self) -> bool:
        """Whether its seconds were measured."""
        return bool(self.entries) and all(entry.measured_seconds is not None for entry in self.entries)

    @property
    def estimated_seconds(self) -> float:
        """Of the step, at the rates of the kind of device."""
        return _end_seconds(self._played([entry.estimated_seconds for entry in self.entries]))

    @property
    def seconds(self) -> float:
        """Of the step: measured, where all of it was; else estimated."""
        return _end_seconds(self.spans)

    @property
    def idle_seconds(self) -> float:
        """Seconds of the step in which nothing is computed, because a copy is waited for.

        What a segment waits for its streamed cuts is in the seconds of its moves, and not in these.
        """
        computing = (taken for entry, taken in zip(self.entries, self._seconds(), strict=True) if entry.move[0] not in COPY_SIGNS)
        return max(0.0, self.seconds - sum(computing))

    @property
    def peak_bytes(self) -> int:
        """Most bytes held."""
        return max((entry.peak_bytes for entry in self.entries), default=0)

    @property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """When each entry begins and ends, in seconds."""
        return self._played(self._seconds())

    def _played(self, seconds: Sequence[float]) -> tuple[tuple[float, float], ...]:
        """When each entry begins and ends if it takes so long: the computation and both ways of the link work at once."""
        found: list[tuple[float, float]] = []
        now = 0.0
        free = {">": 0.0, "<": 0.0}
        done: dict[str, float] = {}
        for entry, taken in zip(self.entries, seconds, strict=True):
            sign, target = entry.move[0], entry.move[1:]
            if sign in free:
                start = max(now, free[sign])
                done[target] = free[sign] = start + taken
                found.append((start, start + taken))
                continue
            start = now if sign == "~" else max([now, *(done[other] for other in entry.waits_for)])
            now = max(now, done[target]) if sign == "~" else start + taken
            found.append((start, now))
        return tuple(found)

    @property
    def kinds(self) -> tuple[TimelineKind, ...]:
        """What each entry does."""
        found: list[TimelineKind] = []
        is_behind = False
        for entry in self.entries:
            is_behind = is_behind or entry.move == "L"
            if entry.move == "L":
                found.append("loss")
            elif entry.move[0] in COPY_SIGNS:
                found.append(COPY_SIGNS[entry.move[0]])
            elif entry.move.startswith("B"):
                found.append("backward")
            else:
                found.append("recompute" if is_behind else "forward")
        return tuple(found)

    def costs(self) -> tuple[SegmentCost, ...]:
        """What each segment takes, by number."""
        seconds: dict[int, dict[TimelineKind, float]] = {}
        flops: dict[int, int] = {}
        for entry, kind, taken in zip(self.entries, self.kinds, self._seconds(), strict=True):
            if entry.segment is not None:
                of_kind = seconds.setdefault(entry.segment, {"forward": 0.0, "recompute": 0.0, "backward": 0.0})
                of_kind[kind] += taken
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
            ValueError: there are more or fewer of them.
        """
        timed = (replace(entry, measured_seconds=taken) for entry, taken in zip(self.entries, seconds, strict=True))
        return Timeline(entries=tuple(timed))

    def _seconds(self) -> tuple[float, ...]:
        if self.is_measured:
            return tuple(entry.seconds for entry in self.entries)
        return tuple(entry.estimated_seconds for entry in self.entries)


def _end_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """When the last of them is over."""
    return max((stop for _, stop in spans), default=0.0)
