"""BatchNorms that a segment runs whole, in training: torch's own call in the place of their parts.

Strips need a norm in parts (:mod:`sft.analysis.norms`), and each part reads the image, or writes one, once more. Where all of an image is
at hand, and with it all parts of a norm, the call that plain PyTorch makes does the same in fewer passes over memory, and so does its
derivative. The norm is emitted where its affine map stands; the other parts are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sft.analysis.capture import CHANNELS_LAST
from sft.analysis.graph import Node, Ref
from sft.lower.context import NodeContext, Scope
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["WholeBatchNorm", "whole_batch_norms"]

aten = torch.ops.aten

#: In half precision the parts are computed wide, and rounded elsewhere than in torch's kernel.
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatchNorm(Rule):
    """One of them; it lowers its affine map.

    Attributes:
        weight: argument of the norm; ``None`` where it has none.
        bias: likewise.
        eps: likewise.
        momentum: likewise; 0 where no statistics are kept.
        running: the next values of the running mean and variance, with the buffers that they follow; none where they are not kept.
        parts: the nodes that need not be computed.
    """

    weight: Any
    bias: Any
    eps: float
    momentum: float
    running: tuple[tuple[str, Any], ...]
    parts: frozenset[str]

    def forward(self, ctx: NodeContext) -> Slot:
        e = ctx.emitter
        image, weight, bias = (ctx.operand_slot(value) for value in (ctx.node.argument("self"), self.weight, self.bias))
        running = [self._next(ctx, name, buffer) for name, buffer in self.running]
        out = e.slot(ctx.out_shape)
        mean, deviation = (e.slot((image.shape[1],)) for _ in range(2))
        e.call_measured(
            aten.native_batch_norm.default,
            (image, weight, bias, *(running or (None, None)), True, self.momentum, self.eps),
            (out, mean, deviation),
            writes=tuple(running),
            peak_bytes=0,
            flops=0,
        )
        ctx.saved["statistics"] = mean, deviation
        return out

    @staticmethod
    def _next(ctx: NodeContext, name: str, buffer: Any) -> Slot:
        """A copy of a running statistic, for the kernel to write to."""
        held = ctx.operand_slot(buffer)
        return ctx.emitter.copy(ctx.emitter.port("out", name, held.shape, held.dtype), held)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        e, image = ctx.emitter, ctx.node.argument("self")
        strip, weight = ctx.operand_slot(image), ctx.operand_slot(self.weight)
        values, channels = (image, self.weight, self.bias), (strip.shape[1],)
        mask = [value is not None and ctx.needs_grad(value) for value in values]
        shapes = (strip.shape, channels, channels)
        gradients = tuple(e.slot(shape) if needs else None for needs, shape in zip(mask, shapes, strict=True))
        mean, deviation = ctx.saved["statistics"]
        e.call_many(
            aten.native_batch_norm_backward.default,
            (grad, strip, weight, None, None, mean, deviation, True, self.eps, mask),
            gradients,
        )
        for value, gradient in zip(values, gradients, strict=True):
            if gradient is not None:
                ctx.add_grad(value, gradient, owned=True)


def whole_batch_norms(scope: Scope) -> dict[str, WholeBatchNorm]:
    """The BatchNorms of a segment that can be run so, by their affine maps.

    A backend has kernels of its own for the parts.
    """
    if scope.backend is not None:
        return {}
    found = {}
    for name in scope.names:
        node = scope.graph[name]
        norm = _norm_of(scope, node) if node.target == "sft.affine" else None
        if norm is not None:
            found[name] = norm
    return found


def _norm_of(scope: Scope, affine: Node) -> WholeBatchNorm | None:
    graph, inside = scope.graph, frozenset(scope.names)
    image, scale_shift = affine.argument("self"), graph[affine.argument("scale_shift").name]
    if type(image) is not Ref or scale_shift.target != "sft.scale_shift" or graph.users[scale_shift.name] != (affine.name,):
        return None
    moments = graph[scale_shift.argument("moments").name]
    if moments.target != "sft.moments" or moments.argument("self") != image or moments.argument("per_sample"):
        return None
    nexts = {user: graph[user] for user in graph.users[moments.name] if user != scale_shift.name}
    by_target = {node.target: name for name, node in nexts.items()}
    parts = frozenset((moments.name, scale_shift.name, *nexts))
    if not inside.issuperset(parts) or moments.argument("groups") != scale_shift.argument("channels"):
        return None
    if by_target.keys() not in (set(), {"sft.running_mean", "sft.running_var"}) or len(by_target) != len(nexts):
        return None
    if any(graph.users[name] or not _is_plain(scope, node) for name, node in nexts.items()):
        return None
    if any(name in scope.outputs for name in (moments.name, scale_shift.name)) or any(name not in scope.outputs for name in nexts):
        return None
    if len(scope.shapes[affine.name]) not in CHANNELS_LAST:
        return None  # torch's kernel lays its result out anew, which projections do not see where others keep an operand's layout
    operands = [scale_shift.argument(key) for key in ("weight", "bias")]
    running = tuple((by_target[target], nexts[by_target[target]].argument("running")) for target in sorted(by_target))
    tensors = [image.name, *(value.name for value in operands if value is not None), *(value.name for _, value in running)]
    dtypes = {scope.dtype_of(name) for name in (affine.name, *tensors)}
    momenta = {node.argument("momentum") for node in nexts.values()} or {0.0}
    if len(dtypes) > 1 or not dtypes.issubset(_DTYPES) or len(momenta) > 1:
        return None
    weight, bias = operands
    return WholeBatchNorm(weight=weight, bias=bias, eps=scale_shift.argument("eps"), momentum=momenta.pop(), running=running, parts=parts)


def _is_plain(scope: Scope, node: Node) -> bool:
    """Whether a running statistic follows a buffer by a momentum that is a number."""
    return scope.graph[node.argument("running").name].kind == "buffer" and node.argument("num_batches", None) is None
