"""Axes of a tile that a kernel resamples: tables of rows and weights, or the numbers from which a kernel computes them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["BandTable", "LinearAxis"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BandTable:
    """One axis of a tile: result row ``o`` is the sum over ``0 <= k < count[o]`` of ``weights[o, k] * x[first[o] + k]``.

    Rows are numbered as in the buffer that is read.
    """

    #: int32 ``[rows]``
    first: Tensor
    #: int32 ``[rows]``
    count: Tensor
    #: fp32 ``[rows, largest count]``, contiguous
    weights: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAxis:
    """Linear interpolation of one axis by a power of two, or the identity.

    Output row ``o`` of the image is the interpolation of its input rows at ``clamp((o + 1/2) / factor - 1/2, 0, extent - 1)``. For a
    factor that is a power of two, positions and weights are exact in single precision up to 2^22 rows.

    Attributes:
        factor: output rows for each input row; 1 for the identity.
        extent: input rows of the image; unused for the identity.
        first_output: row of the image that the first output row of the tile is.
        first_input: row of the image that the first input row of the tile is.
        is_adjoint: true for the gradient: input rows are computed from output rows.
    """

    factor: int = 1
    extent: int = 2**30
    first_output: int = 0
    first_input: int = 0
    is_adjoint: bool = False

    @property
    def num_terms(self) -> int:
        """Terms of the sum of a row, some of weight zero."""
        if self.factor == 1:
            return 1
        return 2 * self.factor if self.is_adjoint else 2
