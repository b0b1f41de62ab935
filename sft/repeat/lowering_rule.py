"""Repeated blocks: two instructions for all of them, one for each half of their schedule (``sft.repeat.costs``).

Blocks run on tensors that are laid out as they were traced, channels first; images, which are channels last, are copied. The next values of
buffers are made by the first instruction, and their own nodes take them from there.
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
    """What a repetition reads, as slots.

    Attributes:
        x: the input, channels first.
        params: of all blocks, and so on.
        seed: of random masks, if there are any.
    """

    x: Slot
    params: tuple[Slot, ...]
    fixed: tuple[Slot, ...]
    shared: tuple[Slot, ...]
    updated: tuple[Slot, ...]
    seed: Slot | None


class RepeatedBlocksRule(Rule):
    """All blocks, on whole tensors."""

    saves_output = True

    def forward(self, ctx: NodeContext) -> Slot:
        own, e, scope = _repeat_node(ctx), ctx.emitter, ctx.scope
        given = _repeat_inputs(ctx)
        programs = _programs(ctx, own, given)
        call = RepeatSite(
            repeated=own,
            programs=programs,
            plan=_plan(ctx, own, programs, given),
            wants_input_grad=ctx.needs_grad(ctx.node.argument("x")),
            site=ctx.node.argument("site", 0),
        )
        out = e.slot(given.x.shape, given.x.dtype)
        nexts = tuple(e.slot(slot.shape, slot.dtype) for slot in given.updated)
        arguments = (given.x, given.params, given.fixed, given.shared, given.updated, given.seed)
        kind: PassKind = "inference"
        outputs = (out, *nexts)
        if ctx.keeps and ctx.node.name in scope.requires_grad:
            kind, state = "forward", e.slot((call.state_bytes,), torch.uint8)
            outputs = (out, state, *nexts)
            ctx.saved.update(call=call, given=given, out=out, state=state)
        peak_bytes = call.peak_bytes(kind) + _bytes(nexts)
        e.call_measured(call.function(kind), arguments, outputs, peak_bytes=peak_bytes, flops=call.flops(kind))
        for user in scope.graph.users[ctx.node.name]:
            if scope.graph[user].target == REPEAT_NEXT:
                if user not in scope.names:
                    raise InternalError(f"{ctx.node.label}: the next value of a buffer is not made where the blocks run")
                ctx.wholes[user] = nexts[scope.graph[user].argument("index")]
        return out

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        e, saved = ctx.emitter, ctx.saved
        given: _RepeatInputs = saved["given"]
        call: RepeatSite = saved["call"]
        own, programs = call.repeated, call.programs
        names = dict(zip(own.params, (ref.name for ref in ctx.node.argument("params")), strict=True))
        sums = tuple(ctx.global_grad(names[name]) for name in programs.with_gradient)
        gradient = _channels_first(ctx, grad)
        found = e.slot(given.x.shape, given.x.dtype) if call.wants_input_grad else None
        out = saved["out"] if programs.reads_output else None
        arguments = (gradient, given.x, out, saved["state"], given.params, given.fixed, given.shared, sums, given.seed)
        peak_bytes, flops = call.peak_bytes("backward"), call.flops("backward")
        e.call_measured(call.function("backward"), arguments, (found,), writes=sums, peak_bytes=peak_bytes, flops=flops)
        if found is not None:
            ctx.add_grad(ctx.node.argument("x"), found, owned=True)


class NextValueRule(Rule):
    """What a buffer holds after the call."""

    saves_input = False

    def forward(self, ctx: NodeContext) -> Slot:
        return ctx.wholes[ctx.node.name]

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        raise AssertionError("the next value of a buffer has no gradient")


def _repeat_node(ctx: NodeContext) -> BlockRepeat:
    found: BlockRepeat = ctx.node.argument("which")
    return found


def _repeat_inputs(ctx: NodeContext) -> _RepeatInputs:
    node = ctx.node

    def wholes(argument: str) -> tuple[Slot, ...]:
        return tuple(ctx.whole(name) for name in refs_in(node.argument(argument)))

    seed = node.argument("seed")
    return _RepeatInputs(
        x=_channels_first(ctx, ctx.operand_slot(node.argument("x"))),
        params=wholes("params"),
        fixed=wholes("fixed"),
        shared=wholes("shared"),
        updated=wholes("updated"),
        seed=None if seed is None else ctx.whole(next(refs_in(seed))),
    )


def _channels_first(ctx: NodeContext, slot: Slot) -> Slot:
    if len(slot.shape) not in CHANNELS_LAST:
        return slot
    keywords = {"memory_format": torch.contiguous_format}
    return ctx.emitter.call(aten.clone.default, slot, shape=slot.shape, dtype=slot.dtype, keywords=keywords)


def _programs(ctx: NodeContext, own: BlockRepeat, given: _RepeatInputs) -> BlockPrograms:
    groups: tuple[tuple[tuple[str, ...], tuple[Slot, ...], str], ...] = (
        (own.params, given.params, "params"),
        (own.fixed, given.fixed, "fixed"),
        (own.updated, given.updated, "updated"),
        (own.shared, given.shared, "shared"),
    )
    tensors: dict[str, TensorMeta] = {}
    for names, slots, argument in groups:
        for name, slot, ref in zip(names, slots, refs_in(ctx.node.argument(argument)), strict=True):
            tensors[name] = TensorMeta(shape=slot.shape, dtype=slot.dtype, requires_grad=ref in ctx.scope.requires_grad)
    try:
        programs = own.programs(TensorMeta(shape=given.x.shape, dtype=given.x.dtype), tensors)
    except UnsupportedError as error:
        raise UnsupportedError([f"{ctx.node.label}: {problem}" for problem in error.problems]) from error
    if programs.updated != own.updated:
        raise InternalError(f"{ctx.node.label}: at this size other buffers change than at the captured one")
    return programs


def _plan(ctx: NodeContext, own: BlockRepeat, programs: BlockPrograms, given: _RepeatInputs) -> RepeatPlan:
    sizes: dict[str, Any] = dict(zip(own.params, given.params, strict=True))
    try:
        return own.plan(
            programs,
            param_grad_bytes=sum(sizes[name].num_bytes for name in programs.with_gradient),
            updated_bytes=_bytes(given.updated),
            wants_input_grad=ctx.needs_grad(ctx.node.argument("x")),
        )
    except BudgetError as error:
        raise BudgetError(f"{ctx.node.label}: {error}", needed_bytes=error.needed_bytes) from error


def _bytes(slots: tuple[Slot, ...]) -> int:
    return sum(slot.num_bytes for slot in slots)
