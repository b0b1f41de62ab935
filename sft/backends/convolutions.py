"""Convolutions of a program, forwards: with the bias, the sum of two branches, the ReLU and the copy into a buffer that follow.

Each of these reads a whole image and writes one, and a kernel has the numbers in its registers already. The group grows along the one value
that it makes, for as long as nobody else reads what lies between. Where no backward pass follows, a frozen norm joins it as a scale and a
shift; where one does, the strip that is recomputed needs the norm's input, and both must be made of the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sft.backends.calls import allocation, kernel_instruction
from sft.backends.chains import Epilogue
from sft.backends.choice import NumberFormat, ShapeClass, pixel_class
from sft.backends.convolution_calls import ConvolutionCall, NormedConvolutionCall
from sft.backends.geometry import PaddedBuffer, WindowParameters, geometry_of, find_padded_buffer
from sft.backends.replacement import MatchContext, Rewrite
from sft.lower.program import Instruction, Slot

__all__ = ["ConvLayer", "match_convolutions", "forward_conv_layer", "channels_last_weight", "conv_layer_at"]

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
    numbers = question.chooser.numbers_of(x.dtype)
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
    takes_norm = question.folds_norms and not (layer.groups > 1 and layer.weight.shape[1] == 1)
    chain = Epilogue.of(question, out, at, ["bias"] if layer.bias is not None else [], takes_norm=takes_norm)
    if question.listing.writes_between(layer.padded.slot, at, chain.last):
        return None
    num_pixels = math.prod(out.shape) // out.shape[1]
    wanted = layer.shape_class("conv", num_pixels, tuple(chain.fused))
    if not question.chooser.takes_kernel(wanted):
        return None
    x, body = question.image(layer.padded.slot, owner)
    residual, copied = (None, ()) if chain.residual is None else question.image(chain.residual, owner)
    weight, laid_out = channels_last_weight(question, layer, owner)
    body = (*body, *laid_out)
    common: dict[str, Any] = {"geometry": layer.geometry(out.shape[2:]), "groups": layer.groups, "numbers": layer.numbers}
    common["variant"] = question.chooser.variant_of(wanted)
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
