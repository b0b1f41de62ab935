"""Convolution of a tile of a volume, with bias, residual and ReLU fused, and its gradients: ``conv2d`` with one axis more, for one group.

Weight gradients go to ``conv2d.Slots``, which take a weight of five dimensions as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sft.common.errors import InputError
from sft.kernels.common import uses_triton
from sft.kernels.conv.conv2d import Activation, GradientSlots, Precision, precision_of, scaled_weight, weight_gradients
from sft.kernels.conv.conv_reference import reference_conv2d, reference_data_gradient, reference_weight_gradient
from sft.kernels.geometry import VolumeGeometry, check_buffer, raise_problems

__all__ = ["conv3d", "conv3d_data_gradient", "conv3d_weight_gradient"]

_NO_TILE = "these tensors are not a tile of this convolution"


def conv3d(
    x: Tensor,
    weight: Tensor,
    geometry: VolumeGeometry,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation = "none",
    precision: Precision | None = None,
) -> Tensor:
    """``activation(scale * conv(x) + bias + residual)`` of one tile. Differentiable once; the gradient of ``x`` is this tile's share.

    Args:
        x: ``[N, C, d, h, w]``, channels-last, the buffer that ``geometry`` calls input.
        weight: ``[outputs, C, kd, kh, kw]``; channels-last is fastest.
        scale: ``[outputs]``; with ``bias``, a norm whose statistics are known.
        bias: ``[outputs]``.
        residual: added before the activation; of the output's shape, channels-last.
        activation: ``"none"`` or ``"relu"``.
        precision: how products are formed (default: exactly in the dtype of ``x``).

    Returns:
        ``[N, outputs, slices, rows, columns]``, channels-last.

    Raises:
        InputError: a tensor does not fit the geometry, or the geometry lacks a halo.

    >>> from sft.kernels.geometry import Window
    >>> window = Window(kernel=3, padding=1)
    >>> y = conv3d(torch.ones(1, 1, 2, 2, 2), torch.ones(1, 1, 3, 3, 3), VolumeGeometry.whole((2, 2, 2), window, window, window))
    >>> y.flatten().tolist()
    [8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    """
    geometry.check_forward()
    mode = _check(x, weight, geometry, precision, [("residual", residual)], bias, scale)
    if activation not in ("none", "relu"):
        raise InputError(f"the activation is {activation!r}; choose one of none, relu")
    options = (activation == "relu", mode)
    result: Tensor = _Conv3d.apply(x, weight, scale, bias, residual, geometry, options)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return result


def conv3d_data_gradient(
    gradient: Tensor,
    weight: Tensor,
    geometry: VolumeGeometry,
    *,
    output: Tensor | None = None,
    precision: Precision | None = None,
    partial: bool = False,
) -> Tensor:
    """The gradient of a convolution's input, for the slices that ``geometry`` calls input: ``[N, C, d, h, w]``, channels-last.

    Args:
        gradient: of the output, channels-last: the buffer that ``geometry`` calls output, with a halo.
        weight, precision: as for ``conv3d``.
        output: of the activation, where that was ReLU: the gradient counts only where it is above zero.
        partial: gradients beyond the buffer count as zero: the share of this tile, to be added to those of others.

    Raises:
        InputError: a tensor does not fit the geometry, or the geometry lacks a halo.
    """
    if not partial:
        geometry.check_adjoint()
    mode = _check(None, weight, geometry, precision, [("gradient", gradient), ("output", output)], None)
    out = _empty_channels_last_3d(gradient, (gradient.shape[0], weight.shape[1], *geometry.input_size))
    if not out.numel():
        return out
    if uses_triton(gradient):
        from sft.kernels.conv.data_grad3d_triton import launch_volume_data_gradient  # not above: it imports Triton

        launch_volume_data_gradient(gradient, output, weight, out, geometry, precision=mode)
        return out
    return out.copy_(reference_data_gradient(gradient, output, weight, geometry, groups=1))


def conv3d_weight_gradient(
    gradient: Tensor,
    x: Tensor,
    geometry: VolumeGeometry,
    *,
    into: GradientSlots,
    output: Tensor | None = None,
    precision: Precision | None = None,
) -> None:
    """Add one tile's share of the gradients of weight and bias to ``into``; every output of the volume in one tile only.

    Args:
        gradient, output: as for ``conv3d_data_gradient``, without a halo.
        x: the input buffer, as for ``conv3d``.
        into: the sums, changed in place: ``GradientSlots.zeros`` of the weight.
        precision: as for ``conv3d``.

    Raises:
        InputError: as ``conv3d``.
    """
    geometry.check_forward()
    num_out, *kernel, num_in = into.weights.shape[1:]
    weight = torch.empty(num_out, num_in, *kernel, dtype=x.dtype, device="meta")
    mode = _check(x, weight, geometry, precision, [("gradient", gradient), ("output", output)], None)
    if not gradient.numel():
        return
    if uses_triton(x):
        from sft.kernels.conv.weight_grad3d_triton import launch_volume_weight_gradient  # not above: it imports Triton

        launch_volume_weight_gradient(gradient, output, x, into.weights, into.biases, geometry, precision=mode)
        return
    shares = reference_weight_gradient(gradient, output, x, tuple(weight.shape), geometry, groups=1)
    into.weights[0] += shares[0].movedim(1, -1)
    if into.biases is not None:
        into.biases[0] += shares[1]


class _Conv3d(torch.autograd.Function):
    """Saves the input, the weight and, behind a ReLU, the output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        geometry: VolumeGeometry,
        options: tuple[bool, Precision],
    ) -> Tensor:
        relu, mode = options
        out = _empty_channels_last_3d(x, (x.shape[0], weight.shape[0], *geometry.output_size))
        if out.numel() and uses_triton(x):
            from sft.kernels.conv.forward3d_triton import launch_conv3d  # not above: it imports Triton

            launch_conv3d(x, weight, bias, residual, out, geometry, relu=relu, precision=mode, scale=scale)
        elif out.numel():
            out.copy_(reference_conv2d(x, weight, bias, residual, geometry, groups=1, relu=relu, scale=scale))
        ctx.save_for_backward(x, weight, scale, out if relu else None)
        ctx.bias = None if bias is None else bias.dtype
        ctx.geometry, ctx.mode = geometry, mode
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, output = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last_3d)
        common = {"output": output, "precision": ctx.mode}
        dx = dw = ds = db = dr = None
        if ctx.needs_input_grad[0]:
            scaled = weight if scale is None else scaled_weight(weight, scale)
            dx = conv3d_data_gradient(gradient, scaled, ctx.geometry, partial=True, **common)
        if any(ctx.needs_input_grad[1:4]):
            slots = GradientSlots.zeros(weight, bias=ctx.needs_input_grad[3])
            conv3d_weight_gradient(gradient, x, ctx.geometry, into=slots, **common)
            dw, ds, db = weight_gradients(slots, weight, scale, ctx.bias)
        if ctx.needs_input_grad[4]:
            dr = gradient if output is None else torch.where(output <= 0, 0, gradient)
        return dx, dw, ds, db, dr, None, None


