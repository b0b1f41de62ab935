"""Rewrites of convolutions: forward calls with their epilogues, and the gradients of input, weight and bias.

*Forward.* The bias, the sum with a residual branch, the ReLU and the copy into a buffer would each read and write the whole image, while
the kernel has the numbers in registers. So they are fused into the convolution's call. If no backward pass follows, a frozen norm is fused
as a scale and a shift. If one does, the recomputed strip needs the norm's input, and both must come from the same numbers, so the norm
stays an operator of its own.

*Backward.* ATen computes all three gradients in one call, from a gradient that another call has masked by the ReLU. Here a kernel is chosen
for data and weight separately. If kernels compute all of it, they apply the mask while they load the gradient, and the masked gradient is
never in memory. The gradients of weight and bias are sums over the image: a strip sums its contribution in fp32 in a workspace and adds it
to the accumulator as it is. ATen would round the contribution of a strip to half precision first.
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
from sft.backends.gradient_sums import deliver_gradients
from sft.backends.kernel_call import allocation, kernel_instruction
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
    """A convolution of images or volumes that kernels can compute.

    Attributes:
        padded: the input, without a padded copy.
        weight: ``[outputs, inputs of a group, *kernel]``.
        bias: ``[outputs]``, or None.
        windows: windows of ATen's call.
        groups: number of channel groups.
        numbers: number format.
    """

    padded: PaddedBuffer
    weight: Slot
    bias: Slot | None
    windows: WindowParameters
    groups: int
    numbers: NumberFormat

    @property
    def is_ungrouped_image(self) -> bool:
        """True for a convolution of images with one group."""
        return self.groups == 1 and len(self.weight.shape) == 4

    @property
    def is_depthwise(self) -> bool:
        """True if each input channel is a group."""
        return self.groups > 1 and self.weight.shape[1] == 1

    def geometry(self, outputs: tuple[int, ...]) -> Any:
        """Geometry of the input buffer and outputs of these extents."""
        return geometry_of(self.windows, self.padded.slot.shape[2:], outputs, self.padded.before)

    def shape_class(self, operator: str, num_pixels: int, fused: tuple[str, ...] = ()) -> ShapeClass:
        """The class of an operation of this layer; ``operator`` begins with ``"conv"``."""
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


def channels_last_weight(context: MatchContext, layer: ConvLayer, owner: str) -> tuple[Slot, tuple[Instruction, ...]]:
    """The weight in channels-last layout, and the instructions that copy it if it has another layout, as it has in most models.

    A kernel loads blocks of many inputs of one tap. Only if these are neighbours in memory does it load more than one number at a time.
    """
    if layer.is_depthwise or math.prod(layer.windows.kernel) == 1:
        return layer.weight, ()
    return context.to_channels_last(layer.weight, owner)


def conv_layer_at(
    context: MatchContext, at: int, *, x: Slot, weight: Slot, bias: Slot | None, geometry: tuple[Any, ...]
) -> ConvLayer | None:
    """The layer of ATen's call at a position; None if kernels cannot compute it.

    Args:
        context: the program.
        at: position of the call.
        x, weight, bias: operands of the call.
        geometry: stride, padding, dilation, is-transposed, output padding and groups of the call.
    """
    stride, padding, dilation, is_transposed, _, groups = geometry
    numbers = context.selector.number_format_of(x.dtype, multiplies=True)
    dtypes = {slot.dtype for slot in (x, weight, bias) if slot is not None}
    if is_transposed or numbers is None or len(dtypes) > 1 or len(x.shape) not in (4, 5) or (len(x.shape) == 5 and groups > 1):
        return None
    if not all(x.shape) or not all(weight.shape):
        return None
    windows = WindowParameters.of(weight.shape[2:], stride, padding, dilation)
    padded = find_padded_buffer(context.def_use, x, at, 0.0)
    return ConvLayer(padded=padded, weight=weight, bias=bias, windows=windows, groups=groups, numbers=numbers)


def forward_conv_layer(context: MatchContext, at: int, call: Instruction) -> ConvLayer | None:
    """The layer of a forward call; None if kernels cannot compute it."""
    x, weight, bias, *geometry = call.arguments
    out = call.outputs[0]
    if not isinstance(x, Slot) or out is None or out.root != out.number or not all(out.shape):
        return None
    return conv_layer_at(context, at, x=x, weight=weight, bias=bias, geometry=tuple(geometry))


def match_convolutions(context: MatchContext) -> Iterator[Rewrite]:
    """Forward convolutions with their epilogues."""
    for at, call in list(context.unclaimed_calls(aten.convolution.default)):
        layer = forward_conv_layer(context, at, call)
        rewrite = None if layer is None else _rewrite_convolution(context, at, call, layer)
        if rewrite is not None:
            yield rewrite


def _rewrite_convolution(context: MatchContext, at: int, call: Instruction, layer: ConvLayer) -> Rewrite | None:
    out, owner = call.outputs[0], call.owner
    assert out is not None
    can_fold_norm = context.may_fold_norms and not layer.is_depthwise
    epilogue = Epilogue.of(context, out, at, ["bias"] if layer.bias is not None else [], can_fold_norm=can_fold_norm)
    if context.def_use.is_written_between(layer.padded.slot, at, epilogue.last):
        return None
    num_pixels = math.prod(out.shape) // out.shape[1]
    shape_class = layer.shape_class("conv", num_pixels, tuple(epilogue.fused))
    if not context.selector.selects_kernel(shape_class):
        return None
    x, x_copy = context.to_channels_last(layer.padded.slot, owner)
    residual, residual_copy = (None, ()) if epilogue.residual is None else context.to_channels_last(epilogue.residual, owner)
    weight, weight_copy = channels_last_weight(context, layer, owner)
    copies = (*x_copy, *weight_copy, *residual_copy)
    common: dict[str, Any] = {"geometry": layer.geometry(out.shape[2:]), "groups": layer.groups, "numbers": layer.numbers}
    common |= {"variant": context.selector.launch_variant_of(shape_class), "relu": epilogue.relu, "flops": call.flops}
    operands = (x, weight, layer.bias, residual)
    value = epilogue.value
    if epilogue.norm is None:
        launch = kernel_instruction(ConvolutionCall(**common).run, value, *operands, writes=(value,), owner=owner)
        return epilogue.to_rewrite(owner, (*copies, launch))
    _, *statistics, _, eps = epilogue.norm.arguments
    normed = NormedConvolutionCall(eps=eps, **common)
    workspace = context.builder.slot((2 * out.shape[1],), torch.float32)
    launch = kernel_instruction(normed.run, value, workspace, *operands, *statistics, writes=(value, workspace), owner=owner)
    return epilogue.to_rewrite(owner, (*copies, allocation(workspace, owner), launch))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvBackward:
    """A call of ``convolution_backward``.

    Attributes:
        at: position of the call.
        call: the call.
        layer: the convolution.
        gradient: gradient of the output.
        grads: gradients of input, weight and bias; None for those that the call does not make.
        bias_sum: position of the sum that makes the bias's gradient if the call does not, as in half precision.
        bias_grad: gradient of the bias, from the call or the sum.
    """

    at: int
    call: Instruction
    layer: ConvLayer
    gradient: Slot
    grads: tuple[Slot | None, Slot | None, Slot | None]
    bias_sum: int | None
    bias_grad: Slot | None

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the bias's sum and of the call."""
        return (self.at,) if self.bias_sum is None else (self.bias_sum, self.at)

    @property
    def num_pixels(self) -> int:
        """Number of pixels of the convolution's output."""
        return math.prod(self.gradient.shape) // self.gradient.shape[1]

    def output_mask(self, operator: str) -> tuple[bool, ...]:
        """ATen's output mask of the gradients of data (``"data"``), or of weight and bias (``"weight"``)."""
        return tuple(grad is not None and (index == 0) == (operator == "data") for index, grad in enumerate(self.grads))


