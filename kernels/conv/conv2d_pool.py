"""Convolution of a tile with bias, ReLU and the maxima of 2 x 2 pixels fused: the convolution's own output is never in memory.

Backward, the maxima's gradient is spread while it is loaded: an element of the convolution's output has the gradient of its
maximum where it is the one that was chosen (two bits for each maximum) and the maximum is above zero. ReLU never changes
which of four is the largest, save that it makes equals, so taps are taken behind it, as PyTorch does.

Tiles are of whole maxima: the rows that the geometry calls output begin at an even row and are even in number, except that an
image's last odd row may be there, which has no maximum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sft.kernels.common import empty_channels_last, uses_triton
from sft.kernels.conv.conv2d import Activation, GradientSlots, Precision, check_layer, scaled_weight, weight_gradients
from sft.kernels.conv.conv_reference import dense_gradient, reference_conv2d, reference_data_gradient, reference_weight_gradient
from sft.kernels.geometry import Geometry, KernelWindow, check_buffer, raise_problems
from sft.kernels.pool.pool_reference import pack_taps, reference_max_pool

__all__ = [
    "conv2d_max_pool",
    "conv2d_max_pool_data_gradient",
    "conv2d_max_pool_weight_gradient",
    "conv2d_max_pool_with_taps",
    "pooled_size",
]

_NO_TILE = "these tensors are not a tile of this convolution and its maxima"
_POOL_WINDOW = KernelWindow(kernel=2, stride=2)


def pooled_size(geometry: Geometry) -> tuple[int, int]:
    """Rows and columns of the maxima of a tile.

    Raises:
        InputError: the tile does not consist of whole maxima.

    >>> window = KernelWindow(kernel=3, padding=1)
    >>> pooled_size(Geometry.whole((6, 5), window, window))
    (3, 2)
    """
    problems = []
    for name, axis in zip(("height", "width"), geometry.axes, strict=True):
        span = axis.output
        if span.start % 2 or (span.size % 2 and span.stop != span.extent):
            problems.append(f"{name}: outputs [{span.start}, {span.stop}) of {span.extent} are not whole pairs; begin and end at even ones")
    raise_problems(_NO_TILE, problems)
    return geometry.height.output.size // 2, geometry.width.output.size // 2


def conv2d_max_pool_with_taps(
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation = "relu",
    precision: Precision | None = None,
) -> tuple[Tensor, Tensor]:
    """The maxima of 2 x 2 pixels of ``activation(scale * conv(x) + bias)`` of one tile, and where they came from.

    Args:
        x, weight, scale, bias, activation, precision: as for ``conv2d.conv2d``; one group.

    Returns:
        ``[N, outputs, rows, columns]``, and uint8 ``[N, outputs / 4 rounded up, rows, columns]``, both channels-last: rows and
        columns are ``pooled_size``. Of equal elements the first; NaN beats everything, as in PyTorch.

    Raises:
        InputError: a tensor does not fit the geometry, the geometry lacks a halo, or the tile does not consist of whole maxima.
    """
    geometry.check_forward()
    mode = check_layer(x, weight, geometry, 1, precision, [], scale, bias)
    size = pooled_size(geometry)
    num_samples, num_out = x.shape[0], weight.shape[0]
    out = empty_channels_last(x, (num_samples, num_out, *size))
    taps = torch.empty(num_samples, -(-num_out // 4), *size, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
    if not out.numel():
        return out, taps
    relu = activation == "relu"
    if uses_triton(x):
        from sft.kernels.conv.forward2d_triton import launch_conv2d  # not above: it imports Triton

        launch_conv2d(x, weight, bias, None, out, geometry, groups=1, relu=relu, precision=mode, scale=scale, taps=taps)
        return out, taps
    y = reference_conv2d(x, weight, bias, None, geometry, groups=1, relu=relu, scale=scale)
    maxima, chosen = reference_max_pool(y, Geometry.whole((y.shape[2], y.shape[3]), _POOL_WINDOW, _POOL_WINDOW))
    taps.copy_(pack_taps(chosen))
    return out.copy_(maxima), taps


def conv2d_max_pool_data_gradient(
    gradient: Tensor,
    taps: Tensor,
    weight: Tensor,
    geometry: Geometry,
    *,
    output: Tensor | None = None,
    precision: Precision | None = None,
    partial: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of the convolution's input, for the rows that ``geometry`` calls input.

    Args:
        gradient: of the maxima, ``[N, outputs, rows, columns]``, channels-last, of the rows that ``geometry`` calls output, with a halo.
        taps: for the same rows, from ``conv2d_max_pool_with_taps``.
        weight: as for ``conv2d.conv2d``, with the scale in it.
        output: the maxima, where the activation was ReLU.
        precision, partial, out: as for ``conv2d.conv2d_data_gradient``.

    Raises:
        InputError: as ``conv2d_max_pool_with_taps``.
    """
    if not partial:
        geometry.check_adjoint()
    num_samples, num_in = gradient.shape[0], weight.shape[1]
    mode = check_layer(None, weight, geometry, 1, precision, [("gradient", gradient)], size=pooled_size(geometry))
    problems: list[str] = []
    _check_pooled(gradient, taps, output, geometry, problems)
    out = empty_channels_last(gradient, (num_samples, num_in, *geometry.input_size)) if out is None else out
    check_buffer("out", out, num_samples, num_in, geometry.input_size, problems)
    raise_problems(_NO_TILE, problems)
    if not out.numel():
        return out
    if uses_triton(gradient):
        from sft.kernels.conv.data_grad2d_triton import launch_data_gradient  # not above: it imports Triton

        launch_data_gradient(gradient, output, weight, out, geometry, groups=1, precision=mode, taps=taps)
        return out
    dense = dense_gradient(gradient, output, taps, geometry.output_size)
    return out.copy_(reference_data_gradient(dense, None, weight, geometry, groups=1))


