"""Tile geometry: the offsets, extents and strides that callers pass to the kernels.

A kernel gets buffers, never an image. Some rows of a buffer are *data*, rows of the image: carried rows of the previous strip, new rows, a
halo. Rows beyond the image's border are *padding*. A geometry tells which is which in the global coordinates of the layer, axis by axis:

    Span            rows [start, start + size) in a buffer, of a signal with rows [0, extent)
    KernelWindow    output row o reads the input rows o * stride - padding + dilation * t, for t in [0, kernel)
    TileAxis        an input span, an output span, and the window between them
    Geometry        two axes: height and width
    VolumeGeometry  three axes: depth, height and width; strips run along the depth

Every kernel keeps three rules:

1. A row of a buffer outside [0, extent) is not data. It is never read, so it may be NaN. Where a window reads such a row,
   the row counts as zero (average, convolution) or is left out (maximum).
2. A row inside [0, extent) that a result needs must be in the buffer. Rows outside the buffer are read as padding, so the caller provides
   the halo.
3. A result depends on global coordinates alone. In a fixed precision the tiles of an image have the bits of the untiled result.

The extent of the output is an argument of its own. It implies the padding after the last row, which may differ from the padding before the
first, as in TensorFlow's "same" or in a pool in ceil mode.

Buffers are channels-last: shape ``[N, C, h, w]`` or ``[N, C, d, h, w]`` with stride 1 along the channels and any strides along the other
dimensions. So a view of some rows is a buffer too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sft.common.errors import InputError

__all__ = ["Geometry", "KernelWindow", "Span", "TileAxis", "VolumeGeometry", "is_channels_last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The rows (or columns) ``[start, start + size)`` of a signal that has the rows ``[0, extent)``.

    >>> Span(start=-1, size=4, extent=2).data
    (1, 3)
    """

    #: global coordinate of the first row; negative if the buffer begins before the image
    start: int
    #: number of rows in the buffer
    size: int
    #: number of rows of the untiled image at this layer
    extent: int

    def __post_init__(self) -> None:
        if self.size < 0 or self.extent < 0:
            raise InputError(f"a span needs a size and an extent of at least 0, got {self}; give the rows that the buffer has")

    @property
    def stop(self) -> int:
        """Global coordinate after the last row."""
        return self.start + self.size

    @property
    def data(self) -> tuple[int, int]:
        """Rows of the image, as a half-open range of the buffer's own coordinates; (0, 0) if the buffer has none."""
        low, high = max(0, -self.start), min(self.size, self.extent - self.start)
        return (low, high) if low < high else (0, 0)

    @classmethod
    def whole(cls, extent: int) -> Span:
        """All rows of the image."""
        return cls(start=0, size=extent, extent=extent)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWindow:
    """Window of one axis: output row ``o`` reads the input rows ``o * stride - padding + dilation * t``, for t in [0, kernel).

    >>> window = KernelWindow(kernel=3, stride=2, padding=1)
    >>> window.reads(0, 4), window.outputs(7), window.writes(0, 3)
    ((-1, 8), 4, (0, 2))
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    #: rows of padding before the first row of the image
    padding: int = 0

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.stride < 1 or self.dilation < 1 or self.padding < 0:
            raise InputError(f"a window needs a kernel, stride and dilation of at least 1 and no negative padding, got {self}")

    @property
    def reach(self) -> int:
        """Number of rows from the first to the last row that an output reads, both included."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, extent: int) -> int:
        """Number of outputs of an image of ``extent`` rows with equal padding on both sides."""
        return max(0, (extent + 2 * self.padding - self.reach) // self.stride + 1)

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """The range of input rows that the output rows ``[start, stop)`` read, padding included."""
        first = start * self.stride - self.padding
        return (first, (stop - 1) * self.stride - self.padding + self.reach) if stop > start else (first, first)

    def writes(self, start: int, stop: int) -> tuple[int, int]:
        """The range of output rows that read any of the input rows ``[start, stop)``, outputs of padding alone included."""
        first = -(-(start + self.padding - self.reach + 1) // self.stride)
        return (first, (stop - 1 + self.padding) // self.stride + 1) if stop > start else (first, first)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileAxis:
    """One axis of a tile: the input rows in one buffer, the output rows in another, and the window between them.

    >>> window = KernelWindow(kernel=3, padding=1)
    >>> TileAxis(input=Span(start=6, size=6, extent=20), output=Span(start=7, size=4, extent=20), window=window).shift
    0
    """

    input: Span
    output: Span
    window: KernelWindow

    @property
    def shift(self) -> int:
        """Input row, in buffer coordinates, that output row 0 of the buffer reads first; row o reads from ``o * stride + shift`` on."""
        return self.output.start * self.window.stride - self.window.padding - self.input.start


def _untiled_axes(extents: tuple[int, ...], windows: tuple[KernelWindow, ...]) -> list[TileAxis]:
    """Axes of an untiled layer with equal padding on both sides."""
    return [
        TileAxis(input=Span.whole(extent), output=Span.whole(window.outputs(extent)), window=window)
        for extent, window in zip(extents, windows, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Geometry of a tile of an image."""

    height: TileAxis
    width: TileAxis

    @classmethod
    def whole(cls, extents: tuple[int, int], height: KernelWindow, width: KernelWindow) -> Geometry:
        """Geometry of the untiled image: ``extents`` (height, width) in, all outputs of equal padding out.

        >>> Geometry.whole((5, 8), KernelWindow(kernel=2, stride=2), KernelWindow(kernel=2, stride=2)).output_size
        (2, 4)
        """
        axes = _untiled_axes(extents, (height, width))
        return cls(height=axes[0], width=axes[1])

    @property
    def axes(self) -> tuple[TileAxis, TileAxis]:
        """Height and width."""
        return self.height, self.width

    @property
    def input_size(self) -> tuple[int, int]:
        """Rows and columns of the input buffer."""
        return self.height.input.size, self.width.input.size

    @property
    def output_size(self) -> tuple[int, int]:
        """Rows and columns of the output buffer."""
        return self.height.output.size, self.width.output.size

    @property
    def kernel(self) -> tuple[int, int]:
        """Rows and columns of the window."""
        return self.height.window.kernel, self.width.window.kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeGeometry:
    """Geometry of a tile of a volume."""

    depth: TileAxis
    height: TileAxis
    width: TileAxis

    @classmethod
    def whole(cls, extents: tuple[int, int, int], depth: KernelWindow, height: KernelWindow, width: KernelWindow) -> VolumeGeometry:
        """Geometry of the untiled volume: ``extents`` (depth, height, width) in, all outputs of equal padding out.

        >>> window = KernelWindow(kernel=2, stride=2)
        >>> VolumeGeometry.whole((5, 8, 3), window, window, window).output_size
        (2, 4, 1)
        """
        axes = _untiled_axes(extents, (depth, height, width))
        return cls(depth=axes[0], height=axes[1], width=axes[2])

    @property
    def axes(self) -> tuple[TileAxis, TileAxis, TileAxis]:
        """Depth, height and width."""
        return self.depth, self.height, self.width

    @property
    def input_size(self) -> tuple[int, int, int]:
        """Slices, rows and columns of the input buffer."""
        return self.depth.input.size, self.height.input.size, self.width.input.size

    @property
    def output_size(self) -> tuple[int, int, int]:
        """Slices, rows and columns of the output buffer."""
        return self.depth.output.size, self.height.output.size, self.width.output.size

    @property
    def kernel(self) -> tuple[int, int, int]:
        """Slices, rows and columns of the window."""
        return self.depth.window.kernel, self.height.window.kernel, self.width.window.kernel


def is_channels_last(tensor: Tensor) -> bool:
    """True if neighbouring channels are neighbours in memory."""
    return tensor.dim() in (4, 5) and (tensor.stride(1) == 1 or tensor.shape[1] == 1)
