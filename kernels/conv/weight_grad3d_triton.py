"""Weight and bias gradients of a volume convolution, in Triton: :mod:`sft.kernels.conv.weight_grad2d_triton` with three axes."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common import block_size, has_few_channels, row_blocks
from sft.kernels.common_triton import (
    can_compute_operands,
    dense_gradient,
    is_inside,
    load_gradient,
    matmul,
    safe_precision,
    split_voxels,
    voxel_offset,
    voxel_strides,
    voxels_after,
    window_constants,
)
from sft.kernels.geometry import VolumeGeometry
from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["launch_volume_weight_gradient", "volume_weight_gradient_kernel"]

_BORDERS = [f"{name}_{axis}" for axis in "dhw" for name in ("shift", "low", "high")]
_RUNTIME = ["num_pixels", "num_split", "slices", "rows", "columns", "width", *_BORDERS]


@triton.jit(do_not_specialize=_RUNTIME)
def volume_weight_gradient_kernel(
    p_dy,  # [N, num_out, slices, rows, columns]
    p_y,  # as dy: the output of the activation
    p_x,  # [N, num_in, d, h, w]
    p_weights,  # fp32 [splits, num_out, kd, kh, kw, num_in], contiguous
    p_biases,  # fp32 [splits, num_out], contiguous
    num_pixels,  # N * slices * rows * width
    num_split,  # pixels of a split, a multiple of PIXELS
    slices,
    rows,
    columns,
    width,  # columns, rounded up to a multiple of PIXELS if ALIGNED
    num_in,
    num_out,
    dy_n,
    dy_d,
    dy_h,
    dy_w,
    y_n,
    y_d,
    y_h,
    y_w,
    x_n,
    x_d,
    x_h,
    x_w,
    shift_d,  # as in conv3d_kernel
    low_d,
    high_d,
    shift_h,
    low_h,
    high_h,
    shift_w,
    low_w,
    high_w,
    KERNEL_D: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_D: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    RELU: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,  # a block has voxels of one row
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the gradient contributions of this tile to the slots, or write them there."""
    i_split = tl.program_id(0).to(tl.int64)
    i_columns = tl.program_id(1)
    i_o = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)  # [O]
    m_o = i_o < num_out
    slot = i_split * num_out + i_o  # [O]
    start = i_split * num_split
    length = tl.maximum(tl.minimum(start + num_split, num_pixels) - start, 0).to(tl.int32)
    i_n, i_d, i_h, i_w, own, lane = split_voxels(start, PIXELS, slices, rows, width, ALIGNED)
    own_dy, own_y = own.to(tl.int64) * dy_w + i_o[None, :], own.to(tl.int64) * y_w + i_o[None, :]

    if BIAS:  # noqa: SIM102 - a constant condition is not compiled
        if i_columns == tl.num_programs(1) - 1:  # this program sums up the bias's gradient
            total = tl.zeros((PIXELS, CHANNELS), tl.float32)
            for before in range(0, length, PIXELS):
                m_dy = (own < columns - i_w if ALIGNED else lane < length - before) & m_o[None, :]
                p_dy_block = p_dy + voxel_offset(i_n, i_d, i_h, i_w, dy_n, dy_d, dy_h, dy_w)
                p_y_block = p_y + voxel_offset(i_n, i_d, i_h, i_w, y_n, y_d, y_h, y_w)
                total += load_gradient(p_dy_block, p_y_block, own_dy, own_y, m_dy, RELU).to(tl.float32)
                i_n, i_d, i_h, i_w = voxels_after(i_n, i_d, i_h, i_w, PIXELS, slices, rows, width)
            sums = tl.sum(total, axis=0)
            if ACCUMULATE:
                sums += tl.load(p_biases + slot, mask=m_o, other=0.0)
            tl.store(p_biases + slot, sums, mask=m_o)
            return

    num_taps = KERNEL_D * KERNEL_H * KERNEL_W
    if FLAT:
        k = i_columns * COLUMNS + tl.arange(0, COLUMNS)
        tap, channel = (k // num_in)[None, :], (k % num_in)[None, :]
        m_k = (k < num_taps * num_in)[None, :]
    else:
        num_blocks = tl.cdiv(num_in, COLUMNS)
        tap = i_columns // num_blocks
        channel = (i_columns % num_blocks * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        m_k = channel < num_in
    tap_d = tap // (KERNEL_H * KERNEL_W) * DILATION_D + shift_d
    tap_h, tap_w = tap // KERNEL_W % KERNEL_H * DILATION_H + shift_h, tap % KERNEL_W * DILATION_W + shift_w
    o_tap = tap_d.to(tl.int64) * x_d + tap_h.to(tl.int64) * x_h + tap_w.to(tl.int64) * x_w
    o_x = own.to(tl.int64) * (STRIDE_W * x_w) + o_tap + channel
    acc = tl.zeros((CHANNELS, COLUMNS), tl.float32)
    for before in range(0, length, PIXELS):
        m_p = own < columns - i_w if ALIGNED else lane < length - before
        p_dy_block = p_dy + voxel_offset(i_n, i_d, i_h, i_w, dy_n, dy_d, dy_h, dy_w)
        p_y_block = p_y + voxel_offset(i_n, i_d, i_h, i_w, y_n, y_d, y_h, y_w)
        dy = load_gradient(p_dy_block, p_y_block, own_dy, own_y, m_p & m_o[None, :], RELU)  # [P, O]
        first_d, first_h, first_w = i_d * STRIDE_D, i_h * STRIDE_H, i_w * STRIDE_W
        m_x = m_p & is_inside(first_d + own * 0 + tap_d, low_d, high_d) & is_inside(first_h + own * 0 + tap_h, low_h, high_h) & m_k
        m_x = m_x & is_inside(first_w + own * STRIDE_W + tap_w, low_w, high_w)
        x = tl.load(p_x + voxel_offset(i_n, first_d, first_h, first_w, x_n, x_d, x_h, x_w) + o_x, mask=m_x, other=0.0)  # [P, C]
        acc = matmul(tl.trans(dy), x, acc, PRECISION)
        i_n, i_d, i_h, i_w = voxels_after(i_n, i_d, i_h, i_w, PIXELS, slices, rows, width)

    o_weights = (slot[:, None] * num_taps + tap) * num_in + channel
    m_weights = m_o[:, None] & m_k
    if ACCUMULATE:
        acc += tl.load(p_weights + o_weights, mask=m_weights, other=0.0)
    tl.store(p_weights + o_weights, acc, mask=m_weights)


def launch_volume_weight_gradient(
    gradient: Tensor,
    output: Tensor | None,
    x: Tensor,
    weights: Tensor,
    biases: Tensor | None,
    geometry: VolumeGeometry,
    *,
    precision: str,
    accumulate: bool = True,
    block: tuple[int, int, int] | None = None,
) -> None:
    """Add the gradient contributions of a tile to the slots ``weights`` and ``biases``, or write them there; as ``launch_weight_gradient``.

    Args:
        block: pixels, output channels and columns of one program (default: by the layer).
    """
    precision = safe_precision(precision, x.device)  # on which the blocks depend
    if output is not None and not can_compute_operands(gradient.device):
        gradient, output = dense_gradient(gradient, output, None, (0, 0)), None
    num_splits, num_out, *kernel, num_in = weights.shape
    flat, num_taps = has_few_channels(num_in), math.prod(kernel)
    flattened = num_taps * num_in if flat else num_in
    largest = 32 if precision == "ieee" else 64  # without matrix instructions a larger block runs out of registers
    most_pixels = 16 if precision == "ieee" else 32 if flat or x.dtype == torch.float32 else 64
    pixels, channels, width_of_block = block or (most_pixels, block_size(num_out, largest), block_size(flattened, largest))
    num_blocks = ceil_div(flattened, width_of_block) * (1 if flat else num_taps)
    slices, rows, columns = gradient.shape[2:]
    width_px, aligned = row_blocks(columns, pixels)
    num_pixels = gradient.shape[0] * slices * rows * width_px
    with torch.cuda.device_of(x):
        launch(volume_weight_gradient_kernel, (num_splits, num_blocks + (biases is not None), ceil_div(num_out, channels)))(
            gradient,
            gradient if output is None else output,
            x,
            weights,
            weights if biases is None else biases,
            num_pixels,
            ceil_div(ceil_div(num_pixels, pixels), num_splits) * pixels,
            slices,
            rows,
            columns,
            width_px,
            num_in,
            num_out,
            *voxel_strides(gradient),
            *voxel_strides(gradient if output is None else output),
            *voxel_strides(x),
            *(value for axis in geometry.axes for value in (axis.shift, *axis.input.data)),
            **window_constants(geometry.axes),
            RELU=output is not None,
            BIAS=biases is not None,
            ACCUMULATE=accumulate,
            FLAT=flat,
            ALIGNED=aligned,
            PRECISION=precision,
            PIXELS=pixels,
            CHANNELS=channels,
            COLUMNS=width_of_block,
            num_warps=4,
            num_stages=3,
            enable_fp_fusion=True,
        )
