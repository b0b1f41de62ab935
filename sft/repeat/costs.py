"""Repeated blocks inside a compiled model: their programs, schedule and memory.

The planner sees one operator (``sft.analysis.ir.repeat_op``), with one instruction for its forward and one for its backward. The forward
runs the blocks' schedule up to the loss and leaves its live tensors as residuals, the backward runs the remaining operations (`calls`). So
repeated blocks can be kept, recomputed with their stage, or offloaded like any operator. The bytes of an instruction are a sum over the
schedule's operations, with the programs that these run.

The schedule is made for the blocks' own budget. Tensors shared with the model (input, weights, output, gradients) are counted in the
model's program, so the residuals exclude the input and the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sft.common.errors import BudgetError, UnsupportedError
from sft.lower.program import Program
from sft.repeat.lowering import BlockPrograms, lower_block
from sft.repeat.plan import RepeatCosts, RepeatPlan, Strategy, plan_chain
from sft.repeat.trace import TensorMeta, trace_block
from sft.solvers.schedule import Operation, activation_name, grad_name

__all__ = ["BlockRepeat", "PassCost", "PassKind", "RepeatSite", "pass_costs"]

#: A pass without gradients; and the two halves of a step.
PassKind = Literal["inference", "forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """Cost of one half of a schedule.

    Attributes:
        peak_bytes: most bytes at once, including those at its start; without the input, weights and incoming gradient.
        left_bytes: bytes at its end, counted likewise.
        flops: FLOPs of the programs that it runs.
    """

    peak_bytes: int
    left_bytes: int
    flops: int


def pass_costs(programs: BlockPrograms, plan: RepeatPlan, *, wants_input_grad: bool) -> tuple[PassCost, PassCost]:
    """Costs of the two halves. The first leaves residuals and output, the second leaves the input's gradient."""
    first = _pass_cost(programs, plan, plan.operations[: plan.turn], 0, is_first=True, wants_input_grad=wants_input_grad)
    residual_bytes = first.left_bytes - programs.output_bytes
    return first, _pass_cost(
        programs, plan, plan.operations[plan.turn + 1 :], residual_bytes, is_first=False, wants_input_grad=wants_input_grad
    )


def _pass_cost(
    programs: BlockPrograms,
    plan: RepeatPlan,
    operations: Iterable[Operation],
    current_bytes: int,
    *,
    is_first: bool,
    wants_input_grad: bool,
) -> PassCost:
    """Cost of one half, which starts with ``current_bytes``."""
    external = (activation_name(0), activation_name(plan.num_blocks), grad_name(plan.num_blocks))
    output_bytes, saved_bytes = programs.output_bytes, programs.saved_bytes
    peak_bytes, flops = current_bytes, 0
    for operation in operations:
        if operation.kind == "free":
            name = operation.value
            if name not in external:
                current_bytes -= saved_bytes if name[0] == "s" else programs.grad_bytes if name[0] == "y" else output_bytes
            continue
        program = _operation_program(programs, operation, is_first=is_first, wants_input_grad=wants_input_grad)
        peak_bytes, flops = max(peak_bytes, current_bytes + program.peak_bytes), flops + program.flops
        if operation.kind == "forward":
            current_bytes += output_bytes + (saved_bytes if operation.save else 0)
        elif operation.first > 1 or wants_input_grad:
            current_bytes += programs.grad_bytes
    if not is_first and not wants_input_grad:
        current_bytes = 0
    return PassCost(peak_bytes=peak_bytes, left_bytes=current_bytes, flops=flops)


def _operation_program(programs: BlockPrograms, operation: Operation, *, is_first: bool, wants_input_grad: bool) -> Program:
    """The program that the executor runs for an operation."""
    if operation.kind == "backward":
        return programs.backward if operation.first > 1 or wants_input_grad else programs.backward_last
    if operation.save:
        return programs.first_save if is_first else programs.again_save
    return programs.first if is_first else programs.again


