"""Launches of the kernels as programs make them, with the tensors that they write to.

Each function allocates results, or takes them as ``out``, and calls one or a few launches of ``sft.kernels`` on the untiled image.
Launches are imported when they are called: their modules import Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sft.kernels.common import LaunchVariant
from sft.kernels.geometry import Geometry, VolumeGeometry
from sft.kernels.pool.taps import tap_channels

__all__ = [
    "average_pool",
    "average_pool_gradient",
    "conv2d",
    "conv2d_data_gradient",
    "conv2d_max_pool",
    "conv2d_weight_gradient",
    "conv3d",
    "conv3d_data_gradient",
    "conv3d_weight_gradient",
    "max_pool",
    "max_pool_gradient",
    "norm_moments",
    "norm_sums",
    "norm_terms",
    "precision_of",
]

_PRECISIONS = {torch.float32: "ieee", torch.bfloat16: "bf16", torch.float16: "fp16"}
#: slots of the sums over pixels
num_weight_splits, num_norm_splits = 32, 512


def precision_of(x: Tensor, precision: str | None = None) -> str:
    """Precision of products of elements of ``x``: exact by default."""
    return _PRECISIONS[x.dtype] if precision is None else precision


def _image(like: Tensor, num_channels: int, size: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised channels-last image or volume."""
    memory = torch.empty(like.shape[0], *size, num_channels, dtype=like.dtype if dtype is None else dtype, device=like.device)
    return memory.movedim(-1, 1)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    geometry: Geometry,
    *,
    groups: int = 1,
    relu: bool = True,
    precision: str | None = None,
    variant: LaunchVariant = "default",
    out: Tensor | None = None,
) -> Tensor:
    """``relu(conv(x) + bias)``."""
    out = _image(x, weight.shape[0], geometry.output_size) if out is None else out
    if groups > 1 and weight.shape[1] == 1:
        from sft.kernels.conv.depthwise_triton import launch_depthwise

        launch_depthwise(x, weight, bias, None, out, geometry, relu=relu)
        return out
    from sft.kernels.conv.forward2d_triton import launch_conv2d

    options = {"groups": groups, "relu": relu, "precision": precision_of(x, precision)}
    launch_conv2d(x, weight, bias, None, out, geometry, **options, variant=variant)  # type: ignore[arg-type]  # mixed options
    return out


