"""Any ``Image`` as a ``Source``: decoded once, normalised into the caller's memory.

A compressed file can only be decoded by whole tiles. Strips rarely end where tiles do, so each would decode the tiles at its two
edges a second time, which for strips as high as a tile doubles the work. Rows are therefore read in blocks that are aligned to the
file's tiles, and the blocks at both edges of the last interval are kept: the one that a forward walk continues in, and the one that
a backward walk does. That is at most two blocks of raw pixels, and a third while it is being used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.analysis.interval import Interval
from sft.errors import InputError, SourceError
from sft.sources.image import Image, Pixels
from sft.sources.normalize import Normalizer
from sft.sources.repeating import BoolArray, image_equal_rows
from sft.sources.source import check_rows

__all__ = ["Normalized"]

#: Some formats have tiles of eight rows. A block is a multiple of the tile height of at least so many rows, since each read costs.
_MIN_BLOCK_ROWS = 64


class Normalized:
    """An image as ``(pixel / 255 - mean) / std``: a `sft.sources.Source` with one batch element.

    Args:
        image: a `Slide`, or anything else with ``width_px``, ``height_px`` and ``read``. Where it also has ``tile_height_px``
            (rows of its compressed tiles, or None), rows are read in blocks of whole tiles.
        mean: of each channel, in units of 0..1.
        std: standard deviation of each channel, in units of 0..1.
        dtype: floating-point type that the network gets. Default: `torch.float32`

    Raises:
        InputError: an argument is wrong, or the image is empty.
        SourceError: the image cannot be opened.
    """

    def __init__(self, image: Image, *, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32) -> None:
        if not isinstance(image, Image):
            raise InputError(
                f"cannot read rows of a {type(image).__name__}: expected width_px, height_px and read(). See sft.sources.Image."
            )
        if not dtype.is_floating_point:
            raise InputError(f"cannot read {image} as {dtype}: normalised pixels are fractions. Use a floating-point dtype.")
        for name, given in (("mean", mean), ("std", std)):
            if not isinstance(given, Sized):
                raise InputError(f"cannot normalise with {name} {given!r}: give a number for every channel.")
        if len(mean) < 1 or len(mean) != len(std):
            raise InputError(f"cannot normalise with mean {tuple(mean)} and std {tuple(std)}: give one of each for every channel.")
        self.image = image
        self.dtype = dtype
        self.shape: tuple[int, int, int, int] = (1, len(mean), image.height_px, image.width_px)
        if min(self.shape) < 1:
            raise InputError(f"cannot read {image}: it is {image.width_px} px wide and {image.height_px} px high. Give one with pixels.")
        self._normalizer = Normalizer(mean, std, num_channels=len(mean), width_px=image.width_px, pixel_dtype=torch.uint8)
        tile_rows = getattr(image, "tile_height_px", None)
        if tile_rows is not None and tile_rows < 1:
            raise InputError(f"cannot read {image} in tiles of {tile_rows} rows: a tile has at least one. Set tile_height_px to None.")
        #: rows of an aligned block; None: rows are read just as they are asked for
        self.block_rows: int | None = None if tile_rows is None else tile_rows * -(-_MIN_BLOCK_ROWS // tile_rows)
        # Replaced as a whole, never changed: threads that race here decode a block twice and nothing worse. A lock could be
        # inherited, held for ever, by a process forked at the wrong moment.
        self._blocks: Mapping[int, Pixels] = {}

    def __repr__(self) -> str:
        return f"Normalized({self.image!r}, shape={self.shape})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": {}}

    def rows(self, interval: Interval, out: Tensor) -> None:
        """Fill ``out`` with rows; see `sft.sources.Source`.

        Raises:
            InputError: the interval or ``out`` does not fit, or the pixels do not have ``len(mean)`` channels.
            SourceError: the pixels cannot be read.
        """
        check_rows(repr(self.image), self.shape, interval, out)
        if not interval:
            return
        block_rows = self.block_rows
        if block_rows is None:
            self._fill(out, interval, interval, self._read_pixels(interval), interval.start)
            return
        first, last = interval.start // block_rows, (interval.stop - 1) // block_rows
        # What this interval does not touch goes before anything is read.
        known = self._blocks = {index: pixels for index, pixels in self._blocks.items() if first <= index <= last}
        for index in range(first, last + 1):
            block = Interval(index * block_rows, min((index + 1) * block_rows, self.shape[2]))
            pixels = known[index] if index in known else self._read_pixels(block)
            self._fill(out, interval, block.intersect(interval), pixels, block.start)
            known = {kept: known[kept] for kept in known if kept > index or kept == first}
            if index in (first, last):
                known[index] = pixels
            self._blocks = known
            del pixels  # before the next block is read

    def repeated_rows(self, columns: Interval) -> BoolArray:
        """For each row whether the image says that it equals the row above it in these columns; see `RepeatingSource`."""
        return image_equal_rows(self.image, columns)

    def forget(self) -> None:
        """Drop the blocks kept for the next interval: after a pass, when their memory has a better use."""
        self._blocks = {}

    def _fill(self, out: Tensor, interval: Interval, part: Interval, pixels: Pixels, top: int) -> None:
        """Normalise the rows `part` of pixels that begin at row `top` into their place in the interval's tensor."""
        self._normalizer.fill(
            pixels[part.start - top : part.stop - top], out[0, :, part.start - interval.start : part.stop - interval.start]
        )

    def _read_pixels(self, rows: Interval) -> Pixels:
        _, num_channels, _, width_px = self.shape
        pixels = self.image.read(0, rows.start, width_px, len(rows))
        if pixels.ndim != 3 or pixels.shape[2] != num_channels or pixels.dtype != np.uint8:
            raise InputError(
                f"cannot use pixels of shape {pixels.shape} and {pixels.dtype} from {self.image}: expected uint8 [height, width, "
                f"{num_channels}], a channel for each mean. Convert the source, or give as many means as it has channels."
            )
        if pixels.shape[:2] != (len(rows), width_px):
            raise SourceError(
                f"cannot use rows [{rows.start}, {rows.stop}) of {self.image}: it returned {pixels.shape[0]} x {pixels.shape[1]} px "
                f"instead of {len(rows)} x {width_px}. Its read() must return the rectangle that it is asked for."
            )
        return pixels
