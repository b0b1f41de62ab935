"""Which rows an interpolation reads, and with which weights: a banded matrix, told in global coordinates.

Row o of the result is the sum over ``0 <= k < count[o]`` of ``weights[o, k] * x[first[o] + k]``. The rows come from the sizes of the
whole image and a row's own number, so a tile reads what the whole would: interpolating a strip as if it were an image would
put its rows elsewhere. What has no weight is not read.

The gradient is the transposed matrix, a band again since interpolation is monotone: a gather, so nothing is added atomically.

Nearest rows follow ATen's own arithmetic (``UpSample.h``: a ratio of the image's precision, a product that is rounded to single
precision before it is rounded down), since another rounding is another row. Linear weights are found in fp64: in single
precision a place near row 100,000 is off by a hundredth of a row.

Resizing of a tile, nearest or linear, to any size: strips and panels by global tables. Both directions gather.

A tile is said by two ``ResizeAxis``: which rows of the whole input and of the whole output the buffers hold, and the rule between
them. The gradient is that of the mathematical function; ATen's own for ``nearest`` sometimes finds other rows than its forward.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sft.common.errors import InputError
from sft.kernels.common import empty_channels_last, uses_triton
from sft.kernels.geometry import Span, check_buffer, raise_problems
from sft.kernels.resize.resize_reference import BandTable, reference_resize

__all__ = ["BandedWeights", "Interpolation", "ResizeAxis", "band_table", "resize2d", "resize2d_gradient"]

Interpolation = Literal["nearest", "nearest-exact", "linear"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BandedWeights:
    """A banded matrix. ``first`` and ``count`` are int64 ``[rows]``, ``weights`` fp64 ``[rows, most]``."""

    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float64]

    @classmethod
    def of_entries(cls, num_rows: int, rows: npt.NDArray[Any], columns: npt.NDArray[Any], values: npt.NDArray[Any]) -> BandedWeights:
        """The band of entries that lie close together in each row; those of one place are added up."""
        rows, columns, values = rows[values != 0], columns[values != 0], values[values != 0]
        first, last = np.full(num_rows, np.iinfo(np.int64).max), np.full(num_rows, -1)
        np.minimum.at(first, rows, columns)
        np.maximum.at(last, rows, columns)
        empty = last < 0
        first = np.where(empty, 0, first)
        count = np.where(empty, 0, last - first + 1)
        weights = np.zeros((num_rows, max(1, int(count.max(initial=0)))))
        np.add.at(weights, (rows, columns - first[rows]), values)
        return cls(first=first, count=count, weights=weights)

    def transposed(self, num_columns: int) -> BandedWeights:
        """The band of the transposed matrix, of a matrix that has ``num_columns``."""
        rows, places = np.nonzero(np.arange(self.weights.shape[1]) < self.count[:, None])
        return BandedWeights.of_entries(num_columns, self.first[rows] + places, rows, self.weights[rows, places])

    def rows(self, span: Span) -> BandedWeights:
        """The rows of a span; those beyond its extent are empty."""
        low, high = span.data
        size = (span.size, self.weights.shape[1])
        band = BandedWeights(first=np.zeros(span.size, np.int64), count=np.zeros(span.size, np.int64), weights=np.zeros(size))
        held = slice(span.start + low, span.start + high)
        band.first[low:high], band.count[low:high], band.weights[low:high] = self.first[held], self.count[held], self.weights[held]
        return band

    def reads(self) -> tuple[int, int]:
        """The columns that any row reads, as a half-open range."""
        used = self.count > 0
        if not used.any():
            return 0, 0
        return int(self.first[used].min()), int((self.first + self.count)[used].max())


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeAxis:
    """One axis of a tile of a resized image.

    >>> axis = ResizeAxis(input=Span.whole(2), output=Span.whole(4), mode="linear")
    >>> axis.band(single=True).weights.tolist()
    [[1.0, 0.0], [0.75, 0.25], [0.25, 0.75], [1.0, 0.0]]
    >>> axis.missing_input(single=True), ResizeAxis(input=Span(start=1, size=1, extent=2), output=Span.whole(4)).missing_input(single=True)
    (None, (0, 2))
    """

    input: Span
    output: Span
    mode: Interpolation = "nearest"
    align_corners: bool = False
    #: factor from input to output, where it was given instead of the size; None for the ratio of the extents
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Interpolation):
            raise InputError(f"the interpolation is {self.mode!r}; choose one of {', '.join(get_args(Interpolation))}")
        if self.align_corners and self.mode != "linear":
            raise InputError(f"align_corners is for linear interpolation, this is {self.mode}; leave it out")
        if min(self.input.extent, self.output.extent) < 1 or (self.scale is not None and not self.scale > 0):
            raise InputError(
                f"an axis of {self.input.extent} rows becomes one of {self.output.extent} by {self.scale}; give positive sizes"
            )

    def band(self, *, single: bool) -> BandedWeights:
        """The rows of the output span, as a matrix on rows of the whole input.

        Args:
            single: the image is of single or half precision; matters for ``nearest`` alone.
        """
        return _whole_bands(self._rule(), single)[0].rows(self.output)

    def adjoint_band(self, *, single: bool) -> BandedWeights:
        """The rows of the input span, as a matrix on rows of the whole output's gradient."""
        return _whole_bands(self._rule(), single)[1].rows(self.input)

    def missing_input(self, *, single: bool) -> tuple[int, int] | None:
        """Input rows, in global coordinates, that the output needs and the input buffer lacks; None if it has all."""
        return _missing(self.input, self.band(single=single))

    def missing_output(self, *, single: bool) -> tuple[int, int] | None:
        """Output rows whose gradients the input's gradient needs and the output buffer lacks; None if it has all."""
        return _missing(self.output, self.adjoint_band(single=single))

    def _rule(self) -> ResizeAxis:
        """The same for the whole image, which all tiles share."""
        return ResizeAxis(
            input=Span.whole(self.input.extent),
            output=Span.whole(self.output.extent),
            mode=self.mode,
            align_corners=self.align_corners,
            scale=self.scale,
        )


