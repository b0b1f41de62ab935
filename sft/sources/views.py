"""Image views: lazy wrappers that change one property of an image and forward the remaining ones.

Views nest in any order, store no pixels of their own (except `sft.sources.Cached`), and pickle if the underlying image does.
"""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import Any

import numpy as np

from sft.common.array_types import BoolArray
from sft.common.errors import InputError, typed
from sft.common.interval import Interval
from sft.sources.georeference import Georeference
from sft.sources.image import WHITE, Image, LevelledImage, Pixels, Rectangle, Size, check_level, pixel_dtype, valid_mpp
from sft.sources.row_blocks import RowBlocks
from sft.sources.source import image_equal_rows

__all__ = ["AtLevel", "Cropped", "OneLevelView", "RasterView", "WithMpp", "resolve_mpp"]


class RasterView(LevelledImage):
    """Base class of views: a `sft.sources.Raster` with the properties of another image; subclasses override the ones they change.

    A plain `sft.sources.Image` without levels, resolution or tiles gets defaults: one level, no resolution, white, three channels.

    Args:
        image: the underlying image.

    Raises:
        InputError: the argument is not an image.
    """

    def __init__(self, image: Image) -> None:
        if not isinstance(image, Image):
            raise InputError(f"cannot look at {typed(image)}: expected width_px, height_px and read(). See sft.sources.Image.")
        self.image = image

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.image!r})"

    def close(self) -> None:
        """Let go of the file below; a later read opens it again."""
        close = getattr(self.image, "close", None)
        if close is not None:
            close()

    @property
    def level_dimensions(self) -> tuple[Size, ...]:
        """(width, height) of each level, in px."""
        dimensions: tuple[Size, ...] = getattr(self.image, "level_dimensions", ((self.image.width_px, self.image.height_px),))
        return dimensions

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """Px of level 0 per px of each level."""
        downsamples: tuple[float, ...] = getattr(self.image, "level_downsamples", (1.0,))
        return downsamples

    @property
    def exact_levels(self) -> tuple[int, ...]:
        """Levels that are read without interpolation from any start; OpenSlide has others as well."""
        levels: tuple[int, ...] = getattr(self.image, "exact_levels", tuple(range(len(self.level_dimensions))))
        return levels

    @property
    def level_tiles_px(self) -> tuple[Size | None, ...]:
        """(width, height) of a compressed tile of each level."""
        tiles_px = getattr(self.image, "level_tiles_px", None)
        if tiles_px is not None:
            tiles: tuple[Size | None, ...] = tiles_px
            return tiles
        rows = getattr(self.image, "tile_height_px", None)
        return ((self.image.width_px, rows) if rows else None,) * len(self.level_dimensions)

    @property
    def num_channels(self) -> int:
        """Numbers of a pixel."""
        return int(getattr(self.image, "num_channels", len(WHITE)))

    @property
    def mpp(self) -> tuple[float, float] | None:
        """Micrometres per px, (x, y)."""
        mpp: tuple[float, float] | None = getattr(self.image, "mpp", None)
        return mpp

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the pixels."""
        return pixel_dtype(self.image)

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Names of the channels; empty where the file has none."""
        names: tuple[str, ...] = getattr(self.image, "channel_names", ())
        return names

    @property
    def mask_channels(self) -> tuple[int, ...]:
        """Numbers of channels that mark valid pixels (``mask="channel"``)."""
        channels: tuple[int, ...] = getattr(self.image, "mask_channels", ())
        return channels

    @property
    def cost_note(self) -> str:
        """Cost of a read, where a file is decoded in larger units than its pixels; empty otherwise."""
        note: str = getattr(self.image, "cost_note", "")
        return note

    @property
    def background(self) -> tuple[Any, ...]:
        """Colour of pixels that were not recorded."""
        background: tuple[Any, ...] = getattr(self.image, "background", (255,) * self.num_channels)
        return background

    @property
    def mpp_note(self) -> str:
        """Reason against a resolution that the file states; empty if it states a credible one, or none."""
        note: str = getattr(self.image, "mpp_note", "")
        return note

    @property
    def nodata(self) -> float | None:
        """Value of pixels without data, as the file has it; None where it has none."""
        nodata: float | None = getattr(self.image, "nodata", None)
        return nodata

    @property
    def georeference(self) -> Georeference | None:
        """Coordinate system and transform of level 0; None for an image without one."""
        georeference: Georeference | None = getattr(self.image, "georeference", None)
        return georeference

    @property
    def bad_tiles(self) -> tuple[Any, ...]:
        """The `sft.sources.BadTile`s that were filled with the background so far."""
        tiles: tuple[Any, ...] = getattr(self.image, "bad_tiles", ())
        return tiles

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        """Read a rectangle; see `sft.sources.Image`."""
        return self._read(self._rectangle(x, y, w, h, level))

    def _read(self, rectangle: Rectangle) -> Pixels:
        """A rectangle inside its level, into a new array."""
        return rectangle.read(self.image)


