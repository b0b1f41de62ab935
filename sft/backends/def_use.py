"""Def-use analysis of a program: definitions, reads and writes of each slot, and legal reorderings of instructions.

A rewrite replaces several instructions by one call, so it moves their reads and writes to the position of that call. The program stays the
same if, for each moved instruction, no instruction between its old and its new position writes a slot that it reads or writes, or reads a
slot that it writes. Slots that share a storage have the same root, so the analysis compares roots. An instruction that only makes a view
touches no elements.

Two rewrites cannot conflict by moving both. If an instruction of the first was before an instruction of the second and is after it now, it
has passed the old position of the second, which the rule has checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sft.lower.program import Instruction, Port, Slot

__all__ = ["DefUse", "slots_in"]


def slots_in(value: Any) -> Iterator[Slot]:
    """All slots in an argument, nested lists, tuples and dictionaries included."""
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from slots_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from slots_in(item)


@dataclass(frozen=True, slots=True)
class _Effects:
    """Roots of the elements that an instruction reads, and of those that it writes."""

    reads: frozenset[int]
    writes: frozenset[int]


@dataclass(kw_only=True)
class DefUse:
    """Definitions and uses of the slots of a program, by position.

    Attributes:
        instructions: the program.
        ports: slots that belong to the caller before the program.
        results: slots that belong to the caller after the program.
    """

    instructions: tuple[Instruction, ...]
    ports: dict[Port, Slot]
    results: dict[Port, Slot]
    _effects: list[_Effects] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._effects = [_effects_of(instruction) for instruction in self.instructions]

    @cached_property
    def makers(self) -> dict[int, int]:
        """Position of the instruction that makes a slot, by the slot's number."""
        return {out.number: at for at, i in enumerate(self.instructions) for out in i.outputs if out is not None}

    @cached_property
    def _users(self) -> dict[int, list[int]]:
        users: dict[int, list[int]] = {}
        for at, instruction in enumerate(self.instructions):
            for number in {s.number for s in slots_in((instruction.arguments, instruction.keywords, instruction.writes))}:
                users.setdefault(number, []).append(at)
        return users

    @cached_property
    def _accesses(self) -> dict[int, list[int]]:
        accesses: dict[int, list[int]] = {}
        for at, effects in enumerate(self._effects):
            for root in effects.reads | effects.writes:
                accesses.setdefault(root, []).append(at)
        return accesses

    @cached_property
    def outside(self) -> frozenset[int]:
        """Roots that belong to the caller, before or after the program."""
        return frozenset(slot.root for slot in (*self.ports.values(), *self.results.values()))

    def maker(self, slot: Slot) -> Instruction | None:
        """The instruction that makes a slot; None for a port."""
        at = self.makers.get(slot.number)
        return None if at is None else self.instructions[at]

    def users(self, slot: Slot) -> list[int]:
        """Positions of the instructions with the slot itself as an operand."""
        return self._users.get(slot.number, [])

    def accesses(self, slot: Slot) -> list[int]:
        """Positions that read or write elements of a slot's storage, its allocation included."""
        return self._accesses.get(slot.root, [])

    def is_private(self, slot: Slot, positions: Collection[int], *, after: int = -1) -> bool:
        """True if only these positions access the slot's storage (after position ``after``), and the caller never sees it."""
        return slot.root not in self.outside and all(at in positions for at in self.accesses(slot) if at > after)

    def is_read(self, slot: Slot | None) -> bool:
        """True if an instruction or the caller reads a result of an instruction; false for None."""
        return slot is not None and (bool(self.users(slot)) or slot.root in self.outside)

    def read_outputs(self, call: Instruction) -> tuple[Slot | None, ...]:
        """The results of an instruction; None for those that no instruction and no caller reads."""
        return tuple(slot if self.is_read(slot) else None for slot in call.outputs)

    def is_written_between(self, slot: Slot, first: int, last: int) -> bool:
        """True if an instruction after ``first`` and before ``last`` writes the slot's storage."""
        return any(slot.root in self._effects[at].writes for at in range(first + 1, last))

    def can_move_to(self, positions: Collection[int], last: int) -> bool:
        """True if the instructions at these positions may all move to position ``last``."""
        for start in positions:
            moved = self._effects[start]
            for at in range(start + 1, last):
                if at in positions:
                    continue
                passed = self._effects[at]
                if passed.writes & (moved.reads | moved.writes) or passed.reads & moved.writes:
                    return False
        return True


def _effects_of(instruction: Instruction) -> _Effects:
    outputs = [out for out in instruction.outputs if out is not None]
    written = frozenset(slot.root for slot in (*instruction.writes, *outputs))
    if outputs and not instruction.writes and all(out.root != out.number for out in outputs):
        return _Effects(frozenset(), frozenset())  # a view
    return _Effects(frozenset(slot.root for slot in slots_in((instruction.arguments, instruction.keywords))), written)
