"""Flat programs: one straight list of tensor operations with explicit allocations and frees.

A program is what a strip of the schedule is lowered to, once per step signature. Nothing is decided while it runs: every
operation, every shape, and the instruction after which each storage dies are known beforehand. So its peak in bytes is a sum
over the list, the same list on meta tensors is a dry run, and the same list on real tensors is the execution.

A :class:`Slot` names a tensor of the program. Slots that share a storage share a ``root``. Slots bound from outside (parameters,
strips of the input, gradient accumulators) are *ports*: they belong to the caller and are never counted or freed here. Slots
that leave the program (rows for the row store, carried gradients) are *results*: counted when allocated, and the caller's after.
Programs are made by an emitter (``sft.lower.builder``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from sft.common.interval import Interval

__all__ = [
    "DEVICE",
    "Instruction",
    "Port",
    "PositionalFunction",
    "Program",
    "Slot",
    "carried_dim",
    "live_instructions",
    "load_rows",
    "slots_of",
]


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of a program: its number, its shape, its element type, and the slot that owns its storage."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    root: int

    @property
    def num_bytes(self) -> int:
        """Bytes of a storage that holds just this tensor."""
        return self.dtype.itemsize * prod(self.shape)


class Port(NamedTuple):
    """A tensor that crosses the program's border. A tuple, as it is looked up more often than anything else.

    ``role`` is one of: ``source`` (rows of a value from outside), ``side`` (a whole tensor: parameter, buffer, global value),
    ``carry`` (carried rows to load), ``append`` (rows for the row store), ``out`` (rows of an output to write), ``partial``
    (a running sum over the image), ``grad_out`` (rows of an output's gradient), ``grad_carry`` (gradient of carried rows, in
    and out), ``grad_source`` (rows of a source's gradient to add to), ``grad_side`` (a side tensor's gradient to add to, or made),
    ``origin`` (no tensor: batch element, row and column of the first element that the step adds to the value, or that it reduces).
    """

    role: str
    name: str


@runtime_checkable
class PositionalFunction(Protocol):
    """A function of a program that is told where the strip lies (an ``origin`` port), and can say what it makes of that."""

    def is_same_at(self, here: tuple[int, int, int], there: tuple[int, int, int]) -> bool:
        """Whether it makes the same of the same rows at both places."""
        ...


class _DevicePlaceholder:
    """Stands in an instruction for the device that the program runs on."""

    def __repr__(self) -> str:
        return "DEVICE"


DEVICE = _DevicePlaceholder()


def load_rows(destination: torch.Tensor, dim: int, pieces: list[tuple[int, Interval, torch.Tensor]]) -> None:
    """Gather carried rows, which lie along ``dim``: copy each piece of a block to its offset."""
    for offset, rows, block in pieces:
        destination.narrow(dim, offset, len(rows)).copy_(block.narrow(dim, rows.start, len(rows)))


class Instruction(NamedTuple):
    """One operation. A tuple, as planning makes hundreds of thousands, and a frozen dataclass of as many fields takes four times as long.

    Attributes:
        function: what is called.
        arguments: positional arguments; tensors stand as slots, lists of tensors as tuples of slots.
        keywords: keyword arguments, likewise.
        outputs: slots for the results, ``None`` where a result is not made or not wanted.
        writes: slots written in place.
        flops: counted floating-point operations.
        num_bytes: bytes of the storages that it allocates.
        scratch_bytes: bytes that it needs besides while it runs.
        owner: the operator of the graph that it belongs to.
        frees: slots to forget afterwards.
        freed_bytes: bytes that forgetting them returns.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: tuple[Slot | None, ...]
    writes: tuple[Slot, ...] = ()
    flops: int = 0
    num_bytes: int = 0
    scratch_bytes: int = 0
    owner: str = ""
    frees: tuple[int, ...] = ()
    freed_bytes: int = 0

    def with_frees(self, frees: tuple[int, ...], freed_bytes: int) -> Instruction:
        """The same, which forgets slots afterwards; as ``replace`` does it, in a third of the time."""
        return Instruction(
            self.function,
            self.arguments,
            self.keywords,
            self.outputs,
            self.writes,
            self.flops,
            self.num_bytes,
            self.scratch_bytes,
            self.owner,
            frees,
            freed_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Program:
    """A list of instructions and its border.

    Attributes:
        instructions: in order.
        ports: slots to bind before running.
        results: slots that are the caller's after running.
        saved: slots that stay alive for a second program (the backward half of a whole segment), by number.
        peak_bytes: most bytes alive above the start, results included.
        end_bytes: bytes alive at the end above the start: results and saved slots, less what the first half saved.
        flops: counted floating-point operations.
        result_bytes: bytes of each result's storage.
    """

    instructions: tuple[Instruction, ...]
    ports: dict[Port, Slot]
    results: dict[Port, Slot]
    result_bytes: dict[Port, int]
    residuals: tuple[int, ...]
    peak_bytes: int
    end_bytes: int
    flops: int

    def retained_peak_bytes(self) -> int:
        """Most bytes alive above the start where what the first half saved outlasts the second: only its own storages are freed."""
        own = {out.number: out.num_bytes for i in self.instructions for out in i.outputs if out is not None and out.root == out.number}
        now = peak = 0
        for instruction in self.instructions:
            now += instruction.num_bytes
            peak = max(peak, now + instruction.scratch_bytes)
            now -= sum(own.get(number, 0) for number in instruction.frees)
        return peak


def carried_dim(program: Program, slot: Slot) -> int | None:
    """The dimension along which a port's rows come in pieces, by the call that loads them, whichever it is."""
    for instruction in program.instructions:
        if len(instruction.arguments) == 3 and instruction.arguments[2] == slot:
            return int(instruction.arguments[1])
    return None


def live_instructions(instructions: Sequence[Instruction], slots: Sequence[Sequence[Slot]], wanted: Collection[int]) -> list[bool]:
    """Which instructions matter to the wanted storages, found from the end; those that make and write nothing are checks, and stay."""
    needed = set(wanted)
    keep = [False] * len(instructions)
    for position in range(len(instructions) - 1, -1, -1):
        instruction = instructions[position]
        for slot in instruction.outputs:
            if slot is not None and slot.root in needed:
                break
        else:
            for slot in instruction.writes:
                if slot.root in needed:
                    break
            else:
                if instruction.outputs or instruction.writes:
                    continue
        keep[position] = True
        for slot in slots[position]:
            needed.add(slot.root)
    return keep


def slots_of(instruction: Instruction) -> list[Slot]:
    """All slots that an instruction reads or writes in place."""
    found = []
    for value in instruction.arguments:
        kind = type(value)
        if kind is Slot:
            found.append(value)
        elif kind is tuple or kind is list:
            found += [item for item in value if type(item) is Slot]
    for value in instruction.keywords.values():
        kind = type(value)
        if kind is Slot:
            found.append(value)
        elif kind is tuple or kind is list:
            found += [item for item in value if type(item) is Slot]
    found += instruction.writes
    return found
