"""Rules that replay a joint trace (:mod:`sft.lower.joint_traces`): the operator's ATen calls, and those of its derivative by autograd."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.analysis.ir.graph import Ref, map_refs, refs_in
from sft.common.errors import InternalError, UnsupportedError
from sft.common.torch_internals import op_schema
from sft.lower.context import NodeContext
from sft.lower.joint_traces import TINY_SHAPE, BitwiseKey, JointTrace, SlotArg, TracedCall, resolve_target, trace_pointwise, trace_whole
from sft.lower.op_recorder import ArgumentSpec
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["TracedPointwiseRule", "TracedWholeRule"]

aten = torch.ops.aten

#: Linear algebra whose kernels depend on the memory layout: some factorise the transpose of a row-major matrix, and their derivatives
#: check the layout again. A parameter may be column-major (as ``torch.linalg.qr`` returns it), and so may a transpose.
_MATRIX_OPS = re.compile(r"linalg_(?!vector_norm)|det\b|_solve|cholesky|inverse")

#: Kernels that require contiguous operands of every rank. Torch copies other operands before the call; a trace of contiguous tensors does
#: not show these copies.
_CONTIGUOUS_OPS = re.compile(r"group_norm")


class _TracedRule(Rule):
    """Base of the replay of a trace's calls."""

    def _replay(self, ctx: NodeContext, calls: Sequence[TracedCall], values: dict[int, Slot], shape: tuple[int, ...] | None) -> None:
        def convert(item: Any) -> Any:
            if isinstance(item, SlotArg):
                return values[item.index]
            return tuple(convert(i) for i in item) if isinstance(item, tuple) else item

        for call in calls:
            arguments = tuple(convert(arg) for arg in call.arguments)
            keywords = {key: convert(item) for key, item in call.keywords}
            slots = tuple(
                None
                if result is None
                else ctx.builder.slot(
                    tuple(shape) if shape is not None and result.shape == TINY_SHAPE else result.shape,
                    result.dtype,
                    None if result.view_of is None else values[result.view_of].root,
                )
                for result in call.results
            )
            ctx.builder.call_into(call.function, arguments, keywords, slots, has_many=call.has_many)
            values.update({r.index: slot for r, slot in zip(call.results, slots, strict=True) if r is not None and slot is not None})


class TracedPointwiseRule(_TracedRule):
    """A function of one element on a strip."""

    saves_output = True

    def forward(self, ctx: NodeContext) -> Slot:
        trace = self._trace_of(ctx)
        values: dict[int, Slot] = {0: ctx.operand_slot(ctx.node.argument("self"))}
        self._replay(ctx, trace.forward, values, ctx.out_shape)
        ctx.saved["values"] = values
        return values[trace.result]

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        trace, values = self._trace_of(ctx), ctx.saved["values"]
        values[1] = grad
        self._replay(ctx, trace.backward, values, ctx.out_shape)
        gradient = trace.gradients[0]
        if gradient is not None:
            out = values[gradient]
            ctx.add_grad(ctx.node.argument("self"), out, owned=out is not grad and out.root == out.number)

    @staticmethod
    def _trace_of(ctx: NodeContext) -> JointTrace:
        operand, *options = ctx.node.arguments
        if operand[0] != "self" or any(True for _, value in options for _ in refs_in(value)):
            raise InternalError(f"{ctx.node.label}: not a function of one element")
        overload = resolve_target(ctx.node.target)
        positional = [a.name for a in op_schema(overload).arguments if not a.kwarg_only]
        values = dict(options)
        arguments = tuple(values[key] for key in positional[1:] if key in values)
        keywords = tuple((a.name, values[a.name]) for a in op_schema(overload).arguments if a.kwarg_only and a.name in values)
        dtype = ctx.scope.dtype_of(next(refs_in(operand[1])))
        return trace_pointwise(ctx.node.target, BitwiseKey(arguments), BitwiseKey(keywords), dtype, torch.get_default_dtype())


