"""Attention: one fused operator in programs for a GPU, where its kernels compute the same; otherwise its traced calls.

Fused are queries, keys and values of half precision with equal heads, without a mask and dropout. Their kernels keep no matrix of all
queries and keys, and read operands in any layout with adjacent channels. Sums of the derivative have no fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from sft.analysis.ir.graph import Ref, refs_in
from sft.analysis.ir.targets import ATTENTION
from sft.lower.context import NodeContext
from sft.lower.custom_ops.attention import fused_attention, fused_attention_backward
from sft.lower.program import Slot
from sft.lower.rules.traced import TracedWholeRule

__all__ = ["AttentionRule", "CausalAttentionRule"]

#: Index in an origin of the first four dimensions of a value that is no image: samples, channels, rows, columns with all further ones.
_ORIGIN_PLACES = (0, 3, 1, 2)
#: Channels of a head: at most so many, and a multiple of so many. Others are padded by torch.
_MAX_CHANNELS, _CHANNELS_UNIT = 192, 8
_OPERANDS = ("query", "key", "value")


class _TracedAttentionRule(TracedWholeRule):
    """Attention as the calls of its trace. Kernels of a CPU require adjacent channels, which parameters and buffers may not have."""

    def operand_slots(self, ctx: NodeContext) -> dict[str, Slot]:
        slots, scope = super().operand_slots(ctx), ctx.scope
        for name in dict.fromkeys(name for key in _OPERANDS for name in refs_in(ctx.node.argument(key))):
            if scope.graph[name].kind not in ("operator", "input") and name not in scope.strided:
                slots[name] = self._contiguous(ctx, slots[name])
        return slots


class AttentionRule(_TracedAttentionRule):
    """Attention of full tensors, or of a chunk of queries."""

    def forward(self, ctx: NodeContext) -> Slot:
        operands = self._fused_operands(ctx)
        if operands is None:
            return super().forward(ctx)
        query, builder = operands[0], ctx.builder
        out, logsumexp = builder.slot(query.shape, query.dtype), builder.slot(query.shape[:-1], torch.float32)
        options = (bool(ctx.node.argument("is_causal", False)), ctx.node.argument("scale"))
        builder.call_many(fused_attention, (*operands, *options), (out, logsumexp))
        ctx.saved["fused"] = (*operands, out, logsumexp, *options)
        return out

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        fused = ctx.saved.get("fused")
        if fused is None:
            super().backward(ctx, grad, owned)
            return
        gradients = tuple(ctx.builder.slot(operand.shape, operand.dtype) for operand in fused[:3])
        grad = _with_adjacent_channels(ctx, ctx.builder.cast(grad, fused[0].dtype))
        ctx.builder.call_many(fused_attention_backward, (grad, *fused), gradients)
        for name, gradient in zip(_OPERANDS, gradients, strict=True):
            operand: Ref = ctx.node.argument(name)
            if operand.name in ctx.scope.requires_grad:
                ctx.add_grad(operand, gradient, owned=True)

    @staticmethod
    def _fused_operands(ctx: NodeContext) -> tuple[Slot, Slot, Slot] | None:
        """Queries, keys and values; ``None`` if the fused operator does not compute them."""
        node, backend, scope = ctx.node, ctx.scope.backend, ctx.scope
        if backend is None or scope.deterministic or any(type(node.argument(name)) is not Ref for name in _OPERANDS):
            return None
        if node.argument("attn_mask") is not None or node.argument("dropout_p", 0.0) or node.argument("enable_gqa", False):
            return None
        names = [node.argument(name).name for name in _OPERANDS]
        if not backend.fuses_attention(scope.dtype_of(names[0])):
            return None
        query, key, value = (ctx.strip(name) if name in scope.streamed else ctx.global_slot(name) for name in names)
        is_uniform = len({slot.dtype for slot in (query, key, value)}) == 1 and all(len(slot.shape) == 4 for slot in (query, key, value))
        if not is_uniform or key.shape != value.shape or (query.shape[:2], query.shape[3]) != (key.shape[:2], key.shape[3]):
            return None
        channels, is_square = query.shape[3], query.shape[2] == key.shape[2]
        has_kernel = 0 < channels <= _MAX_CHANNELS and channels % _CHANNELS_UNIT == 0 and min(query.shape + key.shape) > 0
        if not has_kernel or (node.argument("is_causal", False) and not is_square):
            return None
        slots = dict(zip(names, (query, key, value), strict=True))
        for name in sorted(slots.keys() - scope.row_major - scope.strided):
            slots[name] = _with_adjacent_channels(ctx, slots[name])
        return slots[names[0]], slots[names[1]], slots[names[2]]


def _with_adjacent_channels(ctx: NodeContext, slot: Slot) -> Slot:
    """The tensor, or a copy if it is from outside of the program, where images are channels last."""
    is_outside = any(slot.root == port.root for port in ctx.builder.ports.values())
    return ctx.builder.row_major(slot) if is_outside else slot


class CausalAttentionRule(_TracedAttentionRule):
    """Causal attention of consecutive queries, as torch's operator with their rows of the mask.

    The mask of all queries and keys would be a matrix of both. A chunk of queries (:mod:`sft.runtime.sample_segment`) makes the rows of its
    queries alone, from the position of the first one (the ``origin`` port), so chunks of as many queries share their program.
    """

    is_foreign = True

    def forward(self, ctx: NodeContext) -> Slot:
        (query,), (key,) = (tuple(refs_in(ctx.node.argument(name))) for name in ("query", "key"))
        operands, shape = self.operand_slots(ctx), ctx.scope.shapes[ctx.node.name]
        mask = ctx.builder.empty((operands[query].shape[-2], operands[key].shape[-2]), ctx.scope.dtype_of(query))
        dim = len(shape) - 2
        unit = math.prod(shape[4:]) if dim == 3 else 1
        ctx.builder.call(_write_causal_mask, mask, ctx.builder.port("origin", ctx.node.name, ()), _ORIGIN_PLACES[dim], unit, writes=mask)
        name = f"{ctx.node.name}.mask"
        arguments: dict[str, Any] = {**dict(ctx.node.arguments), "attn_mask": Ref(name), "is_causal": False}
        return self.replay_forward(ctx, ATTENTION, tuple(arguments.items()), {**operands, name: mask})


def _write_causal_mask(mask: torch.Tensor, origin: Sequence[int], place: int, unit: int) -> None:
    """Write the rows of the mask from the query at the origin on: 0 up to a query's own position, minus infinity after it."""
    mask.fill_(-math.inf).triu_((*origin, 0)[place] // unit + 1)
