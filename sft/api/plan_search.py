"""The search stage: ``PlanningProblem -> candidates -> decisions (SegmentChoice*) -> Region``, until a plan fits.

:class:`PlanSearch` nests searches. Each varies one property of the problem and calls the next::

    fit                 kernels: PyTorch's operators alone, the same plan with measured kernels, and plans for kernels if these save much
    _fit_host           host memory: without a limit, then with that of the machine
    _fit_recordings     passes: recorded as CUDA graphs or not, whichever is faster
    _fit_overhead       room: the budget minus what the device takes in addition to tensors (on a GPU)
    _fit_weights        weights: resident, then streamed (``Options(weights="auto")``)
    _fit_repeats        budgets of repeated blocks: all residuals, then half as much, and so on
    plan_segments       one call of the planner

Plans that exist come before new ones: one given by the user, one made earlier for the same call signature, one made for another number of
samples. The planner (:func:`sft.planner.planner.plan_segments`) turns a problem into a :class:`~sft.planner.materialize.ProjectedPlan`: the
decisions, the region that executes them, and the projection of its memory. As the problem varies, the result is a :class:`FittedPlan`, a
problem with its plan.

*On a GPU* a plan that fits by its projection is tried on the device (:mod:`sft.planner.measured.overhead_search`). If the allocator's
rounding and libraries' workspaces exceed the rest of the budget, the search is repeated with that overhead reserved. If no plan fits, the
smallest one is tried, too: the error names its bytes with the overhead, and a budget of that size works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import nn

from sft.analysis.frontend.capture import tensor_attribute
from sft.api.graph_forms import first_fitting
from sft.api.settings import PlanningRequest
from sft.api.weight_placement import check_can_stream, check_optimizer_step, resident_bytes, weights_to_stream
from sft.common.errors import BudgetError, InputError, UnsupportedError
from sft.lower.context import Backend
from sft.planner.cost.step_time import project_timeline
from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.measured.allocator_overhead import GraphScope, OverheadEstimator, warn_about_allocator
from sft.planner.measured.fitted_plan import FittedPlan
from sft.planner.measured.lower_strips import with_lower_strips
from sft.planner.measured.overhead_search import Accepts, OverheadSearch, SlowerPlansError
from sft.planner.measured.step_timer import time_step
from sft.planner.plan import Plan
from sft.planner.planner import SmallestPlanError, check_device, check_host, plan_segments
from sft.planner.problem import PlanningProblem
from sft.planner.remedies import Remedy, with_remedies
from sft.planner.repeat_budgets import with_free_budgets, with_smaller_repeats
from sft.planner.search.timed import timing_candidates
from sft.planner.search.transfer import can_transfer, transferred_plan
from sft.runtime.moves import parse_schedule
from sft.torch_runtime.pass_settings import pass_settings
from sft.torch_runtime.profiling import open_timing_cache
from sft.torch_runtime.streamed_parameters import streamable_parameters

__all__ = ["PlanSearch", "overhead_estimator"]

#: Seconds that a step on a GPU without recorded passes takes longer than by the time model: on an H200 VGG-16 in 1.2 GiB takes 0.8 ms more
#: than estimated with recorded passes, and 6.4 ms without (``benchmarks/results/2026-11-26-h200-gpu-steps.md``).
_UNRECORDED_SECONDS = 5e-3
#: The same as a share of the step. A smaller difference of estimates does not say which step is faster, and the time of recorded passes
#: does not depend on the host.
_UNRECORDED_SHARE = 0.01
#: Share of the time without kernels, at most, that a plan takes with them if plans are searched with kernels, too.
_SEARCHED_SHARE = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """The search for a plan of one kind of call on one device.

    Attributes:
        request: the kind of call.
        previous: the plan made earlier for this signature, if its programs have been dropped since.
        plans_of_other_samples: plans made for other numbers of samples, in the order of their creation.
        known_seconds: estimated seconds of a plan of another form of the graph; slower plans are of no use.
        names_smallest: true if errors name the smallest plan, whose search takes long.
    """

    request: PlanningRequest
    previous: Plan | None = None
    plans_of_other_samples: Sequence[Plan] = ()
    known_seconds: float = math.inf
    names_smallest: bool = True

    def fit(self, problem: PlanningProblem) -> FittedPlan:
        """Find a plan that fits; with optional kernels, where they are faster.

        Raises:
            BudgetError: none fits.
            InputError: the given plan is for another model.
            UnsupportedError: the weights cannot be streamed.
            SlowerPlansError: none is faster than the known plan.
        """
        backend = problem.resources.backend
        library = None if backend is None else backend.without_kernels
        if backend is None or library is None:
            return self._fit_host(problem)
        return replace(self, known_seconds=math.inf)._fit_kernels(problem, backend, library)  # kernels may make any plan the fastest

    def _fit_kernels(self, problem: PlanningProblem, backend: Backend, library: Backend) -> FittedPlan:
        """Find a plan that fits without optional kernels, and with them; the faster one of both.

        The search with kernels takes as long again, and tries their programs on the device. So it is made only if kernels change the times
        of operators so much that another plan may be the fastest: interpolation takes a U-Net less time in strips than in panels then.
        """
        try:
            fitted = self._fit_host(replace(problem, resources=replace(problem.resources, backend=library)))
        except BudgetError as library_error:
            try:
                return self._fit_host(problem)
            except BudgetError as error:
                raise min(library_error, error, key=lambda each: each.needed_bytes) from None
        variant = self._with_kernels(fitted, backend)
        best = fitted if variant is None else min((fitted, variant), key=self._estimated_seconds)
        best_seconds = self._estimated_seconds(best)
        # Copies to the host hide what kernels save: a plan without them may be faster.
        if best_seconds > _SEARCHED_SHARE * self._estimated_seconds(fitted) and not best.projected.projection.host_bytes:
            return best
        try:
            searched = replace(self, known_seconds=best_seconds)._fit_host(problem)
        except (BudgetError, SlowerPlansError):
            return best
        return min((best, searched), key=self._estimated_seconds)

    def _with_kernels(self, fitted: FittedPlan, backend: Backend) -> FittedPlan | None:
        """The plan with the kernels of a backend; ``None`` if it does not fit, or its passes cannot be recorded any more."""
        variant, records_passes = fitted.with_backend(backend), fitted.projected.projection.records_passes
        records_strips = self.request.settings.options.cuda_graphs is True
        scope: GraphScope | None = "passes" if records_passes else "strips" if records_strips else None
        estimator = self._overhead_estimator(variant.problem, scope)
        if estimator is not None:
            try:
                variant = self._with_overhead(estimator, variant)
            except BudgetError:  # the device has too little free memory to try it
                return None
        is_alike = variant.projected.projection.records_passes == records_passes
        return variant if is_alike and self._fits_budget(variant) and self._fits_free_host(variant.projected) else None

    def _fit_host(self, problem: PlanningProblem) -> FittedPlan:
        """Find a plan that fits, with no more host memory than is free; errors as of :meth:`fit`."""
        fitted = self._fit_recordings(problem)
        if self._fits_free_host(fitted.projected):
            return fitted
        # A limit slows the search down, so it is set only where a plan without one exceeds it.
        limits = self.request.settings.limits
        try:
            return self._fit_recordings(problem.with_host_budget(limits.host_bytes))
        except BudgetError as error:
            host_bytes = fitted.projected.projection.host_bytes
            unlimited = Remedy(settings=("host",), num_bytes=host_bytes, needed_bytes=fitted.needed_bytes, fits=True)
            raise with_remedies(error, [unlimited], f" Of the host's memory {limits.host_note}.") from None

    def fit_projected(self, problem: PlanningProblem) -> FittedPlan:
        """Find a plan that fits by its projection, for a problem that was changed; nothing runs on the device.

        Raises:
            BudgetError: none fits.
            SlowerPlansError: none is faster than the known plan.
        """
        return self._fit_overhead(problem, self._remote_estimator(problem) if self._is_for_gpu else None, self._fit_repeats)

    def _fits_free_host(self, projected: ProjectedPlan) -> bool:
        """True if the options limit the host memory, or a plan takes no more of it than is free."""
        limit = self.request.settings.limits.host_bytes
        is_limited = self.request.settings.options.host_budget is not None or self.request.settings.plan is not None
        projection = projected.projection
        return is_limited or limit is None or projection.host_bytes + projection.staging_bytes <= limit

    def _fit_recordings(self, problem: PlanningProblem) -> FittedPlan:
        """Find a plan that fits with recorded passes, or without; the faster one of both."""
        is_required = self.request.settings.options.cuda_graphs is True
        estimator = self._overhead_estimator(problem, "strips" if is_required else None)
        recorded = None
        if estimator is not None and self._may_record_passes(problem):
            recorded = self._fit_recorded(problem, replace(estimator, cuda_graphs="passes"))
        if recorded is not None and (is_required or recorded.is_untiled):
            return recorded
        faster = self if recorded is None else self._below(self._estimated_seconds(recorded))
        try:
            fitted = faster._fit_overhead(problem, estimator, self._fit_weights)
        except (BudgetError, SlowerPlansError):
            if recorded is None:
                raise
            return recorded
        return fitted if recorded is None else min((recorded, fitted), key=self._estimated_seconds)

    def _may_record_passes(self, problem: PlanningProblem) -> bool:
        """True if plans with passes that are recorded as CUDA graphs are searched for."""
        resources, settings = problem.resources, self.request.settings
        uses_host = bool(resources.from_source or resources.outputs_on_host or settings.options.weights != "resident")
        return bool(settings.options.cuda_graphs) and not uses_host and not settings.sharding

    def _fit_recorded(self, problem: PlanningProblem, estimator: OverheadEstimator) -> FittedPlan | None:
        """A plan with recorded passes that fits; ``None`` if there is none."""
        try:
            fitted = self._fit_overhead(problem.with_replays(), estimator, self._fit_weights)
        except (BudgetError, SlowerPlansError):
            return None
        return fitted if fitted.projected.projection.records_passes else None

    def _estimated_seconds(self, fitted: FittedPlan) -> float:
        """Estimated seconds of a step, to compare plans by."""
        projection, rates = fitted.projected.projection, fitted.problem.resources.rates
        # The overhead of a plan says that its passes are recorded, the rates of its problem that they will be.
        rates = replace(rates, replays=rates.replays or projection.records_passes)
        seconds = project_timeline(fitted.problem, fitted.projected.choices, projection, rates).estimated_seconds
        return seconds if rates.replays or not self._is_for_gpu else (1 + _UNRECORDED_SHARE) * seconds + _UNRECORDED_SECONDS

    def _fit_overhead(
        self, problem: PlanningProblem, estimator: OverheadEstimator | None, fit: Callable[[PlanningProblem, Accepts], FittedPlan]
    ) -> FittedPlan:
        """Find a plan that fits together with the memory that the device takes in addition to tensors."""
        if estimator is None:
            try:
                return fit(problem, lambda _problem, _plan: True)
            except SmallestPlanError as error:
                raise error.with_overhead(0) from None
        search = OverheadSearch(
            budget_bytes=self.request.settings.budget_bytes,
            fit=fit,
            with_overhead=partial(self._with_overhead, estimator),
            seconds=self._estimated_seconds,
            known_seconds=self.known_seconds,
            neighbours=self._neighbours,
        )
        return search.run(problem, estimator.least_bytes(problem))

    def _neighbours(self, fitted: FittedPlan) -> Iterator[FittedPlan]:
        """The plan in lower strips, where the user determines neither strips nor the plan."""
        settings = self.request.settings
        if settings.options.is_automatic and settings.options.tile is None and settings.plan is None:
            yield from with_lower_strips(fitted)

    def _overhead_estimator(self, problem: PlanningProblem, cuda_graphs: GraphScope | None = None) -> OverheadEstimator | None:
        """The estimator of the memory that plans take in addition to tensors; ``None`` on a CPU."""
        if self._runs_on_gpu:
            return overhead_estimator(self.request.model, problem, self.request.device, cuda_graphs=cuda_graphs)
        return self._remote_estimator(problem, cuda_graphs) if self._is_for_gpu else None

    @property
    def _runs_on_gpu(self) -> bool:
        """True if the model is on a GPU of this machine, where programs take device memory in addition to tensors."""
        return self.request.device.type == "cuda"

    @property
    def _is_for_gpu(self) -> bool:
        """True if the plan is for a GPU, of this machine or of another one."""
        return self._runs_on_gpu or self.request.settings.device_type(self.request.device) == "cuda"

    def _remote_estimator(self, problem: PlanningProblem, cuda_graphs: GraphScope | None = None) -> OverheadEstimator:
        """The estimator for a GPU of another machine, whose libraries' workspaces are unknown."""
        return OverheadEstimator(None, is_training=problem.sized.training, cuda_graphs=cuda_graphs)

    def _with_overhead(self, estimator: OverheadEstimator, fitted: FittedPlan) -> FittedPlan:
        """The plan with its overhead in the projection."""
        with self._pass_settings(fitted.projected):
            return replace(fitted, projected=estimator.with_overhead(fitted.problem, fitted.projected))

    def rank(self, fitted: FittedPlan) -> tuple[bool, float]:
        """Order of plans of several forms of a graph: resident weights first, then the time of a step."""
        seconds = self._estimated_seconds(fitted) if fitted.seconds is None else sum(fitted.seconds)
        return fitted.problem.resources.weights is not None, seconds

    def faster_than(self, fitted: FittedPlan) -> PlanSearch:
        """The search for plans of another form of the graph that rank before a plan of this one."""
        is_streamed, seconds = self.rank(fitted)
        return self if is_streamed or fitted.seconds is not None else self._below(seconds)

    def _below(self, seconds: float) -> PlanSearch:
        return replace(self, known_seconds=min(self.known_seconds, seconds))

    def select_algorithms(self, fitted: FittedPlan) -> None:
        """Let libraries select their algorithms for a plan, before the memory of its steps is reserved."""
        if self._runs_on_gpu:
            with self._pass_settings(fitted.projected):
                estimator = self._overhead_estimator(fitted.problem)
                assert estimator is not None
                estimator.select_algorithms(fitted.problem, fitted.projected)

    def _pass_settings(self, projected: ProjectedPlan) -> AbstractContextManager[None]:
        """Settings of torch with which a plan runs, and with which it is measured."""
        return pass_settings(projected.region, self.request.device, cudnn_benchmark=self.request.settings.options.cudnn_benchmark)

    def fastest(self, fitted: FittedPlan) -> FittedPlan:
        """Time a plan and its rivals on the device; the fastest one. A plan given by the user has no rivals."""
        problem, options, device = fitted.problem, self.request.settings.options, self.request.device
        rivals: Sequence[ProjectedPlan] = ()
        if self.request.settings.plan is None:
            timed = timing_candidates(problem, fitted.projected, self.request.settings.budget_bytes, options)
            rivals = [rival for rival in timed if self._fits_free_host(rival)]
        records_strips = options.cuda_graphs is True
        scope: GraphScope | None = "passes" if fitted.projected.projection.records_passes else "strips" if records_strips else None
        estimator = self._overhead_estimator(problem, scope)
        with self._pass_settings(fitted.projected):
            best_seconds = time_step(problem, fitted.projected.region, device, progress=options.progress)
        best = replace(fitted, seconds=best_seconds)
        for rival in rivals:
            candidate = FittedPlan(problem, rival)
            if estimator is not None:
                candidate = self._with_overhead(estimator, candidate)
                if not self._fits_budget(candidate):
                    continue
            with self._pass_settings(rival):
                seconds = time_step(problem, rival.region, device, max_seconds=sum(best_seconds), progress=options.progress)
            if seconds is not None:
                best, best_seconds = replace(candidate, seconds=seconds), seconds
        return best

    def _fit_weights(self, problem: PlanningProblem, accepts: Accepts) -> FittedPlan:
        """Find a plan that fits by its projection, with resident weights if possible."""

        def fitted(problem: PlanningProblem) -> FittedPlan:
            return self._known_plan(problem) or self._transferred_plan(problem, accepts) or self._fit_repeats(problem, accepts)

        settings = self.request.settings
        is_streamed = self.request.signature.weights_revision is not None or settings.options.streams_weights
        if is_streamed or (settings.plan is not None and settings.plan.streamed_weights > 0):
            return fitted(self.with_streamed_weights(problem))
        try:
            return fitted(problem)
        except BudgetError as error:
            if settings.options.weights != "auto":
                raise
            resident_error = error
        try:
            return self._fit_repeats(self.with_streamed_weights(problem), accepts)
        except UnsupportedError:
            raise resident_error from None
        except BudgetError as error:
            raise min(resident_error, error, key=lambda each: each.needed_bytes) from None

    def _fits_budget(self, fitted: FittedPlan) -> bool:
        """True if a plan fits together with its overhead."""
        return fitted.needed_bytes <= self.request.settings.budget_bytes

    def with_streamed_weights(self, problem: PlanningProblem) -> PlanningProblem:
        """The same problem with streamed weights.

        Raises:
            BudgetError: the optimizer's step needs more than the budget.
            UnsupportedError: the weights cannot be streamed.
        """
        model, settings, signature = self.request.model, self.request.settings, self.request.signature
        check_can_stream(settings.mesh, settings.sharding)
        weights = weights_to_stream(model, problem.sized.graph, signature.device, settings.options)
        num_bytes = resident_bytes(
            model,
            settings.optimizer,
            settings.sharding,
            holds_gradients=signature.holds_gradients,
            streamed=streamable_parameters(model),
        )
        check_optimizer_step(model, num_bytes, settings.budget_bytes)
        return replace(problem, resources=replace(problem.resources, weights=weights, resident_bytes=num_bytes))

    def _fit_repeats(self, problem: PlanningProblem, accepts: Accepts) -> FittedPlan:
        """Find a plan of the planner; if none fits, one with smaller budgets for repeated blocks."""
        settings = self.request.settings

        def planned(problem: PlanningProblem) -> FittedPlan:
            most_named_bytes = math.inf if self.names_smallest else settings.budget_bytes
            plan = plan_segments(problem, settings.budget_bytes, settings.options, partial(accepts, problem), most_named_bytes)
            return FittedPlan(problem, plan)

        return first_fitting(planned, chain([problem], with_smaller_repeats(problem)))

    def _known_plan(self, problem: PlanningProblem) -> FittedPlan | None:
        """The plan given by the user, if it matches this call, or the previous one."""
        fitted = self._materialize(problem, self.request.settings.plan)
        if fitted is not None:
            return fitted
        try:
            fitted = self._materialize(problem, self.previous)
        except (BudgetError, InputError):  # resident bytes have grown, or another capture names operators differently
            return None
        if fitted is None or self.previous is None:
            return None
        return replace(fitted, transferred_from=self.previous.transferred_from)

    def _transferred_plan(self, problem: PlanningProblem, accepts: Accepts) -> FittedPlan | None:
        """A plan with the decisions of one for another number of samples; ``None`` if none fits, or all plans are to be timed."""
        settings = self.request.settings
        if not settings.options.is_automatic or settings.options.profile == "measure":
            return None
        room_bytes = settings.budget_bytes - problem.resources.occupied_bytes
        for other in self.plans_of_other_samples:
            if can_transfer(problem, other):
                plan = transferred_plan(problem, other, settings.options, room_bytes, partial(accepts, problem))
                if plan is not None:
                    fitted = FittedPlan(problem, plan)
                    return fitted if fitted.is_untiled else replace(fitted, transferred_from=other.input_shapes)
        return None

    def _materialize(self, problem: PlanningProblem, plan: Plan | None) -> FittedPlan | None:
        """The region and projection of a plan's decisions; ``None`` if it is for other inputs."""
        shapes = tuple(problem.sized.shapes[name] for name in problem.sized.graph.inputs)
        if plan is None or plan.input_shapes != shapes or plan.training != problem.sized.training:
            return None
        if plan.input_placements != problem.resources.input_placements or plan.output_placements != problem.resources.output_placements:
            return None
        if (plan.streamed_weights > 0) != (problem.resources.weights is not None):
            return None
        names = [name for segment in plan.segments for name in segment.nodes]
        if sorted(names) != sorted(problem.sized.operators):
            if self.request.signature.capture_key.autocast is not None:
                return None  # made for calls without autocast, which have other operators
            raise InputError("the plan names other operators than the model has; make a new one with sft.plan(model, ...)")
        _check_order(problem, names)
        if plan.repeat_budgets:
            problem = with_free_budgets(problem, plan.repeat_budgets)
        schedule = parse_schedule(plan.order, len(plan.segments)) if plan.order and problem.sized.training else None
        projected = materialize(problem, tuple(segment.choice for segment in plan.segments), schedule)
        check_host(projected, self.request.settings.options.host_budget_bytes)
        check_device(problem, projected, self.request.settings.budget_bytes)
        return FittedPlan(problem, projected)


def _check_order(problem: PlanningProblem, names: Sequence[str]) -> None:
    """Refuse a plan that runs an operator before one of its operands.

    Raises:
        InputError: it does.
    """
    position = {name: number for number, name in enumerate(names)}
    for number, name in enumerate(names):
        late = [operand for operand in problem.sized.graph[name].operands if position.get(operand, -1) >= number]
        if late:
            raise InputError(f"the plan runs {name} before {late[0]}, which it reads; make a new one with sft.plan(model, ...)")


def overhead_estimator(
    model: nn.Module, problem: PlanningProblem, device: torch.device, *, cuda_graphs: GraphScope | None
) -> OverheadEstimator:
    """The estimator of device memory that plans of a problem take in addition to tensors."""
    nodes = [node for node in problem.sized.graph.nodes if node.kind in ("parameter", "buffer")]
    weights = {node.name: tensor_attribute(model, node.target) for node in nodes}
    plain = {name: weight for name, weight in weights.items() if weight is not None and type(weight) in (torch.Tensor, nn.Parameter)}
    warn_about_allocator()
    return OverheadEstimator(
        device,
        open_timing_cache(device),
        plain,
        is_training=problem.sized.training,
        cuda_graphs=cuda_graphs,
    )
