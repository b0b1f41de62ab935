"""Reductions of cuts in segments of their own: statistics of a norm, apart from the convolution that computes its image.

A tiled segment computes its operators again in its backward pass. A reduction needs only the image that it reads, and this image is a cut:
later segments read it, so it has a buffer until their backward passes. In a segment of its own the reduction reads this buffer, and the
operators before it run back without their last result:

    conv -> moments | norm -> relu -> conv -> moments | ...         F0: conv, moments     B0: conv again, gradients of moments and conv
    conv | moments | norm -> relu -> conv | moments | ...           F0: conv  F1: moments     B1: gradient of moments  B0: that of conv

This saves one run of the convolution. A streamed cut has no buffer: a second reader would pass it over the link once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import segment_borders
from sft.runtime.moves import SegmentSchedule, default_schedule

__all__ = ["separate_reductions", "with_separate_reductions"]


def with_separate_reductions(problem: PlanningProblem, plan: ProjectedPlan) -> ProjectedPlan | None:
    """The plan with the reductions of its cuts in segments of their own; ``None`` if it has no such reductions."""
    choices, order = separate_reductions(problem, plan.choices, plan.region.custom_schedule)
    return None if len(choices) == len(plan.choices) else materialize(problem, choices, order)


def separate_reductions(
    problem: PlanningProblem, choices: Sequence[SegmentChoice], order: SegmentSchedule | None
) -> tuple[tuple[SegmentChoice, ...], SegmentSchedule | None]:
    """Decisions and their schedule with the reductions of cuts in segments of their own; ``None`` is the default schedule."""
    separated: list[SegmentChoice] = []
    #: indices of the new segments, by the index of the segment that they replace
    indices: list[range] = []
    for choice, (_, makes) in zip(choices, segment_borders(problem.sized.graph, choices), strict=True):
        parts = [*_parts(problem, choice, frozenset(makes).difference(choice.streamed))]
        indices.append(range(len(separated), len(separated) + len(parts)))
        separated += parts
    if order is None or len(separated) == len(choices):
        return tuple(separated), order
    return tuple(separated), tuple(_renumbered(order, indices))


def _parts(problem: PlanningProblem, choice: SegmentChoice, cuts: frozenset[str]) -> Iterator[SegmentChoice]:
    """The segment, or its operators without the reductions of cuts, and these."""
    sized = problem.sized
    is_reduction = {
        name: sized.phases.rows[name].role == "reduce" and cuts.issuperset(sized.phases.streamed.intersection(sized.graph[name].operands))
        for name in choice.nodes
    }
    reductions = tuple(name for name in choice.nodes if is_reduction[name])
    others = tuple(name for name in choice.nodes if not is_reduction[name])
    if choice.mode != "tiled" or not reductions or not others or not sized.requires_grad.intersection(others):
        yield choice
        return
    yield replace(choice, nodes=others)
    rows, cols = (
        -(-size * extent(reductions) // max(1, extent(choice.nodes)))
        for size, extent in ((choice.strip_rows, sized.run_height), (choice.panel_cols, sized.run_width))
    )
    yield replace(choice, nodes=reductions, strip_rows=max(1, rows), panel_cols=cols, state_every=1, state_slots=0, streamed=())


def _renumbered(order: SegmentSchedule, indices: Sequence[range]) -> SegmentSchedule:
    """The schedule for segments that were divided: parts run forward one after the other, and back in reverse order."""
    if order == default_schedule(len(indices)):
        return default_schedule(indices[-1].stop)
    renumbered = []
    for op in order:
        if op.segment < 0:
            renumbered.append(op)
        elif op.is_copy:  # of the states, which the first part keeps
            renumbered.append(replace(op, segment=indices[op.segment].start))
        else:
            parts = indices[op.segment]
            renumbered += [replace(op, segment=part) for part in (reversed(parts) if op.kind == "backward" else parts)]
    return tuple(renumbered)
