"""Convolutions of a program, backwards: the gradients of input, weight and bias, with the ReLU in front of them.

ATen computes all three in one call, from a gradient that was masked by the ReLU in a pass of its own. Here data and weight are decided on
one by one; where kernels do all of it, the mask is taken while the gradient is loaded, and is never in memory. The weight's and the bias's
gradients are sums over the image: a strip finds its share in fp32, in a workspace of the program, and adds it to the accumulator as it is;
ATen would round a strip's share to half precision first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from sft.backends.calls import allocation, kernel_instruction, zeroed_workspace
from sft.backends.convolution_calls import DataGradientCall, WeightGradientCall, num_gradient_slots
from sft.backends.convolutions import ConvLayer, channels_last_weight, conv_layer_at
from sft.backends.geometry import geometry_of
from sft.backends.masks import ReluGradPrologue, match_relu_grad
from sft.backends.replacement import MatchContext, Rewrite
from sft.kernels.blocks import LaunchVariant
from sft.lower.program import Instruction, Slot

__all__ = ["ConvBackward", "conv_backward_at", "match_conv_backward", "data_gradient_calls", "weight_gradient_calls"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvBackward:
    """A call of ATen's that differentiates a convolution.

    Attributes:
        at: its position.
        call: itself.
        layer: the convolution.
        gradient: of the output.
        out: gradients of input, weight and bias, those that are wanted.
        bias_sum: position of the sum that is the bias's gradient where the call does not make it, in half precision.
        bias: what that makes.
    """

    at: int
    call: Instruction
    layer: ConvLayer
    gradient: Slot
    out: tuple[Slot | None, Slot | None, Slot | None]
    bias_sum: int | None
    bias: Slot | None

    @property
    def positions(self) -> tuple[int, ...]:
        """Of the call, and of the bias's sum."""
        return (self.at,) if self.bias_sum is None else (self.bias_sum, self.at)

    def wants(self, operator: str) -> tuple[bool, ...]:
        """ATen's mask of what is wanted, of one kind."""
        return tuple(slot is not None and (place == 0) == (operator == "data") for place, slot in enumerate(self.out))


def conv_backward_at(question: MatchContext, at: int, call: Instruction) -> ConvBackward | None:
    """The call at a position; None where kernels do not do it."""
    gradient, x, weight, _, *geometry, _ = call.arguments
    dx, dw, db = call.outputs
    if not isinstance(gradient, Slot) or not isinstance(x, Slot) or not all(gradient.shape) or gradient.dtype != x.dtype:
        return None
    if any(slot is not None and slot.root != slot.number for slot in call.outputs):
        return None
    layer = conv_layer_at(question, at, x=x, weight=weight, bias=None, geometry=tuple(geometry))
    if layer is None:
        return None
    bias_sum = _bias_sum(question, gradient, at) if dw is not None and db is None else None
    bias = db if bias_sum is None else question.listing.instructions[bias_sum].outputs[0]
    return ConvBackward(at=at, call=call, layer=layer, gradient=gradient, out=(dx, dw, db), bias_sum=bias_sum, bias=bias)


def _bias_sum(question: MatchContext, gradient: Slot, at: int) -> int | None:
    """The position of the sum over all pixels that stands just before a call."""
    before = at - 1
    if before < 0 or not question.is_free(before, aten.sum.dim_IntList):
        return None
    call = question.listing.instructions[before]
    dims = [0, *range(2, len(gradient.shape))]
    return before if call.arguments[0] == gradient and list(call.arguments[1]) == dims and len(call.arguments) == 2 else None


def conv_backward_flops(call: Instruction, mask: Sequence[bool]) -> int:
    """Floating-point operations of the call, had it been asked for these gradients alone."""
    formula: Any = flop_registry[aten.convolution_backward]
    shapes = [argument.shape if isinstance(argument, Slot) else argument for argument in call.arguments[:-1]]
    out = tuple(slot.shape if slot is not None and wanted else None for slot, wanted in zip(call.outputs, mask, strict=True))
    return int(formula.__wrapped__(*shapes, list(mask), out_shape=out))


def deliver_gradient(
    question: MatchContext, slot: Slot, add: Any, give: Any, space: Slot, at: int, owner: str
) -> dict[int, tuple[Instruction, ...]]:
    """What brings a gradient from the workspace to where the program wants it: added to a sum, or as a tensor of its own.

    Returns:
        Instructions at ``at``, where the workspace is filled, or in the place of the one that would have added the gradient.
    """
    listing = question.listing
    users = listing.users(slot)
    maker = listing.makers[slot.number]
    if len(users) == 1 and users[0] > at and question.is_free(users[0], aten.add_.Tensor) and listing.is_private(slot, (maker, users[0])):
        call = listing.instructions[users[0]]
        if call.arguments[1] == slot and len(call.arguments) == 2 and not call.keywords and call.arguments[0] != slot:
            total = call.arguments[0]
            return {users[0]: (kernel_instruction(add, total, space, writes=(total,), owner=call.owner),)}
    return {at: (allocation(slot, owner), kernel_instruction(give, slot, space, writes=(slot,), owner=owner))}


def match_conv_backward(question: MatchContext) -> Iterator[Rewrite]:
    """Gradients of convolutions."""
    for at, call in list(question.free(aten.convolution_backward.default)):
        found = conv_backward_at(question, at, call)
        if found is not None:
            replacement = _rewrite_conv_backward(question, found)
            if replacement is not None:
                yield replacement


