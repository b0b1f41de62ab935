"""Offloading: values that wait on the host between two of their uses, on any machine.

A copy is of *buffers*: of the buffer of a value, or of the buffers that a segment allocated for its residuals alone. A value's buffer may
have views among the residuals of a segment (the output of a ReLU, the input of a convolution). These are neither copied nor changed: the
machine frees the buffer's bytes under all references to it and fills them again, so the views stay valid.

Only values that the region computes are offloaded: no inputs, parameters or outputs, which the caller references.

All copies of a step share one slab of host memory. Its layout (:class:`HostArena`) depends on the order of allocations alone. The
projection therefore knows the size of the slab, and a step places each copy where the projection did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from sft.runtime.moves import ScheduleOp

if TYPE_CHECKING:
    from sft.runtime.machine import Buffer

__all__ = ["HostArena", "OffloadOps", "OffloadState", "OffloadTargets", "OffloadedValue"]

_ALIGNMENT_BYTES = 256


class OffloadOps(Protocol):
    """Copies of device buffers to the host and back."""

    def offload(self, target: str, buffers: Sequence[Buffer]) -> OffloadedValue:
        """Begin to copy the memory of these buffers to the host; memory that several share is copied once."""

    def release(self, copy: OffloadedValue) -> None:
        """Wait for the copy to the host and free the device's bytes; the buffers remain, without memory."""

    def prefetch(self, copy: OffloadedValue) -> None:
        """Allocate the device's bytes again and begin to copy back."""

    def wait_prefetch(self, copy: OffloadedValue) -> None:
        """Make the next program wait for the copy back."""

    def free_offload(self, copy: OffloadedValue) -> None:
        """Free the bytes on the host; copies under way are waited for."""


