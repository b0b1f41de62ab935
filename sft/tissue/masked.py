"""A slide with everything but its tissue painted over, strip by strip; what is painted over is not decoded.

What the network then sees outside the tissue is one constant colour: not "nothing" (a convolution of background is not zero), but the same
for every slide, whatever glass, ink and dirt there were. The result is a function of the slide and the mask alone, so it is exact in the
same sense as everything else: training on it is training on that masked image.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from sft.analysis.interval import Interval
from sft.errors import InputError
from sft.sources.image import Image, Pixels
from sft.sources.repeating import BoolArray
from sft.sources.views import Cropped, OneLevelView
from sft.tissue.mask import TissueMask
from sft.tissue.regions import MaskArray

__all__ = ["Masked", "crop_to_tissue"]


#: Pixels of a mask that are looked up at a time.
_PIECE_PX = 1 << 22


@runtime_checkable
class _HasRegion(Protocol):
    def region(self, x: int, y: int, w: int, h: int) -> MaskArray: ...


class Masked(OneLevelView):
    """An image in which everything outside a mask has one colour.

    Only columns of tiles that hold something of the mask are read, where the image says how wide its tiles are. So mask first, then crop,
    then `sft.sources.Cached`: the other way round works, too, but tiles are no longer known there.

    Args:
        image: of any kind; its level 0 counts.
        mask: a `TissueMask` of an image of this size (then it may be of any resolution), `Regions` in px of this image, or anything else
            with ``region(x, y, w, h)``.
        background: colour, one number a channel. Default: `None` (the image's own)

    Raises:
        InputError: the mask is of another slide, or the colour has the wrong number of channels.
    """

    def __init__(self, image: Image, mask: _HasRegion, *, background: tuple[int, ...] | None = None) -> None:
        super().__init__(image)
        if not isinstance(mask, _HasRegion):
            raise InputError(f"cannot mask {image} with a {type(mask).__name__}: give a TissueMask or Regions.")
        if isinstance(mask, TissueMask) and (mask.width_px, mask.height_px) != (image.width_px, image.height_px):
            raise InputError(
                f"cannot mask {image} ({image.width_px} x {image.height_px} px): the mask is of a slide of {mask.width_px} x "
                f"{mask.height_px} px. At another resolution of the same slide, give mask.at(width_px, height_px)."
            )
        self.mask = mask
        self._known: dict[tuple[Interval, bool], BoolArray] = {}
        self._background = super().background if background is None else tuple(background)
        if len(self._background) != self.num_channels or not all(0 <= value <= 255 for value in self._background):
            raise InputError(f"cannot paint {image} with {self._background}: give {self.num_channels} numbers of 0 to 255.")

    def __repr__(self) -> str:
        return f"Masked({self.image!r})"

    @property
    def background(self) -> tuple[int, ...]:
        """Colour outside the mask."""
        return self._background

    def repeated(self, part: Interval, *, columns: bool = False) -> BoolArray:
        """Lines outside of the mask that follow one another, as both have the background's colour; see `RepeatingImage`."""
        empty = ~(self.mask.used(part, columns=columns) if isinstance(self.mask, TissueMask) else self._used(part, columns=columns))
        found: BoolArray = np.concatenate([[False], empty[1:] & empty[:-1]])
        return found

    def _used(self, part: Interval, *, columns: bool) -> BoolArray:
        """For each row whether the mask has something of it in the columns ``part``; with ``columns`` the other way round."""
        if (part, columns) not in self._known:
            extent = self.width_px if columns else self.height_px
            step = max(1, _PIECE_PX // max(1, len(part)))
            pieces = []
            for first in range(0, extent, step):
                count = min(step, extent - first)
                box = (first, part.start, count, len(part)) if columns else (part.start, first, len(part), count)
                pieces.append(np.asarray(self.mask.region(*box).any(axis=0 if columns else 1)))
            self._known[part, columns] = np.concatenate(pieces)
        return self._known[part, columns]

    def _read(self, x: int, y: int, w: int, h: int, level: int) -> Pixels:
        inside = self.mask.region(x, y, w, h)
        out = np.empty((h, w, self.num_channels), np.uint8)
        out[:] = self._background
        for left, right in self._runs(np.asarray(inside.any(axis=0)), x):
            part = inside[:, left - x : right - x]
            np.copyto(out[:, left - x : right - x], self.image.read(left, y, right - left, h), where=part[..., None])
        return out

    def _runs(self, used: MaskArray, x: int) -> list[tuple[int, int]]:
        """Stretches of columns to read, ``[left, right)``: whole tiles, neighbours together, cut to the rectangle."""
        columns = np.flatnonzero(used) + x
        if not len(columns):
            return []
        tile = self._tile_px()
        if tile is None:
            return [(x, x + len(used))]
        tiles = np.unique(columns // tile[0])
        breaks = np.flatnonzero(np.diff(tiles) > 1) + 1
        stretches = np.split(tiles, breaks)
        return [(max(x, int(run[0]) * tile[0]), min(x + len(used), (int(run[-1]) + 1) * tile[0])) for run in stretches]


def crop_to_tissue(image: Image, mask: TissueMask, *, margin_px: int = 0, background: tuple[int, ...] | None = None) -> Cropped:
    """The tissue of a slide: masked, and cropped to where the mask is.

    Args:
        image: of any kind.
        mask: of this image.
        margin_px: around the tissue, inside the slide. Default: 0
        background: colour outside the mask, one number a channel. Default: `None` (the image's own)

    Raises:
        InputError: the mask is of another slide, or there is no tissue in it.
    """
    box = mask.bounding_box(margin_px=margin_px)
    if box is None:
        raise InputError(f"cannot crop {image} to its tissue: the mask has none. Look at the slide; leave it out, or give a mask by hand.")
    return Cropped(Masked(image, mask, background=background), x=box.x, y=box.y, w=box.w, h=box.h)
