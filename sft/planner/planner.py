"""Planner entry point: from a byte budget and options to segments with strip heights and state policies.

Every returned plan has an exact projection. If no plan fits, the error names the peak of the smallest known plan, and a budget of that size
works. The error is a :class:`SmallestPlanError` with that plan, so that a caller can add the plan's overhead on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sft.analysis.ir.graph import label_range
from sft.analysis.ir.repeat_op import REPEAT
from sft.common.byte_units import format_bytes, size_at_least
from sft.common.errors import BudgetError, UnsupportedError
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.options import OFFLOAD_STRATEGIES, Options
from sft.planner.problem import PlanningProblem
from sft.planner.remedies import Remedy, Setting, budget_error
from sft.planner.search.auto import AutoSearch, by_time
from sft.planner.search.independent_tiles import min_plan_bytes, partition_choices, tile_grids
from sft.planner.search.published import RECOMPUTE_STRATEGIES, solve_staged
from sft.planner.search.staged import scheduled_plan
from sft.planner.stages import StagedModel
from sft.torch_runtime.pass_graphs import can_record_passes

__all__ = ["SmallestPlanError", "check_device", "check_host", "plan_segments"]


class SmallestPlanError(BudgetError):
    """A budget error with the smallest known plan; internal, as :meth:`with_overhead` makes the error that users catch.

    Args:
        problem: the problem of the plan.
        plan: the plan of smallest peak, independent of the budget.
        describe: makes the error for a problem with another device overhead.
    """

    def __init__(self, problem: PlanningProblem, plan: ProjectedPlan, describe: Callable[[PlanningProblem], BudgetError]) -> None:
        error = describe(problem)
        super().__init__(str(error), needed_bytes=error.needed_bytes, problem=error.problem, remedies=error.remedies)
        self.planning_problem, self.plan, self._describe = problem, plan, describe

    def with_overhead(self, num_bytes: int) -> BudgetError:
        """The error with the device overhead of the smallest plan."""
        return self._describe(self.planning_problem.with_overhead(num_bytes))


def plan_segments(
    problem: PlanningProblem,
    budget_bytes: int,
    options: Options,
    accepts: Callable[[ProjectedPlan], bool] = lambda _: True,
    most_named_bytes: float = math.inf,
) -> ProjectedPlan:
    """Choose segments for a budget by the strategy of the options.

    Args:
        problem: the planning problem.
        budget_bytes: the device budget.
        options: constraints on the plan.
        accepts: a further condition. On a GPU the fastest plan that meets it is taken if one of the fastest few does.
        most_named_bytes: largest budget that an error names; strategy ``auto`` does not look for plans that surely need more.

    Raises:
        SmallestPlanError: no known plan fits; names the segment with the largest peak and the smallest budget known to work.
        BudgetError: the plan exceeds the host budget.
    """
    room_bytes = budget_bytes - problem.resources.occupied_bytes
    rates = problem.resources.rates
    if options.strategy == "sft":
        return _fused_tiled(problem, budget_bytes, options)
    if options.strategy in (*RECOMPUTE_STRATEGIES, *OFFLOAD_STRATEGIES):
        return _published_plan(problem, budget_bytes, options, rates)
    searches = [AutoSearch(problem, options, variant) for variant in rates.search_variants()]
    if rates.ranks_by_time:
        candidates = (plan for search in searches for plan in search.candidates(room_bytes))
        if rates.replays:
            candidates = (plan for plan in candidates if can_record_passes(plan.region, copies_to_files=problem.resources.host_is_files))
        plans = by_time(problem, candidates, rates)
        if plans:
            return next((plan for plan in plans[: problem.limits.num_accepted] if accepts(plan)), plans[0])
        if rates.replays:  # an option, whose smallest plan is of no interest
            raise BudgetError("no plan has room for recordings of its passes", needed_bytes=budget_bytes + 1)
    fastest = None if rates.ranks_by_time else searches[0].fastest(room_bytes)
    plan = fastest or searches[0].smallest(most_named_bytes - problem.resources.occupied_bytes)
    if plan is None:
        raise BudgetError("no plan fits", needed_bytes=budget_bytes + 1)
    if plan.projection.peak_bytes <= room_bytes:
        return plan
    raise _smallest_plan_error(problem, plan, budget_bytes, options)


def _fused_tiled(problem: PlanningProblem, budget_bytes: int, options: Options) -> ProjectedPlan:
    """The plan with the fewest FLOPs among the SFT paper's plans that fit."""
    room_bytes = budget_bytes - problem.resources.occupied_bytes
    best: ProjectedPlan | None = None
    smallest: ProjectedPlan | None = None
    for partitioned in partition_choices(problem, options):
        for grid in tile_grids(options, problem.limits):
            if smallest is not None and min_plan_bytes(problem, partitioned(grid)) > max(room_bytes, smallest.projection.peak_bytes):
                break
            plan = materialize(problem, partitioned(grid))
            if best is not None and plan.projection.flops >= best.projection.flops:
                break  # finer grids only compute more
            if smallest is None or plan.projection.peak_bytes < smallest.projection.peak_bytes:
                smallest = plan
            if plan.projection.peak_bytes <= room_bytes:
                best = plan
                break
    if best is not None:
        return best
    if smallest is None:
        raise UnsupportedError(["strategy 'sft': no segment of the model can run in tiles; choose strategy 'auto'"])
    raise _smallest_plan_error(problem, smallest, budget_bytes, options)


