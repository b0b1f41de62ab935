"""Gradients of a convolution's weight and bias, in Triton: sums over all pixels, in a fixed order and without atomics.

The result has few elements and each sum many terms, so the pixels are split. Split s adds its sum to slot s of an fp32 buffer
``[splits, outputs, kh, kw, inputs of a group]``, or replaces it. Each slot is written by one program; at the end ``launch_reduce``
(:mod:`sft.kernels.reduce.reduce_triton`) adds the slots in a fixed order. Two runs with the same tiles give the same bits.

Affixes as in :mod:`sft.kernels.conv.forward2d_triton`. P pixels, O output channels, C columns: channels of one tap. Layers with few
channels have another kernel, :mod:`sft.kernels.conv.few_channels_grad2d_triton`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common import LaunchVariant, block_size, has_few_channels, has_warp_groups, row_blocks
from sft.kernels.common_triton import (
    can_compute_operands,
    dense_gradient,
    gradient_block,
    is_inside,
    matmul,
    pixel_offset,
    pixel_strides,
    pixels_after,
    safe_precision,
    split_pixels,
    store_sums,
    window_constants,
)
from sft.kernels.conv.few_channels_grad2d_triton import launch_few_channels_gradient
from sft.kernels.geometry import Geometry
from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["launch_weight_gradient", "weight_gradient_kernel"]

_RUNTIME = ["num_pixels", "num_split", "rows", "columns", "width", "shift_h", "low_h", "high_h", "shift_w", "low_w", "high_w"]


@triton.jit(do_not_specialize=_RUNTIME)
def weight_gradient_kernel(
    p_dy,  # [N, groups * group_out, rows, columns]
    p_y,  # as dy: the output of the activation
    p_taps,  # as in conv2d_kernel; dy and y are then of the maxima, rows and columns of the convolution's output
    p_x,  # [N, groups * group_in, h, w]
    p_weights,  # fp32 [splits, groups * group_out, kh, kw, group_in], contiguous
    p_biases,  # fp32 [splits, groups * group_out], contiguous
    num_pixels,  # N * rows * width
    num_split,  # pixels of a split, a multiple of PIXELS
    rows,
    columns,
    width,  # columns, rounded up to a multiple of PIXELS if ALIGNED
    num_groups,
    group_in,
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
    shift_h,  # as in conv2d_kernel
    low_h,
    high_h,
    shift_w,
    low_w,
    high_w,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    RELU: tl.constexpr,
    UNPOOL: tl.constexpr,
    BIAS: tl.constexpr,  # compute the bias's gradient as well
    ACCUMULATE: tl.constexpr,  # add to the slots; otherwise replace them
    TAPS: tl.constexpr,  # taps of a row of the window that a program sums, 1 or 3
    ALIGNED: tl.constexpr,  # a block has pixels of one row
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the gradient contributions of this tile to the slots, or write them there."""
    i_split = tl.program_id(0).to(tl.int64)
    i_group = (tl.program_id(2) % num_groups).to(tl.int64)
    i_o = tl.program_id(2) // num_groups * CHANNELS + tl.arange(0, CHANNELS)  # [O]
    i_columns = tl.program_id(1)
    m_o = i_o < group_out
    p_dy += i_group * group_out
    p_y += i_group * group_out
    p_x += i_group * group_in
    slot = (i_split * num_groups + i_group) * group_out + i_o  # [O]
    start = i_split * num_split
    length = tl.maximum(tl.minimum(start + num_split, num_pixels) - start, 0).to(tl.int32)
    i_n, i_h, i_w, own, lane = split_pixels(start, PIXELS, rows, width, ALIGNED)
    if BIAS:  # noqa: SIM102 - a constant condition is not compiled
        if i_columns == tl.num_programs(1) - 1:  # this program sums up the bias's gradient
            total = tl.zeros((PIXELS, CHANNELS), tl.float32)
            for before in range(0, length, PIXELS):
                m_p = own < columns - i_w if ALIGNED else lane < length - before
                dy = gradient_block(
                    p_dy, p_y, p_taps, i_n, i_h, i_w, own, i_o, m_p & m_o[None, :],
                    dy_n, dy_h, dy_w, y_n, y_h, y_w, taps_n, taps_h, taps_w, RELU, UNPOOL,
                )  # fmt: skip
                total += dy.to(tl.float32)
                i_n, i_h, i_w = pixels_after(i_n, i_h, i_w, PIXELS, rows, width)
            sums = tl.sum(total, axis=0)
            if ACCUMULATE:
                sums += tl.load(p_biases + slot, mask=m_o, other=0.0)
            tl.store(p_biases + slot, sums, mask=m_o)
            return

    num_blocks = tl.cdiv(group_in, COLUMNS)
    tap = i_columns // num_blocks * TAPS
    channel = (i_columns % num_blocks * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    m_k = channel < group_in
    tap_h, tap_w = tap // KERNEL_W * DILATION_H + shift_h, tap % KERNEL_W * DILATION_W + shift_w
    o_tap = own.to(tl.int64) * (STRIDE_W * x_w) + tap_h.to(tl.int64) * x_h + tap_w.to(tl.int64) * x_w + channel
    next_tap = DILATION_W * x_w
    acc = tl.zeros((CHANNELS, COLUMNS), tl.float32)
    if TAPS == 3:
        acc_1 = tl.zeros((CHANNELS, COLUMNS), tl.float32)
        acc_2 = tl.zeros((CHANNELS, COLUMNS), tl.float32)
    for before in range(0, length, PIXELS):
        m_p = own < columns - i_w if ALIGNED else lane < length - before
        dy = gradient_block(
            p_dy, p_y, p_taps, i_n, i_h, i_w, own, i_o, m_p & m_o[None, :],
            dy_n, dy_h, dy_w, y_n, y_h, y_w, taps_n, taps_h, taps_w, RELU, UNPOOL,
        )  # fmt: skip
        at_h, at_w = i_h * STRIDE_H + own * 0 + tap_h, (i_w + own) * STRIDE_W + tap_w
        m_x = m_p & is_inside(at_h, low_h, high_h) & m_k
        p_pixel = p_x + pixel_offset(i_n, i_h * STRIDE_H, i_w * STRIDE_W, x_n, x_h, x_w)
        x = tl.load(p_pixel + o_tap, mask=m_x & is_inside(at_w, low_w, high_w), other=0.0)  # [P, C]
        dy = tl.trans(dy)
        acc = matmul(dy, x, acc, PRECISION)
        if TAPS == 3:
            at_w += DILATION_W
            x = tl.load(p_pixel + (o_tap + next_tap), mask=m_x & is_inside(at_w, low_w, high_w), other=0.0)
            acc_1 = matmul(dy, x, acc_1, PRECISION)
            at_w += DILATION_W
            x = tl.load(p_pixel + (o_tap + 2 * next_tap), mask=m_x & is_inside(at_w, low_w, high_w), other=0.0)
            acc_2 = matmul(dy, x, acc_2, PRECISION)
        i_n, i_h, i_w = pixels_after(i_n, i_h, i_w, PIXELS, rows, width)

    p_weights += (slot[:, None] * (KERNEL_H * KERNEL_W) + tap) * group_in + channel
    m_weights = m_o[:, None] & m_k
    store_sums(p_weights, acc, m_weights, ACCUMULATE)
    if TAPS == 3:
        store_sums(p_weights + group_in, acc_1, m_weights, ACCUMULATE)
        store_sums(p_weights + 2 * group_in, acc_2, m_weights, ACCUMULATE)


def launch_weight_gradient(
    gradient: Tensor,
    output: Tensor | None,
    x: Tensor,
    weights: Tensor,
    biases: Tensor | None,
    geometry: Geometry,
    *,
    groups: int,
    precision: str,
    taps: Tensor | None = None,
    variant: LaunchVariant = "default",
    accumulate: bool = True,
    block: tuple[int, int, int] | None = None,
) -> None:
    """Add the gradient contributions of a tile to the slots ``weights`` and ``biases``, or write them there.

    Args:
        gradient, output: as for ``launch_data_gradient``, without a halo: each output of the image belongs to one tile.
        x: the input buffer.
        weights: fp32 slots ``[splits, outputs, kh, kw, inputs of a group]``, contiguous.
        biases: fp32 slots ``[splits, outputs]``, contiguous; None without a bias.
        geometry: rows and columns of the buffers.
        groups, precision, taps: as for ``launch_data_gradient``.
        variant: ``wide`` or ``deep``; the default otherwise.
        accumulate: false to replace what the slots have.
        block: pixels, output channels and columns of one program (default: by the layer).
    """
    precision = safe_precision(precision, x.device)  # on which the blocks depend
    if (output is not None or taps is not None) and not can_compute_operands(gradient.device):
        gradient, output, taps = dense_gradient(gradient, output, taps, geometry.output_size), None, None
    num_samples, _, rows, columns = gradient.shape
    if taps is not None:
        rows, columns = 2 * rows, 2 * columns
    num_splits, num_out, _, _, group_in = weights.shape
    group_out = num_out // groups
    if has_few_channels(group_in):
        common: dict[str, Any] = {"groups": groups, "precision": precision, "taps": taps, "accumulate": accumulate, "block": block}
        launch_few_channels_gradient(gradient, output, x, weights, biases, geometry, **common)
        return
    num_taps = math.prod(geometry.kernel)
    is_half, is_masked = gradient.dtype != torch.float32, output is not None or taps is not None
    largest = 32 if precision == "ieee" else 64  # without matrix instructions a larger block runs out of registers
    width_of_block = block[2] if block else block_size(group_in, 128 if variant == "wide" else largest)
    # Three taps of a row share the loads of the gradient and its mask, where registers suffice for three sums.
    has_registers = width_of_block <= 64 and (is_half or precision == "tf32")
    if is_masked:
        has_registers = has_registers and is_half and has_warp_groups(x.device)
    taps_of_block = 3 if geometry.kernel[1] == 3 and has_registers else 1
    # Registers also limit the pixels if operands have four bytes.
    is_full = not is_half or (is_masked and taps_of_block > 1)
    most_pixels = 16 if precision == "ieee" else 32 if is_full else 64
    pixels, channels = block[:2] if block else (most_pixels, block_size(group_out, largest))
    num_blocks = ceil_div(group_in, width_of_block) * (num_taps // taps_of_block)
    width_px, aligned = row_blocks(columns, pixels)
    num_pixels = num_samples * rows * width_px
    num_split = ceil_div(ceil_div(num_pixels, pixels), num_splits) * pixels
    height, width = geometry.axes
    with torch.cuda.device_of(x):
        launch(weight_gradient_kernel, (num_splits, num_blocks + (biases is not None), groups * ceil_div(group_out, channels)))(
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
            group_in,
            group_out,
            *pixel_strides(gradient),
            *pixel_strides(gradient if output is None else output),
            *pixel_strides(gradient if taps is None else taps),
            *pixel_strides(x),
            height.shift,
            *height.input.data,
            width.shift,
            *width.input.data,
            **window_constants(geometry.axes),
            RELU=output is not None,
            UNPOOL=taps is not None,
            BIAS=biases is not None,
            ACCUMULATE=accumulate,
            TAPS=taps_of_block,
            ALIGNED=aligned,
            PRECISION=precision,
            PIXELS=pixels,
            CHANNELS=channels,
            COLUMNS=width_of_block,
            num_warps=4,
            num_stages=4 if variant == "deep" else 3,
            enable_fp_fusion=True,
        )
