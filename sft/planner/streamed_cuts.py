"""Which cuts are streamed: on the host, and never whole on the device (``sft.runtime.region``).

Between two tiled segments (the barrier of a norm over the image, a gate) a cut is whole on the device from its making to its gradient's
use, or it passes over the host strip by strip. The one costs bytes on the device, the other time on the link. So first everything is
streamed that can be; then cuts are kept, those first that take longest to stream, as far as they fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import can_stream, segment_borders
from sft.solvers.chain import HostLink

__all__ = ["HostTraffic", "host_traffic", "minimize_streamed_cuts", "stream_seconds", "streamable_values", "with_streamed"]

PlannedT = TypeVar("PlannedT")

#: Cuts that are looked at one by one when halving is through.
_MAX_TRIES = 6


def streamable_values(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> tuple[str, ...]:
    """The values that one tiled segment hands to others, all of them tiled."""
    ends = segment_borders(problem.graph, choices)
    whole = {name for choice, (reads, _) in zip(choices, ends, strict=True) if choice.mode != "tiled" for name in reads}
    tiled = {name for choice, (reads, _) in zip(choices, ends, strict=True) if choice.mode == "tiled" for name in reads}
    made = (name for choice, (_, makes) in zip(choices, ends, strict=True) if choice.mode == "tiled" for name in makes)
    between = tiled - whole
    return tuple(name for name in made if name in between and can_stream(problem, name))


def with_streamed(choices: Sequence[SegmentChoice], names: Collection[str]) -> tuple[SegmentChoice, ...]:
    """The decisions with these values streamed, and no others."""
    return tuple(replace(choice, streamed=tuple(name for name in choice.nodes if name in names)) for choice in choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraffic:
    """What passes over the link strip by strip while one segment runs.

    Each panel reads its strips in full width. Rows that restored strips read once more are left out.

    Attributes:
        down_bytes: of its forward pass, to the host.
        up_bytes: from the host.
        backward_down_bytes: of its backward pass, to the host.
        backward_up_bytes: from the host.
    """

    down_bytes: int = 0
    up_bytes: int = 0
    backward_down_bytes: int = 0
    backward_up_bytes: int = 0

    def seconds(self, link: HostLink, *, back: bool) -> float:
        """Time of the link for one of the passes."""
        if back:
            return link.streamed_seconds(self.backward_down_bytes, self.backward_up_bytes)
        return link.streamed_seconds(self.down_bytes, self.up_bytes)


def host_traffic(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> tuple[HostTraffic, ...]:
    """Of each segment."""
    streamed = {name for choice in choices for name in choice.streamed}
    if not streamed:
        return (HostTraffic(),) * len(choices)
    found = []
    for choice, (reads, makes) in zip(choices, segment_borders(problem.graph, choices), strict=True):
        read, made = (streamed.intersection(names) for names in (reads, makes))
        num_panels = problem.num_panels(choice.nodes, choice.panel_cols)
        up = num_panels * sum(map(problem.value_bytes, read))
        wanted = problem.requires_grad
        found.append(
            HostTraffic(
                down_bytes=sum(map(problem.value_bytes, made)),
                up_bytes=up,
                backward_down_bytes=num_panels * sum(map(problem.grad_bytes, read & wanted)),
                backward_up_bytes=up + sum(map(problem.grad_bytes, made & wanted)),
            )
        )
    return tuple(found)


def stream_seconds(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> float:
    """Time that the link takes for what is streamed, in a step."""
    passes = (False, True) if problem.training else (False,)
    return sum(each.seconds(problem.link, back=back) for each in host_traffic(problem, choices) for back in passes)


def minimize_streamed_cuts(
    problem: PlanningProblem, choices: Sequence[SegmentChoice], carry_out: Callable[[Sequence[SegmentChoice]], PlannedT | None]
) -> PlannedT | None:
    """Stream as little as fits.

    Args:
        problem: the model at one size.
        choices: the decisions.
        carry_out: the plan for some, ``None`` if it does not fit.
    """
    names = streamable_values(problem, choices)
    num_readers = Counter(name for reads, _ in segment_borders(problem.graph, choices) for name in reads)
    by_cost = sorted(names, key=lambda name: problem.value_bytes(name) * (1 + num_readers[name]), reverse=True)
    best = carry_out(with_streamed(choices, names))
    if best is None:
        return None
    # The most of the longest that may stay, by halving; then of the rest whatever still does.
    low, high = 0, len(by_cost)
    while low < high:
        middle = (low + high + 1) // 2
        found = carry_out(with_streamed(choices, by_cost[middle:]))
        if found is None:
            high = middle - 1
        else:
            low, best = middle, found
    away = by_cost[low:]
    for name in by_cost[low + 1 : low + 1 + _MAX_TRIES]:
        found = carry_out(with_streamed(choices, [other for other in away if other != name]))
        if found is not None:
            away.remove(name)
            best = found
    return best
