"""Gradients of weight and bias of a convolution with few input channels, in Triton.

As in :mod:`sft.kernels.conv.few_channels2d_triton`, the elements of the whole window are one axis, row by row and tap by tap, in blocks of
columns. One more element, which is 1 for every pixel, has the bias's gradient as its sum.

Slots and affixes as in :mod:`sft.kernels.conv.weight_grad2d_triton`. P pixels, O output channels, C columns: elements of the window.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common import few_channels_blocks, row_blocks
from sft.kernels.common_triton import (
    check_reach,
    gradient_block,
    matmul,
    pixel_offset,
    pixel_strides,
    pixels_after,
    split_pixels,
    store_sums,
    window_constants,
)
from sft.kernels.conv.few_channels2d_triton import window_elements
from sft.kernels.geometry import Geometry
from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["few_channels_gradient_kernel", "launch_few_channels_gradient"]

#: blocks of columns that have code of their own
MOST_BRANCHES = tl.constexpr(10)
_RUNTIME = ["num_pixels", "num_split", "rows", "columns", "width", "shift_h", "low_h", "high_h", "shift_w", "low_w", "high_w"]


@triton.jit(do_not_specialize=_RUNTIME)
def few_channels_gradient_kernel(
    p_dy,  # as in weight_gradient_kernel, like all pointers
    p_y,
    p_taps,
    p_x,
    p_weights,
    p_biases,
    num_pixels,
    num_split,
    rows,
    columns,
    width,
    num_groups,
    group_out,
    dy_n,
    dy_h,
    dy_w,
    y_n,
    y_h,
    y_w,
    taps_n,
    taps_h,
    taps_w,
    x_n,
    x_h,
    x_w,
    shift_h,
    low_h,
    high_h,
    shift_w,
    low_w,
    high_w,
    GROUP_IN: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    RELU: tl.constexpr,
    UNPOOL: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCKS: tl.constexpr,  # of columns
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """As weight_gradient_kernel."""
    if BLOCKS <= MOST_BRANCHES:
        for block in tl.static_range(BLOCKS):
            if tl.program_id(1) == block:
                _sum_block(
                    block, p_dy, p_y, p_taps, p_x, p_weights, p_biases, num_pixels, num_split, rows, columns, width, num_groups, group_out,
                    dy_n, dy_h, dy_w, y_n, y_h, y_w, taps_n, taps_h, taps_w, x_n, x_h, x_w,
                    shift_h, low_h, high_h, shift_w, low_w, high_w,
                    GROUP_IN, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, DILATION_H, DILATION_W,
                    RELU, UNPOOL, BIAS, ACCUMULATE, ALIGNED, PRECISION, PIXELS, CHANNELS, COLUMNS,
                )  # fmt: skip
    else:
        _sum_block(
            tl.program_id(1), p_dy, p_y, p_taps, p_x, p_weights, p_biases, num_pixels, num_split, rows, columns, width, num_groups,
            group_out, dy_n, dy_h, dy_w, y_n, y_h, y_w, taps_n, taps_h, taps_w, x_n, x_h, x_w,
            shift_h, low_h, high_h, shift_w, low_w, high_w,
            GROUP_IN, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, DILATION_H, DILATION_W,
            RELU, UNPOOL, BIAS, ACCUMULATE, ALIGNED, PRECISION, PIXELS, CHANNELS, COLUMNS,
        )  # fmt: skip


@triton.jit
def _sum_block(
    block, p_dy, p_y, p_taps, p_x, p_weights, p_biases, num_pixels, num_split, rows, columns, width, num_groups, group_out,
    dy_n, dy_h, dy_w, y_n, y_h, y_w, taps_n, taps_h, taps_w, x_n, x_h, x_w,
    shift_h, low_h, high_h, shift_w, low_w, high_w,
    GROUP_IN: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, RELU: tl.constexpr, UNPOOL: tl.constexpr, BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sums of one block of columns. Elements of a constant block have constant taps."""
    i_split = tl.program_id(0).to(tl.int64)
    i_group = (tl.program_id(2) % num_groups).to(tl.int64)
    i_o = tl.program_id(2) // num_groups * CHANNELS + tl.arange(0, CHANNELS)  # [O]
    m_o = i_o < group_out
    SIZE: tl.constexpr = KERNEL_H * KERNEL_W * GROUP_IN
    k = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]  # [1, C]
    m_k = k < SIZE
    p_dy += i_group * group_out
    p_y += i_group * group_out
    start = i_split * num_split
    length = tl.maximum(tl.minimum(start + num_split, num_pixels) - start, 0).to(tl.int32)
    i_n, i_h, i_w, own, lane = split_pixels(start, PIXELS, rows, width, ALIGNED)
    p_x += i_group * GROUP_IN + own.to(tl.int64) * (STRIDE_W * x_w)
    acc = tl.zeros((CHANNELS, COLUMNS), tl.float32)
    for before in range(0, length, PIXELS):
        m_p = own < columns - i_w if ALIGNED else lane < length - before
        dy = gradient_block(
            p_dy, p_y, p_taps, i_n, i_h, i_w, own, i_o, m_p & m_o[None, :],
            dy_n, dy_h, dy_w, y_n, y_h, y_w, taps_n, taps_h, taps_w, RELU, UNPOOL,
        )  # fmt: skip
        first_h, first_w = i_h * STRIDE_H + shift_h, i_w * STRIDE_W + shift_w
        x = window_elements(
            block * COLUMNS, p_x + pixel_offset(i_n, first_h, first_w, x_n, x_h, x_w), first_h, first_w + own * STRIDE_W, m_p, x_h, x_w,
            low_h, high_h, low_w, high_w, GROUP_IN, KERNEL_H, KERNEL_W, DILATION_H, DILATION_W, 1.0 if BIAS else 0.0, PIXELS, COLUMNS,
        )  # fmt: skip
        acc = matmul(tl.trans(dy), x, acc, PRECISION)
        i_n, i_h, i_w = pixels_after(i_n, i_h, i_w, PIXELS, rows, width)

    slot = ((i_split * num_groups + i_group) * group_out + i_o)[:, None]  # [O, 1]
    store_sums(p_weights + slot * SIZE + k, acc, m_o[:, None] & m_k, ACCUMULATE)
    if BIAS:
        store_sums(p_biases + slot + k * 0, acc, m_o[:, None] & (k == SIZE), ACCUMULATE)


