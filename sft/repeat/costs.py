"""Repeated blocks inside a model that is compiled: what they are for its programs, and what they take.

The model's planner sees one operator (``sft.analysis.ir.repeat_op``), whose forward and backward are one instruction each. The first one
runs the blocks' schedule up to the loss and leaves what the schedule holds there, the second one runs the rest (``sft.repeat.calls``). So
everything that programs can do holds for repeated blocks as well: they are kept, run again with their stage, or wait on the host. How many
bytes an instruction needs is a sum over the schedule's operations, with the programs that these run, as everywhere.

The schedule itself is that of the blocks' own budget. What they read and make for others (the input, weights, the output, gradients)
belongs to the model's program and is counted there; so what lasts between the passes, the *state*, leaves out the input and the output.
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

#: Without a backward pass behind it; and the two halves of a step.
PassKind = Literal["inference", "forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """What one half of a schedule takes.

    Attributes:
        peak_bytes: most bytes at once, what there is at its beginning included; not the input, weights and arriving gradient.
        left_bytes: what is there at its end, likewise.
        flops: of the programs that it runs.
    """

    peak_bytes: int
    left_bytes: int
    flops: int


def pass_costs(programs: BlockPrograms, plan: RepeatPlan, *, wants_input_grad: bool) -> tuple[PassCost, PassCost]:
    """The two halves of a schedule; what the first leaves are the state and the output, what the second leaves is the input's gradient."""
    first = _pass_cost(programs, plan, plan.operations[: plan.turn], 0, is_first=True, wants_input_grad=wants_input_grad)
    held = first.left_bytes - programs.output_bytes
    return first, _pass_cost(programs, plan, plan.operations[plan.turn + 1 :], held, is_first=False, wants_input_grad=wants_input_grad)


def _pass_cost(
    programs: BlockPrograms, plan: RepeatPlan, operations: Iterable[Operation], held: int, *, is_first: bool, wants_input_grad: bool
) -> PassCost:
    outside = (activation_name(0), activation_name(plan.num_blocks), grad_name(plan.num_blocks))
    out, kept = programs.output_bytes, programs.saved_bytes
    peak, flops = held, 0
    for operation in operations:
        if operation.kind == "free":
            name = operation.value
            if name not in outside:
                held -= kept if name[0] == "s" else programs.grad_bytes if name[0] == "y" else out
            continue
        program = _operation_program(programs, operation, is_first=is_first, wants_input_grad=wants_input_grad)
        peak, flops = max(peak, held + program.peak_bytes), flops + program.flops
        if operation.kind == "forward":
            held += out + (kept if operation.save else 0)
        elif operation.first > 1 or wants_input_grad:
            held += programs.grad_bytes
    if not is_first and not wants_input_grad:
        held = 0
    return PassCost(peak_bytes=peak, left_bytes=held, flops=flops)


def _operation_program(programs: BlockPrograms, operation: Operation, *, is_first: bool, wants_input_grad: bool) -> Program:
    """What the executor runs for an operation."""
    if operation.kind == "backward":
        return programs.backward if operation.first > 1 or wants_input_grad else programs.backward_last
    if operation.save:
        return programs.first_save if is_first else programs.again_save
    return programs.first if is_first else programs.again