class OneLevelView(RasterView):
    """View of level 0 as an image without further levels; subclasses state its size and tiles.

    A view (a rectangle, a rotation, a mask) could transform the other levels only with rounded sizes and positions.
    """

    def _size_px(self) -> Size:
        """(width, height) of the one level: those of the image."""
        return super().level_dimensions[0]

    def _tile_px(self) -> Size | None:
        """(width, height) of a compressed tile of the image's level 0, the smallest unit that is read."""
        return super().level_tiles_px[0]

    @property
    def level_dimensions(self) -> tuple[Size, ...]:
        """(width, height) of the one level."""
        return (self._size_px(),)

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """1: the view has one level."""
        return (1.0,)

    @property
    def exact_levels(self) -> tuple[int, ...]:
        """The one level."""
        return (0,)

    @property
    def level_tiles_px(self) -> tuple[Size | None, ...]:
        """(width, height) of a compressed tile of the one level."""
        return (self._tile_px(),)


class AtLevel(RasterView):
    """One level of an image as an image of its own.

    Args:
        image: with levels.
        level: index of the level.
        downsample: px of the image's level 0 per px of the level, (x, y), for the resolution. Default: `None` (the image's own)

    Raises:
        InputError: the level does not exist.
    """

    def __init__(self, image: Image, level: int, *, downsample: tuple[float, float] | None = None) -> None:
        super().__init__(image)
        check_level(repr(image), level, len(super().level_dimensions))
        self.level = level
        factor = super().level_downsamples[level]
        self._downsample = (factor, factor) if downsample is None else downsample

    def __repr__(self) -> str:
        return f"AtLevel({self.image!r}, {self.level})"

    @property
    def downsample(self) -> tuple[float, float]:
        """Px of the image's level 0 per px of the level, (x, y)."""
        return self._downsample

    @property
    def level_dimensions(self) -> tuple[Size, ...]:
        """(width, height) of the one level."""
        return (super().level_dimensions[self.level],)

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """1: the view has one level."""
        return (1.0,)

    @property
    def exact_levels(self) -> tuple[int, ...]:
        """The one level, if it is one below."""
        return (0,) if self.level in super().exact_levels else ()

    @property
    def level_tiles_px(self) -> tuple[Size | None, ...]:
        """(width, height) of a compressed tile of the level."""
        return (super().level_tiles_px[self.level],)

    @property
    def mpp(self) -> tuple[float, float] | None:
        """Micrometres per px of the level, (x, y)."""
        mpp = super().mpp
        return None if mpp is None else (mpp[0] * self._downsample[0], mpp[1] * self._downsample[1])

    @property
    def georeference(self) -> Georeference | None:
        """Coordinate system and transform of the level."""
        georeference = super().georeference
        return None if georeference is None else georeference.scaled(*self._downsample)

    def _read(self, rectangle: Rectangle) -> Pixels:
        return replace(rectangle, level=self.level).read(self.image)


