"""Lowering rule of ``sft::repeat``: one forward and one backward instruction.

Blocks run on contiguous tensors, as traced; images, which programs lay out channels last, are copied. The forward instruction computes the
next values of buffers; their own nodes take them from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.analysis.ir.graph import refs_in
from sft.analysis.ir.repeat_op import REPEAT_NEXT
from sft.common.errors import BudgetError, InternalError, UnsupportedError
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.rules.base import Rule
from sft.repeat.costs import BlockRepeat, PassKind, RepeatSite
from sft.repeat.lowering import BlockPrograms
from sft.repeat.plan import RepeatPlan
from sft.repeat.trace import TensorMeta

__all__ = ["NextValueRule", "RepeatedBlocksRule"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _RepeatInputs:
    """Inputs of a repetition, as slots.

    Attributes:
        x: the input, contiguous.
        params: stacked parameters.
        fixed: stacked buffers that do not change.
        shared: buffers that all blocks share.
        updated: stacked buffers that change.
        seed: seed of random masks, if any.
    """

    x: Slot
    params: tuple[Slot, ...]
    fixed: tuple[Slot, ...]
    shared: tuple[Slot, ...]
    updated: tuple[Slot, ...]
    seed: Slot | None


class RepeatedBlocksRule(Rule):
    """All blocks, on untiled tensors."""

    saves_output = True

    def forward(self, ctx: NodeContext) -> Slot:
        repeated, builder, scope = _repeat_node(ctx), ctx.builder, ctx.scope
        inputs = _repeat_inputs(ctx)
        programs = _programs(ctx, repeated, inputs)
        call = RepeatSite(
            repeated=repeated,
            programs=programs,
            plan=_plan(ctx, repeated, programs, inputs),
            wants_input_grad=ctx.needs_grad(ctx.node.argument("x")),
            site=ctx.node.argument("site", 0),
        )
        out = builder.slot(inputs.x.shape, inputs.x.dtype)
        next_values = tuple(builder.slot(slot.shape, slot.dtype) for slot in inputs.updated)
        arguments = (inputs.x, inputs.params, inputs.fixed, inputs.shared, inputs.updated, inputs.seed)
        kind: PassKind = "inference"
        outputs = (out, *next_values)
        if ctx.has_backward and ctx.node.name in scope.requires_grad:
            kind, residuals = "forward", builder.slot((call.residual_bytes,), torch.uint8)
            outputs = (out, residuals, *next_values)
            ctx.saved.update(call=call, inputs=inputs, out=out, residuals=residuals)
        peak_bytes = call.peak_bytes(kind) + _bytes(next_values)
        builder.call_measured(call.function(kind), arguments, outputs, peak_bytes=peak_bytes, flops=call.flops(kind))
        for user in scope.graph.users[ctx.node.name]:
            if scope.graph[user].target == REPEAT_NEXT:
                if user not in scope.names:
                    raise InternalError(f"{ctx.node.label}: the next value of a buffer is not made where the blocks run")
                ctx.global_slots[user] = next_values[scope.graph[user].argument("index")]
        return out

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, saved = ctx.builder, ctx.saved
        inputs: _RepeatInputs = saved["inputs"]
        call: RepeatSite = saved["call"]
        repeated, programs = call.repeated, call.programs
        names = dict(zip(repeated.params, (ref.name for ref in ctx.node.argument("params")), strict=True))
        sums = tuple(ctx.global_grad(names[name]) for name in programs.with_gradient)
        output_grad = _channels_first(ctx, grad)
        input_grad = builder.slot(inputs.x.shape, inputs.x.dtype) if call.wants_input_grad else None
        out = saved["out"] if programs.reads_output else None
        arguments = (output_grad, inputs.x, out, saved["residuals"], inputs.params, inputs.fixed, inputs.shared, sums, inputs.seed)
        peak_bytes, flops = call.peak_bytes("backward"), call.flops("backward")
        builder.call_measured(call.function("backward"), arguments, (input_grad,), writes=sums, peak_bytes=peak_bytes, flops=flops)
        if input_grad is not None:
            ctx.add_grad(ctx.node.argument("x"), input_grad, owned=True)


class NextValueRule(Rule):
    """Next value of a buffer."""

    def forward(self, ctx: NodeContext) -> Slot:
        return ctx.global_slots[ctx.node.name]

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        raise AssertionError("the next value of a buffer has no gradient")


def _repeat_node(ctx: NodeContext) -> BlockRepeat:
    """The blocks of a node."""
    repeated: BlockRepeat = ctx.node.argument("which")
    return repeated


def _repeat_inputs(ctx: NodeContext) -> _RepeatInputs:
    """Inputs of a node."""
    node = ctx.node

    def slots(argument: str) -> tuple[Slot, ...]:
        return tuple(ctx.global_slot(name) for name in refs_in(node.argument(argument)))

    seed = node.argument("seed")
    return _RepeatInputs(
        x=_channels_first(ctx, ctx.operand_slot(node.argument("x"))),
        params=slots("params"),
        fixed=slots("fixed"),
        shared=slots("shared"),
        updated=slots("updated"),
        seed=None if seed is None else ctx.global_slot(next(refs_in(seed))),
    )


def _channels_first(ctx: NodeContext, slot: Slot) -> Slot:
    """A contiguous copy of an image; other tensors are contiguous already."""
    if len(slot.shape) not in CHANNELS_LAST:
        return slot
    keywords = {"memory_format": torch.contiguous_format}
    return ctx.builder.call(aten.clone.default, slot, shape=slot.shape, dtype=slot.dtype, keywords=keywords)


def _programs(ctx: NodeContext, repeated: BlockRepeat, inputs: _RepeatInputs) -> BlockPrograms:
    """Programs of a block at the node's shapes."""
    groups: tuple[tuple[tuple[str, ...], tuple[Slot, ...], str], ...] = (
        (repeated.params, inputs.params, "params"),
        (repeated.fixed, inputs.fixed, "fixed"),
        (repeated.updated, inputs.updated, "updated"),
        (repeated.shared, inputs.shared, "shared"),
    )
    tensors: dict[str, TensorMeta] = {}
    for names, slots, argument in groups:
        for name, slot, ref in zip(names, slots, refs_in(ctx.node.argument(argument)), strict=True):
            tensors[name] = TensorMeta(shape=slot.shape, dtype=slot.dtype, requires_grad=ref in ctx.scope.requires_grad)
    try:
        programs = repeated.programs(TensorMeta(shape=inputs.x.shape, dtype=inputs.x.dtype), tensors)
    except UnsupportedError as error:
        raise UnsupportedError([f"{ctx.node.label}: {problem}" for problem in error.problems]) from error
    if programs.updated != repeated.updated:
        raise InternalError(f"{ctx.node.label}: at this size other buffers change than at the captured one")
    return programs


def _plan(ctx: NodeContext, repeated: BlockRepeat, programs: BlockPrograms, inputs: _RepeatInputs) -> RepeatPlan:
    """The schedule at the node's shapes."""
    sizes: dict[str, Any] = dict(zip(repeated.params, inputs.params, strict=True))
    try:
        return repeated.plan(
            programs,
            param_grad_bytes=sum(sizes[name].num_bytes for name in programs.with_gradient),
            updated_bytes=_bytes(inputs.updated),
            wants_input_grad=ctx.needs_grad(ctx.node.argument("x")),
        )
    except BudgetError as error:
        raise BudgetError(f"{ctx.node.label}: {error}", needed_bytes=error.needed_bytes) from error


def _bytes(slots: tuple[Slot, ...]) -> int:
    return sum(slot.num_bytes for slot in slots)
