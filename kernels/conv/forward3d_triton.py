"""Convolution of a tile of a volume, in Triton: the implicit matrix product of :mod:`sft.kernels.conv.forward2d_triton` with a third axis.

Affixes as in that module. One group.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common import BlockSizes, default_blocks, has_few_channels
from sft.kernels.common_triton import check_reach, is_inside, matmul, relu, safe_precision, voxel_strides, window_constants
from sft.kernels.geometry import VolumeGeometry
from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["conv3d_kernel", "launch_conv3d"]

_BORDERS = [f"{name}_{axis}" for axis in "dhw" for name in ("shift", "low", "high")]
_RUNTIME = ["num_pixels", "slices", "rows", "columns", *_BORDERS]


@triton.jit(do_not_specialize=_RUNTIME)
def conv3d_kernel(
    p_x,  # [N, num_in, d, h, w]
    p_w,  # [num_out, num_in, kd, kh, kw]
    p_scale,  # [num_out]
    p_bias,  # [num_out]
    p_residual,  # as y
    p_y,  # [N, num_out, slices, rows, columns]
    num_pixels,  # N * slices * rows * columns
    slices,
    rows,
    columns,
    num_in,
    num_out,
    x_n,
    x_d,
    x_h,
    x_w,
    w_o,
    w_i,
    w_d,
    w_h,
    w_w,
    residual_n,
    residual_d,
    residual_h,
    residual_w,
    y_n,
    y_d,
    y_h,
    y_w,
    shift_d,  # as in conv2d_kernel, for each axis
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
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    FLAT: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
):
    """y = activation(scale * conv(x) + bias + residual)."""
    i_p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m_p, m_c = i_p < num_pixels, i_c < num_out
    line = i_p // columns
    i_w, i_h, i_d, i_n = i_p % columns, line % rows, line // rows % slices, line // rows // slices
    first_d, first_h, first_w = i_d * STRIDE_D + shift_d, i_h * STRIDE_H + shift_h, i_w * STRIDE_W + shift_w
    o_x = i_n * x_n + first_d * x_d + first_h * x_h + first_w * x_w
    # Offsets need 64 bits, coordinates in a buffer 32; this saves registers.
    first_d, first_h, first_w = first_d.to(tl.int32), first_h.to(tl.int32), first_w.to(tl.int32)

    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    num_blocks = tl.cdiv(num_in, INNER)
    num_taps = KERNEL_D * KERNEL_H * KERNEL_W
    num_steps = tl.cdiv(num_taps * num_in, INNER) if FLAT else num_taps * num_blocks
    for step in range(num_steps):
        if FLAT:
            k = step * INNER + tl.arange(0, INNER)
            tap, channel = k // num_in, k % num_in
            m_k = k < num_taps * num_in
            tap_x, tap_w = tap[None, :], tap[:, None]
        else:
            tap_x = step // num_blocks
            tap_w = tap_x
            channel = step % num_blocks * INNER + tl.arange(0, INNER)
            m_k = channel < num_in
        reach_d, reach_h = tap_x // (KERNEL_H * KERNEL_W) * DILATION_D, tap_x // KERNEL_W % KERNEL_H * DILATION_H
        reach_w = tap_x % KERNEL_W * DILATION_W
        m_x = m_p & is_inside(first_d + reach_d, low_d, high_d) & is_inside(first_h + reach_h, low_h, high_h)
        m_x = m_x & is_inside(first_w + reach_w, low_w, high_w) & m_k[None, :]
        o_tap = reach_d * x_d + reach_h * x_h + reach_w * x_w
        x = tl.load(p_x + o_x + (o_tap + channel[None, :]), mask=m_x, other=0.0)  # [P, K]
        o_w = channel[:, None] * w_i + tap_w // (KERNEL_H * KERNEL_W) * w_d + tap_w // KERNEL_W % KERNEL_H * w_h
        w = tl.load(p_w + (o_w + tap_w % KERNEL_W * w_w) + i_c * w_o, mask=m_k[:, None] & m_c, other=0.0)  # [K, C]
        acc = matmul(x, w, acc, PRECISION)

    if HAS_SCALE:
        acc *= tl.load(p_scale + i_c, mask=m_c, other=0.0).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(p_bias + i_c, mask=m_c, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        o_residual = i_n * residual_n + i_d * residual_d + i_h * residual_h + i_w * residual_w
        acc += tl.load(p_residual + o_residual + i_c, mask=m_p & m_c, other=0.0).to(tl.float32)
    if RELU:
        acc = relu(acc)
    o_y = i_n * y_n + i_d * y_d + i_h * y_h + i_w * y_w
    tl.store(p_y + o_y + i_c, acc.to(p_y.dtype.element_ty), mask=m_p & m_c)


def launch_conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    geometry: VolumeGeometry,
    *,
    relu: bool,
    precision: str,
    scale: Tensor | None = None,
    blocks: BlockSizes | None = None,
) -> None:
    """Write ``activation(scale * conv(x) + bias + residual)`` of a tile to ``out``, not empty; arguments as for ``launch_conv2d``."""
    check_reach(x, geometry.axes)
    precision = safe_precision(precision, weight.device)  # on which the blocks depend
    num_out, num_in = weight.shape[:2]
    if blocks is None:
        blocks = default_blocks(num_out, num_in, x.dtype)
        if residual is not None and x.dtype == torch.float32:  # its offsets take registers; warp-group products need 64 pixels
            blocks = dataclasses.replace(blocks, channels=max(16, blocks.channels // 2))
        elif residual is not None:
            blocks = dataclasses.replace(blocks, pixels=max(64, blocks.pixels // 2))
    num_pixels = out.numel() // num_out
    with torch.cuda.device_of(x):
        launch(conv3d_kernel, (ceil_div(num_pixels, blocks.pixels), ceil_div(num_out, blocks.channels)))(
            x,
            weight,
            weight if scale is None else scale,
            weight if bias is None else bias,
            out if residual is None else residual,
            out,
            num_pixels,
            *out.shape[2:],
            num_in,
            num_out,
            *voxel_strides(x),
            *weight.stride(),
            *voxel_strides(out if residual is None else residual),
            *voxel_strides(out),
            *(value for axis in geometry.axes for value in (axis.shift, *axis.input.data)),
            **window_constants(geometry.axes),
            HAS_SCALE=scale is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            RELU=relu,
            FLAT=has_few_channels(num_in),
            PRECISION=precision,
            PIXELS=blocks.pixels,
            CHANNELS=blocks.channels,
            INNER=blocks.inner,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            enable_fp_fusion=True,
        )
