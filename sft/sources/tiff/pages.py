"""Pages of a TIFF that make an image: its levels, the planes of each level, and the content that is refused.

- *Levels.* Every reduced image of the file, the largest first; of OME-TIFF those of one series.
- *Channels.* The samples of a page; in OME-TIFF and ImageJ stacks also the pages along the axis C. Along every other axis (Z, T) one index
  is chosen with ``at``.
- *Files that OpenSlide reads otherwise are refused* with a `NotTiledError`, and `sft.sources.open_image` then takes OpenSlide: alpha,
  palettes, CMYK, and vendors with tiles that overlap or are placed by a table.
- *Content that would be misread is refused* with a `SourceError`: samples of 1, 2, 4 or 12 bits, grey values with a colour table, colour
  tables of GeoTIFFs, rotated images, several images of one size without a description of their axes, pixels in another file, missing
  directories, internal masks, alpha bands of GeoTIFFs.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sft.common.errors import InputError, SourceError
from sft.sources.normalize import PIXEL_DTYPES
from sft.sources.readers.geotiff import ALPHA_CHOICES
from sft.sources.tiff.metadata import PLACE_TAGS

__all__ = ["JPEG", "YCBCR", "LevelPages", "NotTiledError", "select_levels"]

JPEG = 7
YCBCR = 6
#: photometric interpretations that are read as they are
_GREY, _RGB, _PALETTE = 1, 2, 3
_APERIO_YCBCR = 33003
_COLOUR_MAP = 320
#: bit of the kind of a page (NewSubfileType) that makes it a mask of another
_MASK_PAGE = 4
#: planar configuration: a plane for each channel
PLANAR = 2
#: extra samples that are alpha, multiplied into the colours or not
_ALPHA = (1, 2)
#: Formats of vendors that tifffile knows, in which tiles overlap, lie in several areas, or are placed by metadata.
_FOREIGN = ("is_bif", "is_ndpi", "is_scn", "is_philips", "is_qpi", "is_fluoview", "is_lsm", "is_avs")
_FOREIGN_SOFTWARE = ("MedScan",)  # Trestle


class NotTiledError(SourceError):
    """A TIFF with pixels that are not decoded directly: OpenSlide may read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPages:
    """Pages of one level, one after another along the channels; all have the structure of the first."""

    pages: tuple[Any, ...]

    @property
    def keyframe(self) -> Any:
        """Page that describes the structure of all."""
        return self.pages[0].keyframe

    @property
    def num_channels(self) -> int:
        """Channels of all pages."""
        return len(self.pages) * int(self.keyframe.samplesperpixel)


def select_levels(
    path: Path, tiff: Any, *, series: int | None = None, at: Mapping[str, int] | None = None, labels: bool = False
) -> list[LevelPages]:
    """Levels of the image, the largest first.

    Args:
        path: of the file.
        tiff: a ``tifffile.TiffFile``.
        series: number of the image in an OME-TIFF of several.
        at: index along every axis other than channels, height and width.
        labels: True for a label map.

    Raises:
        InputError: no such series or index, or an axis without one.
        NotTiledError: OpenSlide may read it.
        SourceError: its content would be misread.
    """
    if not len(tiff.pages):
        raise ValueError("it lists no image")
    first = tiff.pages[0]
    foreign = [name for name in _FOREIGN if getattr(tiff, name, False)]
    if any(name in str(first.software) for name in _FOREIGN_SOFTWARE):
        foreign.append(str(first.software))
    if foreign:
        raise NotTiledError(
            f"cannot decode {path} by tiles: it is {foreign[0].removeprefix('is_').upper()}. Use OpenSlide, or convert it to a tiled TIFF."
        )
    _check_directories(path, tiff)
    _refuse_masks(path, tiff)
    if not labels:
        _refuse_alpha_band(path, first)
    if tiff.is_ome or tiff.is_imagej:
        levels = _series_levels(path, tiff, series, at or {})
    else:
        if series not in (None, 0):
            raise InputError(f"cannot read series {series} of {path}: it describes no series. Leave series out.")
        levels = _plain_levels(path, tiff, at or {})
    levels.sort(key=lambda level: -level.keyframe.imagewidth)
    for level in levels:
        _check_level(path, level, levels[0], labels)
    return levels


