"""Row-streaming 3 x 3 convolution in Triton for few channels, for layers that cache bandwidth limits.

An implicit matrix product fetches each element once for each of nine taps, and the weight again for each block of pixels. Here a program
keeps the weight in shared memory and computes a column of pixel blocks from top to bottom. It fetches each input row once for each of the
three columns of the window, and adds the products to the three output rows that read the input row. So it keeps three sums, and one of them
is complete after each row. An element is fetched three times, the weight once.

The sum of a pixel has the order of ``conv2d_kernel``: row by row of the window, then column by column. Both have the same bits with the
same inner block, and tiles have the bits of the untiled result. The input's gradient is the same loop over the gradient's rows with the
window rotated by 180 degrees.

Affixes as in :mod:`sft.kernels.conv.forward2d_triton`. All channels that are summed over are one block of at most 64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.common import BlockSizes
from sft.kernels.common_triton import is_inside, matmul, pixel_strides, relu, relu_gradient, safe_precision
from sft.kernels.geometry import Geometry
from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["launch_conv2d_by_rows", "launch_data_gradient_by_rows", "row_streaming_kernel"]

_RUNTIME = ["num_rows", "num_panels", "rows", "columns", "shift_h", "low_h", "high_h", "from_h", "to_h"]
_RUNTIME += ["shift_w", "low_w", "high_w", "from_w", "to_w"]


@triton.jit(do_not_specialize=_RUNTIME)
def row_streaming_kernel(
    p_x,  # [N, num_in, h, w]; for the gradient dy
    p_on,  # as x: the output of the activation, for the gradient
    p_w,
    p_scale,  # [num_out]
    p_bias,  # [num_out]
    p_residual,  # as the convolution's output
    p_y,  # [N, num_out, rows, columns]
    p_taps,  # uint8 [N, num_out / 4, rows, columns], rounded up
    num_rows,  # of the convolution's output, for one program; even
    num_panels,  # pixel blocks of a row
    rows,  # of the convolution's output
    columns,
    num_in,
    num_out,
    x_n,
    x_h,
    x_w,
    on_n,
    on_h,
    on_w,
    w_o,  # along channels of the result
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
    shift_h,  # output row o reads the input rows o + shift_h to o + shift_h + 2, those in [low_h, high_h)
    low_h,
    high_h,
    from_h,  # rows [from_h, to_h) of the result are data, the remaining rows get zero
    to_h,
    shift_w,
    low_w,
    high_w,
    from_w,
    to_w,
    TURNED: tl.constexpr,  # rotate the window by 180 degrees, for the gradient
    MASKED: tl.constexpr,  # x counts where the output of the activation is not zero
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    POOL: tl.constexpr,  # y is the maxima of 2 x 2 pixels of the output
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
):
    """y = activation(scale * conv(x) + bias + residual), or the maxima of that; or the gradient of a convolution's input."""
    panel = tl.program_id(0) % num_panels
    i_n = (tl.program_id(0) // num_panels).to(tl.int64)
    first_row = tl.program_id(1) * num_rows
    i_p = panel * PIXELS + tl.arange(0, PIXELS)  # [P]
    i_c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)  # [C]
    i_k = tl.arange(0, INNER)  # [K]
    m_p, m_c, m_k = i_p < columns, i_c < num_out, i_k < num_in
    p_x += i_n * x_n
    p_on += i_n * on_n

    o_w = p_w + i_k[:, None] * w_i + i_c[None, :] * w_o
    m_w = m_k[:, None] & m_c[None, :]
    # The taps in the order of the input rows; they stay in shared memory.
    last: tl.constexpr = 8 if TURNED else 0
    sign: tl.constexpr = -1 if TURNED else 1
    w0 = tl.load(o_w + (last + sign * 0) // 3 * w_h + (last + sign * 0) % 3 * w_w, mask=m_w, other=0.0)
    w1 = tl.load(o_w + (last + sign * 1) // 3 * w_h + (last + sign * 1) % 3 * w_w, mask=m_w, other=0.0)
    w2 = tl.load(o_w + (last + sign * 2) // 3 * w_h + (last + sign * 2) % 3 * w_w, mask=m_w, other=0.0)
    w3 = tl.load(o_w + (last + sign * 3) // 3 * w_h + (last + sign * 3) % 3 * w_w, mask=m_w, other=0.0)
    w4 = tl.load(o_w + (last + sign * 4) // 3 * w_h + (last + sign * 4) % 3 * w_w, mask=m_w, other=0.0)
    w5 = tl.load(o_w + (last + sign * 5) // 3 * w_h + (last + sign * 5) % 3 * w_w, mask=m_w, other=0.0)
    w6 = tl.load(o_w + (last + sign * 6) // 3 * w_h + (last + sign * 6) % 3 * w_w, mask=m_w, other=0.0)
    w7 = tl.load(o_w + (last + sign * 7) // 3 * w_h + (last + sign * 7) % 3 * w_w, mask=m_w, other=0.0)
    w8 = tl.load(o_w + (last + sign * 8) // 3 * w_h + (last + sign * 8) % 3 * w_w, mask=m_w, other=0.0)

    complete = tl.zeros((PIXELS, CHANNELS), tl.float32)
    middle = tl.zeros((PIXELS, CHANNELS), tl.float32)
    above = tl.zeros((PIXELS, CHANNELS), p_y.dtype.element_ty)
    for step in range(num_rows + 2):
        at_h = first_row + shift_h + step
        at_w = i_p + shift_w
        limit = tl.where(is_inside(at_h, low_h, high_h), num_in, 0)
        m_row = m_p[:, None] & (i_k[None, :] < limit)
        x0 = _pixels(p_x, p_on, x_h, x_w, on_h, on_w, at_h, at_w, low_w, high_w, i_k, m_row, MASKED)
        complete = matmul(x0, w6, complete, PRECISION)
        middle = matmul(x0, w3, middle, PRECISION)
        begun = matmul(x0, w0, tl.zeros((PIXELS, CHANNELS), tl.float32), PRECISION)
        x1 = _pixels(p_x, p_on, x_h, x_w, on_h, on_w, at_h, at_w + 1, low_w, high_w, i_k, m_row, MASKED)
        complete = matmul(x1, w7, complete, PRECISION)
        middle = matmul(x1, w4, middle, PRECISION)
        begun = matmul(x1, w1, begun, PRECISION)
        x2 = _pixels(p_x, p_on, x_h, x_w, on_h, on_w, at_h, at_w + 2, low_w, high_w, i_k, m_row, MASKED)
        complete = matmul(x2, w8, complete, PRECISION)
        middle = matmul(x2, w5, middle, PRECISION)
        begun = matmul(x2, w2, begun, PRECISION)

        i_h = first_row + step - 2
        last_column = tl.where((step >= 2) & (i_h < rows), columns, 0)
        m_y = (i_p < last_column)[:, None] & m_c[None, :]
        if HAS_SCALE:
            complete *= tl.load(p_scale + i_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            complete += tl.load(p_bias + i_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
        if HAS_RESIDUAL:
            p_row = p_residual + i_n * residual_n + i_h.to(tl.int64) * residual_h
            complete += tl.load(p_row + (i_p[:, None] * residual_w + i_c[None, :]), mask=m_y, other=0.0).to(tl.float32)
        if RELU:
            complete = relu(complete)
        if TURNED:
            m_image = is_inside(i_p, from_w, tl.where(is_inside(i_h, from_h, to_h), to_w, from_w))
            complete = tl.where(m_image[:, None], complete, 0.0)
        y = complete.to(p_y.dtype.element_ty)
        if POOL:
            best, tap = _maxima_of_rows(above, y, PIXELS, CHANNELS)
            i_q = panel * (PIXELS // 2) + tl.arange(0, PIXELS // 2)
            m_q = i_q * 2 + 1 < tl.where(i_h % 2 == 1, last_column, 0)
            p_row = p_y + i_n * y_n + i_h.to(tl.int64) // 2 * y_h
            tl.store(p_row + (i_q[:, None] * y_w + i_c[None, :]), best.to(p_y.dtype.element_ty), mask=m_q[:, None] & m_c[None, :])
            shifted = tl.where(m_c[None, :], tap, 0) << (i_c[None, :] % 4 * 2)
            packed = tl.sum(tl.reshape(shifted, (PIXELS // 2, CHANNELS // 4, 4)), axis=2)
            i_t = tl.program_id(2) * (CHANNELS // 4) + tl.arange(0, CHANNELS // 4)
            p_row = p_taps + i_n * taps_n + i_h.to(tl.int64) // 2 * taps_h
            tl.store(p_row + (i_q[:, None] * taps_w + i_t[None, :]), packed.to(tl.uint8), mask=m_q[:, None] & (i_t * 4 < num_out)[None, :])
            above = y
        else:
            p_row = p_y + i_n * y_n + i_h.to(tl.int64) * y_h
            tl.store(p_row + (i_p[:, None] * y_w + i_c[None, :]), y, mask=m_y)
        complete, middle = middle, begun


@triton.jit
def _pixels(
    p_x,
    p_on,
    x_h,
    x_w,
    on_h,
    on_w,
    at_h,
    at_w,
    low_w,
    high_w,
    channel,
    mask,
    MASKED: tl.constexpr,
):
    """One row of pixels of x, [P, K]. The row's offset needs 64 bits, offsets within the row 32; this saves registers."""
    mask = mask & is_inside(at_w, low_w, high_w)[:, None]
    at_h, at_w = at_h.to(tl.int64), at_w[:, None]
    x = tl.load(p_x + at_h * x_h + (at_w * x_w + channel[None, :]), mask=mask, other=0.0)
    if MASKED:
        x = relu_gradient(x, tl.load(p_on + at_h * on_h + (at_w * on_w + channel[None, :]), mask=mask, other=0.0))
    return x


@triton.jit
def _maxima_of_rows(above, below, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    """The maxima of 2 x 2 pixels of two rows and their numbers, as in PyTorch: the last NaN if any, otherwise the first maximum."""
    best, tap = _maxima_of_pairs(above, PIXELS, CHANNELS)
    other, number = _maxima_of_pairs(below, PIXELS, CHANNELS)
    is_below = (other != other) | ((best == best) & (other > best))
    return tl.where(is_below, other, best), tl.where(is_below, number + 2, tap)


@triton.jit
def _maxima_of_pairs(y, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    """The maxima of pairs of neighbouring pixels, and 1 for those that are the right pixel."""
    left, right = tl.split(tl.permute(tl.reshape(y.to(tl.float32), (PIXELS // 2, 2, CHANNELS)), (0, 2, 1)))
    is_right = (right != right) | ((left == left) & (right > left))
    return tl.where(is_right, right, left), tl.where(is_right, 1, 0)


def launch_conv2d_by_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    geometry: Geometry,
    *,
    relu: bool,
    precision: str,
    blocks: BlockSizes,
    scale: Tensor | None = None,
    taps: Tensor | None = None,
) -> None:
    """``launch_conv2d`` for one group and a window of 3 x 3 without stride and dilation."""
    height, width = geometry.axes
    w_o, w_i, w_h, w_w = weight.stride()
    rows, columns = out.shape[2] * (1 if taps is None else 2), out.shape[3] * (1 if taps is None else 2)
    _launch(
        (x, x),
        (weight, w_o, w_i, w_h, w_w),
        (scale, bias, residual, out, taps),
        (rows, columns, weight.shape[1], weight.shape[0]),
        (height.shift, *height.input.data, 0, rows, width.shift, *width.input.data, 0, columns),
        {"TURNED": False, "MASKED": False, "RELU": relu, "POOL": taps is not None},
        precision,
        blocks,
    )


def launch_data_gradient_by_rows(
    gradient: Tensor,
    output: Tensor | None,
    weight: Tensor,
    out: Tensor,
    geometry: Geometry,
    *,
    precision: str,
    blocks: BlockSizes,
) -> None:
    """``launch_data_gradient`` for one group and a window of 3 x 3 without stride and dilation."""
    w_o, w_i, w_h, w_w = weight.stride()
    _launch(
        (gradient, gradient if output is None else output),
        (weight, w_i, w_o, w_h, w_w),
        (None, None, None, out, None),
        (out.shape[2], out.shape[3], weight.shape[0], weight.shape[1]),
        tuple(value for axis in geometry.axes for value in (-axis.shift - 2, *axis.output.data, *axis.input.data)),
        {"TURNED": True, "MASKED": output is not None, "RELU": False, "POOL": False},
        precision,
        blocks,
    )


def _launch(
    operands: tuple[Tensor, Tensor],
    weight: tuple[Tensor, int, int, int, int],
    results: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor | None],
    sizes: tuple[int, int, int, int],
    sides: tuple[int, ...],
    options: dict[str, bool],
    precision: str,
    blocks: BlockSizes,
) -> None:
    values, *strides = weight
    scale, bias, residual, out, taps = results
    rows, columns, _, num_out = sizes
    panels = ceil_div(columns, blocks.pixels)
    with torch.cuda.device_of(out):
        launch(row_streaming_kernel, (panels * out.shape[0], ceil_div(rows, blocks.rows), ceil_div(num_out, blocks.channels)))(
            *operands,
            values,
            values if scale is None else scale,
            values if bias is None else bias,
            out if residual is None else residual,
            out,
            out if taps is None else taps,
            blocks.rows,
            panels,
            *sizes,
            *(stride for operand in operands for stride in pixel_strides(operand)),
            *strides,
            *pixel_strides(out if residual is None else residual),
            *pixel_strides(out),
            *pixel_strides(out if taps is None else taps),
            *sides,
            **options,
            HAS_SCALE=scale is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            PRECISION=safe_precision(precision, out.device),
            PIXELS=blocks.pixels,
            CHANNELS=blocks.channels,
            INNER=blocks.inner,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            enable_fp_fusion=True,
        )
