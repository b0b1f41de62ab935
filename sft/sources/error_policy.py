"""Error policies for unreadable regions of a slide: stop, skip the slide, or fill with background and record the place.

``"raise"`` is right while a data set is put together. ``"skip"`` turns every failure into `sft.SkipSlideError`, which a training loop
catches to continue with the next slide; a failing step of `sft` leaves parameters, gradients and statistics unchanged. ``"fill"`` puts the
background colour in place of tiles that cannot be decoded, and lists them: pixels other than the scanner's are a decision, so it must be
explicit and visible afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from sft.common.errors import InputError, SkipSlideError, SourceError
from sft.sources.image import Image, Pixels, Rectangle
from sft.sources.views import RasterView

__all__ = ["BadTile", "OnError", "Tolerant", "resolve_on_error"]

OnError: TypeAlias = Literal["raise", "skip", "fill"]

#: (width, height) in which damaged pixels are filled where a file does not state the size of its tiles.
_FALLBACK_TILE_PX = (256, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadTile:
    """A tile that could not be decoded and has the background colour instead."""

    level: int
    x: int  #: column of its left edge, in px of the level
    y: int  #: row of its upper edge, in px of the level
    width_px: int
    height_px: int
    reason: str  #: message of the reader

    def __str__(self) -> str:
        return f"level {self.level}, columns [{self.x}, {self.x + self.width_px}), rows [{self.y}, {self.y + self.height_px})"


def resolve_on_error(on_error: str) -> OnError:
    """Error policy by its name.

    Raises:
        InputError: no policy has this name.
    """
    for known in get_args(OnError):
        if on_error == known:
            policy: OnError = known
            return policy
    raise InputError(f"cannot use on_error={on_error!r}: choose one of {', '.join(map(repr, get_args(OnError)))}.")


class Tolerant(RasterView):
    """Image with an error policy for unreadable regions.

    Args:
        image: of any kind.
        on_error: ``"skip"`` raises `sft.SkipSlideError`. ``"fill"`` puts the background colour in place of full tiles of the file, always
            of the same ones, for every rectangle and even if they become readable later. ``"raise"`` changes nothing. A tile that was read
            before and cannot be read any more is an error with ``"fill"`` as well: the backward pass would see another image than the
            forward pass.

    Raises:
        InputError: no policy has this name.
    """

    def __init__(self, image: Image, on_error: OnError) -> None:
        super().__init__(image)
        self.on_error: OnError = resolve_on_error(on_error)
        # Two threads that meet the same tile write the same entry.
        self._bad: dict[tuple[int, int, int], BadTile] = {}
        #: of each level whose file has tiles, for each row and column of these whether it was read
        self._good: dict[int, npt.NDArray[np.bool_]] = {}

    def __repr__(self) -> str:
        return f"Tolerant({self.image!r}, {self.on_error!r})"

    @property
    def bad_tiles(self) -> tuple[BadTile, ...]:
        """The tiles that were filled so far, by level, row and column."""
        return tuple(tile for _, tile in sorted(self._bad.copy().items()))

    def _read(self, rectangle: Rectangle) -> Pixels:
        if self.on_error == "fill" and self._has_bad(rectangle):
            return self._filled(rectangle)
        try:
            pixels = rectangle.read(self.image)
        except SourceError as error:
            if self.on_error == "raise":
                raise
            if self.on_error == "skip":
                raise SkipSlideError(f"{error} (on_error='skip': leave this slide out)") from error
            return self._filled(rectangle)
        if self.on_error == "fill":
            self._note_good(rectangle)
        return pixels

    def _filled(self, rectangle: Rectangle) -> Pixels:
        """Read tile by tile, so that only damaged tiles are lost."""
        out = np.empty((*rectangle.shape, self.num_channels), self.dtype)
        for tile in self._tiles(rectangle):
            overlap = tile.intersect(rectangle)
            pixels = None if self._key(tile) in self._bad else self._tile(tile)
            out[overlap.slices_in(rectangle)] = self.background if pixels is None else pixels[overlap.slices_in(tile)]
        return out

    def _tiles(self, rectangle: Rectangle) -> Iterator[Rectangle]:
        """Tiles of the level that overlap a rectangle, row by row."""
        level = rectangle.level
        width, height = self.level_tiles_px[level] or _FALLBACK_TILE_PX
        whole = Rectangle.of(0, 0, *self.level_dimensions[level], level)
        rows, columns = rectangle.cells((width, height))
        for row, column in product(rows, columns):
            yield whole.intersect(Rectangle.of(column * width, row * height, width, height))

    @staticmethod
    def _key(tile: Rectangle) -> tuple[int, int, int]:
        return tile.level, tile.rows.start, tile.columns.start

    def _tile(self, tile: Rectangle) -> Pixels | None:
        """Pixels of a tile; ``None`` for a damaged one, which is noted."""
        try:
            pixels = tile.read(self.image)
        except SourceError as error:
            height_px, width_px = tile.shape
            level, y, x = self._key(tile)
            bad = BadTile(level=level, x=x, y=y, width_px=width_px, height_px=height_px, reason=str(error))
            if self._was_good(tile):
                raise SourceError(
                    f"{bad} of {self.image!r} was read before and cannot be read any more ({error}); filling it now would change the "
                    "image within the step. Start the step again."
                ) from error
            self._bad[level, y, x] = bad
            return None
        self._note_good(tile)
        return pixels

    def _has_bad(self, rectangle: Rectangle) -> bool:
        """True if a rectangle touches tiles that were filled before. In a file without tiles each read determines the loss again."""
        if self.level_tiles_px[rectangle.level] is None or not self._bad:
            return False
        return any(self._key(tile) in self._bad for tile in self._tiles(rectangle))

    def _note_good(self, rectangle: Rectangle) -> None:
        level = rectangle.level
        tile, (width_px, height_px) = self.level_tiles_px[level], self.level_dimensions[level]
        if tile is None:
            return
        if level not in self._good:
            self._good[level] = np.zeros((-(-height_px // tile[1]), -(-width_px // tile[0])), np.bool_)
        rows, columns = rectangle.cells(tile)
        self._good[level][rows.start : rows.stop, columns.start : columns.stop] = True

    def _was_good(self, tile: Rectangle) -> bool:
        size = self.level_tiles_px[tile.level]
        if size is None or tile.level not in self._good:
            return False
        rows, columns = tile.cells(size)
        return bool(self._good[tile.level][rows.start, columns.start])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bad": self._bad.copy()}
