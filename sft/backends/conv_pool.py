"""A convolution with its ReLU and the maxima of 2 x 2 pixels behind it, forwards and backwards: nobody ever sees the convolution's output.

That output is the largest value of a network's first blocks. It is read by the pool, by the ReLU's gradient and by the pool's, and by
nobody else, in a strip's program as in a whole segment's. With the number of the chosen pixel (two bits for each maximum) in its place, the
maxima themselves say where the ReLU was on, and the gradient is spread while it is loaded. All of that happens or nothing: the group has
its backward half where the program has one. To choose a maximum rounds nothing, so a program without one makes the same numbers.
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
from sft.lower.program import Instruction, Slot

__all__ = ["match_pooled_convolutions"]

aten = torch.ops.aten

_CODES_PER_BYTE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _PooledForward:
    """The forward half.

    Attributes:
        layer: the convolution.
        value: its output behind the ReLU.
        positions: of convolution and ReLU.
        pools: of the pools; a strip's program finds the indices again in its backward half.
        maxima: of the first of them.
    """

    layer: ConvLayer
    value: Slot
    positions: tuple[int, int]
    pools: tuple[int, ...]
    maxima: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class _PooledBackward:
    """The backward half.

    Attributes:
        positions: of the pool's gradient, the ReLU's, and what the convolution's has.
        gradient: of the maxima.
        convolution: its gradients.
    """

    positions: tuple[int, ...]
    gradient: Slot
    convolution: ConvBackward


def match_pooled_convolutions(question: MatchContext) -> Iterator[Rewrite]:
    """Convolutions, each with its ReLU and its maxima."""
    if not question.computes_operands:
        return
    for at, call in list(question.free(aten.convolution.default)):
        layer = forward_conv_layer(question, at, call)
        found = None if layer is None or not layer.is_plain else _match_forward(question, at, call, layer)
        if found is None:
            continue
        rest = [p for p in question.listing.accesses(found.value) if p not in (*found.positions, *found.pools)]
        back = _match_backward(question, found, rest) if rest else None
        if found.value.root in question.listing.outside or (rest and back is None):
            continue
        if back is None and any(_index_readers(question, p) for p in found.pools):
            continue
        wanted = _shape_class(found, back)
        if question.selector.selects_kernel(wanted):
            yield _rewrite_pooled_convolution(question, call, found, back, question.selector.launch_variant_of(wanted))


def _match_forward(question: MatchContext, at: int, call: Instruction, layer: ConvLayer) -> _PooledForward | None:
    listing, out = question.listing, call.outputs[0]
    assert out is not None
    users = [p for p in listing.users(out) if p > at and p not in question.taken]
    if not users or len(out.shape) != 4:
        return None
    value = match_relu(question, out, users[0])
    if value is None or value.root != value.number:
        return None
    positions = (at, users[0])
    if value != out and not listing.is_private(out, positions):
        return None
    pools = tuple(p for p in listing.users(value) if p > users[0] and question.is_free(p, aten.max_pool2d_with_indices.default))
    if not pools or any(not _halves_size(listing.instructions[p]) for p in pools):
        return None
    maxima = listing.instructions[pools[0]].outputs[0]
    if maxima is None or not all(maxima.shape) or not listing.can_move_to((*positions, pools[0]), pools[0]):
        return None
    if listing.is_written_between(layer.padded.slot, at, pools[0]) or any(_is_read(question, p, place=0) for p in pools[1:]):
        return None
    return _PooledForward(layer=layer, value=value, positions=positions, pools=pools, maxima=maxima)


def _is_read(question: MatchContext, at: int, *, place: int) -> bool:
    """Whether anybody reads a result of a call."""
    slot = question.listing.instructions[at].outputs[place]
    return slot is not None and (bool(question.listing.users(slot)) or slot.root in question.listing.outside)


def _halves_size(call: Instruction) -> bool:
    """Whether a pool takes 2 x 2 pixels without overlap, and leaves none out but a last odd one."""
    _, kernel, stride, padding, dilation, ceil = call.arguments
    return [*kernel, *stride, *padding, *dilation, ceil] == [2, 2, 2, 2, 0, 0, 1, 1, False]


def _match_backward(question: MatchContext, found: _PooledForward, rest: list[int]) -> _PooledBackward | None:
    """The backward half, if it is all that is left of those who touch the convolution's output."""
    listing = question.listing
    spread = [p for p in rest if question.is_free(p, aten.max_pool2d_with_indices_backward.default)]
    masks = (aten.threshold_backward.default, aten.threshold_backward.grad_input)
    masked = [p for p in rest if any(question.is_free(p, mask) for mask in masks)]
    if len(spread) != 1 or len(masked) != 1 or len(rest) != 2:
        return None
    gradient, value, *_ = listing.instructions[spread[0]].arguments
    dense = listing.instructions[spread[0]].outputs[0]
    mask = listing.instructions[masked[0]]
    given, output, threshold = mask.arguments
    if dense is None or value != found.value or given != dense or output != found.value or threshold != 0:
        return None
    if any(_index_readers(question, p) not in ([], [spread[0]]) for p in found.pools):
        return None
    arrives = mask.writes[0] if mask.writes else mask.outputs[0]
    for at in listing.users(arrives) if arrives is not None else ():
        if at <= masked[0] or not question.is_free(at, aten.convolution_backward.default):
            continue
        back = conv_backward_at(question, at, listing.instructions[at])
        if (
            back is None
            or back.gradient != arrives
            or back.layer != replace(found.layer, bias=None)
            or (back.out[1] is None and back.out[2] is not None)
        ):
            return None
        positions = (spread[0], masked[0], *back.positions)
        if not all(listing.is_private(slot, positions) for slot in (dense, arrives)) or not listing.can_move_to(positions, at):
            return None
        # The maxima are read again, and must be what they were.
        if listing.is_written_between(found.maxima, found.pools[0], at):
            return None
        return _PooledBackward(positions=positions, gradient=gradient, convolution=back)
    return None


