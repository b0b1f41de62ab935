"""Where a tile lies: the one contract between every kernel on images and whoever calls it.

A kernel is given buffers, and never an image. It must know which of a buffer's rows are the image's: rows that a strip
carries from the strip before, its new rows, a halo that a neighbour computed as well are *data*, and only what lies beyond
the image's true border is *padding*. So everything is said in the global coordinates of the layer, one axis at a time:

    Span    the rows [start, start + size) that a buffer holds, of a signal whose rows are [0, extent)
    Window  output row o reads the input rows o * stride - padding + dilation * t, for t in [0, kernel)
    Axis    an input span, an output span, and the window between them
    Geometry  two axes: height and width

Three rules follow, and every kernel keeps them:

1. A row of a buffer outside [0, extent) is not data. It is never read, whatever it holds, NaN included; a row that a window
   reads there counts as zero (average, convolution) or as nothing (maximum).
2. A row inside [0, extent) that a result needs must be in the buffer. ``check_forward`` and ``check_adjoint`` say so before
   anything is launched: a missing halo is an error and never a zero.
3. A result depends on global coordinates alone, so tiles put together have the bits of the whole (in a fixed precision).

The output's extent is given and not derived: it says the padding behind the last row, also where that differs from the
padding before the first, as in TensorFlow's "same" or a pool in ceil mode.

Buffers are channels-last: shape ``[N, C, h, w]`` with stride 1 along the channels, and any strides along the others, so that
a view of some rows is a buffer too.

Where a tile of a volume lies: the contract of ``geometry`` with one axis more. Strips run along the depth.

Buffers are ``[N, C, d, h, w]`` with stride 1 along the channels and any strides along the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sft.common.errors import InputError

__all__ = [
    "Geometry",
    "KernelWindow",
    "Span",
    "TileAxis",
    "VolumeGeometry",
    "check_axes_adjoint",
    "check_axes_forward",
    "check_buffer",
    "is_channels_last",
]

__all__ += ["raise_problems"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The rows (or columns) ``[start, start + size)`` of a signal that has the rows ``[0, extent)``.

    >>> Span(start=-1, size=4, extent=2).data
    (1, 3)
    """

    #: global coordinate of the first row; negative if the buffer begins before the image
    start: int
    #: how many rows there are
    size: int
    #: how many rows the whole image has at this layer
    extent: int

    def __post_init__(self) -> None:
        if self.size < 0 or self.extent < 0:
            raise InputError(f"a span needs a size and an extent of at least 0, got {self}; give the rows that the buffer has")

    @property
    def stop(self) -> int:
        """Global coordinate behind the last row."""
        return self.start + self.size

    @property
    def data(self) -> tuple[int, int]:
        """The rows that are the image's, as a half-open range of the buffer's own coordinates; (0, 0) if there are none."""
        low, high = max(0, -self.start), min(self.size, self.extent - self.start)
        return (low, high) if low < high else (0, 0)

    @classmethod
    def whole(cls, extent: int) -> Span:
        """All rows of the image."""
        return cls(start=0, size=extent, extent=extent)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWindow:
    """What an output row reads along one axis.

    >>> window = KernelWindow(kernel=3, stride=2, padding=1)
    >>> window.reads(0, 4), window.outputs(7), window.writes(0, 3)
    ((-1, 8), 4, (0, 2))
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    #: rows of padding before the first
    padding: int = 0

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.stride < 1 or self.dilation < 1 or self.padding < 0:
            raise InputError(f"a window needs a kernel, stride and dilation of at least 1 and no negative padding, got {self}")

    @property
    def reach(self) -> int:
        """Rows from the first that an output reads to the last, both counted."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, extent: int) -> int:
        """How many outputs an image of ``extent`` rows has if it is padded equally on both sides."""
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

    >>> axis = TileAxis(input=Span(start=6, size=6, extent=20), output=Span(start=7, size=4, extent=20), window=KernelWindow(kernel=3,
    padding=1))
    >>> axis.missing_input(), axis.missing_output(), axis.shift
    (None, (5, 13), 0)
    """

    input: Span
    output: Span
    window: KernelWindow

    @property
    def shift(self) -> int:
        """Input row, in the buffer's coordinates, that the buffer's output row 0 reads first: row o reads ``o * stride + shift``."""
        return self.output.start * self.window.stride - self.window.padding - self.input.start

    def missing_input(self) -> tuple[int, int] | None:
        """Input rows, in global coordinates, that the output needs and the input buffer lacks; None if it has all."""
        return _missing(self.input, *self.window.reads(*_rows_inside(self.output)))

    def missing_output(self) -> tuple[int, int] | None:
        """Output rows whose gradients the input's gradient needs and the output buffer lacks; None if it has all."""
        return _missing(self.output, *self.window.writes(*_rows_inside(self.input)))