class WithMpp(RasterView):
    """Image with a corrected resolution.

    Args:
        image: of any kind.
        mpp: micrometres per px of level 0; one number, or (x, y).

    Raises:
        InputError: not a resolution.
    """

    def __init__(self, image: Image, mpp: float | tuple[float, float]) -> None:
        super().__init__(image)
        self._mpp = resolve_mpp(mpp, "slide_mpp")

    @property
    def mpp(self) -> tuple[float, float] | None:
        """Micrometres per px, (x, y), as given."""
        return self._mpp


class Cropped(OneLevelView):
    """Crop: a rectangle of an image as an image with one level. Only tiles that overlap the rectangle are decoded.

    A crop rarely starts at a tile border, so the rows at the edges of a read are kept for the next one: a sweep over the crop, up or
    down, decodes every tile once.

    >>> import numpy as np
    >>> from sft.sources import ArrayImage
    >>> image = Cropped(ArrayImage(np.arange(60, dtype=np.uint8).reshape(5, 4, 3)), x=1, y=2, w=2, h=3)
    >>> (image.width_px, image.height_px), image.read(1, 0, 1, 1).tolist()
    ((2, 3), [[[30, 31, 32]]])

    Args:
        image: of any kind; its level 0 counts.
        x: column of the top left corner, in px of the image.
        y: row of the top left corner, in px of the image.
        w: number of columns.
        h: number of rows.

    Raises:
        InputError: the rectangle is not inside the image.
    """

    def __init__(self, image: Image, *, x: int, y: int, w: int, h: int) -> None:
        super().__init__(image)
        self.x, self.y, self._size = index(x), index(y), (index(w), index(h))
        Rectangle.of(self.x, self.y, *self._size).check_inside(repr(image), (image.width_px, image.height_px))
        self._blocks = RowBlocks(image, Interval(self.x, self.x + self._size[0]))

    def __repr__(self) -> str:
        w, h = self._size
        return f"Cropped({self.image!r}, x={self.x}, y={self.y}, w={w}, h={h})"

    def _size_px(self) -> Size:
        return self._size

    def _tile_px(self) -> None:
        """None: tiles do not begin where the rectangle does, and need not be known above it."""

    @property
    def georeference(self) -> Georeference | None:
        """Coordinate system and transform of the rectangle."""
        georeference = super().georeference
        return None if georeference is None else georeference.shifted(self.x, self.y)

    def close(self) -> None:
        """Let go of the file below, and of rows kept for the next read."""
        self._blocks.forget()
        super().close()

    def repeated(self, part: Interval, *, columns: bool = False) -> BoolArray:
        """Repeated rows of the underlying image; see `sft.sources.source.RepeatingImage`."""
        start, extent = (self.x, self._size[0]) if columns else (self.y, self._size[1])
        equal = image_equal_rows(self.image, part.shift(self.y if columns else self.x), columns=columns)
        return equal[start : start + extent]

    def _read(self, rectangle: Rectangle) -> Pixels:
        below = rectangle.shift(self.x, self.y)
        return self._blocks.rows(below.rows) if len(below.columns) == self.width_px else below.read(self.image)


def resolve_mpp(mpp: float | tuple[float, float], name: str) -> tuple[float, float]:
    """A resolution as the caller may write it, as (x, y).

    >>> resolve_mpp(0.5, "mpp"), resolve_mpp((0.5, 0.25), "mpp")
    ((0.5, 0.5), (0.5, 0.25))

    Raises:
        InputError: it is not one or two positive numbers.
    """
    try:
        pair = (float(mpp[0]), float(mpp[1])) if isinstance(mpp, (tuple, list)) and len(mpp) == 2 else (float(mpp), float(mpp))
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot use {name}={mpp!r}: it is micrometres per pixel. Give one number, or (x, y).") from error
    checked = valid_mpp(*pair)
    if checked is None:
        raise InputError(f"cannot use {name}={mpp!r}: it is micrometres per pixel. Give positive numbers.")
    return checked