def conv_backward_at(context: MatchContext, at: int, call: Instruction) -> ConvBackward | None:
    """The backward call at a position; None if kernels cannot compute it."""
    gradient, x, weight, _, *geometry, _ = call.arguments
    dx, dw, db = context.def_use.read_outputs(call)
    if not isinstance(gradient, Slot) or not isinstance(x, Slot) or not all(gradient.shape) or gradient.dtype != x.dtype:
        return None
    if any(slot is not None and slot.root != slot.number for slot in call.outputs):
        return None
    layer = conv_layer_at(context, at, x=x, weight=weight, bias=None, geometry=tuple(geometry))
    if layer is None:
        return None
    bias_sum = _bias_sum(context, gradient, at) if dw is not None and db is None else None
    bias_grad = db if bias_sum is None else context.def_use.instructions[bias_sum].outputs[0]
    return ConvBackward(at=at, call=call, layer=layer, gradient=gradient, grads=(dx, dw, db), bias_sum=bias_sum, bias_grad=bias_grad)


def _bias_sum(context: MatchContext, gradient: Slot, at: int) -> int | None:
    """Position of a sum of the gradient over all pixels, directly before position ``at``; None if that instruction is not such a sum."""
    previous = at - 1
    if previous < 0 or not context.is_unclaimed(previous, aten.sum.dim_IntList):
        return None
    call = context.def_use.instructions[previous]
    dims = [0, *range(2, len(gradient.shape))]
    return previous if call.arguments[0] == gradient and list(call.arguments[1]) == dims and len(call.arguments) == 2 else None


