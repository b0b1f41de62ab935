"""Which cuts are streamed: on the host, and never whole on the device (``sft.walk.region``).

Between two tiled segments (the barrier of a norm over the image, a gate) a cut is whole on the device from its making to its gradient's
use, or it passes over the host strip by strip. The one costs bytes on the device, the other time on the link. So first everything is
streamed that can be; then cuts are kept, those first that take longest to stream, as far as they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from sft.plan.build import borders, may_stream
from sft.plan.problem import Problem
from sft.plan.types import SegmentChoice

__all__ = ["keep_what_fits", "link_bytes", "stream_seconds", "streamable", "streaming"]

PlannedT = TypeVar("PlannedT")


def streamable(problem: Problem, choices: Sequence[SegmentChoice]) -> tuple[str, ...]:
    """The values that one tiled segment hands to others, all of them tiled."""
    ends = borders(problem.graph, choices)
    whole = {name for choice, (reads, _) in zip(choices, ends, strict=True) if choice.mode != "tiled" for name in reads}
    tiled = {name for choice, (reads, _) in zip(choices, ends, strict=True) if choice.mode == "tiled" for name in reads}
    made = (name for choice, (_, makes) in zip(choices, ends, strict=True) if choice.mode == "tiled" for name in makes)
    return tuple(name for name in made if name in tiled - whole and may_stream(problem, name))


def streaming(choices: Sequence[SegmentChoice], names: Collection[str]) -> tuple[SegmentChoice, ...]:
    """The decisions with these values streamed, and no others."""
    return tuple(replace(choice, streamed=tuple(name for name in choice.nodes if name in names)) for choice in choices)


def link_bytes(problem: Problem, choices: Sequence[SegmentChoice], index: int, *, back: bool) -> tuple[int, int]:
    """Bytes that a segment sends to the host and gets from it, strip by strip, in its forward or its backward pass.

    Each panel reads its strips in full width. Rows that restored strips read once more are left out.
    """
    choice = choices[index]
    reads, makes = borders(problem.graph, choices)[index]
    streamed = {name for other in choices for name in other.streamed}
    read, made = ([name for name in names if name in streamed] for names in (reads, makes))
    num_panels = -(-problem.run_width(choice.nodes) // choice.panel_cols) if choice.panel_cols else 1
    up = num_panels * sum(map(problem.value_bytes, read))
    if not back:
        return sum(map(problem.value_bytes, made)), up
    down = num_panels * sum(problem.grad_bytes(name) for name in read if name in problem.requires_grad)
    return down, up + sum(problem.grad_bytes(name) for name in made if name in problem.requires_grad)


def stream_seconds(problem: Problem, choices: Sequence[SegmentChoice]) -> float:
    """Time that the link takes for what is streamed, in a step."""
    passes = (False, True) if problem.training else (False,)
    return sum(problem.link.streamed_seconds(*link_bytes(problem, choices, i, back=back)) for i in range(len(choices)) for back in passes)


def keep_what_fits(
    problem: Problem, choices: Sequence[SegmentChoice], carry_out: Callable[[Sequence[SegmentChoice]], PlannedT | None]
) -> PlannedT | None:
    """Stream as little as fits.

    Args:
        problem: the model at one size.
        choices: the decisions.
        carry_out: the plan for some, ``None`` if it does not fit.
    """
    names = streamable(problem, choices)
    by_cost = sorted(names, key=lambda name: stream_seconds(problem, streaming(choices, (name,))), reverse=True)
    best = carry_out(streaming(choices, names))
    if best is None:
        return None
    # The most of the longest that may stay, by halving; then of the rest whatever still does.
    low, high = 0, len(by_cost)
    while low < high:
        middle = (low + high + 1) // 2
        found = carry_out(streaming(choices, by_cost[middle:]))
        if found is None:
            high = middle - 1
        else:
            low, best = middle, found
    away = by_cost[low:]
    for name in by_cost[low + 1 :]:
        found = carry_out(streaming(choices, [other for other in away if other != name]))
        if found is not None:
            away.remove(name)
            best = found
    return best
