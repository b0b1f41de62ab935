"""Proposals of a budget error: plans with other settings, made by the same search, so that the error names what would fit.

Tried are, one at a time: frozen norms, an input that is read in strips, outputs on the host, host memory for values that wait for their
backward pass, and streamed weights; each only where it could matter. If none of them fits, those that need less are tried together. The
number of attempts and their processor time are bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import nn

from sft.api.call_signature import CallSignature
from sft.api.plan_cache import PlanCache
from sft.api.plan_search import PlanSearch
from sft.common.errors import BudgetError, SftError
from sft.common.process_lock import patch_lock
from sft.planner.measured.fitted_plan import FittedPlan
from sft.planner.measured.overhead_search import SlowerPlansError
from sft.planner.problem import PlanningProblem
from sft.planner.remedies import Remedy, Setting, with_remedies

__all__ = ["MAX_ATTEMPTS", "MAX_SECONDS", "propose"]

#: Most plans that an error tries, and processor seconds after which no other one begins.
MAX_ATTEMPTS, MAX_SECONDS = 6, 20.0
#: Least share of the needed bytes that an input or an output has for its remedy to be tried.
_MIN_SHARE = 0.05
#: Least reduction of the needed bytes that is worth a sentence.
_MIN_REDUCTION = 0.05


def propose(error: BudgetError, plans: PlanCache, signature_of: Callable[[], CallSignature]) -> BudgetError:
    """The error with remedies of which plans were made; the results of its search are dropped.

    Args:
        error: the error of a search.
        plans: the plan cache of the compiled module.
        signature_of: makes the signature of the call in the present modes of the model.
    """
    try:
        return _with_planned_remedies(error, plans, signature_of)
    finally:
        plans.drop_refused()


def _with_planned_remedies(error: BudgetError, plans: PlanCache, signature_of: Callable[[], CallSignature]) -> BudgetError:
    settings = plans.settings
    note = f" ({settings.limits.budget_note})" if settings.limits.budget_note else ""
    if (
        not error.remedies
        or not settings.proposes
        or settings.mesh is not None
        or settings.sharding is not None
        or settings.plan is not None
    ):
        return error
    attempts = _Attempts(error=error, plans=plans, signature_of=signature_of)
    return with_remedies(error, attempts.run(), note)


@dataclass(kw_only=True)
class _Attempts:
    """Attempts to plan one call with other settings.

    Attributes:
        error: the error of the search.
        plans: the plan cache of the compiled module.
        signature_of: makes the signature of the call.
        count: attempts so far.
        started: processor time at the begin.
    """

    error: BudgetError
    plans: PlanCache
    signature_of: Callable[[], CallSignature]
    count: int = 0
    started: float = field(default_factory=time.process_time)

    def run(self) -> list[Remedy]:
        """Remedies that fit; if there are none, those that need less."""
        remedies: list[Remedy] = []
        single: tuple[Setting, ...] = ("norms", "read", "output", "host", "weights")
        for setting in single:
            remedy = self._attempt((setting,))
            if remedy is not None:
                remedies.append(remedy)
        fitting = [remedy for remedy in remedies if remedy.fits]
        if not fitting and len(remedies) > 1:
            together = self._attempt(tuple(setting for remedy in remedies for setting in remedy.settings), only_fitting=True)
            fitting = [together] if together is not None else []
        return sorted(fitting, key=_rank) if fitting else sorted(remedies, key=_rank)[:1]

    def _attempt(self, changes: Sequence[Setting], *, only_fitting: bool = False) -> Remedy | None:
        """A remedy that was planned; ``None`` if it cannot be, or saves too little, or (``only_fitting``) does not fit."""
        if self.count >= MAX_ATTEMPTS or time.process_time() - self.started > MAX_SECONDS:
            return None
        frozen = _trained_norms(self.plans.model) if "norms" in changes else []
        if "norms" in changes and not frozen:
            return None
        try:
            with patch_lock(), _in_evaluation(frozen):
                signature = self.signature_of()
                with self.plans.problems(signature) as problems:
                    return self._planned(problems, signature, tuple(changes), only_fitting=only_fitting)
        except SftError:
            return None

    def _planned(
        self, problems: Sequence[PlanningProblem], signature: CallSignature, changes: tuple[Setting, ...], *, only_fitting: bool
    ) -> Remedy | None:
        """The remedy of the plan that would be chosen of those for all forms of the graph."""
        search = PlanSearch(request=self.plans.request(signature), names_smallest=not only_fitting)
        fitting: list[FittedPlan] = []
        needed: list[int] = []
        for problem in problems:
            changed = self._with_changes(problem, changes)
            if changed is None:
                return None
            self.count += not fitting and not needed
            changed_memos = [changed.memo]
            try:
                if "weights" in changes:
                    changed = search.with_streamed_weights(changed)
                    changed_memos.append(changed.memo)
                fitting.append(search.fit_projected(changed))
                if fitting[-1].computes_little_again:
                    break
                search = search.faster_than(fitting[-1])
            except BudgetError as error:
                needed.append(error.needed_bytes)
            except SlowerPlansError:
                continue
            finally:
                for memo in changed_memos:
                    if memo is not problem.memo:
                        memo.clear()
        if fitting:
            best = min(fitting, key=search.rank)
            host_bytes = best.projected.projection.host_bytes
            settings = changes if host_bytes else tuple(setting for setting in changes if setting != "host") or changes
            return Remedy(settings=settings, num_bytes=host_bytes, needed_bytes=best.needed_bytes, fits=True)
        if only_fitting:
            return None
        is_less = min(needed) <= (1 - _MIN_REDUCTION) * self.error.needed_bytes
        return Remedy(settings=changes, needed_bytes=min(needed)) if is_less else None

    def _with_changes(self, problem: PlanningProblem, changes: Sequence[Setting]) -> PlanningProblem | None:
        """The problem with several changes; ``None`` where one could not matter."""
        changed: PlanningProblem | None = problem
        for setting in changes:
            if setting in ("read", "output", "host"):
                changed = None if changed is None else self._changed(changed, setting)
            elif setting == "weights" and not self._may_stream(problem):
                return None
        return changed

    def _changed(self, problem: PlanningProblem, setting: Setting) -> PlanningProblem | None:
        """The problem with a change of its resources; ``None`` where it could not matter."""
        resources, sized, least = problem.resources, problem.sized, _MIN_SHARE * self.error.needed_bytes
        if setting == "read":
            names = [name for name in resources.resident_inputs if len(sized.shapes[name]) == 4 and name not in sized.requires_grad]
            names = [name for name in names if name not in sized.graph.results and sized.value_bytes(name) > least]
            return _with(problem, from_source=resources.from_source.union(names)) if names else None
        if setting == "output":
            outputs = [name for name in sized.graph.outputs if name not in resources.host_outputs and sized.graph[name].kind == "operator"]
            is_large = sum(map(sized.value_bytes, outputs)) > least
            return _with(problem, outputs_on_host=True) if is_large else None
        is_limited = resources.host_budget_bytes is not None and sized.training
        return problem.with_host_budget(None) if is_limited else None

    def _may_stream(self, problem: PlanningProblem) -> bool:
        """True if weights are resident, and take much of the memory."""
        resources, options = problem.resources, self.plans.settings.options
        return resources.weights is None and options.weights == "resident" and resources.resident_bytes > 0.25 * self.error.needed_bytes


def _rank(remedy: Remedy) -> tuple[int, int]:
    """Order of remedies: the fewest changes, then the least memory."""
    return len(remedy.settings), remedy.needed_bytes


def _with(problem: PlanningProblem, **changes: object) -> PlanningProblem:
    return replace(problem, resources=replace(problem.resources, **changes))  # type: ignore[arg-type]  # fields of Resources


def _trained_norms(model: nn.Module) -> list[nn.Module]:
    """Norms with running statistics that are updated."""
    return [module for module in model.modules() if module.training and getattr(module, "running_mean", None) is not None]


@contextmanager
def _in_evaluation(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Modules in evaluation mode for the time of the context; their own ``eval`` is not called, which may do more."""
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True
