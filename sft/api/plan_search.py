"""From a problem to a plan that fits: the one handed in, the planner's, one with less for repeated blocks, one with streamed weights.

Problem and plan go together, as what fits may be a changed problem: weights elsewhere, smaller budgets of repeated blocks.

On a GPU a plan that fits by its projection is tried there (``sft.planner.measured.allocator_overhead``). What the device takes besides may
be more than the budget has left; then a plan is looked for that leaves so much.

Bytes that a model holds on the card whether it runs or not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from sft.analysis.frontend.capture import tensor_attribute
from sft.api.weight_placement import check_can_stream, check_optimizer_step, weights_to_stream
from sft.common.errors import BudgetError, InputError, UnsupportedError
from sft.distributed.fsdp import ShardedWeights, local_bytes
from sft.distributed.mesh import LiveMesh, MeshShape
from sft.planner.materialize import ProjectedPlan, materialize
from sft.planner.measured.allocator_overhead import OverheadEstimator
from sft.planner.measured.step_timer import time_step
from sft.planner.options import Options
from sft.planner.plan import Plan
from sft.planner.planner import check_device, check_host, plan_segments
from sft.planner.problem import PlanningProblem
from sft.planner.repeat_budgets import with_free_budgets, with_smaller_repeats
from sft.planner.search.timed import timing_candidates
from sft.runtime.moves import parse_schedule
from sft.torch_runtime.autograd import autocast_disabled
from sft.torch_runtime.profiling import open_timing_cache
from sft.torch_runtime.streamed_parameters import streamable_parameters

__all__ = ["PlanSearch", "resident_bytes"]


def resident_bytes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | int | None,
    sharding: ShardedWeights | None = None,
    *,
    holds_gradients: bool = False,
    streamed: Collection[str] = (),
) -> int:
    """Bytes of parameters, their gradients, buffers and the optimizer's state.

    Args:
        model: the model.
        optimizer: the optimizer, if its state is to be counted, or the bytes of that.
        sharding: the parameters that are sharded.
        holds_gradients: whether whole gradients of these wait for more.
        streamed: parameters that are elsewhere, with their gradients and state.
    """
    sharded = {} if sharding is None else sharding.sizes
    parameters = [p for name, p in model.named_parameters() if name not in sharded and name not in streamed]
    size = 0 if sharding is None else sharding.resident_bytes(holds_gradients=holds_gradients)
    size += sum(p.numel() * p.element_size() for p in parameters)
    size += sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    size += sum(b.numel() * b.element_size() for b in model.buffers())
    elsewhere = {id(p) for name, p in model.named_parameters() if name in streamed}
    return size + _optimizer_bytes(optimizer, elsewhere)


def _optimizer_bytes(optimizer: torch.optim.Optimizer | int | None, elsewhere: Collection[int]) -> int:
    """Bytes of an optimizer's state: what it holds, or will hold after its first step; that of some parameters, by id, is elsewhere."""
    if optimizer is None or isinstance(optimizer, int):
        return optimizer or 0
    states = (state for param, state in optimizer.state.items() if id(param) not in elsewhere)
    held = sum(local_bytes(v) for s in states for v in s.values() if isinstance(v, torch.Tensor))
    if held:
        return held
    total = 0
    for group in optimizer.param_groups:
        size = sum(local_bytes(p) for p in group["params"] if p.requires_grad and id(p) not in elsewhere)
        if isinstance(optimizer, torch.optim.SGD):
            copies = 1 if group.get("momentum") else 0
        else:
            copies = 3 if group.get("amsgrad") else 2
        total += copies * size
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """What a plan is looked for with, besides the problem.

    Attributes:
        model: the model.
        optimizer: its state counts as resident.
        sharding: the model's weights, where they are sharded.
        mesh: the ranks that share an image.
        budget_bytes: what the device may hold.
        options: wishes about plans.
        given: a plan that the user handed in.
        made: the plan that was made for this kind of call before, where its programs have been dropped since.
        device: where the model is.
        uses_autocast: whether the problem was captured under autocast.
        holds_gradients: whether whole gradients of sharded weights wait for more.
        are_weights_streamed: whether the model's weights are streamed already.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | int | None
    sharding: ShardedWeights | None
    mesh: LiveMesh | MeshShape | None
    budget_bytes: int
    options: Options
    given: Plan | None
    made: Plan | None
    device: torch.device
    uses_autocast: bool
    holds_gradients: bool
    are_weights_streamed: bool

    @property
    def skips_repeats(self) -> bool:
        """Whether strips may be left out: the options, or a plan that was made so, say it."""
        is_asked = self.options.skip_repeats or (self.given is not None and self.given.skips_repeats)
        return self.mesh is None and is_asked

    def resident_bytes(self, streamed: Collection[str] = ()) -> int:
        """Bytes on the device whether the model runs or not; some weights may be elsewhere."""
        return resident_bytes(self.model, self.optimizer, self.sharding, holds_gradients=self.holds_gradients, streamed=streamed)

    def run(self, problem: PlanningProblem) -> tuple[PlanningProblem, ProjectedPlan]:
        """A plan that fits, and the problem that it is for: with weights where they were asked for.

        Raises:
            BudgetError: there is none.
            InputError: the plan that was handed in is for another model.
            UnsupportedError: the weights cannot be streamed.
        """
        if not _has_device_overhead(self.device):
            return self._projected(problem)
        overheads, known = self.overheads(problem), 0
        while True:
            try:
                found, planned = self._projected(problem.with_overhead(known))
            except BudgetError as error:
                raise error if known else _unmeasured_error(error) from None
            tried = _with_measured_overhead(overheads, found, planned)
            if self._fits(found, tried):
                return found, tried
            known = max(tried.projection.overhead_bytes, known + 1)

    def _projected(self, problem: PlanningProblem) -> tuple[PlanningProblem, ProjectedPlan]:
        """A plan that fits by its projection, and the problem that it is for."""
        if self.are_weights_streamed or self.options.streams_weights or (self.given is not None and self.given.streamed_weights > 0):
            streamed = self._streaming(problem)
            return self._known(streamed) or self._found(streamed)
        try:
            return self._known(problem) or self._found(problem)
        except BudgetError as error:
            if self.options.weights != "auto":
                raise
            refused = error
        try:
            return self._found(self._streaming(problem))
        except UnsupportedError:
            raise refused from None
        except BudgetError as error:
            raise min(refused, error, key=lambda each: each.needed_bytes) from None

    def fastest(self, problem: PlanningProblem, planned: ProjectedPlan) -> tuple[ProjectedPlan, Sequence[float]]:
        """Of a plan and, where the choice is the planner's, its rivals the one that takes least time here; and the seconds of its moves."""
        others = () if self.given is not None else timing_candidates(problem, planned, self.budget_bytes, self.options, self.device.type)
        overheads = self.overheads(problem) if _has_device_overhead(self.device) else None
        with autocast_disabled(self.device):
            seconds = time_step(problem, planned.region, self.device, progress=self.options.progress)
            for other in others:
                if overheads is not None:
                    other = _with_measured_overhead(overheads, problem, other)
                    if not self._fits(problem, other):
                        continue
                taken = time_step(problem, other.region, self.device, max_seconds=sum(seconds), progress=self.options.progress)
                if taken is not None:
                    planned, seconds = other, taken
        return planned, seconds

    def overheads(self, problem: PlanningProblem) -> OverheadEstimator:
        """What finds out what plans take besides on this device."""
        weights = {n.name: tensor_attribute(self.model, n.target) for n in problem.graph.nodes if n.kind in ("parameter", "buffer")}
        plain = {name: weight for name, weight in weights.items() if weight is not None and type(weight) in (torch.Tensor, nn.Parameter)}
        num_streams = 2 if self.options.cuda_graphs else 1
        return OverheadEstimator(self.device, open_timing_cache(self.device), plain, num_streams=num_streams, is_training=problem.training)

    def _fits(self, problem: PlanningProblem, tried: ProjectedPlan) -> bool:
        """Whether a plan fits with what the device takes besides."""
        return problem.resident_bytes + tried.projection.peak_bytes + tried.projection.overhead_bytes <= self.budget_bytes

    def _streaming(self, problem: PlanningProblem) -> PlanningProblem:
        """The same problem with streamed weights."""
        check_can_stream(self.mesh, self.sharding)
        weights = weights_to_stream(self.model, problem.graph, self.device, self.options)
        own = self.resident_bytes(streamable_parameters(self.model))
        check_optimizer_step(self.model, own, self.budget_bytes)
        return replace(problem, weights=weights, resident_bytes=own)

    def _found(self, problem: PlanningProblem) -> tuple[PlanningProblem, ProjectedPlan]:
        """The planner's plan: where none fits at first, one with less for repeated blocks."""
        try:
            return problem, plan_segments(problem, self.budget_bytes, self.options, self.device.type)
        except BudgetError as error:
            refused = error
        for smaller in with_smaller_repeats(problem):
            try:
                return smaller, plan_segments(smaller, self.budget_bytes, self.options, self.device.type)
            except BudgetError as error:
                refused = min(refused, error, key=lambda each: each.needed_bytes)
        raise refused

    def _known(self, problem: PlanningProblem) -> tuple[PlanningProblem, ProjectedPlan] | None:
        """The plan that the user handed in, where it is for this input, or the one that was made before."""
        handed_in = self._materialize_plan(problem, self.given)
        if handed_in is not None:
            return handed_in
        try:
            return self._materialize_plan(problem, self.made)
        except (BudgetError, InputError):  # more is resident now, or the operators of another capture have other names
            return None

    def _materialize_plan(self, problem: PlanningProblem, plan: Plan | None) -> tuple[PlanningProblem, ProjectedPlan] | None:
        """A plan on this problem, where it is for this input."""
        shapes = tuple(problem.shapes[name] for name in problem.graph.inputs)
        if plan is None or plan.input_shapes != shapes or plan.training != problem.training:
            return None
        if plan.input_placements != problem.input_placements or plan.output_placements != problem.output_placements:
            return None
        if (plan.streamed_weights > 0) != (problem.weights is not None):
            return None
        named = [name for segment in plan.segments for name in segment.nodes]
        if sorted(named) != sorted(problem.operators):
            if self.uses_autocast:
                return None  # made for calls without autocast, which have other operators
            raise InputError("the plan names other operators than the model has; make a new one with sft.plan(model, ...)")
        _check_order(problem, named)
        if plan.repeat_budgets:
            problem = with_free_budgets(problem, plan.repeat_budgets)
        order = parse_schedule(plan.order, len(plan.segments)) if plan.order and problem.training else None
        planned = materialize(problem, tuple(segment.choice for segment in plan.segments), order)
        check_host(planned, self.options.host_budget_bytes)
        check_device(problem, planned, self.budget_bytes)
        return problem, planned


