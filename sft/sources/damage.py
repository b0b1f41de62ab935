"""What to do about a place of a slide that cannot be read: stop, leave the slide out, or go on with background and say where.

``"raise"`` is right while a data set is put together. ``"skip"`` turns every failure into `sft.SkipSlideError`, which a training loop
catches to go on with the next slide; a step of `sft` that fails leaves parameters, gradients and statistics as they were. ``"fill"`` puts
the background colour where tiles cannot be decoded, and keeps a list: other pixels than the scanner's are a decision, so it must be
asked for and must be visible afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from sft.errors import InputError, SkipSlideError, SourceError
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
    reason: str  #: what the reader said

    def __str__(self) -> str:
        return f"level {self.level}, columns [{self.x}, {self.x + self.width_px}), rows [{self.y}, {self.y + self.height_px})"


def resolve_on_error(on_error: str) -> OnError:
    """The policy by its name.

    Raises:
        InputError: there is no such policy.
    """
    for known in get_args(OnError):
        if on_error == known:
            policy: OnError = known
            return policy
    raise InputError(f"cannot use on_error={on_error!r}: choose one of {', '.join(map(repr, get_args(OnError)))}.")


class Tolerant(RasterView):
    """An image with a policy for what cannot be read.

    Args:
        image: of any kind.
        on_error: ``"skip"`` raises `sft.SkipSlideError`; ``"fill"`` puts the background colour in place of whole tiles of the file, always
            of the same ones, whatever rectangle is asked for; ``"raise"`` changes nothing.

    Raises:
        InputError: there is no such policy.
    """

    def __init__(self, image: Image, on_error: OnError) -> None:
        super().__init__(image)
        self.on_error: OnError = resolve_on_error(on_error)
        # Two threads that meet the same tile write the same entry.
        self._bad: dict[tuple[int, int, int], BadTile] = {}

    def __repr__(self) -> str:
        return f"Tolerant({self.image!r}, {self.on_error!r})"

    @property
    def bad_tiles(self) -> tuple[BadTile, ...]:
        """The tiles that were filled so far, by level, row and column."""
        return tuple(tile for _, tile in sorted(self._bad.copy().items()))

    def _read(self, x: int, y: int, w: int, h: int, level: int) -> Pixels:
        try:
            return self.image.read(x, y, w, h, level)
        except SourceError as error:
            if self.on_error == "raise":
                raise
            if self.on_error == "skip":
                raise SkipSlideError(f"{error} (on_error='skip': leave this slide out)") from error
        return self._filled(x, y, w, h, level)

    def _filled(self, x: int, y: int, w: int, h: int, level: int) -> Pixels:
        """Tile by tile, so that only what is damaged is lost."""
        width_px, height_px = self.level_dimensions[level]
        tile_w, tile_h = self.level_tiles_px[level] or (_FALLBACK_TILE_PX, _FALLBACK_TILE_PX)
        out = np.empty((h, w, self.num_channels), np.uint8)
        for top in _edges(y, h, tile_h):
            for left in _edges(x, w, tile_w):
                part = (slice(max(top, y) - y, min(top + tile_h, y + h) - y), slice(max(left, x) - x, min(left + tile_w, x + w) - x))
                whole_w, whole_h = min(tile_w, width_px - left), min(tile_h, height_px - top)
                known = (level, top, left) in self._bad
                pixels = None if known else self._tile(left, top, whole_w, whole_h, level)
                if pixels is None:
                    out[part] = self.background
                else:
                    out[part] = pixels[max(top, y) - top : y + h - top, max(left, x) - left : x + w - left]
        return out

    def _tile(self, x: int, y: int, w: int, h: int, level: int) -> Pixels | None:
        try:
            return self.image.read(x, y, w, h, level)
        except SourceError as error:
            self._bad[level, y, x] = BadTile(level=level, x=x, y=y, width_px=w, height_px=h, reason=str(error))
            return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bad": self._bad.copy()}


def _edges(start: int, extent: int, tile_px: int) -> Iterator[int]:
    yield from range(start - start % tile_px, start + extent, tile_px)
