"""Image interfaces: rectangles of pixels, levels, resolution.

An `Image` is any object with a size and a ``read`` that returns one rectangle of pixels. Slides, arrays and a user's own reader plug in
alike, without inheritance. Two rules hold for all of them:

*Out of bounds is an error.* Readers disagree about pixels outside the image: OpenSlide returns transparent ones (black once the alpha
channel is dropped), cuCIM white ones, others a smaller array. Each would silently change the border of a convolution, so a rectangle that
is not inside the image raises ``InputError``.

*Full rows in order.* An image is read in strips of full rows from the top, the order of the strip sweep, so each compressed tile is
decoded once (twice at a strip boundary, unless the reader's cache still has it).

A `Raster` is an `Image` that also knows its levels, its resolution, its background and its compressed tiles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from operator import index
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from sft.common.errors import InputError, SourceError
from sft.common.installation import install_command
from sft.common.interval import Interval
from sft.common.legacy_names import restore_fields
from sft.sources.georeference import Georeference

__all__ = [
    "MAX_SLIDE_MPP",
    "WHITE",
    "Image",
    "ImageFacts",
    "LevelledImage",
    "Pixels",
    "Raster",
    "Rectangle",
    "Size",
    "StatedResolution",
    "check_level",
    "check_region",
    "dtype_range",
    "missing_extra",
    "pixel_dtype",
    "read_strips",
    "valid_mpp",
]

#: Pixels of one rectangle, height x width x channels, of the image's element type (`pixel_dtype`).
Pixels = npt.NDArray[Any]
#: (width, height) in px.
Size = tuple[int, int]
WHITE = (255, 255, 255)


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
        """Read the rectangle of `w` x `h` pixels with its top left corner at column `x`, row `y` of `level`.

        Returns:
            Array of shape ``[h, w, channels]``: uint8, or of the type that the image states in its attribute ``dtype``.

        Raises:
            InputError: the rectangle is not inside the image.
            SourceError: the pixels cannot be read.
        """
        ...


def pixel_dtype(image: object) -> np.dtype[Any]:
    """Element type of an image's pixels: its attribute ``dtype``, uint8 without one.

    >>> pixel_dtype(object())
    dtype('uint8')
    """
    stated = getattr(image, "dtype", None)
    return stated if isinstance(stated, np.dtype) else np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Some columns and rows of one level of an image.

    >>> rectangle = Rectangle.of(3, 4, 10, 20, level=1)
    >>> str(rectangle), rectangle.shape
    ('columns [3, 13) and rows [4, 24) of level 1', (20, 10))
    >>> rectangle.intersect(Rectangle.of(0, 0, 5, 6, level=1)).slices_in(rectangle)
    (slice(0, 2, None), slice(0, 2, None))
    """

    columns: Interval
    rows: Interval
    level: int = 0

    @classmethod
    def of(cls, x: int, y: int, w: int, h: int, level: int = 0) -> Rectangle:
        """The rectangle with the arguments of `Image.read`; NumPy integers become Python integers."""
        x, y = index(x), index(y)
        return cls(Interval(x, x + index(w)), Interval(y, y + index(h)), index(level))

    def __str__(self) -> str:
        columns, rows = self.columns, self.rows
        return f"columns [{columns.start}, {columns.stop}) and rows [{rows.start}, {rows.stop}) of level {self.level}"

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """Left column, upper row, width and height: the first arguments of `Image.read`."""
        return self.columns.start, self.rows.start, len(self.columns), len(self.rows)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and of columns: the shape of an array of the pixels."""
        return len(self.rows), len(self.columns)

    def intersect(self, other: Rectangle) -> Rectangle:
        """The pixels in both."""
        return Rectangle(self.columns.intersect(other.columns), self.rows.intersect(other.rows), self.level)

    def shift(self, x: int, y: int) -> Rectangle:
        """The rectangle translated by `x` columns and `y` rows."""
        return Rectangle(self.columns.shift(x), self.rows.shift(y), self.level)

    @property
    def slices(self) -> tuple[slice, slice]:
        """Index of the pixels in an array of the level."""
        return slice(self.rows.start, self.rows.stop), slice(self.columns.start, self.columns.stop)

    def slices_in(self, outer: Rectangle) -> tuple[slice, slice]:
        """Index of the pixels in an array of the pixels of `outer`."""
        return self.shift(-outer.columns.start, -outer.rows.start).slices

    def cells(self, cell_px: Size) -> tuple[range, range]:
        """Numbers of the rows and of the columns of cells that overlap, in a grid of cells of (width, height).

        >>> Rectangle.of(3, 4, 10, 20).cells((5, 8))
        (range(0, 3), range(0, 3))
        """
        (width, height), columns, rows = cell_px, self.columns, self.rows
        return range(rows.start // height, -(-rows.stop // height)), range(columns.start // width, -(-columns.stop // width))

    def read(self, image: Image) -> Pixels:
        """The pixels of an image.

        Raises:
            InputError, SourceError: as `Image.read`.
        """
        return image.read(*self.arguments, self.level) if self.level else image.read(*self.arguments)

    def check_inside(self, name: str, size: Size) -> None:
        """Refuse a rectangle that is empty or not wholly inside a level of this size.

        Raises:
            InputError: the rectangle is empty or reaches outside.
        """
        columns, rows, (width_px, height_px) = self.columns, self.rows, size
        if not columns or not rows:
            raise InputError(
                f"cannot read {columns.stop - columns.start} x {rows.stop - rows.start} px of {name}: a rectangle has at least one pixel. "
                "Give w >= 1 and h >= 1."
            )
        if not Interval(0, width_px).contains(columns) or not Interval(0, height_px).contains(rows):
            raise InputError(
                f"cannot read columns [{columns.start}, {columns.stop}) and rows [{rows.start}, {rows.stop}) of {name}: it is "
                f"{width_px} px wide and {height_px} px high. Clip the rectangle to the image; pixels outside it have no value."
            )


def check_region(name: str, x: int, y: int, w: int, h: int, width_px: int, height_px: int) -> None:
    """Refuse a rectangle that is empty or not wholly inside an image of `width_px` x `height_px`.

    >>> check_region("scan", 0, 0, 10, 10, width_px=10, height_px=10)
    >>> check_region("scan", 5, 0, 10, 10, width_px=10, height_px=10)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    sft.common.errors.InputError: cannot read columns [5, 15) and rows [0, 10) of scan: it is 10 px wide ...

    Raises:
        InputError: the rectangle is empty or reaches outside.
    """
    Rectangle.of(x, y, w, h).check_inside(name, (width_px, height_px))


def read_strips(image: Image, rows: int) -> Iterator[Pixels]:
    """Read `image` from top to bottom in full-width strips of `rows` rows; the last strip may be lower.

    Raises:
        InputError: `rows` is not positive.
        SourceError: the pixels cannot be read.
    """
    if rows < 1:
        raise InputError(f"cannot read strips of {rows} rows: a strip has at least one row. Give rows >= 1.")
    # A separate generator, so that a wrong `rows` raises here and not at the first use of the iterator.
    return _strips(image, rows)


def _strips(image: Image, rows: int) -> Iterator[Pixels]:
    for top in range(0, image.height_px, rows):
        yield image.read(0, top, image.width_px, min(rows, image.height_px - top))


def dtype_range(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Smallest and largest value of a pixel type; infinities for floating-point types.

    >>> dtype_range(np.dtype("int16")), dtype_range(np.dtype("float32"))
    ((-32768, 32767), (-inf, inf))
    """
    if dtype.kind == "f":
        return -inf, inf
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


