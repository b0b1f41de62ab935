"""2-D convolution of a tile with few input channels, such as the first layer of a network, in Triton.

The channels of one tap would not fill a block of a matrix product. Here the inner axis runs over all elements of the window, row by row and
tap by tap: 147 for 7 x 7 taps of 3 channels. Each thread loads the elements of its own pixels, at addresses that are constants next to
those of the pixels, and with one mask for each tap (:func:`window_elements`).

Affixes as in :mod:`sft.kernels.conv.forward2d_triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common import BlockSizes, row_blocks
from sft.kernels.common_triton import is_inside, matmul, pixel_offset, pixel_strides, window_constants
from sft.kernels.conv.blocks2d_triton import block_pixels, store_results
from sft.kernels.geometry import Geometry
from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["few_channels_kernel", "launch_few_channels", "window_elements"]

#: inner blocks of an unrolled loop, in which elements have constant taps
MOST_UNROLLED = tl.constexpr(12)
_RUNTIME = ["num_pixels", "rows", "columns", "width", "shift_h", "low_h", "high_h", "shift_w", "low_w", "high_w"]


@triton.jit(do_not_specialize=_RUNTIME)
def few_channels_kernel(
    p_x,  # as in conv2d_kernel, like all pointers
    p_w,
    p_scale,
    p_bias,
    p_residual,
    p_y,
    p_taps,
    num_pixels,  # N * rows * width of the convolution's output
    rows,
    columns,
    width,  # columns, rounded up to a multiple of PIXELS if ALIGNED
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
    shift_h,  # as in conv2d_kernel
    low_h,
    high_h,
    shift_w,
    low_w,
    high_w,
    GROUP_IN: tl.constexpr,
    DENSE: tl.constexpr,  # the elements of a window of the weight are adjacent
    ALIGNED: tl.constexpr,  # a block has pixels of one row
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
    POOL: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
):
    """As conv2d_kernel."""
    i_group = tl.program_id(2).to(tl.int64)
    i_n, i_h, i_w, own, m_p = block_pixels(tl.program_id(0), num_pixels, rows, columns, width, PIXELS, POOL, ALIGNED)
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m_c = i_c < group_out
    first_h, first_w = i_h * STRIDE_H + shift_h, i_w * STRIDE_W + shift_w
    p_x += i_group * GROUP_IN + pixel_offset(i_n, first_h, first_w, x_n, x_h, x_w) + own.to(tl.int64) * (STRIDE_W * x_w)
    p_w += (i_group * group_out + i_c.trans()) * w_o
    first_w += own * STRIDE_W
    acc = tl.zeros((CHANNELS, PIXELS), tl.float32)
    STEPS: tl.constexpr = (KERNEL_H * KERNEL_W * GROUP_IN + INNER - 1) // INNER
    if STEPS <= MOST_UNROLLED and PRECISION != "ieee":  # without matrix instructions registers do not suffice
        for step in tl.static_range(STEPS):
            acc = _add_block(
                acc, step, p_x, p_w, first_h, first_w, m_p, m_c, x_h, x_w, w_i, w_h, w_w, low_h, high_h, low_w, high_w,
                GROUP_IN, DENSE, KERNEL_H, KERNEL_W, DILATION_H, DILATION_W, PRECISION, PIXELS, INNER,
            )  # fmt: skip
    else:
        for step in range(STEPS):
            acc = _add_block(
                acc, step, p_x, p_w, first_h, first_w, m_p, m_c, x_h, x_w, w_i, w_h, w_w, low_h, high_h, low_w, high_w,
                GROUP_IN, DENSE, KERNEL_H, KERNEL_W, DILATION_H, DILATION_W, PRECISION, PIXELS, INNER,
            )  # fmt: skip

    store_results(
        tl.trans(acc), p_scale, p_bias, p_residual, p_y, p_taps, i_n, i_h, i_w, own, m_p, i_group, i_c, m_c, num_pixels, rows, columns,
        group_out, residual_n, residual_h, residual_w, y_n, y_h, y_w, taps_n, taps_h, taps_w,
        HAS_SCALE, HAS_BIAS, HAS_RESIDUAL, RELU, POOL, PIXELS, CHANNELS,
    )  # fmt: skip


@triton.jit
def _add_block(
    acc, step, p_x, p_w, first_h, first_w, m_p, m_c, x_h, x_w, w_i, w_h, w_w, low_h, high_h, low_w, high_w,
    GROUP_IN: tl.constexpr, DENSE: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr, PRECISION: tl.constexpr, PIXELS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """``acc`` and the product of one inner block.

    The weight is the first operand: that of a product of warp groups must be copied from memory (see :mod:`sft.kernels.common_triton`).
    """
    x = window_elements(
        step * INNER, p_x, first_h, first_w, m_p, x_h, x_w, low_h, high_h, low_w, high_w,
        GROUP_IN, KERNEL_H, KERNEL_W, DILATION_H, DILATION_W, 0.0, PIXELS, INNER,
    )  # fmt: skip
    k = step * INNER + tl.arange(0, INNER)[None, :]  # [1, K]
    tap, channel = k // GROUP_IN, k % GROUP_IN
    o_w = k if DENSE else tap // KERNEL_W * w_h + tap % KERNEL_W * w_w + channel * w_i
    w = tl.load(p_w + o_w, mask=(k < KERNEL_H * KERNEL_W * GROUP_IN) & m_c.trans(), other=0.0)  # [C, K]
    return matmul(w, tl.trans(x), acc, PRECISION)


@triton.jit
def window_elements(
    first, p_x, first_h, first_w, m_p, x_h, x_w, low_h, high_h, low_w, high_w,
    GROUP_IN: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    AFTER: tl.constexpr, PIXELS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Elements ``first`` to ``first + COUNT`` of the windows of a block of pixels, [P, COUNT].

    Elements outside of the image and the window are zero, except for the one after the window, which is AFTER.

    Args:
        first: number of the first element.
        p_x: pointers to the elements 0 of the pixels, [P, 1].
        first_h, first_w: row and column of these.
        m_p: mask of the pixels, [P, 1].
    """
    elements = _join_elements(
        first, p_x, first_h, first_w, m_p, x_h, x_w, low_h, high_h, low_w, high_w,
        GROUP_IN, KERNEL_H, KERNEL_W, DILATION_H, DILATION_W, PIXELS, 1, COUNT,
    )  # fmt: skip
    k = first + tl.arange(0, COUNT)[None, :]
    # Also keeps Triton from moving the reshapes into shared memory, in a layout that it then refuses.
    return tl.where(k == KERNEL_H * KERNEL_W * GROUP_IN, AFTER, elements).to(elements.dtype)