def _rewrite_conv_backward(question: MatchContext, found: ConvBackward) -> Rewrite | None:
    """All of it with the mask, or else each part as it is."""
    dx, dw, db = found.out
    num_pixels = math.prod(found.gradient.shape) // found.gradient.shape[1]
    parts = [name for name, out in (("data", dx), ("weight", dw)) if out is not None]

    def way(*wanted: str, fused: tuple[str, ...] = ()) -> LaunchVariant | None:
        """How kernels do it, if they do."""
        one = found.layer.shape_class(f"conv {' and '.join(wanted)} gradient", num_pixels, fused)
        return question.chooser.variant_of(one) if question.chooser.takes_kernel(one) else None

    # A bias's gradient alone is ATen's, which reads the masked one.
    mask = match_relu_grad(question, found.gradient, found.positions) if dw is not None or db is None else None
    if mask is not None and (together := way(*parts, fused=("relu",))) is not None:
        return _gradient_kernels(question, found, mask, dict.fromkeys(parts, together))
    taken = {part: alone for part in parts if (alone := way(part)) is not None}
    return _gradient_kernels(question, found, None, taken) if taken else None


def _gradient_kernels(
    question: MatchContext, found: ConvBackward, mask: ReluGradPrologue | None, taken: Mapping[str, LaunchVariant]
) -> Rewrite:
    """The call's gradients by kernels as far as they take them, each in its way; by ATen otherwise."""
    call, owner, given = found.call, found.call.owner, found.gradient if mask is None else mask.gradient
    takes_data, takes_weight = "data" in taken, "weight" in taken
    gradient, body = question.image(given, owner)
    output: Slot | None = None
    if mask is not None:
        output, copied = question.image(mask.output, owner)
        body = (*body, *copied)
    gone = {found.at} if mask is None else {found.at, mask.at}
    elsewhere: dict[int, tuple[Instruction, ...]] = {}
    if takes_weight:
        weight, elsewhere = weight_gradient_calls(question, found, gradient, output, variant=taken["weight"])
        body = (*body, *weight)
        gone |= {*found.positions, *elsewhere}
    if takes_data:
        body = (*body, *data_gradient_calls(question, found, gradient, output, given.shape[2:], variant=taken["data"]))
    rest = [slot is not None and not (takes_data if place == 0 else takes_weight) for place, slot in enumerate(found.out)]
    if any(rest):
        body = (_with_output_mask(call, rest), *body)
    return Rewrite(gone=frozenset(gone), inserted={**elsewhere, found.at: body})


def data_gradient_calls(
    question: MatchContext,
    found: ConvBackward,
    gradient: Slot,
    output: Slot | None,
    outputs: tuple[int, ...],
    taps: Slot | None = None,
    *,
    variant: LaunchVariant,
) -> tuple[Instruction, ...]:
    """The input's gradient by a kernel; ``outputs`` are extents of the convolution's output."""
    dx, layer, owner = found.out[0], found.layer, found.call.owner
    assert dx is not None
    data = DataGradientCall(
        flops=conv_backward_flops(found.call, found.wants("data")),
        geometry=geometry_of(layer.windows, dx.shape[2:], outputs),
        groups=layer.groups,
        numbers=layer.numbers,
        variant=variant,
    )
    weight, body = channels_last_weight(question, layer, owner)
    return (*body, allocation(dx, owner), kernel_instruction(data.run, dx, gradient, weight, output, taps, writes=(dx,), owner=owner))


def weight_gradient_calls(
    question: MatchContext, found: ConvBackward, gradient: Slot, output: Slot | None, taps: Slot | None = None, *, variant: LaunchVariant
) -> tuple[tuple[Instruction, ...], dict[int, tuple[Instruction, ...]]]:
    """The sums by a kernel, with what gives them out at once; and what stands in the place of those who would have added them."""
    owner, layer, dw = found.call.owner, found.layer, found.out[1]
    assert dw is not None
    sums = WeightGradientCall(
        flops=conv_backward_flops(found.call, found.wants("weight")),
        geometry=layer.geometry(found.gradient.shape[2:]),
        groups=layer.groups,
        numbers=layer.numbers,
        variant=variant,
        weight=layer.weight.shape,
        has_bias=found.bias is not None,
        num_splits=num_gradient_slots(layer.weight.shape, math.prod(found.gradient.shape) // found.gradient.shape[1]),
    )
    x, body = question.image(layer.padded.slot, owner)
    space = question.emitter.slot((sums.num_elements,), torch.float32)
    body = (
        *body,
        *zeroed_workspace(space, owner),
        kernel_instruction(sums.run, space, gradient, x, output, taps, writes=(space,), owner=owner),
    )
    elsewhere = deliver_gradient(question, dw, sums.add_weight, sums.give_weight, space, found.at, owner)
    if found.bias is not None:
        of_bias = deliver_gradient(question, found.bias, sums.add_bias, sums.give_bias, space, found.at, owner)
        elsewhere = {at: (*elsewhere.get(at, ()), *of_bias.get(at, ())) for at in {*elsewhere, *of_bias}}
    return (*body, *elsewhere.pop(found.at, ())), elsewhere


def _with_output_mask(call: Instruction, mask: Sequence[bool]) -> Instruction:
    """The call for some of its gradients alone."""
    outputs = tuple(slot if wanted else None for slot, wanted in zip(call.outputs, mask, strict=True))
    arguments = (*call.arguments[:-1], list(mask))
    num_bytes = sum(slot.num_bytes for slot in outputs if slot is not None)
    return call._replace(arguments=arguments, outputs=outputs, flops=conv_backward_flops(call, mask), num_bytes=num_bytes)
