"""Depthwise convolution of a tile, in Triton: each group has one input channel, so no matrix products are possible.

A program computes a block of pixels and channels, tap by tap in fp32. Each input channel has ``multiplier`` consecutive outputs. The slots
of the weight's gradient are those of :mod:`sft.kernels.conv.weight_grad2d_triton`, with one column. Affixes as in
:mod:`sft.kernels.conv.forward2d_triton`. P pixels, C channels.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common import row_blocks
from sft.kernels.common_triton import (
    check_reach,
    is_inside,
    load_gradient,
    pixel_coordinates,
    pixel_offset,
    pixel_strides,
    pixels_after,
    relu,
    split_pixels,
    window_constants,
)
from sft.kernels.geometry import Geometry
from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["depthwise_gradient_kernel", "depthwise_kernel", "depthwise_weight_kernel"]
__all__ += ["launch_depthwise", "launch_depthwise_gradient", "launch_depthwise_weight"]

_TILE = ["rows", "columns", "shift_h", "low_h", "high_h", "shift_w", "low_w", "high_w", "from_h", "to_h", "from_w", "to_w"]


@triton.jit(do_not_specialize=["num_pixels", *_TILE[:8]])
def depthwise_kernel(
    p_x,  # [N, channels / MULTIPLIER, h, w]
    p_w,  # [channels, 1, kh, kw]
    p_bias,
    p_residual,  # as y
    p_y,  # [N, channels, rows, columns]
    num_pixels,
    rows,
    columns,
    num_channels,
    x_n,
    x_h,
    x_w,
    w_o,
    w_h,
    w_w,
    residual_n,
    residual_h,
    residual_w,
    y_n,
    y_h,
    y_w,
    shift_h,  # as in conv2d_kernel
    low_h,
    high_h,
    shift_w,
    low_w,
    high_w,
    MULTIPLIER: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """y = activation(conv(x) + bias + residual)."""
    i_p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m_p, m_c = i_p < num_pixels, i_c < num_channels
    i_n, i_h, i_w = pixel_coordinates(i_p, rows, columns)
    first_h, first_w = i_h * STRIDE_H + shift_h, i_w * STRIDE_W + shift_w
    o_x = pixel_offset(i_n, first_h, first_w, x_n, x_h, x_w) + i_c // MULTIPLIER  # [P, C]
    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for tap in range(KERNEL_H * KERNEL_W):
        tap_h, tap_w = tap // KERNEL_W, tap % KERNEL_W
        reach_h, reach_w = tap_h * DILATION_H, tap_w * DILATION_W
        m_x = m_p & is_inside(first_h + reach_h, low_h, high_h) & is_inside(first_w + reach_w, low_w, high_w) & m_c
        x = tl.load(p_x + (reach_h * x_h + reach_w * x_w) + o_x, mask=m_x, other=0.0).to(tl.float32)
        acc += x * tl.load(p_w + i_c * w_o + tap_h * w_h + tap_w * w_w, mask=m_c, other=0.0).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(p_bias + i_c, mask=m_c, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        o_residual = pixel_offset(i_n, i_h, i_w, residual_n, residual_h, residual_w) + i_c
        acc += tl.load(p_residual + o_residual, mask=m_p & m_c, other=0.0).to(tl.float32)
    if RELU:
        acc = relu(acc)
    tl.store(p_y + pixel_offset(i_n, i_h, i_w, y_n, y_h, y_w) + i_c, acc.to(p_y.dtype.element_ty), mask=m_p & m_c)


@triton.jit(do_not_specialize=["num_pixels", *_TILE])
def depthwise_gradient_kernel(
    p_dy,  # [N, channels * MULTIPLIER, h, w]
    p_y,  # as dy: the output of the activation
    p_w,  # [channels * MULTIPLIER, 1, kh, kw]
    p_dx,  # [N, channels, rows, columns]
    num_pixels,
    rows,
    columns,
    num_channels,
    dy_n,
    dy_h,
    dy_w,
    y_n,
    y_h,
    y_w,
    w_o,
    w_h,
    w_w,
    dx_n,
    dx_h,
    dx_w,
    shift_h,  # as in data_gradient_kernel
    low_h,
    high_h,
    from_h,
    to_h,
    shift_w,
    low_w,
    high_w,
    from_w,
    to_w,
    MULTIPLIER: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    RELU: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """dx = adjoint of the convolution, applied to dy where y is not zero."""
    i_p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m_p, m_c = i_p < num_pixels, i_c < num_channels
    i_n, i_h, i_w = pixel_coordinates(i_p, rows, columns)
    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for step in range(KERNEL_H * KERNEL_W * MULTIPLIER):
        tap, i_o = step // MULTIPLIER, i_c * MULTIPLIER + step % MULTIPLIER  # [1, C]
        tap_h, tap_w = tap // KERNEL_W, tap % KERNEL_W
        num_rows, num_columns = i_h - shift_h - tap_h * DILATION_H, i_w - shift_w - tap_w * DILATION_W
        at_h, at_w = num_rows // STRIDE_H, num_columns // STRIDE_W  # masked if the division has a remainder or the dividend is negative
        m_dy = m_p & is_inside(num_rows, low_h * STRIDE_H, high_h * STRIDE_H) & (num_rows % STRIDE_H == 0)
        m_dy = m_dy & is_inside(num_columns, low_w * STRIDE_W, high_w * STRIDE_W) & (num_columns % STRIDE_W == 0) & m_c
        o_dy = pixel_offset(i_n, at_h, at_w, dy_n, dy_h, dy_w) + i_o
        dy = load_gradient(p_dy, p_y, o_dy, pixel_offset(i_n, at_h, at_w, y_n, y_h, y_w) + i_o, m_dy, RELU)
        w = tl.load(p_w + i_o * w_o + tap_h * w_h + tap_w * w_w, mask=m_c, other=0.0)
        # A weight that is not finite must not affect masked pixels.
        acc += tl.where(m_dy, dy.to(tl.float32) * w.to(tl.float32), 0.0)
    m_image = is_inside(i_h, from_h, to_h) & is_inside(i_w, from_w, to_w)
    dx = tl.where(m_image, acc, 0.0).to(p_dx.dtype.element_ty)
    tl.store(p_dx + pixel_offset(i_n, i_h, i_w, dx_n, dx_h, dx_w) + i_c, dx, mask=m_p & m_c)


@triton.jit(do_not_specialize=["num_pixels", "num_split", "width", *_TILE[:8]])
def depthwise_weight_kernel(
    p_dy,  # [N, channels, rows, columns]
    p_y,  # as dy: the output of the activation
    p_x,  # [N, channels / MULTIPLIER, h, w]
    p_weights,  # fp32 [splits, channels, kh, kw], contiguous
    p_biases,  # fp32 [splits, channels], contiguous
    num_pixels,  # N * rows * width
    num_split,  # pixels of a split, a multiple of PIXELS
    rows,
    columns,
    width,  # columns, rounded up to a multiple of PIXELS if ALIGNED
    num_channels,
    dy_n,
    dy_h,
    dy_w,
    y_n,
    y_h,
    y_w,
    x_n,
    x_h,
    x_w,
    shift_h,  # as in weight_gradient_kernel
    low_h,
    high_h,
    shift_w,
    low_w,
    high_w,
    MULTIPLIER: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    RELU: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,  # a block has pixels of one row
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Add the gradient contributions of this tile to the slots, or write them there: a program for each split, tap and channel block."""
    i_split = tl.program_id(0).to(tl.int64)
    tap = tl.program_id(2)
    tap_h, tap_w = tap // KERNEL_W * DILATION_H + shift_h, tap % KERNEL_W * DILATION_W + shift_w
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)  # [C]
    m_c = i_c < num_channels
    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    sums = tl.zeros((PIXELS, CHANNELS), tl.float32)
    start = i_split * num_split
    length = tl.maximum(tl.minimum(start + num_split, num_pixels) - start, 0).to(tl.int32)
    i_n, i_h, i_w, own, lane = split_pixels(start, PIXELS, rows, width, ALIGNED)
    own_dy, own_y = own.to(tl.int64) * dy_w + i_c[None, :], own.to(tl.int64) * y_w + i_c[None, :]
    own_x = own.to(tl.int64) * (STRIDE_W * x_w) + tap_h.to(tl.int64) * x_h + tap_w.to(tl.int64) * x_w + (i_c // MULTIPLIER)[None, :]
    for before in range(0, length, PIXELS):
        m_dy = (own < columns - i_w if ALIGNED else lane < length - before) & m_c[None, :]
        o_dy, o_y = pixel_offset(i_n, i_h, i_w, dy_n, dy_h, dy_w), pixel_offset(i_n, i_h, i_w, y_n, y_h, y_w)
        dy = load_gradient(p_dy + o_dy, p_y + o_y, own_dy, own_y, m_dy, RELU).to(tl.float32)
        at_h, at_w = i_h * STRIDE_H, i_w * STRIDE_W
        m_x = m_dy & is_inside(at_h + own * 0 + tap_h, low_h, high_h) & is_inside(at_w + own * STRIDE_W + tap_w, low_w, high_w)
        x = tl.load(p_x + pixel_offset(i_n, at_h, at_w, x_n, x_h, x_w) + own_x, mask=m_x, other=0.0)
        acc += tl.where(m_x, dy * x.to(tl.float32), 0.0)
        if BIAS:
            sums += dy
        i_n, i_h, i_w = pixels_after(i_n, i_h, i_w, PIXELS, rows, width)
    acc, sums = tl.sum(acc, axis=0), tl.sum(sums, axis=0)
    slot = i_split * num_channels + i_c
    o_weights = slot * (KERNEL_H * KERNEL_W) + tap
    if ACCUMULATE:
        acc += tl.load(p_weights + o_weights, mask=m_c, other=0.0)
    tl.store(p_weights + o_weights, acc, mask=m_c)
    if BIAS and tap == 0:
        if ACCUMULATE:
            sums += tl.load(p_biases + slot, mask=m_c, other=0.0)
        tl.store(p_biases + slot, sums, mask=m_c)


def launch_depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    geometry: Geometry,
    *,
    relu: bool,
    block: tuple[int, int] | None = None,
) -> None:
    """``launch_conv2d`` with a group for each channel of ``x``.

    Args:
        block: pixels and channels of one program, powers of two (default: by the layer).
    """
    check_reach(x, geometry.axes)
    num_samples, num_channels, rows, columns = out.shape
    pixels, channels = block or _block(num_channels)
    num_pixels = num_samples * rows * columns
    height, width = geometry.axes
    with torch.cuda.device_of(x):
        launch(depthwise_kernel, (ceil_div(num_pixels, pixels), ceil_div(num_channels, channels)))(
            x,
            weight,
            x if bias is None else bias,
            x if residual is None else residual,
            out,
            num_pixels,
            rows,
            columns,
            num_channels,
            *pixel_strides(x),
            *pixel_strides(weight),
            *pixel_strides(out if residual is None else residual),
            *pixel_strides(out),
            height.shift,
            *height.input.data,
            width.shift,
            *width.input.data,
            **window_constants(geometry.axes),
            MULTIPLIER=num_channels // x.shape[1],
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            RELU=relu,
            PIXELS=pixels,
            CHANNELS=channels,
            num_warps=4,
            enable_fp_fusion=True,
        )