@dataclass(eq=False, kw_only=True)
class BlockRepeat:
    """The blocks of a ``repeat`` node in a captured model.

    Attributes:
        block: module of one block, traced for each size.
        num_blocks: number of blocks.
        user_budget_bytes: budget set by the user; None if not set.
        strategy: strategy of the schedule.
        device: device of the blocks.
        autocast: element type of autocast, if the capture was under autocast.
        params: names of the parameters.
        fixed: names of the buffers that each block owns and that do not change.
        shared: names of the buffers that all blocks share.
        updated: names of the buffers that change.
        is_random: True if the blocks draw random masks.
        planned_bytes: budget set by the plan of the model, if the user set none.
        make: creates the function of a pass (`calls`).
        trace: called with each operation that has run, for tests.
    """

    block: nn.Module
    num_blocks: int
    user_budget_bytes: int | None
    strategy: Strategy
    device: torch.device
    autocast: torch.dtype | None
    params: tuple[str, ...]
    fixed: tuple[str, ...]
    shared: tuple[str, ...]
    make: Callable[[RepeatSite, PassKind], Callable[..., Any]]
    updated: tuple[str, ...] = ()
    is_random: bool = False
    planned_bytes: int | None = None
    trace: Callable[[str], None] | None = None
    _programs: dict[Any, BlockPrograms] = field(default_factory=dict, repr=False)
    _plans: dict[RepeatCosts, RepeatPlan] = field(default_factory=dict, repr=False)

    @property
    def plans(self) -> Mapping[RepeatCosts, RepeatPlan]:
        """Schedules made so far, by the costs of the blocks."""
        return self._plans

    @property
    def budget_bytes(self) -> int | None:
        """The effective budget."""
        return self.planned_bytes if self.user_budget_bytes is None else self.user_budget_bytes

    def within(self, num_bytes: int) -> BlockRepeat:
        """The same blocks with a budget from the plan of the model."""
        return replace(self, planned_bytes=num_bytes, _plans={})

    def at_hint(self, x: Tensor, tensors: Mapping[str, Tensor]) -> BlockRepeat:
        """The same blocks, with facts from a trace at the size of a captured input: the buffers that change, and if masks are drawn.

        Raises:
            UnsupportedError: the block cannot be traced, or shared buffers change.
        """
        meta = TensorMeta(shape=tuple(_size_hint(size) for size in x.shape), dtype=x.dtype)
        shapes = {name: TensorMeta.of(tensor) for name, tensor in tensors.items()}
        # Another thread, since the capture's dispatch modes are active in this one and must not see this trace.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="sft-trace") as pool:
            programs = pool.submit(self.programs, meta, shapes).result()
        changed = [name for name in programs.updated if name in self.shared]
        if changed:
            raise UnsupportedError([f"buffers {', '.join(changed)} change, and all blocks share them; register them as persistent"])
        fixed = tuple(name for name in self.fixed if name not in programs.updated)
        return replace(self, fixed=fixed, updated=programs.updated, is_random=programs.is_random, _programs={}, _plans={})

    def programs(self, x: TensorMeta, tensors: Mapping[str, TensorMeta]) -> BlockPrograms:
        """Programs of a block, traced once for each size.

        Args:
            x: the input.
            tensors: shape (stacked over the blocks, except for shared buffers), type and need of a gradient of each parameter and buffer.

        Raises:
            UnsupportedError: the block cannot be traced, or its output differs from its input in shape or type.
        """
        key = (x, tuple(tensors.items()))
        if key not in self._programs:
            block_tensors = {name: meta if name in self.shared else replace(meta, shape=meta.shape[1:]) for name, meta in tensors.items()}
            params = {name: block_tensors[name] for name in self.params}
            buffers = {name: block_tensors[name] for name in (*self.fixed, *self.updated, *self.shared)}
            self._programs[key] = lower_block(trace_block(self.block, x, params, buffers, device=self.device, autocast=self.autocast))
        return self._programs[key]

    def plan(self, programs: BlockPrograms, *, param_grad_bytes: int, updated_bytes: int, wants_input_grad: bool) -> RepeatPlan:
        """The schedule for these programs under the blocks' budget.

        Args:
            programs: programs of a block.
            param_grad_bytes: bytes of the gradients of all blocks' parameters.
            updated_bytes: bytes of the buffers' next values.
            wants_input_grad: True if the input needs a gradient.

        Raises:
            BudgetError: no schedule fits.
        """
        costs = RepeatCosts.of(
            programs,
            self.num_blocks,
            wants_input_grad=wants_input_grad,
            forward_extra_bytes=updated_bytes,
            backward_extra_bytes=param_grad_bytes,
        )
        if costs not in self._plans:
            self._plans[costs] = plan_chain(costs, budget_bytes=self.budget_bytes, strategy=self.strategy)
        return self._plans[costs]


@dataclass(frozen=True, eq=False, kw_only=True)
class RepeatSite:
    """One repetition in a model, at one size.

    Attributes:
        repeated: the blocks.
        programs: programs of a block.
        plan: the schedule.
        wants_input_grad: True if the input needs a gradient.
        site: number of the repetition among the model's random operators.
    """

    repeated: BlockRepeat
    programs: BlockPrograms
    plan: RepeatPlan
    wants_input_grad: bool
    site: int

    @cached_property
    def halves(self) -> tuple[PassCost, PassCost]:
        """Costs of the two halves of the schedule."""
        return pass_costs(self.programs, self.plan, wants_input_grad=self.wants_input_grad)

    @property
    def least_bytes(self) -> int:
        """Bytes of the smallest schedule of the strategy."""
        (costs,) = [costs for costs, plan in self.repeated.plans.items() if plan is self.plan]
        try:
            return plan_chain(costs, budget_bytes=1, strategy=self.repeated.strategy).projected_peak_bytes
        except BudgetError as error:
            return error.needed_bytes

    @property
    def residual_bytes(self) -> int:
        """Residual bytes of the forward pass, without the output."""
        return self.halves[0].left_bytes - self.programs.output_bytes

    def peak_bytes(self, kind: PassKind) -> int:
        """Most bytes of a pass beyond those before it, without the input, weights, next values of buffers and gradients of parameters."""
        if kind == "inference":
            return self.programs.first.peak_bytes + (self.programs.output_bytes if self.plan.num_blocks > 1 else 0)
        return self.halves[0].peak_bytes if kind == "forward" else self.halves[1].peak_bytes - self.residual_bytes

    def flops(self, kind: PassKind) -> int:
        """FLOPs of all programs of a pass."""
        if kind == "inference":
            return self.plan.num_blocks * self.programs.first.flops
        return self.halves[kind == "backward"].flops

    @property
    def extra_flops(self) -> int:
        """FLOPs of recomputed blocks in the backward pass."""
        num_recomputed = sum(operation.kind == "forward" for operation in self.plan.operations[self.plan.turn :])
        return num_recomputed * self.programs.again.flops

    def function(self, kind: PassKind) -> Callable[..., Any]:
        """The function of a pass."""
        return self.repeated.make(self, kind)


def _size_hint(size: int | torch.SymInt) -> int:
    """A size at the time of the capture."""
    return size if isinstance(size, int) else int(size.node.hint)
