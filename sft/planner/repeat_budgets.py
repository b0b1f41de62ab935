"""Budgets for repeated blocks that were given none of their own.

In a model that is compiled such blocks (``sft.nn.Repeat``) follow the model's budget. At first they keep everything, as plain PyTorch does;
where no plan fits then, they get half as many bytes, and half of that, down to what their smallest schedule needs. The first plan that fits
is the one with the fewest blocks run again, of those that were looked at.

What a backward pass needs that retains the graph, for another one behind it.

A plan's projection is that of a step whose backward pass frees what the forward pass kept while it goes. With ``retain_graph=True`` all of
that stays to the end. Whether it will be asked for is known when the backward pass begins, so that is where it is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sft.analysis.ir.repeat_op import REPEAT
from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError, InputError
from sft.planner.plan import Plan
from sft.planner.problem import PlanningProblem
from sft.planner.projection import plain_programs, project_step
from sft.repeat.costs import RepeatSite
from sft.runtime.region import Region

__all__ = ["RetainedGraphCheck", "extra_flops", "free_budgets", "repeated_calls", "with_free_budgets", "with_smaller_repeats"]


def repeated_calls(problem: PlanningProblem) -> dict[str, RepeatSite]:
    """The places where blocks are repeated, by the operator that stands for them."""
    found: dict[str, RepeatSite] = {}
    for program in plain_programs(problem):
        for instruction in program.instructions:
            call = getattr(instruction.function, "call", None)
            if isinstance(call, RepeatSite):
                found[instruction.owner] = call
    return found


def extra_flops(problem: PlanningProblem) -> int:
    """Of the FLOPs of a model that is kept whole those of repeated blocks that run again, which plain PyTorch does not."""
    return sum(call.extra_flops for call in repeated_calls(problem).values()) if problem.training else 0


def with_smaller_repeats(problem: PlanningProblem) -> Iterator[PlanningProblem]:
    """The same model with smaller and smaller budgets for repeated blocks that have none."""
    free = _unbudgeted_repeats(problem)
    if not free or not problem.training:
        return
    calls = repeated_calls(problem)
    budgets = [calls[name].plan.projected_peak_bytes for name in free]
    least = [min(calls[name].least_bytes, most) for name, most in zip(free, budgets, strict=True)]
    while budgets != least:
        budgets = [max(num_bytes // 2, fewest) for num_bytes, fewest in zip(budgets, least, strict=True)]
        yield with_free_budgets(problem, budgets)


def _unbudgeted_repeats(problem: PlanningProblem) -> list[str]:
    """The repetitions without a budget of their own."""
    return [node.name for node in problem.graph.operators if node.target == REPEAT and node.argument("which").given_bytes is None]


def free_budgets(problem: PlanningProblem) -> tuple[int, ...]:
    """The budgets that repetitions without one have got, in order; empty where they keep everything."""
    found = [problem.graph[name].argument("which").budget_bytes for name in _unbudgeted_repeats(problem)]
    return tuple(num_bytes for num_bytes in found if num_bytes is not None)


def with_free_budgets(problem: PlanningProblem, num_bytes: Sequence[int]) -> PlanningProblem:
    """The problem with these budgets for the repetitions that have none of their own.

    Raises:
        InputError: they are not as many.
    """
    free = _unbudgeted_repeats(problem)
    if len(num_bytes) != len(free):
        raise InputError(f"the plan has budgets for {len(num_bytes)} repetitions, the model has {len(free)} without one; make a new plan")
    budgets = dict(zip(free, num_bytes, strict=True))
    nodes = []
    for node in problem.graph.nodes:
        if node.name in budgets:
            repeated = node.argument("which").within(budgets[node.name])
            node = replace(node, arguments=tuple((key, repeated if key == "which" else value) for key, value in node.arguments))
        nodes.append(node)
    graph = replace(problem.graph, nodes=tuple(nodes))
    return replace(problem, phases=replace(problem.phases, graph=graph))


@dataclass(frozen=True, eq=False)
class RetainedGraphCheck:
    """A plan's step whose graph is retained."""

    problem: PlanningProblem
    region: Region
    plan: Plan

    @cached_property
    def needed_bytes(self) -> int:
        """What the device holds at most, also in the last backward pass, which finds the input's gradients of those before."""
        plain, retained = (project_step(self.problem, self.region, retains=retains).peak_bytes for retains in (False, True))
        self.problem.forget()
        return self.plan.total_bytes + max(0, retained + self.problem.input_grad_bytes - plain)

    def check(self) -> None:
        """Refuse what the budget has no room for.

        Raises:
            BudgetError: it has none.
        """
        budget_bytes = self.plan.budget_bytes
        if self.needed_bytes > budget_bytes:
            raise BudgetError(
                f"(the compiled model): the budget is {format_bytes(budget_bytes)}, but a backward pass with retain_graph=True, which "
                f"frees nothing that the forward pass kept, needs {format_bytes(self.needed_bytes)} by this plan. Compile with it, "
                f"plan=net.plan, and budget={self.needed_bytes}, go back once from the sum of the losses, or call the model for each",
                needed_bytes=self.needed_bytes,
            )