def launch_depthwise_gradient(
    gradient: Tensor, output: Tensor | None, weight: Tensor, out: Tensor, geometry: Geometry, *, block: tuple[int, int] | None = None
) -> None:
    """``launch_data_gradient`` with a group for each channel of ``out``; ``block`` as for ``launch_depthwise``."""
    num_samples, num_channels, rows, columns = out.shape
    pixels, channels = block or _block(num_channels)
    num_pixels = num_samples * rows * columns
    height, width = geometry.axes
    with torch.cuda.device_of(gradient):
        launch(depthwise_gradient_kernel, (ceil_div(num_pixels, pixels), ceil_div(num_channels, channels)))(
            gradient,
            gradient if output is None else output,
            weight,
            out,
            num_pixels,
            rows,
            columns,
            num_channels,
            *pixel_strides(gradient),
            *pixel_strides(gradient if output is None else output),
            *pixel_strides(weight),
            *pixel_strides(out),
            height.shift,
            *height.output.data,
            *height.input.data,
            width.shift,
            *width.output.data,
            *width.input.data,
            **window_constants(geometry.axes),
            MULTIPLIER=weight.shape[0] // num_channels,
            RELU=output is not None,
            PIXELS=pixels,
            CHANNELS=channels,
            num_warps=4,
            enable_fp_fusion=True,
        )


