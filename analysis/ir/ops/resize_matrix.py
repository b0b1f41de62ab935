"""Resize matrices: resampling along one axis as a banded matrix, bit-exact with ATen.

Interpolation and adaptive averages are separable: along each axis a result row is a weighted sum of a window of input rows. The windows
of later rows never begin or end before those of earlier ones, so both the operator and its adjoint are *banded*: matrices with short
windows as rows. Positions and weights are ATen's to the bit, by its own arithmetic (``ATen/native/UpSample.h``): in double precision for
``float64`` and in single precision for narrower types. Nearest neighbours use both, since ATen computes them in the image's own type
in the forward pass and in single precision in the backward pass. No formula bounds the rounding of a position in single precision. The
access map is therefore fitted to the windows themselves, over every row of the image, and holds for all of them by construction.

CUDA kernels differ from those of the CPU in two ways (:func:`interpolated_axes`). Nearest neighbours are computed in single precision for
every type, and their gradient is no adjoint: it sums rows ``ceil(i * s)`` to ``ceil((i + 1) * s)`` of the result's gradient for input row
``i``, where ``s`` is the number of output rows per input row (``cuda/UpSample.cuh``). An axis of unchanged size is copied only if no axis
changes its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sft.analysis.ir.access import AxisMap, AxisPlacement

__all__ = ["AxisResampling", "BandedMatrix", "ResamplingKind", "interpolated_axes"]

ResamplingKind = Literal["nearest", "nearest exact", "linear", "cubic", "antialiased linear", "antialiased cubic", "window"]
Rows = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]

#: Input rows from the centre of a window to its ends; with antialiasing and for means, times the input rows per output row.
_HALF_WIDTHS: dict[ResamplingKind, Fraction] = {
    "linear": Fraction(1, 2),
    "cubic": Fraction(3, 2),
    "antialiased linear": Fraction(1),
    "antialiased cubic": Fraction(2),
    "window": Fraction(1, 2),
}
#: The cubic's free parameter (Keys 1981), as ATen has it; with antialiasing as Pillow has it.
_CUBIC, _SMOOTH_CUBIC = -0.75, -0.5
#: Rows plus columns up to which ATen takes its loop for small images (``_use_vectorized_kernel_cond_2d`` of UpSampleKernel.cpp).
_SMALL_EXTENTS = 128


@dataclass(frozen=True, slots=True, eq=False)
class BandedMatrix:
    """A matrix with short windows as rows: row ``i`` is zero except for ``weights[i, :stop[i] - start[i]]`` from column ``start[i]`` on.

    Attributes:
        start: first column of each row's window; never decreasing.
        stop: end column (exclusive) of the window; never decreasing. A window may be empty.
        weights: weights of the columns of each window, padded with zeros.
    """

    start: Rows
    stop: Rows
    weights: Weights

    @classmethod
    def of(cls, columns: Rows, weights: Weights) -> BandedMatrix:
        """Rows that read ``columns`` (one row of indices each) with ``weights``; the weights of a repeated column are added.

        >>> BandedMatrix.of(np.array([[0, 0], [0, 1]]), np.array([[0.25, 0.75], [0.25, 0.75]])).weights.tolist()
        [[1.0, 0.0], [0.25, 0.75]]
        """
        start, stop = columns.min(axis=1), columns.max(axis=1) + 1
        dense = np.zeros((len(columns), int((stop - start).max())))
        np.add.at(dense, (np.arange(len(columns))[:, None], columns - start[:, None]), weights)
        return cls(start, stop, dense)

    @property
    def width(self) -> int:
        """Number of columns of the widest window."""
        return int(self.weights.shape[1])

    @property
    def is_identity(self) -> bool:
        """True if row ``i`` is column ``i``, up to the last row."""
        return self.is_selection and bool((self.start == np.arange(len(self.start))).all())

    @property
    def is_selection(self) -> bool:
        """True if each row is one column with weight 1."""
        return self.width == 1 and bool((self.weights == 1.0).all())

    def transposed(self, num_columns: int) -> BandedMatrix:
        """The adjoint. The rows that read a column are consecutive, since windows are monotone."""
        columns = np.arange(num_columns)
        first = np.searchsorted(self.stop, columns, side="right")
        last = np.maximum(first, np.searchsorted(self.start, columns, side="right"))
        rows = first[:, None] + np.arange(max(1, int((last - first).max())))
        inside, rows = rows < last[:, None], np.minimum(rows, len(self.start) - 1)
        offset = np.where(inside, columns[:, None] - self.start[rows], 0)
        return BandedMatrix(first, last, np.where(inside, self.weights[rows, offset], 0.0))

    def submatrix(self, first: int, num_rows: int, first_column: int, num_columns: int) -> tuple[Rows, Weights]:
        """For a range of rows the columns in their windows, relative to ``first_column``, and their weights: ``[width, num_rows]`` each.

        Columns outside the requested range, and padding of the windows, have weight zero and the index of a neighbour.
        """
        start, stop = self.start[first : first + num_rows], self.stop[first : first + num_rows]
        columns = start + np.arange(self.width)[:, None]
        inside = (columns < stop) & (columns >= first_column) & (columns < first_column + num_columns)
        weights = np.where(inside, self.weights[first : first + num_rows].T, 0.0)
        near = np.minimum(columns, np.maximum(stop - 1, start))
        return np.clip(near - first_column, 0, num_columns - 1), weights


@dataclass(frozen=True, kw_only=True)
class AxisResampling:
    """The resampling of one axis.

    Attributes:
        kind: the interpolation method; ``window`` is the mean of an adaptive pooling.
        extent: input rows.
        length: output rows.
        scale: output rows per input row, if the model gave that instead of a size.
        align_corners: True if the centres of the first and last rows are fixed, instead of their edges.
        is_double: True if the image's elements are ``float64``.
        has_identity_gradient: True if the gradient passes unchanged, independent of ``scale``.
        has_identity_forward: True if the rows pass unchanged, independent of ``scale``.
        is_on_gpu: True for the positions and gradients of CUDA kernels.
    """

    kind: ResamplingKind
    extent: int
    length: int
    scale: float | None = None
    align_corners: bool = False
    is_double: bool = True
    has_identity_gradient: bool = False
    has_identity_forward: bool = False
    is_on_gpu: bool = False

    @property
    def forward(self) -> BandedMatrix:
        """The matrix of output rows by input rows."""
        return _forward_and_adjoint(self)[0]

    @property
    def adjoint(self) -> BandedMatrix:
        """The matrix of input rows by output rows: the derivative as ATen computes it."""
        return _forward_and_adjoint(self)[1]

    @property
    def is_identity(self) -> bool:
        """True if neither the operator nor its derivative changes the rows."""
        return self.extent == self.length and self.forward.is_identity and self.adjoint.is_identity

    @property
    def power_of_two(self) -> int | None:
        """Factor of a linear interpolation by a power of two, whose positions are exact in every type; ``None`` for another resampling."""
        factor, rest = divmod(self.length, self.extent)
        is_plain = self.kind == "linear" and not self.align_corners and self.scale in (None, factor)
        return factor if is_plain and not rest and factor > 1 and factor & (factor - 1) == 0 else None

    @property
    def access(self) -> AxisMap:
        """The access map."""
        return _fit_access_map(self)

    @property
    def placement(self) -> AxisPlacement:
        """Position of the output rows among the input rows, by the formulas of interpolation; a window's width is approximate."""
        step = self.step
        if self.kind == "nearest":
            return AxisPlacement.of_access(AxisMap(scale=step.numerator, divisor=step.denominator))
        if self.kind == "nearest exact":
            up, down = step.numerator, step.denominator
            return AxisPlacement.of_access(AxisMap(scale=2 * up, first=up, last=up, divisor=2 * down))
        if self.align_corners and self.kind in ("linear", "cubic"):
            # A single output row is the first input row.
            step, centre = (Fraction(self.extent - 1, self.length - 1) if min(self.extent, self.length) > 1 else step), Fraction(0)
        else:
            centre = (step - 1) / 2
        reach = _HALF_WIDTHS[self.kind] * (1 if self.kind in ("linear", "cubic") else max(step, Fraction(1)))
        return AxisPlacement(stride=step, first=centre - reach, last=centre + reach)

    @property
    def step(self) -> Fraction:
        """Approximate number of input rows that an output row advances by."""
        return 1 / Fraction(self.scale) if self.scale else Fraction(self.extent, self.length)

    @property
    def precision(self) -> type[np.floating[Any]]:
        """The floating-point type in which ATen computes positions."""
        return np.float64 if self.is_double else np.float32


