"""The first convolution of a network, of an image in bytes: normalised while it is loaded, never in memory as numbers.

A pixel's bytes become ``gain * byte + offset``, channel by channel, rounded to the dtype of the weight as if the image had been
normalised before; the padding is zero of that, not a byte. The image needs no gradient, so there is only the weight's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sft.common.errors import InputError
from sft.kernels.common import uses_triton
from sft.kernels.conv.conv2d import Activation, GradientSlots, Precision, check_layer, weight_gradients
from sft.kernels.conv.conv_reference import reference_conv2d, reference_weight_gradient
from sft.kernels.geometry import Geometry

__all__ = ["PixelLevels", "stem_conv2d", "stem_weight_gradient"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PixelLevels:
    """What bytes mean, fp32 ``[C]`` each."""

    gain: Tensor
    offset: Tensor

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float], *, device: torch.device | str = "cpu") -> PixelLevels:
        """Of images that are divided by 255, then normalised by a mean and a standard deviation for each channel.

        >>> levels = PixelLevels.of([0.5], [0.25])
        >>> round(float(255 * levels.gain + levels.offset), 6)
        2.0
        """
        wide = [torch.tensor(values, dtype=torch.float64, device="cpu") for values in (mean, std)]
        gain, offset = 1 / (255 * wide[1]), -wide[0] / wide[1]
        return cls(gain=gain.to(device, torch.float32), offset=offset.to(device, torch.float32))

    def numbers(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The image ``[N, C, h, w]`` of numbers that an image of bytes stands for."""
        wide = torch.promote_types(dtype, torch.float32)
        return (x.to(wide) * self.gain.to(wide).view(1, -1, 1, 1) + self.offset.to(wide).view(1, -1, 1, 1)).to(dtype)


def stem_conv2d(
    x: Tensor,
    levels: PixelLevels,
    weight: Tensor,
    geometry: Geometry,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation = "none",
    precision: Precision | None = None,
) -> Tensor:
    """``activation(scale * conv(levels of x) + bias)`` of one tile. Differentiable once in all but ``x``.

    Args:
        x: uint8 ``[N, C, h, w]``, channels-last, the buffer that ``geometry`` calls input.
        levels: what the bytes mean, on the device of ``x``.
        weight, scale, bias, activation, precision: as for ``conv2d.conv2d``.

    Returns:
        ``[N, outputs, rows, columns]``, channels-last, in the dtype of ``weight``.

    Raises:
        InputError: as ``conv2d.conv2d``; or ``x`` is not of bytes, or the levels are of other channels.

    >>> from sft.kernels.geometry import Window
    >>> x, window = torch.full((1, 1, 1, 2), 255, dtype=torch.uint8), Window(kernel=1)
    >>> y = stem_conv2d(x, PixelLevels.of([0.0], [1.0]), torch.full((1, 1, 1, 1), 3.0), Geometry.whole((1, 2), window, window))
    >>> [round(value, 5) for value in y.flatten().tolist()]
    [3.0, 3.0]
    """
    options = (activation, precision)
    result: Tensor = _Stem.apply(x, levels, weight, scale, bias, geometry, options)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return result


def stem_weight_gradient(
    gradient: Tensor,
    x: Tensor,
    levels: PixelLevels,
    geometry: Geometry,
    *,
    into: GradientSlots,
    output: Tensor | None = None,
    precision: Precision | None = None,
) -> None:
    """Add one tile's share of the gradients of weight and bias to ``into``; arguments as for ``conv2d.conv2d_weight_gradient``."""
    geometry.check_forward()
    num_out, *kernel, num_in = into.weights.shape[1:]
    weight = torch.empty(num_out, num_in, *kernel, dtype=gradient.dtype, device="meta")
    mode = _check(x, levels, weight, geometry, precision, None, None, [("gradient", gradient), ("output", output)])
    if not gradient.numel():
        return
    if uses_triton(gradient):
        from sft.kernels.conv.weight_grad2d_triton import launch_weight_gradient  # not above: it imports Triton

        values = (levels.gain, levels.offset)
        launch_weight_gradient(gradient, output, x, into.weights, into.biases, geometry, groups=1, precision=mode, levels=values)
        return
    numbers = levels.numbers(x, gradient.dtype)
    shares = reference_weight_gradient(gradient, output, numbers, (num_out, num_in, *kernel), geometry, groups=1)
    into.weights[0] += shares[0].permute(0, 2, 3, 1)
    if into.biases is not None:
        into.biases[0] += shares[1]


class _Stem(torch.autograd.Function):
    """Saves the image as bytes, the weight and, behind a ReLU, the output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        levels: PixelLevels,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        geometry: Geometry,
        options: tuple[Activation, Precision | None],
    ) -> Tensor:
        activation, precision = options
        geometry.check_forward()
        mode = _check(x, levels, weight, geometry, precision, scale, bias, [])
        size = (x.shape[0], weight.shape[0], *geometry.output_size)
        out = torch.empty(size, dtype=weight.dtype, device=x.device, memory_format=torch.channels_last)
        relu = activation == "relu"
        if out.numel() and uses_triton(out):
            from sft.kernels.conv.forward2d_triton import launch_conv2d  # not above: it imports Triton

            values = (levels.gain, levels.offset)
            launch_conv2d(x, weight, bias, None, out, geometry, groups=1, relu=relu, precision=mode, scale=scale, levels=values)
        elif out.numel():
            numbers = levels.numbers(x, weight.dtype)
            out.copy_(reference_conv2d(numbers, weight, bias, None, geometry, groups=1, relu=relu, scale=scale))
        ctx.save_for_backward(x, weight, scale, out if relu else None, levels.gain, levels.offset)
        ctx.geometry, ctx.precision, ctx.bias = geometry, precision, None if bias is None else bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, output, gain, offset = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        slots = GradientSlots.zeros(weight, bias=ctx.needs_input_grad[4])
        levels = PixelLevels(gain=gain, offset=offset)
        stem_weight_gradient(gradient, x, levels, ctx.geometry, into=slots, output=output, precision=ctx.precision)
        return None, None, *weight_gradients(slots, weight, scale, ctx.bias), None, None


def _check(
    x: Tensor,
    levels: PixelLevels,
    weight: Tensor,
    geometry: Geometry,
    precision: Precision | None,
    scale: Tensor | None,
    bias: Tensor | None,
    outputs: list[tuple[str, Tensor | None]],
) -> Precision:
    if x.dtype != torch.uint8:
        raise InputError(f"a stem takes an image of torch.uint8, got {x.dtype}; use conv2d for numbers")
    for name, values in (("gain", levels.gain), ("offset", levels.offset)):
        if tuple(values.shape) != (x.shape[1],) or values.dtype != torch.float32 or values.device != x.device:
            found = f"{values.dtype} {tuple(values.shape)} on {values.device}"
            raise InputError(f"the levels' {name} is {found}; give torch.float32 [{x.shape[1]}] on {x.device}")
    numbers = torch.empty_strided(x.shape, x.stride(), dtype=weight.dtype, device="meta")
    return check_layer(numbers, weight, geometry, 1, precision, outputs, scale, bias)
