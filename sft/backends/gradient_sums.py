"""Kernel calls that sum gradients of parameters over pixels, and the delivery of these gradients to their destinations.

A call leaves partial sums in a workspace, one for each split of the pixels. A second launch adds them up, and writes the gradients or adds
them to accumulators, in the accumulators' layout and type. So a strip's contribution takes two launches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sft.backends.kernel_call import KernelCall, allocation, kernel_instruction, replayable
from sft.backends.pattern import MatchContext
from sft.lower.program import Instruction, Slot

__all__ = ["GradientSumsCall", "deliver_gradients"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSumsCall(KernelCall, ABC):
    """Partial sums of the gradients of a weight and a bias."""

    @abstractmethod
    def slots(self, workspace: Tensor) -> tuple[Tensor, Tensor | None]:
        """Slots of the weight, as :func:`sft.kernels.reduce.reduce_triton.launch_reduce` takes them, and of the bias."""

    @replayable
    def add_gradients(self, weight: Tensor | None, bias: Tensor | None, workspace: Tensor) -> None:
        """Add the gradients to those of the two tensors that are not None."""
        self._reduce(weight, bias, workspace, add=True)

    @replayable
    def write_gradients(self, weight: Tensor | None, bias: Tensor | None, workspace: Tensor) -> None:
        """Write the gradients to those of the two tensors that are not None."""
        self._reduce(weight, bias, workspace, add=False)

    def _reduce(self, weight: Tensor | None, bias: Tensor | None, workspace: Tensor, *, add: bool) -> None:
        if workspace.device.type == "meta":
            return
        from sft.kernels.reduce.reduce_triton import launch_reduce  # not above: it imports Triton

        slots = self.slots(workspace)
        sums = [(source, out) for source, out in zip(slots, (weight, bias), strict=True) if source is not None and out is not None]
        launch_reduce(*sums[0], *(sums[1] if len(sums) > 1 else ()), add=add)


def deliver_gradients(
    context: MatchContext, call: GradientSumsCall, gradients: Sequence[Slot | None], workspace: Slot, at: int, owner: str
) -> dict[int, tuple[Instruction, ...]]:
    """Instructions that bring gradients from a workspace to their destinations: added to accumulators, or written to new tensors.

    Args:
        context: the program.
        call: the call that fills the workspace.
        gradients: the gradients of weight and bias that the program made before; None for one that it did not make.
        workspace: the workspace.
        at: position at which the workspace is complete.
        owner: operator of the new instructions.

    Returns:
        Instructions by position: at ``at``, or in the place of instructions that added a gradient to its accumulator. Those are replaced.
    """
    additions = [None if slot is None else _addition(context, slot, at) for slot in gradients]
    totals = [None if position is None else context.def_use.instructions[position].arguments[0] for position in additions]
    positions = sorted(position for position in additions if position is not None)
    deliveries: dict[int, tuple[Instruction, ...]] = {}
    if len(positions) == 2 and context.def_use.can_move_to(positions, positions[-1]):
        name = context.def_use.instructions[positions[-1]].owner
        deliveries = {positions[0]: (), positions[-1]: (_delivery(call.add_gradients, totals, workspace, name),)}
    else:
        for index, position in enumerate(additions):
            if position is not None:
                only = [total if index == other else None for other, total in enumerate(totals)]
                deliveries[position] = (_delivery(call.add_gradients, only, workspace, context.def_use.instructions[position].owner),)
    written = [slot if position is None else None for slot, position in zip(gradients, additions, strict=True)]
    if any(slot is not None for slot in written):
        memory = tuple(allocation(slot, owner) for slot in written if slot is not None)
        deliveries[at] = (*memory, _delivery(call.write_gradients, written, workspace, owner))
    return deliveries


def _delivery(deliver: object, targets: Sequence[Slot | None], workspace: Slot, owner: str) -> Instruction:
    assert callable(deliver)
    return kernel_instruction(deliver, *targets, workspace, writes=tuple(slot for slot in targets if slot is not None), owner=owner)


def _addition(context: MatchContext, slot: Slot, at: int) -> int | None:
    """Position of the only use of a gradient, after ``at``, if it adds it to an accumulator; None otherwise."""
    def_use = context.def_use
    users = def_use.users(slot)
    if len(users) != 1 or users[0] <= at or not context.is_unclaimed(users[0], aten.add_.Tensor):
        return None
    call = def_use.instructions[users[0]]
    is_plain = call.arguments[1] == slot and len(call.arguments) == 2 and not call.keywords and call.arguments[0] != slot
    return users[0] if is_plain and def_use.is_private(slot, (def_use.makers[slot.number], users[0])) else None