def _empty_channels_last_3d(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last_3d)


def _check(
    x: Tensor | None,
    weight: Tensor,
    geometry: VolumeGeometry,
    precision: Precision | None,
    outputs: list[tuple[str, Tensor | None]],
    bias: Tensor | None,
    scale: Tensor | None = None,
) -> Precision:
    """Raise all that keeps these tensors from being a tile of the layer; the precision otherwise."""
    problems: list[str] = []
    given = [(name, tensor) for name, tensor in outputs if tensor is not None]
    first = x if x is not None else given[0][1]
    if weight.dim() != 5 or tuple(weight.shape[2:]) != geometry.kernel or not weight.numel():
        problems.append(f"weight has shape {tuple(weight.shape)}, the window is {geometry.kernel}; give [outputs, inputs, kd, kh, kw]")
    else:
        if x is not None:
            check_buffer("x", x, x.shape[0], weight.shape[1], geometry.input_size, problems)
        for name, tensor in given:
            check_buffer(name, tensor, first.shape[0], weight.shape[0], geometry.output_size, problems)
        for name, vector in (("scale", scale), ("bias", bias)):
            if vector is not None and tuple(vector.shape) != (weight.shape[0],):
                problems.append(f"{name} has shape {tuple(vector.shape)}, the layer has {weight.shape[0]} outputs")
    mode = precision_of([("x", x), ("weight", weight), *given], precision, problems)
    raise_problems(_NO_TILE, problems)
    return mode
