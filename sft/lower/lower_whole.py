"""Lowering of an untiled segment: a forward program, and a backward program that reads the residuals of the first.

The segment runs on full tensors, as in eager PyTorch. Its programs allocate all gradients themselves, as results; the caller's
accumulators are not used.

**BatchNorm in training is one call.** Strips need a norm decomposed (:mod:`sft.analysis.passes.decompose_norms`) into moments, scale and
shift, and an affine map, each of which reads or writes the image once more. If the segment contains all of them, the call of eager PyTorch
computes the same in fewer passes over memory, and so does its derivative; also for half-precision images with parameters in fp32. It is
emitted in place of the moments, since running statistics may directly follow them, before the affine map. Running statistics still read
moments: a stage that runs twice updates them once (:mod:`sft.planner.stages`), and plans that cut there compute the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.graph import Node, Ref
from sft.analysis.tiling.strips import StripStep
from sft.common.interval import Interval
from sft.lower.context import GradContribution, NodeContext, SegmentInfo
from sft.lower.grad_accumulation import contribution_slot, sum_contributions
from sft.lower.lower_strip import StripLowering, apply_backend
from sft.lower.program import Port, Program, Slot
from sft.lower.redundant_copies import replace_redundant_copies
from sft.lower.rules.base import Rule

__all__ = ["BATCH_NORM_FUNCTIONS", "WholeBatchNormRule", "find_whole_batch_norms", "lower_whole"]

aten = torch.ops.aten

_NORM_DTYPES = (torch.float32, torch.float64)
#: Element types of images that torch's kernel normalises with parameters and statistics in fp32, as the decomposed norm does.
_HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatchNormRule(Rule):
    """A BatchNorm that runs as one call, stored as the rule of its affine map.

    Attributes:
        weight: argument of the norm, if any.
        bias: argument of the norm, if any.
        eps: argument of the norm.
        moments: the node that the call is emitted in place of.
        is_followed: True if running statistics read the moments, so that they are computed.
        absorbed: the other nodes of the norm, which are not lowered.
    """

    weight: Any
    bias: Any
    eps: float
    moments: str
    has_running_statistics: bool
    absorbed: frozenset[str]

    def forward(self, ctx: NodeContext) -> Slot:
        builder, scope = ctx.builder, ctx.scope
        wide = scope.dtype_of(self.moments)
        image, weight, bias = ctx.operand_slot(ctx.node.argument("self")), *(self._widened(ctx, each) for each in (self.weight, self.bias))
        channels = (image.shape[1],)
        out, mean, deviation = builder.slot(ctx.out_shape, image.dtype), builder.slot(channels, wide), builder.slot(channels, wide)
        arguments, outputs = (image, weight, bias, self.eps), (out, mean, deviation)
        if self.has_running_statistics:
            moments = builder.slot(scope.shapes[self.moments], wide)
            builder.call_measured(_batch_norm_with_moments, arguments, (*outputs, moments), peak_bytes=0, flops=0)
            ctx.global_slots[self.moments] = moments
            if self.moments in scope.outputs:
                builder.copy(builder.port("out", self.moments, moments.shape, moments.dtype), moments)
        else:
            builder.call_measured(_batch_norm, arguments, outputs, peak_bytes=0, flops=0)
        ctx.saved["statistics"] = mean, deviation
        return out

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        builder, image = ctx.builder, ctx.node.argument("self")
        strip, weight = ctx.operand_slot(image), self._widened(ctx, self.weight)
        values, channels = (image, self.weight, self.bias), (strip.shape[1],)
        mask = [value is not None and ctx.needs_grad(value) for value in values]
        shapes = (strip.shape, channels, channels)
        mean, deviation = ctx.saved["statistics"]
        dtypes = (strip.dtype, mean.dtype, mean.dtype)
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

    def _widened(self, ctx: NodeContext, parameter: Ref | None) -> Slot | None:
        """A parameter in the type of the moments, as statistics in half precision would be with parameters in half precision."""
        slot: Slot | None = ctx.operand_slot(parameter)
        return None if slot is None else ctx.builder.cast(slot, ctx.scope.dtype_of(self.moments))


def _batch_norm(image: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised image, and the mean and the reciprocal of the standard deviation of each channel, which the derivative reads."""
    out, mean, deviation = aten.native_batch_norm.default(image, weight, bias, None, None, True, 0.0, eps)
    return out, mean, deviation


