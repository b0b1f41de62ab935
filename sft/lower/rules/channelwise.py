"""Frozen norms and the activations that are differentiated from their result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sft.analysis.axes import ROWS
from sft.analysis.graph import refs_in
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["FrozenNormRule", "ResultActivationRule", "empty_statistics"]

aten = torch.ops.aten


class FrozenNormRule(Rule):
    """BatchNorm with its running statistics: an affine map of each channel."""

    def forward(self, ctx: NodeContext) -> Slot:
        node = ctx.node
        arguments = [ctx.operand_slot(node.argument(name)) for name in ("input", "weight", "bias", "running_mean", "running_var")]
        out = ctx.emitter.slot(ctx.out_shape)
        ctx.emitter.call_many(
            aten._native_batch_norm_legit_no_training.default,
            (*arguments, node.argument("momentum"), node.argument("eps")),
            (out, None, None),
        )
        return out

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        node, e = ctx.node, ctx.emitter
        image, weight, bias = node.argument("input"), node.argument("weight"), node.argument("bias")
        strip = ctx.operand_slot(image)
        mask = [ctx.needs_grad(image), ctx.needs_grad(weight), ctx.needs_grad(bias)]
        channels = (strip.shape[1],)
        values, shapes = (image, weight, bias), (strip.shape, channels, channels)
        out = tuple(e.slot(shape, ctx.dtype_of(v)) if m else None for m, shape, v in zip(mask, shapes, values, strict=True))
        mean, variance = (ctx.operand_slot(node.argument(name)) for name in ("running_mean", "running_var"))
        saved = e.call(empty_statistics, mean, shape=(0,), dtype=mean.dtype)
        e.call_many(
            aten.native_batch_norm_backward.default,
            (grad, strip, ctx.operand_slot(weight), mean, variance, saved, saved, False, node.argument("eps"), mask),
            out,
        )
        for value, slot in zip(values, out, strict=True):
            if slot is not None:
                ctx.add_grad(value, slot, owned=True)


def empty_statistics(running: Tensor) -> Tensor:
    """In the place of statistics that a forward pass has not saved: CUDA wants tensors, and takes empty ones for none.

    Both devices look at the type, the CPU for that of the running statistics, CUDA for the type that it sums up in.
    """
    return running.new_empty((0,), dtype=torch.promote_types(running.dtype, torch.float32) if running.is_cuda else running.dtype)


class ResultActivationRule(Rule):
    """``relu`` and ``leaky_relu``: differentiated from their result, so the operand can be overwritten."""

    saves_input = False
    saves_output = True
    in_place = True
    overwrites = True

    def _slope(self, ctx: NodeContext) -> float | None:
        return None if ctx.node.target == "aten.relu.default" else float(ctx.node.argument("negative_slope"))

    def forward(self, ctx: NodeContext) -> Slot:
        operand = next(refs_in(ctx.node.argument("self")))
        strip, slope, e = ctx.strip(operand), self._slope(ctx), ctx.emitter
        target = ctx.destination if ctx.destination is not None else ctx.overwrite
        if slope is None:
            if target is None:
                return e.call(aten.relu.default, strip, shape=ctx.out_shape)
            if target is ctx.overwrite:
                return e.call(aten.relu_.default, target, writes=target)
            return e.call(aten.clamp_min.out, strip, 0, writes=target, keywords={"out": target})
        if target is None:
            return e.call(aten.leaky_relu.default, strip, slope, shape=ctx.out_shape)
        return e.call(aten.leaky_relu.out, strip, slope, writes=target, keywords={"out": target})

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        value, first_row = ctx.values[ctx.node.name]
        result = ctx.narrow(value, ROWS, ctx.step.new.start - first_row, ctx.new_rows)
        slope, e, image = self._slope(ctx), ctx.emitter, ctx.node.argument("self")
        if slope is None:
            arguments: tuple[Any, ...] = (grad, result, 0)
            plain, into = aten.threshold_backward.default, aten.threshold_backward.grad_input
        else:
            arguments = (grad, result, slope, True)
            plain, into = aten.leaky_relu_backward.default, aten.leaky_relu_backward.grad_input
        if owned:
            ctx.add_grad(image, e.call(into, *arguments, writes=grad, keywords={"grad_input": grad}), owned=True)
        else:
            ctx.add_grad(image, e.call(plain, *arguments, shape=grad.shape), owned=True)
