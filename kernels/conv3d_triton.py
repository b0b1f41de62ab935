"""Convolution of a tile of a volume in Triton: the implicit matrix products of ``conv2d_triton``, with a third axis.

Forward, the gradient of the input (pixels sorted by residue modulo the strides, as there) and the gradients of weight and bias
in the slots of ``conv2d_gradient_triton``. Affixes as there. One group.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.blocks import Blocks, block_size, default_blocks, is_flat
from sft.kernels.blocks_triton import can_compute_operands, matmul, relu, safe_precision, zero_where_off
from sft.kernels.conv2d_reference import dense_gradient
from sft.kernels.conv2d_triton import first_tap
from sft.kernels.mask_tile import ceil_div
from sft.kernels.volume import VolumeGeometry

__all__ = ["conv3d_kernel", "launch_conv3d", "launch_volume_data_gradient", "launch_volume_weight_gradient"]
__all__ += ["volume_data_gradient_kernel", "volume_weight_gradient_kernel"]

_BORDERS = [f"{name}_{axis}" for axis in "dhw" for name in ("shift", "low", "high")]
_RUNTIME = ["num_pixels", "slices", "rows", "columns", *_BORDERS]


@triton.jit
def _inside(at, low, high):
    return (at >= low) & (at < high)


@triton.jit(do_not_specialize=_RUNTIME)
def conv3d_kernel(
    p_x,  # [N, num_in, d, h, w]
    p_w,  # [num_out, num_in, kd, kh, kw]
    p_bias,  # [num_out]
    p_y,  # [N, num_out, slices, rows, columns]
    num_pixels,  # N * slices * rows * columns
    slices,
    rows,
    columns,
    num_in,
    num_out,
    x_n,
    x_d,
    x_h,
    x_w,
    w_o,
    w_i,
    w_d,
    w_h,
    w_w,
    y_n,
    y_d,
    y_h,
    y_w,
    shift_d,  # as in conv2d_kernel, for each axis
    low_d,
    high_d,
    shift_h,
    low_h,
    high_h,
    shift_w,
    low_w,
    high_w,
    KERNEL_D: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_D: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    FLAT: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
):
    """y = activation(conv(x) + bias)."""
    i_p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m_p, m_c = i_p < num_pixels, i_c < num_out
    line = i_p // columns
    i_w, i_h, i_d, i_n = i_p % columns, line % rows, line // rows % slices, line // rows // slices
    first_d, first_h, first_w = i_d * STRIDE_D + shift_d, i_h * STRIDE_H + shift_h, i_w * STRIDE_W + shift_w
    o_x = i_n * x_n + first_d * x_d + first_h * x_h + first_w * x_w
    # Offsets take 64 bits, coordinates in a buffer do not, and registers are short.
    first_d, first_h, first_w = first_d.to(tl.int32), first_h.to(tl.int32), first_w.to(tl.int32)

    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    num_blocks = tl.cdiv(num_in, INNER)
    num_taps = KERNEL_D * KERNEL_H * KERNEL_W
    num_steps = tl.cdiv(num_taps * num_in, INNER) if FLAT else num_taps * num_blocks
    for step in range(num_steps):
        if FLAT:
            k = step * INNER + tl.arange(0, INNER)
            tap, channel = k // num_in, k % num_in
            m_k = k < num_taps * num_in
            tap_x, tap_w = tap[None, :], tap[:, None]
        else:
            tap_x = step // num_blocks
            tap_w = tap_x
            channel = step % num_blocks * INNER + tl.arange(0, INNER)
            m_k = channel < num_in
        reach_d, reach_h = tap_x // (KERNEL_H * KERNEL_W) * DILATION_D, tap_x // KERNEL_W % KERNEL_H * DILATION_H
        reach_w = tap_x % KERNEL_W * DILATION_W
        m_x = m_p & _inside(first_d + reach_d, low_d, high_d) & _inside(first_h + reach_h, low_h, high_h)
        m_x = m_x & _inside(first_w + reach_w, low_w, high_w) & m_k[None, :]
        o_tap = reach_d * x_d + reach_h * x_h + reach_w * x_w
        x = tl.load(p_x + o_x + (o_tap + channel[None, :]), mask=m_x, other=0.0)  # [P, K]
        o_w = channel[:, None] * w_i + tap_w // (KERNEL_H * KERNEL_W) * w_d + tap_w // KERNEL_W % KERNEL_H * w_h
        w = tl.load(p_w + (o_w + tap_w % KERNEL_W * w_w) + i_c * w_o, mask=m_k[:, None] & m_c, other=0.0)  # [K, C]
        acc = matmul(x, w, acc, PRECISION)

    if HAS_BIAS:
        acc += tl.load(p_bias + i_c, mask=m_c, other=0.0).to(tl.float32)
    if RELU:
        acc = relu(acc)
    o_y = i_n * y_n + i_d * y_d + i_h * y_h + i_w * y_w
    tl.store(p_y + o_y + i_c, acc.to(p_y.dtype.element_ty), mask=m_p & m_c)


@triton.jit(do_not_specialize=[*_RUNTIME[1:], *(f"{name}_{axis}" for axis in "dhw" for name in ("from", "to")), "num_samples"])
def volume_data_gradient_kernel(
    p_dy,  # [N, num_out, d, h, w]
    p_y,  # as dy: the output of the activation
    p_w,  # [num_out, num_in, kd, kh, kw]
    p_dx,  # [N, num_in, slices, rows, columns]
    num_samples,
    slices,
    rows,
    columns,
    num_in,
    num_out,
    dy_n,
    dy_d,
    dy_h,
    dy_w,
    y_n,
    y_d,
    y_h,
    y_w,
    w_o,
    w_i,
    w_d,
    w_h,
    w_w,
    dx_n,
    dx_d,
    dx_h,
    dx_w,
    shift_d,  # as in data_gradient_kernel of conv2d_triton, for each axis
    low_d,
    high_d,
    from_d,
    to_d,
    shift_h,
    low_h,
    high_h,
    from_h,
    to_h,
    shift_w,
    low_w,
    high_w,
    from_w,
    to_w,
    KERNEL_D: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_D: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    TAPS_D: tl.constexpr,
    TAPS_H: tl.constexpr,
    TAPS_W: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
):
    """dx = adjoint of the convolution, of dy where y is on; a program's pixels are of one residue modulo the strides."""
    phase = tl.program_id(2)
    phase_d, phase_h, phase_w = phase // (STRIDE_H * STRIDE_W), phase // STRIDE_W % STRIDE_H, phase % STRIDE_W
    phase_slices = tl.maximum(tl.cdiv(slices - phase_d, STRIDE_D), 0)
    phase_rows, phase_columns = tl.maximum(tl.cdiv(rows - phase_h, STRIDE_H), 0), tl.maximum(tl.cdiv(columns - phase_w, STRIDE_W), 0)
    i_p = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
    i_c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]  # [1, C]
    m_p = i_p < num_samples.to(tl.int64) * phase_slices * phase_rows * phase_columns
    m_c = i_c < num_in
    line = i_p // tl.maximum(phase_columns, 1)
    plane = line // tl.maximum(phase_rows, 1)
    i_n = plane // tl.maximum(phase_slices, 1)
    # Offsets take 64 bits, coordinates in a buffer do not, and registers are short.
    i_d = (plane % tl.maximum(phase_slices, 1)).to(tl.int32) * STRIDE_D + phase_d
    i_h = (line % tl.maximum(phase_rows, 1)).to(tl.int32) * STRIDE_H + phase_h
    i_w = (i_p % tl.maximum(phase_columns, 1)).to(tl.int32) * STRIDE_W + phase_w

    first_d = first_tap(phase_d - shift_d, KERNEL_D, STRIDE_D, DILATION_D)
    first_h = first_tap(phase_h - shift_h, KERNEL_H, STRIDE_H, DILATION_H)
    first_w = first_tap(phase_w - shift_w, KERNEL_W, STRIDE_W, DILATION_W)
    num_d = tl.cdiv(KERNEL_D - first_d, TAPS_D)
    num_h, num_w = tl.cdiv(KERNEL_H - first_h, TAPS_H), tl.cdiv(KERNEL_W - first_w, TAPS_W)
    num_blocks = tl.cdiv(num_out, INNER)
    acc = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for step in range(num_d * num_h * num_w * num_blocks):
        tap, block = step // num_blocks, step % num_blocks
        tap_d, tap_h = first_d + tap // num_w // num_h * TAPS_D, first_h + tap // num_w % num_h * TAPS_H
        tap_w = first_w + tap % num_w * TAPS_W
        channel = block * INNER + tl.arange(0, INNER)
        m_k = channel < num_out
        # Multiples of the strides wherever they are not negative, and masked where they are.
        num_slices, num_rows = i_d - shift_d - tap_d * DILATION_D, i_h - shift_h - tap_h * DILATION_H
        num_columns = i_w - shift_w - tap_w * DILATION_W
        m_dy = m_p & _inside(num_slices, low_d * STRIDE_D, high_d * STRIDE_D) & _inside(num_rows, low_h * STRIDE_H, high_h * STRIDE_H)
        m_dy = m_dy & _inside(num_columns, low_w * STRIDE_W, high_w * STRIDE_W) & m_k[None, :]
        at_d, at_h = (num_slices // STRIDE_D).to(tl.int64), (num_rows // STRIDE_H).to(tl.int64)
        at_w = (num_columns // STRIDE_W).to(tl.int64)
        o_dy = i_n * dy_n + at_d * dy_d + at_h * dy_h + at_w * dy_w
        dy = tl.load(p_dy + o_dy + channel[None, :], mask=m_dy, other=0.0)  # [P, K]
        if RELU:
            o_y = i_n * y_n + at_d * y_d + at_h * y_h + at_w * y_w
            dy = zero_where_off(dy, tl.load(p_y + o_y + channel[None, :], mask=m_dy, other=0.0))
        o_w = channel[:, None] * w_o + (tap_d * w_d + tap_h * w_h + tap_w * w_w) + i_c * w_i
        w = tl.load(p_w + o_w, mask=m_k[:, None] & m_c, other=0.0)  # [K, C]
        acc = matmul(dy, w, acc, PRECISION)

    m_image = _inside(i_d, from_d, to_d) & _inside(i_h, from_h, to_h) & _inside(i_w, from_w, to_w)
    dx = tl.where(m_image, acc, 0.0).to(p_dx.dtype.element_ty)
    o_dx = i_n * dx_n + i_d.to(tl.int64) * dx_d + i_h.to(tl.int64) * dx_h + i_w.to(tl.int64) * dx_w
    tl.store(p_dx + o_dx + i_c, dx, mask=m_p & m_c)


@triton.jit(do_not_specialize=[*_RUNTIME, "num_split"])
def volume_weight_gradient_kernel(
    p_dy,  # [N, num_out, slices, rows, columns]
    p_y,  # as dy: the output of the activation
    p_x,  # [N, num_in, d, h, w]
    p_weights,  # fp32 [splits, num_out, kd, kh, kw, num_in], contiguous
    p_biases,  # fp32 [splits, num_out], contiguous
    num_pixels,  # N * slices * rows * columns
    num_split,  # pixels of a split, a multiple of PIXELS
    slices,
    rows,
    columns,
    num_in,
    num_out,
    dy_n,
    dy_d,
    dy_h,
    dy_w,
    y_n,
    y_d,
    y_h,
    y_w,
    x_n,
    x_d,
    x_h,
    x_w,
    shift_d,  # as in conv3d_kernel
    low_d,
    high_d,
    shift_h,
    low_h,
    high_h,
    shift_w,
    low_w,
    high_w,
    KERNEL_D: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_D: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    RELU: tl.constexpr,
    BIAS: tl.constexpr,
    FLAT: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add this tile's share of the gradients to the slots."""
    i_split = tl.program_id(0).to(tl.int64)
    i_columns = tl.program_id(1)
    i_o = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)  # [O]
    num_taps = KERNEL_D * KERNEL_H * KERNEL_W
    if FLAT:
        k = i_columns * COLUMNS + tl.arange(0, COLUMNS)
        tap, channel = (k // num_in)[None, :], (k % num_in)[None, :]
        m_k = (k < num_taps * num_in)[None, :]
    else:
        num_blocks = tl.cdiv(num_in, COLUMNS)
        tap = i_columns // num_blocks
        channel = (i_columns % num_blocks * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        m_k = channel < num_in
    m_o = i_o < num_out
    tap_d = tap // (KERNEL_H * KERNEL_W) * DILATION_D + shift_d
    tap_h, tap_w = tap // KERNEL_W % KERNEL_H * DILATION_H + shift_h, tap % KERNEL_W * DILATION_W + shift_w

    acc = tl.zeros((CHANNELS, COLUMNS), tl.float32)
    sums = tl.zeros((CHANNELS,), tl.float32)
    start = i_split * num_split
    stop = tl.minimum(start + num_split, num_pixels)
    for block in range(tl.cdiv(tl.maximum(stop - start, 0), PIXELS).to(tl.int32)):
        i_p = start + block * PIXELS + tl.arange(0, PIXELS)[:, None]  # [P, 1]
        line = i_p // columns
        i_w, i_h, i_d, i_n = i_p % columns, line % rows, line // rows % slices, line // rows // slices
        m_p = i_p < stop
        m_dy = m_p & m_o[None, :]
        dy = tl.load(p_dy + (i_n * dy_n + i_d * dy_d + i_h * dy_h + i_w * dy_w) + i_o[None, :], mask=m_dy, other=0.0)  # [P, O]
        if RELU:
            y = tl.load(p_y + (i_n * y_n + i_d * y_d + i_h * y_h + i_w * y_w) + i_o[None, :], mask=m_dy, other=0.0)
            dy = zero_where_off(dy, y)
        at_d, at_h, at_w = i_d * STRIDE_D + tap_d, i_h * STRIDE_H + tap_h, i_w * STRIDE_W + tap_w
        m_x = m_p & _inside(at_d, low_d, high_d) & _inside(at_h, low_h, high_h) & _inside(at_w, low_w, high_w) & m_k
        x = tl.load(p_x + (i_n * x_n + at_d * x_d + at_h * x_h + at_w * x_w) + channel, mask=m_x, other=0.0)  # [P, C]
        acc = matmul(tl.trans(dy), x, acc, PRECISION)
        if BIAS:
            sums += tl.sum(dy.to(tl.float32), axis=0)

    slot = i_split * num_out + i_o  # [O]
    o_weights = (slot[:, None] * num_taps + tap) * num_in + channel
    m_weights = m_o[:, None] & m_k
    acc += tl.load(p_weights + o_weights, mask=m_weights, other=0.0)
    tl.store(p_weights + o_weights, acc, mask=m_weights)
    if BIAS and i_columns == 0:
        sums += tl.load(p_biases + slot, mask=m_o, other=0.0)
        tl.store(p_biases + slot, sums, mask=m_o)


def launch_conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    geometry: VolumeGeometry,
    *,
    relu: bool,
    precision: str,
    blocks: Blocks | None = None,
) -> None:
    """Write the convolution of a tile to ``out``; arguments as ``conv3d.conv3d`` checks them, ``out`` not empty."""
    num_out, num_in = weight.shape[:2]
    blocks = blocks or default_blocks(num_out, num_in, x.dtype)
    num_pixels = out.numel() // num_out
    with torch.cuda.device_of(x):
        conv3d_kernel[(ceil_div(num_pixels, blocks.pixels), ceil_div(num_out, blocks.channels))](
            x,
            weight,
            weight if bias is None else bias,
            out,
            num_pixels,
            *out.shape[2:],
            num_in,
            num_out,
            *_voxel_strides(x),
            *weight.stride(),
            *_voxel_strides(out),
            *(value for axis in geometry.axes for value in (axis.shift, *axis.input.data)),
            **_constants(geometry),
            HAS_BIAS=bias is not None,
            RELU=relu,
            FLAT=is_flat(num_in),
            PRECISION=safe_precision(precision, weight.device),
            PIXELS=blocks.pixels,
            CHANNELS=blocks.channels,
            INNER=blocks.inner,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            enable_fp_fusion=True,
        )


def launch_volume_data_gradient(
    gradient: Tensor,
    output: Tensor | None,
    weight: Tensor,
    out: Tensor,
    geometry: VolumeGeometry,
    *,
    precision: str,
    blocks: Blocks | None = None,
) -> None:
    """Write the input's gradient to ``out``; arguments as ``conv3d.conv3d_data_gradient`` checks them, ``out`` not empty."""
    if output is not None and not can_compute_operands(gradient.device):
        gradient, output = dense_gradient(gradient, output, None, (0, 0)), None
    num_out, num_in = weight.shape[:2]
    if blocks is None:
        blocks = default_blocks(num_in, num_out, out.dtype)
        if output is not None and (out.dtype != torch.float32 or precision == "ieee"):  # two loads of each block: too few registers
            blocks = dataclasses.replace(blocks, pixels=blocks.pixels // 2)
    windows = [axis.window for axis in geometry.axes]
    num_pixels = out.shape[0] * math.prod(ceil_div(size, w.stride) for size, w in zip(out.shape[2:], windows, strict=True))
    grid = (ceil_div(num_pixels, blocks.pixels), ceil_div(num_in, blocks.channels), math.prod(w.stride for w in windows))
    with torch.cuda.device_of(gradient):
        volume_data_gradient_kernel[grid](
            gradient,
            gradient if output is None else output,
            weight,
            out,
            out.shape[0],
            *out.shape[2:],
            num_in,
            num_out,
            *_voxel_strides(gradient),
            *_voxel_strides(gradient if output is None else output),
            *weight.stride(),
            *_voxel_strides(out),
            *(value for axis in geometry.axes for value in (axis.shift, *axis.output.data, *axis.input.data)),
            **_constants(geometry),
            **{f"TAPS_{letter}": w.stride // math.gcd(w.stride, w.dilation) for letter, w in zip("DHW", windows, strict=True)},
            RELU=output is not None,
            PRECISION=safe_precision(precision, weight.device),
            PIXELS=blocks.pixels,
            CHANNELS=blocks.channels,
            INNER=blocks.inner,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            enable_fp_fusion=True,
        )


def launch_volume_weight_gradient(
    gradient: Tensor,
    output: Tensor | None,
    x: Tensor,
    weights: Tensor,
    biases: Tensor | None,
    geometry: VolumeGeometry,
    *,
    precision: str,
    block: tuple[int, int, int] | None = None,
) -> None:
    """Add a tile's share to the slots ``weights`` and ``biases``; arguments as ``conv3d.conv3d_weight_gradient`` checks them.

    Args:
        block: pixels, output channels and columns of one program (default: by the layer).
    """
    if output is not None and not can_compute_operands(gradient.device):
        gradient, output = dense_gradient(gradient, output, None, (0, 0)), None
    num_splits, num_out, *kernel, num_in = weights.shape
    flat, num_taps = is_flat(num_in), math.prod(kernel)
    flattened = num_taps * num_in if flat else num_in
    largest = 32 if precision == "ieee" else 64  # without matrix instructions a larger block runs out of registers
    most = 16 if precision == "ieee" else 32 if flat or x.dtype == torch.float32 else 64
    pixels, channels, width_of_block = block or (most, block_size(num_out, largest), block_size(flattened, largest))
    num_blocks = ceil_div(flattened, width_of_block) * (1 if flat else num_taps)
    num_pixels = gradient.numel() // num_out
    with torch.cuda.device_of(x):
        volume_weight_gradient_kernel[(num_splits, num_blocks, ceil_div(num_out, channels))](
            gradient,
            gradient if output is None else output,
            x,
            weights,
            weights if biases is None else biases,
            num_pixels,
            ceil_div(ceil_div(num_pixels, pixels), num_splits) * pixels,
            *gradient.shape[2:],
            num_in,
            num_out,
            *_voxel_strides(gradient),
            *_voxel_strides(gradient if output is None else output),
            *_voxel_strides(x),
            *(value for axis in geometry.axes for value in (axis.shift, *axis.input.data)),
            **_constants(geometry),
            RELU=output is not None,
            BIAS=biases is not None,
            FLAT=flat,
            PRECISION=safe_precision(precision, x.device),
            PIXELS=pixels,
            CHANNELS=channels,
            COLUMNS=width_of_block,
            num_warps=4,
            num_stages=3,
            enable_fp_fusion=True,
        )


def _voxel_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides along samples, slices, rows and columns; the one along channels is 1."""
    return tensor.stride(0), *tensor.stride()[2:]


def _constants(geometry: VolumeGeometry) -> dict[str, int]:
    """The windows as a kernel's constants."""
    constants: dict[str, int] = {}
    for letter, axis in zip("DHW", geometry.axes, strict=True):
        constants |= {f"KERNEL_{letter}": axis.window.kernel, f"STRIDE_{letter}": axis.window.stride}
        constants |= {f"DILATION_{letter}": axis.window.dilation}
    return constants
