"""Lowering of a run for some samples: a forward program, and a program that recomputes the run and differentiates it.

The run computes every sample on its own, on full tensors of these samples. Unlike those of an untiled segment, its programs write outputs
into the caller's buffers and add gradients to the caller's accumulators: each is a part of a larger buffer, or a sum over all samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.strips import StripStep
from sft.common.interval import Interval
from sft.lower.context import GradContribution, NodeContext, SegmentInfo
from sft.lower.grad_accumulation import accumulate_products, add_contributions
from sft.lower.lower_strip import StripLowering, apply_backend
from sft.lower.lower_whole import WholeLowering
from sft.lower.program import Program
from sft.lower.redundant_copies import replace_redundant_copies

__all__ = ["SampleProgramKind", "lower_samples"]

SampleProgramKind = Literal["forward", "joint"]


def lower_samples(scope: SegmentInfo, step: StripStep, kind: SampleProgramKind) -> Program:
    """Lower a run for some samples.

    Args:
        scope: the run; its shapes are those of these samples.
        step: one strip that covers the image.
        kind: ``forward`` computes the outputs; ``joint`` recomputes the run and differentiates it.
    """
    lowering = SampleLowering.of(scope, step, has_backward=kind == "joint")
    lowering.forward(write_outputs=kind == "forward", write_rows=False)
    if kind == "joint":
        lowering.backward()
        accumulate_products(lowering.builder)
    apply_backend(scope, lowering.builder)
    replace_redundant_copies(scope, lowering.builder)
    return lowering.builder.finish()


class SampleLowering(WholeLowering):
    """Lowers a run of operators on some samples; gradients are added to accumulators from outside."""

    allocates_results: ClassVar[bool] = False

    def add_to_global_grad(self, ctx: NodeContext, name: str, term: GradContribution) -> None:
        StripLowering.add_to_global_grad(self, ctx, name, term)

    def write_gradients(self, gradients: Mapping[str, Sequence[GradContribution]]) -> None:
        """Add the gradients of sources to their accumulators."""
        scope = self.scope
        for name in scope.sources:
            terms = [term for term in gradients.get(name, ()) if term.rows and term.columns]
            if terms:
                rows = Interval(0, scope.extent(name, ROWS))
                target = self.builder.port("grad_source", name, scope.strip_shape(name, len(rows)), scope.grad_dtype(name))
                add_contributions(scope, self.builder, name, target, rows, terms)
