"""2-D convolution of a tile as an implicit GEMM, in Triton.

The rows of the product are pixels, its columns channels. The inner axis runs over taps of the window and, within each tap, over blocks of
channels. The sum of a pixel has this order in every tile and every block. So tiles have the bits of the untiled result as long as the inner
block (``BlockSizes.inner``) is the same, and the inner block depends on the layer alone. Layers whose channels do not fill a block have
another kernel, :mod:`sft.kernels.conv.few_channels2d_triton`.

Affixes: ``p_`` pointer, ``i_`` index, ``o_`` offsets, ``m_`` mask. P pixels, K inner block, C channels of the result.
Kernels use four warps: eight are reported to miscompile loops over taps on Hopper (pytorch/pytorch issue 173068).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common import (
    BlockSizes,
    LaunchVariant,
    can_stream_rows,
    default_blocks,
    few_channels_blocks,
    has_few_channels,
    row_blocks,
    variant_blocks,
)
from sft.kernels.common_triton import (
    check_reach,
    is_inside,
    matmul,
    pixel_offset,
    pixel_strides,
    safe_precision,
    window_constants,
)
from sft.kernels.conv.blocks2d_triton import block_pixels, store_results
from sft.kernels.conv.few_channels2d_triton import launch_few_channels
from sft.kernels.conv.rows2d_triton import launch_conv2d_by_rows
from sft.kernels.geometry import Geometry
from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["conv2d_kernel", "launch_conv2d"]

# Values that change from tile to tile, which must not specialize the kernel.
_RUNTIME = ["num_pixels", "rows", "columns", "width", "shift_h", "low_h", "high_h", "shift_w", "low_w", "high_w"]


@triton.jit(do_not_specialize=_RUNTIME)
def conv2d_kernel(
    p_x,  # [N, groups * group_in, h, w]
    p_w,  # [groups * group_out, group_in, kh, kw]
    p_scale,  # [groups * group_out]
    p_bias,  # [groups * group_out]
    p_residual,  # as the convolution's output
    p_y,  # [N, groups * group_out, rows, columns]
    p_taps,  # uint8 [N, groups * group_out / 4, rows, columns], rounded up
    num_pixels,  # N * rows * width of the convolution's output
    rows,
    columns,
    width,  # columns, rounded up to a multiple of PIXELS if ALIGNED
    group_in,
    group_out,
    x_n,
    x_h,
    x_w,
    w_o,
    w_i,
    w_h,
    w_w,
    residual_n,
    residual_h,
    residual_w,
    y_n,
    y_h,
    y_w,
    taps_n,
    taps_h,
    taps_w,
    shift_h,  # output row o reads input rows o * STRIDE_H + shift_h + DILATION_H * tap, if in [low_h, high_h)
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
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    POOL: tl.constexpr,  # y is the maxima of 2 x 2 pixels of the output
    ALIGNED: tl.constexpr,  # a block has pixels of one row
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
):
    """y = activation(scale * conv(x) + bias + residual), or the maxima of that. The four pixels of a maximum are consecutive."""
    i_group = tl.program_id(2).to(tl.int64)
    i_n, i_h, i_w, own, m_p = block_pixels(tl.program_id(0), num_pixels, rows, columns, width, PIXELS, POOL, ALIGNED)
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m_c = i_c < group_out
    p_x += i_group * group_in
    p_w += i_group * group_out * w_o
    # Offsets need 64 bits, rows and columns of a buffer 32; this saves registers.
    first_h, first_w = i_h * STRIDE_H + shift_h, i_w * STRIDE_W + shift_w
    p_x += pixel_offset(i_n, first_h, first_w, x_n, x_h, x_w)
    o_x = own * (STRIDE_W * x_w)
    first_w += own * STRIDE_W

    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    num_blocks = tl.cdiv(group_in, INNER)
    for step in range(KERNEL_H * KERNEL_W * num_blocks):
        tap = step // num_blocks
        channel = step % num_blocks * INNER + tl.arange(0, INNER)
        m_k = channel < group_in
        reach_h, reach_w = tap // KERNEL_W * DILATION_H, tap % KERNEL_W * DILATION_W
        at_h, at_w = first_h + reach_h, first_w + reach_w
        m_x = m_p & is_inside(at_h, low_h, high_h) & is_inside(at_w, low_w, high_w) & m_k[None, :]
        x = tl.load(p_x + (reach_h * x_h + reach_w * x_w) + (o_x + channel[None, :]), mask=m_x, other=0.0)  # [P, K]
        o_w = channel[:, None] * w_i + tap // KERNEL_W * w_h + tap % KERNEL_W * w_w + i_c * w_o
        w = tl.load(p_w + o_w, mask=m_k[:, None] & m_c, other=0.0)  # [K, C]
        acc = matmul(x, w, acc, PRECISION)

    store_results(
        acc, p_scale, p_bias, p_residual, p_y, p_taps, i_n, i_h, i_w, own, m_p, i_group, i_c, m_c, num_pixels, rows, columns, group_out,
        residual_n, residual_h, residual_w, y_n, y_h, y_w, taps_n, taps_h, taps_w,
        HAS_SCALE, HAS_BIAS, HAS_RESIDUAL, RELU, POOL, PIXELS, CHANNELS,
    )  # fmt: skip


def launch_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    geometry: Geometry,
    *,
    groups: int,
    relu: bool,
    precision: str,
    scale: Tensor | None = None,
    taps: Tensor | None = None,
    variant: LaunchVariant = "default",
    blocks: BlockSizes | None = None,
) -> None:
    """Write ``activation(scale * conv(x) + bias + residual)`` of a tile to ``out``, which is not empty.

    Args:
        x: the input buffer ``[N, C, h, w]``, channels-last like all images.
        weight: ``[outputs, C / groups, kh, kw]``; channels-last is fastest.
        bias: ``[outputs]``.
        residual: image of the output's shape, added before the activation.
        out: the output buffer ``[N, outputs, rows, columns]``.
        geometry: rows and columns of the buffers.
        groups: number of channel groups.
        relu: true for a ReLU.
        precision: ``ieee``, ``tf32``, ``tf32x3`` or ``bf16x3`` for fp32; ``bf16`` or ``fp16``.
        scale: ``[outputs]``; with ``bias`` a norm with known statistics.
        taps: uint8 ``[N, ceil(outputs / 4), rows, columns]``; gets the numbers, of two bits, of the pixels that the maxima of 2 x 2 pixels
            come from; ``out`` then is these maxima. For one group.
        variant: launch variant; the default if the layer does not have it.
        blocks: block sizes, for tests.
    """
    check_reach(x, geometry.axes)
    precision = safe_precision(precision, weight.device)  # on which the blocks depend
    num_samples, _, rows, columns = out.shape
    group_in, group_out = weight.shape[1], weight.shape[0] // groups
    is_few = has_few_channels(group_in)
    if blocks is None and is_few:
        blocks = few_channels_blocks(group_out, weight[0].numel(), precision)
    elif blocks is None:
        if variant == "rows" and not can_stream_rows(geometry, group_in, groups, weight):
            variant = "default"
        blocks = default_blocks(group_out, group_in, weight.dtype)
        blocks = variant_blocks(blocks, variant, group_out, is_loaded=taps is not None or residual is not None)
    options: dict[str, Any] = {"relu": relu, "precision": precision, "scale": scale, "taps": taps, "blocks": blocks}
    if blocks.rows:
        launch_conv2d_by_rows(x, weight, bias, residual, out, geometry, **options)
        return
    if is_few:
        launch_few_channels(x, weight, bias, residual, out, geometry, groups=groups, **options)
        return
    # The pixels of a maximum are consecutive, so their blocks are not aligned.
    width_px, aligned = row_blocks(columns, blocks.pixels) if taps is None else (columns, False)
    num_pixels = num_samples * rows * width_px * (1 if taps is None else 4)
    grid = (ceil_div(num_pixels, blocks.pixels), ceil_div(group_out, blocks.channels), groups)
    height, width = geometry.axes
    with torch.cuda.device_of(x):
        launch(conv2d_kernel, grid)(
            x,
            weight,
            weight if scale is None else scale,
            weight if bias is None else bias,
            out if residual is None else residual,
            out,
            out if taps is None else taps,
            num_pixels,
            rows,
            columns,
            width_px,
            group_in,
            group_out,
            *pixel_strides(x),
            *weight.stride(),
            *pixel_strides(out if residual is None else residual),
            *pixel_strides(out),
            *pixel_strides(out if taps is None else taps),
            height.shift,
            *height.input.data,
            width.shift,
            *width.input.data,
            **window_constants(geometry.axes),
            HAS_SCALE=scale is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            RELU=relu,
            POOL=taps is not None,
            ALIGNED=aligned,
            PRECISION=precision,
            PIXELS=blocks.pixels,
            CHANNELS=blocks.channels,
            INNER=blocks.inner,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            enable_fp_fusion=True,
        )