def _check_order(problem: PlanningProblem, names: Sequence[str]) -> None:
    """Refuse a plan that runs an operator before one that it reads.

    Raises:
        InputError: it does.
    """
    place = {name: number for number, name in enumerate(names)}
    for number, name in enumerate(names):
        late = [operand for operand in problem.graph[name].operands if place.get(operand, -1) >= number]
        if late:
            raise InputError(f"the plan runs {name} before {late[0]}, which it reads; make a new one with sft.plan(model, ...)")


def _has_device_overhead(device: torch.device) -> bool:
    """Whether a device takes more than tensors."""
    return device.type == "cuda"


def _with_measured_overhead(overheads: OverheadEstimator, problem: PlanningProblem, planned: ProjectedPlan) -> ProjectedPlan:
    """A plan with what the device takes besides."""
    with autocast_disabled(overheads.device):
        overhead_bytes = overheads.overhead_bytes(problem, planned.region, planned.projection.peak_bytes)
    return replace(planned, projection=replace(planned.projection, overhead_bytes=overhead_bytes))


def _unmeasured_error(error: BudgetError) -> BudgetError:
    """A refusal of plans that nobody has tried on the device."""
    return BudgetError(
        f"{error} On a GPU the allocator's blocks and libraries' workspaces come on top: they are measured when a plan fits without them.",
        needed_bytes=error.needed_bytes,
    )
