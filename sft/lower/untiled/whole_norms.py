"""BatchNorm in training as one call, in untiled segments.

Strips need a norm decomposed (:mod:`sft.analysis.passes.decompose_norms`) into moments, scale and shift, and an affine map, each of which
reads or writes the image once more. If the segment contains all of them, the call of eager PyTorch computes the same in fewer passes over
memory, and so does its derivative; also for half-precision images with parameters in fp32, and on a GPU with parameters of any type. It is
emitted in place of the moments, since running statistics may directly follow them, before the affine map.

*Running statistics* that the segment updates are updated by the same call on a GPU, as in eager PyTorch: it writes into copies of the
buffers, which are outputs of the segment. The call returns moments instead if other segments update the statistics (a stage that runs twice
updates them once, :mod:`sft.planner.stages`), if their momentum is a cumulative average, and on the CPU, where plans in stages and untiled
plans compute the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.analysis.ir.graph import Node, Ref
from sft.lower.context import NodeContext, SegmentInfo
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["BATCH_NORM_FUNCTIONS", "StatisticsUpdate", "WholeBatchNormRule", "find_whole_batch_norms"]

aten = torch.ops.aten

_NORM_DTYPES = (torch.float32, torch.float64)
#: Element types of images that torch's kernel normalises with parameters and statistics in fp32, as the decomposed norm does.
_HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsUpdate:
    """An update of the running statistics of a norm.

    Attributes:
        mean: the node of the next running mean.
        variance: the node of the next running variance.
        momentum: weight of the moments of the image.
    """

    mean: str
    variance: str
    momentum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatchNormRule(Rule):
    """A BatchNorm that runs as one call, stored as the rule of its affine map.

    Attributes:
        weight: argument of the norm, if any.
        bias: argument of the norm, if any.
        eps: argument of the norm.
        parameter_dtype: element type of the parameters in the calls.
        moments: the node that the call is emitted in place of.
        update: the update of running statistics by the call, if any.
        returns_moments: True if other operators read the moments.
        absorbed: the other nodes of the norm, which are not lowered.
    """

    weight: Any
    bias: Any
    eps: float
    parameter_dtype: torch.dtype
    moments: str
    update: StatisticsUpdate | None
    returns_moments: bool
    absorbed: frozenset[str]

    def forward(self, ctx: NodeContext) -> Slot:
        builder, scope = ctx.builder, ctx.scope
        wide = scope.dtype_of(self.moments)
        image, weight, bias = (
            ctx.operand_slot(ctx.node.argument("self")),
            *(self._parameter(ctx, each) for each in (self.weight, self.bias)),
        )
        channels = (image.shape[1],)
        out, mean, deviation = builder.slot(ctx.out_shape, image.dtype), builder.slot(channels, wide), builder.slot(channels, wide)
        arguments, outputs = (image, weight, bias, self.eps), (out, mean, deviation)
        if self.returns_moments:
            moments = builder.slot(scope.shapes[self.moments], wide)
            num_bytes = sum(slot.num_bytes for slot in (*outputs, moments))
            builder.call_measured(
                _batch_norm_with_moments, arguments, (*outputs, moments), peak_bytes=num_bytes + moments.num_bytes, flops=0
            )
            ctx.global_slots[self.moments] = moments
            if self.moments in scope.outputs:
                builder.copy(builder.port("out", self.moments, moments.shape, moments.dtype), moments)
        elif self.update is not None:
            updated = tuple(self._copied(ctx, name) for name in (self.update.mean, self.update.variance))
            arguments = (*arguments, *updated, self.update.momentum)
            builder.call_measured(_batch_norm_with_update, arguments, outputs, writes=updated, peak_bytes=0, flops=0)
        else:
            builder.call_measured(_batch_norm, arguments, outputs, peak_bytes=0, flops=0)
        ctx.saved["statistics"] = mean, deviation
        return out

    def _copied(self, ctx: NodeContext, name: str) -> Slot:
        """A copy of a running statistic: the output of the segment, which has been copied, or a new vector."""
        if name not in ctx.global_slots:
            builder, running = ctx.builder, ctx.operand_slot(ctx.scope.graph[name].argument("running"))
            is_output = name in ctx.scope.outputs
            target = builder.port("out", name, running.shape, running.dtype) if is_output else builder.empty(running.shape, running.dtype)
            ctx.global_slots[name] = builder.copy(target, running)
        return ctx.global_slots[name]

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, image = ctx.builder, ctx.node.argument("self")
        strip, weight = ctx.operand_slot(image), self._parameter(ctx, self.weight)
        values, channels = (image, self.weight, self.bias), (strip.shape[1],)
        mask = [value is not None and ctx.needs_grad(value) for value in values]
        shapes = (strip.shape, channels, channels)
        mean, deviation = ctx.saved["statistics"]
        dtypes = (strip.dtype, self.parameter_dtype, self.parameter_dtype)
        slots = (builder.slot(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
        gradients = tuple(slot if needs else None for needs, slot in zip(mask, slots, strict=True))
        builder.call_many(
            aten.native_batch_norm_backward.default,
            (builder.cast(grad, strip.dtype), strip, weight, None, None, mean, deviation, True, self.eps, mask),
            gradients,
        )
        for value, gradient in zip(values, gradients, strict=True):
            if gradient is not None:
                ctx.add_grad(value, gradient, owned=True)

    def _parameter(self, ctx: NodeContext, parameter: Ref | None) -> Slot | None:
        """A parameter in the type of the calls."""
        slot: Slot | None = ctx.operand_slot(parameter)
        return None if slot is None else ctx.builder.cast(slot, self.parameter_dtype)


def _batch_norm(image: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised image, and the mean and the reciprocal of the standard deviation of each channel, which the derivative reads."""
    out, mean, deviation = aten.native_batch_norm.default(image, weight, bias, None, None, True, 0.0, eps)
    return out, mean, deviation