def interpolated_axes(
    kind: ResamplingKind,
    extents: Sequence[int],
    lengths: Sequence[int],
    scales: Sequence[float | None],
    *,
    align_corners: bool = False,
    is_double: bool = True,
    is_on_gpu: bool = False,
) -> tuple[AxisResampling, ...]:
    """The resampling of each axis in one call of ATen's interpolation.

    Args:
        kind: the interpolation method.
        extents: input rows of each axis.
        lengths: output rows of each axis.
        scales: output rows per input row of each axis, if the call has them.
        align_corners: as in :func:`torch.nn.functional.interpolate`.
        is_double: True if the image's elements are ``float64``.
        is_on_gpu: True for CUDA kernels.
    """
    is_nearest, is_plane, is_unchanged = kind.startswith("nearest"), len(lengths) == 2, tuple(lengths) == tuple(extents)
    # The CPU has a separate loop for nearest pixels of small images, with indices in single precision; on a GPU all indices are.
    is_single = is_nearest and (is_on_gpu or (is_plane and sum(lengths) <= _SMALL_EXTENTS))
    is_copied = is_on_gpu and is_unchanged and (is_plane or not is_nearest)
    return tuple(
        AxisResampling(
            kind=kind,
            extent=extent,
            length=length,
            scale=None if is_copied else scale,
            align_corners=align_corners,
            is_double=is_double and not is_single,
            # If no axis changes its size, the CPU's backward copies, although the forward may have moved the rows.
            has_identity_gradient=kind == "cubic" and is_unchanged,
            has_identity_forward=is_on_gpu and is_nearest and is_plane and extent == length,
            is_on_gpu=is_on_gpu,
        )
        for extent, length, scale in zip(extents, lengths, scales, strict=True)
    )


