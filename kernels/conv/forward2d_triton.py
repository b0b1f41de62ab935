"""2-D convolution of a tile as an implicit GEMM, in Triton.

The rows of the product are pixels, its columns channels. The inner axis runs over taps of the window and, within each tap, over blocks of
channels. The sum of a pixel has this order in every tile and every block. So tiles have the bits of the untiled result as long as the inner
block (``BlockSizes.inner``) is the same, and the inner block depends on the layer alone.

Affixes: ``p_`` pointer, ``i_`` index, ``o_`` offsets, ``m_`` mask. P pixels, K inner block, C channels of the result.
Kernels use four warps: eight are reported to miscompile loops over taps on Hopper (pytorch/pytorch issue 173068).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common import BlockSizes, LaunchVariant, can_stream_rows, default_blocks, is_flat, variant_blocks
from sft.kernels.common_triton import check_reach, matmul, pixel_strides, relu, safe_precision, window_constants
from sft.kernels.conv.rows2d_triton import launch_conv2d_by_rows
from sft.kernels.geometry import Geometry
from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["conv2d_kernel", "launch_conv2d"]

# Values that change from tile to tile, which must not specialize the kernel.
_RUNTIME = ["num_pixels", "rows", "columns", "shift_h", "low_h", "high_h", "shift_w", "low_w", "high_w"]


@triton.jit(do_not_specialize=_RUNTIME)
def conv2d_kernel(
    p_x,  # [N, groups * group_in, h, w]
    p_w,  # [groups * group_out, group_in, kh, kw]
    p_scale,  # [groups * group_out]
    p_bias,  # [groups * group_out]
    p_residual,  # as the convolution's output
    p_y,  # [N, groups * group_out, rows, columns]
    p_taps,  # uint8 [N, groups * group_out / 4, rows, columns], rounded up
    num_pixels,  # of the convolution's output
    rows,
    columns,
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
    FLAT: tl.constexpr,  # an inner block takes channels of several taps: for few channels
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
):
    """y = activation(scale * conv(x) + bias + residual), or the maxima of that. The four pixels of a maximum are consecutive."""
    i_group = tl.program_id(2).to(tl.int64)
    i_p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m_p, m_c = i_p < num_pixels, i_c < group_out
    if POOL:
        i_q = i_p // 4
        i_n, i_h = i_q // columns // rows, i_q // columns % rows * 2 + i_p % 4 // 2
        i_w = i_q % columns * 2 + i_p % 2
    else:
        i_n, i_h, i_w = i_p // columns // rows, i_p // columns % rows, i_p % columns
    p_x += i_group * group_in
    p_w += i_group * group_out * w_o
    first_h, first_w = i_h * STRIDE_H + shift_h, i_w * STRIDE_W + shift_w
    o_x = i_n * x_n + first_h * x_h + first_w * x_w
    # Offsets need 64 bits, rows and columns of a buffer 32; this saves registers.
    first_h, first_w = first_h.to(tl.int32), first_w.to(tl.int32)

    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    num_blocks = tl.cdiv(group_in, INNER)
    num_steps = tl.cdiv(KERNEL_H * KERNEL_W * group_in, INNER) if FLAT else KERNEL_H * KERNEL_W * num_blocks
    for step in range(num_steps):
        if FLAT:
            k = step * INNER + tl.arange(0, INNER)
            tap, channel = k // group_in, k % group_in
            m_k = k < KERNEL_H * KERNEL_W * group_in
            tap_x, tap_w = tap[None, :], tap[:, None]
        else:
            tap_x = step // num_blocks
            tap_w = tap_x
            channel = step % num_blocks * INNER + tl.arange(0, INNER)
            m_k = channel < group_in
        reach_h, reach_w = tap_x // KERNEL_W * DILATION_H, tap_x % KERNEL_W * DILATION_W
        at_h, at_w = first_h + reach_h, first_w + reach_w
        m_x = m_p & (at_h >= low_h) & (at_h < high_h) & (at_w >= low_w) & (at_w < high_w) & m_k[None, :]
        x = tl.load(p_x + o_x + (reach_h * x_h + reach_w * x_w + channel[None, :]), mask=m_x, other=0.0)  # [P, K]
        o_w = channel[:, None] * w_i + tap_w // KERNEL_W * w_h + tap_w % KERNEL_W * w_w + i_c * w_o
        w = tl.load(p_w + o_w, mask=m_k[:, None] & m_c, other=0.0)  # [K, C]
        acc = matmul(x, w, acc, PRECISION)

    i_y = i_group * group_out + i_c
    if HAS_SCALE:
        acc *= tl.load(p_scale + i_y, mask=m_c, other=0.0).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(p_bias + i_y, mask=m_c, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        o_residual = i_n * residual_n + i_h * residual_h + i_w * residual_w + i_y
        acc += tl.load(p_residual + o_residual, mask=m_p & m_c, other=0.0).to(tl.float32)
    if RELU:
        acc = relu(acc)
    if POOL:
        i_q = tl.program_id(0).to(tl.int64) * (PIXELS // 4) + tl.arange(0, PIXELS // 4)[:, None]  # [P / 4, 1]
        m_q = i_q * 4 < num_pixels
        i_n, i_h, i_w = i_q // columns // rows, i_q // columns % rows, i_q % columns
        best, taps = _maxima(acc.to(p_y.dtype.element_ty), PIXELS, CHANNELS)
        tl.store(p_y + i_n * y_n + i_h * y_h + i_w * y_w + i_y, best.to(p_y.dtype.element_ty), mask=m_q & m_c)
        shifted = tl.where(m_c, taps, 0) << (i_c % 4 * 2)
        packed = tl.sum(tl.reshape(shifted, (PIXELS // 4, CHANNELS // 4, 4)), axis=2)
        i_t = tl.program_id(1) * (CHANNELS // 4) + tl.arange(0, CHANNELS // 4)[None, :]
        o_taps = i_n * taps_n + i_h * taps_h + i_w * taps_w
        tl.store(p_taps + o_taps + i_t, packed.to(tl.uint8), mask=m_q & (i_t * 4 < group_out))
    else:
        tl.store(p_y + i_n * y_n + i_h * y_h + i_w * y_w + i_y, acc.to(p_y.dtype.element_ty), mask=m_p & m_c)


@triton.jit
def _maxima(y, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    """The maximum of each four rows and its number, as in PyTorch: the last NaN if any, otherwise the first maximum."""
    four = tl.reshape(y.to(tl.float32), (PIXELS // 4, 4, CHANNELS))
    number = tl.arange(0, 4)[None, :, None]
    undefined = tl.max(tl.where(four != four, number, -1), axis=1)
    best = tl.max(tl.where(four != four, float("-inf"), four), axis=1)
    first = tl.min(tl.where(four == best[:, None, :], number, 3), axis=1)
    return tl.where(undefined < 0, best, float("nan")), tl.where(undefined < 0, first, undefined)


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
    flat = is_flat(group_in)  # channels of several taps in an inner block
    if blocks is None:
        blocks = default_blocks(group_out, group_in, weight.dtype)
        is_taller = variant == "tall" and flat  # with an address for each element, registers do not suffice for twice as many
        if is_taller or (variant == "rows" and not can_stream_rows(geometry, group_in, groups, weight)):
            variant = "default"
        blocks = variant_blocks(blocks, variant, group_out, is_loaded=taps is not None or residual is not None)
    if blocks.rows:
        options: dict[str, Any] = {"relu": relu, "precision": precision, "scale": scale, "taps": taps, "blocks": blocks}
        launch_conv2d_by_rows(x, weight, bias, residual, out, geometry, **options)
        return
    num_pixels = num_samples * rows * columns * (1 if taps is None else 4)
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
            FLAT=flat,
            PRECISION=precision,
            PIXELS=blocks.pixels,
            CHANNELS=blocks.channels,
            INNER=blocks.inner,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            enable_fp_fusion=True,
        )
