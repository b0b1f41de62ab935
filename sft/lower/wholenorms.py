"""BatchNorms that a segment runs whole, in training: torch's own call in the place of their parts.

Strips need a norm in parts (:mod:`sft.analysis.norms`), and each part reads the image, or writes one, once more. Where all of an image is
at hand, and with it all parts of a norm, the call that plain PyTorch makes does the same in fewer passes over memory, and so does its
derivative. It is emitted where the moments stand, as running statistics may follow at once, before the affine map; these still follow
moments, so that a stage that runs twice makes them once (:mod:`sft.plan.stages`), and plans that cut there compute the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sft.analysis.capture import CHANNELS_LAST
from sft.analysis.graph import Node, Ref
from sft.lower.context import NodeContext, SegmentInfo
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["BATCH_NORM_FUNCTIONS", "WholeBatchNormRule", "find_whole_batch_norms"]

aten = torch.ops.aten

#: In half precision the parts are computed wide, and rounded elsewhere than in torch's kernel.
_NORM_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatchNormRule(Rule):
    """One of them; it lowers its affine map.

    Attributes:
        weight: argument of the norm; ``None`` where it has none.
        bias: likewise.
        eps: likewise.
        moments: the node whose place it takes.
        is_followed: whether running statistics follow the moments, so that they are needed.
        left_out: the nodes that nothing stands for: the others.
    """

    weight: Any
    bias: Any
    eps: float
    moments: str
    is_followed: bool
    left_out: frozenset[str]

    def forward(self, ctx: NodeContext) -> Slot:
        e, scope = ctx.emitter, ctx.scope
        image, weight, bias = (ctx.operand_slot(value) for value in (ctx.node.argument("self"), self.weight, self.bias))
        out, mean, deviation = e.slot(ctx.out_shape), e.slot((image.shape[1],)), e.slot((image.shape[1],))
        arguments, outputs = (image, weight, bias, self.eps), (out, mean, deviation)
        if self.is_followed:
            moments = e.slot(scope.shapes[self.moments])
            e.call_measured(_batch_norm_with_moments, arguments, (*outputs, moments), peak_bytes=0, flops=0)
            ctx.wholes[self.moments] = moments
            if self.moments in scope.outputs:
                e.copy(e.port("out", self.moments, moments.shape, moments.dtype), moments)
        else:
            e.call_measured(_batch_norm, arguments, outputs, peak_bytes=0, flops=0)
        ctx.saved["statistics"] = mean, deviation
        return out

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


def _batch_norm(image: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The image normalised, and what the derivative needs: the means and one over the deviations."""
    out, mean, deviation = aten.native_batch_norm.default(image, weight, bias, None, None, True, 0.0, eps)
    return out, mean, deviation


def _batch_norm_with_moments(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, and the moments: what running statistics become that forget all that was before."""
    count = image.numel() // image.shape[1]
    moments = image.new_zeros((1, image.shape[1], 3))
    mean, variance = moments[0, :, 0], moments[0, :, 1]
    out, saved_mean, deviation = aten.native_batch_norm.default(image, weight, bias, mean, variance, True, 1.0, eps)
    variance.mul_((count - 1) / count)  # they follow the unbiased variance
    moments[..., 2].fill_(count)
    return out, saved_mean, deviation, moments


#: What is called forwards.
BATCH_NORM_FUNCTIONS = (_batch_norm, _batch_norm_with_moments)


def find_whole_batch_norms(scope: SegmentInfo) -> dict[str, WholeBatchNormRule]:
    """The BatchNorms of a segment that can be run so, by their affine maps.

    A backend has kernels of its own for the parts.
    """
    if scope.backend is not None:
        return {}
    norms = ((name, _match_batch_norm(scope, scope.graph[name])) for name in scope.names if scope.graph[name].target == "sft.affine")
    return {name: norm for name, norm in norms if norm is not None}


def _match_batch_norm(scope: SegmentInfo, affine: Node) -> WholeBatchNormRule | None:
    graph = scope.graph
    image, scale_shift = affine.argument("self"), graph[affine.argument("scale_shift").name]
    if type(image) is not Ref or scale_shift.target != "sft.scale_shift" or graph.users[scale_shift.name] != (affine.name,):
        return None
    if not scope.streamed.issuperset((affine.name, image.name)):
        return None  # images of another number of samples
    moments = graph[scale_shift.argument("moments").name]
    if moments.target != "sft.moments" or moments.argument("self") != image or moments.argument("per_sample"):
        return None
    places, shape = {name: place for place, name in enumerate(scope.names)}, scope.shapes[affine.name]
    if not places.keys() >= {moments.name, scale_shift.name} or moments.argument("groups") != scale_shift.argument("channels"):
        return None
    followers = [user for user in graph.users[moments.name] if user != scale_shift.name]
    if any(graph[user].target not in ("sft.running_mean", "sft.running_var") for user in followers):
        return None  # others may be differentiated
    if len(shape) not in CHANNELS_LAST:
        return None  # torch's kernel lays its result out anew, which projections do not see where others keep an operand's layout
    if math.prod(shape) <= shape[1]:
        return None  # the variance of one element is none that could be made biased again
    operands = [scale_shift.argument(key) for key in ("weight", "bias")]
    if any(places.get(ref.name, -1) > places[moments.name] for ref in operands if ref is not None):
        return None
    dtypes = {scope.dtype_of(name) for name in (affine.name, image.name, moments.name, *(ref.name for ref in operands if ref is not None))}
    if len(dtypes) > 1 or not dtypes.issubset(_NORM_DTYPES):
        return None
    weight, bias = operands
    return WholeBatchNormRule(
        weight=weight,
        bias=bias,
        eps=scale_shift.argument("eps"),
        moments=moments.name,
        is_followed=bool(followers),
        left_out=frozenset((scale_shift.name, affine.name)),
    )