def _index_readers(question: MatchContext, at: int) -> list[int]:
    """Who reads the indices that a pool finds."""
    own = question.listing.instructions[at].outputs[1]
    return [] if own is None else question.listing.users(own)


def _shape_class(found: _PooledForward, back: _PooledBackward | None) -> ShapeClass:
    """The group is taken or left as a whole."""
    fused = [*(("bias",) if found.layer.bias is not None else ()), "relu", "pool"]
    for name, out in () if back is None else zip(("data gradient", "weight gradient"), back.convolution.out[:2], strict=True):
        fused += [name] if out is not None else []
    num_pixels = math.prod(found.value.shape) // found.value.shape[1]
    return found.layer.shape_class("conv", num_pixels, tuple(fused))


def _rewrite_pooled_convolution(
    question: MatchContext, call: Instruction, found: _PooledForward, back: _PooledBackward | None, variant: LaunchVariant
) -> Rewrite:
    layer, maxima, owner, first = found.layer, found.maxima, call.owner, found.pools[0]
    num_samples, num_channels, *size = maxima.shape
    taps = question.emitter.slot((num_samples, -(-num_channels // _CODES_PER_BYTE), *size), torch.uint8)
    x, body = question.image(layer.padded.slot, owner)
    weight, laid_out = channels_last_weight(question, layer, owner)
    geometry = layer.geometry(found.value.shape[2:])
    made = PooledConvolutionCall(flops=call.flops, geometry=geometry, numbers=layer.numbers, variant=variant)
    launch = kernel_instruction(made.run, maxima, taps, x, weight, layer.bias, writes=(maxima, taps), owner=owner)
    gone = {*found.positions, *found.pools}
    inserted = {first: (*body, *laid_out, allocation(maxima, owner), allocation(taps, owner), launch)}
    if back is not None:
        convolution = back.convolution
        gradient, body = question.image(back.gradient, convolution.call.owner)
        elsewhere: dict[int, tuple[Instruction, ...]] = {}
        if convolution.out[1] is not None:
            sums, elsewhere = weight_gradient_calls(question, convolution, gradient, maxima, taps, variant=variant)
            body = (*body, *sums)
        if convolution.out[0] is not None:
            body = (*body, *data_gradient_calls(question, convolution, gradient, maxima, found.value.shape[2:], taps, variant=variant))
        gone |= {*back.positions, *elsewhere}
        inserted |= {**elsewhere, convolution.at: body}
    return Rewrite(gone=frozenset(gone), inserted=inserted)
