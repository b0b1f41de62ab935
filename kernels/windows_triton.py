"""What the kernels with windows have in common in Triton: strides, windows as constants, taps, and pooled outputs.

Affixes as in ``conv2d_triton``.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.blocks_triton import relu_gradient
from sft.kernels.geometry import TileAxis

__all__ = ["first_tap", "is_inside", "pixel_strides", "unpool_gradient", "voxel_strides", "window_constants"]


@triton.jit
def is_inside(at, low, high):
    """Where coordinates are data."""
    return (at >= low) & (at < high)


@triton.jit
def first_tap(base, KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr):
    """The least tap t for which ``base - DILATION * t`` is a multiple of STRIDE; KERNEL if there is none."""
    first = base * 0 + KERNEL
    for back in tl.static_range(KERNEL):
        rest = ((base - DILATION * (KERNEL - 1 - back)) % STRIDE + STRIDE) % STRIDE  # the sign of % differs between GPU and interpreter
        first = tl.where(rest == 0, KERNEL - 1 - back, first)
    return first


@triton.jit
def unpool_gradient(p_dy, p_y, p_taps, o_dy, o_y, o_taps, channel, number, mask, RELU: tl.constexpr):
    """The gradient of the output of a convolution whose maxima of 2 x 2 have the gradient dy: offsets are of the maxima's pixels."""
    dy = tl.load(p_dy + o_dy + channel, mask=mask, other=0.0)
    if RELU:
        dy = relu_gradient(dy, tl.load(p_y + o_y + channel, mask=mask, other=0.0))
    chosen = tl.load(p_taps + o_taps + channel // 4, mask=mask, other=0).to(tl.int32) >> (channel % 4 * 2) & 3
    return tl.where(chosen == number, dy, 0.0).to(dy.dtype)


def pixel_strides(tensor: Tensor) -> tuple[int, int, int]:
    """Strides along samples, rows and columns; the one along channels is 1."""
    return tensor.stride(0), tensor.stride(2), tensor.stride(3)


def voxel_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides along samples, slices, rows and columns; the one along channels is 1."""
    return tensor.stride(0), *tensor.stride()[2:]


def window_constants(axes: Sequence[TileAxis]) -> dict[str, int]:
    """The windows along some of the axes, the last ones of d, h and w, as a kernel's constants."""
    constants: dict[str, int] = {}
    for letter, axis in zip("DHW"[-len(axes) :], axes, strict=True):
        constants |= {f"KERNEL_{letter}": axis.window.kernel, f"STRIDE_{letter}": axis.window.stride}
        constants |= {f"DILATION_{letter}": axis.window.dilation}
    return constants
