"""The geometry of ATen's windows, as kernels take it.

What ATen is given in a program is a buffer and a symmetric padding of zeros, whatever part of an image that is; rows beyond a true border
were put there, or were padded, by the lowering. So to a kernel the buffer is an image of its own, and its place in the real one does not
matter: a row that is read beyond it is a zero (of a maximum, nothing), as in the call that is replaced. Where the lowering has padded a
copy of the buffer, the kernel can take the buffer itself: what was padded joins the window's own padding.
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
        """From ATen's lists."""
        return cls(kernel=tuple(kernel), stride=tuple(stride), padding=tuple(padding), dilation=tuple(dilation))


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBuffer:
    """A buffer, and the rows that the program puts in front of each of its axes (and behind, as many as the outputs read)."""

    slot: Slot
    before: tuple[int, ...]


def find_padded_buffer(listing: DefUse, slot: Slot, at: int, value: float) -> PaddedBuffer:
    """The buffer behind a copy that was padded with ``value``; the slot itself where it is none, or the buffer changes before ``at``."""
    rank = len(slot.shape) - 2
    whole = PaddedBuffer(slot=slot, before=(0,) * rank)
    maker = listing.maker(slot)
    if maker is None or maker.function is not torch.ops.aten.constant_pad_nd.default or maker.arguments[2] != value:
        return whole
    source, flat = maker.arguments[0], maker.arguments[1]
    if not isinstance(source, Slot) or len(flat) != 2 * rank or min(flat) < 0 or not all(source.shape):
        return whole
    if listing.is_written_between(source, listing.makers[slot.number], at):
        return whole
    return PaddedBuffer(slot=source, before=tuple(flat[2 * axis] for axis in reversed(range(rank))))


def geometry_of(windows: WindowParameters, size: Sequence[int], outputs: Sequence[int], before: Sequence[int] | None = None) -> Any:
    """A `Geometry` (or, of three axes, a `VolumeGeometry`) of a buffer of ``size`` and of all its outputs.

    Args:
        windows: of the call that is replaced.
        size: extents of the buffer.
        outputs: extents of the output.
        before: rows of padding in front of the buffer, besides the window's own.
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
