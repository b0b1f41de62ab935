"""Arrays as images: pixels in memory, or in a mapped ``.npy`` file of which only the rows in use are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from sft.errors import InputError
from sft.sources.array import map_npy_file
from sft.sources.host import AnyArray, Layout, axis_order, check_mapping, release_pages, resolve_layout
from sft.sources.image import Pixels, check_region
from sft.sources.raster import Size, check_level
from sft.sources.views import resolve_mpp

__all__ = ["ArrayImage"]


class ArrayImage:
    """uint8 pixels as a `sft.sources.Raster`: for what rectangles are needed of (resolution, crops, masks).

    Where a network reads an array as it is, `sft.sources.ArraySource` is the shorter way, and takes floats, too.

    >>> image = ArrayImage(np.zeros((5, 7, 3), np.uint8), mpp=0.5)
    >>> image.level_dimensions, image.mpp, image.read(6, 4, 1, 1).shape
    (((7, 5),), (0.5, 0.5), (1, 1, 3))

    Args:
        array: uint8, ``[height, width, channels]`` or ``[channels, height, width]``; ``[height, width]`` is grey. Or the path of a
            ``.npy`` file of one, which is mapped and not loaded.
        layout: which of the first two. Default: `None` (inferred where only one is possible)
        mpp: micrometres per px; one number, or (x, y). Default: `None`
        background: colour, one number a channel. Default: `None` (white)

    Raises:
        InputError: wrong type, rank, layout or background.
        SourceError: the file cannot be mapped.
    """

    def __init__(
        self,
        array: AnyArray | str | os.PathLike[str],
        *,
        layout: Layout | None = None,
        mpp: float | tuple[float, float] | None = None,
        background: tuple[int, ...] | None = None,
    ) -> None:
        self.path = Path(array) if isinstance(array, (str, os.PathLike)) else None
        given = map_npy_file(Path(array)) if isinstance(array, (str, os.PathLike)) else array
        self._name = "array" if self.path is None else str(self.path)
        if not isinstance(given, np.ndarray) or given.dtype != np.uint8:
            raise InputError(
                f"cannot use {self._name} of {getattr(given, 'dtype', type(given).__name__)} as an image: pixels are uint8. Convert it, or "
                "use sft.sources.ArraySource."
            )
        self._given = given
        whole = given[..., None] if given.ndim == 2 else given
        self.layout: Layout = "HWC" if given.ndim == 2 else resolve_layout(self._name, whole.shape, layout)
        if len(self.layout) != 3:
            raise InputError(f"cannot use {self._name} of shape {given.shape} as an image: it is a batch. Take one element: array[0].")
        #: a view [height, width, channels]
        self._pixels: AnyArray = whole.transpose([axis - 1 for axis in axis_order(self.layout, "NHWC")[1:]])
        self.height_px, self.width_px, self.num_channels = self._pixels.shape
        self.mpp = None if mpp is None else resolve_mpp(mpp, "mpp")
        self.background = (255,) * self.num_channels if background is None else tuple(background)
        if len(self.background) != self.num_channels or not all(0 <= value <= 255 for value in self.background):
            raise InputError(f"cannot use background {self.background}: give {self.num_channels} numbers of 0 to 255.")

    def __repr__(self) -> str:
        return f"ArrayImage({self._name}, {self.width_px} x {self.height_px} px)"

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapped file travels as its path: pickling a memmap would read all of it.
        given = self._given if self.path is None else self.path
        layout = self.layout if self._given.ndim == 3 else None
        return _rebuild_image, (given, layout, self.mpp, self.background)

    @property
    def level_dimensions(self) -> tuple[Size, ...]:
        """(width, height) of the one level."""
        return ((self.width_px, self.height_px),)

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """1: there is one level."""
        return (1.0,)

    @property
    def level_tiles_px(self) -> tuple[Size | None, ...]:
        """None: nothing is compressed."""
        return (None,)

    @property
    def tile_height_px(self) -> int | None:
        """None: nothing is compressed."""
        return None

    def close(self) -> None:
        """Nothing to do: a mapping goes with its last reference."""

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        """Read a rectangle; see `sft.sources.Image`.

        Raises:
            InputError: there is no such level or the rectangle is not wholly inside it.
            SourceError: the mapped file was cut short.
        """
        check_level(repr(self), level, 1)
        check_region(self._name, x, y, w, h, self.width_px, self.height_px)
        check_mapping(self._given, self._name)
        part = self._pixels[y : y + h, x : x + w]
        pixels: Pixels = part.copy(order="C")
        release_pages(part)
        return pixels


def _rebuild_image(
    given: AnyArray | Path, layout: Layout | None, mpp: tuple[float, float] | None, background: tuple[int, ...]
) -> ArrayImage:
    return ArrayImage(given, layout=layout, mpp=mpp, background=background)
