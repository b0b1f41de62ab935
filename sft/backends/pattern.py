"""What a match puts in the place of instructions, and what all matchers are given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sft.backends.def_use import DefUse
from sft.backends.kernel_call import allocation
from sft.backends.selector import KernelSelector
from sft.lower.builder import ProgramBuilder
from sft.lower.program import Instruction, Slot

__all__ = ["MatchContext", "Pattern", "Rewrite"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """Instructions that go, and what comes in their place.

    Attributes:
        gone: positions of those that go.
        inserted: what stands there instead, by position; among these.
    """

    gone: frozenset[int]
    inserted: dict[int, tuple[Instruction, ...]]

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """All that is inserted, in order."""
        return tuple(one for at in sorted(self.inserted) for one in self.inserted[at])


@dataclass(kw_only=True)
class MatchContext:
    """A program and who decides; makes the slots that a replacement needs.

    Attributes:
        listing: the program as it was lowered.
        selector: who decides.
        emitter: makes slots.
        last: numbers of the slots that are channels-last.
        computes_operands: whether products of numbers that a kernel computes itself come out right on the device (see
            ``kernels/common_triton.py``); where not, kernels would make them in memory first, which a program counts better.
        may_fold_norms: whether a frozen norm may become part of the convolution in front of it: no backward pass follows.
        taken: positions that belong to a replacement already.
    """

    listing: DefUse
    selector: KernelSelector
    emitter: ProgramBuilder
    last: frozenset[int]
    computes_operands: bool = True
    may_fold_norms: bool = False
    taken: set[int] = field(default_factory=set)

    def free(self, function: object) -> Iterator[tuple[int, Instruction]]:
        """Positions and instructions of a function that nobody has taken."""
        for at, instruction in enumerate(self.listing.instructions):
            if instruction.function is function and at not in self.taken:
                yield at, instruction

    def is_free(self, at: int, function: object) -> bool:
        """Whether a position holds this function and is nobody's."""
        return at not in self.taken and self.listing.instructions[at].function is function

    def is_image(self, slot: Slot) -> bool:
        """Whether a slot is surely channels-last."""
        return slot.number in self.last or slot.shape[1] == 1

    def image(self, slot: Slot, owner: str) -> tuple[Slot, tuple[Instruction, ...]]:
        """The slot channels-last: itself, or a copy with what makes it."""
        if self.is_image(slot):
            return slot, ()
        copied = self.emitter.slot(slot.shape, slot.dtype)
        return copied, (allocation(copied, owner), Instruction(aten.copy_.default, (copied, slot), {}, (), (copied,), 0, 0, 0, owner))


class Pattern(Protocol):
    """Finds one family of groups in a program."""

    def __call__(self, question: MatchContext) -> Iterator[Rewrite]: ...