def _plain_levels(path: Path, tiff: Any, at: Mapping[str, int]) -> list[LevelPages]:
    """Levels of a file without a description of its pages: the first page and the reduced ones."""
    first = tiff.pages[0]
    is_tiled = first.is_tiled
    pages = [page for page in tiff.pages if page.is_tiled == is_tiled and (page is first or (tiff.is_svs and is_tiled) or page.is_reduced)]
    pages += [page for page in first.pages or () if page.is_tiled == is_tiled]
    size = first.imagewidth, first.imagelength
    same_size_pages = [page for page in tiff.pages[1:] if page not in pages and (page.imagewidth, page.imagelength) == size]
    if same_size_pages:
        number = at.get("page")
        if number is None or set(at) != {"page"} or not 0 <= number <= len(same_size_pages):
            several = f"{len(same_size_pages) + 1} images of {size[0]} x {size[1]} px, of which one is read"
            raise SourceError(
                f"cannot read {path}: it has {several}. Choose one with at={{'page': 0}}, or export that one; as "
                f"channels: sft.sources.ChannelStack([sft.sources.open_image({str(path)!r}, at={{'page': n}}) for n in "
                f"range({len(same_size_pages) + 1})])."
            )
        return [LevelPages(pages=([first, *same_size_pages][number],))]
    if at:
        raise InputError(f"cannot read {path} with at={dict(at)!r}: it has one image and no further axis. Leave at out.")
    return [LevelPages(pages=(page,)) for page in pages]


def _series_levels(path: Path, tiff: Any, series: int | None, at: Mapping[str, int]) -> list[LevelPages]:
    """Levels of one series of a file that describes its pages: OME-TIFF, or a stack of ImageJ."""
    number = series or 0
    if not 0 <= number < len(tiff.series):
        raise InputError(f"cannot read series {number} of {path}: it has series 0 to {len(tiff.series) - 1}. Choose one of them.")
    chosen = tiff.series[number]
    described = f"{chosen.axes} = {chosen.shape}"
    levels = []
    for level in chosen.levels:
        keyframe = level.keyframe
        holders = {page.parent.filehandle.name for page in level.pages if page is not None} - {tiff.filehandle.name}
        if holders:
            raise SourceError(f"cannot read {path}: its pixels are in {', '.join(sorted(holders))}. Open that, or export one file.")
        within = len(keyframe.shape)  # of a page: height, width and perhaps samples
        axes, extents = level.axes[: len(level.axes) - within].lower(), level.shape[: len(level.shape) - within]
        if not set(level.axes[len(axes) :]) <= set("YXS") or len(level.pages) != max(1, int(np.prod(extents))):
            raise SourceError(f"cannot read {path}: its {described} is not a stack of pages. Export it as OME-TIFF.")
        numbers = _page_numbers(path, axes, extents, at, described)
        pages = [level.pages[index] for index in numbers]
        if any(page is None for page in pages):
            raise SourceError(f"cannot read {path}: of its {described}, pages are missing. Copy it again.")
        levels.append(LevelPages(pages=tuple(pages)))
    return levels


def _page_numbers(path: Path, axes: str, extents: Sequence[int], at: Mapping[str, int], described: str) -> list[int]:
    """Pages of all channels at one index along every other axis."""
    unknown = sorted(axis for axis in at if axis not in axes.replace("c", ""))
    if unknown:
        raise InputError(
            f"cannot read {path} with at={dict(at)!r}: it has no axis {', '.join(unknown)} to choose along (axes {described}). Correct at."
        )
    choices = []
    for axis, extent in zip(axes, extents, strict=True):
        if axis == "c":
            choices.append(range(extent))
            continue
        index = at.get(axis, 0 if extent == 1 else -1)
        if not 0 <= index < extent:
            raise InputError(f"cannot read {path} of {described}: axis {axis!r} has {extent} entries. Choose one: at={{{axis!r}: 0}}.")
        choices.append(range(index, index + 1))
    return [int(np.ravel_multi_index(place, extents)) if extents else 0 for place in product(*choices)]


