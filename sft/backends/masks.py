"""A ReLU's gradient in front of a kernel that can take it while it loads the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sft.backends.replacement import MatchContext
from sft.lower.program import Slot

__all__ = ["ReluGradPrologue", "match_relu_grad"]

aten = torch.ops.aten


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
    if not listing.is_private(masked, group, after=at - 1 if call.writes else -1) or not listing.moves_to(group, positions[-1]):
        return None
    return ReluGradPrologue(at=at, gradient=gradient, output=output)
