"""Budgets of repeats, and the memory check of retained graphs.

Repeats (``sft.nn.Repeat``) without a budget of their own follow the model's. At first they keep all residuals, as plain PyTorch does. If no
plan fits, their bytes are halved, again and again, down to the need of their smallest schedule. Of the budgets tried, the first that gives
a fitting plan recomputes the fewest blocks.

A plan's projection assumes that the backward pass frees the residuals of the forward pass as it proceeds. With ``retain_graph=True`` all of
them stay to the end. That is known only when a backward pass begins, so :class:`RetainedGraphCheck` runs at that point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sft.analysis.ir.repeat_op import REPEAT
from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError, InputError
from sft.common.process_lock import patch_lock
from sft.planner.plan import Plan
from sft.planner.problem import PlanningProblem
from sft.planner.projection import plain_programs, project_step
from sft.repeat.costs import RepeatSite
from sft.runtime.region import Region

__all__ = ["RetainedGraphCheck", "extra_flops", "free_budgets", "repeated_calls", "with_free_budgets", "with_smaller_repeats"]


def repeated_calls(problem: PlanningProblem) -> dict[str, RepeatSite]:
    """Call sites of repeats, by the name of their operator."""
    sites: dict[str, RepeatSite] = {}
    for program in plain_programs(problem):
        for instruction in program.instructions:
            call = getattr(instruction.function, "call", None)
            if isinstance(call, RepeatSite):
                sites[instruction.owner] = call
    return sites


def extra_flops(problem: PlanningProblem) -> int:
    """FLOPs of blocks that run again within repeats of the untiled model; plain PyTorch does not compute them."""
    return sum(call.extra_flops for call in repeated_calls(problem).values()) if problem.sized.training else 0


def with_smaller_repeats(problem: PlanningProblem) -> Iterator[PlanningProblem]:
    """The same problem with smaller and smaller budgets of the repeats that have none of their own."""
    free = _unbudgeted_repeats(problem)
    if not free or not problem.sized.training:
        return
    calls = repeated_calls(problem)
    budgets = [calls[name].plan.projected_peak_bytes for name in free]
    minima = [min(calls[name].least_bytes, largest) for name, largest in zip(free, budgets, strict=True)]
    while budgets != minima:
        budgets = [max(num_bytes // 2, minimum) for num_bytes, minimum in zip(budgets, minima, strict=True)]
        yield with_free_budgets(problem, budgets)


def _unbudgeted_repeats(problem: PlanningProblem) -> list[str]:
    """Names of the repeats without a budget of their own."""
    return [
        node.name for node in problem.sized.graph.operators if node.target == REPEAT and node.argument("which").user_budget_bytes is None
    ]


def free_budgets(problem: PlanningProblem) -> tuple[int, ...]:
    """Current budgets of the repeats without one of their own, in order; empty if they keep all residuals."""
    budgets = [problem.sized.graph[name].argument("which").budget_bytes for name in _unbudgeted_repeats(problem)]
    return tuple(num_bytes for num_bytes in budgets if num_bytes is not None)


def with_free_budgets(problem: PlanningProblem, num_bytes: Sequence[int]) -> PlanningProblem:
    """The problem with these budgets for the repeats that have none of their own.

    Raises:
        InputError: the number of budgets differs from the number of such repeats.
    """
    free = _unbudgeted_repeats(problem)
    if len(num_bytes) != len(free):
        raise InputError(f"the plan has budgets for {len(num_bytes)} repetitions, the model has {len(free)} without one; make a new plan")
    budgets = dict(zip(free, num_bytes, strict=True))
    nodes = []
    for node in problem.sized.graph.nodes:
        if node.name in budgets:
            repeated = node.argument("which").within(budgets[node.name])
            node = replace(node, arguments=tuple((key, repeated if key == "which" else value) for key, value in node.arguments))
        nodes.append(node)
    graph = replace(problem.sized.graph, nodes=tuple(nodes))
    return problem.with_graph(graph)


@dataclass(frozen=True, eq=False)
class RetainedGraphCheck:
    """Memory check of a backward pass that retains the graph of a plan's step.

    Attributes:
        problem: the planning problem.
        region: the plan's region.
        plan: the plan.
    """

    problem: PlanningProblem
    region: Region
    plan: Plan

    @cached_property
    def needed_bytes(self) -> int:
        """Peak bytes of the device, including the input gradients of earlier backward passes of the same graph."""
        plain, retained = (project_step(self.problem, self.region, retains=retains).peak_bytes for retains in (False, True))
        self.problem.memo.clear()
        return self.plan.total_bytes + max(0, retained + self.problem.resources.input_grad_bytes - plain)

    @patch_lock()
    def check(self) -> None:
        """Check the retained graph against the budget.

        Raises:
            BudgetError: it needs more bytes.
        """
        budget_bytes = self.plan.budget_bytes
        if self.needed_bytes > budget_bytes:
            raise BudgetError(
                f"(the compiled model): the budget is {format_bytes(budget_bytes)}, but a backward pass with retain_graph=True, which "
                f"frees nothing that the forward pass kept, needs {format_bytes(self.needed_bytes)} by this plan. Compile with it, "
                f"plan=net.plan, and budget={self.needed_bytes}, go back once from the sum of the losses, or call the model for each",
                needed_bytes=self.needed_bytes,
            )
