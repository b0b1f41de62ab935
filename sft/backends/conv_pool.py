"""Fusion of convolution, ReLU and 2 x 2 max pooling; the convolution's output is not materialized.

That output is the largest value of a network's first blocks. Only the pool, the gradient of the ReLU and the gradient of the pool read it,
in the program of a strip as in that of an untiled segment. Two bits for each maximum, the number of the chosen pixel, replace it: the
maxima themselves tell where the ReLU was on, and the gradient is spread over the pixels while it is loaded.

The whole group is fused, or none of it: if the program has the backward half, that half is fused as well. Choosing a maximum involves
no rounding, so a program without the fusion computes the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sft.backends.conv import (
    ConvBackward,
    ConvLayer,
    channels_last_weight,
    conv_backward_at,
    data_gradient_calls,
    forward_conv_layer,
    weight_gradient_calls,
)
from sft.backends.conv_calls import PooledConvolutionCall
from sft.backends.fusion import match_relu
from sft.backends.kernel_call import allocation, kernel_instruction
from sft.backends.pattern import MatchContext, Rewrite
from sft.backends.selector import ShapeClass
from sft.kernels.common import LaunchVariant
from sft.kernels.pool.taps import TAPS_PER_BYTE
from sft.lower.program import Instruction, Slot

__all__ = ["match_pooled_convolutions"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _PooledForward:
    """Forward half of a group.

    Attributes:
        layer: the convolution.
        value: output of the ReLU.
        positions: positions of convolution and ReLU.
        pools: positions of the pools. The program of a strip pools again in its backward half, for the indices.
        maxima: result of the first pool.
    """

    layer: ConvLayer
    value: Slot
    positions: tuple[int, int]
    pools: tuple[int, ...]
    maxima: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class _PooledBackward:
    """Backward half of a group.

    Attributes:
        positions: positions of the gradients of pool and ReLU, and of the instructions of ``convolution``.
        gradient: gradient of the maxima.
        convolution: the gradients of the convolution.
    """

    positions: tuple[int, ...]
    gradient: Slot
    convolution: ConvBackward


def match_pooled_convolutions(context: MatchContext) -> Iterator[Rewrite]:
    """Convolutions, each with its ReLU and its maximum pool."""
    if not context.computes_operands:
        return
    for at, call in list(context.unclaimed_calls(aten.convolution.default)):
        layer = forward_conv_layer(context, at, call)
        forward = None if layer is None or not layer.is_ungrouped_image else _match_forward(context, at, call, layer)
        if forward is None:
            continue
        remaining = [p for p in context.def_use.accesses(forward.value) if p not in (*forward.positions, *forward.pools)]
        backward = _match_backward(context, forward, remaining) if remaining else None
        if forward.value.root in context.def_use.outside or (remaining and backward is None):
            continue
        if backward is None and any(_index_readers(context, p) for p in forward.pools):
            continue
        shape_class = _shape_class(forward, backward)
        if context.selector.selects_kernel(shape_class):
            yield _rewrite_pooled_convolution(context, call, forward, backward, context.selector.launch_variant_of(shape_class))


def _match_forward(context: MatchContext, at: int, call: Instruction, layer: ConvLayer) -> _PooledForward | None:
    def_use, out = context.def_use, call.outputs[0]
    assert out is not None
    users = [p for p in def_use.users(out) if p > at and p not in context.claimed]
    if not users or len(out.shape) != 4:
        return None
    value = match_relu(context, out, users[0])
    if value is None or value.root != value.number:
        return None
    positions = (at, users[0])
    if value != out and not def_use.is_private(out, positions):
        return None
    pools = tuple(p for p in def_use.users(value) if p > users[0] and context.is_unclaimed(p, aten.max_pool2d_with_indices.default))
    if not pools or any(not _halves_size(def_use.instructions[p]) for p in pools):
        return None
    maxima = def_use.instructions[pools[0]].outputs[0]
    if maxima is None or not all(maxima.shape) or not def_use.can_move_to((*positions, pools[0]), pools[0]):
        return None
    if def_use.is_written_between(layer.padded.slot, at, pools[0]) or any(
        def_use.is_read(def_use.instructions[p].outputs[0]) for p in pools[1:]
    ):
        return None
    return _PooledForward(layer=layer, value=value, positions=positions, pools=pools, maxima=maxima)


def _halves_size(call: Instruction) -> bool:
    """True if a pool takes 2 x 2 pixels without overlap, and leaves out at most a last odd row and column."""
    _, kernel, stride, padding, dilation, ceil = call.arguments
    return [*kernel, *stride, *padding, *dilation, ceil] == [2, 2, 2, 2, 0, 0, 1, 1, False]


def _match_backward(context: MatchContext, forward: _PooledForward, remaining: list[int]) -> _PooledBackward | None:
    """The backward half, if it has all ``remaining`` accesses to the convolution's output."""
    def_use = context.def_use
    pool_grads = [p for p in remaining if context.is_unclaimed(p, aten.max_pool2d_with_indices_backward.default)]
    relu_grad_functions = (aten.threshold_backward.default, aten.threshold_backward.grad_input)
    relu_grads = [p for p in remaining if any(context.is_unclaimed(p, function) for function in relu_grad_functions)]
    if len(pool_grads) != 1 or len(relu_grads) != 1 or len(remaining) != 2:
        return None
    gradient, value, *_ = def_use.instructions[pool_grads[0]].arguments
    dense = def_use.instructions[pool_grads[0]].outputs[0]
    relu_grad = def_use.instructions[relu_grads[0]]
    unmasked, output, threshold = relu_grad.arguments
    if dense is None or value != forward.value or unmasked != dense or output != forward.value or threshold != 0:
        return None
    if any(_index_readers(context, p) not in ([], [pool_grads[0]]) for p in forward.pools):
        return None
    masked = relu_grad.writes[0] if relu_grad.writes else relu_grad.outputs[0]
    for at in def_use.users(masked) if masked is not None else ():
        if at <= relu_grads[0] or not context.is_unclaimed(at, aten.convolution_backward.default):
            continue
        convolution = conv_backward_at(context, at, def_use.instructions[at])
        if (
            convolution is None
            or convolution.gradient != masked
            or convolution.layer != replace(forward.layer, bias=None)
            or (convolution.grads[1] is None and convolution.grads[2] is not None)
        ):
            return None
        positions = (pool_grads[0], relu_grads[0], *convolution.positions)
        if not all(def_use.is_private(slot, positions) for slot in (dense, masked)) or not def_use.can_move_to(positions, at):
            return None
        # The kernels read the maxima again, so these must not change.
        if def_use.is_written_between(forward.maxima, forward.pools[0], at):
            return None
        return _PooledBackward(positions=positions, gradient=gradient, convolution=convolution)
    return None