def conv_backward_flops(call: Instruction, mask: Sequence[bool]) -> int:
    """Floating-point operations of a backward call with another output mask."""
    formula: Any = flop_registry[aten.convolution_backward]
    shapes = [argument.shape if isinstance(argument, Slot) else argument for argument in call.arguments[:-1]]
    out = tuple(slot.shape if slot is not None and selected else None for slot, selected in zip(call.outputs, mask, strict=True))
    return int(formula.__wrapped__(*shapes, list(mask), out_shape=out))


def match_conv_backward(context: MatchContext) -> Iterator[Rewrite]:
    """Gradients of convolutions."""
    for at, call in list(context.unclaimed_calls(aten.convolution_backward.default)):
        backward = conv_backward_at(context, at, call)
        rewrite = None if backward is None else _rewrite_conv_backward(context, backward)
        if rewrite is not None:
            yield rewrite


def _rewrite_conv_backward(context: MatchContext, backward: ConvBackward) -> Rewrite | None:
    """All gradients with the ReLU's mask if kernels compute all of them, each gradient separately otherwise."""
    dx, dw, db = backward.grads
    operators = [name for name, grad in (("data", dx), ("weight", dw)) if grad is not None]

    def variant_of(*names: str, fused: tuple[str, ...] = ()) -> LaunchVariant | None:
        """Launch variant of the kernels of these gradients; None if ATen computes them."""
        shape_class = backward.layer.shape_class(f"conv {' and '.join(names)} gradient", backward.num_pixels, fused)
        return context.selector.launch_variant_of(shape_class) if context.selector.selects_kernel(shape_class) else None

    # ATen computes a bias's gradient alone, and reads the masked gradient.
    prologue = match_relu_grad(context, backward.gradient, backward.positions) if dw is not None or db is None else None
    if prologue is not None and (variant := variant_of(*operators, fused=("relu",))) is not None:
        return _rewrite_gradients(context, backward, prologue, dict.fromkeys(operators, variant))
    variants = {name: variant for name in operators if (variant := variant_of(name)) is not None}
    return _rewrite_gradients(context, backward, None, variants) if variants else None