def _published_plan(problem: PlanningProblem, budget_bytes: int, options: Options, rates: DeviceRates) -> ProjectedPlan:
    """The plan of a published schedule, by name."""
    room_bytes = budget_bytes - problem.resources.occupied_bytes
    staged = StagedModel.of(problem, rates)
    if not problem.sized.training or len(staged.stages) < 2:  # no stage to recompute
        plan = materialize(problem, staged.choices)
        fits = plan.projection.peak_bytes <= room_bytes
    else:
        schedule, fits = solve_staged(staged, options.strategy, room_bytes)
        plan = scheduled_plan(staged, schedule)
    if not fits:
        check_host(plan, problem.resources.host_budget_bytes)
        raise _smallest_plan_error(problem, plan, budget_bytes, options)
    return plan


def check_host(plan: ProjectedPlan, host_budget_bytes: int | None) -> None:
    """Check a plan against the host budget; ``None`` is no limit.

    Raises:
        BudgetError: the plan needs more host memory.
    """
    needed = plan.projection.host_bytes
    if host_budget_bytes is not None and needed > host_budget_bytes:
        raise BudgetError(
            f"host_budget is {format_bytes(host_budget_bytes)}, but the values that a step offloads take "
            f"{format_bytes(needed)} of the host's memory. Raise host_budget to {size_at_least(needed)} ({needed} bytes), or "
            "the device's budget, or choose a strategy that recomputes.",
            needed_bytes=needed,
        )


def check_device(problem: PlanningProblem, plan: ProjectedPlan, budget_bytes: int) -> None:
    """Check a plan that the user passed in against the device budget.

    Raises:
        SmallestPlanError: the plan needs more device memory.
    """

    def describe(problem: PlanningProblem) -> BudgetError:
        needed = problem.resources.occupied_bytes + plan.projection.peak_bytes
        return BudgetError(
            f"the budget is {format_bytes(budget_bytes)}, but the plan that was given needs {format_bytes(needed)} here "
            f"({_occupied_text(problem)}). Raise the budget to {size_at_least(needed)} ({needed} bytes), or leave plan "
            "out and have one made for this budget.",
            needed_bytes=needed,
        )

    if problem.resources.occupied_bytes + plan.projection.peak_bytes > budget_bytes:
        raise SmallestPlanError(problem, plan, describe)


def _smallest_plan_error(problem: PlanningProblem, smallest: ProjectedPlan, budget_bytes: int, options: Options) -> SmallestPlanError:
    return SmallestPlanError(problem, smallest, lambda problem: _budget_error(problem, smallest, budget_bytes, options))


def _budget_error(problem: PlanningProblem, smallest: ProjectedPlan, budget_bytes: int, options: Options) -> BudgetError:
    needed = problem.resources.occupied_bytes + smallest.projection.peak_bytes
    scopes = [segment.scope for segment in smallest.region.segments]
    worst = max(scopes, key=lambda s: sum(problem.sized.value_bytes(n) for n in s.outputs + s.sources), default=None)
    labels = [problem.sized.graph[worst.names[index]].label for index in (0, -1)] if worst else []
    between = f"; segment {label_range(*labels)}" if labels else ""
    return budget_error(
        f"the budget is {format_bytes(budget_bytes)}, but a step needs {format_bytes(needed)} at least "
        f"({_occupied_text(problem)}, {format_bytes(smallest.projection.peak_bytes)} for inputs, cuts and "
        f"strips{between}).",
        needed,
        [Remedy(settings=(setting,), num_bytes=num_bytes) for setting, num_bytes in _remedies(problem, smallest, needed, options).items()],
    )


def _occupied_text(problem: PlanningProblem) -> str:
    """Text of the bytes that every plan takes."""
    overhead = (
        f", {format_bytes(problem.resources.overhead_bytes)} for segments and workspaces of the device"
        if problem.resources.overhead_bytes
        else ""
    )
    return f"{format_bytes(problem.resources.resident_bytes)} resident{overhead}"


def _remedies(problem: PlanningProblem, smallest: ProjectedPlan, needed_bytes: int, options: Options) -> dict[Setting, int]:
    """Settings that may help, with their value where it is known."""
    resources = problem.resources
    remedies: dict[Setting, int] = {"budget": needed_bytes, "input": 0}
    if 2 * _output_bytes(problem) >= smallest.projection.peak_bytes:  # outputs and their gradients take most of the bytes
        remedies["output"] = 0
    if resources.host_budget_bytes == 0 and problem.sized.training:
        remedies["host"] = 0
    repeats = (node for node in problem.sized.graph.operators if node.target == REPEAT)
    if problem.sized.training and any(node.argument("which").user_budget_bytes for node in repeats):
        remedies["repeats"] = 0
    if resources.weights is None and 2 * resources.resident_bytes >= needed_bytes:
        remedies["weights"] = 0
    if not options.is_automatic or options.tile or options.halo != "auto" or options.state_every or options.state_slots:
        remedies["options"] = 0
    return remedies


def _output_bytes(problem: PlanningProblem) -> int:
    """Bytes of the outputs on the device and of their gradients."""
    outputs = [
        name
        for name in problem.sized.graph.results
        if name not in problem.resources.host_outputs and problem.sized.graph[name].kind == "operator"
    ]
    grads = (name for name in outputs if name in problem.sized.requires_grad)
    return sum(map(problem.sized.value_bytes, outputs)) + sum(map(problem.sized.value_bytes, grads))
