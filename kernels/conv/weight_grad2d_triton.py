"""Gradients of a convolution's weight and bias, in Triton: sums over all pixels, in a fixed order and without atomics.

The result has few elements and each sum many terms, so the pixels are split. Split s adds its sum to slot s of an fp32 buffer
``[splits, outputs, kh, kw, inputs of a group]``, or replaces it. Each slot is written by one program; at the end ``launch_reduce``
(:mod:`sft.kernels.reduce.reduce_triton`) adds the slots in order. Two runs with the same tiles give the same bits.

Affixes as in :mod:`sft.kernels.conv.forward2d_triton`. P pixels, O output channels, C columns: channels of one tap, or of several taps if
FLAT.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common import LaunchVariant, block_size, is_flat
from sft.kernels.common_triton import (
    can_compute_operands,
    dense_gradient,
    matmul,
    pixel_strides,
    relu_gradient,
    safe_precision,
    unpool_gradient,
    window_constants,
)
from sft.kernels.geometry import Geometry
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["launch_weight_gradient", "weight_gradient_kernel"]

_RUNTIME = ["num_pixels", "num_split", "rows", "columns", "shift_h", "low_h", "high_h", "shift_w", "low_w", "high_w"]


@triton.jit(do_not_specialize=_RUNTIME)
def weight_gradient_kernel(
    p_dy,  # [N, groups * group_out, rows, columns]
    p_y,  # as dy: the output of the activation
    p_taps,  # as in conv2d_kernel; dy and y are then of the maxima, rows and columns of the convolution's output
    p_x,  # [N, groups * group_in, h, w]
    p_weights,  # fp32 [splits, groups * group_out, kh, kw, group_in], contiguous
    p_biases,  # fp32 [splits, groups * group_out], contiguous
    num_pixels,  # N * rows * columns
    num_split,  # pixels of a split, a multiple of PIXELS
    rows,
    columns,
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
    FLAT: tl.constexpr,
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
    if FLAT:
        k = i_columns * COLUMNS + tl.arange(0, COLUMNS)
        tap, channel = (k // group_in)[None, :], (k % group_in)[None, :]
        m_k = (k < KERNEL_H * KERNEL_W * group_in)[None, :]
    else:
        num_blocks = tl.cdiv(group_in, COLUMNS)
        tap = i_columns // num_blocks
        channel = (i_columns % num_blocks * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        m_k = channel < group_in
    m_o = i_o < group_out
    p_dy += i_group * group_out
    p_y += i_group * group_out
    p_x += i_group * group_in
    tap_h, tap_w = tap // KERNEL_W * DILATION_H + shift_h, tap % KERNEL_W * DILATION_W + shift_w

    acc = tl.zeros((CHANNELS, COLUMNS), tl.float32)
    sums = tl.zeros((CHANNELS,), tl.float32)
    start = i_split * num_split
    stop = tl.minimum(start + num_split, num_pixels)
    for block in range(tl.cdiv(tl.maximum(stop - start, 0), PIXELS).to(tl.int32)):
        i_p = start + block * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
        i_n, i_h, i_w = i_p // columns // rows, i_p // columns % rows, i_p % columns
        m_p = i_p < stop
        m_dy = m_p & m_o[None, :]
        if UNPOOL:
            number, q_h, q_w = (i_h % 2 * 2 + i_w % 2).to(tl.int32), i_h // 2, i_w // 2
            o_dy, o_y = i_n * dy_n + q_h * dy_h + q_w * dy_w, i_n * y_n + q_h * y_h + q_w * y_w
            o_taps = i_n * taps_n + q_h * taps_h + q_w * taps_w
            dy = unpool_gradient(p_dy, p_y, p_taps, o_dy, o_y, o_taps, i_o[None, :], number, m_dy, RELU)  # [P, O]
        else:
            dy = tl.load(p_dy + (i_n * dy_n + i_h * dy_h + i_w * dy_w) + i_o[None, :], mask=m_dy, other=0.0)  # [P, O]
            if RELU:
                y = tl.load(p_y + (i_n * y_n + i_h * y_h + i_w * y_w) + i_o[None, :], mask=m_dy, other=0.0)
                dy = relu_gradient(dy, y)
        at_h, at_w = i_h * STRIDE_H + tap_h, i_w * STRIDE_W + tap_w
        m_x = m_p & (at_h >= low_h) & (at_h < high_h) & (at_w >= low_w) & (at_w < high_w) & m_k
        x = tl.load(p_x + (i_n * x_n + at_h * x_h + at_w * x_w) + channel, mask=m_x, other=0.0)  # [P, C]
        acc = matmul(tl.trans(dy), x, acc, PRECISION)
        if BIAS:
            sums += tl.sum(dy.to(tl.float32), axis=0)

    slot = (i_split * num_groups + i_group) * group_out + i_o  # [O]
    o_weights = (slot[:, None] * (KERNEL_H * KERNEL_W) + tap) * group_in + channel
    m_weights = m_o[:, None] & m_k
    if ACCUMULATE:
        acc += tl.load(p_weights + o_weights, mask=m_weights, other=0.0)
    tl.store(p_weights + o_weights, acc, mask=m_weights)
    if BIAS and i_columns == 0:
        if ACCUMULATE:
            sums += tl.load(p_biases + slot, mask=m_o, other=0.0)
        tl.store(p_biases + slot, sums, mask=m_o)


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
    flat = is_flat(group_in)
    num_taps = math.prod(geometry.kernel)
    flattened = num_taps * group_in if flat else group_in
    largest = 32 if precision == "ieee" else 64  # without matrix instructions a larger block runs out of registers
    # Registers also limit the pixels if operands have four bytes, or if each element has an address of its own.
    most_pixels = 16 if precision == "ieee" else 32 if flat or gradient.dtype == torch.float32 else 64
    widest = 128 if variant == "wide" else largest
    pixels, channels, width_of_block = block or (most_pixels, block_size(group_out, largest), block_size(flattened, widest))
    num_blocks = ceil_div(flattened, width_of_block) * (1 if flat else num_taps)
    num_pixels = num_samples * rows * columns
    num_split = ceil_div(ceil_div(num_pixels, pixels), num_splits) * pixels
    height, width = geometry.axes
    with torch.cuda.device_of(x):
        weight_gradient_kernel[(num_splits, num_blocks, groups * ceil_div(group_out, channels))](
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
            FLAT=flat,
            PRECISION=precision,
            PIXELS=pixels,
            CHANNELS=channels,
            COLUMNS=width_of_block,
            num_warps=4,
            num_stages=4 if variant == "deep" else 3,
            enable_fp_fusion=True,
        )