def _batch_norm_with_moments(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`_batch_norm`, and the moments: running statistics of momentum 1 receive them."""
    count = image.numel() // image.shape[1]
    moments = image.new_zeros((1, image.shape[1], 3), dtype=torch.promote_types(image.dtype, torch.float32))
    mean, variance = moments[0, :, 0], moments[0, :, 1]
    out, saved_mean, deviation = aten.native_batch_norm.default(image, weight, bias, mean, variance, True, 1.0, eps)
    variance.mul_((count - 1) / count)  # running variances are unbiased
    moments[..., 2].fill_(count)
    return out, saved_mean, deviation, moments


#: The forward calls.
BATCH_NORM_FUNCTIONS = (_batch_norm, _batch_norm_with_moments)


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
    # ATen's CPU kernel sums gradients in half precision if the image, but not the parameters, has it. A GPU's kernels sum in fp32.
    parameter_dtypes = {wide} if scope.backend is None else {wide, dtype}
    if scope.dtype_of(affine.name) != dtype or wide not in _NORM_DTYPES or not parameters.issubset(parameter_dtypes):
        return None
    # Without parameters torch's kernel stores the statistics of a half-precision image in half precision.
    if dtype != wide and (dtype not in _HALF_DTYPES or None in operands):
        return None
    weight, bias = operands
    return WholeBatchNormRule(
        weight=weight,
        bias=bias,
        eps=scale_shift.argument("eps"),
        moments=moments.name,
        has_running_statistics=bool(followers),
        absorbed=frozenset((scale_shift.name, affine.name)),
    )


def lower_whole(scope: SegmentInfo, step: StripStep, *, training: bool) -> tuple[Program, Program | None]:
    """The programs of an untiled segment: forward and, when training, backward."""
    lowering = WholeLowering.of(scope, step, has_backward=training)
    lowering.forward(write_outputs=True, write_rows=False)
    if not training:
        apply_backend(scope, lowering.builder)
        replace_redundant_copies(scope, lowering.builder)
        return lowering.builder.finish(), None
    num_forward = len(lowering.builder.instructions)
    lowering.backward()
    num_forward = apply_backend(scope, lowering.builder, num_forward) or num_forward
    num_forward = replace_redundant_copies(scope, lowering.builder, num_forward) or 0
    return lowering.builder.split(num_forward)


class WholeLowering(StripLowering):
    """Lowers a segment on full tensors."""

    untiled: ClassVar[bool] = True
    allocates_results: ClassVar[bool] = True

    def __init__(self, scope: SegmentInfo, *, has_backward: bool = False) -> None:
        super().__init__(scope, has_backward=has_backward)
        norms = find_whole_batch_norms(scope)
        self._rules.update(norms)
        self._absorbed = frozenset[str]().union(*(norm.absorbed for norm in norms.values()))
        self._affine_of_moments = {norm.moments: name for name, norm in norms.items()}

    def forward_of(self, name: str) -> None:
        """Emit one operator; a norm of one call is emitted in place of its moments."""
        if name not in self._absorbed:
            super().forward_of(self._affine_of_moments.get(name, name))

    def add_to_global_grad(self, ctx: NodeContext, name: str, term: GradContribution) -> None:
        """Add a contribution to the gradient of a global tensor from outside; the first one may become the accumulator."""
        builder, scope, slot = self.builder, self.scope, contribution_slot(self.builder, term)
        is_first = Port("grad_side", name) not in builder.results
        if name in scope.single_grads and slot.dtype != scope.grad_dtype(name):
            term = GradContribution(builder.cast(slot, scope.grad_dtype(name)), None, None, owned=True)
            slot = term.slot
        if term.span is not None:
            super().add_to_global_grad(ctx, name, term)
        elif is_first and slot.shape == scope.global_shape(name) and slot.dtype == scope.grad_dtype(name):
            is_in_layout = len(slot.shape) == 1 or (name in scope.in_program_layout and _is_weight_grad_in_layout(slot.shape))
            builder.emit_global_grad(name, slot, term.owned and term.channels is None and is_in_layout, scope.dtype_of(name))
        else:
            builder.add_into(ctx.global_grad(name), slot)

    def write_gradients(self, gradients: Mapping[str, Sequence[GradContribution]]) -> None:
        """Emit the gradients of sources and of global tensors from outside as results; zeros if they have no contribution."""
        scope = self.scope
        for name in scope.sources:
            if name in scope.requires_grad and any(user in scope.requires_grad and user in scope.names for user in scope.graph.users[name]):
                self._emit_source_gradient(name, gradients.get(name, ()))
        for user in scope.names:
            for name in scope.graph[user].operands:
                if name in scope.requires_grad and name not in scope.streamed and name not in self._inside:
                    shape, dtype = scope.global_shape(name), scope.grad_dtype(name)
                    self.builder.global_grad(name, shape, dtype, scope.dtype_of(name))

    def _emit_source_gradient(self, name: str, contributions: Sequence[GradContribution]) -> None:
        """Emit the gradient of a source as a result."""
        rows = Interval(0, self.scope.extent(name, ROWS))
        inside = [term for term in contributions if term.rows and term.columns]
        total, owned = sum_contributions(self.scope, self.builder, name, rows, inside, self.scope.grad_dtype(name))
        if not (owned and self.builder.owns(total)):
            total = self.builder.call(aten.clone.default, total, shape=total.shape, dtype=total.dtype)
        self.builder.result("grad_source", name, total)


def _is_weight_grad_in_layout(shape: Sequence[int]) -> bool:
    """True if torch computes the gradient of a weight channels last (convolutions), or contiguous (other weights).

    In double precision torch computes those of 3-d convolutions contiguous, which equals channels last for few shapes only.
    """
    return len(shape) < 5 or shape[1] == 1 or math.prod(shape[2:]) == 1
