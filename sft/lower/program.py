"""Flat programs: a straight list of tensor operations with explicit allocations and frees.

A strip of the schedule is lowered to a program, once per step signature. A program takes no decisions while it runs: every operation,
every shape, and the instruction after which each storage is freed are known beforehand. So its peak in bytes is a sum over the list. The
same list on meta tensors is a dry run; on real tensors it is the execution.

A :class:`Slot` names a tensor of the program. Slots that share a storage share a ``root``. Two kinds of slot cross the border:

- *ports*: bound from outside (parameters, strips of the input, gradient accumulators). The caller owns them; a program neither counts nor
  frees them.
- *results*: rows for the row store, gradients of carried rows. A program counts them when it allocates them; the caller owns them
  afterwards.

A program builder (:mod:`sft.lower.builder`) makes programs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from sft.common.interval import Interval

if TYPE_CHECKING:
    from sft.lower.steps import PreparedProgram

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
    """A tensor of a program.

    Attributes:
        number: its number in the program.
        shape: its extents.
        dtype: its element type.
        root: number of the slot that owns its storage; its own number unless it is a view.
    """

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    root: int

    @property
    def num_bytes(self) -> int:
        """Bytes of a storage for this tensor alone."""
        return self.dtype.itemsize * prod(self.shape)


class Port(NamedTuple):
    """A tensor that crosses the program's border. A named tuple, because ports are the most frequent dictionary keys.

    Attributes:
        role: one of the roles below.
        name: the value of the graph.

    =============== ===============================================================================================
    role            tensor
    =============== ===============================================================================================
    ``source``      rows of a streamed value from outside the segment
    ``side``        a full tensor: parameter, buffer or global value
    ``carry``       carried rows to load
    ``append``      rows for the row store
    ``out``         rows of an output to write
    ``partial``     a running reduction over the image
    ``grad_out``    rows of an output's gradient
    ``grad_carry``  gradient of carried rows: in from the next strip, out to the previous one
    ``grad_source`` rows of a source's gradient, added to
    ``grad_side``   gradient of a full tensor: added to (port) or made (result)
    ``origin``      no tensor: batch element, row, column (and channel) of the first element that the step computes or reduces
    =============== ===============================================================================================
    """

    role: str
    name: str


@runtime_checkable
class PositionalFunction(Protocol):
    """A program function that depends on the strip's position (an ``origin`` port) and can compare positions."""

    def is_same_at(self, origin: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
        """True if the function computes the same from the same rows at both origins."""
        ...


class _DevicePlaceholder:
    """Placeholder in an instruction for the device that the program runs on."""

    def __repr__(self) -> str:
        return "DEVICE"


DEVICE = _DevicePlaceholder()


def load_rows(destination: torch.Tensor, dim: int, blocks: list[tuple[int, Interval, torch.Tensor]]) -> None:
    """Gather carried rows along ``dim``: copy the given rows of each block to their offset."""
    for offset, rows, block in blocks:
        destination.narrow(dim, offset, len(rows)).copy_(block.narrow(dim, rows.start, len(rows)))


class Instruction(NamedTuple):
    """One operation. A named tuple, as planning makes hundreds of thousands: a frozen dataclass of as many fields takes four times as long.

    Attributes:
        function: the callable.
        arguments: positional arguments; tensors are slots, lists of tensors are tuples of slots.
        keywords: keyword arguments, likewise.
        outputs: slots for the results, ``None`` for a result that is not computed or not used.
        writes: slots written in place.
        flops: counted floating-point operations.
        num_bytes: bytes of the storages that it allocates.
        scratch_bytes: temporary bytes while it runs, on top of its results.
        owner: the operator of the graph that it belongs to.
        frees: slots to free afterwards.
        freed_bytes: bytes that these frees return.
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
        """A copy with these frees; takes a third of the time of ``_replace``."""
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
        instructions: the operations, in order.
        ports: slots to bind before running.
        results: slots that the caller owns after running.
        residuals: numbers of the slots that stay alive for a second program (the backward half of an untiled segment).
        peak_bytes: most bytes alive above the start, results included.
        end_bytes: bytes alive at the end above the start: results and residuals, less the residuals of the first half.
        flops: counted floating-point operations.
        result_bytes: bytes of each result's storage.
        prepared: the instructions prepared for execution (:func:`sft.lower.steps.prepared_program`), once the program has run.
    """

    instructions: tuple[Instruction, ...]
    ports: dict[Port, Slot]
    results: dict[Port, Slot]
    result_bytes: dict[Port, int]
    residuals: tuple[int, ...]
    peak_bytes: int
    end_bytes: int
    flops: int
    prepared: PreparedProgram | None = field(default=None, init=False, compare=False, repr=False)

    def retained_peak_bytes(self) -> int:
        """Most bytes alive above the start if the residuals of the first half outlive this program, which frees its own storages alone."""
        outputs = [out for i in self.instructions for out in i.outputs if out is not None]
        own_bytes = {out.number: out.num_bytes for out in outputs if out.root == out.number}
        now = peak = 0
        for instruction in self.instructions:
            now += instruction.num_bytes
            peak = max(peak, now + instruction.scratch_bytes)
            now -= sum(own_bytes.get(number, 0) for number in instruction.frees)
        return peak


def carried_dim(program: Program, slot: Slot) -> int | None:
    """The dimension along which a port's rows are loaded from blocks, read off the call that loads them."""
    for instruction in program.instructions:
        if len(instruction.arguments) == 3 and instruction.arguments[2] == slot:
            return int(instruction.arguments[1])
    return None


def live_instructions(instructions: Sequence[Instruction], slots: Sequence[Sequence[Slot]], roots: Collection[int]) -> list[bool]:
    """Liveness of each instruction, from the end: true if a storage of ``roots`` depends on it.

    Instructions without results and writes are checks; they stay alive.

    Args:
        instructions: the operations, in order.
        slots: for each, the slots that it reads or writes (:func:`slots_of`).
        roots: the storages needed after the last instruction.
    """
    needed = set(roots)
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
    slots = []
    for value in instruction.arguments:
        kind = type(value)
        if kind is Slot:
            slots.append(value)
        elif kind is tuple or kind is list:
            slots += [item for item in value if type(item) is Slot]
    for value in instruction.keywords.values():
        kind = type(value)
        if kind is Slot:
            slots.append(value)
        elif kind is tuple or kind is list:
            slots += [item for item in value if type(item) is Slot]
    slots += instruction.writes
    return slots
