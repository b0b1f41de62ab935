"""Rows of a resampling matrix on the device of the image."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["BandTable"]


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