def launch_few_channels_gradient(
    gradient: Tensor,
    output: Tensor | None,
    x: Tensor,
    weights: Tensor,
    biases: Tensor | None,
    geometry: Geometry,
    *,
    groups: int,
    precision: str,
    taps: Tensor | None,
    accumulate: bool,
    block: tuple[int, int, int] | None,
) -> None:
    """``launch_weight_gradient`` for fewer input channels of a group than the smallest block has.

    Raises:
        UnsupportedError: the window reaches over ``2 ** 31`` elements or more, which offsets of 32 bits do not.
    """
    check_reach(x, geometry.axes)
    num_samples, _, rows, columns = gradient.shape
    if taps is not None:
        rows, columns = 2 * rows, 2 * columns
    num_splits, num_out, _, _, group_in = weights.shape
    group_out, num_columns = num_out // groups, math.prod(geometry.kernel) * group_in + (biases is not None)
    default = few_channels_blocks(group_out, num_columns, precision)
    # Registers limit the pixels if operands have four bytes, or if the gradient is computed.
    is_masked = output is not None or taps is not None
    pixels, most_columns = (32, 16) if gradient.dtype == torch.float32 else (64 if is_masked else default.pixels, default.inner)
    pixels, channels, width_of_block = block or (pixels, default.channels, min(most_columns, default.inner))
    num_blocks = ceil_div(num_columns, width_of_block)
    width_px, aligned = row_blocks(columns, pixels)
    num_pixels = num_samples * rows * width_px
    num_split = ceil_div(ceil_div(num_pixels, pixels), num_splits) * pixels
    height, width = geometry.axes
    with torch.cuda.device_of(x):
        launch(few_channels_gradient_kernel, (num_splits, num_blocks, groups * ceil_div(group_out, channels)))(
            gradient,
            gradient if output is None else output,
            gradient if taps is None else taps,
            x,
            weights,
            weights if biases is None else biases,
            num_pixels,
            num_split,
            rows,
            columns,
            width_px,
            groups,
            group_out,
            *pixel_strides(gradient),
            *pixel_strides(gradient if output is None else output),
            *pixel_strides(gradient if taps is None else taps),
            *pixel_strides(x),
            height.shift,
            *height.input.data,
            width.shift,
            *width.input.data,
            GROUP_IN=group_in,
            **window_constants(geometry.axes),
            RELU=output is not None,
            UNPOOL=taps is not None,
            BIAS=biases is not None,
            ACCUMULATE=accumulate,
            BLOCKS=num_blocks,
            ALIGNED=aligned,
            PRECISION=precision,
            PIXELS=pixels,
            CHANNELS=channels,
            COLUMNS=width_of_block,
            num_warps=4,
            num_stages=3,
            enable_fp_fusion=True,
        )
