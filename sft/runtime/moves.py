"""Segment schedule: the order in which segments run forward and backward, and in which values move between device and host.

========= ======== =======================================================================================
symbol    op       effect
========= ======== =======================================================================================
``F3``    forward  run segment 3 forward and keep no residuals
``F3+``   forward  run segment 3 forward and keep its residuals
``L``     loss     the caller turns outputs into their gradients
``B3``    backward run segment 3 backward, from the residuals of its last ``F3+``
``>x``    offload  begin to copy value ``x`` (or ``3+``, the residuals of segment 3) to the host
``~x``    release  wait for that copy and free the device's bytes
``<x``    prefetch allocate device bytes and begin to copy ``x`` back; the first op that reads ``x`` waits
========= ======== =======================================================================================

By default every segment runs forward once, keeping its residuals, and backward once: ``F0+ F1+ L B1 B0``. A segment may also run forward
without keeping residuals and again before its backward, and so may the segments before it, as often as needed: every schedule of the
checkpointing literature is such a list (Griewank and Walther, Algorithm 799, 2000; Siskind and Pearlmutter, 2018; Beaumont et al., RR-9302,
2019).

Frees follow from the list. A value lives from the op that writes it to the last op that reads it before it is written again. So no list can
read a freed value; at worst a value lives longer than its author expected. The bytes on the device after an op do not depend on the speed
of copies, since ``~`` and ``<`` mark when they change. A list that reads a value that is on the host is refused (``sft.runtime.offload``).
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

#: Symbols of the ops that copy.
COPY_SIGNS: dict[str, CopyKind] = {">": "offload", "~": "release", "<": "prefetch"}
_SIGNS: dict[str, str] = {kind: sign for sign, kind in COPY_SIGNS.items()}


@dataclass(frozen=True, slots=True)
class ScheduleOp:
    """One entry of a schedule; see the table of the module.

    Attributes:
        kind: the operation.
        segment: index of the segment that runs, or that owns the copied residuals; -1 for ``L`` and for copies of a value.
        keep: True if a forward run keeps the residuals.
        value: name of the value that is copied.
    """

    kind: ScheduleOpKind
    segment: int = -1
    keep: bool = False
    value: str = ""

    @property
    def is_copy(self) -> bool:
        """True for offload, release and prefetch."""
        return self.kind in _SIGNS

    @property
    def target(self) -> str:
        """Object of a copy: a value's name, or ``"3+"`` for the residuals of segment 3."""
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
    """Schedule that runs every segment forward once and backward once.

    >>> print(*default_schedule(2))
    F0+ F1+ L B1 B0
    """
    indices = range(num_segments)
    forward = (ScheduleOp("forward", i, True) for i in indices)
    return (*forward, LOSS_OP, *(ScheduleOp("backward", i) for i in reversed(indices)))


def parse_schedule(entries: Sequence[str], num_segments: int) -> SegmentSchedule:
    """Parse the symbols of a schedule.

    >>> print(*parse_schedule(["F0", "F1+", "L", "B1", "F0+", "B0"], 2))
    F0 F1+ L B1 F0+ B0
    >>> print(*parse_schedule(["F0+", ">0+", "F1+", "~0+", "L", "B1", "<0+", "B0"], 2))
    F0+ >0+ F1+ ~0+ L B1 <0+ B0

    Raises:
        InputError: the symbols are not a schedule of this number of segments.
    """
    ops = []
    for entry in entries:
        match = re.fullmatch(r"L|F(\d+)(\+?)|B(\d+)|([>~<])(?:(\d+)\+|([^\s\d+]\S*))", entry)
        if match is None:
            raise InputError(f"{entry!r} is not an op of a plan's order: write F3, F3+, L or B3, or >x, ~x, <x with a value or 3+ for x")
        if match[4] is not None:
            ops.append(ScheduleOp(COPY_SIGNS[match[4]], -1 if match[5] is None else int(match[5]), value=match[6] or ""))
        elif match[1] is not None:
            ops.append(ScheduleOp("forward", int(match[1]), bool(match[2])))
        else:
            ops.append(LOSS_OP if match[3] is None else ScheduleOp("backward", int(match[3])))
    _check_schedule(ops, num_segments)
    return tuple(ops)


def _check_schedule(ops: Sequence[ScheduleOp], num_segments: int) -> None:
    """Check that every segment runs forward once before the loss and backward once after it.

    Raises:
        InputError: it does not, or a segment does not exist.
    """
    indices = list(range(num_segments))
    for op in ops:
        if op.is_copy and not op.value and op.segment >= num_segments:
            raise InputError(f"{op}: there are only {num_segments} segments")
    runs = [op for op in ops if not op.is_copy]
    if runs.count(LOSS_OP) != 1:
        raise InputError(f"an order has one loss, this one has {runs.count(LOSS_OP)}")
    loss = runs.index(LOSS_OP)
    forward_runs, later_runs = runs[:loss], runs[loss + 1 :]
    if [op.segment for op in forward_runs] != indices or any(op.kind != "forward" for op in forward_runs):
        raise InputError(f"before its loss an order runs the segments 0..{num_segments - 1} forward, each once")
    remaining = list(indices)
    for op in later_runs:
        if not remaining or op.segment > remaining[-1]:
            raise InputError(f"{op}: segment {op.segment} has run backward already, or does not exist")
        if op.kind == "backward":
            if op.segment != remaining[-1]:
                raise InputError(f"{op}: segment {remaining[-1]} is next to run backward")
            remaining.pop()
    if remaining:
        raise InputError(f"segments {remaining} never run backward")


def last_uses(
    ops: Sequence[ScheduleOp],
    reads: Sequence[Collection[str]],
    backward_reads: Sequence[Collection[str]],
    writes: Sequence[Collection[str]],
    leaves: Collection[str],
) -> tuple[tuple[str, ...], ...]:
    """For each op the values that no later op reads before they are written again.

    Args:
        ops: the schedule, or its last ops.
        reads: for each segment the values that its forward run reads.
        backward_reads: for each segment the values that its backward run reads, without its residuals.
        writes: for each segment the values that later segments or the caller read.
        leaves: values that exist from the start.
    """
    events: dict[str, list[tuple[int, bool]]] = {name: [(0, True)] for name in leaves}
    for position, op in enumerate(ops):
        if op.is_copy and op.value:
            events.setdefault(op.value, []).append((position, False))
        if op.is_copy or op.kind == "loss":
            continue
        for name in (reads if op.kind == "forward" else backward_reads)[op.segment]:
            events.setdefault(name, []).append((position, False))
        if op.kind == "forward":
            for name in writes[op.segment]:
                events.setdefault(name, []).append((position, True))
    freed: dict[int, list[str]] = {}
    for name, uses in events.items():
        for (position, _), (_, is_write) in pairwise([*uses, (len(ops), True)]):
            if is_write:
                freed.setdefault(position, []).append(name)
    return tuple(tuple(freed.get(position, ())) for position in range(len(ops)))


def num_forwards_of(ops: Sequence[ScheduleOp], segment: int) -> int:
    """Number of forward runs of a segment."""
    return sum(op.kind == "forward" and op.segment == segment for op in ops)