class TracedWholeRule(_TracedRule):
    """Any operator on full tensors, and operators on the channels of each pixel of a strip.

    Attributes:
        is_foreign: True if the rule runs kernels of torch under a target of the library.
    """

    saves_output = True
    is_foreign: ClassVar[bool] = False

    def forward(self, ctx: NodeContext) -> Slot:
        return self.replay_forward(ctx, ctx.node.target, ctx.node.arguments, self.operand_slots(ctx))

    def operand_slots(self, ctx: NodeContext) -> dict[str, Slot]:
        """The operands, by name, in the layouts of the trace."""
        names = tuple(dict.fromkeys(ctx.node.operands))
        slots = [ctx.strip(name) if name in ctx.scope.streamed else ctx.global_slot(name) for name in names]
        if self._is_foreign(ctx) and _MATRIX_OPS.search(ctx.node.target):
            slots = [ctx.builder.row_major(slot) for slot in slots]
        elif self._is_foreign(ctx):
            slots = [self._contiguous(ctx, slot) if self._is_computed(ctx, name) else slot for name, slot in zip(names, slots, strict=True)]
        return dict(zip(names, slots, strict=True))

    def replay_forward(self, ctx: NodeContext, target: str, arguments: Sequence[tuple[str, Any]], operands: Mapping[str, Slot]) -> Slot:
        """Emit the calls of an operator on these operands.

        Args:
            ctx: the operator of the model.
            target: the operator that is traced.
            arguments: its arguments, with references to operands by name.
            operands: slots of the operands.
        """
        names, slots = tuple(operands), tuple(operands.values())
        # Operands are named by position, so that equal operators of many blocks share one trace.
        positions = {name: str(position) for position, name in enumerate(names)}
        arguments = tuple((key, map_refs(value, lambda name: Ref(positions[name]))) for key, value in arguments)
        try:
            trace = trace_whole(
                target,
                BitwiseKey(arguments),
                tuple(
                    (positions[name], ArgumentSpec(slot.shape, slot.dtype, name in ctx.scope.requires_grad))
                    for name, slot in zip(names, slots, strict=True)
                ),
                torch.get_default_dtype(),
            )
        except RuntimeError as error:
            if "SparseTensor" in str(error):
                raise UnsupportedError([f"{ctx.node.label}: its gradient is sparse; leave out sparse=True"]) from error
            if "derivative" not in str(error):
                raise
            raise UnsupportedError([f"{ctx.node.label}: {error}; put x.detach() in front of it, or use another operator"]) from error
        values = dict(enumerate(slots))
        self._replay(ctx, trace.forward, values, None)
        ctx.saved.update(trace=trace, values=values, names=names)
        return values[trace.result]

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        trace, values = ctx.saved["trace"], ctx.saved["values"]
        values[trace.num_inputs] = self._contiguous(ctx, grad) if self._is_foreign(ctx) else grad
        self._replay(ctx, trace.backward, values, None)
        for name, gradient in zip(ctx.saved["names"], trace.gradients, strict=True):
            if gradient is not None and name in ctx.scope.requires_grad:
                slot = values[gradient]
                ctx.add_grad(Ref(name), slot, owned=slot.root == slot.number and slot is not grad)

    def _is_foreign(self, ctx: NodeContext) -> bool:
        """True for operators without a rule of their own; their kernels may require the memory layout of the trace."""
        return self.is_foreign or (ctx.scope.specs[ctx.node.name].role == "whole" and not ctx.node.target.startswith("sft."))

    @staticmethod
    def _is_computed(ctx: NodeContext, name: str) -> bool:
        """True for inputs and results of operators in any layout; false for parameters and buffers, which have the caller's."""
        return ctx.scope.graph[name].kind in ("operator", "input") and name not in ctx.scope.row_major

    @staticmethod
    def _contiguous(ctx: NodeContext, slot: Slot) -> Slot:
        is_needed = len(slot.shape) in CHANNELS_LAST or _CONTIGUOUS_OPS.search(ctx.node.target)
        return ctx.builder.row_major(slot) if is_needed else slot
