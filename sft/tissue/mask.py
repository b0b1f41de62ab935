"""Tissue masks, and slides masked by them.

A `TissueMask` has one pixel per square of the slide, so it is small: a slide of 100,000 px at 64 px each takes 2 MB. A pixel of the slide
is tissue if the mask's pixel under its centre is.

`Masked` paints the pixels outside the mask in one constant colour, strip by strip. Tiles without tissue are not decoded. A convolution of
the background is not zero, but it is the same for every slide, whatever glass, ink and dirt it shows. The result is a function of the
slide and the mask alone, so training is exact on the masked image.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sft.common.array_types import BoolArray
from sft.common.atomic_files import atomic_write
from sft.common.errors import InputError, SourceError, reason_text, typed
from sft.common.interval import Interval
from sft.sources.image import Image, Pixels, Rectangle, dtype_range, missing_extra
from sft.sources.labels import size_problem
from sft.sources.views import Cropped, OneLevelView
from sft.tissue.polygons import MaskArray, Regions, check_overlap

__all__ = ["Box", "Masked", "TissueMask", "crop_to_tissue"]

Indices = npt.NDArray[np.int64]

_SIZE_KEY = "sft-slide-size"
#: The largest PNG that is believed to be a mask.
_MAX_PIXELS = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of a slide, in px of level 0."""

    x: int  #: left column
    y: int  #: upper row
    w: int  #: columns
    h: int  #: rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TissueMask:
    """Boolean mask of the tissue of a slide, at a lower resolution than the slide.

    >>> mask = TissueMask(pixels=np.array([[False, True], [False, False]]), width_px=8, height_px=6)
    >>> mask.bounding_box(), mask.region(2, 1, 4, 3).astype(int).tolist()
    (Box(x=4, y=0, w=4, h=3), [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]])

    Attributes:
        pixels: bool ``[rows, columns]``, True for tissue; it covers the full slide.
        width_px: columns of the slide at level 0.
        height_px: rows of the slide at level 0.
    """

    pixels: MaskArray
    width_px: int
    height_px: int

    def __post_init__(self) -> None:
        shape = self.pixels.shape
        if len(shape) != 2 or self.pixels.dtype != np.bool_ or min(shape) < 1:
            raise InputError(f"cannot use a mask of shape {shape} and {self.pixels.dtype}: give bool [rows, columns], not empty.")
        if shape[1] > self.width_px or shape[0] > self.height_px:
            raise InputError(
                f"cannot use a mask of {shape[1]} x {shape[0]} px for a slide of {self.width_px} x {self.height_px}: it is larger."
            )

    @classmethod
    def from_regions(cls, regions: Regions, *, width_px: int, height_px: int, downsample: int = 16) -> TissueMask:
        """Polygons as a mask: a pixel of it is tissue if its centre is inside.

        Args:
            regions: in px of level 0.
            width_px: width of the slide.
            height_px: height of the slide.
            downsample: px of the slide per px of the mask, about. Default: 16

        Raises:
            InputError: a size or a downsample below 1, or all polygons are outside of the slide.
        """
        if min(width_px, height_px, downsample) < 1:
            raise InputError(f"cannot make a mask of {width_px} x {height_px} px at 1/{downsample}: each must be at least 1.")
        check_overlap([regions], width_px=width_px, height_px=height_px, purpose=f"cannot make a mask of {width_px} x {height_px} px")
        columns, rows = -(-width_px // downsample), -(-height_px // downsample)
        pixels = regions.region(0, 0, columns, rows, step=(width_px / columns, height_px / rows))
        return cls(pixels=pixels, width_px=width_px, height_px=height_px)

    def at(self, width_px: int, height_px: int) -> TissueMask:
        """The same mask for the same slide at another resolution, of so many columns and rows.

        Raises:
            InputError: it has fewer than the mask, or the sides have another ratio.
        """
        problem = size_problem(*sorted(((width_px, height_px), (self.width_px, self.height_px))))
        if problem is not None:
            raise InputError(
                f"cannot use a mask of a slide of {self.width_px} x {self.height_px} px for {width_px} x {height_px} px: {problem}. Give "
                "the size of the same slide at another resolution."
            )
        return replace(self, width_px=width_px, height_px=height_px)

    @property
    def step(self) -> tuple[float, float]:
        """Px of the slide per px of the mask, (x, y)."""
        return self.width_px / self.pixels.shape[1], self.height_px / self.pixels.shape[0]

    @property
    def share(self) -> float:
        """The share of the slide that is tissue, in 0..1."""
        return float(self.pixels.mean())

    def region(self, x: int, y: int, w: int, h: int) -> MaskArray:
        """Mask of a rectangle of the slide, bool ``[h, w]``."""
        rows, columns = self.pixels.shape
        row = _nearest_indices(np.arange(y, y + h), rows, self.height_px)
        column = _nearest_indices(np.arange(x, x + w), columns, self.width_px)
        return self.pixels[row[:, None], column]

    def used(self, part: Interval, *, columns: bool = False) -> MaskArray:
        """For each row of the slide whether it has tissue in the columns ``part``; with ``columns`` for each column, in the rows ``part``.

        >>> mask = TissueMask(pixels=np.array([[False, True], [False, False]]), width_px=4, height_px=4)
        >>> mask.used(Interval(0, 3)).tolist(), mask.used(Interval(2, 4), columns=True).tolist()
        ([True, True, False, False], [False, False, False, False])
        """
        pixels = self.pixels.T if columns else self.pixels
        lines_px, across_px = (self.width_px, self.height_px) if columns else (self.height_px, self.width_px)
        across = np.unique(_nearest_indices(np.arange(part.start, part.stop), pixels.shape[1], across_px))
        used: MaskArray = np.asarray(pixels[:, across].any(axis=1))
        return used[_nearest_indices(np.arange(lines_px), pixels.shape[0], lines_px)]

    def column_counts(self, rows: Interval) -> Indices:
        """Tissue px of each column of the slide in some rows.

        >>> mask = TissueMask(pixels=np.array([[False, True], [False, False]]), width_px=4, height_px=4)
        >>> mask.column_counts(Interval(1, 3)).tolist()
        [0, 0, 1, 1]
        """
        height, width = self.pixels.shape
        used, counts = np.unique(_nearest_indices(np.arange(rows.start, rows.stop), height, self.height_px), return_counts=True)
        per_column: Indices = counts @ self.pixels[used].astype(np.int64)
        return per_column[_nearest_indices(np.arange(self.width_px), width, self.width_px)]

    def bounding_box(self, *, margin_px: int = 0) -> Box | None:
        """Smallest rectangle around all tissue, with a margin inside the slide; None for a mask without tissue.

        Args:
            margin_px: in px of level 0. Default: 0
        """
        rows, columns = np.flatnonzero(self.pixels.any(axis=1)), np.flatnonzero(self.pixels.any(axis=0))
        if not len(rows):
            return None
        left, right = _edges(columns, self.pixels.shape[1], self.width_px, margin_px)
        top, bottom = _edges(rows, self.pixels.shape[0], self.height_px, margin_px)
        return Box(x=left, y=top, w=right - left, h=bottom - top)

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Write black and white pixels, and the slide's size as PNG text. An existing file is replaced when the new one is complete.

        Raises:
            SourceError: the file cannot be written, or Pillow is not installed.
        """
        image, png = _import_pillow(path)
        note = png.PngInfo()
        note.add_text(_SIZE_KEY, f"{self.width_px} {self.height_px}")
        picture = image.fromarray(self.pixels.astype(np.uint8) * np.uint8(255))
        with atomic_write(path) as temporary:
            picture.save(temporary, format="PNG", pnginfo=note)

    @classmethod
    def load_png(cls, path: str | os.PathLike[str], *, width_px: int | None = None, height_px: int | None = None) -> TissueMask:
        """Read a mask; pixels brighter than half are tissue.

        Args:
            path: of a PNG.
            width_px: width of the slide, for files of other programs, which do not state it. Default: `None`
            height_px: its height, likewise. Default: `None`

        Raises:
            InputError: the size of the slide is not known, or the given one has another ratio than the mask.
            SourceError: the file cannot be read.
        """
        image, _ = _import_pillow(path)
        try:
            with image.open(path) as picture:
                if picture.width * picture.height > _MAX_PIXELS:
                    raise ValueError(f"{picture.width} x {picture.height} px are too large for a mask")
                stated = str(picture.info.get(_SIZE_KEY, "")).split()
                pixels = np.asarray(picture.convert("L")) > 127
        except Exception as error:  # a damaged file raises almost anything
            raise SourceError(f"cannot read the mask {path}: {reason_text(error)}. Write it again, or copy it again.") from error
        if width_px is None or height_px is None:
            if len(stated) != 2 or not all(text.isdigit() for text in stated):
                raise InputError(f"cannot use the mask {path}: it does not say the slide's size. Give width_px and height_px.")
            width_px, height_px = map(int, stated)
        elif problem := size_problem((pixels.shape[1], pixels.shape[0]), (width_px, height_px)):
            raise InputError(
                f"cannot use the mask {path} of {pixels.shape[1]} x {pixels.shape[0]} px for a slide of {width_px} x {height_px} px: "
                f"{problem}. Give the mask of this slide."
            )
        return cls(pixels=pixels, width_px=width_px, height_px=height_px)


def _nearest_indices(px: Indices, extent: int, size_px: int) -> Indices:
    """The mask's row (or column) under the centre of each of the slide's: floor((px + 1/2) extent / size), in integers."""
    return (2 * px + 1) * extent // (2 * size_px)


def _edges(used: Indices, extent: int, size_px: int, margin_px: int) -> tuple[int, int]:
    """Range of slide pixels under the used mask pixels: first and end, with a margin."""
    first, last = int(used[0]), int(used[-1]) + 1
    # The smallest px with (2 px + 1) extent >= 2 size index.
    left, right = (max(0, -(-(2 * size_px * index - extent) // (2 * extent))) for index in (first, last))
    return max(0, left - margin_px), min(size_px, right + margin_px)


def _import_pillow(path: object) -> tuple[Any, Any]:
    try:
        from PIL import Image, PngImagePlugin
    except ImportError as error:
        raise missing_extra(f"use {path}", "tissue", error) from error
    return Image, PngImagePlugin


#: Pixels of a mask that are looked up at a time.
_PIECE_PX = 1 << 22


@runtime_checkable
class _HasRegion(Protocol):
    def region(self, x: int, y: int, w: int, h: int) -> MaskArray: ...


class Masked(OneLevelView):
    """Image in which all pixels outside a mask have one colour.

    Columns of tiles without tissue are not read if the image states the width of its tiles. Mask first, then crop, then
    `sft.sources.Cached`: in another order the result is the same, but the widths of tiles are no longer known.

    Args:
        image: of any kind; its level 0 is masked.
        mask: a `TissueMask` of an image of this size (then at any resolution), `Regions` in px of this image, or an object with
            ``region(x, y, w, h)``.
        background: colour, one number a channel. Default: `None` (the image's own)

    Raises:
        InputError: the mask is of another slide, all polygons are outside of the image, or the colour has the wrong number of channels.
    """

    def __init__(self, image: Image, mask: _HasRegion, *, background: tuple[Any, ...] | None = None) -> None:
        super().__init__(image)
        if not isinstance(mask, _HasRegion):
            raise InputError(f"cannot mask {image} with {typed(mask)}: give a TissueMask or Regions.")
        if isinstance(mask, TissueMask) and (mask.width_px, mask.height_px) != (image.width_px, image.height_px):
            raise InputError(
                f"cannot mask {image} ({image.width_px} x {image.height_px} px): the mask is of a slide of {mask.width_px} x "
                f"{mask.height_px} px. At another resolution of the same slide, give mask.at(width_px, height_px)."
            )
        if isinstance(mask, Regions):
            check_overlap([mask], width_px=image.width_px, height_px=image.height_px, purpose=f"cannot mask {image}")
        self.mask = mask
        self._known: dict[tuple[Interval, bool], BoolArray] = {}
        self._background = super().background if background is None else tuple(background)
        low, high = dtype_range(self.dtype)
        if len(self._background) != self.num_channels or any(value < low or value > high for value in self._background):
            raise InputError(f"cannot paint {image} with {self._background}: give {self.num_channels} numbers of {low} to {high}.")

    @property
    def background(self) -> tuple[Any, ...]:
        """Colour outside the mask."""
        return self._background

    def repeated(self, part: Interval, *, columns: bool = False) -> BoolArray:
        """Lines outside of the mask that follow one another, as both have the background's colour; see `RepeatingImage`."""
        empty = ~(self.mask.used(part, columns=columns) if isinstance(self.mask, TissueMask) else self._used(part, columns=columns))
        repeated: BoolArray = np.concatenate([[False], empty[1:] & empty[:-1]])
        return repeated

    def _used(self, part: Interval, *, columns: bool) -> BoolArray:
        """Rows with tissue in the columns ``part``; with ``columns``, columns with tissue in the rows ``part``."""
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

    def _read(self, rectangle: Rectangle) -> Pixels:
        inside = self.mask.region(*rectangle.arguments)
        out = np.empty((*rectangle.shape, self.num_channels), self.dtype)
        out[:] = self._background
        for columns in self._runs(np.asarray(inside.any(axis=0)), rectangle.columns):
            piece = replace(rectangle, columns=columns)
            place = piece.slices_in(rectangle)
            np.copyto(out[place], piece.read(self.image), where=inside[place][..., None])
        return out

    def _runs(self, used: MaskArray, columns: Interval) -> list[Interval]:
        """Stretches of columns to read: whole tiles, neighbours together, cut to the rectangle."""
        if not used.any():
            return []
        tile = self._tile_px()
        if tile is None:
            return [columns]
        tiles = np.unique((np.flatnonzero(used) + columns.start) // tile[0])
        breaks = np.flatnonzero(np.diff(tiles) > 1) + 1
        stretches = np.split(tiles, breaks)
        return [columns.intersect(Interval(int(run[0]) * tile[0], (int(run[-1]) + 1) * tile[0])) for run in stretches]


def crop_to_tissue(image: Image, mask: TissueMask, *, margin_px: int = 0, background: tuple[int, ...] | None = None) -> Cropped:
    """Mask a slide and crop it to the bounding box of its tissue.

    Args:
        image: of any kind.
        mask: of this image.
        margin_px: around the tissue, inside the slide. Default: 0
        background: colour outside the mask, one number a channel. Default: `None` (the image's own)

    Raises:
        InputError: the mask is of another slide, or has no tissue.
    """
    box = mask.bounding_box(margin_px=margin_px)
    if box is None:
        raise InputError(f"cannot crop {image} to its tissue: the mask has none. Look at the slide; leave it out, or give a mask by hand.")
    return Cropped(Masked(image, mask, background=background), x=box.x, y=box.y, w=box.w, h=box.h)