def conv2d_max_pool(x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The maxima of 2 x 2 pixels of ``relu(conv(x) + bias)``, and their taps."""
    from sft.kernels.conv.forward2d_triton import launch_conv2d

    size = [length // 2 for length in geometry.output_size]
    out, taps = _image(x, weight.shape[0], size), _image(x, -(-weight.shape[0] // 4), size, torch.uint8)
    launch_conv2d(x, weight, bias, None, out, geometry, groups=1, relu=True, precision=precision_of(x), taps=taps)
    return out, taps


def conv2d_data_gradient(
    gradient: Tensor,
    output: Tensor | None,
    weight: Tensor,
    out: Tensor,
    geometry: Geometry,
    *,
    groups: int = 1,
    taps: Tensor | None = None,
) -> Tensor:
    """The gradient of a convolution's input, of ``gradient`` where the ReLU's ``output`` is not zero."""
    if groups > 1 and weight.shape[1] == 1:
        from sft.kernels.conv.depthwise_triton import launch_depthwise_gradient

        launch_depthwise_gradient(gradient, output, weight, out, geometry)
        return out
    from sft.kernels.conv.data_grad2d_triton import launch_data_gradient

    launch_data_gradient(gradient, output, weight, out, geometry, groups=groups, precision=precision_of(gradient), taps=taps)
    return out


def _weight_slots(weight: Tensor) -> tuple[Tensor, Tensor]:
    num_out, num_in, *kernel = weight.shape
    weights = torch.zeros(num_weight_splits, num_out, *kernel, num_in, device=weight.device)
    return weights, torch.zeros(num_weight_splits, num_out, device=weight.device)


def _reduced(weights: Tensor, biases: Tensor) -> list[Tensor]:
    """The gradients of weight and bias in fp32, from their slots."""
    from sft.kernels.reduce.reduce_triton import launch_reduce

    totals = [weights.new_empty(weights.shape[1:]).movedim(-1, 1), biases.new_empty(biases.shape[1:])]
    launch_reduce(weights, totals[0], biases, totals[1])
    return totals


def conv2d_weight_gradient(
    gradient: Tensor,
    output: Tensor | None,
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
    *,
    groups: int = 1,
    taps: Tensor | None = None,
) -> list[Tensor]:
    """The gradients of weight and bias in fp32."""
    weights, biases = _weight_slots(weight)
    if groups > 1 and weight.shape[1] == 1:
        from sft.kernels.conv.depthwise_triton import launch_depthwise_weight

        launch_depthwise_weight(gradient, output, x, weights, biases, geometry)
    else:
        from sft.kernels.conv.weight_grad2d_triton import launch_weight_gradient

        launch_weight_gradient(gradient, output, x, weights, biases, geometry, groups=groups, precision=precision_of(x), taps=taps)
    return _reduced(weights, biases)


def conv3d(x: Tensor, weight: Tensor, bias: Tensor, geometry: VolumeGeometry) -> Tensor:
    """``relu(conv(x) + bias)`` of a volume."""
    from sft.kernels.conv.forward3d_triton import launch_conv3d

    out = _image(x, weight.shape[0], geometry.output_size)
    launch_conv3d(x, weight, bias, None, out, geometry, relu=True, precision=precision_of(x))
    return out


def conv3d_data_gradient(gradient: Tensor, weight: Tensor, geometry: VolumeGeometry) -> Tensor:
    """The gradient of a volume."""
    from sft.kernels.conv.data_grad3d_triton import launch_volume_data_gradient

    out = _image(gradient, weight.shape[1], geometry.input_size)
    launch_volume_data_gradient(gradient, None, weight, out, geometry, precision=precision_of(gradient))
    return out


def conv3d_weight_gradient(gradient: Tensor, x: Tensor, weight: Tensor, geometry: VolumeGeometry) -> list[Tensor]:
    """The gradients of a volume's weight and bias in fp32."""
    from sft.kernels.conv.weight_grad3d_triton import launch_volume_weight_gradient

    weights, biases = _weight_slots(weight)
    launch_volume_weight_gradient(gradient, None, x, weights, biases, geometry, precision=precision_of(x))
    return _reduced(weights, biases)


def norm_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel, fp64."""
    from sft.kernels.norm.norm_triton import launch_moments

    means = torch.zeros(num_norm_splits, 1, x.shape[1], dtype=torch.float64, device=x.device)
    counts, squares = torch.zeros_like(means, dtype=torch.int64), torch.zeros_like(means)
    launch_moments(x, counts, means, squares)
    count = counts.sum((0, 1))
    mean = (counts * means).sum((0, 1)) / count
    return mean, (squares + counts * (means - mean).square()).sum((0, 1)) / count


def norm_sums(gradient: Tensor, output: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of each channel, fp64: of the gradient, and of its product with the normalised input."""
    from sft.kernels.norm.norm_triton import launch_norm_sums

    first = torch.zeros(num_norm_splits, 1, x.shape[1], dtype=torch.float64, device=x.device)
    second = torch.zeros_like(first)
    launch_norm_sums(gradient, output, x, mean, rstd, first, second)
    return first.sum((0, 1)), second.sum((0, 1))


def norm_terms(sums: tuple[Tensor, Tensor], weight: Tensor, num_pixels: int) -> tuple[Tensor, Tensor]:
    """The two terms of a batch norm's input gradient that depend on the whole image, ``[1, C]``."""
    first, second = ((value * weight.double() / num_pixels).float()[None] for value in sums)
    return first, second


def max_pool(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Maxima and taps."""
    from sft.kernels.pool.pool_triton import launch_max_pool

    size = geometry.output_size
    out, taps = _image(x, x.shape[1], size), _image(x, tap_channels(x.shape[1], geometry), size, torch.uint8)
    launch_max_pool(x, out, taps, geometry)
    return out, taps


def max_pool_gradient(gradient: Tensor, taps: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of a maximum pool's input."""
    from sft.kernels.pool.pool_triton import launch_max_pool_gradient

    out = _image(gradient, gradient.shape[1], geometry.input_size)
    launch_max_pool_gradient(gradient, taps, out, geometry)
    return out


def average_pool(x: Tensor, geometry: Geometry) -> Tensor:
    """Averages, in which padding counts."""
    from sft.kernels.pool.pool_triton import launch_average_pool

    out = _image(x, x.shape[1], geometry.output_size)
    launch_average_pool(x, out, geometry, count_padding=True, divisor=None)
    return out


def average_pool_gradient(gradient: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of an average pool's input."""
    from sft.kernels.pool.pool_triton import launch_average_pool_gradient

    out = _image(gradient, gradient.shape[1], geometry.input_size)
    launch_average_pool_gradient(gradient, out, geometry, count_padding=True, divisor=None)
    return out