def _missing(span: Span, band: BandedWeights) -> tuple[int, int] | None:
    first, last = band.reads()
    return None if first == last or (span.start <= first and last <= span.stop) else (first, last)


@functools.lru_cache(maxsize=64)
def _whole_bands(axis: ResizeAxis, single: bool) -> tuple[BandedWeights, BandedWeights]:
    """The matrix of the whole axis, and its transpose."""
    extent, length = axis.input.extent, axis.output.extent
    rows = np.arange(length)
    if axis.mode == "linear":
        lower, share = (rows, np.zeros(length)) if extent == length else _linear(axis)
        upper = np.minimum(lower + 1, extent - 1)
        entries = (np.concatenate([rows, rows]), np.concatenate([lower, upper]), np.concatenate([1 - share, share]))
        band = BandedWeights.of_entries(length, *entries)
    else:
        precision: Any = np.float32 if single else np.float64
        ratio = precision(1.0 / axis.scale) if axis.scale else precision(extent) / precision(length)
        centres = rows.astype(precision) + precision(0.5 if axis.mode == "nearest-exact" else 0)
        nearest = np.minimum(np.floor((centres * ratio).astype(np.float32)).astype(np.int64), extent - 1)
        band = BandedWeights.of_entries(length, rows, nearest, np.ones(length))
    return band, band.transposed(extent)


def _linear(axis: ResizeAxis) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The lower of the two rows that each output row lies between, and the share of the upper one."""
    extent, length = axis.input.extent, axis.output.extent
    rows = np.arange(length, dtype=np.float64)
    if axis.align_corners:
        at = rows * ((extent - 1) / (length - 1) if length > 1 else 0.0)
    else:
        at = np.maximum((rows + 0.5) * (1.0 / axis.scale if axis.scale else extent / length) - 0.5, 0.0)
    lower = np.minimum(at.astype(np.int64), extent - 1)
    return lower, np.clip(at - lower, 0.0, 1.0)


_NO_TILE = "this tile cannot be resized"


@functools.lru_cache(maxsize=256)
def band_table(axis: ResizeAxis, *, adjoint: bool, double: bool, device: torch.device) -> BandTable:
    """What the kernel reads for one axis: of the forward direction, or of the adjoint. Rows beyond the buffer are left out.

    Args:
        double: for images in fp64.
    """
    band = axis.adjoint_band(single=not double) if adjoint else axis.band(single=not double)
    held = axis.output if adjoint else axis.input
    start, stop = (held.start + edge for edge in held.data)
    # Leave out what the buffer does not hold: rows at the front move the others up, rows at the back go.
    cut = (start - band.first).clip(0, band.count)
    count = (stop - band.first).clip(cut, band.count) - cut
    places = (torch.arange(band.weights.shape[1], device="cpu")[None, :] + torch.from_numpy(cut)[:, None]).clamp(
        max=band.weights.shape[1] - 1
    )
    weights = torch.from_numpy(band.weights).gather(1, places)
    return BandTable(
        first=torch.from_numpy(band.first + cut - held.start).to(device, torch.int32),
        count=torch.from_numpy(count).to(device, torch.int32),
        weights=weights.to(device, torch.float64 if double else torch.float32).contiguous(),
    )


def resize2d(x: Tensor, height: ResizeAxis, width: ResizeAxis, *, out: Tensor | None = None) -> Tensor:
    """The tile of the resized image that the axes call output. Differentiable once if ``out`` is None; the gradient is this tile's share.

    Args:
        x: ``[N, C, h, w]``, channels-last, the buffer that the axes call input.
        out: where to write, channels-last.

    Returns:
        ``[N, C, rows, columns]``, channels-last.

    Raises:
        InputError: a tensor does not fit the axes, or the buffer lacks rows that the output needs.

    >>> from sft.kernels.geometry import Span
    >>> x = torch.tensor([[[[1.0, 2.0]]]])
    >>> rows, columns = ResizeAxis(input=Span.whole(1), output=Span.whole(1)), ResizeAxis(input=Span.whole(2), output=Span.whole(4))
    >>> resize2d(x, rows, columns).flatten().tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    if out is not None:
        return _forward(x, height, width, out)
    result: Tensor = _Resize.apply(x, height, width)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return result


