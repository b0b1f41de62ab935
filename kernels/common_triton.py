"""Device functions and launch helpers that the Triton kernels share, with workarounds for two bugs of their tools.

*Interpreter.* Triton's interpreter multiplies, adds and compares bfloat16 as bit patterns (triton-lang/triton issue 11584). So kernels
widen values to fp32 before they compute with them. Operands of products are widened under the interpreter only (``matmul``).

*Assembler.* Assemblers for Hopper before that of CUDA 13.3, which Triton before 3.9 includes, let a product overwrite registers that it
still reads (triton-lang/triton issue 11781). An operand that a kernel *computed*, instead of copying it from memory, is then wrong.
``can_compute_operands`` tells a launch to avoid that: PyTorch computes the operands first (``dense_gradient``), and products in three parts
become exact (``safe_precision``). ``TRITON_PTXAS_PATH`` names another assembler.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.common.errors import UnsupportedError
from sft.kernels.geometry import TileAxis

__all__ = [
    "assembler_version",
    "can_compute_operands",
    "check_reach",
    "dense_gradient",
    "first_tap",
    "gradient_block",
    "is_inside",
    "load_gradient",
    "matmul",
    "next_digit",
    "pixel_coordinates",
    "pixel_offset",
    "pixel_strides",
    "pixels_after",
    "relu",
    "relu_gradient",
    "safe_precision",
    "split_pixels",
    "split_voxels",
    "store_sums",
    "unpool_gradient",
    "voxel_offset",
    "voxel_strides",
    "voxels_after",
    "window_constants",
]

_FIRST_FIXED_ASSEMBLER = (13, 3)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def matmul(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` with fp32 accumulation; PRECISION matters for fp32 operands only."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def relu(x):
    """ReLU of an fp32 block with torch's rule: NaN stays NaN."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def relu_gradient(gradient, y):
    """The gradient where the output ``y`` of a ReLU is not zero. With torch's rule the gradient also passes where ``y`` is NaN."""
    return tl.where(y.to(tl.float32) <= 0, 0.0, gradient).to(gradient.dtype)


