"""Blocks of the 2-D convolution kernels in Triton: coordinates of their pixels, and the store of their results.

The end of these kernels is the same: scale, bias, residual, activation and pool of a block of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sft.kernels.common_triton import pixel_coordinates, pixel_offset, pixels_after, relu

__all__ = ["block_pixels", "store_results"]


@triton.jit
def block_pixels(
    block, num_pixels, rows, columns, width, PIXELS: tl.constexpr, POOL: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Sample, row and column, in 32 bits, of the pixels of a block; their columns within the block; and their mask.

    The pixel ``i`` of ``num_pixels`` has row ``i // width`` of the samples. Coordinates are scalars if blocks are aligned to rows, as in
    :func:`split_pixels`. With POOL the four pixels of a maximum are consecutive, and rows and columns are those of the maxima. One division
    has 64 bits, that of the block's first pixel, unless blocks are aligned.
    """
    lane = tl.arange(0, PIXELS)[:, None]
    if ALIGNED:
        line, panel = block // (width // PIXELS), block % (width // PIXELS)
        i_n, i_h, i_w, own = line // rows, line % rows, panel * PIXELS, lane
        m_p = lane < columns - i_w
    else:
        start, own = block.to(tl.int64) * PIXELS, lane * 0
        m_p = lane < tl.minimum(num_pixels - start, PIXELS).to(tl.int32)
        i_n, i_h, i_w = pixel_coordinates(start // 4 if POOL else start, rows, width)
        i_n, i_h, i_w = pixels_after(i_n, i_h, i_w, lane // 4 if POOL else lane, rows, width)
        if POOL:
            i_h, i_w = i_h * 2 + lane % 4 // 2, i_w * 2 + lane % 2
    return i_n, i_h, i_w, own, m_p


@triton.jit
def store_results(
    acc, p_scale, p_bias, p_residual, p_y, p_taps, i_n, i_h, i_w, own, m_p, i_group, i_c, m_c, num_pixels, rows, columns, group_out,
    residual_n, residual_h, residual_w, y_n, y_h, y_w, taps_n, taps_h, taps_w,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr, POOL: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Store ``activation(scale * acc + bias + residual)`` of a block of pixels, or the maxima of that.

    The pixels are those of :func:`block_pixels`, of the program's first axis; the channels are those of its second axis.
    """
    i_y = i_group * group_out + i_c
    if HAS_SCALE:
        acc *= tl.load(p_scale + i_y, mask=m_c, other=0.0).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(p_bias + i_y, mask=m_c, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        o_residual = pixel_offset(i_n, i_h, i_w, residual_n, residual_h, residual_w) + own.to(tl.int64) * residual_w + i_y
        acc += tl.load(p_residual + o_residual, mask=m_p & m_c, other=0.0).to(tl.float32)
    if RELU:
        acc = relu(acc)
    if POOL:
        i_n, i_h, i_w, own, m_q = block_pixels(tl.program_id(0), num_pixels // 4, rows, columns, columns, PIXELS // 4, False, False)
        best, taps = _maxima(acc.to(p_y.dtype.element_ty), PIXELS, CHANNELS)
        tl.store(p_y + pixel_offset(i_n, i_h, i_w, y_n, y_h, y_w) + i_y, best.to(p_y.dtype.element_ty), mask=m_q & m_c)
        shifted = tl.where(m_c, taps, 0) << (i_c % 4 * 2)
        packed = tl.sum(tl.reshape(shifted, (PIXELS // 4, CHANNELS // 4, 4)), axis=2)
        i_t = tl.program_id(1) * (CHANNELS // 4) + tl.arange(0, CHANNELS // 4)[None, :]
        o_taps = pixel_offset(i_n, i_h, i_w, taps_n, taps_h, taps_w)
        tl.store(p_taps + o_taps + i_t, packed.to(tl.uint8), mask=m_q & (i_t * 4 < group_out))
    else:
        o_y = pixel_offset(i_n, i_h, i_w, y_n, y_h, y_w) + own.to(tl.int64) * y_w + i_y
        tl.store(p_y + o_y, acc.to(p_y.dtype.element_ty), mask=m_p & m_c)


@triton.jit
def _maxima(y, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    """The maximum of each four rows and its number, as in PyTorch: the last NaN if any, otherwise the first maximum."""
    four = tl.reshape(y.to(tl.float32), (PIXELS // 4, 4, CHANNELS))
    number = tl.arange(0, 4)[None, :, None]
    undefined = tl.max(tl.where(four != four, number, -1), axis=1)
    best = tl.max(tl.where(four != four, float("-inf"), four), axis=1)
    first = tl.min(tl.where(four == best[:, None, :], number, 3), axis=1)
    return tl.where(undefined < 0, best, float("nan")), tl.where(undefined < 0, first, undefined)
