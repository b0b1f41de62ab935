"""The order in which segments run: forward, back, and forward again in between.

Plainly, every segment runs forward and keeps what its backward pass needs, the caller turns the outputs into their gradients, and every
segment runs back. A segment may also run forward without keeping anything, and again before its backward pass, and so may those before it,
as often as there is memory for: every schedule of the checkpointing literature is such a list of moves (Griewank and Walther, Algorithm
799, 2000; Siskind and Pearlmutter, 2018; Beaumont et al., RR-9302, 2019).

Frees are not in the list; they follow from it. A value lives from the move that makes it to the last one that reads it before it is made
again. So no list can use a value that is gone: at worst it holds one for longer than its author thought.

Between two of its uses a value, or what a segment kept, may leave for the host. Three moves say when: an *offload* begins the copy, a
*release* waits for it and gives the device's bytes back, a *prefetch* takes device bytes and begins the copy back, and the first move
that reads the value waits for that one. So what the device holds behind any move does not depend on how fast copies are. A list that
reads what is away is refused (``sft.runtime.offload``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from sft.common.errors import InputError

__all__ = [
    "COPY_SIGNS",
    "LOSS_OP",
    "ScheduleOp",
    "ScheduleOpKind",
    "SegmentSchedule",
    "default_schedule",
    "last_uses",
    "num_forwards_of",
    "parse_schedule",
]

ScheduleOpKind = Literal["forward", "loss", "backward", "offload", "release", "prefetch"]
CopyKind = Literal["offload", "release", "prefetch"]

#: The signs of the moves that copy.
COPY_SIGNS: dict[str, CopyKind] = {">": "offload", "~": "release", "<": "prefetch"}
_SIGNS: dict[str, str] = {kind: sign for sign, kind in COPY_SIGNS.items()}


@dataclass(frozen=True, slots=True)
class ScheduleOp:
    """One entry of an order.

    ``F3`` runs segment 3 forward, ``F3+`` keeps what its backward pass needs, ``L`` is the caller's turn, ``B3`` runs segment 3 back.
    ``>add`` begins to copy the value ``add`` to the host, ``~add`` gives its bytes back, ``<add`` begins to copy it back; ``>3+`` and so
    on do that with what segment 3 kept.
    """

    kind: ScheduleOpKind
    segment: int = -1
    keep: bool = False
    value: str = ""

    @property
    def is_copy(self) -> bool:
        """Whether it copies, or waits for a copy, instead of running a segment."""
        return self.kind in _SIGNS

    @property
    def target(self) -> str:
        """What a copy is of: a value's name, or ``"3+"`` for what segment 3 kept."""
        return self.value or f"{self.segment}+"

    def __str__(self) -> str:
        if self.kind == "loss":
            return "L"
        if self.is_copy:
            return _SIGNS[self.kind] + self.target
        return f"{self.kind[0].upper()}{self.segment}{'+' if self.keep else ''}"


LOSS_OP = ScheduleOp("loss")
SegmentSchedule = tuple[ScheduleOp, ...]


def default_schedule(num_segments: int) -> SegmentSchedule:
    """Every segment once forward and once back.

    >>> print(*default_schedule(2))
    F0+ F1+ L B1 B0
    """
    indices = range(num_segments)
    forward = (ScheduleOp("forward", i, True) for i in indices)
    return (*forward, LOSS_OP, *(ScheduleOp("backward", i) for i in reversed(indices)))


def parse_schedule(entries: Sequence[str], num_segments: int) -> SegmentSchedule:
    """Read an order as text.

    >>> print(*parse_schedule(["F0", "F1+", "L", "B1", "F0+", "B0"], 2))
    F0 F1+ L B1 F0+ B0
    >>> print(*parse_schedule(["F0+", ">0+", "F1+", "~0+", "L", "B1", "<0+", "B0"], 2))
    F0+ >0+ F1+ ~0+ L B1 <0+ B0

    Raises:
        InputError: it is no order for so many segments.
    """
    found = []
    for entry in entries:
        match = re.fullmatch(r"L|F(\d+)(\+?)|B(\d+)|([>~<])(?:(\d+)\+|([^\s\d+]\S*))", entry)
        if match is None:
            raise InputError(f"{entry!r} is no move of a plan: write F3, F3+, L or B3, or >x, ~x, <x with a value or 3+ for x")
        if match[4] is not None:
            found.append(ScheduleOp(COPY_SIGNS[match[4]], -1 if match[5] is None else int(match[5]), value=match[6] or ""))
        elif match[1] is not None:
            found.append(ScheduleOp("forward", int(match[1]), bool(match[2])))
        else:
            found.append(LOSS_OP if match[3] is None else ScheduleOp("backward", int(match[3])))
    _check_schedule(found, num_segments)
    return tuple(found)


def _check_schedule(entries: Sequence[ScheduleOp], num_segments: int) -> None:
    indices = list(range(num_segments))
    for move in entries:
        if move.is_copy and not move.value and move.segment >= num_segments:
            raise InputError(f"{move}: there are only {num_segments} segments")
    moves = [move for move in entries if not move.is_copy]
    if moves.count(LOSS_OP) != 1:
        raise InputError(f"an order has one loss, this one has {moves.count(LOSS_OP)}")
    turn = moves.index(LOSS_OP)
    before, behind = moves[:turn], moves[turn + 1 :]
    if [move.segment for move in before] != indices or any(move.kind != "forward" for move in before):
        raise InputError(f"before its loss an order runs the segments 0..{num_segments - 1} forward, each once")
    left = list(indices)
    for move in behind:
        if not left or move.segment > left[-1]:
            raise InputError(f"{move}: segment {move.segment} has run back already, or there is none of that number")
        if move.kind == "backward":
            if move.segment != left[-1]:
                raise InputError(f"{move}: segment {left[-1]} is next to run back")
            left.pop()
    if left:
        raise InputError(f"segments {left} never run back")


def last_uses(
    moves: Sequence[ScheduleOp],
    reads: Sequence[Collection[str]],
    backward_reads: Sequence[Collection[str]],
    makes: Sequence[Collection[str]],
    leaves: Collection[str],
) -> tuple[tuple[str, ...], ...]:
    """For each move the values that nobody reads behind it, before they are made again.

    Args:
        moves: the order, or a part of it that nothing follows.
        reads: for each segment the values that it takes from outside.
        backward_reads: for each segment the values that its backward pass reads besides what it kept.
        makes: for each segment the values that others need.
        leaves: the values that are there from the start.
    """
    events: dict[str, list[tuple[int, bool]]] = {name: [(0, True)] for name in leaves}
    for place, move in enumerate(moves):
        if move.is_copy and move.value:
            events.setdefault(move.value, []).append((place, False))
        if move.is_copy or move.kind == "loss":
            continue
        for name in (reads if move.kind == "forward" else backward_reads)[move.segment]:
            events.setdefault(name, []).append((place, False))
        if move.kind == "forward":
            for name in makes[move.segment]:
                events.setdefault(name, []).append((place, True))
    dying: dict[int, list[str]] = {}
    for name, found in events.items():
        for (place, _), (_, is_made) in pairwise([*found, (len(moves), True)]):
            if is_made:
                dying.setdefault(place, []).append(name)
    return tuple(tuple(dying.get(place, ())) for place in range(len(moves)))


def num_forwards_of(moves: Sequence[ScheduleOp], segment: int) -> int:
    """How often a segment runs forward."""
    return sum(move.kind == "forward" and move.segment == segment for move in moves)
