"""Input gradient of a 3-D convolution, in Triton: ``data_grad2d_triton`` with a third axis. One group."""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common import BlockSizes, default_blocks
from sft.kernels.common_triton import (
    can_compute_operands,
    dense_gradient,
    first_tap,
    is_inside,
    load_gradient,
    matmul,
    next_digit,
    safe_precision,
    voxel_offset,
    voxel_strides,
    window_constants,
)
from sft.kernels.geometry import VolumeGeometry
from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["launch_volume_data_gradient", "volume_data_gradient_kernel"]

_BORDERS = [f"{name}_{axis}" for axis in "dhw" for name in ("shift", "low", "high", "from", "to")]
_RUNTIME = ["num_samples", "slices", "rows", "columns", *_BORDERS]


@triton.jit(do_not_specialize=_RUNTIME)
def volume_data_gradient_kernel(
    p_dy,  # [N, num_out, d, h, w]
    p_y,  # as dy: the output of the activation
    p_w,  # [num_out, num_in, kd, kh, kw]
    p_dx,  # [N, num_in, slices, rows, columns]
    num_samples,
    slices,
    rows,
    columns,
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
    w_o,
    w_i,
    w_d,
    w_h,
    w_w,
    dx_n,
    dx_d,
    dx_h,
    dx_w,
    shift_d,  # as in data_gradient_kernel, for each axis
    low_d,
    high_d,
    from_d,
    to_d,
    shift_h,
    low_h,
    high_h,
    from_h,
    to_h,
    shift_w,
    low_w,
    high_w,
    from_w,
    to_w,
    KERNEL_D: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_D: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    TAPS_D: tl.constexpr,
    TAPS_H: tl.constexpr,
    TAPS_W: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
):
    """dx = adjoint of the convolution, applied to dy where y is not zero; the pixels of a program have one residue modulo the strides."""
    phase = tl.program_id(2)
    phase_d, phase_h, phase_w = phase // (STRIDE_H * STRIDE_W), phase // STRIDE_W % STRIDE_H, phase % STRIDE_W
    phase_slices = tl.maximum(tl.cdiv(slices - phase_d, STRIDE_D), 0)
    phase_rows, phase_columns = tl.maximum(tl.cdiv(rows - phase_h, STRIDE_H), 0), tl.maximum(tl.cdiv(columns - phase_w, STRIDE_W), 0)
    i_p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m_p = i_p < num_samples.to(tl.int64) * phase_slices * phase_rows * phase_columns
    m_c = i_c < num_in
    line = i_p // tl.maximum(phase_columns, 1)
    plane = line // tl.maximum(phase_rows, 1)
    i_n = (plane // tl.maximum(phase_slices, 1)).to(tl.int32)
    # Offsets need 64 bits, coordinates in a buffer 32; this saves registers.
    i_d = (plane % tl.maximum(phase_slices, 1)).to(tl.int32) * STRIDE_D + phase_d
    i_h = (line % tl.maximum(phase_rows, 1)).to(tl.int32) * STRIDE_H + phase_h
    i_w = (i_p % tl.maximum(phase_columns, 1)).to(tl.int32) * STRIDE_W + phase_w

    first_d = first_tap(phase_d - shift_d, KERNEL_D, STRIDE_D, DILATION_D)
    first_h = first_tap(phase_h - shift_h, KERNEL_H, STRIDE_H, DILATION_H)
    first_w = first_tap(phase_w - shift_w, KERNEL_W, STRIDE_W, DILATION_W)
    num_d = tl.cdiv(KERNEL_D - first_d, TAPS_D)
    num_h, num_w = tl.cdiv(KERNEL_H - first_h, TAPS_H), tl.cdiv(KERNEL_W - first_w, TAPS_W)
    num_blocks = tl.cdiv(num_out, INNER)
    # Outputs that the first tap reaches; multiples of the strides. The next tap of an axis reaches outputs that lie BACK before.
    first_slice = (i_d - shift_d - first_d * DILATION_D) // STRIDE_D
    first_row, first_column = (i_h - shift_h - first_h * DILATION_H) // STRIDE_H, (i_w - shift_w - first_w * DILATION_W) // STRIDE_W
    BACK_D: tl.constexpr = TAPS_D * DILATION_D // STRIDE_D
    BACK_H: tl.constexpr = TAPS_H * DILATION_H // STRIDE_H
    BACK_W: tl.constexpr = TAPS_W * DILATION_W // STRIDE_W
    inner = tl.arange(0, INNER)
    o_dy = voxel_offset(i_n, first_slice, first_row, first_column, dy_n, dy_d, dy_h, dy_w) + inner[None, :]  # [P, K]
    o_y = voxel_offset(i_n, first_slice, first_row, first_column, y_n, y_d, y_h, y_w) + inner[None, :]
    p_w += inner[:, None] * w_o + i_c * w_i  # [K, C]
    tap_d, tap_h, tap_w, block = num_blocks * 0, num_blocks * 0, num_blocks * 0, num_blocks * 0  # scalars that the loop carries
    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for _ in range(num_d * num_h * num_w * num_blocks):
        back_d, back_h, back_w = tap_d * BACK_D, tap_h * BACK_H, tap_w * BACK_W
        m_k = inner < num_out - block * INNER
        m_dy = m_p & is_inside(first_slice - back_d, low_d, high_d) & is_inside(first_row - back_h, low_h, high_h)
        m_dy = m_dy & is_inside(first_column - back_w, low_w, high_w) & m_k[None, :]
        p_dy_tap = p_dy + (block * INNER - voxel_offset(back_d * 0, back_d, back_h, back_w, dy_n, dy_d, dy_h, dy_w))
        p_y_tap = p_y + (block * INNER - voxel_offset(back_d * 0, back_d, back_h, back_w, y_n, y_d, y_h, y_w))
        dy = load_gradient(p_dy_tap, p_y_tap, o_dy, o_y, m_dy, RELU)  # [P, K]
        o_w = (first_d + tap_d * TAPS_D) * w_d + (first_h + tap_h * TAPS_H) * w_h + (first_w + tap_w * TAPS_W) * w_w
        w = tl.load(p_w + (block.to(tl.int64) * INNER * w_o + o_w), mask=m_k[:, None] & m_c, other=0.0)  # [K, C]
        acc = matmul(dy, w, acc, PRECISION)
        block, is_last = next_digit(block, num_blocks)
        tap_w, is_last = next_digit(tap_w, num_w, is_last)
        tap_h, is_last = next_digit(tap_h, num_h, is_last)
        tap_d += is_last

    m_image = is_inside(i_d, from_d, to_d) & is_inside(i_h, from_h, to_h) & is_inside(i_w, from_w, to_w)
    dx = tl.where(m_image, acc, 0.0).to(p_dx.dtype.element_ty)
    o_dx = voxel_offset(i_n, i_d, i_h, i_w, dx_n, dx_d, dx_h, dx_w)
    tl.store(p_dx + o_dx + i_c, dx, mask=m_p & m_c)


def launch_volume_data_gradient(
    gradient: Tensor,
    output: Tensor | None,
    weight: Tensor,
    out: Tensor,
    geometry: VolumeGeometry,
    *,
    precision: str,
    blocks: BlockSizes | None = None,
) -> None:
    """Write the gradient of a volume to ``out``, which is not empty; arguments as for ``launch_data_gradient``."""
    precision = safe_precision(precision, weight.device)  # on which the blocks depend
    if output is not None and not can_compute_operands(gradient.device):
        gradient, output = dense_gradient(gradient, output, None, (0, 0)), None
    num_out, num_in = weight.shape[:2]
    if blocks is None:
        blocks = default_blocks(num_in, num_out, out.dtype)
        if output is not None and (out.dtype != torch.float32 or precision == "ieee"):  # two loads of each block take registers
            blocks = dataclasses.replace(blocks, pixels=blocks.pixels // 2)
    windows = [axis.window for axis in geometry.axes]
    num_pixels = out.shape[0] * math.prod(ceil_div(size, w.stride) for size, w in zip(out.shape[2:], windows, strict=True))
    grid = (ceil_div(num_pixels, blocks.pixels), ceil_div(num_in, blocks.channels), math.prod(w.stride for w in windows))
    with torch.cuda.device_of(gradient):
        launch(volume_data_gradient_kernel, grid)(
            gradient,
            gradient if output is None else output,
            weight,
            out,
            out.shape[0],
            *out.shape[2:],
            num_in,
            num_out,
            *voxel_strides(gradient),
            *voxel_strides(gradient if output is None else output),
            *weight.stride(),
            *voxel_strides(out),
            *(value for axis in geometry.axes for value in (axis.shift, *axis.output.data, *axis.input.data)),
            **window_constants(geometry.axes),
            **{f"TAPS_{letter}": w.stride // math.gcd(w.stride, w.dilation) for letter, w in zip("DHW", windows, strict=True)},
            RELU=output is not None,
            PRECISION=precision,
            PIXELS=blocks.pixels,
            CHANNELS=blocks.channels,
            INNER=blocks.inner,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            enable_fp_fusion=True,
        )
