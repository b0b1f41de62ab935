"""The plan cache: captures and prepared plans of one model, by call signature.

This is the specialization cache of a compiled module. As in Dynamo, an entry is guarded: a :class:`~sft.api.call_signature.CallSignature`
contains shapes, layouts, requested gradients, modes and the answers to the questions that ``forward`` asks of a call (its *guards*). A call
with a known signature reuses the prepared plan; any other one runs the planning pipeline (:mod:`sft.api.pipeline`), with frozen norms
folded into convolutions (:mod:`sft.analysis.passes.fold_norms`), and apart where the folded ones do not fit or compute much again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from torch import nn

from sft.analysis.frontend.submodule_hooks import check_hook_kinds
from sft.analysis.tiling.phases import PhasedGraph
from sft.api.call_signature import CallSignature, Shape, with_any_samples
from sft.api.capture_cache import CaptureCache, SpecializedModel
from sft.api.pipeline import PreparedPlan, planning_context, prepare, prepare_on_mesh, search
from sft.api.plan_search import PlanSearch, computes_little_again, first_fitting
from sft.api.problem_builder import build_problem
from sft.api.settings import CompileSettings, PlanningRequest
from sft.common.byte_units import format_bytes
from sft.common.errors import BudgetError
from sft.common.module_snapshot import ModuleSnapshot
from sft.common.process_lock import patch_lock
from sft.common.terminal.progress_display import stages
from sft.common.weighted_lru import WeightedLRU
from sft.planner.measured.fitted_plan import FittedPlan
from sft.planner.options import Options
from sft.planner.plan import Plan
from sft.planner.problem import PlanningProblem
from sft.planner.search.transfer import has_decisions

__all__ = ["PlanCache"]

ValueT = TypeVar("ValueT")

#: A form of the graph and its planning problem.
_Form = tuple[SpecializedModel, PlanningProblem]

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

        Raises:
            UnsupportedError, InputError: as :func:`sft.compile`.
        """
        signature = self.with_guards(signature)
        with planning_context(self.request(signature)):
            problems = tuple(problem for _, problem in self._forms(signature))
            try:
                yield problems
            finally:
                for problem in problems:
                    problem.memo.clear()

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
        request = self.request(signature)
        with (
            planning_context(request),
            stages(f"capture of {type(self.model).__name__}") as show_stage,
            closing(self._forms(signature)) as forms,
        ):
            first = next(forms)  # the capture
            show_stage(f"search for a plan within {format_bytes(self.settings.budget_bytes)}")
            if self.settings.mesh is not None:
                return first_fitting(lambda form: prepare_on_mesh(request, form[1], form[0]), chain([first], forms))
            specialized, fitted = self._search_forms(request, chain([first], forms))
            return prepare(request, fitted, specialized)

    def _forms(self, signature: CallSignature) -> Generator[_Form]:
        """The forms of the graph with their problems, each made when it is asked for; a plan given for this call has one of them.

        Closing the generator drops the results derived from the problems.
        """
        plan, problems = self.settings.plan, list[PlanningProblem]()
        is_planned = plan is not None and plan.input_shapes == signature.shapes
        first: _Form | None = None
        try:
            for form in self._all_forms(signature):
                problems.append(form[1])
                first = first or form
                if plan is None or not is_planned or _is_plan_of(plan, form[0].phases):
                    yield form
                    if is_planned:
                        return
            if is_planned and first is not None:
                yield first
        finally:
            for problem in problems:
                problem.memo.clear()

    def _all_forms(self, signature: CallSignature) -> Iterator[_Form]:
        """All forms of the graph.

        1. Frozen norms are folded into convolutions, unless a norm is trained and the weight is not.
        2. Frozen norms are operators, for budgets without room for the folded weights.
        3. Images of the first phase are computed again (:mod:`sft.analysis.tiling.rematerialization`), for budgets without room for them.
           Bands of several ranks, and strategies that are given, have the other forms.
        """
        request, folded = self.request(signature), self.captures.get_or_capture(signature)
        unfolded = None if folded.captured.unfolded is None else folded.captured.unfolded.specialize(signature.shapes)
        forms = [(form, build_problem(request, form, self._shared)) for form in (folded, unfolded) if form is not None]
        if len(forms) > 1 and _adds_weight_gradients(forms[0][1]):
            del forms[0]
        yield from forms
        is_automatic = self.settings.mesh is None and self.settings.options.strategy == "auto"
        rematerialized = forms[0][0].captured.rematerialized if is_automatic else None
        specialized = None if rematerialized is None else rematerialized.specialize(signature.shapes)
        if specialized is not None:
            yield specialized, build_problem(request, specialized, self._shared)

    def _search_forms(self, request: PlanningRequest, problems: Iterable[_Form]) -> tuple[SpecializedModel, FittedPlan]:
        """The fastest plan of all forms; of the first one alone if that computes little again."""
        fitting: list[tuple[SpecializedModel, FittedPlan]] = []
        errors: list[BudgetError] = []
        for specialized, problem in problems:
            try:
                fitting.append((specialized, self._search(request, problem)))
            except BudgetError as error:
                errors.append(error)
            else:
                if computes_little_again(fitting[-1][1]):
                    break
        if not fitting:
            raise min(errors, key=lambda error: error.needed_bytes)
        search = PlanSearch(request=request)
        best = min(fitting, key=lambda each: search.rank(each[1]))
        search.select_algorithms(best[1])
        return best

    def _search(self, request: PlanningRequest, problem: PlanningProblem) -> FittedPlan:
        """Search a plan; the error, if none fits, mentions a plan that did fit without gradients of the inputs."""
        signature = request.signature
        others = [plan for plan in self._plans_of_other_samples(signature) if _is_plan_of(plan, problem.sized.phases)]
        previous = self.plans.get(signature)
        if previous is not None and not _is_plan_of(previous, problem.sized.phases):
            previous = None
        try:
            return search(request, problem, previous, others)
        except BudgetError as error:
            without = replace(signature, input_grads=(False,) * len(signature.input_grads))
            if without not in self.plans:
                raise
            names = ", ".join(f"input {position}" for position, needs_grad in enumerate(signature.input_grads) if needs_grad)
            problem_text = str(error).partition("\n")[0]
            raise BudgetError(
                f"{problem_text} The plan that fits is for inputs without a gradient, and this call asks for that of {names}: give "
                "x.detach(), or compile with a tensor that requires a gradient as input_shape.\nTry: net(x.detach())",
                needed_bytes=error.needed_bytes,
            ) from error


def _is_plan_of(plan: Plan, phases: PhasedGraph) -> bool:
    """True if a plan runs exactly the operators of a graph."""
    return {name for segment in plan.segments for name in segment.nodes} == {node.name for node in phases.graph.operators}


def _adds_weight_gradients(problem: PlanningProblem) -> bool:
    """True if a norm is trained and the weight that it is folded into is not: its gradient would need that of the weight."""
    trained = problem.sized.requires_grad
    folded = (node for node in problem.sized.graph.operators if node.target == "sft.folded_weight")
    return any(node.name in trained and node.argument("self").name not in trained for node in folded)


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