def _rewrite_gradients(
    context: MatchContext, backward: ConvBackward, prologue: ReluGradPrologue | None, variants: Mapping[str, LaunchVariant]
) -> Rewrite:
    """Kernels for the gradients with a launch variant, ATen's call for the remaining ones."""
    call, owner = backward.call, backward.call.owner
    unmasked = backward.gradient if prologue is None else prologue.gradient
    gradient, body = context.to_channels_last(unmasked, owner)
    output: Slot | None = None
    if prologue is not None:
        output, copy = context.to_channels_last(prologue.output, owner)
        body = (*body, *copy)
    removed = {backward.at} if prologue is None else {backward.at, prologue.at}
    deliveries: dict[int, tuple[Instruction, ...]] = {}
    if "weight" in variants:
        sums, deliveries = weight_gradient_calls(context, backward, gradient, output, variant=variants["weight"])
        body = (*body, *sums)
        removed |= {*backward.positions, *deliveries}
    if "data" in variants:
        body = (*body, *data_gradient_calls(context, backward, gradient, output, unmasked.shape[2:], variant=variants["data"]))
    aten_mask = [slot is not None and ("data" if index == 0 else "weight") not in variants for index, slot in enumerate(backward.grads)]
    if any(aten_mask):
        body = (_with_output_mask(call, aten_mask), *body)
    return Rewrite(removed=frozenset(removed), inserted={**deliveries, backward.at: body})


def data_gradient_calls(
    context: MatchContext,
    backward: ConvBackward,
    gradient: Slot,
    output: Slot | None,
    outputs: tuple[int, ...],
    taps: Slot | None = None,
    *,
    variant: LaunchVariant,
) -> tuple[Instruction, ...]:
    """The input's gradient by a kernel.

    Args:
        context: the program.
        backward: ATen's call.
        gradient: gradient of the output, or of the maxima.
        output: output of the ReLU that masks the gradient.
        outputs: extents of the convolution's output.
        taps: positions of the maxima, if ``gradient`` and ``output`` are of maxima.
        variant: launch variant.
    """
    dx, layer, owner = backward.grads[0], backward.layer, backward.call.owner
    assert dx is not None
    data = DataGradientCall(
        flops=conv_backward_flops(backward.call, backward.output_mask("data")),
        geometry=geometry_of(layer.windows, dx.shape[2:], outputs),
        groups=layer.groups,
        numbers=layer.numbers,
        variant=variant,
    )
    weight, copy = channels_last_weight(context, layer, owner)
    return (*copy, allocation(dx, owner), kernel_instruction(data.run, dx, gradient, weight, output, taps, writes=(dx,), owner=owner))


def weight_gradient_calls(
    context: MatchContext, backward: ConvBackward, gradient: Slot, output: Slot | None, taps: Slot | None = None, *, variant: LaunchVariant
) -> tuple[tuple[Instruction, ...], dict[int, tuple[Instruction, ...]]]:
    """The gradients of weight and bias by a kernel; arguments as for :func:`data_gradient_calls`.

    Returns:
        Instructions at the position of ATen's call, and instructions at other positions: those that add the gradients to accumulators.
    """
    owner, layer, dw = backward.call.owner, backward.layer, backward.grads[1]
    assert dw is not None
    sums = WeightGradientCall(
        flops=conv_backward_flops(backward.call, backward.output_mask("weight")),
        geometry=layer.geometry(backward.gradient.shape[2:]),
        groups=layer.groups,
        numbers=layer.numbers,
        variant=variant,
        weight=layer.weight.shape,
        has_bias=backward.bias_grad is not None,
        num_splits=num_gradient_slots(
            layer.weight.shape, backward.num_pixels, is_depthwise=layer.groups > 1 and layer.weight.shape[1] == 1
        ),
    )
    x, copy = context.to_channels_last(layer.padded.slot, owner)
    workspace = context.builder.slot((sums.num_elements,), torch.float32)
    launch = kernel_instruction(sums.run, workspace, gradient, x, output, taps, writes=(workspace,), owner=owner)
    deliveries = deliver_gradients(context, sums, (dw, backward.bias_grad), workspace, backward.at, owner)
    return (*copy, allocation(workspace, owner), launch, *deliveries.pop(backward.at, ())), deliveries


def _with_output_mask(call: Instruction, mask: Sequence[bool]) -> Instruction:
    """ATen's backward call with another output mask."""
    outputs = tuple(slot if selected else None for slot, selected in zip(call.outputs, mask, strict=True))
    arguments = (*call.arguments[:-1], list(mask))
    num_bytes = sum(slot.num_bytes for slot in outputs if slot is not None)
    return call._replace(arguments=arguments, outputs=outputs, flops=conv_backward_flops(call, mask), num_bytes=num_bytes)
