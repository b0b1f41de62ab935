"""Programs put together from parts: the instructions of one operator in one pass.

What :meth:`sft.lower.builder.ProgramBuilder.finish` does for one list of instructions is done here for lists that have most parts in
common: dead instructions dropped, frees placed, bytes summed up. Which instructions of a part are dead depends on the rest of the program
through one thing alone: which storages that the part writes are needed behind it. Where storages are freed depends on which of those that
the part touches nobody touches behind it. A part remembers what it came to for each of these; so a program costs a few sets for each
operator, and not several objects for each instruction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sft.lower.builder import ProgramBuilder
from sft.lower.program import Instruction, Port, Program, Slot, live_instructions, slots_of

__all__ = ["FragmentBuilder", "ProgramFragment", "concatenate_fragments", "link_fragments"]


@dataclass
class FragmentBuilder(ProgramBuilder):
    """Collects the instructions of a part.

    Attributes:
        port_numbers: of the slots of ports, the same for all parts.
    """

    port_numbers: dict[Port, int] = field(default_factory=dict)

    def port(self, role: str, name: str, shape: Iterable[int], dtype: torch.dtype | None = None) -> Slot:
        """The slot of a port, made at its first use in the part."""
        key = Port(role, name)
        slot = self.ports.get(key)
        if slot is None:
            number = self.port_numbers.setdefault(key, len(self.port_numbers))
            slot = self.ports[key] = Slot(number, tuple(shape), dtype or self.dtype, number)
        return slot


@dataclass(frozen=True, slots=True)
class _FragmentWithFrees:
    """Instructions with their frees, the most bytes that they hold above what was there before, and the bytes that stay."""

    instructions: tuple[Instruction, ...]
    peak_bytes: int
    retained_bytes: int


class _LiveFragment:
    """The instructions of a part that are not dead, given what is needed behind it.

    Attributes:
        touched: the storages that they read or write.
        members: for each storage the numbers of the results that lie in it.
        sizes: bytes of the storages that they make.
        flops: counted floating-point operations.
    """

    __slots__ = ("_instructions", "_last", "_placed", "flops", "members", "sizes", "touched")

    def __init__(self, instructions: Sequence[Instruction], slots: Sequence[Sequence[Slot]]) -> None:
        self._instructions = tuple(instructions)
        self._last: dict[int, int] = {}
        self._placed: dict[tuple[tuple[int, int, tuple[int, ...]], ...], _FragmentWithFrees] = {}
        members: dict[int, list[int]] = {}
        self.sizes: dict[int, int] = {}
        for position, (instruction, used) in enumerate(zip(instructions, slots, strict=True)):
            for slot in used:
                self._last[slot.root] = position
            for out in instruction.outputs:
                if out is not None:
                    self._last[out.root] = position
                    members.setdefault(out.root, []).append(out.number)
                    if out.root == out.number:
                        self.sizes[out.number] = out.num_bytes
        self.touched = tuple(self._last)
        self.members = tuple((root, tuple(numbers)) for root, numbers in members.items())
        self.flops = sum(instruction.flops for instruction in instructions)

    def placed(self, dying: Sequence[int], members: Mapping[int, tuple[int, ...]], sizes: Mapping[int, int]) -> _FragmentWithFrees:
        """The same with frees of the storages that are touched here last."""
        key = tuple([(root, sizes.get(root, 0), members[root]) for root in dying])
        found = self._placed.get(key)
        if found is None:
            found = self._placed[key] = self._place_frees(key)
        return found

    def _place_frees(self, dying: Iterable[tuple[int, int, tuple[int, ...]]]) -> _FragmentWithFrees:
        instructions = list(self._instructions)
        frees: dict[int, tuple[int, tuple[int, ...]]] = {}
        for root, num_bytes, numbers in dying:
            freed_bytes, before = frees.get(self._last[root], (0, ()))
            frees[self._last[root]] = (freed_bytes + num_bytes, before + numbers)
        for position, (freed_bytes, numbers) in frees.items():
            instructions[position] = instructions[position].with_frees(tuple(sorted(numbers)), freed_bytes)
        now = peak = 0
        for instruction in instructions:
            now += instruction.num_bytes
            peak = max(peak, now + instruction.scratch_bytes)
            now -= instruction.freed_bytes
        return _FragmentWithFrees(tuple(instructions), peak, now)


class ProgramFragment:
    """What an operator does in one pass of a strip, with what lies outside as slots.

    Attributes:
        instructions: in order.
        ports: those that it uses.
        results: those that it makes.
        written: the storages that it makes or writes into.
    """

    __slots__ = ("_live", "_slots", "instructions", "ports", "results", "written")

    def __init__(self, builder: ProgramBuilder) -> None:
        self.instructions = tuple(builder.instructions)
        self.ports, self.results = builder.ports, builder.results
        self._slots = [slots_of(instruction) for instruction in self.instructions]
        made = (out.root for i in self.instructions for out in i.outputs if out is not None)
        self.written = frozenset((*made, *(slot.root for i in self.instructions for slot in i.writes)))
        self._live: dict[frozenset[int], _LiveFragment | None] = {}

    def live(self, wanted: frozenset[int]) -> _LiveFragment | None:
        """The instructions that matter, given which of the storages written here are needed behind; ``None`` where there are none."""
        if wanted not in self._live:
            keep = live_instructions(self.instructions, self._slots, wanted)
            chosen = [i for i, kept in enumerate(keep) if kept]
            live = _LiveFragment([self.instructions[i] for i in chosen], [self._slots[i] for i in chosen]) if chosen else None
            self._live[wanted] = live
        return self._live[wanted]


def concatenate_fragments(parts: Sequence[ProgramFragment], dtype: torch.dtype) -> ProgramBuilder:
    """All instructions of the parts, as if they had been emitted one after the other."""
    builder = ProgramBuilder(dtype=dtype)
    for part in parts:
        builder.instructions += part.instructions
        builder.ports.update(part.ports)
        builder.results.update(part.results)
    numbers = [slot.number for slot in builder.ports.values()]
    numbers += [out.number for i in builder.instructions for out in i.outputs if out is not None]
    builder._num_slots = max(numbers, default=-1) + 1
    return builder


def link_fragments(parts: Sequence[ProgramFragment]) -> Program:
    """The program of the parts in a row: dead instructions dropped, frees placed."""
    ports: dict[Port, Slot] = {}
    results: dict[Port, Slot] = {}
    for part in parts:
        if part.ports:
            ports.update(part.ports)
        if part.results:
            results.update(part.results)
    lasting = {slot.root for slot in ports.values()}
    lasting.update(slot.root for slot in results.values())
    needed = set(lasting)  # what is touched behind, and what lasts
    alive: list[tuple[_LiveFragment, list[int]]] = []
    for part in reversed(parts):
        live = part.live(part.written & needed)
        if live is not None:
            alive.append((live, [root for root in live.touched if root not in needed]))
            needed.update(live.touched)
    alive.reverse()
    members: dict[int, tuple[int, ...]] = {}
    sizes: dict[int, int] = {}
    instructions: list[Instruction] = []
    bytes_now = peak = flops = 0
    for live, dying in alive:
        for root, numbers in live.members:
            members[root] = members[root] + numbers if root in members else numbers
        sizes.update(live.sizes)
        placed = live.placed(dying, members, sizes)
        instructions += placed.instructions
        peak = max(peak, bytes_now + placed.peak_bytes)
        bytes_now += placed.retained_bytes
        flops += live.flops
    given = {port: slot for port, slot in results.items() if slot.number in members.get(slot.root, ())}
    touched = set[int]().union(*[live.touched for live, _ in alive])
    return Program(
        instructions=tuple(instructions),
        ports={port: slot for port, slot in ports.items() if slot.root in touched},
        results=given,
        result_bytes={port: sizes[slot.root] for port, slot in given.items()},
        residuals=(),
        peak_bytes=peak,
        end_bytes=bytes_now,
        flops=flops,
    )
