"""Blocks of a schedule's picture: the schedule ops of one kind along the time axis, with narrow neighbours merged.

A schedule may have thousands of ops, a picture a few hundred pixels. An op that is too narrow to be seen is merged with the next one of
its lane if they touch, until the block is wide enough; so the number of blocks is bounded by the width of the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sft.planner.timeline import TimelineKind

if TYPE_CHECKING:
    from sft.planner.plan import Plan

__all__ = ["BlockMode", "LaneBlock", "lane_blocks", "op_spans"]

#: Kind of block: a segment in strips, an untiled segment, or a copy.
BlockMode = Literal["tiled", "whole", "copy"]


@dataclass(slots=True, kw_only=True)
class LaneBlock:
    """Schedule ops of one lane that are drawn as one block.

    Attributes:
        start: begin, in seconds.
        stop: end, in seconds.
        seconds: sum of the seconds of its ops.
        segments: numbers of the segments that run, in order.
        seconds_of: seconds of each mode.
    """

    start: float
    stop: float
    seconds: float
    segments: list[int]
    seconds_of: dict[BlockMode, float]

    @property
    def mode(self) -> BlockMode:
        """Mode that takes the most time."""
        return max(self.seconds_of, key=lambda each: self.seconds_of[each])


def op_spans(plan: Plan) -> tuple[tuple[float, float], ...]:
    """Begin and end of each schedule op; steps of equal length if all of them take no time."""
    timeline = plan.timeline
    return timeline.spans if timeline.seconds > 0 else tuple((index, index + 1.0) for index in range(len(timeline.entries)))


def lane_blocks(plan: Plan, kind: TimelineKind, spans: Sequence[tuple[float, float]], *, min_seconds: float) -> list[LaneBlock]:
    """Blocks of the schedule ops of one kind; blocks shorter than ``min_seconds`` are merged with the next, if they touch."""
    blocks: list[LaneBlock] = []
    for entry, entry_kind, (start, stop) in zip(plan.timeline.entries, plan.timeline.kinds, spans, strict=True):
        if entry_kind != kind:
            continue
        number, duration = entry.segment, stop - start
        mode: BlockMode = "copy" if number is None else plan.segments[number].mode
        numbers = [] if number is None else [number]
        last = blocks[-1] if blocks else None
        if last is not None and last.stop - last.start < min_seconds and start - last.stop < min_seconds / 4:
            last.stop, last.seconds = stop, last.seconds + duration
            last.segments += numbers
            last.seconds_of[mode] = last.seconds_of.get(mode, 0.0) + duration
        else:
            blocks.append(LaneBlock(start=start, stop=stop, seconds=duration, segments=numbers, seconds_of={mode: duration}))
    return blocks
