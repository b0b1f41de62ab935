"""Linear interpolation of a tile by powers of two, and its gradient, in Triton: rows and weights are computed from their positions.

Nothing is copied from the host, so CUDA graphs record it. Both directions gather, so no atomics are needed. The terms of a sum have the
order and the weights of :mod:`sft.kernels.resize.resize_triton`.

Affixes as in :mod:`sft.kernels.conv.forward2d_triton`. P pixels, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common_triton import pixel_strides
from sft.kernels.launching import launch
from sft.kernels.resize.tile_axis import LinearAxis
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["launch_linear_resize", "linear_resize_kernel"]


@triton.jit
def _lowest_row(row, FACTOR: tl.constexpr, ADJOINT: tl.constexpr):
    """The first row that the sum of a row reads; rows of the image, less than zero at its border."""
    if FACTOR == 1:
        return row
    if ADJOINT:
        return row * FACTOR - FACTOR // 2
    return (2 * row + 1 - FACTOR + 2 * FACTOR) // (2 * FACTOR) - 1  # positive, as the quotient is rounded to zero


@triton.jit
def _weight(output, row, extent, FACTOR: tl.constexpr):
    """Weight of input row ``row`` in output row ``output``."""
    if FACTOR == 1:
        return (output == row).to(tl.float32)
    position = (2 * output + 1 - FACTOR).to(tl.float32) * (0.5 / FACTOR)  # exact
    position = tl.minimum(tl.maximum(position, 0.0), (extent - 1).to(tl.float32))
    return tl.maximum(1.0 - tl.abs(position - row.to(tl.float32)), 0.0)


@triton.jit(
    do_not_specialize=["num_pixels", "columns", "rows_x", "columns_x", "extent_h", "extent_w", "y_row", "x_row", "y_column", "x_column"]
)
def linear_resize_kernel(
    p_x,  # [N, channels, h, w]
    p_y,  # [N, channels, rows, columns]
    num_pixels,  # rows * columns
    columns,
    num_channels,
    rows_x,  # h
    columns_x,  # w
    extent_h,  # input rows of the image
    extent_w,
    y_row,  # row of the image that the first row of y is
    x_row,
    y_column,
    x_column,
    x_n,
    x_h,
    x_w,
    y_n,
    y_h,
    y_w,
    FACTOR_H: tl.constexpr,
    FACTOR_W: tl.constexpr,
    TERMS_H: tl.constexpr,
    TERMS_W: tl.constexpr,
    ADJOINT: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """y[o] = sum of weights times x over the rows and columns near o."""
    i_n = tl.program_id(2).to(tl.int64)
    i_p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m_p, m_c = i_p < num_pixels, i_c < num_channels
    i_h, i_w = i_p // columns, i_p % columns
    row_y, column_y = i_h + y_row, i_w + y_column
    low_h, low_w = _lowest_row(row_y, FACTOR_H, ADJOINT), _lowest_row(column_y, FACTOR_W, ADJOINT)
    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for row in tl.static_range(TERMS_H):
        row_x = low_h + row
        weight_h = _weight(row_x, row_y, extent_h, FACTOR_H) if ADJOINT else _weight(row_y, row_x, extent_h, FACTOR_H)
        h_x = row_x - x_row
        m_h = m_p & (h_x >= 0) & (h_x < rows_x) & (weight_h > 0)
        for column in tl.static_range(TERMS_W):
            column_x = low_w + column
            weight_w = _weight(column_x, column_y, extent_w, FACTOR_W) if ADJOINT else _weight(column_y, column_x, extent_w, FACTOR_W)
            w_x = column_x - x_column
            m_w = m_h & (w_x >= 0) & (w_x < columns_x) & (weight_w > 0)
            o_x = i_n * x_n + h_x * x_h + w_x * x_w
            acc += tl.load(p_x + o_x + i_c, mask=m_w & m_c, other=0.0).to(tl.float32) * (weight_h * weight_w)
    tl.store(p_y + i_n * y_n + i_h * y_h + i_w * y_w + i_c, acc.to(p_y.dtype.element_ty), mask=m_p & m_c)


def launch_linear_resize(x: Tensor, out: Tensor, height: LinearAxis, width: LinearAxis) -> None:
    """Write the resampled ``x`` to ``out``, which is not empty.

    Args:
        x: the tile that is read, ``[N, C, h, w]``, channels-last.
        out: ``[N, C, rows, columns]``, channels-last.
        height, width: the rows and columns of both.
    """
    num_samples, num_channels, rows, columns = out.shape
    is_adjoint = height.is_adjoint or width.is_adjoint
    channels = max(4, min(64, triton.next_power_of_2(num_channels)))
    pixels = 1024 // channels
    grid = (ceil_div(rows * columns, pixels), ceil_div(num_channels, channels), num_samples)
    firsts = [(axis.first_input, axis.first_output) if is_adjoint else (axis.first_output, axis.first_input) for axis in (height, width)]
    with torch.cuda.device_of(x):
        launch(linear_resize_kernel, grid)(
            x,
            out,
            rows * columns,
            columns,
            num_channels,
            x.shape[2],
            x.shape[3],
            height.extent,
            width.extent,
            *firsts[0],
            *firsts[1],
            *pixel_strides(x),
            *pixel_strides(out),
            FACTOR_H=height.factor,
            FACTOR_W=width.factor,
            TERMS_H=height.num_terms,
            TERMS_W=width.num_terms,
            ADJOINT=is_adjoint,
            PIXELS=pixels,
            CHANNELS=channels,
            num_warps=4,
            enable_fp_fusion=False,
        )
