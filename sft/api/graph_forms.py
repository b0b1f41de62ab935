"""Forms of the graph of one kind of call: the same function computed by other operators, with a planning problem each.

1. Frozen norms are folded into convolutions (:mod:`sft.analysis.passes.fold_norms`), unless a norm is trained and the weight is not.
2. Frozen norms are operators, for budgets without room for the folded weights.
3. Images of the first phase are computed again (:mod:`sft.analysis.tiling.rematerialization`), for budgets without room for them. Bands of
   several ranks, and strategies that are given, have the other forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from sft.api.capture_cache import CaptureCache, CapturedModel, SpecializedModel
from sft.api.problem_builder import build_problem
from sft.api.settings import PlanningRequest
from sft.common.errors import BudgetError
from sft.common.weighted_lru import WeightedLRU
from sft.planner.plan import Plan
from sft.planner.problem import PlanningProblem

__all__ = ["GraphForm", "GraphForms", "first_fitting"]

_Case = TypeVar("_Case")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphForm:
    """A form of the graph.

    Attributes:
        specialized: the model in this form, at the size of the call.
        problem: its planning problem.
    """

    specialized: SpecializedModel
    problem: PlanningProblem

    def is_of(self, plan: Plan) -> bool:
        """True if a plan runs exactly the operators of this form."""
        names = {name for segment in plan.segments for name in segment.nodes}
        return names == {node.name for node in self.specialized.phases.graph.operators}

    @property
    def adds_weight_gradients(self) -> bool:
        """True if a norm is trained and the weight that it is folded into is not: its gradient would need that of the weight."""
        trained = self.problem.sized.requires_grad
        folded = (node for node in self.problem.sized.graph.operators if node.target == "sft.folded_weight")
        return any(node.name in trained and node.argument("self").name not in trained for node in folded)


class GraphForms:
    """The forms of one kind of call in the order in which they are searched, each made when it is first asked for.

    Args:
        request: the kind of call.
        captures: captures of the model.
        shared: results that problems of other sizes share.
    """

    def __init__(self, request: PlanningRequest, captures: CaptureCache, shared: WeightedLRU) -> None:
        self._request, self._captures, self._shared = request, captures, shared
        self._made: list[GraphForm] = []

    def __iter__(self) -> Iterator[GraphForm]:
        yield from self._with_images_kept
        if self._rematerialized is not None:
            yield self._rematerialized

    def capture(self) -> None:
        """Capture the model, on a miss, and make the forms with all images kept.

        Raises:
            UnsupportedError, InputError: as :func:`sft.compile`.
        """
        _ = self._with_images_kept

    def of_plan(self, plan: Plan) -> GraphForm:
        """The form that a plan was made for; the first one if there is none, whose search says so."""
        return next((form for form in self if form.is_of(plan)), self._with_images_kept[0])

    def close(self) -> None:
        """Drop the results derived from the problems."""
        for form in self._made:
            form.problem.memo.clear()

    @cached_property
    def _with_images_kept(self) -> tuple[GraphForm, ...]:
        """The forms with norms folded and apart."""
        request, folded = self._request, self._captures.get_or_capture(self._request.signature)
        forms = [self._form(folded)]
        if folded.captured.unfolded is not None:
            unfolded = folded.captured.unfolded.specialize(request.signature.shapes)
            forms += [] if unfolded is None else [self._form(unfolded)]
        return tuple(forms[1:] if len(forms) > 1 and forms[0].adds_weight_gradients else forms)

    @cached_property
    def _rematerialized(self) -> GraphForm | None:
        """The form with images of the first phase computed again."""
        settings = self._request.settings
        is_automatic = settings.mesh is None and settings.options.strategy == "auto"
        captured: CapturedModel | None = self._with_images_kept[0].specialized.captured.rematerialized if is_automatic else None
        specialized = None if captured is None else captured.specialize(self._request.signature.shapes)
        return None if specialized is None else self._form(specialized)

    def _form(self, specialized: SpecializedModel) -> GraphForm:
        form = GraphForm(specialized=specialized, problem=build_problem(self._request, specialized, self._shared))
        self._made.append(form)
        return form


def first_fitting(fit: Callable[[_Case], _Result], cases: Iterable[_Case]) -> _Result:
    """The result of the first case that fits.

    Raises:
        BudgetError: none fits; the error of the case that needs least.
    """
    errors: list[BudgetError] = []
    for case in cases:
        try:
            return fit(case)
        except BudgetError as error:
            errors.append(error)
    raise min(errors, key=lambda error: error.needed_bytes)
