"""From a problem to a plan that fits: the one handed in, the planner's, one with less for repeated blocks, one with streamed weights.

Problem and plan go together, as what fits may be a changed problem: weights elsewhere, smaller budgets of repeated blocks.

On a GPU a plan that fits by its projection is tried there (``sft.execute.overhead``). What the device takes besides may be more than the
budget has left; then a plan is looked for that leaves so much.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from sft.analysis.capture import attribute_of
from sft.bands.mesh import LiveMesh, MeshShape
from sft.deep.parameters import streamable
from sft.errors import BudgetError, InputError, UnsupportedError
from sft.execute.costs import open_costs
from sft.execute.function import autocast_off
from sft.execute.overhead import Overheads
from sft.execute.stopwatch import time_step
from sft.options import Options
from sft.placing import check_step, refuse_streaming, weights_to_stream
from sft.plan.carried import Planned, carry_out
from sft.plan.planner import check_device, check_host, plan_segments
from sft.plan.problem import Problem
from sft.plan.repetitions import with_free_budgets, with_smaller_repeats
from sft.plan.rivals import rivals
from sft.plan.types import Plan
from sft.resident import resident_bytes
from sft.sharded import Sharding
from sft.walk.order import parse_order

__all__ = ["Search"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
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
        are_weights_taken: whether the model's weights are streamed already.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | int | None
    sharding: Sharding | None
    mesh: LiveMesh | MeshShape | None
    budget_bytes: int
    options: Options
    given: Plan | None
    made: Plan | None
    device: torch.device
    uses_autocast: bool
    holds_gradients: bool
    are_weights_taken: bool

    @property
    def skips_repeats(self) -> bool:
        """Whether strips may be left out: the options, or a plan that was made so, say it."""
        is_asked = self.options.skip_repeats or (self.given is not None and self.given.skips_repeats)
        return self.mesh is None and is_asked

    def resident_bytes(self, streamed: Collection[str] = ()) -> int:
        """Bytes on the device whether the model runs or not; some weights may be elsewhere."""
        return resident_bytes(self.model, self.optimizer, self.sharding, holds_gradients=self.holds_gradients, streamed=streamed)

    def run(self, problem: Problem) -> tuple[Problem, Planned]:
        """A plan that fits, and the problem that it is for: with weights where they were asked for.

        Raises:
            BudgetError: there is none.
            InputError: the plan that was handed in is for another model.
            UnsupportedError: the weights cannot be streamed.
        """
        if not _takes_more(self.device):
            return self._projected(problem)
        overheads, known = self.overheads(problem), 0
        while True:
            try:
                found, planned = self._projected(problem.with_overhead(known))
            except BudgetError as error:
                raise error if known else _before_trial(error) from None
            tried = _tried(overheads, found, planned)
            if self._fits(found, tried):
                return found, tried
            known = max(tried.projection.overhead_bytes, known + 1)

    def _projected(self, problem: Problem) -> tuple[Problem, Planned]:
        """A plan that fits by its projection, and the problem that it is for."""
        if self.are_weights_taken or self.options.streams_weights or (self.given is not None and self.given.streamed_weights > 0):
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

    def fastest(self, problem: Problem, planned: Planned) -> tuple[Planned, Sequence[float]]:
        """Of a plan and, where the choice is the planner's, its rivals the one that takes least time here; and the seconds of its moves."""
        others = () if self.given is not None else rivals(problem, planned, self.budget_bytes, self.options, self.device.type)
        overheads = self.overheads(problem) if _takes_more(self.device) else None
        with autocast_off(self.device):
            seconds = time_step(problem, planned.region, self.device, progress=self.options.progress)
            for other in others:
                if overheads is not None:
                    other = _tried(overheads, problem, other)
                    if not self._fits(problem, other):
                        continue
                taken = time_step(problem, other.region, self.device, most_seconds=sum(seconds), progress=self.options.progress)
                if taken is not None:
                    planned, seconds = other, taken
        return planned, seconds

    def overheads(self, problem: Problem) -> Overheads:
        """What finds out what plans take besides on this device."""
        weights = {n.name: attribute_of(self.model, n.target) for n in problem.graph.nodes if n.kind in ("parameter", "buffer")}
        plain = {name: weight for name, weight in weights.items() if weight is not None and type(weight) in (torch.Tensor, nn.Parameter)}
        num_streams = 2 if self.options.cuda_graphs else 1
        return Overheads(self.device, open_costs(self.device), plain, num_streams=num_streams, is_training=problem.training)

    def _fits(self, problem: Problem, tried: Planned) -> bool:
        """Whether a plan fits with what the device takes besides."""
        return problem.resident_bytes + tried.projection.peak_bytes + tried.projection.overhead_bytes <= self.budget_bytes

    def _streaming(self, problem: Problem) -> Problem:
        """The same problem with streamed weights."""
        refuse_streaming(self.mesh, self.sharding)
        weights = weights_to_stream(self.model, problem.graph, self.device, self.options)
        own = self.resident_bytes(streamable(self.model))
        check_step(self.model, own, self.budget_bytes)
        return replace(problem, weights=weights, resident_bytes=own)

    def _found(self, problem: Problem) -> tuple[Problem, Planned]:
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

    def _known(self, problem: Problem) -> tuple[Problem, Planned] | None:
        """The plan that the user handed in, where it is for this input, or the one that was made before."""
        handed_in = self._carried_out(problem, self.given)
        if handed_in is not None:
            return handed_in
        try:
            return self._carried_out(problem, self.made)
        except (BudgetError, InputError):  # more is resident now, or the operators of another capture have other names
            return None

    def _carried_out(self, problem: Problem, plan: Plan | None) -> tuple[Problem, Planned] | None:
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
        order = parse_order(plan.order, len(plan.segments)) if plan.order and problem.training else None
        planned = carry_out(problem, tuple(segment.choice for segment in plan.segments), order)
        check_host(planned, self.options.host_budget_bytes)
        check_device(problem, planned, self.budget_bytes)
        return problem, planned


def _check_order(problem: Problem, names: Sequence[str]) -> None:
    """Refuse a plan that runs an operator before one that it reads.

    Raises:
        InputError: it does.
    """
    place = {name: number for number, name in enumerate(names)}
    for number, name in enumerate(names):
        late = [operand for operand in problem.graph[name].operands if place.get(operand, -1) >= number]
        if late:
            raise InputError(f"the plan runs {name} before {late[0]}, which it reads; make a new one with sft.plan(model, ...)")


def _takes_more(device: torch.device) -> bool:
    """Whether a device takes more than tensors."""
    return device.type == "cuda"


def _tried(overheads: Overheads, problem: Problem, planned: Planned) -> Planned:
    """A plan with what the device takes besides."""
    with autocast_off(overheads.device):
        overhead_bytes = overheads.of(problem, planned.region, planned.projection.peak_bytes)
    return replace(planned, projection=replace(planned.projection, overhead_bytes=overhead_bytes))


def _before_trial(error: BudgetError) -> BudgetError:
    """A refusal of plans that nobody has tried on the device."""
    return BudgetError(
        f"{error} On a GPU the allocator's blocks and libraries' workspaces come on top: they are measured when a plan fits without them.",
        needed_bytes=error.needed_bytes,
    )
