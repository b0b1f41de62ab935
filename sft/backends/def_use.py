"""What a list of instructions does to memory: who makes a slot, who reads it, and which instructions may change places.

A pass that puts one call in the place of several instructions moves their reads and writes to where the call stands. That is the same
program if, for each instruction that moves, nothing between its old and its new place writes what it reads or writes, or reads what it
writes. Slots that share a storage share a root, and it is roots that are compared. An instruction that only makes a view of a storage
touches no elements of it.

Two groups that both move cannot upset each other: an instruction of one that was before an instruction of the other, and is behind it
afterwards, passed the other's old place, where the rule has looked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sft.lower.program import Instruction, Port, Slot

__all__ = ["DefUse", "slots_in"]


def slots_in(value: Any) -> Iterator[Slot]:
    """The slots in an argument."""
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
    """Roots whose elements an instruction reads, and writes."""

    reads: frozenset[int]
    writes: frozenset[int]


@dataclass(kw_only=True)
class DefUse:
    """Instructions with their uses, by position.

    Attributes:
        instructions: in order.
        ports: slots that are the caller's.
        results: slots that go to the caller.
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
        found: dict[int, list[int]] = {}
        for at, instruction in enumerate(self.instructions):
            for slot in {s.number for s in slots_in((instruction.arguments, instruction.keywords, instruction.writes))}:
                found.setdefault(slot, []).append(at)
        return found

    @cached_property
    def _accesses(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for at, effects in enumerate(self._effects):
            for root in effects.reads | effects.writes:
                found.setdefault(root, []).append(at)
        return found

    @cached_property
    def outside(self) -> frozenset[int]:
        """Roots that belong to the caller, before or after."""
        return frozenset(slot.root for slot in (*self.ports.values(), *self.results.values()))

    def maker(self, slot: Slot) -> Instruction | None:
        """The instruction that makes a slot; None for a port."""
        at = self.makers.get(slot.number)
        return None if at is None else self.instructions[at]

    def users(self, slot: Slot) -> list[int]:
        """Positions at which a slot itself is named as an operand."""
        return self._users.get(slot.number, [])

    def accesses(self, slot: Slot) -> list[int]:
        """Positions at which elements of a slot's storage are read or written, its making included."""
        return self._accesses.get(slot.root, [])

    def is_private(self, slot: Slot, positions: Collection[int], *, after: int = -1) -> bool:
        """Whether nobody but these positions touches the slot's storage (behind position ``after``), and it never leaves the program."""
        return slot.root not in self.outside and all(at in positions for at in self.accesses(slot) if at > after)

    def is_written_between(self, slot: Slot, first: int, last: int) -> bool:
        """Whether the slot's storage is written behind ``first`` and before ``last``."""
        return any(slot.root in self._effects[at].writes for at in range(first + 1, last))

    def can_move_to(self, positions: Collection[int], last: int) -> bool:
        """Whether the instructions at these positions may all stand at position ``last``."""
        for start in positions:
            ours = self._effects[start]
            for at in range(start + 1, last):
                if at in positions:
                    continue
                theirs = self._effects[at]
                if theirs.writes & (ours.reads | ours.writes) or theirs.reads & ours.writes:
                    return False
        return True


def _effects_of(instruction: Instruction) -> _Effects:
    made = [out for out in instruction.outputs if out is not None]
    written = frozenset(slot.root for slot in (*instruction.writes, *made))
    if made and not instruction.writes and all(out.root != out.number for out in made):
        return _Effects(frozenset(), frozenset())  # a view
    return _Effects(frozenset(slot.root for slot in slots_in((instruction.arguments, instruction.keywords))), written)
