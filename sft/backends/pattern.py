"""Patterns of the kernel rewriter: the state that all matchers share, and the rewrites that they propose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sft.backends.convolution_relu import FusionDevice
from sft.backends.def_use import DefUse
from sft.backends.kernel_call import allocation
from sft.backends.selector import KernelSelector
from sft.lower.builder import ProgramBuilder
from sft.lower.program import Instruction, Slot

__all__ = ["MatchContext", "Pattern", "Rewrite"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """Instructions to remove, and the instructions that replace them.

    Attributes:
        removed: positions of the removed instructions.
        inserted: new instructions by position, each position one of the removed ones.
    """

    removed: frozenset[int]
    inserted: dict[int, tuple[Instruction, ...]]

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """All inserted instructions, in order."""
        return tuple(instruction for at in sorted(self.inserted) for instruction in self.inserted[at])


@dataclass(kw_only=True)
class MatchContext:
    """A program and the decisions about it, shared by all patterns.

    Attributes:
        def_use: the program as it was lowered.
        selector: chooses between kernels and ATen.
        builder: makes the slots that a rewrite needs.
        channels_last: numbers of the slots that are known to be channels-last.
        computes_operands: true if matrix products of operands that a kernel computes come out right on the device (see
            ``kernels/common_triton.py``). If not, kernels would write these operands to memory first, without the program counting it.
        may_fold_norms: true if no backward pass follows, so that a frozen norm may become part of the convolution before it.
        fusion_device: device whose convolutions are fused with a ReLU where no kernel is selected; None for a device without.
        claimed: positions that belong to an earlier rewrite.
    """

    def_use: DefUse
    selector: KernelSelector
    builder: ProgramBuilder
    channels_last: frozenset[int]
    computes_operands: bool = True
    may_fold_norms: bool = False
    fusion_device: FusionDevice | None = None
    claimed: set[int] = field(default_factory=set)

    def unclaimed_calls(self, function: object) -> Iterator[tuple[int, Instruction]]:
        """Positions and instructions that call a function and belong to no rewrite yet."""
        for at, instruction in enumerate(self.def_use.instructions):
            if instruction.function is function and at not in self.claimed:
                yield at, instruction

    def is_unclaimed(self, at: int, function: object) -> bool:
        """True if the instruction at a position calls this function and belongs to no rewrite yet."""
        return at not in self.claimed and self.def_use.instructions[at].function is function

    def is_channels_last(self, slot: Slot) -> bool:
        """True if a slot is known to be channels-last."""
        return slot.number in self.channels_last or slot.shape[1] == 1

    def to_channels_last(self, slot: Slot, owner: str) -> tuple[Slot, tuple[Instruction, ...]]:
        """The slot itself if it is channels-last; otherwise a channels-last copy and the instructions that make it."""
        if self.is_channels_last(slot):
            return slot, ()
        copy = self.builder.slot(slot.shape, slot.dtype)
        return copy, (allocation(copy, owner), Instruction(aten.copy_.default, (copy, slot), {}, (), (copy,), 0, 0, 0, owner))


class Pattern(Protocol):
    """Matcher of one family of instruction groups."""

    def __call__(self, context: MatchContext) -> Iterator[Rewrite]: ...
