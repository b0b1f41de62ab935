"""Program fragments: the instructions of one operator in one pass, linked into programs.

:func:`link_fragments` does for a sequence of fragments what :meth:`sft.lower.builder.ProgramBuilder.finish` does for one list of
instructions: drop dead instructions, place frees, sum up bytes. Programs of one sweep share most fragments, so each fragment caches its
results by the only two facts of the remaining program that they depend on:

- dead instructions: which storages written by the fragment are needed after it;
- frees: which storages touched by the fragment are not touched after it.

So linking costs a few set operations for each operator instead of several objects for each instruction.
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
    """Collects the instructions of a fragment.

    Attributes:
        port_numbers: slot number of each port, shared by all fragments.
    """

    port_numbers: dict[Port, int] = field(default_factory=dict)

    def port(self, role: str, name: str, shape: Iterable[int], dtype: torch.dtype | None = None) -> Slot:
        """The slot of a port, created at its first use in the fragment."""
        key = Port(role, name)
        slot = self.ports.get(key)
        if slot is None:
            number = self.port_numbers.setdefault(key, len(self.port_numbers))
            slot = self.ports[key] = Slot(number, tuple(shape), dtype or self.dtype, number)
        return slot


@dataclass(frozen=True, slots=True)
class _FragmentWithFrees:
    """Instructions with their frees.

    Attributes:
        instructions: the operations.
        peak_bytes: most bytes alive above the start.
        retained_bytes: bytes alive at the end above the start.
    """

    instructions: tuple[Instruction, ...]
    peak_bytes: int
    retained_bytes: int


class _LiveFragment:
    """The live instructions of a fragment, for one set of storages needed after it.

    Attributes:
        touched: the storages that they read or write.
        members: for each storage, the numbers of the outputs that share it.
        sizes: bytes of the storages that they allocate.
        flops: counted floating-point operations.
    """

    __slots__ = ("_instructions", "_last", "_with_frees", "flops", "members", "sizes", "touched")

    def __init__(self, instructions: Sequence[Instruction], slots: Sequence[Sequence[Slot]]) -> None:
        self._instructions = tuple(instructions)
        self._last: dict[int, int] = {}
        self._with_frees: dict[tuple[tuple[int, int, tuple[int, ...]], ...], _FragmentWithFrees] = {}
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

    def with_frees(self, dying: Sequence[int], members: Mapping[int, tuple[int, ...]], sizes: Mapping[int, int]) -> _FragmentWithFrees:
        """The instructions with frees of the storages in ``dying``, which are touched here last."""
        key = tuple([(root, sizes.get(root, 0), members[root]) for root in dying])
        fragment = self._with_frees.get(key)
        if fragment is None:
            fragment = self._with_frees[key] = self._place_frees(key)
        return fragment

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
    """The instructions of one operator in one pass of a strip; values of other operators are slots.

    Attributes:
        instructions: the operations, in order.
        ports: the ports that it uses.
        results: the results that it makes.
        bounded_maxima: as in :class:`sft.lower.builder.ProgramBuilder`.
        written: the storages that it allocates or writes into.
    """

    __slots__ = ("_live", "_slots", "bounded_maxima", "instructions", "ports", "results", "written")

    def __init__(self, builder: ProgramBuilder) -> None:
        self.instructions = tuple(builder.instructions)
        self.ports, self.results = builder.ports, builder.results
        self.bounded_maxima = frozenset(builder.bounded_maxima)
        self._slots = [slots_of(instruction) for instruction in self.instructions]
        allocated = (out.root for i in self.instructions for out in i.outputs if out is not None)
        self.written = frozenset((*allocated, *(slot.root for i in self.instructions for slot in i.writes)))
        self._live: dict[frozenset[int], _LiveFragment | None] = {}

    def live(self, needed: frozenset[int]) -> _LiveFragment | None:
        """The live instructions if the storages in ``needed``, all written here, are needed afterwards; ``None`` if all are dead."""
        if needed not in self._live:
            is_live = live_instructions(self.instructions, self._slots, needed)
            indices = [i for i, kept in enumerate(is_live) if kept]
            live = _LiveFragment([self.instructions[i] for i in indices], [self._slots[i] for i in indices]) if indices else None
            self._live[needed] = live
        return self._live[needed]


def concatenate_fragments(fragments: Sequence[ProgramFragment], dtype: torch.dtype) -> ProgramBuilder:
    """A builder with all instructions of the fragments, as if emitted one after the other."""
    builder = ProgramBuilder(dtype=dtype)
    for fragment in fragments:
        builder.instructions += fragment.instructions
        builder.ports.update(fragment.ports)
        builder.results.update(fragment.results)
        builder.bounded_maxima |= fragment.bounded_maxima
    numbers = [slot.number for slot in builder.ports.values()]
    numbers += [out.number for i in builder.instructions for out in i.outputs if out is not None]
    builder._num_slots = max(numbers, default=-1) + 1
    return builder


def link_fragments(fragments: Sequence[ProgramFragment]) -> Program:
    """The program of the fragments in order, without dead instructions and with frees."""
    ports: dict[Port, Slot] = {}
    results: dict[Port, Slot] = {}
    for fragment in fragments:
        if fragment.ports:
            ports.update(fragment.ports)
        if fragment.results:
            results.update(fragment.results)
    external = {slot.root for slot in ports.values()}
    external.update(slot.root for slot in results.values())
    needed = set(external)  # storages touched later, and those that outlive the program
    live_fragments: list[tuple[_LiveFragment, list[int]]] = []
    for fragment in reversed(fragments):
        live = fragment.live(fragment.written & needed)
        if live is not None:
            live_fragments.append((live, [root for root in live.touched if root not in needed]))
            needed.update(live.touched)
    live_fragments.reverse()
    members: dict[int, tuple[int, ...]] = {}
    sizes: dict[int, int] = {}
    instructions: list[Instruction] = []
    bytes_now = peak = flops = 0
    for live, dying in live_fragments:
        for root, numbers in live.members:
            members[root] = members[root] + numbers if root in members else numbers
        sizes.update(live.sizes)
        scheduled = live.with_frees(dying, members, sizes)
        instructions += scheduled.instructions
        peak = max(peak, bytes_now + scheduled.peak_bytes)
        bytes_now += scheduled.retained_bytes
        flops += live.flops
    live_results = {port: slot for port, slot in results.items() if slot.number in members.get(slot.root, ())}
    touched = set[int]().union(*[live.touched for live, _ in live_fragments])
    return Program(
        instructions=tuple(instructions),
        ports={port: slot for port, slot in ports.items() if slot.root in touched},
        results=live_results,
        result_bytes={port: sizes[slot.root] for port, slot in live_results.items()},
        residuals=(),
        peak_bytes=peak,
        end_bytes=bytes_now,
        flops=flops,
    )