@triton.jit
def _join_elements(
    k, p_x, first_h, first_w, m_p, x_h, x_w, low_h, high_h, low_w, high_w,
    GROUP_IN: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    PIXELS: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The elements ``k + i * STEP``: each half is every second one, and the joined halves stay in the registers of a pixel's thread."""
    if COUNT > 1:
        even = _join_elements(
            k, p_x, first_h, first_w, m_p, x_h, x_w, low_h, high_h, low_w, high_w,
            GROUP_IN, KERNEL_H, KERNEL_W, DILATION_H, DILATION_W, PIXELS, 2 * STEP, COUNT // 2,
        )  # fmt: skip
        odd = _join_elements(
            k + STEP, p_x, first_h, first_w, m_p, x_h, x_w, low_h, high_h, low_w, high_w,
            GROUP_IN, KERNEL_H, KERNEL_W, DILATION_H, DILATION_W, PIXELS, 2 * STEP, COUNT // 2,
        )  # fmt: skip
        elements = tl.reshape(tl.join(even, odd), (PIXELS, COUNT))
    else:
        tap, channel = k // GROUP_IN, k % GROUP_IN
        tap_h, tap_w = tap // KERNEL_W * DILATION_H, tap % KERNEL_W * DILATION_W
        m_x = m_p & is_inside(first_h + tap_h, low_h, high_h) & is_inside(first_w + tap_w, low_w, high_w)
        m_x = m_x & (k < KERNEL_H * KERNEL_W * GROUP_IN)
        elements = tl.load(p_x + tap_h * x_h + tap_w * x_w + channel, mask=m_x, other=0.0)
    return elements


def launch_few_channels(
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
    blocks: BlockSizes,
    scale: Tensor | None = None,
    taps: Tensor | None = None,
) -> None:
    """``launch_conv2d`` for fewer input channels of a group than the smallest block has."""
    num_samples, _, rows, columns = out.shape
    group_in, group_out = weight.shape[1], weight.shape[0] // groups
    height, width = geometry.axes
    # The pixels of a maximum are consecutive, so their blocks are not aligned.
    width_px, aligned = row_blocks(columns, blocks.pixels) if taps is None else (columns, False)
    num_pixels = num_samples * rows * width_px * (1 if taps is None else 4)
    with torch.cuda.device_of(x):
        launch(few_channels_kernel, (ceil_div(num_pixels, blocks.pixels), ceil_div(group_out, blocks.channels), groups))(
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
            GROUP_IN=group_in,
            DENSE=weight.stride()[1:] == (1, weight.shape[3] * group_in, group_in),
            ALIGNED=aligned,
            **window_constants(geometry.axes),
            HAS_SCALE=scale is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            RELU=relu,
            POOL=taps is not None,
            PRECISION=precision,
            PIXELS=blocks.pixels,
            CHANNELS=blocks.channels,
            INNER=blocks.inner,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            enable_fp_fusion=True,
        )