@runtime_checkable
class Raster(Image, Protocol):
    """An image with levels and a resolution. ``level=0`` always is what ``width_px`` and ``height_px`` describe."""

    @property
    def num_channels(self) -> int:
        """Numbers of a pixel: 3 (RGB) or 1 (grey), in general."""
        ...

    @property
    def level_dimensions(self) -> tuple[Size, ...]:
        """(width, height) of each level, in px."""
        ...

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """Px of level 0 per px of each level; the first is 1."""
        ...

    @property
    def mpp(self) -> tuple[float, float] | None:
        """Micrometres per px of level 0, (x, y); None if the file does not state it."""
        ...

    @property
    def background(self) -> tuple[Any, ...]:
        """Colour of pixels that were not recorded."""
        ...

    @property
    def level_tiles_px(self) -> tuple[Size | None, ...]:
        """(width, height) of a compressed tile of each level; None for a level without tiles or an unknown size."""
        ...

    @property
    def tile_height_px(self) -> int | None:
        """Rows of a compressed tile of level 0."""
        ...

    def close(self) -> None:
        """Let go of the file; a later read opens it again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """Metadata of an image file."""

    level_dimensions: tuple[Size, ...]  #: (width, height) of each level, in px
    tiles_px: tuple[Size | None, ...]  #: (width, height) of a compressed tile of each level
    num_channels: int
    mpp: tuple[float, float] | None = None  #: micrometres per px of level 0, (x, y)
    background: tuple[Any, ...] = WHITE  #: of pixels that are not stored, one number a channel
    nodata: float | None = None  #: value of pixels without data, as the file has it
    mpp_note: str = ""  #: reason against a resolution that the file states
    georeference: Georeference | None = None  #: of level 0
    dtype: str = "uint8"  #: element type of the pixels
    channel_names: tuple[str, ...] = ()  #: one name a channel, where the file has names
    cost_note: str = ""  #: cost of a read, if it is more than decoding its pixels

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Restore a pickle; one of an older release lacks the last fields."""
        restore_fields(self, state)

    def __post_init__(self) -> None:
        assert len(self.level_dimensions) == len(self.tiles_px) >= 1
        assert len(self.background) == self.num_channels >= 1

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """The mean of both axes' ratios, as OpenSlide has it."""
        width, height = self.level_dimensions[0]
        return tuple((width / w + height / h) / 2 for w, h in self.level_dimensions)


