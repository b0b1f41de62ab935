"""What follows a value that a kernel makes, as far as the kernel can do it as well: a sum of two branches, a ReLU, a copy into a buffer.

Each of these would read the whole value and write one again. A chain grows for as long as the next call makes one value of it that the
kernel can write instead, and nobody else reads what lies between.

A ReLU's gradient in front of a kernel that can take it while it loads the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sft.backends.kernel_call import allocation
from sft.backends.pattern import MatchContext, Rewrite
from sft.lower.program import Instruction, Slot

__all__ = ["Epilogue", "ReluGradPrologue", "match_relu", "match_relu_grad"]

aten = torch.ops.aten


def match_relu(question: MatchContext, value: Slot, at: int) -> Slot | None:
    """What the ReLU at a position makes of a value; None if there is none of it."""
    call = question.listing.instructions[at]
    if call.function is aten.relu_.default and call.arguments[0] == value:
        return value
    if call.function is aten.relu.default and call.arguments[0] == value:
        return call.outputs[0]
    if call.function is aten.clamp_min.out and call.arguments[0] == value and call.arguments[1] == 0:
        return call.writes[0]
    return None


@dataclass(slots=True)
class Epilogue:
    """A group that grows along its value.

    Attributes:
        value: what it makes so far.
        positions: of what belongs to it.
        made: where memory for ``value`` is to be made; None for a buffer that is there.
        residual: what is added.
        relu: whether a ReLU is at its end.
        fused: names of what was taken in.
        can_fold_norm: whether a frozen norm may follow at once.
        norm: the call of that norm.
    """

    value: Slot
    positions: list[int]
    made: int | None
    residual: Slot | None = None
    relu: bool = False
    fused: list[str] = field(default_factory=list)
    can_fold_norm: bool = False
    norm: Instruction | None = None

    @classmethod
    def of(cls, question: MatchContext, value: Slot, at: int, fused: Sequence[str] = (), *, can_fold_norm: bool = False) -> Epilogue:
        """What follows the call at a position, which makes a value."""
        chain = cls(value=value, positions=[at], made=at, fused=list(fused), can_fold_norm=can_fold_norm)
        while chain._step(question):
            pass
        return chain

    @property
    def last(self) -> int:
        """Where the group stands."""
        return self.positions[-1]

    def replacement(self, owner: str, body: Sequence[Instruction]) -> Rewrite:
        """These instructions in the place of the chain, with memory for what it makes."""
        inserted = {self.last: tuple(body)}
        if self.made is not None:
            inserted[self.made] = (allocation(self.value, owner), *inserted.get(self.made, ()))
        return Rewrite(gone=frozenset(self.positions), inserted=inserted)

    def _step(self, question: MatchContext) -> bool:
        """Take in what follows, if it can be."""
        if self.made is None:
            return False  # what is in a buffer has readers enough
        listing = question.listing
        following = [at for at in listing.users(self.value) if at > self.positions[-1]]
        if not following or following[0] in question.taken:
            return False
        at = following[0]
        call = listing.instructions[at]
        made, residual, relu, name = self._next(question, at, call)
        if made is None or made.dtype != self.value.dtype or made.shape != self.value.shape:
            return False
        positions = [*self.positions, at]
        if made != self.value and not listing.is_private(self.value, positions):
            return False
        if not listing.can_move_to(positions, at):
            return False
        is_new = made.root == made.number and listing.makers.get(made.number) == at
        if not is_new and made != self.value and not question.is_image(made):
            return False  # a buffer of the caller's
        self.positions = positions
        self.residual, self.relu = residual or self.residual, relu or self.relu
        self.norm = call if name == "norm" else self.norm
        if made != self.value:
            self.made = at if is_new else None
        self.value = made
        if name:
            self.fused.append(name)
        return True

    def _next(self, question: MatchContext, at: int, call: Instruction) -> tuple[Slot | None, Slot | None, bool, str]:
        """What the following call makes of the value, with what it adds, whether it is a ReLU, and its name."""
        if (made := match_relu(question, self.value, at)) is not None:
            return (None if self.relu else made), None, True, "relu"
        if call.function is aten._native_batch_norm_legit_no_training.default and call.arguments[0] == self.value:
            is_first = self.can_fold_norm and self.norm is None and not self.relu and self.residual is None
            return (call.outputs[0] if is_first and call.outputs[1:] == (None, None) else None), None, False, "norm"
        if call.function is aten.copy_.default and call.arguments[1] == self.value:
            return call.writes[0], None, False, ""
        if call.function in (aten.add.Tensor, aten.add.out) and not self.relu and self.residual is None:
            left, right = call.arguments[:2]
            other = right if left == self.value else left
            if isinstance(other, Slot) and other != self.value and other.shape == self.value.shape and "alpha" not in call.keywords:
                made = call.writes[0] if call.writes else call.outputs[0]
                return (made if other.dtype == self.value.dtype else None), other, False, "residual"
        return None, None, False, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReluGradPrologue:
    """The call that masks.

    Attributes:
        at: its position.
        gradient: before it.
        output: of the ReLU.
    """

    at: int
    gradient: Slot
    output: Slot


def match_relu_grad(question: MatchContext, masked: Slot, positions: Sequence[int]) -> ReluGradPrologue | None:
    """The masking of a gradient, where only the calls at these positions, in order, read what it makes."""
    listing = question.listing
    before = [at for at in listing.accesses(masked) if at < positions[0]]
    if not before or not question.computes_operands:
        return None
    at = before[-1]
    call = listing.instructions[at]
    if at in question.taken or call.function not in (aten.threshold_backward.default, aten.threshold_backward.grad_input):
        return None
    gradient, output, threshold = call.arguments
    written = call.writes[0] if call.writes else call.outputs[0]
    if threshold != 0 or written != masked or output.dtype != masked.dtype or output.root == masked.root:
        return None
    group = (at, *positions)
    if not listing.is_private(masked, group, after=at - 1 if call.writes else -1) or not listing.can_move_to(group, positions[-1]):
        return None
    return ReluGradPrologue(at=at, gradient=gradient, output=output)
