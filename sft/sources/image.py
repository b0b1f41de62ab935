"""The one interface that every image source has, and the two rules that all sources share.

A source is anything with a size and a ``read`` that returns one rectangle of pixels; slides, arrays and a user's own
reader plug in alike, without inheriting from anything.  Two rules are fixed here and nowhere else:

*Out of bounds is an error.*  Readers disagree about pixels outside the image: OpenSlide answers transparent (which
turns black when somebody drops the alpha channel), cuCIM white, others a smaller array.  Any such answer would
silently change the border of a convolution, so a rectangle that is not wholly inside the image raises ``InputError``.

*Whole rows in order.*  An image is walked in strips of full rows from the top, the order in which the strip walk
consumes it, so each compressed tile is decoded once (twice where a strip boundary crosses it, unless the reader's
cache still holds it).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sft.errors import InputError

__all__ = ["Image", "Pixels", "check_region", "read_strips"]

#: Pixels of one rectangle: uint8, height x width x channels.
Pixels = npt.NDArray[np.uint8]


@runtime_checkable
class Image(Protocol):
    """An image that is read in rectangles."""

    @property
    def height_px(self) -> int:
        """Number of pixel rows at level 0."""
        ...

    @property
    def width_px(self) -> int:
        """Number of pixel columns at level 0."""
        ...

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        """Read the rectangle of `w` x `h` pixels whose top left corner is column `x`, row `y` of `level`.

        Returns:
            uint8 array of shape ``[h, w, channels]``.

        Raises:
            InputError: the rectangle is not wholly inside the image.
            SourceError: the pixels cannot be read.
        """
        ...


def check_region(name: str, x: int, y: int, w: int, h: int, width_px: int, height_px: int) -> None:
    """Refuse a rectangle that is empty or not wholly inside an image of `width_px` x `height_px`.

    >>> check_region("scan", 0, 0, 10, 10, width_px=10, height_px=10)
    >>> check_region("scan", 5, 0, 10, 10, width_px=10, height_px=10)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    sft.errors.InputError: cannot read columns [5, 15) and rows [0, 10) of scan: it is 10 px wide ...

    Raises:
        InputError: the rectangle is empty or reaches outside.
    """
    if w < 1 or h < 1:
        raise InputError(f"cannot read {w} x {h} px of {name}: a rectangle has at least one pixel. Ask for w >= 1 and h >= 1.")
    if x < 0 or y < 0 or x + w > width_px or y + h > height_px:
        raise InputError(
            f"cannot read columns [{x}, {x + w}) and rows [{y}, {y + h}) of {name}: it is {width_px} px wide and "
            f"{height_px} px high. Clip the rectangle to the image; pixels outside it have no value."
        )


def read_strips(image: Image, rows: int) -> Iterator[Pixels]:
    """Read `image` from top to bottom in full-width strips of `rows` rows; the last strip may be lower.

    Raises:
        InputError: `rows` is not positive.
        SourceError: the pixels cannot be read.
    """
    if rows < 1:
        raise InputError(f"cannot read strips of {rows} rows: a strip has at least one row. Ask for rows >= 1.")
    # A separate generator, so that a wrong `rows` raises here and not at the first use of the iterator.
    return _strips(image, rows)


def _strips(image: Image, rows: int) -> Iterator[Pixels]:
    for top in range(0, image.height_px, rows):
        yield image.read(0, top, image.width_px, min(rows, image.height_px - top))