def conv2d_max_pool_weight_gradient(
    gradient: Tensor,
    taps: Tensor,
    x: Tensor,
    geometry: Geometry,
    *,
    into: GradientSlots,
    output: Tensor | None = None,
    precision: Precision | None = None,
) -> None:
    """Add one tile's share of the gradients of weight and bias to ``into``; every maximum in one tile only.

    Args:
        gradient, taps, output: as for ``conv2d_max_pool_data_gradient``, without a halo.
        x, into, precision: as for ``conv2d.conv2d_weight_gradient``.

    Raises:
        InputError: as ``conv2d_max_pool_with_taps``.
    """
    geometry.check_forward()
    num_out, *kernel, num_in = into.weights.shape[1:]
    weight = torch.empty(num_out, num_in, *kernel, dtype=x.dtype, device="meta")
    mode = check_layer(x, weight, geometry, 1, precision, [("gradient", gradient)], size=pooled_size(geometry))
    problems: list[str] = []
    _check_pooled(gradient, taps, output, geometry, problems)
    raise_problems(_NO_TILE, problems)
    if not gradient.numel():
        return
    if uses_triton(x):
        from sft.kernels.conv.weight_grad2d_triton import launch_weight_gradient  # not above: it imports Triton

        launch_weight_gradient(gradient, output, x, into.weights, into.biases, geometry, groups=1, precision=mode, taps=taps)
        return
    dense = dense_gradient(gradient, output, taps, geometry.output_size)
    shares = reference_weight_gradient(dense, None, x, (num_out, num_in, *kernel), geometry, groups=1)
    into.weights[0] += shares[0].permute(0, 2, 3, 1)
    if into.biases is not None:
        into.biases[0] += shares[1]


def conv2d_max_pool(
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation = "relu",
    precision: Precision | None = None,
) -> Tensor:
    """The maxima of one tile, differentiable once; the gradient of ``x`` is this tile's share. See ``conv2d_max_pool_with_taps``.

    >>> window = KernelWindow(kernel=1)
    >>> x = torch.tensor([[[[-1.0, 2.0], [3.0, -4.0]]]])
    >>> conv2d_max_pool(x, torch.full((1, 1, 1, 1), 2.0), Geometry.whole((2, 2), window, window)).flatten().tolist()
    [6.0]
    """
    options = (activation, precision)
    result: Tensor = _ConvMaxPool.apply(x, weight, scale, bias, geometry, options)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return result


class _ConvMaxPool(torch.autograd.Function):
    """Saves the input, the weight, the taps and, behind a ReLU, the maxima."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        geometry: Geometry,
        options: tuple[Activation, Precision | None],
    ) -> Tensor:
        activation, precision = options
        y, taps = conv2d_max_pool_with_taps(x, weight, geometry, scale=scale, bias=bias, activation=activation, precision=precision)
        ctx.save_for_backward(x, weight, scale, taps, y if activation == "relu" else None)
        ctx.geometry, ctx.precision, ctx.bias = geometry, precision, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, taps, output = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        common = {"output": output, "precision": ctx.precision}
        dx = dw = ds = db = None
        if ctx.needs_input_grad[0]:
            scaled = weight if scale is None else scaled_weight(weight, scale)
            dx = conv2d_max_pool_data_gradient(gradient, taps, scaled, ctx.geometry, partial=True, **common)
        if any(ctx.needs_input_grad[1:4]):
            slots = GradientSlots.zeros(weight, bias=ctx.needs_input_grad[3])
            conv2d_max_pool_weight_gradient(gradient, taps, x, ctx.geometry, into=slots, **common)
            dw, ds, db = weight_gradients(slots, weight, scale, ctx.bias)
        return dx, dw, ds, db, None, None


def _check_pooled(gradient: Tensor, taps: Tensor, output: Tensor | None, geometry: Geometry, problems: list[str]) -> None:
    num_samples, num_out = gradient.shape[:2]
    size = pooled_size(geometry)
    check_buffer("taps", taps, num_samples, -(-num_out // 4), size, problems)
    if taps.dtype != torch.uint8:
        problems.append(f"taps are uint8, got {taps.dtype}; give what conv2d_max_pool_with_taps returned")
    if output is not None:
        check_buffer("output", output, num_samples, num_out, size, problems)
        if output.dtype != gradient.dtype:
            problems.append(f"output is {output.dtype}, gradient is {gradient.dtype}; cast one")
