"""Offload lowering: the copies of a chain schedule become schedule ops of a region.

A chain copies activations and residuals of stages; a region copies values and residuals of segments. An activation may consist of several
values, and where skips cross several cuts, a value is part of several activations. A value leaves with the first of them, its bytes are
freed when all of its existing activations are off the device, and it returns with the first. A stage reads a value as a part of an
activation on the device, so it is available. Some copies of the chain are useless in the model: a value after its last use is already
freed. These schedule ops are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sft.runtime.moves import ScheduleOp, SegmentSchedule
from sft.runtime.region import Region
from sft.solvers.schedule import Operation

__all__ = ["OffloadLowering", "drop_idle_copies"]


@dataclass(slots=True)
class OffloadLowering:
    """Translates copy operations of a chain, tracking the location of its activations.

    Attributes:
        values: values of each activation, ``x_0`` first.
        segments: index of the segment that keeps the residuals of each stage, for stages from 1 on; the first entry is unused.
    """

    values: Sequence[Sequence[str]]
    segments: Sequence[int]
    _on_device: dict[int, bool] = field(default_factory=dict)
    _copied: set[str] = field(default_factory=set)
    _away: set[str] = field(default_factory=set)

    def mark_computed(self, activation: int) -> None:
        """Record that a forward operation has computed an activation."""
        self._on_device[activation] = True
        fresh = {name for name in self.values[activation] if not any(name in self.values[i] for i in self._on_device if i < activation)}
        self._copied -= fresh
        self._away -= fresh

    def lower(self, operation: Operation) -> Iterator[ScheduleOp]:
        """Schedule ops of a copy or free operation of the chain."""
        kind, number = operation.kind, int(operation.value[1:])
        if operation.value[0] == "s":
            if kind in ("offload", "release", "prefetch"):
                yield ScheduleOp(kind, self.segments[number])
            return
        if operation.value[0] == "y":
            return
        if kind == "free":
            self._on_device.pop(number, None)
        elif kind in ("release", "prefetch"):
            self._on_device[number] = kind == "prefetch"
        for name in self.values[number]:
            if kind == "offload" and name not in self._copied:
                self._copied.add(name)
                yield ScheduleOp("offload", value=name)
            elif kind == "prefetch" and name in self._away:
                self._away.discard(name)
                yield ScheduleOp("prefetch", value=name)
            elif kind in ("release", "free") and self._is_releasable(name):
                self._away.add(name)
                yield ScheduleOp("release", value=name)

    def _is_releasable(self, name: str) -> bool:
        """True if a value has a copy, and every activation that contains it is off the device."""
        if name not in self._copied or name in self._away:
            return False
        locations = [on_device for number, on_device in self._on_device.items() if name in self.values[number]]
        return bool(locations) and not any(locations)


def drop_idle_copies(region: Region, order: SegmentSchedule) -> SegmentSchedule:
    """Drop copies of values that cannot leave, are not read afterwards, or never free their bytes."""
    lives = region.liveness.value_lifetimes(tuple(move for move in order if not move.is_copy))
    #: the remaining schedule ops; positions in `lives` count those that are not copies
    kept: list[ScheduleOp | None] = []
    pending: dict[str, list[int]] = {}
    position = 0
    for move in order:
        if not move.is_copy:
            kept.append(move)
            position += 1
            continue
        target = move.target
        life = next((life for life in lives.get(target, ()) if life[0] < position <= life[1]), None)
        kept.append(move if life is not None else None)
        if life is None:
            continue
        if move.kind == "offload":
            pending[target] = [len(kept) - 1]
        elif move.kind == "release":
            pending.setdefault(target, []).append(len(kept) - 1)
        else:
            pending.pop(target, None)
    for unread in pending.values():  # freed and not read again, or never freed
        for index in unread:
            kept[index] = None
    return tuple(move for move in kept if move is not None)
