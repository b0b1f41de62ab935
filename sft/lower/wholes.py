"""Lowering a segment that runs whole: two programs, of which the second needs what the first keeps.

Nothing is added to what the caller holds: gradients are made here, and handed on. A norm whose parts are all inside is one call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from sft.analysis.axes import ROWS
from sft.analysis.interval import Interval
from sft.analysis.steps import StripStep
from sft.lower.context import NodeContext, GradContribution, SegmentInfo
from sft.lower.patches import contribution_slot, sum_contributions
from sft.lower.program import Port, Program
from sft.lower.step import StripLowering, apply_backend
from sft.lower.wholenorms import find_whole_batch_norms

__all__ = ["lower_whole"]

aten = torch.ops.aten


def lower_whole(scope: SegmentInfo, step: StripStep, *, training: bool) -> tuple[Program, Program | None]:
    """The two programs of a segment that keeps everything: forward and, when training, backward."""
    lowering = WholeLowering.of(scope, step, keeps=training)
    lowering.forward(write_outputs=True, write_rows=False)
    if not training:
        apply_backend(scope, lowering.emitter)
        return lowering.emitter.finish(), None
    turn = len(lowering.emitter.instructions)
    lowering.backward()
    turn = apply_backend(scope, lowering.emitter, turn) or turn
    return lowering.emitter.split(turn)


class WholeLowering(StripLowering):
    """Lowers all of a segment at once."""

    whole: ClassVar[bool] = True

    def __init__(self, scope: SegmentInfo, *, keeps: bool = False) -> None:
        super().__init__(scope, keeps=keeps)
        norms = find_whole_batch_norms(scope)
        self._rules.update(norms)
        self._left_out = frozenset[str]().union(*(norm.left_out for norm in norms.values()))
        self._instead = {norm.moments: name for name, norm in norms.items()}

    def forward_of(self, name: str) -> None:
        """Compute one operator; a norm is computed where its moments are."""
        if name not in self._left_out:
            super().forward_of(self._instead.get(name, name))

    def add_to_side(self, ctx: NodeContext, name: str, patch: GradContribution) -> None:
        """Add to the gradient of a tensor from outside that is not streamed, or begin it."""
        e, scope, slot = self.emitter, self.scope, contribution_slot(self.emitter, patch)
        is_first = Port("grad_side", name) not in e.results
        if is_first and slot.shape == scope.side_shape(name) and slot.dtype == scope.grad_dtype(name):
            is_laid_out = len(slot.shape) == 1 or (name in scope.in_layout and _is_weight_grad_in_layout(slot.shape))
            e.give_side_gradient(name, slot, patch.owned and patch.channels is None and is_laid_out, scope.dtype_of(name))
        else:
            e.add_into(ctx.side_gradient(name), slot)

    def give_gradients(self, gradients: Mapping[str, Sequence[GradContribution]]) -> None:
        """Hand the gradients of what is read from outside to the caller; those that nothing was added to are zeros."""
        scope = self.scope
        for name in scope.sources:
            if name in gradients:
                self._give_source_gradient(name, gradients[name])
        for user in scope.names:
            for name in scope.graph[user].operands:
                if name in scope.requires_grad and name not in scope.streamed and name not in self._inside:
                    shape, dtype = scope.side_shape(name), scope.grad_dtype(name)
                    self.emitter.side_gradient(name, shape, dtype, scope.dtype_of(name))

    def _give_source_gradient(self, name: str, patches: Sequence[GradContribution]) -> None:
        """Hand the gradient of a whole source to the caller."""
        rows = Interval(0, self.scope.extent(name, ROWS))
        inside = [patch for patch in patches if patch.rows and patch.columns]
        total, owned = sum_contributions(self.scope, self.emitter, name, rows, inside, self.scope.grad_dtype(name))
        if not (owned and self.emitter.owns(total)):
            total = self.emitter.call(aten.clone.default, total, shape=total.shape, dtype=total.dtype)
        self.emitter.result("grad_source", name, total)


def _is_weight_grad_in_layout(shape: Sequence[int]) -> bool:
    """Whether the gradient of a weight is made channels last, or in order where it is no weight of a convolution.

    In double precision torch makes those of convolutions of volumes in order, which is the same for few shapes.
    """
    return len(shape) < 5 or shape[1] == 1 or math.prod(shape[2:]) == 1
