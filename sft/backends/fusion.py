"""Fusion of element-wise operators into a kernel call: epilogues after a value, and the ReLU gradient before a backward kernel.

An *epilogue* is a chain of operators after a value that a kernel makes: the sum with a residual branch, a ReLU, a copy into a buffer. Each
of them would read the whole value and write a new one. The chain grows as long as the next operator makes one value that the kernel can
write instead, and no other instruction reads the values in between.

A *prologue* is the ReLU gradient (``threshold_backward``) before a kernel that can apply the mask while it loads the gradient.
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


def match_relu(context: MatchContext, value: Slot, at: int) -> Slot | None:
    """The result of a ReLU of ``value`` at a position; None if the instruction is not such a ReLU."""
    call = context.def_use.instructions[at]
    if call.function is aten.relu_.default and call.arguments[0] == value:
        return value
    if call.function is aten.relu.default and call.arguments[0] == value:
        return call.outputs[0]
    if call.function is aten.clamp_min.out and call.arguments[0] == value and call.arguments[1] == 0:
        return call.writes[0]
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """A candidate for the next operator of an epilogue.

    Attributes:
        value: its result; None if the operator cannot be fused.
        name: name in a shape class; empty for a copy.
        residual: the operand that it adds.
    """

    value: Slot | None
    name: str = ""
    residual: Slot | None = None


@dataclass(slots=True)
class Epilogue:
    """A value and the chain of operators fused after it.

    Attributes:
        value: result of the chain so far.
        positions: instructions of the group.
        allocated_at: position at which to allocate ``value``; None if it is an existing buffer.
        residual: operand that is added.
        relu: true if the chain ends in a ReLU.
        fused: names of the fused operators.
        can_fold_norm: true if a frozen norm may follow directly.
        norm: the call of that norm.
    """

    value: Slot
    positions: list[int]
    allocated_at: int | None
    residual: Slot | None = None
    relu: bool = False
    fused: list[str] = field(default_factory=list)
    can_fold_norm: bool = False
    norm: Instruction | None = None

    @classmethod
    def of(cls, context: MatchContext, value: Slot, at: int, fused: Sequence[str] = (), *, can_fold_norm: bool = False) -> Epilogue:
        """The longest epilogue of the call at a position, which makes ``value``."""
        epilogue = cls(value=value, positions=[at], allocated_at=at, fused=list(fused), can_fold_norm=can_fold_norm)
        while epilogue._extend(context):
            pass
        return epilogue

    @property
    def last(self) -> int:
        """Position of the kernel call that replaces the group."""
        return self.positions[-1]

    def to_rewrite(self, owner: str, body: Sequence[Instruction]) -> Rewrite:
        """The rewrite that replaces the group by ``body``, with the allocation of its result."""
        inserted = {self.last: tuple(body)}
        if self.allocated_at is not None:
            inserted[self.allocated_at] = (allocation(self.value, owner), *inserted.get(self.allocated_at, ()))
        return Rewrite(removed=frozenset(self.positions), inserted=inserted)

    def _extend(self, context: MatchContext) -> bool:
        """Fuse the next operator; return false if it cannot be fused."""
        if self.allocated_at is None:
            return False  # a value in an existing buffer has other readers
        def_use = context.def_use
        later_users = [at for at in def_use.users(self.value) if at > self.positions[-1]]
        if not later_users or later_users[0] in context.claimed:
            return False
        at = later_users[0]
        link = self._link(context, at, def_use.instructions[at])
        value = link.value
        if value is None or value.dtype != self.value.dtype or value.shape != self.value.shape:
            return False
        positions = [*self.positions, at]
        if value != self.value and not def_use.is_private(self.value, positions):
            return False
        if not def_use.can_move_to(positions, at):
            return False
        is_new = value.root == value.number and def_use.makers.get(value.number) == at
        if not is_new and value != self.value and not context.is_channels_last(value):
            return False  # a buffer of the caller
        self.positions = positions
        self.residual, self.relu = link.residual or self.residual, link.name == "relu" or self.relu
        self.norm = def_use.instructions[at] if link.name == "norm" else self.norm
        if value != self.value:
            self.allocated_at = at if is_new else None
        self.value = value
        if link.name:
            self.fused.append(link.name)
        return True

    def _link(self, context: MatchContext, at: int, call: Instruction) -> _Link:
        """The operator at a position as a candidate for fusion."""
        if (value := match_relu(context, self.value, at)) is not None:
            return _Link(value=None if self.relu else value, name="relu")
        if call.function is aten._native_batch_norm_legit_no_training.default and call.arguments[0] == self.value:
            is_first = self.can_fold_norm and self.norm is None and not self.relu and self.residual is None
            out, *statistics = context.def_use.read_outputs(call)
            return _Link(value=out if is_first and statistics == [None, None] else None, name="norm")
        if call.function is aten.copy_.default and call.arguments[1] == self.value:
            return _Link(value=call.writes[0])
        if call.function in (aten.add.Tensor, aten.add.out) and not self.relu and self.residual is None:
            left, right = call.arguments[:2]
            branch = right if left == self.value else left
            if isinstance(branch, Slot) and branch != self.value and branch.shape == self.value.shape and "alpha" not in call.keywords:
                value = call.writes[0] if call.writes else call.outputs[0]
                return _Link(value=value if branch.dtype == self.value.dtype else None, name="residual", residual=branch)
        return _Link(value=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReluGradPrologue:
    """A ReLU gradient that a backward kernel can apply.

    Attributes:
        at: position of ``threshold_backward``.
        gradient: gradient before the mask.
        output: output of the ReLU.
    """

    at: int
    gradient: Slot
    output: Slot


def match_relu_grad(context: MatchContext, masked: Slot, positions: Sequence[int]) -> ReluGradPrologue | None:
    """The ReLU gradient that makes ``masked``, if only the calls at these positions, in order, read its result; None otherwise."""
    def_use = context.def_use
    earlier = [at for at in def_use.accesses(masked) if at < positions[0]]
    if not earlier or not context.computes_operands:
        return None
    at = earlier[-1]
    call = def_use.instructions[at]
    if at in context.claimed or call.function not in (aten.threshold_backward.default, aten.threshold_backward.grad_input):
        return None
    gradient, output, threshold = call.arguments
    written = call.writes[0] if call.writes else call.outputs[0]
    if threshold != 0 or written != masked or output.dtype != masked.dtype or output.root == masked.root:
        return None
    group = (at, *positions)
    if not def_use.is_private(masked, group, after=at - 1 if call.writes else -1) or not def_use.can_move_to(group, positions[-1]):
        return None
    return ReluGradPrologue(at=at, gradient=gradient, output=output)
