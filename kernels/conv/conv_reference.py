"""Convolution of a tile and its gradients in plain PyTorch, on any device and in any floating dtype: what the kernels must equal.
Of images, and of volumes (``volume.VolumeGeometry``) in the same way.

Buffers are cut to the rows that are data, zeros are put where the true border is, and PyTorch's own convolution runs without padding.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight, conv3d_weight

from sft.kernels.geometry import TileAxis

__all__ = [
    "data_view",
    "dense_gradient",
    "fold_windows",
    "padded_input",
    "reference_conv2d",
    "reference_data_gradient",
    "reference_weight_gradient",
]


class GeometryLike(Protocol):
    """A geometry of as many axes as an image or a volume has."""

    @property
    def axes(self) -> tuple[TileAxis, ...]: ...


_CONVOLUTIONS: dict[int, tuple[Any, Any, Any]] = {
    2: (F.conv2d, F.conv_transpose2d, conv2d_weight),
    3: (F.conv3d, F.conv_transpose3d, conv3d_weight),
}


def data_view(tensor: Tensor, spans: tuple[tuple[int, int], ...]) -> Tensor:
    """The view of a buffer's rows and columns that are data, given as half-open ranges."""
    return tensor[(slice(None), slice(None), *(slice(low, high) for low, high in spans))]


def padded_input(x: Tensor, geometry: GeometryLike, value: float = 0.0) -> Tensor:
    """What the output's windows read, with ``value`` where that is not data."""
    pads: list[int] = []
    for axis in reversed(geometry.axes):
        low, high = axis.input.data
        first, last = axis.window.reads(0, axis.output.size)
        offset = axis.shift + axis.window.padding
        pads += [low - (first + offset), (last + offset) - high]
    return F.pad(data_view(x, tuple(axis.input.data for axis in geometry.axes)), pads, value=value)


def reference_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: GeometryLike,
    *,
    groups: int,
    relu: bool,
    scale: Tensor | None = None,
) -> Tensor:
    """The convolution of a tile, times scale, plus bias, plus residual, and ReLU of that."""
    strides, dilations = _strides(geometry), _dilations(geometry)
    own = bias if scale is None else None
    convolve = _CONVOLUTIONS[len(strides)][0]
    y: Tensor = convolve(padded_input(x, geometry), weight, own, stride=strides, dilation=dilations, groups=groups)
    if scale is not None:
        sizes = (-1, *(1,) * len(strides))
        y = y * scale.view(sizes)
        y = y if bias is None else y + bias.view(sizes)
    if residual is not None:
        y = y + residual
    return y.relu() if relu else y


def reference_data_gradient(gradient: Tensor, output: Tensor | None, weight: Tensor, geometry: GeometryLike, *, groups: int) -> Tensor:
    """The gradient of the input buffer; zero in rows that are not data."""
    spans = [span.data for axis in geometry.axes for span in (axis.input, axis.output)]
    if any(low == high for low, high in spans):
        return gradient.new_zeros(gradient.shape[0], weight.shape[1] * groups, *(axis.input.size for axis in geometry.axes))
    spread_out = _CONVOLUTIONS[len(geometry.axes)][1]
    spread = spread_out(
        _masked_gradient(gradient, output, geometry), weight, stride=_strides(geometry), dilation=_dilations(geometry), groups=groups
    )
    return fold_windows(spread, geometry)


def fold_windows(spread: Tensor, geometry: GeometryLike) -> Tensor:
    """The input buffer of what was added up over the rows that the output's rows of data read; zero in rows that are not data."""
    to_data: list[int] = []
    to_buffer: list[int] = []
    for axis in reversed(geometry.axes):
        low, high = axis.input.data
        first, last = axis.window.reads(*axis.output.data)
        offset = axis.shift + axis.window.padding
        to_data += [first + offset - low, high - (last + offset)]
        to_buffer += [low, axis.input.size - high]
    return F.pad(F.pad(spread, to_data), to_buffer)


def reference_weight_gradient(
    gradient: Tensor, output: Tensor | None, x: Tensor, shape: tuple[int, ...], geometry: GeometryLike, *, groups: int
) -> tuple[Tensor, Tensor]:
    """A tile's share of the gradients of a weight of ``shape``, and of a bias; in fp32 at least."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    on, padded = _masked_gradient(gradient, output, geometry).to(dtype), padded_input(x, geometry).to(dtype)
    of_weight = _CONVOLUTIONS[len(geometry.axes)][2]
    weight = of_weight(padded, shape, on, stride=_strides(geometry), dilation=_dilations(geometry), groups=groups)
    return weight, on.transpose(0, 1).flatten(1).sum(1)


def dense_gradient(gradient: Tensor, output: Tensor | None, taps: Tensor | None, size: tuple[int, int]) -> Tensor:
    """The gradient of a convolution's output where the ReLU is on, spread over ``size`` if it is of maxima of 2 x 2 pixels.

    Args:
        taps: where the maxima came from, two bits each, four channels to a byte (``pool_reference.pack``).
    """
    on = gradient if output is None else torch.where(output <= 0, 0, gradient)
    if taps is None:
        return on
    shifts = torch.arange(on.shape[1], device=on.device)
    chosen = taps[:, shifts // 4] >> (shifts % 4 * 2).to(torch.uint8)[:, None, None] & 3
    shape = (*on.shape[:2], *size)
    dense = torch.zeros(shape, dtype=on.dtype, device=on.device).contiguous(memory_format=torch.channels_last)
    for number in range(4):
        part = dense[:, :, number // 2 : 2 * on.shape[2] : 2, number % 2 : 2 * on.shape[3] : 2]
        part.copy_(torch.where(chosen == number, on, 0))
    return dense


def _masked_gradient(gradient: Tensor, output: Tensor | None, geometry: GeometryLike) -> Tensor:
    """The gradient's rows that are outputs of the image, where the ReLU behind them is on."""
    spans = tuple(axis.output.data for axis in geometry.axes)
    part = data_view(gradient, spans)
    return part if output is None else torch.where(data_view(output, spans) <= 0, 0, part)


def _strides(geometry: GeometryLike) -> tuple[int, ...]:
    return tuple(axis.window.stride for axis in geometry.axes)


def _dilations(geometry: GeometryLike) -> tuple[int, ...]:
    return tuple(axis.window.dilation for axis in geometry.axes)