@dataclass(eq=False, kw_only=True)
class BlockRepeat:
    """The blocks behind a node of a captured model.

    Attributes:
        block: the module of one block, traced for each size.
        num_blocks: how many there are.
        given_bytes: most bytes that they may hold, where the user has said so; None is no limit.
        strategy: how to look for a schedule.
        device: where they run.
        autocast: the type that autocast casts to, where the capture was under autocast.
        params: names of the parameters.
        fixed: names of the buffers that each block has of its own and that do not change.
        shared: names of the buffers that all blocks share.
        updated: names of the buffers that change.
        is_random: whether masks are drawn in the blocks.
        planned_bytes: the limit by the plan of the model, where the user gave none.
        make: makes what a program calls (``sft.repeat.calls``).
        trace: called with each operation that was run, for tests.
    """

    block: nn.Module
    num_blocks: int
    given_bytes: int | None
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
        """The schedules so far, by what blocks hold."""
        return self._plans

    @property
    def budget_bytes(self) -> int | None:
        """The limit that holds."""
        return self.planned_bytes if self.given_bytes is None else self.given_bytes

    def within(self, num_bytes: int) -> BlockRepeat:
        """The same blocks under a limit that the plan of the model sets."""
        return replace(self, planned_bytes=num_bytes, _plans={})

    def at_hint(self, x: Tensor, tensors: Mapping[str, Tensor]) -> BlockRepeat:
        """The same blocks, with what a trace at the size of a captured input says of them: which buffers change, whether masks are drawn.

        Raises:
            UnsupportedError: the block cannot be traced, or buffers change that all blocks share.
        """
        own = TensorMeta(shape=tuple(_size_hint(size) for size in x.shape), dtype=x.dtype)
        shapes = {name: TensorMeta.of(tensor) for name, tensor in tensors.items()}
        # What a capture switches on for its thread, modes and a dispatcher of its own, must not see what is traced here.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="sft-trace") as elsewhere:
            found = elsewhere.submit(self.programs, own, shapes).result()
        changed = [name for name in found.updated if name in self.shared]
        if changed:
            raise UnsupportedError([f"buffers {', '.join(changed)} change, and all blocks share them; register them as persistent"])
        fixed = tuple(name for name in self.fixed if name not in found.updated)
        return replace(self, fixed=fixed, updated=found.updated, is_random=found.is_random, _programs={}, _plans={})

    def programs(self, x: TensorMeta, tensors: Mapping[str, TensorMeta]) -> BlockPrograms:
        """The programs of a block.

        Args:
            x: the input.
            tensors: of each parameter and buffer the shape (for all blocks, where each has one of its own) and type, and whether it wants
                a gradient.

        Raises:
            UnsupportedError: the block cannot be traced, or does not return what it takes.
        """
        key = (x, tuple(tensors.items()))
        if key not in self._programs:
            own = {name: s if name in self.shared else replace(s, shape=s.shape[1:]) for name, s in tensors.items()}
            params = {name: own[name] for name in self.params}
            buffers = {name: own[name] for name in (*self.fixed, *self.updated, *self.shared)}
            self._programs[key] = lower_block(trace_block(self.block, x, params, buffers, device=self.device, autocast=self.autocast))
        return self._programs[key]

    def plan(self, programs: BlockPrograms, *, param_grad_bytes: int, updated_bytes: int, wants_input_grad: bool) -> RepeatPlan:
        """The schedule for these programs, by the blocks' own budget.

        Args:
            programs: of a block.
            param_grad_bytes: of the gradients of all blocks' parameters.
            updated_bytes: of the buffers' next values.
            wants_input_grad: whether somebody wants the gradient of the input.

        Raises:
            BudgetError: none fits.
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
    """One place in a model where blocks are repeated, at one size.

    Attributes:
        repeated: the blocks.
        programs: of each of them.
        plan: their schedule.
        wants_input_grad: whether the input wants a gradient.
        site: number of the repetition among the random operators of the model.
    """

    repeated: BlockRepeat
    programs: BlockPrograms
    plan: RepeatPlan
    wants_input_grad: bool
    site: int

    @cached_property
    def halves(self) -> tuple[PassCost, PassCost]:
        """What the two halves of the schedule take."""
        return pass_costs(self.programs, self.plan, wants_input_grad=self.wants_input_grad)

    @property
    def least_bytes(self) -> int:
        """What the blocks hold by the smallest schedule of their strategy."""
        (costs,) = [costs for costs, plan in self.repeated.plans.items() if plan is self.plan]
        try:
            return plan_chain(costs, budget_bytes=1, strategy=self.repeated.strategy).projected_peak_bytes
        except BudgetError as error:
            return error.needed_bytes

    @property
    def state_bytes(self) -> int:
        """What the forward pass leaves besides the output."""
        return self.halves[0].left_bytes - self.programs.output_bytes

    def peak_bytes(self, kind: PassKind) -> int:
        """Most bytes at once, above what is there before: not the input, weights, the buffers' next values and gradients of parameters."""
        if kind == "inference":
            return self.programs.first.peak_bytes + (self.programs.output_bytes if self.plan.num_blocks > 1 else 0)
        return self.halves[0].peak_bytes if kind == "forward" else self.halves[1].peak_bytes - self.state_bytes

    def flops(self, kind: PassKind) -> int:
        """Of all programs that run."""
        if kind == "inference":
            return self.plan.num_blocks * self.programs.first.flops
        return self.halves[kind == "backward"].flops

    @property
    def extra_flops(self) -> int:
        """Of those of the backward pass the ones of blocks that run again, which plain PyTorch runs once."""
        again = sum(operation.kind == "forward" for operation in self.plan.operations[self.plan.turn :])
        return again * self.programs.again.flops

    def function(self, kind: PassKind) -> Callable[..., Any]:
        """What runs it."""
        return self.repeated.make(self, kind)


def _size_hint(size: int | torch.SymInt) -> int:
    """A size as it was when the model was captured."""
    return size if isinstance(size, int) else int(size.node.hint)
