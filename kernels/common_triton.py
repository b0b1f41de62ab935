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

from sft.kernels.geometry import TileAxis

__all__ = [
    "assembler_version",
    "can_compute_operands",
    "dense_gradient",
    "first_tap",
    "is_inside",
    "matmul",
    "pixel_strides",
    "relu",
    "relu_gradient",
    "safe_precision",
    "unpool_gradient",
    "voxel_strides",
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
