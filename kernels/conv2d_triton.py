"""Convolution of a tile as an implicit matrix product in Triton: forward, and the gradient of the input.

The rows of the product are pixels, its columns channels; the inner axis runs over taps of the kernel and, within each, over
channels in blocks. A pixel's sum is formed in that order whatever tile it lies in and whatever block, so tiles have the bits
of the whole as long as the inner block (``Blocks.inner``) is the same; it depends on the layer alone.

Affixes: ``p_`` pointer, ``i_`` index, ``o_`` offsets, ``m_`` mask. P pixels, K inner block, C channels of the result.
Four warps: eight are reported to miscompile loops over taps on Hopper (pytorch/pytorch issue 173068).
"""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.blocks import Blocks, default_blocks, is_flat
from sft.kernels.blocks_triton import can_compute_operands, matmul, relu, safe_precision, zero_where_off
from sft.kernels.conv2d_reference import dense_gradient
from sft.kernels.geometry import Geometry
from sft.kernels.mask_tile import ceil_div

__all__ = ["conv2d_kernel", "data_gradient_kernel", "launch_conv2d", "launch_data_gradient"]
__all__ += ["first_tap", "pixel_strides", "unpooled", "window_constants"]

# Values that change from tile to tile must not compile a kernel each.
_RUNTIME = ["num_pixels", "rows", "columns", "shift_h", "low_h", "high_h", "shift_w", "low_w", "high_w"]


