"""Convolutions of a program, backwards: the gradients of input, weight and bias, with the ReLU in front of them.

ATen computes all three in one call, from a gradient that was masked by the ReLU in a pass of its own. Here data and weight are decided on
one by one; where kernels do all of it, the mask is taken while the gradient is loaded, and is never in memory. The weight's and the bias's
gradients are sums over the image: a strip finds its share in fp32, in a workspace of the program, and adds it to the accumulator as it is;
ATen would round a strip's share to half precision first.

Convolutions of a program, forwards: with the bias, the sum of two branches, the ReLU and the copy into a buffer that follow.

Each of these reads a whole image and writes one, and a kernel has the numbers in its registers already. The group grows along the one value
that it makes, for as long as nobody else reads what lies between. Where no backward pass follows, a frozen norm joins it as a scale and a
shift; where one does, the strip that is recomputed needs the norm's input, and both must be made of the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from sft.backends.conv_calls import ConvolutionCall, DataGradientCall, NormedConvolutionCall, WeightGradientCall, num_gradient_slots
from sft.backends.fusion import Epilogue, ReluGradPrologue, match_relu_grad
from sft.backends.kernel_call import allocation, kernel_instruction, zeroed_workspace
from sft.backends.pattern import MatchContext, Rewrite
from sft.backends.selector import NumberFormat, ShapeClass, pixel_class
from sft.backends.window_geometry import PaddedBuffer, WindowParameters, find_padded_buffer, geometry_of
from sft.kernels.common import LaunchVariant
from sft.lower.program import Instruction, Slot

__all__ = [
    "ConvBackward",
    "ConvLayer",
    "channels_last_weight",
    "conv_backward_at",
    "conv_layer_at",
    "data_gradient_calls",
    "forward_conv_layer",
    "match_conv_backward",
    "match_convolutions",
    "weight_gradient_calls",
]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvLayer:
    """A convolution of images or volumes that kernels can do.

    Attributes:
        padded: what it reads.
        weight: ``[outputs, inputs of a group, *kernel]``.
        bias: ``[outputs]``, or none.
        windows: of the call.
        groups: of channels.
        numbers: how elements are multiplied.
    """

    padded: PaddedBuffer
    weight: Slot
    bias: Slot | None
    windows: WindowParameters
    groups: int
    numbers: NumberFormat

    @property
    def is_plain(self) -> bool:
        """Of images and of one group."""
        return self.groups == 1 and len(self.weight.shape) == 4

    def geometry(self, outputs: tuple[int, ...]) -> Any:
        """Of the buffer that is read, without a padded copy."""
        return geometry_of(self.windows, self.padded.slot.shape[2:], outputs, self.padded.before)

    def shape_class(self, operator: str, num_pixels: int, fused: tuple[str, ...] = ()) -> ShapeClass:
        """The class of an operation on it."""
        name = f"conv{len(self.windows.kernel)}d"
        return ShapeClass(
            operator=operator.replace("conv", name, 1),
            fused=fused,
            numbers=self.numbers,
            channels=(self.weight.shape[1] * self.groups, self.weight.shape[0]),
            kernel=self.windows.kernel,
            stride=self.windows.stride,
            dilation=self.windows.dilation,
            groups=self.groups,
            pixels=pixel_class(num_pixels),
        )


def channels_last_weight(question: MatchContext, layer: ConvLayer, owner: str) -> tuple[Slot, tuple[Instruction, ...]]:
    """The weight channels-last, as models seldom have it: itself, or a copy with what makes it.

    A kernel takes blocks of many inputs of one tap. Only where these are side by side does it load more than a number at a time.
    """
    is_depthwise = layer.groups > 1 and layer.weight.shape[1] == 1
    return (layer.weight, ()) if is_depthwise or math.prod(layer.windows.kernel) == 1 else question.image(layer.weight, owner)


def conv_layer_at(
    question: MatchContext, at: int, *, x: Slot, weight: Slot, bias: Slot | None, geometry: tuple[Any, ...]
) -> ConvLayer | None:
    """The layer of ATen's call; None where kernels do not do it.

    Args:
        question: the program.
        at: position of the call.
        x, weight, bias: its operands.
        geometry: stride, padding, dilation, whether it is transposed, output padding, groups.
    """
    stride, padding, dilation, is_transposed, _, groups = geometry
    numbers = question.selector.number_format_of(x.dtype)
    dtypes = {slot.dtype for slot in (x, weight, bias) if slot is not None}
    if is_transposed or numbers is None or len(dtypes) > 1 or len(x.shape) not in (4, 5) or (len(x.shape) == 5 and groups > 1):
        return None
    if not all(x.shape) or not all(weight.shape):
        return None
    windows = WindowParameters.of(weight.shape[2:], stride, padding, dilation)
    padded = find_padded_buffer(question.listing, x, at, 0.0)
    return ConvLayer(padded=padded, weight=weight, bias=bias, windows=windows, groups=groups, numbers=numbers)


def forward_conv_layer(question: MatchContext, at: int, call: Instruction) -> ConvLayer | None:
    """The layer of a forward call."""
    x, weight, bias, *geometry = call.arguments
    out = call.outputs[0]
    if not isinstance(x, Slot) or out is None or out.root != out.number or not all(out.shape):
        return None
    return conv_layer_at(question, at, x=x, weight=weight, bias=bias, geometry=tuple(geometry))


def match_convolutions(question: MatchContext) -> Iterator[Rewrite]:
    """Convolutions with what follows them."""
    for at, call in list(question.free(aten.convolution.default)):
        layer = forward_conv_layer(question, at, call)
        if layer is not None:
            replacement = _rewrite_convolution(question, at, call, layer)
            if replacement is not None:
                yield replacement


def _rewrite_convolution(question: MatchContext, at: int, call: Instruction, layer: ConvLayer) -> Rewrite | None:
    out, owner = call.outputs[0], call.owner
    assert out is not None
    can_fold_norm = question.may_fold_norms and not (layer.groups > 1 and layer.weight.shape[1] == 1)
    chain = Epilogue.of(question, out, at, ["bias"] if layer.bias is not None else [], can_fold_norm=can_fold_norm)
    if question.listing.is_written_between(layer.padded.slot, at, chain.last):
        return None
    num_pixels = math.prod(out.shape) // out.shape[1]
    wanted = layer.shape_class("conv", num_pixels, tuple(chain.fused))
    if not question.selector.selects_kernel(wanted):
        return None
    x, body = question.image(layer.padded.slot, owner)
    residual, copied = (None, ()) if chain.residual is None else question.image(chain.residual, owner)
    weight, laid_out = channels_last_weight(question, layer, owner)
    body = (*body, *laid_out)
    common: dict[str, Any] = {"geometry": layer.geometry(out.shape[2:]), "groups": layer.groups, "numbers": layer.numbers}
    common["variant"] = question.selector.launch_variant_of(wanted)
    operands = (x, weight, layer.bias, residual)
    if chain.norm is None:
        plain = ConvolutionCall(flops=call.flops, relu=chain.relu, **common)
        launch = kernel_instruction(plain.run, chain.value, *operands, writes=(chain.value,), owner=owner)
        return chain.replacement(owner, (*body, *copied, launch))
    _, *statistics, _, eps = chain.norm.arguments
    normed = NormedConvolutionCall(flops=call.flops, relu=chain.relu, eps=eps, **common)
    space = question.emitter.slot((2 * out.shape[1],), torch.float32)
    launch = kernel_instruction(normed.run, chain.value, space, *operands, *statistics, writes=(chain.value, space), owner=owner)
    return chain.replacement(owner, (*body, *copied, allocation(space, owner), launch))


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
        return question.selector.launch_variant_of(one) if question.selector.selects_kernel(one) else None

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
    elsewhere = deliver_gradient(question, dw, sums.add_weight, sums.write_weight_grad, space, found.at, owner)
    if found.bias is not None:
        of_bias = deliver_gradient(question, found.bias, sums.add_bias, sums.write_bias_grad, space, found.at, owner)
        elsewhere = {at: (*elsewhere.get(at, ()), *of_bias.get(at, ())) for at in {*elsewhere, *of_bias}}
    return (*body, *elsewhere.pop(found.at, ())), elsewhere


def _with_output_mask(call: Instruction, mask: Sequence[bool]) -> Instruction:
    """The call for some of its gradients alone."""
    outputs = tuple(slot if wanted else None for slot, wanted in zip(call.outputs, mask, strict=True))
    arguments = (*call.arguments[:-1], list(mask))
    num_bytes = sum(slot.num_bytes for slot in outputs if slot is not None)
    return call._replace(arguments=arguments, outputs=outputs, flops=conv_backward_flops(call, mask), num_bytes=num_bytes)
