"""Several files as one image, and some channels of an image.

- `Mosaic`: files that lie at different places of one grid of map coordinates. The pixels must coincide: same coordinate system, same size
  and direction of a pixel, and distances of whole pixels. Where files overlap, the later one counts, except where it has its nodata value.
  Between the files a pixel has the nodata value, or the background of the first file.
- `ChannelStack`: files of one place, whose channels follow each other, such as the bands of a scene or the markers of a panel.
- `ChannelSelection`: channels by number or name. Readers that store channels apart (planar TIFF, Zarr, rasters of GDAL) read only these.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isnan
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np

from sft.common.errors import InputError, some_names, typed
from sft.sources.georeference import Georeference
from sft.sources.image import Image, LevelledImage, Pixels, Rectangle, Size
from sft.sources.readers.geotiff import same_coordinate_system
from sft.sources.views import RasterView

__all__ = ["GRID_TOLERANCE_PX", "Channel", "ChannelSelection", "ChannelStack", "Mosaic", "lie_at_one_place"]

#: A channel by number or name.
Channel: TypeAlias = int | str
#: Largest distance of two grids, in pixels.
GRID_TOLERANCE_PX = 1e-3


def lie_at_one_place(images: Sequence[Image]) -> bool:
    """True if images have the same upper left corner: those of a stack; also images without map coordinates."""
    first, *others = (RasterView(image).georeference for image in images)
    if first is None or any(other is None for other in others):
        return True
    return all(other is not None and np.abs(_offset_px(first, other)).max() <= GRID_TOLERANCE_PX for other in others)


class _Composite(LevelledImage):
    """Base of images of several files with one element type.

    Args:
        images: of the files.
        names: of the files, for messages and channels.

    Raises:
        InputError: different element types.
    """

    def __init__(self, images: Sequence[Image], names: Sequence[str]) -> None:
        self.images, self.names = tuple(map(RasterView, images)), tuple(names)
        for image, name in zip(self.images, self.names, strict=True):
            if image.dtype != self.dtype:
                raise self._refusal(name, f"its pixels are {image.dtype}, and those of {self.names[0]} {self.dtype}", "Convert one of them")
            if not _same_number(image.nodata, self.nodata):
                raise self._refusal(
                    name, f"its nodata value is {image.nodata}, and that of {self.names[0]} {self.nodata}", "Write one of them again"
                )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({some_names(list(self.names))})"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the pixels."""
        return self.images[0].dtype

    @property
    def nodata(self) -> float | None:
        """Value of pixels without data, of all files."""
        return self.images[0].nodata

    @property
    def mpp(self) -> tuple[float, float] | None:
        """Micrometres per px, (x, y), of the first file."""
        return self.images[0].mpp

    @property
    def mpp_note(self) -> str:
        """Reason against a stated resolution, of the first file."""
        return self.images[0].mpp_note

    @property
    def bad_tiles(self) -> tuple[Any, ...]:
        """The `sft.sources.BadTile`s of all files that were filled so far, at their places in the files."""
        return tuple(tile for image in self.images for tile in image.bad_tiles)

    def close(self) -> None:
        """Let go of the files; a later read opens them again."""
        for image in self.images:
            image.close()

    def _refusal(self, name: str, reason: str, remedy: str) -> InputError:
        return InputError(f"cannot join {name} and {self.names[0]}: {reason}. {remedy}.")


