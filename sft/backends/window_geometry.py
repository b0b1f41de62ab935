"""Conversion of ATen window arguments (stride, padding, dilation) to kernel geometry.

In a program an ATen call sees a buffer and a symmetric zero padding, whichever part of an image the buffer holds; the lowering has added
rows beyond a true border, or padded them. So to a kernel the buffer is an untiled image: a row read beyond it counts as zero (for a
maximum: not at all), as in the call that is replaced. Where the lowering has padded a copy of a buffer, the kernel can read the buffer
itself, with the copy's padding added to the window's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sft.backends.def_use import DefUse
from sft.kernels.geometry import Geometry, KernelWindow, Span, TileAxis, VolumeGeometry
from sft.lower.program import Slot

__all__ = ["PaddedBuffer", "WindowParameters", "find_padded_buffer", "geometry_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowParameters:
    """Kernel, stride, padding and dilation of each axis, as ATen takes them."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> WindowParameters:
        """Parameters from ATen's lists."""
        return cls(kernel=tuple(kernel), stride=tuple(stride), padding=tuple(padding), dilation=tuple(dilation))


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBuffer:
    """A buffer, and the rows of padding before it along each axis. After it the padding is as long as the outputs read."""

    slot: Slot
    before: tuple[int, ...]


def find_padded_buffer(def_use: DefUse, slot: Slot, at: int, value: float) -> PaddedBuffer:
    """The source of a slot that is a copy padded with ``value``; the slot itself if it is not such a copy, or if the source changes before
    position ``at``."""
    rank = len(slot.shape) - 2
    unpadded = PaddedBuffer(slot=slot, before=(0,) * rank)
    maker = def_use.maker(slot)
    if maker is None or maker.function is not torch.ops.aten.constant_pad_nd.default or maker.arguments[2] != value:
        return unpadded
    source, pads = maker.arguments[0], maker.arguments[1]
    if not isinstance(source, Slot) or len(pads) != 2 * rank or min(pads) < 0 or not all(source.shape):
        return unpadded
    if def_use.is_written_between(source, def_use.makers[slot.number], at):
        return unpadded
    return PaddedBuffer(slot=source, before=tuple(pads[2 * axis] for axis in reversed(range(rank))))


def geometry_of(windows: WindowParameters, size: Sequence[int], outputs: Sequence[int], before: Sequence[int] | None = None) -> Any:
    """The `Geometry` (or, of three axes, the `VolumeGeometry`) of a buffer and all its outputs.

    Args:
        windows: windows of the replaced call.
        size: extents of the buffer.
        outputs: extents of the output.
        before: rows of padding before the buffer, in addition to the window's own.
    """
    axes = [
        TileAxis(
            input=Span.whole(extent),
            output=Span.whole(length),
            window=KernelWindow(
                kernel=windows.kernel[axis],
                stride=windows.stride[axis],
                dilation=windows.dilation[axis],
                padding=windows.padding[axis] + (0 if before is None else before[axis]),
            ),
        )
        for axis, (extent, length) in enumerate(zip(size, outputs, strict=True))
    ]
    if len(axes) == 2:
        return Geometry(height=axes[0], width=axes[1])
    return VolumeGeometry(depth=axes[0], height=axes[1], width=axes[2])
