"""Liveness of the values between segments under a schedule: their readers, their last uses, and those that may be offloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from sft.analysis.ir.graph import Graph
from sft.lower.context import SegmentInfo
from sft.runtime.machine import Buffer, Gradients, Machine, ProgramOps, ValueBindings
from sft.runtime.moves import SegmentSchedule, default_schedule, last_uses
from sft.runtime.offload import OffloadTargets

__all__ = ["Liveness", "Segment"]


class Segment(Protocol):
    """Interface of a segment to its region."""

    @property
    def accumulates(self) -> bool:
        """True if its backward adds to existing gradient buffers; False if it allocates them."""

    @property
    def scope(self) -> SegmentInfo:
        """Input of its lowering."""

    @property
    def to_host(self) -> frozenset[str]:
        """Outputs that leave strip by strip and have no buffer on the device."""

    @property
    def saves(self) -> bool:
        """True if its backward needs residuals of its forward."""

    @property
    def views(self) -> frozenset[str]:
        """Outputs that own memory of its residuals."""

    @property
    def keeps_buffers(self) -> bool:
        """True if some residuals are buffers that only the segment references."""

    @property
    def reusable_sources(self) -> Mapping[str, tuple[str, ...]]:
        """For outputs the sources whose buffers they may take, where no backward pass follows and no later operator reads these."""

    def buffers(self, machine: ProgramOps, saved: Any) -> Sequence[Buffer]:
        """These buffers."""

    def self_allocated(self, keep: bool) -> frozenset[str]:
        """Outputs that its forward allocates itself."""

    def backward_reads(self, reads: Sequence[str]) -> Sequence[str]:
        """Those of the values that it reads that its backward needs."""

    def forward(self, machine: Machine, values: ValueBindings, *, keep: bool) -> Any:
        """Compute the outputs; return the residuals."""

    def backward(self, machine: Machine, values: ValueBindings, saved: Any, grads: Gradients, *, consume: bool = True) -> None:
        """Compute the gradients of the values that it reads."""


@dataclass(frozen=True, kw_only=True)
class Liveness:
    """Lifetimes of the values of a region.

    Attributes:
        graph: the model.
        segments: the segments in forward order.
        reads: for each segment the values that it takes from outside: sources and side inputs.
        writes: for each segment the values that later segments or the caller read.
        requires_grad: values that need a gradient.
        outputs: the model's outputs, each once.
        streamed: cuts on the host, with their gradients.
        schedule: schedule of a step with a backward pass.
    """

    graph: Graph
    segments: Sequence[Segment]
    reads: Sequence[tuple[str, ...]]
    writes: Sequence[tuple[str, ...]]
    requires_grad: frozenset[str]
    outputs: tuple[str, ...]
    streamed: frozenset[str]
    schedule: SegmentSchedule

    @cached_property
    def differentiated(self) -> tuple[bool, ...]:
        """For each segment, True if it has a backward; a segment with frozen values alone has none and keeps no residuals."""
        needed = self.requires_grad
        return tuple(
            not needed.isdisjoint(writes) and not needed.isdisjoint(segment.scope.names)
            for writes, segment in zip(self.writes, self.segments, strict=True)
        )

    @cached_property
    def last_uses(self) -> tuple[tuple[str, ...], ...]:
        """For each op of the schedule the values that are freed after it."""
        is_run = [op.kind != "backward" or self.differentiated[op.segment] for op in self.schedule]
        ops = [op for op, runs in zip(self.schedule, is_run, strict=True) if runs]
        freed = iter(last_uses(ops, self.reads_from_outside, self.backward_reads, self.writes, self.leaves))
        return tuple(next(freed) if runs else () for runs in is_run)

    @cached_property
    def backward_reads(self) -> tuple[tuple[str, ...], ...]:
        """For each segment the values that its backward needs on the device; with offloading also those that it reads through its
        residuals.
        """
        return self._backward_reads(through_residuals=any(op.is_copy for op in self.schedule))

    def _backward_reads(self, *, through_residuals: bool) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (*segment.backward_reads(reads), *(sorted(segment.views) if through_residuals else ())) if is_run else ()
            for segment, reads, is_run in zip(self.segments, self.reads, self.differentiated, strict=True)
        )

    @cached_property
    def forward_last_uses(self) -> tuple[tuple[str, ...], ...]:
        """For each op of a forward pass without a backward pass the values that are freed after it."""
        ops = default_schedule(len(self.segments))[: len(self.segments)]
        return last_uses(ops, self.reads_from_outside, self.reads, self.writes, self.leaves)

    @cached_property
    def reads_from_outside(self) -> tuple[tuple[str, ...], ...]:
        """For each segment the values that its forward reads."""
        return tuple(
            tuple(name for name in reads if name not in writes) for reads, writes in zip(self.reads, map(set, self.writes), strict=True)
        )

    @cached_property
    def leaves(self) -> frozenset[str]:
        """Inputs, parameters and buffers."""
        return frozenset(node.name for node in self.graph.nodes if node.kind != "operator")

    @cached_property
    def movable(self) -> frozenset[str]:
        """Values that may be offloaded: written by segments for each other, and not referenced by the caller."""
        written = frozenset(name for writes in self.writes for name in writes)
        return written.difference(self.outputs, self.graph.outputs, self.leaves, self.streamed)

    @cached_property
    def saving_segments(self) -> frozenset[int]:
        """Segments with residuals that may be offloaded."""
        return frozenset(i for i, segment in enumerate(self.segments) if self.differentiated[i] and segment.keeps_buffers)

    @cached_property
    def offload_targets(self) -> OffloadTargets:
        """Values and residuals that may be offloaded."""
        return OffloadTargets(
            reads=self.reads_from_outside,
            backward_reads=self._backward_reads(through_residuals=True),
            writes=self.writes,
            movable=self.movable,
            saving_segments=self.saving_segments,
        )

    def unsaved_segments(self) -> tuple[int, ...]:
        """Segments that the schedule runs backward without the residuals that they need; empty for a valid schedule."""
        saved: set[int] = set()
        unsaved = []
        for op in self.schedule:
            index = op.segment
            if op.kind == "forward" and op.keep:
                saved.add(index)
            elif op.kind == "backward" and self.differentiated[index] and self.segments[index].saves:
                if index not in saved:
                    unsaved.append(index)
                saved.discard(index)
        return tuple(unsaved)

    def copy_error(self) -> str | None:
        """Description of the first error in the schedule's copies; ``None`` if they are valid."""
        return self.offload_targets.copy_error(self.schedule, self.last_uses)

    def value_lifetimes(self, ops: SegmentSchedule) -> dict[str, list[tuple[int, int]]]:
        """Positions of the ops that write such a target and read it last, once for each write."""
        return {target: [(uses[0], uses[-1]) for uses in each] for target, each in self.offload_targets.uses(ops).items()}
