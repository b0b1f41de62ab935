"""What a step's order of moves says of the values between its segments: who reads them, when they go, which may leave for the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from sft.analysis.ir.graph import Graph
from sft.lower.context import SegmentInfo
from sft.runtime.machine import Buffer, Gradients, Machine, ValueBindings
from sft.runtime.moves import SegmentSchedule, default_schedule, last_uses
from sft.runtime.offload import copy_schedule_error, value_lifetimes

__all__ = ["Liveness", "Segment"]


class Segment(Protocol):
    """What a region asks of its segments."""

    @property
    def accumulates(self) -> bool: ...
    @property
    def scope(self) -> SegmentInfo: ...
    @property
    def to_host(self) -> frozenset[str]: ...
    @property
    def saves(self) -> bool: ...
    @property
    def views(self) -> frozenset[str]: ...
    @property
    def keeps_buffers(self) -> bool: ...
    def buffers(self, machine: Machine, saved: Any) -> Sequence[Buffer]: ...
    def self_allocated(self, keep: bool) -> frozenset[str]: ...
    def backward_reads(self, reads: Sequence[str]) -> Sequence[str]: ...
    def forward(self, machine: Machine, values: ValueBindings, *, keep: bool) -> Any: ...
    def backward(self, machine: Machine, values: ValueBindings, saved: Any, grads: Gradients, *, consume: bool = True) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Liveness:
    """When the values of a region live.

    Attributes:
        graph: the model.
        segments: in order.
        reads: for each segment the values it takes from outside: sources and side tensors.
        makes: for each segment the values that others, or the caller, need.
        requires_grad: values that need a gradient.
        outputs: the model's outputs, each once.
        streamed: cuts that are on the host, with their gradients.
        moves: those of a step with a backward pass.
    """

    graph: Graph
    segments: Sequence[Segment]
    reads: Sequence[tuple[str, ...]]
    makes: Sequence[tuple[str, ...]]
    requires_grad: frozenset[str]
    outputs: tuple[str, ...]
    streamed: frozenset[str]
    moves: SegmentSchedule

    @cached_property
    def differentiated(self) -> tuple[bool, ...]:
        """Which segments have a backward pass; one whose values are all frozen keeps nothing for it."""
        needed = self.requires_grad
        return tuple(
            not needed.isdisjoint(makes) and not needed.isdisjoint(segment.scope.names)
            for makes, segment in zip(self.makes, self.segments, strict=True)
        )

    @cached_property
    def dying(self) -> tuple[tuple[str, ...], ...]:
        """For each move of a step the values that go behind it."""
        moves = [move for move in self.moves if move.kind != "backward" or self.differentiated[move.segment]]
        dying = iter(last_uses(moves, self.reads_from_outside, self.backward_reads, self.makes, self.leaves))
        skipped = (move.kind == "backward" and not self.differentiated[move.segment] for move in self.moves)
        return tuple(() if skips else next(dying) for skips in skipped)

    @cached_property
    def backward_reads(self) -> tuple[tuple[str, ...], ...]:
        """For each segment the values whose handles its backward pass needs.

        Where values leave for the host these are also those that it reads through what it kept.
        """
        return self._reading_back(through_kept=any(move.is_copy for move in self.moves))

    def _reading_back(self, *, through_kept: bool) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (*segment.backward_reads(reads), *(sorted(segment.views) if through_kept else ())) if is_run else ()
            for segment, reads, is_run in zip(self.segments, self.reads, self.differentiated, strict=True)
        )

    @cached_property
    def forward_last_uses(self) -> tuple[tuple[str, ...], ...]:
        """The same where no backward pass follows."""
        moves = default_schedule(len(self.segments))[: len(self.segments)]
        return last_uses(moves, self.reads_from_outside, self.reads, self.makes, self.leaves)

    @cached_property
    def reads_from_outside(self) -> tuple[tuple[str, ...], ...]:
        """For each segment what its forward pass reads."""
        return tuple(
            tuple(name for name in reads if name not in makes) for reads, makes in zip(self.reads, map(set, self.makes), strict=True)
        )

    @cached_property
    def leaves(self) -> frozenset[str]:
        """Inputs, parameters and buffers."""
        return frozenset(node.name for node in self.graph.nodes if node.kind != "operator")

    @cached_property
    def movable(self) -> frozenset[str]:
        """What may leave for the host: made by segments for each other, and not in the caller's hands."""
        made = frozenset(name for makes in self.makes for name in makes)
        return made.difference(self.outputs, self.graph.outputs, self.leaves, self.streamed)

    def unsaved_segments(self) -> tuple[int, ...]:
        """The segments that the order runs back without having kept what that needs; none, or the order is wrong."""
        kept: set[int] = set()
        found = []
        for move in self.moves:
            index = move.segment
            if move.kind == "forward" and move.keep:
                kept.add(index)
            elif move.kind == "backward" and self.differentiated[index] and self.segments[index].saves:
                if index not in kept:
                    found.append(index)
                kept.discard(index)
        return tuple(found)

    def misplaced(self) -> str | None:
        """What is wrong with the order's copies; ``None`` if nothing is."""
        back = self._reading_back(through_kept=True)
        return copy_schedule_error(self.moves, self.reads_from_outside, back, self.makes, self.dying, self.movable, self.saving_segments)

    def lives(self, moves: SegmentSchedule) -> dict[str, list[tuple[int, int]]]:
        """When what may leave for the host is made and read last, in an order without copies; see `value_lifetimes`."""
        back = self._reading_back(through_kept=True)
        return value_lifetimes(moves, self.reads_from_outside, back, self.makes, self.movable, self.saving_segments)

    @cached_property
    def saving_segments(self) -> frozenset[int]:
        """The segments that keep what may leave."""
        return frozenset(i for i, segment in enumerate(self.segments) if self.differentiated[i] and segment.keeps_buffers)
