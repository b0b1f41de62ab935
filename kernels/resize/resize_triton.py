"""Resampling of a tile, in Triton: banded matrices for rows and columns. The gradient is the same kernel with the transposed bands.

Both directions gather, so no atomics are needed.

Affixes as in :mod:`sft.kernels.conv.forward2d_triton`. P pixels, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common_triton import pixel_strides
from sft.kernels.launching import launch
from sft.kernels.resize.tile_axis import BandTable
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["launch_resize", "resize_kernel"]


@triton.jit(do_not_specialize=["num_pixels", "columns", "most_h", "most_w"])
def resize_kernel(
    p_x,  # [N, channels, h, w]
    p_y,  # [N, channels, rows, columns]
    p_first_h,  # int32 [rows]
    p_count_h,  # int32 [rows]
    p_weights_h,  # fp32 [rows, most_h]
    p_first_w,
    p_count_w,
    p_weights_w,
    num_pixels,  # rows * columns
    columns,
    num_channels,
    most_h,
    most_w,
    x_n,
    x_h,
    x_w,
    y_n,
    y_h,
    y_w,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """y[o] = sum of weights times x over the rows and columns of the bands of o."""
    i_n = tl.program_id(2).to(tl.int64)
    i_p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m_p, m_c = i_p < num_pixels, i_c < num_channels
    i_h, i_w = i_p // columns, i_p % columns
    first_h = tl.load(p_first_h + i_h, mask=m_p, other=0).to(tl.int64)
    first_w = tl.load(p_first_w + i_w, mask=m_p, other=0).to(tl.int64)
    count_h, count_w = tl.load(p_count_h + i_h, mask=m_p, other=0), tl.load(p_count_w + i_w, mask=m_p, other=0)
    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for row in range(most_h):
        m_h = row < count_h
        weight_h = tl.load(p_weights_h + i_h * most_h + row, mask=m_h, other=0.0)
        for column in range(most_w):
            m_w = m_h & (column < count_w)
            weight = weight_h * tl.load(p_weights_w + i_w * most_w + column, mask=m_w, other=0.0)
            o_x = i_n * x_n + (first_h + row) * x_h + (first_w + column) * x_w
            acc += tl.load(p_x + o_x + i_c, mask=m_w & m_c, other=0.0).to(tl.float32) * weight
    tl.store(p_y + i_n * y_n + i_h * y_h + i_w * y_w + i_c, acc.to(p_y.dtype.element_ty), mask=m_p & m_c)


def launch_resize(x: Tensor, out: Tensor, height: BandTable, width: BandTable, *, block: tuple[int, int] | None = None) -> None:
    """Write the resampled ``x`` to ``out``, which is not empty.

    Args:
        x: the buffer that the tables read, ``[N, C, h, w]``, channels-last.
        out: ``[N, C, rows, columns]``, channels-last.
        height, width: tables of the rows and columns of ``out``.
        block: pixels and channels of one program, powers of two (default: by the layer).
    """
    num_samples, num_channels, rows, columns = out.shape
    if block is None:
        channels = max(4, min(64, triton.next_power_of_2(num_channels)))
        block = 1024 // channels, channels
    grid = (ceil_div(rows * columns, block[0]), ceil_div(num_channels, block[1]), num_samples)
    with torch.cuda.device_of(x):
        launch(resize_kernel, grid)(
            x,
            out,
            height.first,
            height.count,
            height.weights,
            width.first,
            width.count,
            width.weights,
            rows * columns,
            columns,
            num_channels,
            height.weights.shape[1],
            width.weights.shape[1],
            *pixel_strides(x),
            *pixel_strides(out),
            PIXELS=block[0],
            CHANNELS=block[1],
            num_warps=4,
            enable_fp_fusion=False,
        )