def _batch_norm_with_update(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, mean: Tensor, variance: Tensor, momentum: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`_batch_norm`; the running statistics ``mean`` and ``variance`` are updated in place."""
    out, saved_mean, deviation = aten.native_batch_norm.default(image, weight, bias, mean, variance, True, momentum, eps)
    return out, saved_mean, deviation


def _batch_norm_with_moments(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`_batch_norm`, and the moments: running statistics of momentum 1 receive them.

    The statistics are contiguous vectors, as otherwise ATen takes a slower path, which rounds differently.
    """
    channels, count = image.shape[1], image.numel() // image.shape[1]
    rows = image.new_zeros((3, channels), dtype=torch.promote_types(image.dtype, torch.float32))
    mean, variance, counts = rows.unbind()
    out, saved_mean, deviation = aten.native_batch_norm.default(image, weight, bias, mean, variance, True, 1.0, eps)
    variance.mul_((count - 1) / count)  # running variances are unbiased
    counts.fill_(count)
    return out, saved_mean, deviation, rows.t().unsqueeze_(0)


#: The forward calls.
BATCH_NORM_FUNCTIONS = (_batch_norm, _batch_norm_with_update, _batch_norm_with_moments)


def find_whole_batch_norms(scope: SegmentInfo) -> dict[str, WholeBatchNormRule]:
    """The BatchNorms of a segment that can run as one call, by affine map; none with a backend that decomposes them."""
    if scope.backend is not None and scope.backend.decomposes_norms:
        return {}
    norms = ((name, _match_batch_norm(scope, scope.graph[name])) for name in scope.names if scope.graph[name].target == "sft.affine")
    return {name: norm for name, norm in norms if norm is not None}


def _match_batch_norm(scope: SegmentInfo, affine: Node) -> WholeBatchNormRule | None:
    graph = scope.graph
    image, scale_shift = affine.argument("self"), graph[affine.argument("scale_shift").name]
    if type(image) is not Ref or scale_shift.target != "sft.scale_shift" or graph.users[scale_shift.name] != (affine.name,):
        return None
    if not scope.streamed.issuperset((affine.name, image.name)):
        return None  # an image with another number of samples
    moments = graph[scale_shift.argument("moments").name]
    if moments.target != "sft.moments" or moments.argument("self") != image or moments.argument("per_sample"):
        return None
    positions, shape = {name: position for position, name in enumerate(scope.names)}, scope.shapes[affine.name]
    if not positions.keys() >= {moments.name, scale_shift.name} or moments.argument("groups") != scale_shift.argument("channels"):
        return None
    followers = [user for user in graph.users[moments.name] if user != scale_shift.name]
    if any(graph[user].target not in ("sft.running_mean", "sft.running_var") for user in followers):
        return None  # another reader may be differentiated
    if len(shape) not in CHANNELS_LAST:
        return None  # torch's kernel chooses a new layout, which the projection of later operators that keep a layout does not see
    if math.prod(shape) <= shape[1]:
        return None  # the unbiased variance of one element is undefined
    operands = [scale_shift.argument(key) for key in ("weight", "bias")]
    if any(positions.get(ref.name, -1) > positions[moments.name] for ref in operands if ref is not None):
        return None
    dtype, wide = scope.dtype_of(image.name), scope.dtype_of(moments.name)
    parameters = {scope.dtype_of(ref.name) for ref in operands if ref is not None}
    # ATen's CPU kernels compute in the type of the parameters. A GPU's compute in fp32, with parameters of one type.
    parameter_dtypes = {wide} if scope.backend is None else {wide, dtype}
    if scope.dtype_of(affine.name) != dtype or wide not in _NORM_DTYPES or not parameters.issubset(parameter_dtypes):
        return None
    # Without parameters torch's kernel stores the statistics of a half-precision image in half precision.
    if dtype != wide and (dtype not in _HALF_DTYPES or None in operands):
        return None
    weight, bias = operands
    update = _match_update(scope, moments.name, followers, positions)
    updates = () if update is None else (update.mean, update.variance)
    return WholeBatchNormRule(
        weight=weight,
        bias=bias,
        eps=scale_shift.argument("eps"),
        parameter_dtype=dtype if parameters == {dtype} else wide,
        moments=moments.name,
        update=update,
        returns_moments=update is None and bool(followers),
        absorbed=frozenset((scale_shift.name, affine.name, *updates)),
    )


def _match_update(scope: SegmentInfo, moments: str, followers: Sequence[str], positions: Mapping[str, int]) -> StatisticsUpdate | None:
    """The update of running statistics that the call of a norm can make, from the readers of its moments."""
    nodes = {scope.graph[name].target: scope.graph[name] for name in followers if name in positions}
    if scope.backend is None or len(nodes) != 2 or len(followers) != 2 or moments in scope.outputs:
        return None
    mean, variance = nodes["sft.running_mean"], nodes["sft.running_var"]
    momentum, is_cumulative = mean.argument("momentum"), mean.argument("num_batches") is not None
    if is_cumulative or not isinstance(momentum, float) or variance.argument("momentum") != momentum:
        return None
    running = [node.argument("running").name for node in (mean, variance)]
    if any(positions.get(name, -1) > positions[moments] for name in running):
        return None  # an earlier call of the norm updates them later
    if scope.dtype_of(running[0]) != scope.dtype_of(running[1]):
        return None
    return StatisticsUpdate(mean=mean.name, variance=variance.name, momentum=momentum)