@lru_cache(maxsize=256)
def _forward_and_adjoint(sampling: AxisResampling) -> tuple[BandedMatrix, BandedMatrix]:
    forward = adjoint = _FORWARD_MATRICES[sampling.kind](sampling)
    if sampling.has_identity_forward:
        forward = _selection_matrix(np.arange(sampling.length))
    if sampling.is_on_gpu and sampling.kind.startswith("nearest"):
        return forward, _cuda_nearest_gradient(sampling)
    if sampling.has_identity_gradient:
        adjoint = _selection_matrix(np.arange(sampling.length))
    elif sampling.kind == "nearest" and sampling.length in (sampling.extent, 2 * sampling.extent):
        # ATen's backward ignores the scale in this case.
        adjoint = _selection_matrix(np.arange(sampling.length) * sampling.extent // sampling.length)
    elif sampling.kind.startswith("nearest"):
        adjoint = _nearest_matrix(replace(sampling, is_double=False))
    elif sampling.kind.startswith("antialiased") and sampling.extent == sampling.length and not sampling.is_on_gpu:
        # ATen's forward copies an axis of unchanged size, ignoring ``scale``; its backward does not.
        forward = _selection_matrix(np.arange(sampling.length))
    return forward, adjoint.transposed(sampling.extent)


def _scale_ratio(sampling: AxisResampling) -> np.floating[Any]:
    """Input rows per output row, as ATen rounds it."""
    precision = sampling.precision
    if sampling.align_corners:
        return precision(sampling.extent - 1) / precision(sampling.length - 1) if sampling.length > 1 else precision(0)
    return precision(1.0 / sampling.scale) if sampling.scale else precision(sampling.extent) / precision(sampling.length)


def _selection_matrix(columns: Rows) -> BandedMatrix:
    """The matrix with a single column in each row."""
    return BandedMatrix.of(columns[:, None], np.ones((len(columns), 1)))


def _nearest_matrix(sampling: AxisResampling) -> BandedMatrix:
    precision = sampling.precision
    rows = np.arange(sampling.length).astype(precision)
    centres = rows + precision(0.5) if sampling.kind == "nearest exact" else rows
    # ATen rounds the product, of either type, to single precision before it rounds down.
    nearest = np.floor((centres * _scale_ratio(sampling)).astype(np.float32)).astype(np.int64)
    return _selection_matrix(np.minimum(nearest, sampling.extent - 1))


def _cuda_nearest_gradient(sampling: AxisResampling) -> BandedMatrix:
    """Sums of the result's gradient for each input row, over the rows that CUDA kernels find by a second rounding."""
    scale = np.float32(sampling.scale) if sampling.scale else np.float32(sampling.length) / np.float32(sampling.extent)
    # Products of single precision are exact in double. With the subtraction they are rounded once, as a fused multiply-add.
    shift = 0.5 if sampling.kind == "nearest exact" else 0.0
    products = np.arange(sampling.extent + 1).astype(np.float32).astype(np.float64) * np.float64(scale)
    borders = np.minimum(np.ceil((products - shift).astype(np.float32)).astype(np.int64), sampling.length)
    start, stop = borders[:-1], borders[1:]
    inside = np.arange(max(1, int((stop - start).max()))) < (stop - start)[:, None]
    return BandedMatrix(start, stop, inside.astype(np.float64))


def _source_positions(sampling: AxisResampling) -> npt.NDArray[np.floating[Any]]:
    """Positions of the output rows' centres in the input."""
    precision = sampling.precision
    rows: npt.NDArray[np.floating[Any]] = np.arange(sampling.length).astype(precision)
    ratio, half = _scale_ratio(sampling), precision(0.5)
    positions: npt.NDArray[np.floating[Any]] = rows * ratio if sampling.align_corners else (rows + half) * ratio - half
    return positions


def _linear_matrix(sampling: AxisResampling) -> BandedMatrix:
    rows, last, one = np.arange(sampling.length), sampling.extent - 1, sampling.precision(1)
    if sampling.extent == sampling.length and (not sampling.is_on_gpu or sampling.scale is None or sampling.align_corners):
        return _selection_matrix(rows)
    positions = np.maximum(_source_positions(sampling), 0)
    low = np.minimum(positions.astype(np.int64), last)
    fraction = np.clip(positions - low.astype(sampling.precision), 0, 1).astype(sampling.precision)
    return BandedMatrix.of(
        np.stack([low, np.minimum(low + 1, last)], axis=1), np.stack([one - fraction, fraction], axis=1).astype(np.float64)
    )


def _cubic_matrix(sampling: AxisResampling) -> BandedMatrix:
    precision = sampling.precision
    positions = _source_positions(sampling)
    low = np.minimum(np.floor(positions).astype(np.int64), sampling.extent - 1)
    fraction = np.clip(positions - low.astype(precision), 0, 1).astype(precision)
    a = precision(_CUBIC)

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    complement = 1 - fraction
    weights = np.stack([far(fraction + 1), near(fraction), near(complement), far(complement + 1)], axis=1)
    columns = np.clip(low[:, None] + np.arange(-1, 3), 0, sampling.extent - 1)
    return BandedMatrix.of(columns, weights.astype(np.float64))


def _cubic_kernel(x: Any) -> Any:
    a = x.dtype.type(_SMOOTH_CUBIC)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    return np.where(x < 1, near, np.where(x < 2, (((x - 5) * x + 8) * x - 4) * a, 0))


def _antialiased_matrix(sampling: AxisResampling, kernel: Callable[[Any], Any], reach: int) -> BandedMatrix:
    """A kernel of ``reach`` rows to each side, widened by the downscaling factor; its weights are normalized to a sum of one.

    Source: ``_compute_indices_min_size_weights_aa`` of ``ATen/native/cpu/UpSampleKernel.cpp``.
    """
    precision, ratio = sampling.precision, _scale_ratio(sampling)
    half, width = precision(0.5), np.maximum(ratio, precision(1))
    support = precision(reach) * width
    centre = ratio * (np.arange(sampling.length).astype(precision) + half)
    start = np.maximum((centre - support + half).astype(np.int64), 0)
    count = np.minimum((centre + support + half).astype(np.int64), sampling.extent) - start
    count = np.clip(count, 0, 2 * int(np.ceil(support)) + 1)
    offset = np.arange(int(count.max()))
    distance = np.abs((start[:, None] + offset).astype(precision) - centre[:, None] + half) * (precision(1) / width)
    weights = np.where(offset < count[:, None], kernel(distance), 0)
    return BandedMatrix(start, start + count, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float64))


