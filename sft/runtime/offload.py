"""What leaves for the host between two of its uses, on any machine.

A copy is of *buffers*: of the one behind a value, or of those that a segment made and kept and that nobody else knows. A value's buffer may
have views in what a segment kept (a rectifier's output, a convolution's input). They are neither moved nor changed: a machine empties the
buffer under all handles on it, and fills it again, so they hang together before and after.

Only what the region made itself may leave, and not what the caller has in hands: no inputs, parameters or outputs.

The host's room is one slab, laid out while the step runs by a rule that knows nothing of the machine. So the projection finds how large the
slab must be, and a step finds everything at the same places.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sft.runtime.moves import ScheduleOp

if TYPE_CHECKING:
    from sft.runtime.machine import Buffer, Machine

__all__ = ["HostArena", "OffloadState", "OffloadedValue", "copy_schedule_error", "value_lifetimes"]

_ALIGNMENT_BYTES = 256


@dataclass(slots=True)
class HostArena:
    """Which parts of a slab of host memory are taken.

    >>> space = HostArena()
    >>> space.take(1000), space.take(10), space.num_bytes
    (0, 1024, 1280)
    >>> space.give_back(0)
    >>> space.take(2000), space.take(500), space.num_bytes
    (1280, 0, 3328)

    Attributes:
        num_bytes: how large the slab has to be for what was ever taken.
    """

    num_bytes: int = 0
    _taken: list[tuple[int, int]] = field(default_factory=list)

    def take(self, num_bytes: int) -> int:
        """The lowest place with room for so many bytes."""
        place, start = 0, 0
        while place < len(self._taken) and self._taken[place][0] - start < num_bytes:
            start = self._taken[place][1]
            place += 1
        end = start + max(1, -(-num_bytes // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES  # what is there has a place of its own
        self._taken.insert(place, (start, end))
        self.num_bytes = max(self.num_bytes, end)
        return start

    def give_back(self, start: int) -> None:
        """End the use of what begins there."""
        self._taken = [part for part in self._taken if part[0] != start]


@dataclass(slots=True, eq=False)
class OffloadedValue:
    """Buffers that have, or are getting, a copy on the host.

    Attributes:
        target: what they are, as in the order.
        buffers: as the machine knows them.
        sizes: bytes of each.
        start: where the copy begins in the slab; one buffer follows another.
        is_away: whether the device's bytes are given back.
        is_arriving: whether the copy back has begun, and nobody has waited for it.
        down: what tells that the copy to the host is done, on machines that copy meanwhile.
        up: the same for the copy back.
    """

    target: str
    buffers: list[Any]
    sizes: tuple[int, ...]
    start: int
    is_away: bool = False
    is_arriving: bool = False
    down: Any = None
    up: Any = None

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(self.sizes)


@dataclass(slots=True)
class OffloadState:
    """The copies of a step that are in use.

    Attributes:
        by_target: what each is of.
        lasting: those that stay when a backward pass is through, since another one follows.
    """

    by_target: dict[str, OffloadedValue] = field(default_factory=dict)
    lasting: dict[str, tuple[OffloadedValue, bool]] = field(default_factory=dict)

    def fork(self) -> OffloadState:
        """For a backward pass that is not the last: what it finds on the host is there again when it is through (`restore`)."""
        return OffloadState(dict(self.by_target), {target: (copy, copy.is_away) for target, copy in self.by_target.items()})

    def run(self, machine: Machine, move: ScheduleOp, buffers: Sequence[Buffer]) -> None:
        """Do what a move says; ``buffers`` are those of an offload."""
        if move.kind == "offload":
            self.by_target[move.target] = machine.offload(move.target, buffers)
        elif move.kind == "release":
            machine.release(self.by_target[move.target])
        else:
            machine.prefetch(self.by_target[move.target])

    def settle(self, machine: Machine, targets: Iterable[str]) -> None:
        """Wait for those of these that are on their way back."""
        for target in targets:
            copy = self.by_target.get(target)
            if copy is not None and copy.is_arriving:
                machine.settle(copy)

    def end(self, machine: Machine, targets: Iterable[str]) -> None:
        """Nobody uses these any more."""
        for target in targets:
            copy = self.by_target.pop(target, None)
            if copy is not None and self.lasting.get(target, (None, False))[0] is not copy:
                machine.forget(copy)

    def restore(self, machine: Machine) -> None:
        """Bring what lasts to where it was, and end the rest, which a pass that failed has left."""
        self.end(machine, [target for target, copy in self.by_target.items() if self.lasting.get(target, (None, False))[0] is not copy])
        for copy, was_away in self.lasting.values():
            if copy.is_away and not was_away:
                machine.prefetch(copy)
            if copy.is_arriving:
                machine.settle(copy)
            if was_away and not copy.is_away:
                machine.release(copy)


def value_lifetimes(
    moves: Sequence[ScheduleOp],
    reads: Sequence[Collection[str]],
    backward_reads: Sequence[Collection[str]],
    makes: Sequence[Collection[str]],
    movable: Collection[str],
    saving_segments: Collection[int],
) -> dict[str, list[tuple[int, int]]]:
    """For everything that may leave the moves that make it and read it last, once for each time that it is made.

    Args: as for :func:`copy_schedule_error`; the moves hold no copies.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for place, move in enumerate(moves):
        own = f"{move.segment}+"
        read: Collection[str] = ()
        made: list[str] = []
        if move.kind == "forward":
            read = reads[move.segment]
            made = [name for name in makes[move.segment] if name in movable]
            made += [own] if move.keep and move.segment in saving_segments else []
        elif move.kind == "backward":
            read = (*backward_reads[move.segment], own)
        for target in read:
            if target in found:
                found[target][-1] = (found[target][-1][0], place)
        for target in made:
            found.setdefault(target, []).append((place, place))
    return found


