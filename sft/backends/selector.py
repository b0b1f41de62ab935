"""Kernel selection: classes of operations, and the protocol that chooses between a kernel and ATen for each class.

A `ShapeClass` is the unit of measurement: an operation with the operations fused into it, its channels and windows, its number format, and
the approximate number of pixels. Two strips of one layer with nearly the same height are of one class. A `KernelSelector` decides for each
class that has a kernel; :mod:`sft.backends.autotune.table` decides by measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from sft.kernels.common import LaunchVariant, has_few_channels

__all__ = [
    "AlwaysKernel",
    "KernelSelector",
    "NoKernels",
    "NumberFormat",
    "ShapeClass",
    "launch_variants",
    "multiplies",
    "pixel_class",
    "storage_format",
]

#: Format of stored and multiplied numbers. ``tf32`` is fp32 whose products round operands to ten bits, as PyTorch does where allowed.
NumberFormat = Literal["float32", "tf32", "bfloat16", "float16"]


def pixel_class(num_pixels: int) -> int:
    """The power of four nearest to a number of pixels.

    >>> [pixel_class(n) for n in (1, 3, 1000, 2048 * 2048)]
    [1, 4, 1024, 4194304]
    """
    return int(4 ** round(math.log(max(1, num_pixels), 4)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeClass:
    """Class of operations that share one measurement.

    Attributes:
        operator: name of the operation, such as ``"conv2d"`` or ``"conv2d weight gradient"``.
        fused: operations in the same call: ``"bias"``, ``"residual"``, ``"relu"``, ``"pool"``.
        numbers: number format.
        channels: channels of the input and of the output.
        kernel, stride, dilation: the window, axis by axis; empty for an operation without windows.
        groups: number of channel groups.
        pixels: approximate number of output pixels, a power of four.
    """

    operator: str
    fused: tuple[str, ...] = ()
    numbers: NumberFormat
    channels: tuple[int, int]
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    pixels: int

    def at_any_size(self) -> ShapeClass:
        """The class without its number of pixels, which is 0."""
        return replace(self, pixels=0)

    @property
    def label(self) -> str:
        """Description in one line.

        >>> ShapeClass(operator="conv2d", fused=("bias", "relu"), numbers="bfloat16", channels=(64, 64), kernel=(3, 3), pixels=4**11).label
        'conv2d + bias + relu, bfloat16, 64 -> 64 channels, 3x3, about 4194304 pixels'
        """
        words = [" + ".join((self.operator, *self.fused)), self.numbers, f"{self.channels[0]} -> {self.channels[1]} channels"]
        words += ["x".join(map(str, self.kernel))] if self.kernel else []
        words += [f"stride {'x'.join(map(str, self.stride))}"] if any(step != 1 for step in self.stride) else []
        words += [f"dilation {'x'.join(map(str, self.dilation))}"] if any(step != 1 for step in self.dilation) else []
        words += [f"{self.groups} groups"] if self.groups != 1 else []
        return ", ".join((*words, f"about {self.pixels} pixels"))


def multiplies(operator: str) -> bool:
    """True for an operation that multiplies matrices: a convolution or one of its gradients. TF32 changes no other one."""
    return operator.startswith("conv")


def launch_variants(shape_class: ShapeClass) -> tuple[LaunchVariant, ...]:
    """Launch variants of the kernels of a class, the default first: those that compile without spills, or with few
    (``tests/kernels/table_registers.json`` has the bytes).

    All variants round alike. They have the same bits, except for gradients of an input that are computed row by row.
    """
    if not shape_class.operator.startswith("conv2d") or shape_class.groups == math.prod(shape_class.channels) ** 0.5 > 1:
        return ("default",)
    if shape_class.operator != "conv2d data gradient" and has_few_channels(shape_class.channels[0] // shape_class.groups):
        return ("default",)
    is_half = shape_class.numbers in ("bfloat16", "float16")
    variants: tuple[LaunchVariant, ...] = ("default", "deep")
    if shape_class.operator != "conv2d weight gradient":
        is_masked = shape_class.operator != "conv2d" and "relu" in shape_class.fused
        variants += ("small",) if is_half else ("tall", "wide") if shape_class.numbers == "tf32" and not is_masked else ()
        is_plain = (shape_class.kernel, shape_class.stride, shape_class.dilation, shape_class.groups) == ((3, 3), (1, 1), (1, 1), 1)
        num_inner = shape_class.channels[0 if shape_class.operator == "conv2d" else 1]
        if is_plain and 16 <= num_inner <= 64 and is_half:
            variants += ("rows",)
    return variants


class KernelSelector(Protocol):
    """Chooses between kernels and ATen's operators."""

    def selects_kernel(self, shape_class: ShapeClass) -> bool:
        """True to run the kernel of a class, false to run ATen's operators."""

    def launch_variant_of(self, shape_class: ShapeClass) -> LaunchVariant:
        """Launch variant of a selected kernel, one of :func:`launch_variants`."""

    def number_format_of(self, dtype: torch.dtype, *, multiplies: bool = False) -> NumberFormat | None:
        """Number format of elements of a dtype; None for a dtype without kernels.

        Args:
            dtype: the dtype.
            multiplies: true for products of matrices, such as convolutions, which may round operands of fp32.
        """


_NUMBER_FORMATS: dict[torch.dtype, NumberFormat] = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def storage_format(dtype: torch.dtype, *, allows_tf32: bool) -> NumberFormat | None:
    """Number format of elements of a dtype; None for a dtype without kernels."""
    return "tf32" if allows_tf32 and dtype == torch.float32 else _NUMBER_FORMATS.get(dtype)


@dataclass(frozen=True, slots=True)
class AlwaysKernel:
    """Selects every kernel.

    Attributes:
        allows_tf32: true if products of fp32 numbers may round operands to ten bits, as ATen's do where PyTorch's switches allow it.
    """

    allows_tf32: bool = False

    def selects_kernel(self, shape_class: ShapeClass) -> bool:
        """True for every class."""
        return True

    def launch_variant_of(self, shape_class: ShapeClass) -> LaunchVariant:
        """The default variant."""
        return "default"

    def number_format_of(self, dtype: torch.dtype, *, multiplies: bool = False) -> NumberFormat | None:
        """The format that elements are stored in, or ``tf32``."""
        return storage_format(dtype, allows_tf32=self.allows_tf32 and multiplies)


@dataclass(frozen=True, slots=True)
class NoKernels:
    """Selects no kernel."""

    def selects_kernel(self, shape_class: ShapeClass) -> bool:
        """False for every class."""
        return False

    def launch_variant_of(self, shape_class: ShapeClass) -> LaunchVariant:
        """The default variant."""
        return "default"

    def number_format_of(self, dtype: torch.dtype, *, multiplies: bool = False) -> NumberFormat | None:
        """No format: no dtype has kernels."""
        return None
