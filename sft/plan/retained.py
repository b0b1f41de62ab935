"""What a backward pass needs that retains the graph, for another one behind it.

A plan's projection is that of a step whose backward pass frees what the forward pass kept while it goes. With ``retain_graph=True`` all of
that stays to the end. Whether it will be asked for is known when the backward pass begins, so that is where it is judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sft.errors import BudgetError
from sft.plan.problem import PlanningProblem
from sft.plan.project import project_step
from sft.plan.types import Plan
from sft.units import format_bytes
from sft.walk.region import Region

__all__ = ["RetainedGraphCheck"]


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
