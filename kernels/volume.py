"""Where a tile of a volume lies: the contract of ``geometry`` with one axis more. Strips run along the depth.

Buffers are ``[N, C, d, h, w]`` with stride 1 along the channels and any strides along the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from sft.kernels.geometry import TileAxis, Span, KernelWindow, check_axes_adjoint, check_axes_forward

__all__ = ["VolumeGeometry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeGeometry:
    """The three axes of a tile of a volume."""

    depth: TileAxis
    height: TileAxis
    width: TileAxis

    @classmethod
    def whole(cls, extents: tuple[int, int, int], depth: KernelWindow, height: KernelWindow, width: KernelWindow) -> VolumeGeometry:
        """The geometry without tiles: the whole volume in, all outputs of equal padding out.

        >>> window = KernelWindow(kernel=2, stride=2)
        >>> VolumeGeometry.whole((5, 8, 3), window, window, window).output_size
        (2, 4, 1)
        """
        axes = [
            TileAxis(input=Span.whole(extent), output=Span.whole(window.outputs(extent)), window=window)
            for extent, window in zip(extents, (depth, height, width), strict=True)
        ]
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

    def check_forward(self) -> None:
        """As ``Geometry.check_forward``."""
        check_axes_forward({"depth": self.depth, "height": self.height, "width": self.width})

    def check_adjoint(self) -> None:
        """As ``Geometry.check_adjoint``."""
        check_axes_adjoint({"depth": self.depth, "height": self.height, "width": self.width})
