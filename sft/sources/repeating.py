"""Which rows (or columns) of an image equal those before them: what masks and views say of themselves, and what arrays are looked at for.

A strip of background need not run through a network if the strip above it was the same (``Options(skip_repeats=True)``). Whoever painted
the background knows where it is, and the views on top of that know where they moved it. They answer the one question that matters, so that
no pixel is decoded for it.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sft.analysis.interval import Interval
from sft.sources.host import HostArray, release_pages

__all__ = ["BoolArray", "RepeatingImage", "equal_rows", "image_equal_rows"]

BoolArray = npt.NDArray[np.bool_]

#: Rows of arrays are compared in pieces of so many bytes.
_PIECE_BYTES = 1 << 20
_BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@runtime_checkable
class RepeatingImage(Protocol):
    """What an image may have besides `sft.sources.Image`."""

    def repeated(self, part: Interval, *, columns: bool = False) -> BoolArray:
        """For each row of level 0, ``[height_px]``, whether it is known to equal the row above it in the columns ``part``.

        With ``columns`` for each column, ``[width_px]``, whether it is known to equal the column to its left in the rows ``part``. False
        claims nothing; that of the first row, or column, is not asked for.
        """
        ...


def image_equal_rows(image: Any, part: Interval, *, columns: bool = False) -> BoolArray:
    """What an image says of itself; nothing, where it cannot."""
    if isinstance(image, RepeatingImage):
        return image.repeated(part, columns=columns)
    return np.zeros(image.width_px if columns else image.height_px, dtype=bool)


def equal_rows(pixels: HostArray, columns: Interval) -> BoolArray:
    """For each row of ``[rows, width, channels]`` whether it equals the row above it in some columns, bit for bit; all of them are read."""
    part = pixels[:, columns.start : columns.stop]
    if isinstance(part, Tensor):  # a type that NumPy does not have
        part = part.detach().view(torch.int16).numpy()
    numbers: npt.NDArray[Any] = part.view(_BITS[part.dtype.itemsize])
    height = numbers.shape[0]
    same = np.zeros(height, dtype=bool)
    step = max(1, _PIECE_BYTES // max(1, numbers[:1].size))
    for top in range(1, height, step):
        bottom = min(top + step, height)
        same[top:bottom] = (numbers[top:bottom] == numbers[top - 1 : bottom - 1]).all(axis=(1, 2))
        release_pages(pixels[top - 1 : bottom])
    return same
