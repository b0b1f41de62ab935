"""The plan cache: captures and prepared plans of one model, by call signature.

This is the specialization cache of a compiled module. As in Dynamo, an entry is guarded: a :class:`~sft.api.call_signature.CallSignature`
contains shapes, layouts, requested gradients, modes and the answers to the questions that ``forward`` asks of a call (its *guards*). A call
with a known signature reuses the prepared plan; any other one runs the planning pipeline (:mod:`sft.api.pipeline`). A plan that was given
for this call determines the form of the graph. Otherwise the forms are searched in turn, until a plan of one computes little again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TypeVar

from torch import nn

from sft.analysis.frontend.submodule_hooks import check_hook_kinds
from sft.analysis.tiling.phases import PhasedGraph
from sft.api.call_signature import CallSignature, Shape, with_any_samples
from sft.api.capture_cache import CaptureCache
from sft.api.graph_forms import GraphForm, GraphForms, first_fitting
from sft.api.pipeline import PreparedPlan, planning_context, prepare, prepare_on_mesh, search
from sft.api.plan_search import PlanSearch
from sft.api.settings import CompileSettings, PlanningRequest
from sft.common.byte_units import format_bytes, size_at_least
from sft.common.errors import BudgetError
from sft.common.module_snapshot import ModuleSnapshot
from sft.common.process_lock import patch_lock
from sft.common.terminal.progress_display import stages
from sft.common.weighted_lru import WeightedLRU
from sft.planner.measured.fitted_plan import FittedPlan
from sft.planner.measured.overhead_search import SlowerPlansError
from sft.planner.options import Options
from sft.planner.plan import Plan
from sft.planner.problem import PlanningProblem
from sft.planner.search.transfer import has_decisions

__all__ = ["PlanCache"]

ValueT = TypeVar("ValueT")

#: Maximal number of prepared plans; an attribute that changes at every call must not exhaust host memory.
_MAX_PLANS = 128
#: Maximal number of plans without programs, which are still used when images of ever new sizes recur in the next epoch.
_MAX_CACHED_OBJECTS = 1024
#: Maximal number of plans of each kind of call whose decisions are transferred to other numbers of samples.
_MAX_SEARCHED = 8


class PlanCache:
    """Captures and prepared plans of one model.

    Args:
        model: the model.
        settings: settings of the compiled module.

    Attributes:
        captures: captures of the model.
        prepared: prepared plans by signature, the most recent last.
        plans: plans by signature, also after their prepared plan was evicted.
    """

    def __init__(self, model: nn.Module, settings: CompileSettings) -> None:
        self.model, self.settings = model, settings
        self.captures = CaptureCache(model)
        self.prepared: dict[CallSignature, PreparedPlan] = {}
        self.plans: dict[CallSignature, Plan] = {}
        self._shared = WeightedLRU()
        self._refused: tuple[CallSignature, GraphForms] | None = None
        self._searched: dict[CallSignature, dict[tuple[Shape, ...], Plan]] = {}

    @property
    def latest(self) -> tuple[CallSignature, PreparedPlan]:
        """The most recent entry."""
        return next(reversed(self.prepared.items()))

    def request(self, signature: CallSignature) -> PlanningRequest:
        """The request to plan calls of a signature."""
        return PlanningRequest(model=self.model, signature=signature, settings=self.settings)

    def with_settings(self, budget_bytes: int, options: Options) -> PlanCache:
        """An empty plan cache for another budget and other options, which shares the captures."""
        limits = replace(self.settings.limits, budget_note="")
        other = PlanCache(
            self.model, replace(self.settings, budget_bytes=budget_bytes, options=options, plan=None, limits=limits, proposes=False)
        )
        other.captures, other._shared = self.captures, self._shared
        return other

    @patch_lock()
    def get_or_prepare(self, signature: CallSignature, snapshot: ModuleSnapshot) -> PreparedPlan:
        """The prepared plan for calls of a signature, made on a miss.

        Args:
            signature: the kind of call.
            snapshot: modules and tensors of the model.

        Raises:
            UnsupportedError, BudgetError, InputError: as :func:`sft.compile`.
        """
        check_hook_kinds(snapshot)
        signature = self.with_guards(signature)
        prepared = self.prepared.get(signature)
        if prepared is None:
            prepared = self._run_pipeline(signature)
            self.add(signature, prepared)
        return prepared

    def specialize(self, signature: CallSignature, snapshot: ModuleSnapshot) -> PhasedGraph:
        """The captured graph at the sizes of a signature, captured on a miss; nothing is planned.

        Raises:
            UnsupportedError, InputError: as :func:`sft.compile`.
        """
        check_hook_kinds(snapshot)
        signature = self.with_guards(signature)
        with planning_context(self.request(signature)), stages(f"capture of {type(self.model).__name__}"):
            return self.captures.get_or_capture(signature).phases

    @contextmanager
    def problems(self, signature: CallSignature) -> Iterator[tuple[PlanningProblem, ...]]:
        """The planning problems of calls of a signature, of each form of the graph; nothing is prepared or stored.

        Those of a call that was refused are the same, with the results of its search.

        Raises:
            UnsupportedError, InputError: as :func:`sft.compile`.
        """
        signature = self.with_guards(signature)
        refused = None if self._refused is None or self._refused[0] != signature else self._refused[1]
        with planning_context(self.request(signature)), closing(self._forms(signature)) as forms:
            yield tuple(form.problem for form in refused or forms)

    def drop_refused(self) -> None:
        """Drop the results of a search that found no plan."""
        if self._refused is not None:
            self._refused[1].close()
        self._refused = None

    def with_guards(self, signature: CallSignature) -> CallSignature:
        """The signature with the guards of all captures so far."""
        return self.captures.with_guards(signature)

    def add(self, signature: CallSignature, prepared: PreparedPlan) -> None:
        """Store a prepared plan."""
        signature = self.with_guards(signature)  # the capture may have added guards
        family = _of_any_samples(signature)
        if family is not None and not prepared.plan.transferred_from and has_decisions(prepared.plan):
            plans = self._searched.setdefault(family, {})
            if len(plans) < _MAX_SEARCHED:
                plans.setdefault(signature.shapes, prepared.plan)
        _insert_bounded(self.prepared, signature, prepared, _MAX_PLANS)
        _insert_bounded(self.plans, signature, prepared.plan, _MAX_CACHED_OBJECTS)

    def _plans_of_other_samples(self, signature: CallSignature) -> tuple[Plan, ...]:
        """Plans that were searched for calls that differ from this one in the number of samples alone.

        The first one comes first, so that the plan of a number of samples does not depend on the numbers between.
        """
        family, requested = _of_any_samples(self.with_guards(signature)), self.settings.plan
        if family is None:
            return ()
        plans = tuple(self._searched.get(family, {}).values())
        is_requested = requested is not None and with_any_samples(requested.input_shapes) == family.shapes and has_decisions(requested)
        return (requested, *plans) if requested is not None and is_requested else plans

    def _run_pipeline(self, signature: CallSignature) -> PreparedPlan:
        self.drop_refused()
        request, plan, all_forms = self.request(signature), self.settings.plan, self._forms(signature)
        with (
            planning_context(request),
            stages(f"capture of {type(self.model).__name__}") as show_stage,
            self._closing_unless_refused(signature, all_forms),
        ):
            all_forms.capture()
            is_planned = plan is not None and plan.input_shapes == signature.shapes
            forms = [all_forms.of_plan(plan)] if plan is not None and is_planned else all_forms
            show_stage(f"search for a plan within {format_bytes(self.settings.budget_bytes)}")
            if self.settings.mesh is not None:
                return first_fitting(lambda form: prepare_on_mesh(request, form.problem, form.specialized), forms)
            form, fitted = self._search_forms(request, forms)
            prepared = prepare(request, fitted, form.specialized)
            fitted.problem.memo.clear()  # of a problem that the search changed, which the check of retained graphs keeps
            return prepared

    @contextmanager
    def _closing_unless_refused(self, signature: CallSignature, forms: GraphForms) -> Iterator[None]:
        """Close the forms, unless the budget is refused, and plans with other settings are proposed, which have much in common."""
        try:
            yield
        except BudgetError:
            if self.settings.proposes:
                self._refused = self.with_guards(signature), forms  # the capture may have added guards
            else:
                forms.close()
            raise
        except BaseException:
            forms.close()
            raise
        forms.close()

    def _forms(self, signature: CallSignature) -> GraphForms:
        """The forms of the graph of calls of a signature."""
        return GraphForms(self.request(signature), self.captures, self._shared)

    def _search_forms(self, request: PlanningRequest, forms: Iterable[GraphForm]) -> tuple[GraphForm, FittedPlan]:
        """The fastest plan of all forms; of the first one alone if that computes little again."""
        best: tuple[GraphForm, FittedPlan] | None = None
        errors: list[BudgetError] = []
        for form in forms:
            search = self._plan_search(request, form)
            try:
                fitted = self._search(search if best is None else search.faster_than(best[1]), form.problem)
            except BudgetError as error:
                errors.append(error)
                continue
            except SlowerPlansError:
                continue
            if best is None or search.rank(fitted) < search.rank(best[1]):
                best = form, fitted
            if fitted.computes_little_again:
                break
        if best is None:
            raise min(errors, key=lambda error: error.needed_bytes)
        PlanSearch(request=request).select_algorithms(best[1])
        return best

    def _plan_search(self, request: PlanningRequest, form: GraphForm) -> PlanSearch:
        """The search for plans of a form, with the plans that exist for it."""
        others = tuple(plan for plan in self._plans_of_other_samples(request.signature) if form.is_of(plan))
        previous = self.plans.get(request.signature)
        return PlanSearch(
            request=request, previous=previous if previous is not None and form.is_of(previous) else None, plans_of_other_samples=others
        )

    def _search(self, plan_search: PlanSearch, problem: PlanningProblem) -> FittedPlan:
        """Search a plan; the error, if none fits, mentions a plan that did fit without gradients of the inputs."""
        signature = plan_search.request.signature
        try:
            return search(plan_search, problem)
        except BudgetError as error:
            without = replace(signature, input_grads=(False,) * len(signature.input_grads))
            if without not in self.plans:
                raise
            names = ", ".join(f"input {position}" for position, needs_grad in enumerate(signature.input_grads) if needs_grad)
            problem_text = str(error).partition("\n")[0]
            raise BudgetError(
                f"{problem_text} The plan that fits is for inputs without a gradient, and this call asks for that of {names}: compile with "
                "a tensor that requires a gradient as input_shape; or, if no parameter or image before this model is trained, give "
                f"x.detach().\nTry: budget={size_at_least(error.needed_bytes).replace(' ', '')!r}",
                needed_bytes=error.needed_bytes,
            ) from error


def _of_any_samples(signature: CallSignature) -> CallSignature | None:
    """The signature without its number of samples; ``None`` for less than two."""
    shapes = signature.shapes_of_any_samples
    return None if shapes is None else replace(signature, shapes=shapes)


def _insert_bounded(entries: dict[CallSignature, ValueT], signature: CallSignature, value: ValueT, max_entries: int) -> None:
    """Insert an entry as the most recent one, and evict the oldest beyond the maximum."""
    entries.pop(signature, None)
    while len(entries) >= max_entries:
        del entries[next(iter(entries))]
    entries[signature] = value
