"""Input gradient of a 2-D convolution, in Triton: implicit GEMM with pixels grouped by residue modulo the stride.

All pixels of a program have the same residue, so it visits only the taps that lead from outputs to its pixels. Affixes as in
:mod:`sft.kernels.conv.forward2d_triton`; four warps, as in that module.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common import BlockSizes, LaunchVariant, block_size, can_stream_rows, default_blocks, variant_blocks
from sft.kernels.common_triton import (
    can_compute_operands,
    dense_gradient,
    first_tap,
    is_inside,
    load_gradient,
    matmul,
    next_digit,
    pixel_offset,
    pixel_strides,
    safe_precision,
    unpool_gradient,
    window_constants,
)
from sft.kernels.conv.rows2d_triton import launch_data_gradient_by_rows
from sft.kernels.geometry import Geometry
from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["data_gradient_kernel", "launch_data_gradient"]

_RUNTIME = ["rows", "columns", "shift_h", "low_h", "high_h", "shift_w", "low_w", "high_w"]
_RUNTIME += ["from_h", "to_h", "from_w", "to_w", "num_samples"]


@triton.jit(do_not_specialize=_RUNTIME)
def data_gradient_kernel(
    p_dy,  # [N, groups * group_out, h, w]
    p_y,  # as dy: the output of the activation
    p_taps,  # as in conv2d_kernel; dy and y are then of the maxima
    p_w,  # [groups * group_out, group_in, kh, kw]
    p_dx,  # [N, groups * group_in, rows, columns]
    num_samples,
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
    w_o,
    w_i,
    w_h,
    w_w,
    dx_n,
    dx_h,
    dx_w,
    shift_h,  # as in conv2d_kernel
    low_h,  # rows [low_h, high_h) of dy are outputs of the image
    high_h,
    from_h,  # rows [from_h, to_h) of dx are data, the remaining rows get zero
    to_h,
    shift_w,
    low_w,
    high_w,
    from_w,
    to_w,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    TAPS_H: tl.constexpr,  # of the taps, every TAPS_H-th reaches a given row
    TAPS_W: tl.constexpr,
    RELU: tl.constexpr,
    UNPOOL: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
):
    """dx = adjoint of the convolution, applied to dy where y is not zero."""
    i_group = (tl.program_id(2) % num_groups).to(tl.int64)
    phase = tl.program_id(2) // num_groups
    phase_h, phase_w = phase // STRIDE_W, phase % STRIDE_W
    phase_rows, phase_columns = tl.cdiv(rows - phase_h, STRIDE_H), tl.cdiv(columns - phase_w, STRIDE_W)
    i_p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m_p, m_c = i_p < num_samples.to(tl.int64) * phase_rows * phase_columns, i_c < group_in
    line = i_p // tl.maximum(phase_columns, 1)
    i_n = (line // tl.maximum(phase_rows, 1)).to(tl.int32)
    # Offsets need 64 bits, rows and columns of a buffer 32; this saves registers.
    i_h = (line % tl.maximum(phase_rows, 1)).to(tl.int32) * STRIDE_H + phase_h
    i_w = (i_p % tl.maximum(phase_columns, 1)).to(tl.int32) * STRIDE_W + phase_w
    p_dy += i_group * group_out
    p_y += i_group * group_out
    p_w += i_group * group_out * w_o

    first_h = first_tap(phase_h - shift_h, KERNEL_H, STRIDE_H, DILATION_H)
    first_w = first_tap(phase_w - shift_w, KERNEL_W, STRIDE_W, DILATION_W)
    num_h, num_w = tl.cdiv(KERNEL_H - first_h, TAPS_H), tl.cdiv(KERNEL_W - first_w, TAPS_W)
    num_blocks = tl.cdiv(group_out, INNER)
    # Outputs that the first tap reaches; multiples of the strides. The next tap of an axis reaches outputs that lie BACK before.
    first_row, first_column = (i_h - shift_h - first_h * DILATION_H) // STRIDE_H, (i_w - shift_w - first_w * DILATION_W) // STRIDE_W
    BACK_H: tl.constexpr = TAPS_H * DILATION_H // STRIDE_H
    BACK_W: tl.constexpr = TAPS_W * DILATION_W // STRIDE_W
    inner = tl.arange(0, INNER)
    first_dy = pixel_offset(i_n, first_row, first_column, dy_n, dy_h, dy_w) + inner[None, :]  # [P, K]
    first_y = pixel_offset(i_n, first_row, first_column, y_n, y_h, y_w) + inner[None, :]
    p_w += inner[:, None] * w_o + i_c * w_i  # [K, C]
    tap_h, tap_w, block = num_blocks * 0, num_blocks * 0, num_blocks * 0  # of those taps; scalars that the loop carries
    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for _ in range(num_h * num_w * num_blocks):
        at_h, at_w = first_row - tap_h * BACK_H, first_column - tap_w * BACK_W
        m_k = inner < group_out - block * INNER
        m_dy = m_p & is_inside(at_h, low_h, high_h) & is_inside(at_w, low_w, high_w) & m_k[None, :]
        if UNPOOL:
            number, q_h, q_w = at_h % 2 * 2 + at_w % 2, at_h // 2, at_w // 2
            o_dy, o_y = pixel_offset(i_n, q_h, q_w, dy_n, dy_h, dy_w), pixel_offset(i_n, q_h, q_w, y_n, y_h, y_w)
            o_taps = pixel_offset(i_n, q_h, q_w, taps_n, taps_h, taps_w)
            channel = (block * INNER + inner)[None, :]
            dy = unpool_gradient(p_dy, p_y, p_taps, o_dy, o_y, o_taps, channel, number, m_dy, RELU)  # [P, K]
        else:
            p_dy_tap = p_dy + (block * INNER - pixel_offset(tap_h * 0, tap_h * BACK_H, tap_w * BACK_W, dy_n, dy_h, dy_w))
            p_y_tap = p_y + (block * INNER - pixel_offset(tap_h * 0, tap_h * BACK_H, tap_w * BACK_W, y_n, y_h, y_w))
            dy = load_gradient(p_dy_tap, p_y_tap, first_dy, first_y, m_dy, RELU)  # [P, K]
        o_w = block.to(tl.int64) * INNER * w_o + (first_h + tap_h * TAPS_H) * w_h + (first_w + tap_w * TAPS_W) * w_w
        w = tl.load(p_w + o_w, mask=m_k[:, None] & m_c, other=0.0)  # [K, C]
        acc = matmul(dy, w, acc, PRECISION)
        block, is_last = next_digit(block, num_blocks)
        tap_w, is_last = next_digit(tap_w, num_w, is_last)
        tap_h += is_last

    m_image = is_inside(i_h, from_h, to_h) & is_inside(i_w, from_w, to_w)
    dx = tl.where(m_image, acc, 0.0).to(p_dx.dtype.element_ty)
    tl.store(p_dx + pixel_offset(i_n, i_h, i_w, dx_n, dx_h, dx_w) + i_group * group_in + i_c, dx, mask=m_p & m_c)


def launch_data_gradient(
    gradient: Tensor,
    output: Tensor | None,
    weight: Tensor,
    out: Tensor,
    geometry: Geometry,
    *,
    groups: int,
    precision: str,
    taps: Tensor | None = None,
    variant: LaunchVariant = "default",
    blocks: BlockSizes | None = None,
) -> None:
    """Write the gradient of a convolution's input to ``out``, which is not empty; zero in rows that are not data.

    Args:
        gradient: gradient of the output, with the halo that ``out`` needs; gradients outside the buffer count as zero.
        output: output of the ReLU, which masks ``gradient``; None without a ReLU.
        weight: as for ``launch_conv2d``, with its scale multiplied in.
        out: the input's gradient.
        geometry: rows and columns of the buffers; ``out`` has the input span.
        groups, precision: as for ``launch_conv2d``.
        taps: from ``launch_conv2d``; ``gradient`` and ``output`` then are of the maxima of 2 x 2 pixels. For one group.
        variant, blocks: as for ``launch_conv2d``.
    """
    precision = safe_precision(precision, weight.device)  # on which the blocks depend
    if (output is not None or taps is not None) and not can_compute_operands(gradient.device):
        gradient, output, taps = dense_gradient(gradient, output, taps, geometry.output_size), None, None
    num_samples, _, rows, columns = out.shape
    group_in, group_out = weight.shape[1], weight.shape[0] // groups
    if blocks is None:
        blocks = default_blocks(group_in, group_out, out.dtype)
        loads_more = output is not None or taps is not None
        if taps is not None and out.dtype != torch.float32:  # two loads and a tap for each element take registers
            blocks = dataclasses.replace(blocks, pixels=64, inner=min(blocks.inner, 32))
        elif loads_more and (out.dtype != torch.float32 or precision == "ieee"):
            # Fewer pixels and, for each masked element, more products.
            channels = block_size(group_in, 64 if precision == "ieee" else 128)
            blocks = dataclasses.replace(blocks, pixels=blocks.pixels // 2, channels=channels)
        # Larger blocks have no registers left to mask their loads, and the variant ``rows`` has none to spread maxima.
        is_larger = variant in ("tall", "wide") and loads_more
        if is_larger or (variant == "rows" and (taps is not None or not can_stream_rows(geometry, group_out, groups, weight))):
            variant = "default"
        blocks = variant_blocks(blocks, variant, group_in, is_loaded=loads_more)
    if blocks.rows:
        launch_data_gradient_by_rows(gradient, output, weight, out, geometry, precision=precision, blocks=blocks)
        return
    height, width = geometry.axes
    strides = (height.window.stride, width.window.stride)
    num_pixels = num_samples * ceil_div(rows, strides[0]) * ceil_div(columns, strides[1])
    grid = (ceil_div(num_pixels, blocks.pixels), ceil_div(group_in, blocks.channels), groups * math.prod(strides))
    with torch.cuda.device_of(gradient):
        launch(data_gradient_kernel, grid)(
            gradient,
            gradient if output is None else output,
            gradient if taps is None else taps,
            weight,
            out,
            num_samples,
            rows,
            columns,
            groups,
            group_in,
            group_out,
            *pixel_strides(gradient),
            *pixel_strides(gradient if output is None else output),
            *pixel_strides(gradient if taps is None else taps),
            *weight.stride(),
            *pixel_strides(out),
            height.shift,
            *_rows_with_gradient(height.output.data, gradient.shape[2], taps),
            *height.input.data,
            width.shift,
            *_rows_with_gradient(width.output.data, gradient.shape[3], taps),
            *width.input.data,
            **window_constants(geometry.axes),
            TAPS_H=strides[0] // math.gcd(strides[0], height.window.dilation),
            TAPS_W=strides[1] // math.gcd(strides[1], width.window.dilation),
            RELU=output is not None,
            UNPOOL=taps is not None,
            PRECISION=precision,
            PIXELS=blocks.pixels,
            CHANNELS=blocks.channels,
            INNER=blocks.inner,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            enable_fp_fusion=True,
        )


def _rows_with_gradient(data: tuple[int, int], size: int, taps: Tensor | None) -> tuple[int, int]:
    """Output rows with a gradient: with maxima, a last odd row has none."""
    return data if taps is None else (data[0], min(data[1], 2 * size))
