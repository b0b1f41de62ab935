"""What kind of operation a kernel would do, and who decides whether it does.

A `ShapeClass` is what a measured time speaks of: the operation with what is fused into it, its channels and windows, its numbers' type,
and about how many pixels it has. Two strips of one layer at almost the same height are of one class. `KernelSelector` is asked for each
class that a program has a kernel for; :mod:`sft.backends.autotune.table` answers from measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from sft.kernels.common import LaunchVariant, is_flat

__all__ = ["AlwaysKernel", "KernelSelector", "NumberFormat", "ShapeClass", "launch_variants", "pixel_class", "storage_format"]

#: How numbers are stored and multiplied: fp32 exactly, or rounded to ten bits as PyTorch does where it is allowed to.
NumberFormat = Literal["float32", "tf32", "bfloat16", "float16"]


def pixel_class(num_pixels: int) -> int:
    """About how many pixels: the nearest power of four.

    >>> [pixel_class(n) for n in (1, 3, 1000, 2048 * 2048)]
    [1, 4, 1024, 4194304]
    """
    return int(4 ** round(math.log(max(1, num_pixels), 4)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeClass:
    """A class of operations that one measurement stands for.

    Attributes:
        operator: what is done, such as ``"conv2d"`` or ``"conv2d weight gradient"``.
        fused: what is done in the same call: ``"bias"``, ``"residual"``, ``"relu"``, ``"pool"``.
        numbers: type of the elements.
        channels: of the input and of the output.
        kernel, stride, dilation: of the window, for each axis; empty where there is none.
        groups: of channels.
        pixels: of the output, about: a power of four.
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

    def of_pixels(self, pixels: int) -> ShapeClass:
        """The class of another number of pixels."""
        return replace(self, pixels=pixels)

    @property
    def label(self) -> str:
        """One line for people.

        >>> ShapeClass(operator="conv2d", fused=("bias", "relu"), numbers="bfloat16", channels=(64, 64), kernel=(3, 3), pixels=4**11).label
        'conv2d + bias + relu, bfloat16, 64 -> 64 channels, 3x3, about 4194304 pixels'
        """
        parts = [" + ".join((self.operator, *self.fused)), self.numbers, f"{self.channels[0]} -> {self.channels[1]} channels"]
        parts += ["x".join(map(str, self.kernel))] if self.kernel else []
        parts += [f"stride {'x'.join(map(str, self.stride))}"] if any(step != 1 for step in self.stride) else []
        parts += [f"dilation {'x'.join(map(str, self.dilation))}"] if any(step != 1 for step in self.dilation) else []
        parts += [f"{self.groups} groups"] if self.groups != 1 else []
        return ", ".join((*parts, f"about {self.pixels} pixels"))


def launch_variants(shape_class: ShapeClass) -> tuple[LaunchVariant, ...]:
    """In which ways the kernels of a class may be split into programs, the default first: those that compile without spills, or with few
    (``tests/table_registers.json`` has the bytes).

    All round alike, and have the same bits but for gradients of an input that are found row by row.
    """
    if not shape_class.operator.startswith("conv2d") or shape_class.groups == math.prod(shape_class.channels) ** 0.5 > 1:
        return ("default",)
    is_half = shape_class.numbers in ("bfloat16", "float16")
    ways: tuple[LaunchVariant, ...] = ("default", "deep")
    if shape_class.operator != "conv2d weight gradient":
        is_masked = shape_class.operator != "conv2d" and "relu" in shape_class.fused
        ways += ("small",) if is_half else ("tall", "wide") if shape_class.numbers == "tf32" and not is_masked else ()
        if shape_class.operator == "conv2d" and is_flat(shape_class.channels[0] // shape_class.groups):
            ways = tuple(way for way in ways if way != "tall")
        plain = (shape_class.kernel, shape_class.stride, shape_class.dilation, shape_class.groups) == ((3, 3), (1, 1), (1, 1), 1)
        summed = shape_class.channels[0 if shape_class.operator == "conv2d" else 1]
        if plain and 16 <= summed <= 64 and is_half:
            ways += ("rows",)
    return ways


class KernelSelector(Protocol):
    """Says where a kernel runs."""

    def selects_kernel(self, wanted: ShapeClass) -> bool:
        """Whether the kernel is to run; ATen's operators do otherwise."""

    def launch_variant_of(self, wanted: ShapeClass) -> LaunchVariant:
        """How a kernel that runs is split into programs; one of :func:`launch_variants`."""

    def number_format_of(self, dtype: torch.dtype) -> NumberFormat | None:
        """How elements of this type are multiplied; None where kernels have no such type."""


_NUMBER_FORMATS: dict[torch.dtype, NumberFormat] = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def storage_format(dtype: torch.dtype, *, allows_tf32: bool) -> NumberFormat | None:
    """How elements of a type are multiplied; None where kernels have no such type."""
    return "tf32" if allows_tf32 and dtype == torch.float32 else _NUMBER_FORMATS.get(dtype)


@dataclass(frozen=True, slots=True)
class AlwaysKernel:
    """Takes every kernel that computes the same; products of fp32 numbers exactly, since rounded ones differ from ATen's rounded ones."""

    def selects_kernel(self, wanted: ShapeClass) -> bool:
        """Always."""
        return True

    def launch_variant_of(self, wanted: ShapeClass) -> LaunchVariant:
        """The default."""
        return "default"

    def number_format_of(self, dtype: torch.dtype) -> NumberFormat | None:
        """As the elements are."""
        return storage_format(dtype, allows_tf32=False)