class Mosaic(_Composite):
    """Files at different places of one grid of map coordinates, as one image of one level.

    Args:
        images: of the files, from the lowest to the one on top.
        names: of the files.

    Raises:
        InputError: other channels, element types, nodata values or coordinate systems, or pixels that do not coincide.
    """

    def __init__(self, images: Sequence[Image], names: Sequence[str]) -> None:
        super().__init__(images, names)
        first = self._georeference(0)
        offsets = []
        for number, (image, name) in enumerate(zip(self.images, self.names, strict=True)):
            if image.num_channels != self.num_channels:
                raise self._refusal(
                    name, f"it has {image.num_channels} channels, and {self.names[0]} {self.num_channels}", "Select channels"
                )
            offset = self._offset_on_grid(first, self._georeference(number), image, name)
            offsets.append(offset)
        left, top = np.min(offsets, axis=0).tolist()
        self.offsets = tuple((x - left, y - top) for x, y in offsets)
        self.georeference = first.shifted(left, top)

    @property
    def num_channels(self) -> int:
        """Numbers of a pixel."""
        return self.images[0].num_channels

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Names of the channels of the first file."""
        return self.images[0].channel_names

    @property
    def mask_channels(self) -> tuple[int, ...]:
        """Numbers of channels that mark valid pixels, of the first file."""
        return self.images[0].mask_channels

    @property
    def background(self) -> tuple[Any, ...]:
        """Value of pixels between the files."""
        return self.images[0].background

    @property
    def level_dimensions(self) -> tuple[Size, ...]:
        """(width, height) of the one level."""
        ends = [(x + image.width_px, y + image.height_px) for (x, y), image in zip(self.offsets, self.images, strict=True)]
        width, height = np.max(ends, axis=0).tolist()
        return ((width, height),)

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """1: there is one level."""
        return (1.0,)

    @property
    def level_tiles_px(self) -> tuple[Size | None, ...]:
        """(width, height) of a compressed tile, if the files agree; tiles of one file begin at its corner."""
        tiles = {image.level_tiles_px[0] for image in self.images}
        return (tiles.pop() if len(tiles) == 1 else None,)

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        """Read a rectangle; see `sft.sources.Image`."""
        rectangle = self._rectangle(x, y, w, h, level)
        out = np.empty((*rectangle.shape, self.num_channels), self.dtype)
        out[:] = self.background
        for (left, top), image in zip(self.offsets, self.images, strict=True):
            overlap = rectangle.intersect(Rectangle.of(left, top, image.width_px, image.height_px))
            if not overlap.columns or not overlap.rows:
                continue
            pixels = overlap.shift(-left, -top).read(image)
            target = out[overlap.slices_in(rectangle)]
            if self.nodata is None:
                target[:] = pixels
            else:
                has_data = ~np.isnan(pixels) if isnan(self.nodata) else pixels != self.nodata
                np.copyto(target, pixels, where=has_data)
        return out

    def _georeference(self, number: int) -> Georeference:
        georeference = self.images[number].georeference
        if georeference is None:
            raise InputError(f"cannot join {self.names[number]} with others: it has no map coordinates. Give files with a transform.")
        return georeference

    def _offset_on_grid(self, first: Georeference, other: Georeference, image: RasterView, name: str) -> tuple[int, int]:
        """Column and row of an image's corner on the grid of the first."""
        if not same_coordinate_system(first.crs_wkt, other.crs_wkt):
            raise self._refusal(name, "their coordinate systems differ", "Convert one of them (gdalwarp -t_srs)")
        size = (max(image.width_px, self.images[0].width_px), max(image.height_px, self.images[0].height_px))
        steps, other_steps = _steps(first), _steps(other)
        drift_px = np.abs(np.linalg.solve(steps, other_steps - steps) * size).max()
        if drift_px > GRID_TOLERANCE_PX:
            own, its = (_pixel_text(each) for each in (first, other))
            raise self._refusal(
                name, f"a pixel is {its}, and in {self.names[0]} {own}", "Give one of them the grid of the other (gdalwarp -tr)"
            )
        offset = _offset_px(first, other)
        whole = np.rint(offset)
        if np.abs(offset - whole).max() > GRID_TOLERANCE_PX:
            raise self._refusal(
                name,
                f"its corner is {offset[0]:.4g} columns and {offset[1]:.4g} rows from that of {self.names[0]}, which are not integers",
                "Give one of them the grid of the other (gdalwarp -tap)",
            )
        return int(whole[0]), int(whole[1])