def resize2d_gradient(
    gradient: Tensor, height: ResizeAxis, width: ResizeAxis, *, partial: bool = False, out: Tensor | None = None
) -> Tensor:
    """The gradient of ``resize2d``'s input, for the rows that the axes call input.

    Args:
        gradient: of the output, ``[N, C, rows, columns]``, channels-last: the buffer that the axes call output, with a halo.
        partial: gradients beyond the buffer count as zero: the share of this tile, to be added to those of others.
        out: where to write, channels-last.

    Returns:
        ``[N, C, h, w]``, channels-last; zero in rows that are not data.

    Raises:
        InputError: as ``resize2d``.
    """
    problems: list[str] = []
    num_samples, num_channels = gradient.shape[:2]
    double = gradient.dtype == torch.float64
    size = (height.input.size, width.input.size)
    out = empty_channels_last(gradient, (num_samples, num_channels, *size)) if out is None else out
    check_buffer("gradient", gradient, num_samples, num_channels, (height.output.size, width.output.size), problems)
    check_buffer("out", out, num_samples, num_channels, size, problems)
    for name, axis in (("height", height), ("width", width)):
        if not partial and (missing := axis.missing_output(single=not double)) is not None:
            held = f"[{axis.output.start}, {axis.output.stop})"
            problems.append(
                f"{name}: the gradient reads outputs [{missing[0]}, {missing[1]}), the buffer holds {held}; give it the halo as well"
            )
    raise_problems(_NO_TILE, problems)
    return _resize_forward(gradient, out, height, width, adjoint=True)


class _Resize(torch.autograd.Function):
    """A linear map; saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, height: ResizeAxis, width: ResizeAxis) -> Tensor:
        ctx.axes = (height, width)
        return _forward(x, height, width, empty_channels_last(x, (*x.shape[:2], height.output.size, width.output.size)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        return resize2d_gradient(gradient, *ctx.axes, partial=True), None, None


def _forward(x: Tensor, height: ResizeAxis, width: ResizeAxis, out: Tensor) -> Tensor:
    problems: list[str] = []
    check_buffer("x", x, x.shape[0], x.shape[1], (height.input.size, width.input.size), problems)
    check_buffer("out", out, x.shape[0], x.shape[1], (height.output.size, width.output.size), problems)
    for name, axis in (("height", height), ("width", width)):
        output, missing = axis.output, axis.missing_input(single=x.dtype != torch.float64)
        if output.start < 0 or output.stop > output.extent:
            problems.append(f"{name}: outputs [{output.start}, {output.stop}) are not all in [0, {output.extent}); ask for those only")
        elif missing is not None:
            held = f"[{axis.input.start}, {axis.input.stop})"
            problems.append(
                f"{name}: the outputs read input [{missing[0]}, {missing[1]}), the buffer holds {held}; give it the halo as well"
            )
    raise_problems(_NO_TILE, problems)
    return _resize_forward(x, out, height, width, adjoint=False)


def _resize_forward(x: Tensor, out: Tensor, height: ResizeAxis, width: ResizeAxis, *, adjoint: bool) -> Tensor:
    if not out.numel():
        return out
    if not x.numel():
        return out.zero_()
    tables = [band_table(axis, adjoint=adjoint, double=x.dtype == torch.float64, device=x.device) for axis in (height, width)]
    if uses_triton(x):
        from sft.kernels.resize.resize_triton import launch_resize  # not above: it imports Triton

        launch_resize(x, out, *tables)
        return out
    return out.copy_(reference_resize(x, *tables))
