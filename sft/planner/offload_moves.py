"""A chain's copies as moves of a region: from activations and what stages save to values and what segments keep.

An activation of the chain may be several values, and where skips cross several cuts, a value is part of several activations. It leaves with
the first of them; its bytes are given back when all of those that exist are away; it comes back with the first. A stage reads a value as a
part of an activation that is there, so it finds it. What the chain takes for a copy of its own, the model may not need: a value that
nobody reads again is gone by then. Such moves are left out.
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
    """Where the activations of a chain are, while its operations become moves.

    Attributes:
        values: of each activation, ``x_0`` first.
        segments: which keeps what each stage saves, for the stages from 1 on; the first entry stands for none.
    """

    values: Sequence[Sequence[str]]
    segments: Sequence[int]
    _here: dict[int, bool] = field(default_factory=dict)
    _copied: set[str] = field(default_factory=set)
    _away: set[str] = field(default_factory=set)

    def made(self, activation: int) -> None:
        """A forward has made it."""
        self._here[activation] = True
        fresh = {name for name in self.values[activation] if not any(name in self.values[i] for i in self._here if i < activation)}
        self._copied -= fresh
        self._away -= fresh

    def moves(self, operation: Operation) -> Iterator[ScheduleOp]:
        """What a copy, or a free, of the chain means."""
        kind, number = operation.kind, int(operation.value[1:])
        if operation.value[0] == "s":
            if kind in ("offload", "release", "prefetch"):
                yield ScheduleOp(kind, self.segments[number])
            return
        if operation.value[0] == "y":
            return
        if kind == "free":
            self._here.pop(number, None)
        elif kind in ("release", "prefetch"):
            self._here[number] = kind == "prefetch"
        for name in self.values[number]:
            if kind == "offload" and name not in self._copied:
                self._copied.add(name)
                yield ScheduleOp("offload", value=name)
            elif kind == "prefetch" and name in self._away:
                self._away.discard(name)
                yield ScheduleOp("prefetch", value=name)
            elif kind in ("release", "free") and self._may_go(name):
                self._away.add(name)
                yield ScheduleOp("release", value=name)

    def _may_go(self, name: str) -> bool:
        """Whether a value has a copy, and every activation that it is part of is away."""
        if name not in self._copied or name in self._away:
            return False
        users = [is_here for number, is_here in self._here.items() if name in self.values[number]]
        return bool(users) and not any(users)


def drop_idle_copies(region: Region, order: SegmentSchedule) -> SegmentSchedule:
    """The order without copies of what cannot leave, or is not read behind them, or never gives its bytes back."""
    lives = region.liveness.value_lifetimes(tuple(move for move in order if not move.is_copy))
    #: the end of the life that a target is in, in moves that are no copies
    kept: list[ScheduleOp | None] = []
    pending: dict[str, list[int]] = {}
    place = 0
    for move in order:
        if not move.is_copy:
            kept.append(move)
            place += 1
            continue
        target = move.target
        life = next((life for life in lives.get(target, ()) if life[0] < place <= life[1]), None)
        kept.append(move if life is not None else None)
        if life is None:
            continue
        if move.kind == "offload":
            pending[target] = [len(kept) - 1]
        elif move.kind == "release":
            pending.setdefault(target, []).append(len(kept) - 1)
        else:
            pending.pop(target, None)
    for unread in pending.values():  # given back and not read again, or never given back
        for index in unread:
            kept[index] = None
    return tuple(move for move in kept if move is not None)
