"""Lowering of an untiled segment: a forward program, and a backward program that reads the residuals of the first.

The segment runs on full tensors, as in eager PyTorch. Its programs allocate all gradients themselves, as results; the caller's
accumulators are not used.

BatchNorm in training is one call (:mod:`sft.lower.untiled.whole_norms`). Next values of buffers are computed together
(:mod:`sft.lower.untiled.buffer_updates`), and so are weights that frozen norms are folded into (:mod:`sft.lower.untiled.folded_norms`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.graph import Node
from sft.analysis.tiling.strips import StripStep
from sft.common.interval import Interval
from sft.lower.context import GradContribution, NodeContext, SegmentInfo
from sft.lower.grad_accumulation import contribution_slot, sum_contributions, sum_global_gradients
from sft.lower.lower_strip import StripLowering, apply_backend
from sft.lower.program import Port, Program, Slot
from sft.lower.redundant_copies import replace_redundant_copies
from sft.lower.untiled.buffer_updates import copy_buffers, emit_updates, find_updates
from sft.lower.untiled.folded_norms import FoldedNorms, find_folded_norms
from sft.lower.untiled.whole_norms import WholeBatchNormRule, find_whole_batch_norms

__all__ = ["WholeLowering", "lower_whole"]

aten = torch.ops.aten


def lower_whole(scope: SegmentInfo, step: StripStep, *, training: bool) -> tuple[Program, Program | None]:
    """The programs of an untiled segment: forward and, when training, backward."""
    lowering = WholeLowering.of(scope, step, has_backward=training)
    lowering.forward(write_outputs=True, write_rows=False)
    if not training:
        apply_backend(scope, lowering.builder)
        replace_redundant_copies(scope, lowering.builder)
        return lowering.builder.finish(), None
    num_forward = len(lowering.builder.instructions)
    lowering.backward()
    num_forward = apply_backend(scope, lowering.builder, num_forward) or num_forward
    num_forward = replace_redundant_copies(scope, lowering.builder, num_forward) or 0
    return lowering.builder.split(num_forward)


class WholeLowering(StripLowering):
    """Lowers a segment on full tensors."""

    untiled: ClassVar[bool] = True
    allocates_results: ClassVar[bool] = True

    def __init__(self, scope: SegmentInfo, *, has_backward: bool = False) -> None:
        super().__init__(scope, has_backward=has_backward)
        norms = find_whole_batch_norms(scope)
        self._rules.update(norms)
        self._absorbed = frozenset[str]().union(*(norm.absorbed for norm in norms.values()))
        self._affine_of_moments = {norm.moments: name for name, norm in norms.items()}
        self._updates = find_updates(scope, self._absorbed)
        self._grouped = frozenset(name for group in self._updates for name in group.operators)
        groups = find_folded_norms(scope) if self.allocates_results else ()
        self._folded: dict[str, FoldedNorms] = {name: group for group in groups for name in group.names}
        self._folded_gradients: dict[str, list[GradContribution]] = {}

    def forward(self, *, write_outputs: bool, write_rows: bool) -> None:
        """Emit all operators; next values of buffers together."""
        self._enter(self.scope.names[0])
        if write_outputs:
            self.global_slots |= copy_buffers(self.builder, self._updates_of_norms(), self._global_slot)
        super().forward(write_outputs=write_outputs, write_rows=write_rows)
        if write_outputs:
            emit_updates(self.scope, self.builder, self._updates, self._global_slot)

    def _updates_of_norms(self) -> list[Node]:
        """Updates of running statistics by norms of one call, of buffers from outside of the segment."""
        updates = (rule.update for rule in self._rules.values() if isinstance(rule, WholeBatchNormRule) and rule.update is not None)
        nodes = (self.scope.graph[name] for update in updates for name in (update.mean, update.variance))
        return [node for node in nodes if node.name in self.scope.outputs and node.argument("running").name not in self._inside]

    def _global_slot(self, name: str) -> Slot:
        slot = self.global_slots.get(name)
        return self.builder.port("side", name, self.scope.global_shape(name), self.scope.dtype_of(name)) if slot is None else slot

    def forward_of(self, name: str) -> None:
        """Emit one operator, unless it is grouped with others; a norm of one call is emitted in place of its moments."""
        if name in self._folded:
            if name not in self.global_slots:
                self._forward_folded(name, self._folded[name])
        elif name not in self._absorbed and name not in self._grouped:
            super().forward_of(self._affine_of_moments.get(name, name))

    def _forward_folded(self, name: str, group: FoldedNorms) -> None:
        """Emit the folded weights and biases of a group in place of the first one."""
        self._enter(name)
        self.global_slots |= group.forward(self.builder, self._global_slot)
        for result in group.names:
            slot, out = self.global_slots[result], Port("out", result)
            if result in self.scope.outputs and self.builder.ports.get(out) != slot:
                self.builder.copy(self.builder.port(*out, slot.shape, slot.dtype), slot)

    def backward_of(self, name: str, contributions: list[GradContribution]) -> list[tuple[str, GradContribution]]:
        """Differentiate one operator; folded norms together, after the last one has its gradient."""
        group = self._folded.get(name)
        if group is None:
            return super().backward_of(name, contributions)
        self._folded_gradients[name] = contributions
        if all(each in self._folded_gradients for each in group.names if each in self.scope.requires_grad):
            self._enter(name)
            gradients = {each: self._folded_gradient(each) for each in group.names}
            known = {each: gradient for each, gradient in gradients.items() if gradient is not None}
            group.backward(self.builder, self._global_slot, known, self._emit_folded_gradient)
        return []

    def _folded_gradient(self, name: str) -> Slot | None:
        """The gradient of a folded weight or bias, if it has any."""
        contributions, shape = self._folded_gradients.pop(name, []), self.scope.global_shape(name)
        if name in self.scope.outputs and name in self.scope.requires_grad:
            port = self.builder.port("grad_out", name, shape, self.scope.grad_dtype(name))
            contributions = [*contributions, GradContribution(port, None, None, owned=False)]
        return sum_global_gradients(self.builder, shape, contributions)[0] if contributions else None

    def _emit_folded_gradient(self, name: str, gradient: Slot) -> None:
        """Start the gradient of a parameter of a folded norm, or add to it."""
        results = self.builder.results
        if Port("grad_side", name) in results:
            self.builder.add_into(results[Port("grad_side", name)], gradient)
        else:
            results[Port("grad_side", name)] = gradient

    def add_to_global_grad(self, ctx: NodeContext, name: str, term: GradContribution) -> None:
        """Add a contribution to the gradient of a global tensor from outside; the first one may become the accumulator."""
        builder, scope, slot = self.builder, self.scope, contribution_slot(self.builder, term)
        is_first = Port("grad_side", name) not in builder.results
        if name in scope.single_grads and slot.dtype != scope.grad_dtype(name):
            term = GradContribution(builder.cast(slot, scope.grad_dtype(name)), None, None, owned=True)
            slot = term.slot
        if term.span is not None:
            super().add_to_global_grad(ctx, name, term)
        elif is_first and slot.shape == scope.global_shape(name) and slot.dtype == scope.grad_dtype(name):
            is_in_layout = len(slot.shape) == 1 or name in scope.in_program_layout
            builder.emit_global_grad(name, slot, term.owned and term.channels is None and is_in_layout, scope.dtype_of(name))
        else:
            builder.add_into(ctx.global_grad(name), slot)

    def write_gradients(self, gradients: Mapping[str, Sequence[GradContribution]]) -> None:
        """Emit the gradients of sources and of global tensors from outside as results; zeros if they have no contribution."""
        scope = self.scope
        for name in scope.sources:
            if name in scope.requires_grad and any(user in scope.requires_grad and user in scope.names for user in scope.graph.users[name]):
                self._emit_source_gradient(name, gradients.get(name, ()))
        for user in scope.names:
            for name in scope.graph[user].operands:
                if name in scope.requires_grad and name not in scope.streamed and name not in self._inside:
                    shape, dtype = scope.global_shape(name), scope.grad_dtype(name)
                    self.builder.global_grad(name, shape, dtype, scope.dtype_of(name))

    def _emit_source_gradient(self, name: str, contributions: Sequence[GradContribution]) -> None:
        """Emit the gradient of a source as a result."""
        rows = Interval(0, self.scope.extent(name, ROWS))
        inside = [term for term in contributions if term.rows and term.columns]
        total, owned = sum_contributions(self.scope, self.builder, name, rows, inside, self.scope.grad_dtype(name))
        if not (owned and self.builder.owns(total)):
            total = self.builder.call(aten.clone.default, total, shape=total.shape, dtype=total.dtype)
        self.builder.result("grad_source", name, total)
