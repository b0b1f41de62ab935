"""Whole segments in stages, where weights are streamed.

A segment has all of its weights on the device while it runs, and the gradients of all of them when it has run back. Of operators that are
kept whole nothing is lost by running them in more segments, cut where few values cross (``sft.plan.stages``): what crosses is kept either
way. So wherever weights are streamed, whole segments are as small as these stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sft.plan.problem import PlanningProblem
from sft.plan.rates import DeviceRates
from sft.plan.stages import StagedModel
from sft.plan.types import SegmentChoice

__all__ = ["split_into_stages"]


def split_into_stages(problem: PlanningProblem, choices: Sequence[SegmentChoice]) -> tuple[SegmentChoice, ...]:
    """The same decisions, with whole segments cut into stages; those that are stages already stay as they are."""
    return tuple(part for choice in choices for part in (_stage_groups(problem, choice) if choice.mode == "whole" else (choice,)))


def _stage_groups(problem: PlanningProblem, choice: SegmentChoice) -> Iterator[SegmentChoice]:
    staged = problem.remembered(
        "stages of whole segments", lambda: StagedModel(problem, DeviceRates("cpu"))
    )  # the rates do not matter here
    behind = (group for pair in zip(staged.stages, staged.asides, strict=True) for group in pair)
    inside = set(choice.nodes)
    for group in (problem.phases.prologue, *behind):
        nodes = tuple(name for name in group if name in inside)
        if nodes:
            yield SegmentChoice(nodes=nodes, mode="whole")