@triton.jit(do_not_specialize=_RUNTIME)
def conv2d_kernel(
    p_x,  # [N, groups * group_in, h, w]
    p_gain,  # fp32 [groups * group_in]
    p_offset,  # fp32 [groups * group_in]
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
    LEVELS: tl.constexpr,  # x is made of bytes: gain * x + offset is convolved
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
    """y = activation(scale * conv(x) + bias + residual), or the maxima of that. Pixels of one maximum follow each other."""
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
    # Offsets take 64 bits, rows and columns of a buffer do not, and registers are short.
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
        x = tl.load(p_x + o_x + (reach_h * x_h + reach_w * x_w + channel[None, :]), mask=m_x, other=0)  # [P, K]
        if LEVELS:
            i_level = i_group * group_in + channel
            gain, offset = tl.load(p_gain + i_level, mask=m_k, other=0.0), tl.load(p_offset + i_level, mask=m_k, other=0.0)
            x = tl.where(m_x, x.to(tl.float32) * gain[None, :] + offset[None, :], 0.0).to(p_w.dtype.element_ty)
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
    """Of each four rows the maximum and its number: the first of equals, and the last NaN before everything, as in PyTorch."""
    four = tl.reshape(y.to(tl.float32), (PIXELS // 4, 4, CHANNELS))
    number = tl.arange(0, 4)[None, :, None]
    undefined = tl.max(tl.where(four != four, number, -1), axis=1)
    best = tl.max(tl.where(four != four, float("-inf"), four), axis=1)
    first = tl.min(tl.where(four == best[:, None, :], number, 3), axis=1)
    return tl.where(undefined < 0, best, float("nan")), tl.where(undefined < 0, first, undefined)


@triton.jit
def unpooled(p_dy, p_y, p_taps, o_dy, o_y, o_taps, channel, number, mask, RELU: tl.constexpr):
    """The gradient of the output of a convolution whose maxima of 2 x 2 have the gradient dy: offsets are of the maxima's pixels."""
    dy = tl.load(p_dy + o_dy + channel, mask=mask, other=0.0)
    if RELU:
        dy = zero_where_off(dy, tl.load(p_y + o_y + channel, mask=mask, other=0.0))
    chosen = tl.load(p_taps + o_taps + channel // 4, mask=mask, other=0).to(tl.int32) >> (channel % 4 * 2) & 3
    return tl.where(chosen == number, dy, 0.0).to(dy.dtype)


@triton.jit
def first_tap(base, KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr):
    """The least tap t for which ``base - DILATION * t`` is a multiple of STRIDE; KERNEL if there is none."""
    first = base * 0 + KERNEL
    for back in tl.static_range(KERNEL):
        rest = ((base - DILATION * (KERNEL - 1 - back)) % STRIDE + STRIDE) % STRIDE  # the sign of % differs between GPU and interpreter
        first = tl.where(rest == 0, KERNEL - 1 - back, first)
    return first


@triton.jit(do_not_specialize=[*_RUNTIME, "from_h", "to_h", "from_w", "to_w", "num_samples"])
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
    from_h,  # rows [from_h, to_h) of dx are the image's, the others get zero
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
    """dx = adjoint of the convolution, of dy where y is on. A program's pixels are of one residue modulo the stride, so that it
    visits only the taps that reach them."""
    i_group = (tl.program_id(2) % num_groups).to(tl.int64)
    phase = tl.program_id(2) // num_groups
    phase_h, phase_w = phase // STRIDE_W, phase % STRIDE_W
    phase_rows, phase_columns = tl.cdiv(rows - phase_h, STRIDE_H), tl.cdiv(columns - phase_w, STRIDE_W)
    i_p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m_p, m_c = i_p < num_samples.to(tl.int64) * phase_rows * phase_columns, i_c < group_in
    line = i_p // tl.maximum(phase_columns, 1)
    i_n = line // tl.maximum(phase_rows, 1)
    # Offsets take 64 bits, rows and columns of a buffer do not, and registers are short.
    i_h = (line % tl.maximum(phase_rows, 1)).to(tl.int32) * STRIDE_H + phase_h
    i_w = (i_p % tl.maximum(phase_columns, 1)).to(tl.int32) * STRIDE_W + phase_w
    p_dy += i_group * group_out
    p_y += i_group * group_out
    p_w += i_group * group_out * w_o

    first_h = first_tap(phase_h - shift_h, KERNEL_H, STRIDE_H, DILATION_H)
    first_w = first_tap(phase_w - shift_w, KERNEL_W, STRIDE_W, DILATION_W)
    num_h, num_w = tl.cdiv(KERNEL_H - first_h, TAPS_H), tl.cdiv(KERNEL_W - first_w, TAPS_W)
    num_blocks = tl.cdiv(group_out, INNER)
    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for step in range(num_h * num_w * num_blocks):
        tap, block = step // num_blocks, step % num_blocks
        tap_h, tap_w = first_h + tap // num_w * TAPS_H, first_w + tap % num_w * TAPS_W
        channel = block * INNER + tl.arange(0, INNER)
        m_k = channel < group_out
        # Multiples of the strides wherever they are not negative, and masked where they are.
        num_rows, num_columns = i_h - shift_h - tap_h * DILATION_H, i_w - shift_w - tap_w * DILATION_W
        at_h, at_w = (num_rows // STRIDE_H).to(tl.int64), (num_columns // STRIDE_W).to(tl.int64)
        m_dy = m_p & (num_rows >= low_h * STRIDE_H) & (num_rows < high_h * STRIDE_H)
        m_dy = m_dy & (num_columns >= low_w * STRIDE_W) & (num_columns < high_w * STRIDE_W) & m_k[None, :]
        if UNPOOL:
            number = ((at_h % 2) * 2 + at_w % 2).to(tl.int32)
            at_h, at_w = at_h // 2, at_w // 2
            o_dy, o_y = i_n * dy_n + at_h * dy_h + at_w * dy_w, i_n * y_n + at_h * y_h + at_w * y_w
            o_taps = i_n * taps_n + at_h * taps_h + at_w * taps_w
            dy = unpooled(p_dy, p_y, p_taps, o_dy, o_y, o_taps, channel[None, :], number, m_dy, RELU)  # [P, K]
        else:
            dy = tl.load(p_dy + (i_n * dy_n + at_h * dy_h + at_w * dy_w) + channel[None, :], mask=m_dy, other=0.0)  # [P, K]
            if RELU:
                y = tl.load(p_y + (i_n * y_n + at_h * y_h + at_w * y_w) + channel[None, :], mask=m_dy, other=0.0)
                dy = zero_where_off(dy, y)
        o_w = channel[:, None] * w_o + tap_h * w_h + tap_w * w_w + i_c * w_i
        w = tl.load(p_w + o_w, mask=m_k[:, None] & m_c, other=0.0)  # [K, C]
        acc = matmul(dy, w, acc, PRECISION)

    i_h, i_w = i_h.to(tl.int64), i_w.to(tl.int64)
    m_image = (i_h >= from_h) & (i_h < to_h) & (i_w >= from_w) & (i_w < to_w)
    dx = tl.where(m_image, acc, 0.0).to(p_dx.dtype.element_ty)
    tl.store(p_dx + (i_n * dx_n + i_h * dx_h + i_w * dx_w + i_group * group_in) + i_c, dx, mask=m_p & m_c)


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
    levels: tuple[Tensor, Tensor] | None = None,
    taps: Tensor | None = None,
    blocks: Blocks | None = None,
) -> None:
    """Write the convolution of a tile to ``out``; arguments as ``conv2d.conv2d`` checks them, ``out`` not empty.

    Args:
        levels: what bytes are multiplied by, and what is added then; for an ``x`` of bytes.
        taps: ``out`` is the maxima of 2 x 2 pixels, and here is written where they came from; for one group.
    """
    if levels is not None and not can_compute_operands(x.device):
        x, levels = (x * levels[0].view(1, -1, 1, 1) + levels[1].view(1, -1, 1, 1)).to(weight.dtype), None
    num_samples, _, rows, columns = out.shape
    group_in, group_out = weight.shape[1], weight.shape[0] // groups
    flat = is_flat(group_in)
    if blocks is None:
        blocks = default_blocks(group_out, group_in, weight.dtype)
        if levels is not None and precision == "ieee":  # the numbers take registers beside the bytes
            blocks = dataclasses.replace(blocks, pixels=blocks.pixels // 2)
    num_pixels = num_samples * rows * columns * (1 if taps is None else 4)
    grid = (ceil_div(num_pixels, blocks.pixels), ceil_div(group_out, blocks.channels), groups)
    height, width = geometry.axes
    with torch.cuda.device_of(x):
        conv2d_kernel[grid](
            x,
            *((weight, weight) if levels is None else levels),
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
            **window_constants(geometry),
            LEVELS=levels is not None,
            HAS_SCALE=scale is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            RELU=relu,
            POOL=taps is not None,
            FLAT=flat,
            PRECISION=safe_precision(precision, weight.device),
            PIXELS=blocks.pixels,
            CHANNELS=blocks.channels,
            INNER=blocks.inner,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            enable_fp_fusion=True,
        )


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
    blocks: Blocks | None = None,
) -> None:
    """Write the input's gradient to ``out``; arguments as ``conv2d.conv2d_data_gradient`` checks them, ``out`` not empty.

    Args:
        taps: ``gradient`` and ``output`` are of the maxima of 2 x 2 pixels that came from here; for one group.
    """
    if (output is not None or taps is not None) and not can_compute_operands(gradient.device):
        gradient, output, taps = dense_gradient(gradient, output, taps, geometry.output_size), None, None
    num_samples, _, rows, columns = out.shape
    group_in, group_out = weight.shape[1], weight.shape[0] // groups
    if blocks is None:
        blocks = default_blocks(group_in, group_out, out.dtype)
        loads_more = output is not None or taps is not None
        if loads_more and (out.dtype != torch.float32 or precision == "ieee"):  # then there are too few registers
            blocks = dataclasses.replace(blocks, pixels=32 if taps is not None else blocks.pixels // 2)
    height, width = geometry.axes
    strides = (height.window.stride, width.window.stride)
    num_pixels = num_samples * ceil_div(rows, strides[0]) * ceil_div(columns, strides[1])
    grid = (ceil_div(num_pixels, blocks.pixels), ceil_div(group_in, blocks.channels), groups * math.prod(strides))
    with torch.cuda.device_of(gradient):
        data_gradient_kernel[grid](
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
            *_with_gradient(height.output.data, gradient.shape[2], taps),
            *height.input.data,
            width.shift,
            *_with_gradient(width.output.data, gradient.shape[3], taps),
            *width.input.data,
            **window_constants(geometry),
            TAPS_H=strides[0] // math.gcd(strides[0], height.window.dilation),
            TAPS_W=strides[1] // math.gcd(strides[1], width.window.dilation),
            RELU=output is not None,
            UNPOOL=taps is not None,
            PRECISION=safe_precision(precision, weight.device),
            PIXELS=blocks.pixels,
            CHANNELS=blocks.channels,
            INNER=blocks.inner,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            enable_fp_fusion=True,
        )


def _with_gradient(data: tuple[int, int], size: int, taps: Tensor | None) -> tuple[int, int]:
    """The rows of an output that have a gradient: a last odd one has no maximum."""
    return data if taps is None else (data[0], min(data[1], 2 * size))


def pixel_strides(tensor: Tensor) -> tuple[int, int, int]:
    """Strides along samples, rows and columns; the one along channels is 1."""
    return tensor.stride(0), tensor.stride(2), tensor.stride(3)


def window_constants(geometry: Geometry) -> dict[str, int]:
    """The windows as a kernel's constants."""
    constants: dict[str, int] = {}
    for letter, axis in zip("HW", geometry.axes, strict=True):
        constants |= {f"KERNEL_{letter}": axis.window.kernel, f"STRIDE_{letter}": axis.window.stride}
        constants |= {f"DILATION_{letter}": axis.window.dilation}
    return constants