def copy_schedule_error(
    moves: Sequence[ScheduleOp],
    reads: Sequence[Collection[str]],
    backward_reads: Sequence[Collection[str]],
    makes: Sequence[Collection[str]],
    dying: Sequence[Collection[str]],
    movable: Collection[str],
    saving_segments: Collection[int],
) -> str | None:
    """What is wrong with an order's copies; ``None`` if nothing is.

    Args:
        moves: the order.
        reads: for each segment the values that its forward pass reads.
        backward_reads: for each segment the values that its backward pass reads, those that it reads through what it kept included.
        makes: for each segment the values that others need.
        dying: for each move the values that go behind it.
        movable: the values that may leave.
        saving_segments: the segments that keep something that may leave.
    """
    #: of what is there, and may leave: whether it has no copy, has one, or is on the host alone
    state: dict[str, str] = {}
    for place, move in enumerate(moves):
        target = move.target
        if move.is_copy:
            if target not in movable if move.value else move.segment not in saving_segments:
                return f"{move}: only what segments make and hand to each other, or keep, can leave the device"
            before, after = {"offload": ("here", "copied"), "release": ("copied", "away"), "prefetch": ("away", "back")}[move.kind]
            now = state.get(target, "not there")
            if now != before and (move.kind, now) != ("release", "back"):  # what came back has its copy still
                return f"{move}: {target} is {now}, not {before}, at that place of the order"
            state[target] = after
        elif move.kind != "loss":
            own = f"{move.segment}+"
            wanted = reads[move.segment] if move.kind == "forward" else (*backward_reads[move.segment], own)
            missing = [name for name in wanted if state.get(name) == "away"]
            if missing:
                return f"{move}: it reads {missing[0]}, which is on the host; put <{missing[0]} before it"
            if move.kind == "backward":
                state.pop(own, None)
            else:
                made = [name for name in makes[move.segment] if name in movable]
                again = [name for name in (*made, *([own] if move.keep else [])) if state.get(name, "here") != "here"]
                if again:
                    return f"{move}: it makes {again[0]}, which has a copy on the host that is still in use"
                state |= dict.fromkeys((*made, *([own] if move.keep else [])), "here")
        for name in dying[place]:
            state.pop(name, None)
    return None
