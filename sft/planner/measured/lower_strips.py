"""Plans in lower strips: the same segments and schedule, in segments of the allocator that fit together better.

Candidate grids have few strip heights, and lower strips are of no use to a search by projected bytes where the peak is that of the untiled
tail. But the blocks of tall strips leave gaps in the allocator's segments. For example, a training step of ResNet-18 on 2048 x 2048 px is
modelled at 15.8 ms and 374 MiB in strips of 512 rows, and at 15.9 ms and 350 MiB in strips of 384 rows, with the same projected peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from sft.planner.materialize import materialize
from sft.planner.measured.fitted_plan import FittedPlan
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem

__all__ = ["with_lower_strips"]

#: Shares of the rows of a strip. Lower strips take longer; of the heights between, few fit better.
_SHARES: Final = (3 / 4, 5 / 8)


def with_lower_strips(fitted: FittedPlan) -> Iterator[FittedPlan]:
    """Yield the plan in lower strips, the tallest ones first."""
    problem, projected = fitted.problem, fitted.projected
    tried = {projected.choices}
    for share in _SHARES:
        choices = tuple(_lower(problem, choice, share) for choice in projected.choices)
        if choices not in tried:
            tried.add(choices)
            yield replace(fitted, projected=materialize(problem, choices, projected.region.custom_schedule))


def _lower(problem: PlanningProblem, choice: SegmentChoice, share: float) -> SegmentChoice:
    """The decision with a share of the rows of its strips, in whole strides."""
    if choice.mode != "tiled":
        return choice
    stride = problem.sized.stride(choice.nodes)
    rows = int(share * choice.strip_rows) // stride * stride
    return replace(choice, strip_rows=rows) if rows else choice
