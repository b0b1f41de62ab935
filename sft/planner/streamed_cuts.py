"""Selection of streamed cuts: segment boundary tensors that pass through host memory (``sft.runtime.region``).

A tensor between two tiled segments (at the barrier of a norm over the image, at a gate) either stays on the device from its computation to
the use of its gradient, or passes through host memory strip by strip. The first costs device bytes, the second link time. The search starts
with all cuts streamed, then keeps cuts on the device while the plan fits, those with the longest transfer first.
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

PlanT = TypeVar("PlanT")


def streamable_values(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> tuple[str, ...]:
    """Values that one tiled segment passes to later segments which are all tiled."""
    borders = segment_borders(problem.sized.graph, choices)
    read_untiled = {name for choice, (reads, _) in zip(choices, borders, strict=True) if choice.mode != "tiled" for name in reads}
    read_tiled = {name for choice, (reads, _) in zip(choices, borders, strict=True) if choice.mode == "tiled" for name in reads}
    outputs = (name for choice, (_, makes) in zip(choices, borders, strict=True) if choice.mode == "tiled" for name in makes)
    between = read_tiled - read_untiled
    return tuple(name for name in outputs if name in between and can_stream(problem, name))


def with_streamed(choices: Sequence[SegmentChoice], names: Collection[str]) -> tuple[SegmentChoice, ...]:
    """The decisions with exactly these values streamed."""
    return tuple(replace(choice, streamed=tuple(name for name in choice.nodes if name in names)) for choice in choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraffic:
    """Bytes over the link, strip by strip, while one segment runs.

    Each panel reads its strips in full width. Rows that two strips have in common, or that restored strips read again, count once.

    Attributes:
        down_bytes: to the host, in the forward pass.
        up_bytes: from the host, in the forward pass.
        backward_down_bytes: to the host, in the backward pass.
        backward_up_bytes: from the host, in the backward pass.
        awaited_down_bytes: part of ``down_bytes`` during which the device computes nothing.
        backward_awaited_down_bytes: the same of ``backward_down_bytes``.
        backward_awaited_up_bytes: the same of ``backward_up_bytes``.
        num_down: copies of strips of ``down_bytes``.
        num_up: the same of ``up_bytes``.
        num_backward_down: the same of ``backward_down_bytes``.
        num_backward_up: the same of ``backward_up_bytes``.
    """

    down_bytes: int = 0
    up_bytes: int = 0
    backward_down_bytes: int = 0
    backward_up_bytes: int = 0
    awaited_down_bytes: int = 0
    backward_awaited_down_bytes: int = 0
    backward_awaited_up_bytes: int = 0
    num_down: int = 0
    num_up: int = 0
    num_backward_down: int = 0
    num_backward_up: int = 0

    def seconds(self, link: HostLink, *, back: bool) -> float:
        """Link time of one of the passes."""
        if back:
            return link.streamed_seconds(
                self.backward_down_bytes, self.backward_up_bytes, num_down=self.num_backward_down, num_up=self.num_backward_up
            )
        return link.streamed_seconds(self.down_bytes, self.up_bytes, num_down=self.num_down, num_up=self.num_up)

    def awaited_seconds(self, link: HostLink, *, back: bool) -> float:
        """The time of it during which the device computes nothing."""
        if back:
            return link.down_seconds(self.backward_awaited_down_bytes) + link.up_seconds(self.backward_awaited_up_bytes)
        return link.down_seconds(self.awaited_down_bytes)


def host_traffic(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> tuple[HostTraffic, ...]:
    """Link traffic of each segment.

    Strips of direct cuts pass while others are computed. The device only waits for gradients to which a segment adds its own. Staged cuts
    are read ahead; all other copies of theirs are awaited, unless the device's memory is the host's.
    """
    streamed = {name for choice in choices for name in choice.streamed}
    if not streamed:
        return (HostTraffic(),) * len(choices)
    sized, borders = problem.sized, segment_borders(problem.sized.graph, choices)
    direct = problem.resources.direct_cuts(choices)
    staged = frozenset() if problem.resources.on_host else frozenset(streamed) - direct
    last_readers = {name: number for number, (reads, _) in enumerate(borders) for name in reads}
    traffic = []
    for number, (choice, (reads, makes)) in enumerate(zip(choices, borders, strict=True)):
        inputs, outputs = (streamed.intersection(names) for names in (reads, makes))
        num_panels = sized.num_panels(choice.nodes, choice.panel_cols) if choice.mode == "tiled" else 1
        input_grads, output_grads = inputs & sized.requires_grad, outputs & sized.requires_grad
        # In the backward pass the last reader of a cut comes first; each panel adds to all columns.
        num_sums = {name: num_panels - (last_readers[name] == number) for name in sorted(input_grads & direct)}
        sum_bytes = sum(count * sized.grad_bytes(name) for name, count in num_sums.items())
        up_bytes = num_panels * sum(map(sized.value_bytes, inputs))
        num_strips = _num_strips(problem, choice)
        traffic.append(
            HostTraffic(
                down_bytes=sum(map(sized.value_bytes, outputs)),
                up_bytes=up_bytes,
                backward_down_bytes=num_panels * sum(map(sized.grad_bytes, input_grads)),
                backward_up_bytes=up_bytes + sum(map(sized.grad_bytes, output_grads)) + sum_bytes,
                awaited_down_bytes=sum(map(sized.value_bytes, outputs & staged)),
                backward_awaited_down_bytes=num_panels * sum(map(sized.grad_bytes, input_grads & staged)),
                backward_awaited_up_bytes=sum(map(sized.grad_bytes, output_grads & staged)) + sum_bytes,
                num_down=num_strips * len(outputs),
                num_up=num_strips * num_panels * len(inputs),
                num_backward_down=num_strips * num_panels * len(input_grads),
                num_backward_up=num_strips * (num_panels * len(inputs) + len(output_grads) + sum(num_sums.values())),
            )
        )
    return tuple(traffic)


def _num_strips(problem: PlanningProblem, choice: SegmentChoice) -> int:
    """Strips of all samples in one panel of a segment."""
    if choice.mode != "tiled":
        return 1
    return -(-problem.sized.run_height(choice.nodes) // choice.strip_rows) * -(-problem.sized.num_batch // choice.batch_tile)


def stream_seconds(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> float:
    """Link time of the streamed cuts in one step."""
    passes = (False, True) if problem.sized.training else (False,)
    return sum(each.seconds(problem.resources.link, back=back) for each in host_traffic(problem, choices) for back in passes)


def minimize_streamed_cuts(
    problem: PlanningProblem, choices: Sequence[SegmentChoice], fitting_plan: Callable[[Sequence[SegmentChoice]], PlanT | None]
) -> PlanT | None:
    """Stream as few cuts as fit.

    Args:
        problem: the planning problem.
        choices: the decisions.
        fitting_plan: materializes decisions; returns ``None`` if the plan does not fit.
    """
    names = streamable_values(problem, choices)
    num_readers = Counter(name for reads, _ in segment_borders(problem.sized.graph, choices) for name in reads)
    by_cost = sorted(names, key=lambda name: problem.sized.value_bytes(name) * (1 + num_readers[name]), reverse=True)
    best = fitting_plan(with_streamed(choices, names))
    if best is None:
        return None
    # Bisect for the longest prefix of costly cuts that may stay on the device, then try a few of the remaining ones.
    low, high = 0, len(by_cost)
    while low < high:
        middle = (low + high + 1) // 2
        plan = fitting_plan(with_streamed(choices, by_cost[middle:]))
        if plan is None:
            high = middle - 1
        else:
            low, best = middle, plan
    streamed = by_cost[low:]
    for name in by_cost[low + 1 : low + 1 + problem.limits.max_single_cuts]:
        plan = fitting_plan(with_streamed(choices, [other for other in streamed if other != name]))
        if plan is not None:
            streamed.remove(name)
            best = plan
    return best
