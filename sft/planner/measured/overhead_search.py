"""Overhead search: plans that fit together with their overhead on a GPU, which is known only of complete plans.

If no plan that fits by its projection also fits with its overhead, the search is repeated with a smaller room: in steps up to the least
overhead of these plans, as others may have less. The same holds if only a much slower plan fits. For example, the fastest plan takes
36 ms and 356 MiB of 350, and the fastest one that fits 90 ms: in 15 MiB less, the search has another one of 37 ms.

A search ends where its fastest plan by the projection takes as long as a known one, of this search or of another one: a smaller room has no
faster plan. Nothing is simulated then.

A room between that of a plan that fits and the last one without any may have a faster plan, so two such rooms are tried.

A plan that does not fit by little has neighbours: variants that take little longer, and whose tensors may fit into segments better
(:mod:`sft.planner.measured.lower_strips`). They are tried where no plan of a search is nearly as fast and fits.

In the end the smallest plan is tried, which does not depend on the budget. So a budget of its bytes with overhead always has a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from sft.common.errors import BudgetError
from sft.planner.materialize import ProjectedPlan
from sft.planner.measured.fitted_plan import FittedPlan
from sft.planner.planner import SmallestPlanError
from sft.planner.problem import PlanningProblem
from sft.planner.remedies import with_remedies

__all__ = ["Accepts", "OverheadSearch", "SlowerPlansError"]

#: Condition on a plan for a problem.
Accepts = Callable[[PlanningProblem, ProjectedPlan], bool]

#: Steps in which the room of a step is reduced by the overhead of plans that did not fit: another plan may have less.
_ROOM_STEPS = 32
#: Rooms that are tried between one without a plan that fits and the next one.
_NUM_REFINEMENTS = 2
#: A plan is taken if it takes at most this multiple of the time of the fastest plan that fits by its projection alone.
_NEAR_FASTEST = 1.1
#: Neighbours are tried of so many plans of a search, the fastest ones that need at most this multiple of the budget.
_NUM_WITH_NEIGHBOURS = 2
_NEARLY_FITS = 1.12
#: A neighbour must take at most this share of the time of the best plan that fits.
_FASTER_SHARE = 0.995


class SlowerPlansError(Exception):
    """No plan is faster than a known one; internal."""


@dataclass(slots=True, kw_only=True)
class OverheadSearch:
    """Search for a plan that fits with its overhead.

    Attributes:
        budget_bytes: the device budget.
        fit: finds a plan that fits by its projection and meets a condition. The plans to which the condition is applied are ordered by
            their time.
        with_overhead: adds the overhead to the projection of a plan.
        seconds: estimated seconds of a plan, to compare plans by.
        known_seconds: seconds of a plan of another search; slower plans are of no use.
        neighbours: variants of a plan that may need less memory, fastest first.
    """

    budget_bytes: int
    fit: Callable[[PlanningProblem, Accepts], FittedPlan]
    with_overhead: Callable[[FittedPlan], FittedPlan]
    seconds: Callable[[FittedPlan], float]
    known_seconds: float = math.inf
    neighbours: Callable[[FittedPlan], Iterable[FittedPlan]] = lambda _: ()
    _measured: dict[int, tuple[ProjectedPlan, FittedPlan]] = field(default_factory=dict)  # by id; the reference keeps it unique
    _seen: list[FittedPlan] = field(default_factory=list)
    _limit_seconds: float = math.inf
    _tried: set[int] = field(default_factory=set)  # ids of the measured plans whose neighbours were tried

    def run(self, problem: PlanningProblem, overhead_bytes: int) -> FittedPlan:
        """Find a plan.

        Args:
            problem: the problem, without overhead.
            overhead_bytes: overhead that every plan has.

        Raises:
            BudgetError: none fits.
            SlowerPlansError: none is faster than the known plan.
        """
        best: FittedPlan | None = None
        refused_bytes = overhead_bytes
        while True:
            num_measured = len(self._measured)
            try:
                limit_seconds = self.known_seconds if best is None else min(self.known_seconds, self.seconds(best))
                fitted = self._fit(problem, overhead_bytes, limit_seconds)
            except SlowerPlansError:
                if best is None:
                    raise
                return best
            except BudgetError as error:
                if best is not None:
                    return best
                if isinstance(error, SmallestPlanError):
                    return self._smallest(error)
                raise
            fastest = self._seen[0] if self._seen else fitted
            new_plans = [each for _, each in [*self._measured.values()][num_measured:] if not self._fits(each)] or [fastest]
            near_seconds = _NEAR_FASTEST * self.seconds(fastest)
            if self._fits(fitted):
                best = fitted if best is None else min(best, fitted, key=self.seconds)
            if best is None or _FASTER_SHARE * self.seconds(best) > self.seconds(fastest):
                best = self._neighbour(limit_seconds if best is None else min(limit_seconds, self.seconds(best))) or best
            if best is not None and self.seconds(best) <= near_seconds:
                return self._refined(problem, best, refused_bytes, overhead_bytes)
            refused_bytes = overhead_bytes
            least_bytes = min(each.projected.projection.overhead_bytes for each in new_plans)
            step_bytes = max(overhead_bytes // 8 + 1, (self.budget_bytes - problem.resources.resident_bytes) // _ROOM_STEPS)
            overhead_bytes = max(min(least_bytes, overhead_bytes + step_bytes), overhead_bytes + overhead_bytes // 8 + 1)

    def _fit(self, problem: PlanningProblem, overhead_bytes: int, limit_seconds: float = math.inf) -> FittedPlan:
        """The plan of one search with this overhead.

        Raises:
            SlowerPlansError: its fastest plan takes as long as the limit.
        """
        self._seen.clear()
        self._limit_seconds = limit_seconds
        return self._measure(self.fit(problem.with_overhead(overhead_bytes), self._fits_measured))

    def _neighbour(self, known_seconds: float) -> FittedPlan | None:
        """The first neighbour of the fastest plans of a search that fits, if it is faster than a known plan."""
        nearly = [each for each in self._seen if not self._fits(each) and each.needed_bytes <= _NEARLY_FITS * self.budget_bytes]
        for plan in nearly[:_NUM_WITH_NEIGHBOURS]:
            if id(plan.projected) in self._tried:
                continue
            self._tried.add(id(plan.projected))
            for neighbour in self.neighbours(plan):
                if self.seconds(neighbour) > _FASTER_SHARE * known_seconds:
                    break
                measured = self._measure(neighbour)
                if self._fits(measured):
                    return measured
        return None

    def _refined(self, problem: PlanningProblem, best: FittedPlan, refused_bytes: int, overhead_bytes: int) -> FittedPlan:
        """The fastest plan of a few rooms between the last one whose plans did not fit and the one of a plan that fits."""
        for _ in range(_NUM_REFINEMENTS if refused_bytes < overhead_bytes else 0):
            middle_bytes = (refused_bytes + overhead_bytes) // 2
            fitted = self._fit(problem, middle_bytes)
            if self._fits(fitted) and self.seconds(fitted) <= self.seconds(best):
                best, overhead_bytes = fitted, middle_bytes
            else:
                refused_bytes = middle_bytes
        return best

    def _fits_measured(self, problem: PlanningProblem, plan: ProjectedPlan) -> bool:
        """True if a plan fits with its overhead; the plans of a search are noted.

        Raises:
            SlowerPlansError: the plan is the first one, so the fastest, and takes as long as the limit.
        """
        if not self._seen and self.seconds(FittedPlan(problem, plan)) >= self._limit_seconds:
            raise SlowerPlansError
        self._seen.append(self._measure(FittedPlan(problem, plan)))
        return self._fits(self._seen[-1])

    def _measure(self, fitted: FittedPlan) -> FittedPlan:
        """The plan with its overhead, which is determined once."""
        plan = fitted.projected
        if id(plan) not in self._measured:
            self._measured[id(plan)] = (plan, self.with_overhead(fitted))
        return replace(fitted, projected=self._measured[id(plan)][1].projected)

    def _fits(self, fitted: FittedPlan) -> bool:
        return fitted.needed_bytes <= self.budget_bytes

    def _smallest(self, error: SmallestPlanError) -> FittedPlan:
        """The smallest plan with its overhead, if it fits."""
        try:
            smallest = self._measure(FittedPlan(error.planning_problem, error.plan))
        except BudgetError:
            raise _unmeasured_error(error) from None
        if self._fits(smallest):
            return smallest
        raise error.with_overhead(smallest.projected.projection.overhead_bytes) from None


def _unmeasured_error(error: SmallestPlanError) -> BudgetError:
    """The error of a search, without overhead: its smallest plan does not fit into the free memory of the device."""
    note = " The allocator's segments and libraries' workspaces come on top: the device has too little free memory to measure them."
    return with_remedies(error.with_overhead(0), (), note)
