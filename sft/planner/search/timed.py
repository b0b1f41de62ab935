"""Candidates for measured selection: plans inside the same budget that may be faster than the plan with the fewest FLOPs.

Plans are compared by FLOPs, but the FLOP rate differs: with the strip height, between strips and untiled segments, between one program and
many small ones. So with ``Options(profile="measure")`` the planner's plan is timed against alternatives that fit: strips of other heights,
stages recomputed by the published schedules, and the independent tiles of strategy ``sft``. Plans with far more FLOPs are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sft.common.errors import BudgetError, UnsupportedError
from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.options import Options
from sft.planner.planner import plan_segments
from sft.planner.problem import PlanningProblem
from sft.planner.search.auto import cheapest_by_height
from sft.planner.search.staged import published_plans
from sft.planner.stages import StagedModel

__all__ = ["timing_candidates"]


def timing_candidates(problem: PlanningProblem, best: ProjectedPlan, budget_bytes: int, options: Options) -> tuple[ProjectedPlan, ...]:
    """Distinct plans that fit, except the planner's, the fewest FLOPs first.

    Args:
        problem: the planning problem.
        best: the planner's plan.
        budget_bytes: the device budget.
        options: constraints on the plan; a forced strategy or tile leaves no alternative.
    """
    if not options.is_automatic or options.tile is not None:
        return ()
    room_bytes = budget_bytes - problem.resources.occupied_bytes
    plans: dict[object, ProjectedPlan] = {}
    for plan in _candidate_plans(problem, room_bytes, budget_bytes, options):
        projection = plan.projection
        fits = projection.fits(problem.resources, room_bytes)
        if fits and projection.flops <= problem.limits.max_timed_flops * best.projection.flops and plan.key != best.key:
            plans.setdefault(plan.key, plan)
    return tuple(sorted(plans.values(), key=lambda plan: plan.projection.flops))


def _candidate_plans(problem: PlanningProblem, room_bytes: int, budget_bytes: int, options: Options) -> Iterator[ProjectedPlan]:
    """Plans of each strip height, and those of the published strategies, whether they fit or not."""
    rates = problem.resources.rates
    for grid, candidate in cheapest_by_height(problem, room_bytes, options, rates):
        yield materialize(problem, grid.choices(candidate))
    if options.halo == "recompute":
        return
    if problem.sized.training:
        staged = StagedModel.of(problem, rates)
        if len(staged.stages) > 1:
            yield from (plan for _, plan in published_plans(staged, room_bytes))
    if options.halo == "auto":
        try:
            yield plan_segments(problem, budget_bytes, replace(options, strategy="sft"))
        except (BudgetError, UnsupportedError):
            return