def can_compute_operands(device: torch.device) -> bool:
    """True if products of computed operands come out right: not on Hopper, or with the assembler of CUDA 13.3 or newer."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return True
    major, minor = assembler_version(90).split(".")[:2]
    return (int(major), int(minor)) >= _FIRST_FIXED_ASSEMBLER


@functools.cache
def assembler_version(capability: int) -> str:
    """Version of the assembler for a compute capability (90 for sm_90), such as ``"13.4"``."""
    from triton.backends.nvidia.compiler import get_ptxas  # not above: it needs NVIDIA's backend

    version: str = get_ptxas(capability).version
    return version


def safe_precision(precision: str, device: torch.device) -> str:
    """``PRECISION`` of ``matmul`` on a device: ``ieee`` instead of products in three parts if computed operands are wrong."""
    return "ieee" if precision in ("tf32x3", "bf16x3") and not can_compute_operands(device) else precision


def dense_gradient(gradient: Tensor, output: Tensor | None, taps: Tensor | None, size: tuple[int, int]) -> Tensor:
    """The gradient of a convolution's output, masked by its ReLU and spread over the pixels of a 2 x 2 maximum pool, in plain PyTorch.

    Args:
        gradient: gradient of the ReLU's output, or of the maxima.
        output: output of the ReLU that masks the gradient, or the maxima; None without a ReLU.
        taps: packed taps of the maxima (:mod:`sft.kernels.pool.taps`); None without a pool.
        size: rows and columns of the convolution's output.
    """
    masked = gradient if output is None else torch.where(output <= 0, 0, gradient)
    if taps is None:
        return masked
    shifts = torch.arange(masked.shape[1], device=masked.device)
    chosen = taps[:, shifts // 4] >> (shifts % 4 * 2).to(torch.uint8)[:, None, None] & 3
    shape = (*masked.shape[:2], *size)
    dense = torch.zeros(shape, dtype=masked.dtype, device=masked.device).contiguous(memory_format=torch.channels_last)
    for number in range(4):
        pixels = dense[:, :, number // 2 : 2 * masked.shape[2] : 2, number % 2 : 2 * masked.shape[3] : 2]
        pixels.copy_(torch.where(chosen == number, masked, 0))
    return dense


@triton.jit
def is_inside(at, low, high):
    """Mask of the coordinates in ``[low, high)``."""
    return (at >= low) & (at < high)


@triton.jit
def load_gradient(p_dy, p_y, o_dy, o_y, mask, RELU: tl.constexpr):
    """A block of gradients, with RELU where the output is not zero."""
    dy = tl.load(p_dy + o_dy, mask=mask, other=0.0)
    if RELU:
        dy = relu_gradient(dy, tl.load(p_y + o_y, mask=mask, other=0.0))
    return dy


@triton.jit
def pixel_coordinates(i_p, rows, columns):
    """Sample, row and column, in 32 bits, of pixels with numbers in 64 bits. The divisions belong before a loop."""
    line = i_p // columns
    return (line // rows).to(tl.int32), (line % rows).to(tl.int32), (i_p % columns).to(tl.int32)


@triton.jit
def split_pixels(start, PIXELS: tl.constexpr, rows, width, ALIGNED: tl.constexpr):
    """Sample, row and column, in 32 bits, of the first block of a split; the columns within a block; and the numbers of its pixels.

    The pixel ``i`` has row ``i // width``. If blocks are aligned to rows, the coordinates are scalars, those of the first pixel of a block.
    Otherwise each pixel has its own, and there are no columns to add. The divisions take 64 bits, so they belong before a loop. A mask of
    scalar coordinates is one of blocks if ``own * 0`` is added to them, as the interpreter requires.
    """
    lane = tl.arange(0, PIXELS)[:, None]
    if ALIGNED:
        i_p, own = start, lane
    else:
        i_p, own = start + lane, lane * 0
    i_n, i_h, i_w = pixel_coordinates(i_p, rows, width)
    return i_n, i_h, i_w, own, lane


@triton.jit
def pixels_after(i_n, i_h, i_w, STEP, rows, width):
    """Sample, row and column of the pixels that follow others by STEP, by carries instead of divisions of each pixel."""
    lines = STEP // width
    i_w += STEP % width
    wraps = i_w >= width
    i_w = tl.where(wraps, i_w - width, i_w)
    i_h += lines % rows + wraps.to(tl.int32)
    turns = i_h >= rows
    i_h = tl.where(turns, i_h - rows, i_h)
    return i_n + lines // rows + turns.to(tl.int32), i_h, i_w


@triton.jit
def pixel_offset(i_n, i_h, i_w, stride_n, stride_h, stride_w):
    """Offset in 64 bits of pixels with coordinates in 32 bits: an image may have more elements than 32 bits count."""
    return i_n.to(tl.int64) * stride_n + i_h.to(tl.int64) * stride_h + i_w.to(tl.int64) * stride_w


@triton.jit
def split_voxels(start, PIXELS: tl.constexpr, slices, rows, width, ALIGNED: tl.constexpr):
    """Sample, slice, row and column, as :func:`split_pixels`."""
    plane, i_h, i_w, own, lane = split_pixels(start, PIXELS, rows, width, ALIGNED)
    return plane // slices, plane % slices, i_h, i_w, own, lane


@triton.jit
def voxels_after(i_n, i_d, i_h, i_w, STEP, slices, rows, width):
    """Sample, slice, row and column of the voxels that follow others by STEP."""
    turns, i_h, i_w = pixels_after(i_h * 0, i_h, i_w, STEP % (rows * width), rows, width)
    planes = STEP // (rows * width)
    i_d += planes % slices + turns
    ends = i_d >= slices
    i_d = tl.where(ends, i_d - slices, i_d)
    return i_n + planes // slices + ends.to(tl.int32), i_d, i_h, i_w


@triton.jit
def voxel_offset(i_n, i_d, i_h, i_w, stride_n, stride_d, stride_h, stride_w):
    """Offset in 64 bits of voxels with coordinates in 32 bits."""
    return i_d.to(tl.int64) * stride_d + pixel_offset(i_n, i_h, i_w, stride_n, stride_h, stride_w)


@triton.jit
def next_digit(digit, base, carry=1):
    """The digit plus a carry, and the carry to the next digit: a loop counts taps and blocks without divisions."""
    digit += carry
    is_last = digit == base
    return tl.where(is_last, 0, digit), is_last.to(tl.int32)


@triton.jit
def first_tap(base, KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr):
    """The smallest tap t for which ``base - DILATION * t`` is a multiple of STRIDE; KERNEL if no tap is."""
    first = base * 0 + KERNEL
    for back in tl.static_range(KERNEL):
        remainder = (
            (base - DILATION * (KERNEL - 1 - back)) % STRIDE + STRIDE
        ) % STRIDE  # the sign of % differs between GPU and interpreter
        first = tl.where(remainder == 0, KERNEL - 1 - back, first)
    return first


@triton.jit
def unpool_gradient(p_dy, p_y, p_taps, o_dy, o_y, o_taps, channel, number, mask, RELU: tl.constexpr):
    """The gradient of a convolution's output before a 2 x 2 maximum pool, from the gradient dy of the maxima. Offsets are of the maxima."""
    dy = tl.load(p_dy + o_dy + channel, mask=mask, other=0.0)
    if RELU:
        dy = relu_gradient(dy, tl.load(p_y + o_y + channel, mask=mask, other=0.0))
    chosen = tl.load(p_taps + o_taps + channel // 4, mask=mask, other=0).to(tl.int32) >> (channel % 4 * 2) & 3
    return tl.where(chosen == number, dy, 0.0).to(dy.dtype)


@triton.jit
def gradient_block(
    p_dy, p_y, p_taps, i_n, i_h, i_w, own, i_o, mask,
    dy_n, dy_h, dy_w, y_n, y_h, y_w, taps_n, taps_h, taps_w, RELU: tl.constexpr, UNPOOL: tl.constexpr,
):  # fmt: skip
    """The gradient of the convolution's output at a block of pixels and channels, [P, O]."""
    if UNPOOL:
        number = i_h % 2 * 2 + (i_w + own) % 2
        own_q = own.to(tl.int64) // 2
        o_dy = pixel_offset(i_n, i_h // 2, i_w // 2, dy_n, dy_h, dy_w) + own_q * dy_w
        o_y = pixel_offset(i_n, i_h // 2, i_w // 2, y_n, y_h, y_w) + own_q * y_w
        o_taps = pixel_offset(i_n, i_h // 2, i_w // 2, taps_n, taps_h, taps_w) + own_q * taps_w
        return unpool_gradient(p_dy, p_y, p_taps, o_dy, o_y, o_taps, i_o[None, :], number, mask, RELU)
    else:
        o_dy, o_y = pixel_offset(i_n, i_h, i_w, dy_n, dy_h, dy_w), pixel_offset(i_n, i_h, i_w, y_n, y_h, y_w)
        own_dy, own_y = own.to(tl.int64) * dy_w + i_o[None, :], own.to(tl.int64) * y_w + i_o[None, :]
        return load_gradient(p_dy + o_dy, p_y + o_y, own_dy, own_y, mask, RELU)


@triton.jit
def store_sums(p_slots, sums, mask, ACCUMULATE: tl.constexpr):
    """Write sums to slots, or add them."""
    if ACCUMULATE:
        sums += tl.load(p_slots, mask=mask, other=0.0)
    tl.store(p_slots, sums, mask=mask)


def check_reach(x: Tensor, axes: Sequence[TileAxis]) -> None:
    """Refuse windows with taps too far apart: kernels count the offset between two taps of a window in 32 bits.

    Raises:
        UnsupportedError: the window reaches over ``2 ** 31`` elements or more.
    """
    reaches = (axis.window.dilation * (axis.window.kernel - 1) for axis in axes)
    reach = x.shape[1] + sum(reach * stride for reach, stride in zip(reaches, x.stride()[2:], strict=True))
    if reach >= 2**31:
        raise UnsupportedError(
            f"a convolution of {list(x.shape)} with windows over {reach:,} elements: kernels count up to {2**31 - 1:,}; "
            'use backend="aten" or a smaller dilation'
        )


def pixel_strides(tensor: Tensor) -> tuple[int, int, int]:
    """Strides along samples, rows and columns; the stride along channels is 1."""
    return tensor.stride(0), tensor.stride(2), tensor.stride(3)


def voxel_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides along samples, slices, rows and columns; the stride along channels is 1."""
    return tensor.stride(0), *tensor.stride()[2:]


def window_constants(axes: Sequence[TileAxis]) -> dict[str, int]:
    """Constants ``KERNEL_*``, ``STRIDE_*`` and ``DILATION_*`` of a kernel, for the last axes of d, h and w."""
    constants: dict[str, int] = {}
    for letter, axis in zip("DHW"[-len(axes) :], axes, strict=True):
        constants |= {f"KERNEL_{letter}": axis.window.kernel, f"STRIDE_{letter}": axis.window.stride}
        constants |= {f"DILATION_{letter}": axis.window.dilation}
    return constants