def _window_mean_matrix(sampling: AxisResampling) -> BandedMatrix:
    rows, extent, length = np.arange(sampling.length), sampling.extent, sampling.length
    start, stop = rows * extent // length, -(-(rows + 1) * extent // length)
    count = stop - start
    inside = np.arange(int(count.max())) < count[:, None]
    return BandedMatrix(start, stop, inside / count[:, None])


_FORWARD_MATRICES: dict[ResamplingKind, Callable[[AxisResampling], BandedMatrix]] = {
    "nearest": _nearest_matrix,
    "nearest exact": _nearest_matrix,
    "linear": _linear_matrix,
    "cubic": _cubic_matrix,
    "antialiased linear": partial(_antialiased_matrix, kernel=lambda x: np.maximum(1 - x, 0), reach=1),
    "antialiased cubic": partial(_antialiased_matrix, kernel=_cubic_kernel, reach=2),
    "window": _window_mean_matrix,
}


@lru_cache(maxsize=256)
def _fit_access_map(sampling: AxisResampling) -> AxisMap:
    """The simplest access map, within one row over the whole image, that covers every window.

    Small numbers make strips equal: upsampling 10,239 rows to 20,479, each row reads the same rows as in an upsampling by two, or one more.
    """
    rows = np.arange(sampling.length)
    low, high = sampling.forward.start.copy(), sampling.forward.stop - 1
    # The adjoint's windows count as reads too: input row i contributes to the gradient of each of its rows.
    readers, columns = sampling.adjoint, np.arange(sampling.extent)
    used = readers.stop > readers.start
    np.minimum.at(low, readers.stop[used] - 1, columns[used])
    np.maximum.at(high, readers.start[used], columns[used])
    low, high = np.minimum.accumulate(low[::-1])[::-1], np.maximum.accumulate(high)
    slack = Fraction(1, sampling.length)
    ratio = _simplest_fraction(max(sampling.step - slack, sampling.step / 2), sampling.step + slack)
    scale, divisor = ratio.numerator, ratio.denominator
    first = int((divisor * low + divisor - 1 - scale * rows).min())
    last = int((divisor * high - scale * rows).max())
    return AxisMap(scale=scale, first=min(first, last), last=last, divisor=divisor)


def _simplest_fraction(low: Fraction, high: Fraction) -> Fraction:
    """The fraction with the smallest denominator (and numerator) in ``[low, high]``, by continued fractions.

    >>> _simplest_fraction(Fraction(10238, 20479), Fraction(10240, 20479))
    Fraction(1, 2)
    """
    integer = -(-low.numerator // low.denominator)
    if integer <= high:
        return Fraction(max(1, integer))
    floor = low.numerator // low.denominator
    return floor + 1 / _simplest_fraction(1 / (high - floor), 1 / (low - floor))
