"""Metadata of a TIFF: the value of tiles that are not stored, and the resolution.

A sparse GeoTIFF leaves out tiles without data. GDAL reads them as the value of ``GDAL_NODATA`` (tag 42113, text), and as 0 without that
tag; slide scanners mean glass, which is white. Which of the two a file is follows from its tags: one with ``GDAL_NODATA``,
GeoKeys or a transform is a GeoTIFF. The tags are read here, without a library, so that every reader of a file has the same value.

The resolution in micrometres per pixel is read as OpenSlide does: Aperio writes it into the description and leaves the resolution tags to
chance; OME has it in its XML; other writers use the tags. Programs that know no resolution write one nevertheless, 72 or 96 dpi (353 or
265 µm/px). A value of Aperio or of the tags that is coarser than any slide is none (`sft.sources.image.StatedResolution`).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

import numpy as np

from sft.common.untrusted.xml_files import XmlError, parse_xml
from sft.sources.image import StatedResolution, dtype_range, valid_mpp
from sft.sources.readers.remote import remote_path

__all__ = [
    "PLACE_TAGS",
    "GeoTags",
    "SampleTags",
    "has_colour_table_file",
    "read_channel_names",
    "read_geo_tags",
    "read_resolution",
    "read_sample_tags",
]

_GDAL_METADATA, _NODATA = 42112, 42113
#: Tags of a place on a map: GeoKeys, size of a pixel, transformation.
PLACE_TAGS = (34735, 33550, 34264)
_SAMPLE_BITS, _EXTRA_SAMPLES = 258, 338
#: Bytes of a number by its type: text, byte, short, long, and the long of BigTIFF.
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 16: 8}
#: Byte orders by the first two bytes of a file.
_ORDERS = {b"II": "<", b"MM": ">"}
#: Bytes of a text that is believed to be a number.
_MAX_TEXT_BYTES = 64
_MAX_TAGS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class GeoTags:
    """Facts of a TIFF about pixels without data, from the tags of its first image.

    >>> GeoTags(is_geo=True, nodata=-9999.0).missing_value, GeoTags(is_geo=True, nodata=None).missing_value, GeoTags().missing_value
    (0, 0, None)

    Attributes:
        is_geo: True if the file is a GeoTIFF.
        nodata: value of pixels without data, as the file has it; None if it has none.
    """

    is_geo: bool = False
    nodata: float | None = None

    @property
    def missing_value(self) -> int | None:
        """Value of the uint8 pixels of a tile that is not stored; None for a file of a scanner."""
        value = self.missing_value_of(np.dtype(np.uint8))
        return None if value is None else int(value)

    def missing_value_of(self, dtype: np.dtype[Any]) -> float | None:
        """Value of the pixels of a tile that is not stored, as GDAL rounds and clamps it to their type; None for a file of a scanner."""
        if self.nodata is None:
            return 0 if self.is_geo else None
        if dtype.kind == "f":
            return self.nodata
        low, high = dtype_range(dtype)
        clamped = 0.0 if math.isnan(self.nodata) else min(max(self.nodata, low), high)
        return math.floor(clamped + 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTags:
    """Samples of a pixel, from the tags of the first image of a TIFF.

    Attributes:
        bits: of each sample.
        extra_samples: meaning of each sample after those of the colours: 0 unspecified, 1 and 2 alpha.
    """

    bits: tuple[int, ...] = (8, 8, 8)
    extra_samples: tuple[int, ...] = ()

    @property
    def fit_openslide(self) -> bool:
        """True if OpenSlide, which returns RGB of 8 bits, neither rounds nor drops samples."""
        return all(bits == 8 for bits in self.bits) and 0 not in self.extra_samples


def read_geo_tags(path: Path) -> GeoTags:
    """The georeferencing tags of a file; those of no GeoTIFF for other and for damaged files, which their reader reports."""
    try:
        with path.open("rb") as file:
            return _read_tags(file)
    except (OSError, struct.error, ValueError):
        if remote_path(path) is not None:
            raise
        return GeoTags()


def has_colour_table_file(path: Path) -> bool:
    """True if GDAL's metadata in the file next to a TIFF (``a.tif.aux.xml``) have a colour table, as GIS programs save it.

    A file that cannot be read has none: it is not part of the image.
    """
    try:
        root = parse_xml(path.with_name(f"{path.name}.aux.xml").read_bytes())
    except (OSError, XmlError):
        return False
    return root.tag == "PAMDataset" and next(root.iter("ColorTable"), None) is not None


def read_sample_tags(path: Path) -> SampleTags:
    """The sample tags of a file; those of RGB for other and for damaged files, which their reader reports."""
    try:
        with path.open("rb") as file:
            tags = _read_directory(file, (_SAMPLE_BITS, _EXTRA_SAMPLES))
    except (OSError, struct.error, ValueError):
        return SampleTags()
    numbers = {tag: struct.unpack(f"{order}{count}H", value) for tag, (order, count, value) in tags.items() if len(value) == 2 * count}
    return SampleTags(bits=numbers.get(_SAMPLE_BITS, (8,)), extra_samples=numbers.get(_EXTRA_SAMPLES, ()))


def _read_tags(file: BinaryIO) -> GeoTags:
    tags = _read_directory(file, (*PLACE_TAGS, _NODATA))
    _, _, text = tags.get(_NODATA, ("", 0, b""))
    nodata = _nodata(text) if text else None
    return GeoTags(is_geo=nodata is not None or any(tag in tags for tag in PLACE_TAGS), nodata=nodata)


def _read_directory(file: BinaryIO, wanted: Collection[int]) -> dict[int, tuple[str, int, bytes]]:
    """Byte order, count and value of some tags of the first image; the value is empty where it is longer than a number or a short text."""
    order = _ORDERS.get(file.read(2))
    if order is None:
        return {}
    (version,) = struct.unpack(f"{order}H", file.read(2))
    if version == 43:  # BigTIFF: 8 bytes for each offset and count
        file.seek(8)
        count_form, entry_form, offset_form = "Q", "HHQ8s", "Q"
    elif version == 42:
        count_form, entry_form, offset_form = "H", "HHI4s", "I"
    else:
        return {}
    (directory,) = _unpack(file, order + offset_form)
    file.seek(directory)
    (num_tags,) = _unpack(file, order + count_form)
    tags: dict[int, tuple[str, int, bytes]] = {}
    for _ in range(min(num_tags, _MAX_TAGS)):
        tag, kind, count, value = _unpack(file, order + entry_form)
        if tag not in wanted:
            continue
        num_bytes = count * _TYPE_BYTES.get(kind, _MAX_TEXT_BYTES + 1)
        if len(value) < num_bytes <= _MAX_TEXT_BYTES:
            place = file.tell()
            file.seek(struct.unpack(order + offset_form, value)[0])
            value = file.read(num_bytes)
            file.seek(place)
        tags[tag] = order, count, value[:num_bytes] if num_bytes <= _MAX_TEXT_BYTES else b""
    return tags


def _unpack(file: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _nodata(text: bytes) -> float | None:
    """A number as GDAL writes it, with ``nan`` and ``inf``; None for other text."""
    try:
        return float(text.split(b"\0")[0].decode("ascii").strip())
    except ValueError:
        return None


_UNIT_UM = {2: 25_400.0, 3: 10_000.0}  # inch, centimetre
_OME_UM = {"µm": 1.0, "μm": 1.0, "um": 1.0, "pm": 1e-6, "Å": 1e-4, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "dm": 1e5, "m": 1e6}
_OME_UM |= {"thou": 25.4, "in": 25_400.0, "ft": 304_800.0}


def read_resolution(tiff: Any, page: Any, series: int = 0) -> StatedResolution:
    """Resolution of a page, as far as the file states a credible one.

    Args:
        tiff: a ``tifffile.TiffFile``.
        page: its largest level.
        series: number of the image in OME metadata. Default: 0
    """
    if tiff.is_svs:
        match = re.search(r"\|\s*MPP\s*=\s*([0-9.eE+-]+)", page.description or "")
        value = _number(match[1]) if match else None
        return StatedResolution.of(value, value)
    if tiff.is_ome:
        sizes = _ome_sizes(tiff.ome_metadata, series)
        if None not in sizes:  # where OME has sizes of a unit of no length ("pixel"), the tags are a program's defaults
            # Written on purpose, so that coarse overviews are believed.
            return StatedResolution(mpp=valid_mpp(*(size * _OME_UM.get(unit, math.nan) for size, unit in filter(None, sizes))))
    unit_um = _UNIT_UM.get(page.tags.valueof(296, 2))
    if unit_um is None:
        return StatedResolution()
    return StatedResolution.of(*(_pixel_um(page.tags.valueof(tag), unit_um) for tag in (282, 283)))


def _pixel_um(resolution: Any, unit_um: float) -> float | None:
    """Micrometres of a pixel, from pixels per unit as a fraction; None for a tag that is missing, zero, infinite or no fraction."""
    try:
        numerator, denominator = resolution
        return unit_um * float(denominator) / float(numerator)
    except (TypeError, ValueError, ZeroDivisionError):
        return None


def read_channel_names(tiff: Any, series: int, num_channels: int) -> tuple[str, ...]:
    """Names of the channels in OME metadata, or descriptions of the bands of a GeoTIFF; empty where one lacks a name."""
    if not tiff.is_ome:
        return _band_descriptions(tiff.pages[0].tags.valueof(_GDAL_METADATA), num_channels)
    pixels = _ome_pixels(tiff.ome_metadata, series)
    channels = [] if pixels is None else [element for element in pixels if element.tag.endswith("}Channel")]
    names = [channel.get("Name", "") for channel in channels]
    return tuple(names) if len(names) == num_channels and all(names) else ()


def _band_descriptions(text: Any, num_channels: int) -> tuple[str, ...]:
    """Descriptions of bands in GDAL's metadata."""
    try:
        items = list(parse_xml(text).iter("Item")) if isinstance(text, str) else []
    except XmlError:
        return ()
    described = [item for item in items if item.get("name") == "DESCRIPTION" and item.get("role") == "description"]
    names = {item.get("sample"): (item.text or "").strip() for item in described}
    ordered = tuple(names.get(str(channel), "") for channel in range(num_channels))
    return ordered if all(ordered) else ()


def _ome_pixels(text: str | None, series: int) -> ElementTree.Element | None:
    """Description of the pixels of one image; None if the text is not XML, or has no such image."""
    try:
        root = parse_xml(text or "")
    except XmlError:
        return None
    described = [element for element in root.iter() if element.tag.endswith("}Pixels")]
    return described[series] if series < len(described) else None


def _ome_sizes(text: str | None, series: int) -> list[tuple[float, str] | None]:
    """The size of a pixel along x and y, and its unit, where OME says so."""
    pixels = _ome_pixels(text, series)
    if pixels is None:
        return [None]
    sizes = [(_number(pixels.get(f"PhysicalSize{axis}")), pixels.get(f"PhysicalSize{axis}Unit", "µm")) for axis in "XY"]
    return [None if not size else (size, unit) for size, unit in sizes]


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
