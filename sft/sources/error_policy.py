"""Error policies for unreadable regions of a slide: stop, skip the slide, or fill with background and record the place.

``"raise"`` is right while a data set is put together. ``"skip"`` turns every failure into `sft.SkipSlideError`, which a training loop
catches to continue with the next slide; a failing step of `sft` leaves parameters, gradients and statistics unchanged. ``"fill"`` puts the
background colour in place of tiles that cannot be decoded, and lists them: pixels other than the scanner's are a decision, so it must be
explicit and visible afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from sft.common.errors import InputError, SkipSlideError, SourceError
from sft.sources.image import Image, Pixels
from sft.sources.views import RasterView

__all__ = ["BadTile", "OnError", "Tolerant", "resolve_on_error"]

OnError: TypeAlias = Literal["raise", "skip", "fill"]

#: Where a file does not say how large its tiles are, a bad place is filled in squares of this side.
_FALLBACK_TILE_PX = 256


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

    def _read(self, x: int, y: int, w: int, h: int, level: int) -> Pixels:
        if self.on_error == "fill" and self._has_bad(x, y, w, h, level):
            return self._filled(x, y, w, h, level)
        try:
            pixels = self.image.read(x, y, w, h, level)
        except SourceError as error:
            if self.on_error == "raise":
                raise
            if self.on_error == "skip":
                raise SkipSlideError(f"{error} (on_error='skip': leave this slide out)") from error
            return self._filled(x, y, w, h, level)
        if self.on_error == "fill":
            self._note_good(x, y, w, h, level)
        return pixels

    def _filled(self, x: int, y: int, w: int, h: int, level: int) -> Pixels:
        """Read tile by tile, so that only damaged tiles are lost."""
        width_px, height_px = self.level_dimensions[level]
        tile_w, tile_h = self.level_tiles_px[level] or (_FALLBACK_TILE_PX, _FALLBACK_TILE_PX)
        out = np.empty((h, w, self.num_channels), self.dtype)
        for top in _tile_edges(y, h, tile_h):
            for left in _tile_edges(x, w, tile_w):
                rectangle = (slice(max(top, y) - y, min(top + tile_h, y + h) - y), slice(max(left, x) - x, min(left + tile_w, x + w) - x))
                whole_w, whole_h = min(tile_w, width_px - left), min(tile_h, height_px - top)
                is_damaged = (level, top, left) in self._bad
                pixels = None if is_damaged else self._tile(left, top, whole_w, whole_h, level)
                if pixels is None:
                    out[rectangle] = self.background
                else:
                    out[rectangle] = pixels[max(top, y) - top : y + h - top, max(left, x) - left : x + w - left]
        return out

    def _tile(self, x: int, y: int, w: int, h: int, level: int) -> Pixels | None:
        try:
            pixels = self.image.read(x, y, w, h, level)
        except SourceError as error:
            bad = BadTile(level=level, x=x, y=y, width_px=w, height_px=h, reason=str(error))
            if self._was_good(x, y, level):
                raise SourceError(
                    f"{bad} of {self.image!r} was read before and cannot be read any more ({error}); filling it now would change the "
                    "image within the step. Start the step again."
                ) from error
            self._bad[level, y, x] = bad
            return None
        self._note_good(x, y, w, h, level)
        return pixels

    def _has_bad(self, x: int, y: int, w: int, h: int, level: int) -> bool:
        """True if a rectangle touches tiles that were filled before. In a file without tiles each read determines the loss again."""
        tile = self.level_tiles_px[level]
        if tile is None or not self._bad:
            return False
        return any((level, top, left) in self._bad for top in _tile_edges(y, h, tile[1]) for left in _tile_edges(x, w, tile[0]))

    def _note_good(self, x: int, y: int, w: int, h: int, level: int) -> None:
        tile, (width_px, height_px) = self.level_tiles_px[level], self.level_dimensions[level]
        if tile is None:
            return
        if level not in self._good:
            self._good[level] = np.zeros((-(-height_px // tile[1]), -(-width_px // tile[0])), np.bool_)
        self._good[level][y // tile[1] : (y + h - 1) // tile[1] + 1, x // tile[0] : (x + w - 1) // tile[0] + 1] = True

    def _was_good(self, x: int, y: int, level: int) -> bool:
        tile = self.level_tiles_px[level]
        return tile is not None and level in self._good and bool(self._good[level][y // tile[1], x // tile[0]])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bad": self._bad.copy()}


def _tile_edges(start: int, extent: int, tile_px: int) -> Iterator[int]:
    yield from range(start - start % tile_px, start + extent, tile_px)