def _check_directories(path: Path, tiff: Any) -> None:
    """Refuse a file of which directories are missing: tifffile lists those in front of the first that it cannot read, and levels are gone.

    Raises:
        SourceError: it is one of these.
    """
    file, form, last = tiff.filehandle, tiff.tiff, tiff.pages[-1]
    file.seek(last.offset)
    (num_tags,) = struct.unpack(form.tagnoformat, file.read(form.tagnosize))
    file.seek(last.offset + form.tagnosize + num_tags * form.tagsize)
    (following,) = struct.unpack(form.offsetformat, file.read(form.offsetsize))
    below = [offset for page in tiff.pages for offset in getattr(page, "subifds", None) or () if offset >= file.size]
    if following or below:
        place = below[0] if below else following
        raise SourceError(
            f"cannot open {path} ({file.size} bytes): its list of images (so far {len(tiff.pages)}) continues at byte {place}, "
            "where no image is. It is cut short or damaged; compare its size with the original and copy it again."
        )


def _refuse_masks(path: Path, tiff: Any) -> None:
    """Refuse a file with an internal mask: its invalid pixels would count as the image's.

    Raises:
        SourceError: it has one.
    """
    masks = [page for page in tiff.pages if int(page.subfiletype) & _MASK_PAGE]
    if masks:
        raise SourceError(
            f"cannot read {path}: it has an internal mask of valid pixels ({masks[0].imagewidth} x {masks[0].imagelength} px), which is "
            "not read, so invalid pixels would count. The reader of the extra geo reads masks (open_image(path, mask=...)); or write a "
            "copy without it (gdal_translate -mask none), with its invalid pixels set to the background."
        )


def _refuse_alpha_band(path: Path, page: Any) -> None:
    """Refuse a GeoTIFF with an alpha band: it would count as a channel, or colours would be laid over a background by it.

    Programs declare the near infrared of four bands of 8 bits as alpha (the default of GDAL), so the caller says which of the two it is.

    Raises:
        SourceError: it has one.
    """
    if any(tag in page.tags for tag in PLACE_TAGS) and any(int(kind) in _ALPHA for kind in page.extrasamples):
        raise SourceError(
            f"cannot read {path}: band {page.samplesperpixel} of {page.samplesperpixel} is declared as alpha. {ALPHA_CHOICES}"
        )


def _check_level(path: Path, level: LevelPages, base: LevelPages, labels: bool) -> None:
    """Refuse a level that is not decoded exactly.

    Raises:
        NotTiledError: OpenSlide may read it.
        SourceError: no reader of this package decodes it correctly.
    """
    page = level.keyframe
    unread = _unsupported_content(page, labels)
    if unread:
        raise SourceError(f"cannot read {path}: {unread}.")
    for each in level.pages:
        _check_segments(path, page, each)
    turned = page.tags.valueof("Orientation", default=1)
    if turned != 1:
        raise SourceError(f"cannot open {path}: it is stored turned (orientation {int(turned)}). Write it upright, without that tag.")
    reason = _decode_error(level, base, labels)
    if reason and page.dtype.itemsize > 1:
        raise SourceError(f"cannot read {path}: {reason}. Convert it to grey or RGB in tiles, with levels of the same type.")
    if reason and page.is_tiled:
        raise NotTiledError(f"cannot decode {path} by tiles: {reason}. Use OpenSlide, or convert it to RGB of uint8 in tiles.")
    if reason:
        raise NotTiledError(f"cannot read {path}: {reason}. Convert it to grey (minisblack) or RGB; labels are read by open_labels.")