def _index_readers(context: MatchContext, at: int) -> list[int]:
    """Positions that read the indices of a pool."""
    indices = context.def_use.instructions[at].outputs[1]
    return [] if indices is None else context.def_use.users(indices)


def _shape_class(forward: _PooledForward, backward: _PooledBackward | None) -> ShapeClass:
    """The class of the whole group."""
    fused = [*(("bias",) if forward.layer.bias is not None else ()), "relu", "pool"]
    for name, grad in () if backward is None else zip(("data gradient", "weight gradient"), backward.convolution.grads[:2], strict=True):
        fused += [name] if grad is not None else []
    num_pixels = math.prod(forward.value.shape) // forward.value.shape[1]
    return forward.layer.shape_class("conv", num_pixels, tuple(fused))


def _rewrite_pooled_convolution(
    context: MatchContext, call: Instruction, forward: _PooledForward, backward: _PooledBackward | None, variant: LaunchVariant
) -> Rewrite:
    layer, maxima, owner, first_pool = forward.layer, forward.maxima, call.owner, forward.pools[0]
    num_samples, num_channels, *size = maxima.shape
    taps = context.builder.slot((num_samples, -(-num_channels // TAPS_PER_BYTE), *size), torch.uint8)
    x, x_copy = context.to_channels_last(layer.padded.slot, owner)
    weight, weight_copy = channels_last_weight(context, layer, owner)
    geometry = layer.geometry(forward.value.shape[2:])
    pooled = PooledConvolutionCall(flops=call.flops, geometry=geometry, numbers=layer.numbers, variant=variant)
    launch = kernel_instruction(pooled.run, maxima, taps, x, weight, layer.bias, writes=(maxima, taps), owner=owner)
    removed = {*forward.positions, *forward.pools}
    inserted = {first_pool: (*x_copy, *weight_copy, allocation(maxima, owner), allocation(taps, owner), launch)}
    if backward is not None:
        convolution = backward.convolution
        gradient, body = context.to_channels_last(backward.gradient, convolution.call.owner)
        deliveries: dict[int, tuple[Instruction, ...]] = {}
        if convolution.grads[1] is not None:
            sums, deliveries = weight_gradient_calls(context, convolution, gradient, maxima, taps, variant=variant)
            body = (*body, *sums)
        if convolution.grads[0] is not None:
            outputs = forward.value.shape[2:]
            body = (*body, *data_gradient_calls(context, convolution, gradient, maxima, outputs, taps, variant=variant))
        removed |= {*backward.positions, *deliveries}
        inserted |= {**deliveries, convolution.at: body}
    return Rewrite(removed=frozenset(removed), inserted=inserted)
