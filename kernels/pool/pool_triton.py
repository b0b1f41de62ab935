"""Pools of a tile, in Triton: the maximum with its tap (:mod:`sft.kernels.pool.taps`), the average, and the gradients of both.

A program computes a block of pixels and channels. The gradient of the input is gathered, not scattered: each element reads the windows that
read it, so no atomics are needed.

Affixes as in :mod:`sft.kernels.conv.forward2d_triton`. P pixels, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common_triton import pixel_strides, window_constants
from sft.kernels.geometry import Geometry, TileAxis
from sft.kernels.launching import launch
from sft.kernels.pool.taps import is_packed
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["average_pool_gradient_kernel", "average_pool_kernel", "launch_average_pool", "launch_average_pool_gradient"]
__all__ += ["launch_max_pool", "launch_max_pool_gradient", "max_pool_gradient_kernel", "max_pool_kernel"]

_FORWARD = ["num_pixels", "rows", "columns", "shift_h", "low_h", "high_h", "shift_w", "low_w", "high_w"]
_COUNTS = ["count_low_h", "count_high_h", "count_low_w", "count_high_w"]
_BACKWARD = [*_FORWARD, "from_h", "to_h", "from_w", "to_w"]


@triton.jit
def _place(rows, columns, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    """Pixels of the program: number [P, 1], sample, row and column in int64; and its channels [1, C]."""
    i_p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    return i_p, i_p // columns // rows, i_p // columns % rows, i_p % columns, i_c


@triton.jit(do_not_specialize=_FORWARD)
def max_pool_kernel(
    p_x,  # [N, channels, h, w]
    p_y,  # [N, channels, rows, columns]
    p_taps,  # uint8 [N, channels, rows, columns], or [N, ceil(channels / 4), rows, columns] if PACKED
    num_pixels,
    rows,
    columns,
    num_channels,
    x_n,
    x_h,
    x_w,
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
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    PACKED: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Maxima and taps, as in PyTorch: the last NaN if any, otherwise the first maximum."""
    i_p, i_n, i_h, i_w, i_c = _place(rows, columns, PIXELS, CHANNELS)
    m_y = (i_p < num_pixels) & (i_c < num_channels)
    best = tl.full((PIXELS, CHANNELS), float("-inf"), tl.float32)
    taps = tl.full((PIXELS, CHANNELS), -1, tl.int32)
    for tap in range(KERNEL_H * KERNEL_W):
        at_h = i_h * STRIDE_H + shift_h + tap // KERNEL_W * DILATION_H
        at_w = i_w * STRIDE_W + shift_w + tap % KERNEL_W * DILATION_W
        m_x = m_y & (at_h >= low_h) & (at_h < high_h) & (at_w >= low_w) & (at_w < high_w)
        x = tl.load(p_x + (i_n * x_n + at_h * x_h + at_w * x_w) + i_c, mask=m_x, other=0.0).to(tl.float32)
        take = m_x & ((taps < 0) | (x > best) | (x != x))
        best, taps = tl.where(take, x, best), tl.where(take, tap, taps)
    tl.store(p_y + i_n * y_n + i_h * y_h + i_w * y_w + i_c, best.to(p_y.dtype.element_ty), mask=m_y)
    taps = tl.where(m_y, tl.maximum(taps, 0), 0)
    o_taps = i_n * taps_n + i_h * taps_h + i_w * taps_w  # [P, 1]
    if PACKED:
        shifted = taps << (tl.arange(0, CHANNELS)[None, :] % 4 * 2)
        packed = tl.sum(tl.reshape(shifted, (PIXELS, CHANNELS // 4, 4)), axis=2)
        i_g = tl.program_id(1) * (CHANNELS // 4) + tl.arange(0, CHANNELS // 4)[None, :]
        tl.store(p_taps + o_taps + i_g, packed.to(tl.uint8), mask=(i_p < num_pixels) & (i_g * 4 < num_channels))
    else:
        tl.store(p_taps + o_taps + i_c, taps.to(tl.uint8), mask=m_y)


@triton.jit(do_not_specialize=_BACKWARD)
def max_pool_gradient_kernel(
    p_dy,  # [N, channels, h, w]
    p_taps,  # uint8, as in max_pool_kernel, at the pixels of dy
    p_dx,  # [N, channels, rows, columns]
    num_pixels,
    rows,
    columns,
    num_channels,
    dy_n,
    dy_h,
    dy_w,
    taps_n,
    taps_h,
    taps_w,
    dx_n,
    dx_h,
    dx_w,
    shift_h,  # as in data_gradient_kernel
    low_h,
    high_h,
    from_h,
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
    PACKED: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Each element sums the gradients of the windows that chose it."""
    i_p, i_n, i_h, i_w, i_c = _place(rows, columns, PIXELS, CHANNELS)
    m_dx = (i_p < num_pixels) & (i_c < num_channels)
    m_image = m_dx & (i_h >= from_h) & (i_h < to_h) & (i_w >= from_w) & (i_w < to_w)
    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for tap in range(KERNEL_H * KERNEL_W):
        num_rows = i_h - shift_h - tap // KERNEL_W * DILATION_H
        num_columns = i_w - shift_w - tap % KERNEL_W * DILATION_W
        m_h = (num_rows >= low_h * STRIDE_H) & (num_rows < high_h * STRIDE_H) & (num_rows % STRIDE_H == 0)
        m_w = (num_columns >= low_w * STRIDE_W) & (num_columns < high_w * STRIDE_W) & (num_columns % STRIDE_W == 0)
        m_dy = m_image & m_h & m_w
        at_h, at_w = num_rows // STRIDE_H, num_columns // STRIDE_W
        o_taps = i_n * taps_n + at_h * taps_h + at_w * taps_w
        if PACKED:
            chosen = tl.load(p_taps + o_taps + i_c // 4, mask=m_dy, other=0).to(tl.int32) >> (i_c % 4 * 2) & 3
        else:
            chosen = tl.load(p_taps + o_taps + i_c, mask=m_dy, other=0).to(tl.int32)
        m_dy = m_dy & (chosen == tap)
        acc += tl.load(p_dy + (i_n * dy_n + at_h * dy_h + at_w * dy_w) + i_c, mask=m_dy, other=0.0).to(tl.float32)
    tl.store(p_dx + i_n * dx_n + i_h * dx_h + i_w * dx_w + i_c, acc.to(p_dx.dtype.element_ty), mask=m_dx)


@triton.jit
def _count(first, low, high, KERNEL: tl.constexpr):
    """Number of the KERNEL rows from ``first`` on that are in ``[low, high)``."""
    return tl.minimum(first + KERNEL, high) - tl.maximum(first, low)


@triton.jit(do_not_specialize=[*_FORWARD, *_COUNTS])
def average_pool_kernel(
    p_x,  # [N, channels, h, w]
    p_y,  # [N, channels, rows, columns]
    num_pixels,
    rows,
    columns,
    num_channels,
    x_n,
    x_h,
    x_w,
    y_n,
    y_h,
    y_w,
    shift_h,  # as in conv2d_kernel
    low_h,
    high_h,
    count_low_h,  # rows [count_low_h, count_high_h) count as elements
    count_high_h,
    shift_w,
    low_w,
    high_w,
    count_low_w,
    count_high_w,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    DIVISOR: tl.constexpr,  # instead of the count if above 0
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Averages of the windows."""
    i_p, i_n, i_h, i_w, i_c = _place(rows, columns, PIXELS, CHANNELS)
    m_y = (i_p < num_pixels) & (i_c < num_channels)
    first_h, first_w = i_h * STRIDE_H + shift_h, i_w * STRIDE_W + shift_w
    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for tap in range(KERNEL_H * KERNEL_W):
        at_h, at_w = first_h + tap // KERNEL_W, first_w + tap % KERNEL_W
        m_x = m_y & (at_h >= low_h) & (at_h < high_h) & (at_w >= low_w) & (at_w < high_w)
        acc += tl.load(p_x + (i_n * x_n + at_h * x_h + at_w * x_w) + i_c, mask=m_x, other=0.0).to(tl.float32)
    if DIVISOR > 0:
        count = tl.full((PIXELS, 1), DIVISOR, tl.float32)
    else:
        count = _count(first_h, count_low_h, count_high_h, KERNEL_H) * _count(first_w, count_low_w, count_high_w, KERNEL_W)
    y = tl.div_rn(acc, tl.broadcast_to(count.to(tl.float32), acc.shape))
    tl.store(p_y + i_n * y_n + i_h * y_h + i_w * y_w + i_c, y.to(p_y.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=[*_BACKWARD, *_COUNTS])
def average_pool_gradient_kernel(
    p_dy,  # [N, channels, h, w]
    p_dx,  # [N, channels, rows, columns]
    num_pixels,
    rows,
    columns,
    num_channels,
    dy_n,
    dy_h,
    dy_w,
    dx_n,
    dx_h,
    dx_w,
    shift_h,  # as in data_gradient_kernel
    low_h,
    high_h,
    from_h,
    to_h,
    count_low_h,  # as in average_pool_kernel
    count_high_h,
    shift_w,
    low_w,
    high_w,
    from_w,
    to_w,
    count_low_w,
    count_high_w,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    DIVISOR: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Each element sums its shares of the windows that read it."""
    i_p, i_n, i_h, i_w, i_c = _place(rows, columns, PIXELS, CHANNELS)
    m_dx = (i_p < num_pixels) & (i_c < num_channels)
    m_image = m_dx & (i_h >= from_h) & (i_h < to_h) & (i_w >= from_w) & (i_w < to_w)
    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for tap in range(KERNEL_H * KERNEL_W):
        num_rows, num_columns = i_h - shift_h - tap // KERNEL_W, i_w - shift_w - tap % KERNEL_W
        m_h = (num_rows >= low_h * STRIDE_H) & (num_rows < high_h * STRIDE_H) & (num_rows % STRIDE_H == 0)
        m_w = (num_columns >= low_w * STRIDE_W) & (num_columns < high_w * STRIDE_W) & (num_columns % STRIDE_W == 0)
        m_dy = m_image & m_h & m_w
        at_h, at_w = num_rows // STRIDE_H, num_columns // STRIDE_W
        dy = tl.load(p_dy + (i_n * dy_n + at_h * dy_h + at_w * dy_w) + i_c, mask=m_dy, other=0.0).to(tl.float32)
        if DIVISOR > 0:
            count = tl.full((PIXELS, 1), DIVISOR, tl.float32)
        else:
            count_h = _count(at_h * STRIDE_H + shift_h, count_low_h, count_high_h, KERNEL_H)
            count = count_h * _count(at_w * STRIDE_W + shift_w, count_low_w, count_high_w, KERNEL_W)
            count = tl.where(m_h & m_w, count, 1)  # masked positions have no window, so the count could be 0
        acc += tl.div_rn(dy, tl.broadcast_to(count.to(tl.float32), dy.shape))
    tl.store(p_dx + i_n * dx_n + i_h * dx_h + i_w * dx_w + i_c, acc.to(p_dx.dtype.element_ty), mask=m_dx)


def launch_max_pool(x: Tensor, out: Tensor, taps: Tensor, geometry: Geometry, *, block: tuple[int, int] | None = None) -> None:
    """Write the maxima of windows of at most 255 elements to ``out``, which is not empty, and their taps to ``taps``.

    Args:
        x: the input buffer ``[N, C, h, w]``, channels-last like all images.
        out: the maxima; minus infinity for a window without data.
        taps: uint8 ``[N, tap_channels, rows, columns]``.
        geometry: rows and columns of the buffers.
        block: pixels and channels of one program, powers of two, the channels at least 4 (default: by the layer).
    """
    grid, constants = _grid(out, block)
    height, width = geometry.axes
    with torch.cuda.device_of(x):
        launch(max_pool_kernel, grid)(
            x,
            out,
            taps,
            *_sizes(out),
            *pixel_strides(x),
            *pixel_strides(out),
            *pixel_strides(taps),
            height.shift,
            *height.input.data,
            width.shift,
            *width.input.data,
            **window_constants(geometry.axes),
            PACKED=is_packed(geometry),
            **constants,
        )


def launch_max_pool_gradient(
    gradient: Tensor, taps: Tensor, out: Tensor, geometry: Geometry, *, block: tuple[int, int] | None = None
) -> None:
    """Write the gradient of a maximum pool's input to ``out``, which is not empty; zero in rows that are not data.

    ``gradient`` and ``taps`` have the halo that ``out`` needs; gradients outside the buffer count as zero. ``block`` as for
    ``launch_max_pool``.
    """
    grid, constants = _grid(out, block)
    height, width = geometry.axes
    with torch.cuda.device_of(gradient):
        launch(max_pool_gradient_kernel, grid)(
            gradient,
            taps,
            out,
            *_sizes(out),
            *pixel_strides(gradient),
            *pixel_strides(taps),
            *pixel_strides(out),
            height.shift,
            *height.output.data,
            *height.input.data,
            width.shift,
            *width.output.data,
            *width.input.data,
            **window_constants(geometry.axes),
            PACKED=is_packed(geometry),
            **constants,
        )


def launch_average_pool(
    x: Tensor, out: Tensor, geometry: Geometry, *, count_padding: bool, divisor: int | None, block: tuple[int, int] | None = None
) -> None:
    """Write the averages of windows without dilation to ``out``, which is not empty.

    Args:
        x: the input buffer.
        out: the averages.
        geometry: rows and columns of the buffers.
        count_padding: true if elements of the padding count.
        divisor: divisor of each sum; None for the number of elements.
        block: as for ``launch_max_pool``.
    """
    grid, constants = _grid(out, block)
    height, width = geometry.axes
    with torch.cuda.device_of(x):
        launch(average_pool_kernel, grid)(
            x,
            out,
            *_sizes(out),
            *pixel_strides(x),
            *pixel_strides(out),
            height.shift,
            *height.input.data,
            *_count_bounds(height, count_padding),
            width.shift,
            *width.input.data,
            *_count_bounds(width, count_padding),
            **_undilated(geometry),
            DIVISOR=divisor or 0,
            **constants,
        )


def launch_average_pool_gradient(
    gradient: Tensor, out: Tensor, geometry: Geometry, *, count_padding: bool, divisor: int | None, block: tuple[int, int] | None = None
) -> None:
    """Write the gradient of an average pool's input to ``out``, which is not empty; arguments as for ``launch_average_pool``."""
    grid, constants = _grid(out, block)
    height, width = geometry.axes
    with torch.cuda.device_of(gradient):
        launch(average_pool_gradient_kernel, grid)(
            gradient,
            out,
            *_sizes(out),
            *pixel_strides(gradient),
            *pixel_strides(out),
            height.shift,
            *height.output.data,
            *height.input.data,
            *_count_bounds(height, count_padding),
            width.shift,
            *width.output.data,
            *width.input.data,
            *_count_bounds(width, count_padding),
            **_undilated(geometry),
            DIVISOR=divisor or 0,
            **constants,
        )


def _grid(out: Tensor, block: tuple[int, int] | None) -> tuple[tuple[int, int], dict[str, int | bool]]:
    num_samples, num_channels, rows, columns = out.shape
    if block is None:
        channels = max(4, min(64, triton.next_power_of_2(num_channels)))
        block = 1024 // channels, channels
    grid = (ceil_div(num_samples * rows * columns, block[0]), ceil_div(num_channels, block[1]))
    return grid, {"PIXELS": block[0], "CHANNELS": block[1], "num_warps": 4, "enable_fp_fusion": False}


def _sizes(out: Tensor) -> tuple[int, int, int, int]:
    """Arguments of the kernels from ``num_pixels`` to ``num_channels``."""
    num_samples, num_channels, rows, columns = out.shape
    return num_samples * rows * columns, rows, columns, num_channels


def _undilated(geometry: Geometry) -> dict[str, int]:
    return {name: value for name, value in window_constants(geometry.axes).items() if not name.startswith("DILATION")}


def _count_bounds(axis: TileAxis, count_padding: bool) -> tuple[int, int]:
    """Half-open range of the input buffer's rows that count as elements of a window."""
    padding = axis.window.padding if count_padding else 0
    return -axis.input.start - padding, axis.input.extent - axis.input.start + padding