def launch_depthwise_weight(
    gradient: Tensor,
    output: Tensor | None,
    x: Tensor,
    weights: Tensor,
    biases: Tensor | None,
    geometry: Geometry,
    *,
    accumulate: bool = True,
    block: tuple[int, int] | None = None,
) -> None:
    """``launch_weight_gradient`` with a group for each channel of ``x``; ``block`` as for ``launch_depthwise``."""
    num_samples, num_channels, rows, columns = gradient.shape
    num_splits = weights.shape[0]
    pixels, channels = block or _block(num_channels)
    width_px, aligned = row_blocks(columns, pixels)
    num_pixels = num_samples * rows * width_px
    height, width = geometry.axes
    with torch.cuda.device_of(x):
        launch(depthwise_weight_kernel, (num_splits, ceil_div(num_channels, channels), math.prod(geometry.kernel)))(
            gradient,
            gradient if output is None else output,
            x,
            weights,
            weights if biases is None else biases,
            num_pixels,
            ceil_div(ceil_div(num_pixels, pixels), num_splits) * pixels,
            rows,
            columns,
            width_px,
            num_channels,
            *pixel_strides(gradient),
            *pixel_strides(gradient if output is None else output),
            *pixel_strides(x),
            height.shift,
            *height.input.data,
            width.shift,
            *width.input.data,
            **window_constants(geometry.axes),
            MULTIPLIER=num_channels // x.shape[1],
            RELU=output is not None,
            BIAS=biases is not None,
            ACCUMULATE=accumulate,
            ALIGNED=aligned,
            PIXELS=pixels,
            CHANNELS=channels,
            num_warps=4,
            enable_fp_fusion=True,
        )


def _block(num_channels: int) -> tuple[int, int]:
    """Pixels and channels of one program: 1024 elements."""
    channels = max(4, min(64, triton.next_power_of_2(num_channels)))
    return 1024 // channels, channels