def _unsupported_content(page: Any, labels: bool) -> str | None:
    """Content of a page that no reader of this package decodes; None if all of it is pixels."""
    is_label = labels and page.dtype is not None and page.dtype.kind in "ui"
    if page.dtype is None or (page.dtype.name not in PIXEL_DTYPES and page.dtype.kind != "b" and not is_label):
        sample_type, pixel_types = page.dtype or "of an unknown type", ", ".join(PIXEL_DTYPES)
        return f"its samples are {sample_type}; pixels are one of {pixel_types}. Convert it; labels are read by open_labels"
    stored_bits = 8 * page.dtype.itemsize
    if page.dtype.kind == "b" or page.bitspersample != stored_bits:
        if labels and page.bitspersample < 8:
            return None  # decoded by Pillow
        bits = f"{page.bitspersample} bit{'s' if page.bitspersample > 1 else ''}"
        masks = "" if labels else "; masks and label maps of up to 8 bits are read by open_labels"
        return f"it has {bits} a sample, pixels have {stored_bits}. Convert it (gdal_translate -co NBITS={stored_bits}){masks}"
    if not labels and (
        (page.photometric == _PALETTE and any(tag in page.tags for tag in PLACE_TAGS))
        or (page.photometric == _GREY and _has_colour_table(page))
    ):
        return (
            "its values are indices of a colour table. Read labels with sft.sources.open_labels, convert it to RGB (gdal_translate -expand "
            "rgb), or write grey values without the table"
        )
    if page.dtype.itemsize > 1 and page.photometric not in (_GREY, _RGB):
        return f"its samples are {page.dtype} with colours {_name(page.photometric)}. Convert it to grey (minisblack) or RGB"
    if page.imagedepth != 1:
        return f"it has {page.imagedepth} planes in one image. Export that one which is needed"
    return None


def _has_colour_table(page: Any) -> bool:
    """True if a page of grey values has a table of colours, other than the ramp of grey."""
    values = page.tags.valueof(_COLOUR_MAP)
    if values is None:
        return False
    table = np.asarray(values).reshape(-1)
    if table.size % 3 or not table.size:
        return True
    ramp = np.linspace(0, 65535, table.size // 3)
    return bool((np.abs(table.reshape(3, -1) - ramp) > 256).any())


def _name(value: Any) -> str:
    """Name of a code of TIFF, such as a compression or a photometric interpretation."""
    return str(getattr(value, "name", value)).lower()


def _check_segments(path: Path, page: Any, each: Any) -> None:
    """Refuse unlisted tiles and strips, which OpenSlide takes for white.

    Raises:
        SourceError: some are not listed.
    """
    if page.is_tiled:
        kind, count = "tiles", -(-page.imagewidth // page.tilewidth) * -(-page.imagelength // page.tilelength)
    else:
        kind, count = "strips", -(-page.imagelength // max(1, min(page.rowsperstrip, page.imagelength)))
    if page.planarconfig == PLANAR:
        count *= page.samplesperpixel
    if not len(each.dataoffsets) == len(each.databytecounts) == count:
        raise SourceError(
            f"cannot open {path}: it lists {min(len(each.dataoffsets), len(each.databytecounts))} {kind} of {count}. Copy or write it "
            "again."
        )


def _decode_error(level: LevelPages, base: LevelPages, labels: bool) -> str | None:
    """Reason against decoding a level directly; None if its pixels are those of the file."""
    page, first = level.keyframe, base.keyframe
    samples, is_byte = page.samplesperpixel, page.dtype == np.uint8
    if page.dtype.kind == "b" or page.bitspersample != 8 * page.dtype.itemsize or page.dtype != first.dtype:
        return f"its samples are {page.dtype} of {page.bitspersample} bits"
    if level.num_channels != base.num_channels:
        return f"a level has {level.num_channels} channels, the first {base.num_channels}"
    if labels and page.photometric == _PALETTE and page.compression not in (6, JPEG):
        return None
    if is_byte and any(int(kind) in _ALPHA for kind in page.extrasamples):
        return f"it has {samples} samples a pixel, one of them alpha"
    if page.compression in (6, _APERIO_YCBCR) or page.photometric not in (_GREY, _RGB, YCBCR):
        return f"its compression is {_name(page.compression)} and its colours are {_name(page.photometric)}"
    if page.photometric == YCBCR and (page.compression != JPEG or samples != 3):
        return f"its colours are {_name(page.photometric)} in {_name(page.compression)}"
    ratio = (first.imagewidth / page.imagewidth) / (first.imagelength / page.imagelength)
    if abs(ratio - 1) > max(0.02, 2 / page.imagewidth + 2 / page.imagelength):
        return f"an image of {page.imagewidth} x {page.imagelength} px is not a level of {first.imagewidth} x {first.imagelength} px"
    return None