class LevelledImage(ABC):
    """Base of rasters: size and tile height of level 0 by the levels, and a context manager that closes the file."""

    @property
    @abstractmethod
    def level_dimensions(self) -> tuple[Size, ...]:
        """(width, height) of each level, in px."""

    @property
    @abstractmethod
    def level_tiles_px(self) -> tuple[Size | None, ...]:
        """(width, height) of a compressed tile of each level."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file; a later read opens it again."""

    @property
    def width_px(self) -> int:
        """Number of pixel columns."""
        return self.level_dimensions[0][0]

    @property
    def height_px(self) -> int:
        """Number of pixel rows."""
        return self.level_dimensions[0][1]

    @property
    def tile_height_px(self) -> int | None:
        """Rows of a compressed tile, the smallest unit that is decoded."""
        tile = self.level_tiles_px[0]
        return None if tile is None else tile[1]

    def _rectangle(self, x: int, y: int, w: int, h: int, level: int) -> Rectangle:
        """The rectangle of a read.

        Raises:
            InputError: the level does not exist or the rectangle is not inside it.
        """
        rectangle = Rectangle.of(x, y, w, h, level)
        check_level(repr(self), rectangle.level, len(self.level_dimensions))
        rectangle.check_inside(f"{self} at level {rectangle.level}", self.level_dimensions[rectangle.level])
        return rectangle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_level(name: str, level: int, num_levels: int) -> None:
    """Refuse a level that does not exist.

    Raises:
        InputError: the level does not exist.
    """
    if not 0 <= level < num_levels:
        raise InputError(f"cannot read level {level} of {name}: it has levels 0 to {num_levels - 1}. Choose one of them.")


def valid_mpp(x: float | None, y: float | None) -> tuple[float, float] | None:
    """Micrometres per pixel as files state them, or None where that is not a resolution.

    >>> valid_mpp(0.25, 0.25), valid_mpp(0.0, 0.25), valid_mpp(float("inf"), 1.0), valid_mpp(None, 1.0)
    ((0.25, 0.25), None, None, None)
    """
    return (x, y) if x is not None and y is not None and all(isfinite(value) and value > 0 for value in (x, y)) else None


#: The coarsest resolution of a slide's largest level, in µm/px: that of a 0.5x overview. Programs write 72 dpi (353 µm/px) by default.
MAX_SLIDE_MPP = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedResolution:
    """Resolution that a file states for its largest level, as far as it is credible.

    >>> StatedResolution.of(0.25, 0.25).mpp, StatedResolution.of(None, 0.25).note
    ((0.25, 0.25), '')
    >>> StatedResolution.of(25_400 / 72, 25_400 / 72)
    StatedResolution(mpp=None, note='the file states 352.778 µm/px (72 dpi), the default of a program and not the resolution of a slide')

    Attributes:
        mpp: micrometres per px, (x, y); None where the file states none, or none that is credible.
        note: reason against a stated value; empty otherwise.
    """

    mpp: tuple[float, float] | None = None
    note: str = ""

    @classmethod
    def of(cls, x: float | None, y: float | None) -> StatedResolution:
        """The resolution of stated values, which may be missing, zero or infinite."""
        mpp = valid_mpp(x, y)
        if mpp is None or max(mpp) <= MAX_SLIDE_MPP:
            return cls(mpp=mpp)
        size = f"{mpp[0]:g}" if mpp[0] == mpp[1] else f"{mpp[0]:g} x {mpp[1]:g}"
        dpi = f"{25_400 / max(mpp):.4g} dpi"
        return cls(note=f"the file states {size} µm/px ({dpi}), the default of a program and not the resolution of a slide")


def missing_extra(purpose: str, extra: str, error: Exception) -> SourceError:
    """Error for an optional library that is not installed."""
    return SourceError(f"cannot {purpose}: a library is missing ({error}). Install it with: {install_command(extra)}")