class ChannelStack(_Composite):
    """Files of one place as one image: their channels in order.

    Args:
        images: of the files, of one size.
        names: of the files; a channel without a name gets that of its file. Default: `None` (their numbers)

    Raises:
        InputError: other sizes, element types or nodata values.
    """

    def __init__(self, images: Sequence[Image], names: Sequence[str] | None = None) -> None:
        super().__init__(images, [str(number) for number in range(len(images))] if names is None else names)
        for image, name in zip(self.images, self.names, strict=True):
            size, first = image.level_dimensions[0], self.images[0].level_dimensions[0]
            if size != first:
                coarsest = max((each.mpp[0] for each in self.images if each.mpp is not None), default=None)
                remedy = (
                    "Write them again with one size" if coarsest is None else f"Give mpp={coarsest:g}, the coarsest, to read all of them at"
                )
                text = f"it has {size[0]} x {size[1]} px, and {self.names[0]} {first[0]} x {first[1]} px"
                raise self._refusal(name, text, remedy)

    @property
    def image(self) -> Image:
        """The image of the first file; its place is that of the stack."""
        return self.images[0]

    @property
    def num_channels(self) -> int:
        """Numbers of a pixel."""
        return sum(image.num_channels for image in self.images)

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Names of the channels, or of the files."""
        names: list[str] = []
        for image, name in zip(self.images, self.names, strict=True):
            stem, count = PurePath(name).name.partition(".")[0], image.num_channels
            names += image.channel_names or ((stem,) if count == 1 else tuple(f"{stem} {number}" for number in range(count)))
        return tuple(names)

    @property
    def mask_channels(self) -> tuple[int, ...]:
        """Numbers of channels that mark valid pixels."""
        starts = accumulate((image.num_channels for image in self.images), initial=0)
        return tuple(start + channel for start, image in zip(starts, self.images, strict=False) for channel in image.mask_channels)

    @property
    def georeference(self) -> Georeference | None:
        """Map coordinates of the first file."""
        return self.images[0].georeference

    @property
    def background(self) -> tuple[Any, ...]:
        """Colour of pixels that are not stored."""
        return tuple(value for image in self.images for value in image.background)

    @property
    def level_dimensions(self) -> tuple[Size, ...]:
        """(width, height) of each level; of level 0 alone if the files have other levels."""
        levels = {image.level_dimensions for image in self.images}
        return self.images[0].level_dimensions if len(levels) == 1 else self.images[0].level_dimensions[:1]

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """Px of level 0 per px of each level."""
        return self.images[0].level_downsamples[: len(self.level_dimensions)]

    @property
    def level_tiles_px(self) -> tuple[Size | None, ...]:
        """(width, height) of a compressed tile of each level of the first file."""
        return self.images[0].level_tiles_px[: len(self.level_dimensions)]

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        """Read a rectangle; see `sft.sources.Image`."""
        return self.read_channels(x, y, w, h, level, range(self.num_channels))

    def read_channels(self, x: int, y: int, w: int, h: int, level: int, channels: Sequence[int]) -> Pixels:
        """Read a rectangle of some channels, from the files that have them."""
        rectangle = self._rectangle(x, y, w, h, level)
        out = np.empty((*rectangle.shape, len(channels)), self.dtype)
        first = 0
        for image in self.images:
            places = [place for place, channel in enumerate(channels) if first <= channel < first + image.num_channels]
            if places:
                pixels = rectangle.read(image)
                out[..., places] = pixels[..., [channels[place] - first for place in places]]
            first += image.num_channels
        return out


class ChannelSelection(RasterView):
    """Some channels of an image, in this order.

    >>> from sft.sources import ArrayImage
    >>> ChannelSelection(ArrayImage(np.array([[[1, 2, 3]]], np.uint8), layout="HWC"), [2, 0]).read(0, 0, 1, 1).tolist()
    [[[3, 1]]]

    Args:
        image: with channels.
        channels: numbers, counted from 0, or names.

    Raises:
        InputError: a channel that the image does not have; the message lists those that it has.
    """

    def __init__(self, image: Image, channels: Sequence[Channel]) -> None:
        super().__init__(image)
        if isinstance(channels, (str, bytes)) or not isinstance(channels, Sequence) or not channels:
            raise InputError(f"cannot select channels={channels!r} of {image}: give a list of numbers or names, such as [0] or ['DAPI'].")
        self.channels = tuple(map(self._number, channels))

    def __repr__(self) -> str:
        return f"ChannelSelection({self.image!r}, {list(self.channels)})"

    @property
    def num_channels(self) -> int:
        """Numbers of a pixel."""
        return len(self.channels)

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Names of the selected channels; empty where the file has none."""
        names = super().channel_names
        return tuple(names[channel] for channel in self.channels) if names else ()

    @property
    def mask_channels(self) -> tuple[int, ...]:
        """Numbers of the selected channels that mark valid pixels."""
        below = super().mask_channels
        return tuple(number for number, channel in enumerate(self.channels) if channel in below)

    @property
    def background(self) -> tuple[Any, ...]:
        """Colour of pixels that are not stored."""
        background = super().background
        return tuple(background[channel] for channel in self.channels)

    def _read(self, rectangle: Rectangle) -> Pixels:
        read_channels = getattr(self.image, "read_channels", None)
        if read_channels is None:
            return np.ascontiguousarray(rectangle.read(self.image)[..., list(self.channels)])
        pixels: Pixels = read_channels(*rectangle.arguments, rectangle.level, self.channels)
        return pixels

    def _number(self, channel: Channel) -> int:
        names, count = super().channel_names, super().num_channels
        if isinstance(channel, str):
            places = [number for number, name in enumerate(names) if name == channel]
            if len(places) == 1:
                return places[0]
            why = f"{len(places)} of its channels are called so; give a number" if places else _listed(names, count)
            raise InputError(f"cannot select channel {channel!r} of {self.image}: {why}.")
        if isinstance(channel, bool) or not isinstance(channel, (int, np.integer)):
            raise InputError(f"cannot select channel {channel!r}, {typed(channel)}, of {self.image}: give a number or a name.")
        if not 0 <= channel < count:
            raise InputError(f"cannot select channel {channel} of {self.image}: {_listed(names, count)}.")
        return int(channel)


def _listed(names: Sequence[str], count: int) -> str:
    numbers = f"it has channels 0 to {count - 1}" if count > 1 else "it has channel 0"
    return (
        f"{numbers}, called {some_names(list(map(repr, names)))}; choose among them" if names else f"{numbers}, without names; give numbers"
    )


def _same_number(first: float | None, second: float | None) -> bool:
    return first == second or (first is not None and second is not None and isnan(first) and isnan(second))


def _steps(georeference: Georeference) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Map coordinates of one column and one row, as columns of a matrix."""
    a, b, _, d, e, _ = georeference.transform
    return np.array([[a, b], [d, e]])


def _offset_px(first: Georeference, other: Georeference) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Columns and rows from the corner of the first to that of the other."""
    distance = np.array(other.transform[2::3]) - np.array(first.transform[2::3])
    offset: np.ndarray[Any, np.dtype[np.float64]] = np.linalg.solve(_steps(first), distance)
    return offset


def _pixel_text(georeference: Georeference) -> str:
    a, b, _, d, e, _ = georeference.transform
    return f"({a:g}, {d:g}) along a row and ({b:g}, {e:g}) along a column"
