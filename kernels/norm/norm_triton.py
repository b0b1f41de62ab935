"""Norms of a strip, in Triton: moments, application, and the two sums and the element-wise part of the backward pass.

The pixels of moments and sums are split. A program sums the blocks of its split in fp32 and adds the result to its own slot in fp64, or
replaces the slot. Strips are added to the same slots one after another, so the order is fixed and no atomics are needed. The moments of a
block are computed around the block's mean and merged by the rule of Chan, Golub and LeVeque (1979). If the mean is far from zero, that rule
loses digits of the squares with the rounding of the means. So a program subtracts its first pixel, the pivot, from all pixels.

Affixes as in :mod:`sft.kernels.conv.forward2d_triton`. P pixels, C channels. Offset of a statistic:
``i_n * stat_n + i_c // group_size * stat_g``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common import row_blocks
from sft.kernels.common_triton import (
    load_gradient,
    pixel_coordinates,
    pixel_offset,
    pixel_strides,
    pixels_after,
    relu,
    relu_gradient,
    split_pixels,
)
from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["launch_merge_moments", "launch_moments", "launch_norm_gradient", "launch_norm_sums", "launch_normalize"]
__all__ += ["merge_moments_kernel", "moments_kernel", "norm_gradient_kernel", "norm_sums_kernel", "normalize_kernel"]

_SPLIT = ["num_pixels", "num_split", "rows", "columns", "width"]


@triton.jit(do_not_specialize=_SPLIT)
def moments_kernel(
    p_x,  # [N, channels, rows, columns]
    p_counts,  # int64 [splits, samples, channels], contiguous
    p_means,  # fp64, as counts
    p_squares,  # fp64, as counts
    num_pixels,  # rows * width of one program's samples: all of them, or one
    num_split,  # pixels of a split, a multiple of PIXELS
    rows,
    columns,
    width,  # columns, rounded up to a multiple of PIXELS if ALIGNED
    num_channels,
    x_n,
    x_h,
    x_w,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ALIGNED: tl.constexpr,  # a block has pixels of one row
    ACCUMULATE: tl.constexpr,  # merge into the slots; otherwise replace them
):
    """Merge the number of elements, mean and sum of squared distances of this strip into the slots, or write them there."""
    i_split, i_s = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)  # [C]
    m_c = i_c < num_channels
    p_x += i_s * x_n
    start = i_split * num_split
    length = tl.maximum(tl.minimum(start + num_split, num_pixels) - start, 0).to(tl.int32)
    i_n, i_h, i_w, own, lane = split_pixels(start, PIXELS, rows, width, ALIGNED)
    first_n, first_h, first_w = pixel_coordinates(start, rows, width)
    m_pivot = i_c < tl.where(length > 0, num_channels, 0)
    pivot = tl.load(p_x + pixel_offset(first_n, first_h, first_w, x_n, x_h, x_w) + i_c, mask=m_pivot, other=0.0).to(tl.float32)
    own_x = own.to(tl.int64) * x_w + i_c[None, :]
    mean = tl.zeros((CHANNELS,), tl.float32)  # minus the pivot
    squares = tl.zeros((CHANNELS,), tl.float32)
    count = length * 0
    for before in range(0, length, PIXELS):
        m_p = own < columns - i_w if ALIGNED else lane < length - before
        m_x = m_p & m_c[None, :]
        x = tl.load(p_x + pixel_offset(i_n, i_h, i_w, x_n, x_h, x_w) + own_x, mask=m_x, other=0.0).to(tl.float32)
        x = tl.where(m_x, x - pivot[None, :], 0.0)
        num = tl.minimum(columns - i_w if ALIGNED else length - before, PIXELS)
        size = num.to(tl.float32)
        centre = tl.sum(x, axis=0) / size
        away = tl.where(m_x, x - centre[None, :], 0.0)
        share = size / (count.to(tl.float32) + size)
        delta = centre - mean
        mean += delta * share
        squares += tl.sum(away * away, axis=0) + delta * delta * (count.to(tl.float32) * share)
        count += num
        i_n, i_h, i_w = pixels_after(i_n, i_h, i_w, PIXELS, rows, width)

    slot = (i_split * tl.num_programs(2) + i_s) * num_channels + i_c
    count = count.to(tl.int64)
    mean = pivot.to(tl.float64) + mean.to(tl.float64)
    total = squares.to(tl.float64)
    if ACCUMULATE:
        previous = tl.load(p_counts + slot, mask=m_c, other=0)
        previous_mean = tl.load(p_means + slot, mask=m_c, other=0.0)
        previous_squares = tl.load(p_squares + slot, mask=m_c, other=0.0)
        share = count.to(tl.float64) / tl.maximum(previous + count, 1).to(tl.float64)
        delta = mean - previous_mean
        mean = previous_mean + delta * share
        total = previous_squares + total + delta * delta * (previous.to(tl.float64) * share)
        tl.store(p_counts + slot, previous + count, mask=m_c)
    else:
        tl.store(p_counts + slot, i_c.to(tl.int64) * 0 + count, mask=m_c)
    tl.store(p_means + slot, mean, mask=m_c)
    tl.store(p_squares + slot, total, mask=m_c)


@triton.jit
def merge_moments_kernel(
    p_counts,  # int64 [splits, samples, channels], contiguous
    p_means,  # fp64, as counts
    p_squares,  # fp64, as counts
    p_variance,  # [samples, groups], contiguous
    p_mean,  # as variance
    num_splits,
    num_channels,
    group_size,
    BLOCK: tl.constexpr,
):
    """Mean and biased variance of a group, from all its slots: squares around the total mean are own ones plus count * distance ** 2."""
    i_s, i_g = tl.program_id(1).to(tl.int64), tl.program_id(0)
    row = tl.num_programs(1) * num_channels
    base = i_s * num_channels + i_g * group_size
    num_slots = num_splits * group_size
    count = tl.zeros((BLOCK,), tl.float64)
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, num_slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        o_slot = base + (i // group_size).to(tl.int64) * row + i % group_size
        own = tl.load(p_counts + o_slot, mask=i < num_slots, other=0).to(tl.float64)
        count += own
        sums += own * tl.load(p_means + o_slot, mask=i < num_slots, other=0.0)
    total = tl.sum(count, axis=0)
    mean = tl.sum(sums, axis=0) / total
    squares = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, num_slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        o_slot = base + (i // group_size).to(tl.int64) * row + i % group_size
        own = tl.load(p_counts + o_slot, mask=i < num_slots, other=0).to(tl.float64)
        distance = tl.load(p_means + o_slot, mask=i < num_slots, other=0.0) - mean
        squares += tl.load(p_squares + o_slot, mask=i < num_slots, other=0.0) + own * distance * distance
    out = i_s * tl.num_programs(0) + i_g
    tl.store(p_mean + out, mean.to(p_mean.dtype.element_ty))
    tl.store(p_variance + out, (tl.sum(squares, axis=0) / total).to(p_variance.dtype.element_ty))


@triton.jit
def _statistics(p_mean, p_rstd, o_stat, mask, eps, HAS_MEAN: tl.constexpr, VARIANCE: tl.constexpr):
    """Mean and reciprocal standard deviation of a block of channels, from means (zero if there are none) and deviations or variances."""
    rstd = tl.load(p_rstd + o_stat, mask=mask, other=0.0).to(tl.float32)
    if VARIANCE:
        rstd = tl.div_rn(tl.full(rstd.shape, 1.0, tl.float32), tl.sqrt_rn(rstd + eps))
    if HAS_MEAN:
        mean = tl.load(p_mean + o_stat, mask=mask, other=0.0).to(tl.float32)
    else:
        mean = tl.zeros(rstd.shape, tl.float32)
    return mean, rstd


@triton.jit(do_not_specialize=_SPLIT)
def norm_sums_kernel(
    p_dy,  # [N, channels, rows, columns]
    p_y,  # as dy: the output of the activation
    p_x,  # as dy
    p_mean,  # [samples or 1, groups]
    p_rstd,
    p_first,  # fp64 [splits, samples, channels], contiguous
    p_second,
    num_pixels,  # as in moments_kernel
    num_split,
    rows,
    columns,
    width,
    num_channels,
    group_size,
    stat_n,
    stat_g,
    eps,
    dy_n,
    dy_h,
    dy_w,
    y_n,
    y_h,
    y_w,
    x_n,
    x_h,
    x_w,
    HAS_STATISTICS: tl.constexpr,  # otherwise x is normalised
    VARIANCE: tl.constexpr,  # rstd are variances, to which eps is added
    RELU: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ALIGNED: tl.constexpr,  # a block has pixels of one row
    ACCUMULATE: tl.constexpr,  # add to the slots; otherwise replace them
):
    """Add the sums of dy, and of dy times the normalised x, of this strip to the slots, or write them there."""
    i_split, i_s = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)  # [C]
    m_c = i_c < num_channels
    if HAS_STATISTICS:
        mean, rstd = _statistics(p_mean, p_rstd, i_s * stat_n + i_c // group_size * stat_g, m_c, eps, True, VARIANCE)
    p_dy += i_s * dy_n
    p_y += i_s * y_n
    p_x += i_s * x_n
    start = i_split * num_split
    length = tl.maximum(tl.minimum(start + num_split, num_pixels) - start, 0).to(tl.int32)
    i_n, i_h, i_w, own, lane = split_pixels(start, PIXELS, rows, width, ALIGNED)
    own_x, own_dy = own.to(tl.int64) * x_w + i_c[None, :], own.to(tl.int64) * dy_w + i_c[None, :]
    own_y = own.to(tl.int64) * y_w + i_c[None, :]
    first = tl.zeros((CHANNELS,), tl.float32)
    second = tl.zeros((CHANNELS,), tl.float32)
    for before in range(0, length, PIXELS):
        m_x = (own < columns - i_w if ALIGNED else lane < length - before) & m_c[None, :]
        x = tl.load(p_x + pixel_offset(i_n, i_h, i_w, x_n, x_h, x_w) + own_x, mask=m_x, other=0.0).to(tl.float32)
        o_dy, o_y = pixel_offset(i_n, i_h, i_w, dy_n, dy_h, dy_w), pixel_offset(i_n, i_h, i_w, y_n, y_h, y_w)
        dy = load_gradient(p_dy + o_dy, p_y + o_y, own_dy, own_y, m_x, RELU).to(tl.float32)
        if HAS_STATISTICS:
            x = (x - mean[None, :]) * rstd[None, :]
        first += tl.sum(dy, axis=0)
        second += tl.sum(dy * x, axis=0)
        i_n, i_h, i_w = pixels_after(i_n, i_h, i_w, PIXELS, rows, width)

    slot = (i_split * tl.num_programs(2) + i_s) * num_channels + i_c
    wide_first, wide_second = first.to(tl.float64), second.to(tl.float64)
    if ACCUMULATE:
        wide_first += tl.load(p_first + slot, mask=m_c, other=0.0)
        wide_second += tl.load(p_second + slot, mask=m_c, other=0.0)
    tl.store(p_first + slot, wide_first, mask=m_c)
    tl.store(p_second + slot, wide_second, mask=m_c)


@triton.jit(do_not_specialize=["num_pixels", "columns"])
def normalize_kernel(
    p_x,  # [N, channels, rows, columns]
    p_mean,  # [samples or 1, groups]
    p_rstd,
    p_weight,  # [channels]
    p_bias,  # [samples or 1, channels]
    p_residual,  # as x
    p_y,  # as x
    num_pixels,  # rows * columns
    columns,
    num_channels,
    group_size,
    stat_n,
    stat_g,
    eps,
    bias_n,
    bias_c,
    x_n,
    x_h,
    x_w,
    residual_n,
    residual_h,
    residual_w,
    y_n,
    y_h,
    y_w,
    HAS_MEAN: tl.constexpr,  # otherwise the means are zero
    VARIANCE: tl.constexpr,  # rstd are variances, to which eps is added
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """y = activation((x - mean) * rstd * weight + bias + residual)."""
    i_n = tl.program_id(2).to(tl.int64)
    i_p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    i_h, i_w = i_p // columns, i_p % columns
    m_c = i_c < num_channels
    m_x = (i_p < num_pixels) & m_c
    mean, rstd = _statistics(p_mean, p_rstd, i_n * stat_n + i_c // group_size * stat_g, m_c, eps, HAS_MEAN, VARIANCE)
    y = (tl.load(p_x + i_n * x_n + i_h * x_h + i_w * x_w + i_c, mask=m_x, other=0.0).to(tl.float32) - mean) * rstd
    if HAS_WEIGHT:
        y = y * tl.load(p_weight + i_c, mask=m_c, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y = y + tl.load(p_bias + i_n * bias_n + i_c * bias_c, mask=m_c, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        o_residual = i_n * residual_n + i_h * residual_h + i_w * residual_w
        y = y + tl.load(p_residual + o_residual + i_c, mask=m_x, other=0.0).to(tl.float32)
    if RELU:
        y = relu(y)
    tl.store(p_y + i_n * y_n + i_h * y_h + i_w * y_w + i_c, y.to(p_y.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["num_pixels", "columns"])
def norm_gradient_kernel(
    p_dy,  # [N, channels, rows, columns]
    p_y,  # as dy: the output of the activation
    p_x,  # as dy
    p_mean,  # [samples or 1, groups]
    p_rstd,
    p_first,  # fp32, as mean
    p_second,
    p_weight,  # [channels]
    p_dx,  # as dy
    num_pixels,  # rows * columns
    columns,
    num_channels,
    group_size,
    stat_n,
    stat_g,
    eps,
    dy_n,
    dy_h,
    dy_w,
    y_n,
    y_h,
    y_w,
    x_n,
    x_h,
    x_w,
    dx_n,
    dx_h,
    dx_w,
    HAS_WEIGHT: tl.constexpr,
    VARIANCE: tl.constexpr,  # rstd are variances, to which eps is added
    FROZEN: tl.constexpr,  # mean and rstd do not depend on x
    RELU: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """dx = rstd * (weight * dy - first - second * normalised x), with dy masked where y is zero."""
    i_n = tl.program_id(2).to(tl.int64)
    i_p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    i_h, i_w = i_p // columns, i_p % columns
    m_c = i_c < num_channels
    m_x = (i_p < num_pixels) & m_c
    o_stat = i_n * stat_n + i_c // group_size * stat_g
    mean, rstd = _statistics(p_mean, p_rstd, o_stat, m_c, eps, not FROZEN, VARIANCE)
    dx = tl.load(p_dy + i_n * dy_n + i_h * dy_h + i_w * dy_w + i_c, mask=m_x, other=0.0).to(tl.float32)
    if RELU:
        dx = relu_gradient(dx, tl.load(p_y + i_n * y_n + i_h * y_h + i_w * y_w + i_c, mask=m_x, other=0.0))
    if HAS_WEIGHT:
        dx = dx * tl.load(p_weight + i_c, mask=m_c, other=0.0).to(tl.float32)
    if not FROZEN:
        x = tl.load(p_x + i_n * x_n + i_h * x_h + i_w * x_w + i_c, mask=m_x, other=0.0).to(tl.float32)
        distance = (x - mean) * rstd
        first, second = tl.load(p_first + o_stat, mask=m_c, other=0.0), tl.load(p_second + o_stat, mask=m_c, other=0.0)
        dx = dx - first - second * distance
    dx = dx * rstd
    tl.store(p_dx + i_n * dx_n + i_h * dx_h + i_w * dx_w + i_c, dx.to(p_dx.dtype.element_ty), mask=m_x)


def launch_moments(
    x: Tensor, counts: Tensor, means: Tensor, squares: Tensor, *, accumulate: bool = True, block: tuple[int, int] | None = None
) -> None:
    """Merge the moments of a strip ``x`` into contiguous slots ``[splits, samples or 1, C]``.

    Args:
        x: the strip without a halo, not empty: each element of the image belongs to one strip.
        counts: elements, int64.
        means: fp64.
        squares: sums of squared distances from the mean, fp64.
        accumulate: false to replace what the slots have.
        block: pixels and channels of one step of a program, powers of two (default: by the layer).
    """
    grid, sizes, constants = _splits(x, counts, block)
    with torch.cuda.device_of(x):
        launch(moments_kernel, grid)(x, counts, means, squares, *sizes, *pixel_strides(x), ACCUMULATE=accumulate, **constants)


def launch_merge_moments(counts: Tensor, means: Tensor, squares: Tensor, variance: Tensor, mean: Tensor) -> None:
    """Write mean and biased variance of each group of channels, contiguous ``[samples or 1, groups]``, from slots of ``launch_moments``."""
    num_splits, num_samples, num_channels = counts.shape
    num_groups = mean.numel() // num_samples
    group_size = num_channels // num_groups
    block = max(16, min(1024, triton.next_power_of_2(num_splits * group_size)))
    with torch.cuda.device_of(counts):
        launch(merge_moments_kernel, (num_groups, num_samples))(
            counts,
            means,
            squares,
            variance,
            mean,
            num_splits,
            num_channels,
            group_size,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,
        )


def launch_norm_sums(
    gradient: Tensor,
    output: Tensor | None,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    first: Tensor,
    second: Tensor,
    *,
    eps: float | None = None,
    accumulate: bool = True,
    block: tuple[int, int] | None = None,
) -> None:
    """Add the sums of a strip, not empty, to contiguous slots ``[splits, samples or 1, C]``.

    Args:
        gradient: gradient of the output.
        output: output of the ReLU, which masks ``gradient``; None without a ReLU.
        x: input of the norm.
        mean, rstd: statistics ``[samples or 1, groups]`` or ``[groups]``, of the same strides; None for both if ``x`` is normalised.
        first: sums of the gradient, fp64.
        second: sums of the gradient times the normalised input, fp64.
        eps: added to ``rstd`` if these are variances; None for reciprocal standard deviations.
        accumulate, block: as for ``launch_moments``.
    """
    grid, sizes, constants = _splits(x, first, block)
    y = gradient if output is None else output
    strides = (*pixel_strides(gradient), *pixel_strides(y), *pixel_strides(x))
    with torch.cuda.device_of(x):
        launch(norm_sums_kernel, grid)(
            gradient,
            y,
            x,
            first if mean is None else mean,
            first if rstd is None else rstd,
            first,
            second,
            *sizes,
            *_statistic_strides(rstd, x.shape[1]),
            eps or 0.0,
            *strides,
            HAS_STATISTICS=rstd is not None,
            VARIANCE=eps is not None,
            RELU=output is not None,
            ACCUMULATE=accumulate,
            **constants,
        )


def launch_normalize(
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    relu: bool,
    eps: float | None = None,
    block: tuple[int, int] | None = None,
) -> None:
    """Write ``activation((x - mean) * rstd * weight + bias + residual)`` of a strip to ``out``, which is not empty.

    Args:
        x: input of the norm.
        mean, rstd: statistics ``[samples or 1, groups]`` or ``[groups]``, of the same strides; without a mean it is zero.
        weight: ``[C]``, contiguous.
        bias: ``[C]`` or ``[samples or 1, C]``.
        residual: image like ``x``, added before the activation.
        out: image like ``x``; may be ``x``.
        relu: true for a ReLU.
        eps, block: as for ``launch_norm_sums``.
    """
    grid, sizes, constants = _elements(out, block)
    r = x if residual is None else residual
    bias_strides = (0, 0, 0) if bias is None else _statistic_strides(bias, x.shape[1])
    with torch.cuda.device_of(x):
        launch(normalize_kernel, grid)(
            x,
            rstd if mean is None else mean,
            rstd,
            rstd if weight is None else weight,
            rstd if bias is None else bias,
            r,
            out,
            *sizes,
            *_statistic_strides(rstd, x.shape[1]),
            eps or 0.0,
            *bias_strides[1:],
            *pixel_strides(x),
            *pixel_strides(r),
            *pixel_strides(out),
            HAS_MEAN=mean is not None,
            VARIANCE=eps is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            RELU=relu,
            **constants,
        )


def launch_norm_gradient(
    gradient: Tensor,
    output: Tensor | None,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    back: tuple[Tensor, Tensor] | None,
    out: Tensor,
    *,
    eps: float | None = None,
    block: tuple[int, int] | None = None,
) -> None:
    """Write ``rstd * (weight * gradient - back[0] - back[1] * normalised x)`` to ``out``, which is not empty.

    Args:
        gradient, output, x, mean, rstd: as for ``launch_norm_sums``; the mean is read with ``back`` only.
        weight: ``[C]``, contiguous.
        back: fp32 with the strides of ``mean``: means of weight times gradient, and of its product with the normalised input; None if mean
            and rstd are not statistics of this image.
        out: the input's gradient; may be ``gradient``.
        eps, block: as for ``launch_norm_sums``.
    """
    grid, sizes, constants = _elements(out, block)
    y = gradient if output is None else output
    with torch.cuda.device_of(x):
        launch(norm_gradient_kernel, grid)(
            gradient,
            y,
            x,
            rstd if mean is None else mean,
            rstd,
            *((rstd, rstd) if back is None else back),
            rstd if weight is None else weight,
            out,
            *sizes,
            *_statistic_strides(rstd, x.shape[1]),
            eps or 0.0,
            *pixel_strides(gradient),
            *pixel_strides(y),
            *pixel_strides(x),
            *pixel_strides(out),
            HAS_WEIGHT=weight is not None,
            VARIANCE=eps is not None,
            FROZEN=back is None,
            RELU=output is not None,
            **constants,
        )


def _splits(x: Tensor, slots: Tensor, block: tuple[int, int] | None) -> tuple[tuple[int, int, int], tuple[int, ...], dict[str, int | bool]]:
    """Grid, arguments from ``num_pixels`` to ``num_channels``, and constants of a kernel with slots."""
    (num_splits, num_samples, num_channels), (rows, columns) = slots.shape, x.shape[2:]
    pixels, channels = block or _block(num_channels, 2048)
    width_px, aligned = row_blocks(columns, pixels)
    num_pixels = x.shape[0] * rows * width_px // num_samples
    num_split = ceil_div(ceil_div(num_pixels, pixels), num_splits) * pixels
    grid = (num_splits, ceil_div(num_channels, channels), num_samples)
    return grid, (num_pixels, num_split, rows, columns, width_px, num_channels), {"ALIGNED": aligned} | _constants(pixels, channels)


def _elements(out: Tensor, block: tuple[int, int] | None) -> tuple[tuple[int, int, int], tuple[int, ...], dict[str, int | bool]]:
    """Grid, arguments from ``num_pixels`` to ``num_channels``, and constants of an element-wise kernel."""
    num_samples, num_channels, rows, columns = out.shape
    pixels, channels = block or _block(num_channels, 1024)
    grid = (ceil_div(rows * columns, pixels), ceil_div(num_channels, channels), num_samples)
    return grid, (rows * columns, columns, num_channels), _constants(pixels, channels)


def _statistic_strides(statistic: Tensor | None, num_channels: int) -> tuple[int, int, int]:
    """Channels of a group, and the strides along samples and groups of a statistic ``[samples or 1, groups, ...]`` or ``[groups]``."""
    if statistic is None:
        return 1, 0, 0
    if statistic.dim() == 1:
        return num_channels // statistic.shape[0], 0, statistic.stride(0)
    return num_channels // statistic.shape[1], statistic.stride(0) if statistic.shape[0] > 1 else 0, statistic.stride(1)


def _block(num_channels: int, size: int) -> tuple[int, int]:
    channels = max(4, min(64, triton.next_power_of_2(num_channels)))
    return size // channels, channels


def _constants(pixels: int, channels: int) -> dict[str, int | bool]:
    return {"PIXELS": pixels, "CHANNELS": channels, "num_warps": 4, "enable_fp_fusion": False}
