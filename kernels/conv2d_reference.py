"""Convolution of a tile and its gradients in plain PyTorch, on any device and in any floating dtype: what the kernels must equal.

Buffers are cut to the rows that are data, zeros are put where the true border is, and PyTorch's own convolution runs without padding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from sft.kernels.geometry import Geometry

__all__ = ["data_of", "from_windows", "padded_input", "reference_conv2d", "reference_data_gradient", "reference_weight_gradient"]


def data_of(tensor: Tensor, spans: tuple[tuple[int, int], tuple[int, int]]) -> Tensor:
    """The view of a buffer's rows and columns that are data, given as two half-open ranges."""
    (top, bottom), (left, right) = spans
    return tensor[:, :, top:bottom, left:right]


def padded_input(x: Tensor, geometry: Geometry, value: float = 0.0) -> Tensor:
    """What the output's windows read, with ``value`` where that is not data."""
    pads: list[int] = []
    for axis in reversed(geometry.axes):
        low, high = axis.input.data
        first, last = axis.window.reads(0, axis.output.size)
        offset = axis.shift + axis.window.padding
        pads += [low - (first + offset), (last + offset) - high]
    return F.pad(data_of(x, (geometry.height.input.data, geometry.width.input.data)), pads, value=value)


def reference_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, geometry: Geometry, *, groups: int, relu: bool
) -> Tensor:
    """The convolution of a tile, plus bias, plus residual, and ReLU of that."""
    strides, dilations = _strides(geometry), _dilations(geometry)
    y = F.conv2d(padded_input(x, geometry), weight, bias, stride=strides, dilation=dilations, groups=groups)
    if residual is not None:
        y = y + residual
    return y.relu() if relu else y


def reference_data_gradient(gradient: Tensor, output: Tensor | None, weight: Tensor, geometry: Geometry, *, groups: int) -> Tensor:
    """The gradient of the input buffer; zero in rows that are not data."""
    spans = [span.data for axis in geometry.axes for span in (axis.input, axis.output)]
    if any(low == high for low, high in spans):
        return gradient.new_zeros(gradient.shape[0], weight.shape[1] * groups, *geometry.input_size)
    spread = F.conv_transpose2d(
        _on(gradient, output, geometry), weight, stride=_strides(geometry), dilation=_dilations(geometry), groups=groups
    )
    return from_windows(spread, geometry)


def from_windows(spread: Tensor, geometry: Geometry) -> Tensor:
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
    gradient: Tensor, output: Tensor | None, x: Tensor, shape: tuple[int, ...], geometry: Geometry, *, groups: int
) -> tuple[Tensor, Tensor]:
    """A tile's share of the gradients of a weight of ``shape``, and of a bias; in fp32 at least."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    on, padded = _on(gradient, output, geometry).to(dtype), padded_input(x, geometry).to(dtype)
    weight = conv2d_weight(padded, shape, on, stride=_strides(geometry), dilation=_dilations(geometry), groups=groups)
    return weight, on.sum((0, 2, 3))


def _on(gradient: Tensor, output: Tensor | None, geometry: Geometry) -> Tensor:
    """The gradient's rows that are outputs of the image, where the ReLU behind them is on."""
    spans = (geometry.height.output.data, geometry.width.output.data)
    part = data_of(gradient, spans)
    return part if output is None else torch.where(data_of(output, spans) <= 0, 0, part)


def _strides(geometry: Geometry) -> tuple[int, int]:
    return geometry.height.window.stride, geometry.width.window.stride


def _dilations(geometry: Geometry) -> tuple[int, int]:
    return geometry.height.window.dilation, geometry.width.window.dilation
