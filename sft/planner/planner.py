"""Planner entry point: from a byte budget and options to segments with strip heights and state policies.

Every returned plan has an exact projection. If no plan fits, the error names the peak of the smallest known plan, and a budget of that size
works.
"""

from __future__ import annotations

from sft.analysis.ir.repeat_op import REPEAT
from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError, UnsupportedError
from sft.planner.cost.roofline import DeviceRates
from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.options import OFFLOAD_STRATEGIES, Options
from sft.planner.problem import PlanningProblem
from sft.planner.search.auto import AutoSearch
from sft.planner.search.independent_tiles import min_plan_bytes, partition_choices, tile_grids
from sft.planner.search.published import RECOMPUTE_STRATEGIES, solve_staged
from sft.planner.search.staged import scheduled_plan
from sft.planner.stages import StagedModel

__all__ = ["check_device", "check_host", "plan_segments"]


def plan_segments(problem: PlanningProblem, budget_bytes: int, options: Options, device_type: str) -> ProjectedPlan:
    """Choose segments for a budget by the strategy of the options.

    Raises:
        BudgetError: no known plan fits; names the segment with the largest peak and the smallest budget known to work.
    """
    room_bytes = budget_bytes - problem.resources.occupied_bytes
    if options.strategy == "sft":
        return _fused_tiled(problem, budget_bytes, options)
    if options.strategy in (*RECOMPUTE_STRATEGIES, *OFFLOAD_STRATEGIES):
        return _published_plan(problem, budget_bytes, options.strategy, DeviceRates(device_type))
    search = AutoSearch(problem, options, device_type)
    plan = search.fastest(room_bytes) or search.smallest()
    if plan.projection.peak_bytes <= room_bytes:
        return plan
    raise _budget_error(problem, plan, budget_bytes)


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
    raise _budget_error(problem, smallest, budget_bytes)


def _published_plan(problem: PlanningProblem, budget_bytes: int, name: str, rates: DeviceRates) -> ProjectedPlan:
    """The plan of a published schedule, by name."""
    room_bytes = budget_bytes - problem.resources.occupied_bytes
    staged = StagedModel(problem, rates)
    if not problem.sized.training or len(staged.stages) < 2:  # no stage to recompute
        plan = materialize(problem, staged.choices)
        fits = plan.projection.peak_bytes <= room_bytes
    else:
        schedule, fits = solve_staged(staged, name, room_bytes)
        plan = scheduled_plan(staged, schedule)
    if not fits:
        check_host(plan, problem.resources.host_budget_bytes)
        raise _budget_error(problem, plan, budget_bytes)
    return plan


def check_host(plan: ProjectedPlan, host_budget_bytes: int | None) -> None:
    """Check a plan against the host budget; ``None`` is no limit.

    Raises:
        BudgetError: the plan needs more host memory.
    """
    needed = plan.projection.host_bytes
    if host_budget_bytes is not None and needed > host_budget_bytes:
        raise BudgetError(
            f"host_budget is {format_bytes(host_budget_bytes)}, but what leaves the device during a step takes "
            f"{format_bytes(needed)} of the host's memory. Raise host_budget to {needed} bytes, or the device's budget, or choose a "
            "strategy that recomputes.",
            needed_bytes=needed,
        )


def check_device(problem: PlanningProblem, plan: ProjectedPlan, budget_bytes: int) -> None:
    """Check a plan that the user passed in against the device budget.

    Raises:
        BudgetError: the plan needs more device memory.
    """
    needed = problem.resources.occupied_bytes + plan.projection.peak_bytes
    if needed > budget_bytes:
        raise BudgetError(
            f"the budget is {format_bytes(budget_bytes)}, but the plan that was given needs {format_bytes(needed)} here "
            f"({_occupied_text(problem)}). Raise the budget to {needed} bytes, or leave plan out and have "
            "one made for this budget.",
            needed_bytes=needed,
        )


def _budget_error(problem: PlanningProblem, smallest: ProjectedPlan, budget_bytes: int) -> BudgetError:
    needed = problem.resources.occupied_bytes + smallest.projection.peak_bytes
    scopes = [segment.scope for segment in smallest.region.segments]
    worst = max(scopes, key=lambda s: sum(problem.sized.value_bytes(n) for n in s.outputs + s.sources), default=None)
    between = f"; segment {problem.sized.graph[worst.names[0]].label} .. {problem.sized.graph[worst.names[-1]].label}" if worst else ""
    return BudgetError(
        f"the budget is {format_bytes(budget_bytes)}, but a step needs {format_bytes(needed)} at least "
        f"({_occupied_text(problem)}, {format_bytes(smallest.projection.peak_bytes)} for inputs, cuts and "
        f"strips{between}). "
        f"Raise the budget to {needed} bytes, give a smaller input, "
        f"{_outputs_remedy(problem, smallest)}{_host_remedy(problem)}{_repeats_remedy(problem)}{_weights_remedy(problem, needed)}"
        "or leave out options that force strategy, tile, state_every or state_slots.",
        needed_bytes=needed,
    )


def _occupied_text(problem: PlanningProblem) -> str:
    """Text of the bytes that every plan takes."""
    overhead = (
        f", {format_bytes(problem.resources.overhead_bytes)} for blocks and workspaces of the device"
        if problem.resources.overhead_bytes
        else ""
    )
    return f"{format_bytes(problem.resources.resident_bytes)} resident{overhead}"


def _host_remedy(problem: PlanningProblem) -> str:
    """Remedy if values could wait on the host for their backward pass, but are not allowed to."""
    if problem.resources.host_budget_bytes != 0 or not problem.sized.training:
        return ""
    return "let values wait on the host with Options(host_budget=...), "


def _weights_remedy(problem: PlanningProblem, needed_bytes: int) -> str:
    """Remedy if weights and their gradients take most of the needed bytes."""
    if problem.resources.weights is not None or 2 * problem.resources.resident_bytes < needed_bytes:
        return ""
    return "stream the weights with Options(weights='stream'), "


def _repeats_remedy(problem: PlanningProblem) -> str:
    """Remedy if repeats have budgets of their own."""
    if problem.sized.training and any(
        node.target == REPEAT and node.argument("which").given_bytes for node in problem.sized.graph.operators
    ):
        return "leave out the budget of repeated blocks, so that it follows this one, "
    return ""


def _outputs_remedy(problem: PlanningProblem, smallest: ProjectedPlan) -> str:
    """Remedy if outputs and their gradients take most of the needed bytes."""
    outputs = [
        name
        for name in problem.sized.graph.results
        if name not in problem.resources.host_outputs and problem.sized.graph[name].kind == "operator"
    ]
    num_bytes = sum(map(problem.sized.value_bytes, outputs)) + sum(
        problem.sized.value_bytes(name) for name in outputs if name in problem.sized.requires_grad
    )
    if 2 * num_bytes < smallest.projection.peak_bytes:
        return ""
    return f"keep the outputs on the host ({format_bytes(num_bytes)} with their gradients) with output='host', "