@dataclass(slots=True)
class HostArena:
    """Allocator of offsets in a slab of host memory, first fit.

    >>> arena = HostArena()
    >>> arena.allocate(1000), arena.allocate(10), arena.num_bytes
    (0, 1024, 1280)
    >>> arena.free(0)
    >>> arena.allocate(2000), arena.allocate(500), arena.num_bytes
    (1280, 0, 3328)

    Attributes:
        num_bytes: size that the slab needs for all allocations so far.
    """

    num_bytes: int = 0
    _ranges: list[tuple[int, int]] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> int:
        """Lowest offset with that many free bytes."""
        position, start = 0, 0
        while position < len(self._ranges) and self._ranges[position][0] - start < num_bytes:
            start = self._ranges[position][1]
            position += 1
        end = start + max(1, -(-num_bytes // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES  # an empty allocation has an offset of its own, too
        self._ranges.insert(position, (start, end))
        self.num_bytes = max(self.num_bytes, end)
        return start

    def free(self, start: int) -> None:
        """Free the allocation at an offset."""
        self._ranges = [allocated for allocated in self._ranges if allocated[0] != start]


@dataclass(slots=True, eq=False)
class OffloadedValue:
    """Buffers that have a copy on the host, or are being copied.

    Attributes:
        target: object of the copy, as in the schedule.
        buffers: the machine's buffers.
        sizes: bytes of each.
        start: offset of the copy in the slab; the buffers are consecutive.
        is_away: True if the device's bytes are free.
        is_arriving: True if the copy back has begun and no program waits for it yet.
        offload_done: event at the end of the copy to the host, on machines that copy asynchronously.
        prefetch_done: the same for the copy back.
    """

    target: str
    buffers: list[Any]
    sizes: tuple[int, ...]
    start: int
    is_away: bool = False
    is_arriving: bool = False
    offload_done: Any = None
    prefetch_done: Any = None

    @property
    def num_bytes(self) -> int:
        """Total size of the buffers."""
        return sum(self.sizes)


@dataclass(slots=True)
class OffloadState:
    """Copies of a step that are in use.

    Attributes:
        by_target: copies by target.
        retained: copies that outlive the current backward pass, since another one follows; with each, True if it was away before.
    """

    by_target: dict[str, OffloadedValue] = field(default_factory=dict)
    retained: dict[str, tuple[OffloadedValue, bool]] = field(default_factory=dict)

    def fork(self) -> OffloadState:
        """State for a backward pass that is not the last; `restore` brings the copies back to where they are now."""
        return OffloadState(dict(self.by_target), {target: (copy, copy.is_away) for target, copy in self.by_target.items()})

    def run_op(self, machine: OffloadOps, op: ScheduleOp, buffers: Sequence[Buffer]) -> None:
        """Run an op that copies; ``buffers`` are those of an offload."""
        if op.kind == "offload":
            self.by_target[op.target] = machine.offload(op.target, buffers)
        elif op.kind == "release":
            machine.release(self.by_target[op.target])
        else:
            machine.prefetch(self.by_target[op.target])

    def wait(self, machine: OffloadOps, targets: Iterable[str]) -> None:
        """Wait for those of these targets that are being copied back."""
        for target in targets:
            copy = self.by_target.get(target)
            if copy is not None and copy.is_arriving:
                machine.wait_prefetch(copy)

    def free(self, machine: OffloadOps, targets: Iterable[str]) -> None:
        """Free the copies of these targets, except retained ones."""
        for target in targets:
            copy = self.by_target.pop(target, None)
            if copy is not None and self.retained.get(target, (None, False))[0] is not copy:
                machine.free_offload(copy)

    def restore(self, machine: OffloadOps) -> None:
        """Bring retained copies to where they were, and free all other copies, which only a failed pass leaves."""
        self.free(machine, [target for target, copy in self.by_target.items() if self.retained.get(target, (None, False))[0] is not copy])
        for copy, was_away in self.retained.values():
            if copy.is_away and not was_away:
                machine.prefetch(copy)
            if copy.is_arriving:
                machine.wait_prefetch(copy)
            if was_away and not copy.is_away:
                machine.release(copy)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadTargets:
    """Values and residuals that a schedule may offload, and the ops that use them.

    Attributes:
        reads: for each segment the values that its forward run reads.
        backward_reads: for each segment the values that its backward run reads, also through its residuals.
        writes: for each segment the values that later segments or the caller read.
        movable: values that may be offloaded.
        saving_segments: segments with residuals that may be offloaded.
    """

    reads: Sequence[Collection[str]]
    backward_reads: Sequence[Collection[str]]
    writes: Sequence[Collection[str]]
    movable: Collection[str]
    saving_segments: Collection[int]

    def uses(self, ops: Sequence[ScheduleOp]) -> dict[str, list[list[int]]]:
        """Positions of the ops that write a target, and then read it, once for each write, by target; for ops without copies."""
        uses: dict[str, list[list[int]]] = {}
        for position, op in enumerate(ops):
            residuals = f"{op.segment}+"
            read: Collection[str] = ()
            written: list[str] = []
            if op.kind == "forward":
                read = self.reads[op.segment]
                written = [name for name in self.writes[op.segment] if name in self.movable]
                written += [residuals] if op.keep and op.segment in self.saving_segments else []
            elif op.kind == "backward":
                read = (*self.backward_reads[op.segment], residuals)
            for target in dict.fromkeys(read):
                if target in uses:
                    uses[target][-1].append(position)
            for target in written:
                uses.setdefault(target, []).append([position])
        return uses

    def copy_error(self, ops: Sequence[ScheduleOp], last_uses: Sequence[Collection[str]]) -> str | None:
        """Description of the first error in the copies of a schedule; ``None`` if they are valid.

        Args:
            ops: the schedule.
            last_uses: for each op the values that are freed after it.
        """
        #: of each live target that may be offloaded: "here" (no copy), "copied", "away" (on the host alone) or "back"
        state: dict[str, str] = {}
        for position, op in enumerate(ops):
            error = self._error_of_copy(op, state) if op.is_copy else self._error_of_run(op, state)
            if error is not None:
                return error
            for name in last_uses[position]:
                state.pop(name, None)
        return None

    def _error_of_copy(self, op: ScheduleOp, state: dict[str, str]) -> str | None:
        """The error of an op that copies, which changes the state."""
        target = op.target
        if target not in self.movable if op.value else op.segment not in self.saving_segments:
            return f"{op}: only values that segments compute for each other, and their residuals, can be offloaded"
        before, after = {"offload": ("here", "copied"), "release": ("copied", "away"), "prefetch": ("away", "back")}[op.kind]
        now = state.get(target, "absent")
        if now != before and (op.kind, now) != ("release", "back"):  # a value that came back still has its copy
            return f"{op}: {target} is {now}, not {before}, at that position of the order"
        state[target] = after
        return None

    def _error_of_run(self, op: ScheduleOp, state: dict[str, str]) -> str | None:
        """The error of an op that runs a segment, or the loss, which changes the state."""
        if op.kind == "loss":
            return None
        residuals = f"{op.segment}+"
        required = self.reads[op.segment] if op.kind == "forward" else (*self.backward_reads[op.segment], residuals)
        missing = [name for name in required if state.get(name) == "away"]
        if missing:
            return f"{op}: it reads {missing[0]}, which is on the host; put <{missing[0]} before it"
        if op.kind == "backward":
            state.pop(residuals, None)
            return None
        written = [name for name in self.writes[op.segment] if name in self.movable]
        written += [residuals] if op.keep else []
        overwritten = [name for name in written if state.get(name, "here") != "here"]
        if overwritten:
            return f"{op}: it overwrites {overwritten[0]}, which has a copy on the host that is still in use"
        state |= dict.fromkeys(written, "here")
        return None