def _rows_inside(span: Span) -> tuple[int, int]:
    """The span's rows of the image, in global coordinates."""
    low, high = span.data
    return span.start + low, span.start + high


def _missing(span: Span, first: int, last: int) -> tuple[int, int] | None:
    first, last = max(first, 0), min(last, span.extent)
    if first >= last or (span.start <= first and last <= span.stop):
        return None
    return first, last


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Both axes of a tile. See the module's docstring."""

    height: TileAxis
    width: TileAxis

    @classmethod
    def whole(cls, extents: tuple[int, int], height: KernelWindow, width: KernelWindow) -> Geometry:
        """The geometry without tiles: the whole image ``extents`` (height, width) in, all outputs of equal padding out.

        >>> Geometry.whole((5, 8), KernelWindow(kernel=2, stride=2), KernelWindow(kernel=2, stride=2)).output_size
        (2, 4)
        """
        axes = [
            TileAxis(input=Span.whole(extent), output=Span.whole(window.outputs(extent)), window=window)
            for extent, window in zip(extents, (height, width), strict=True)
        ]
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

    def check_forward(self) -> None:
        """Raise if the outputs are not outputs of the image, or read rows of the image that are not in the input buffer.

        Raises:
            InputError: with the rows that are there and the rows that are needed.
        """
        check_axes_forward({"height": self.height, "width": self.width})

    def check_adjoint(self) -> None:
        """Raise if the input's gradient needs gradients of outputs that are not in the output buffer.

        A kernel that is meant to give one tile's share of a gradient, to be added to the shares of other tiles, leaves
        this check out: outputs beyond the buffer then count as zero.

        Raises:
            InputError: with the rows that are there and the rows that are needed.
        """
        check_axes_adjoint({"height": self.height, "width": self.width})


def check_axes_forward(axes: dict[str, TileAxis]) -> None:
    """``Geometry.check_forward`` of these axes."""
    problems = []
    for name, axis in axes.items():
        output, missing = axis.output, axis.missing_input()
        if output.start < 0 or output.stop > output.extent:
            problems.append(f"{name}: outputs [{output.start}, {output.stop}) are not all in [0, {output.extent}); ask for those only")
        elif missing is not None:
            held = f"[{axis.input.start}, {axis.input.stop})"
            problems.append(f"{name}: the outputs read input {_range(missing)}, the buffer holds {held}; give it the halo as well")
    raise_problems("this tile cannot be computed", problems)


def check_axes_adjoint(axes: dict[str, TileAxis]) -> None:
    """``Geometry.check_adjoint`` of these axes."""
    problems = []
    for name, axis in axes.items():
        if (missing := axis.missing_output()) is not None:
            held = f"[{axis.output.start}, {axis.output.stop})"
            problems.append(f"{name}: the gradient reads outputs {_range(missing)}, the buffer holds {held}; give it the halo as well")
    raise_problems("this tile cannot be computed", problems)


def raise_problems(what: str, problems: list[str]) -> None:
    """Raise all problems at once, if there are any."""
    if problems:
        raise InputError(f"{what}:\n" + "\n".join(f"  - {line}" for line in problems))


def _range(rows: tuple[int, int]) -> str:
    return f"[{rows[0]}, {rows[1]})"


def is_channels_last(tensor: Tensor) -> bool:
    """Whether neighbouring channels are neighbours in memory."""
    return tensor.dim() in (4, 5) and (tensor.stride(1) == 1 or tensor.shape[1] == 1)


def check_buffer(name: str, tensor: Tensor, num_samples: int, num_channels: int, size: tuple[int, ...], problems: list[str]) -> None:
    """Add to ``problems`` what keeps ``tensor`` from being the channels-last buffer ``[num_samples, num_channels, *size]``."""
    shape = (num_samples, num_channels, *size)
    if tuple(tensor.shape) != shape:
        problems.append(f"{name} has shape {tuple(tensor.shape)}, the geometry says {shape}; give the buffer that the spans describe")
    elif not is_channels_last(tensor):
        layout = "channels_last" if len(size) == 2 else "channels_last_3d"
        problems.append(f"{name} has strides {tensor.stride()}; make it channels-last: .contiguous(memory_format=torch.{layout})")


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
