"""The resolution that a TIFF states, in micrometres per pixel.

Aperio writes it into the description and leaves the resolution tags to chance; OME has it in its XML; other writers use the tags. This is
what OpenSlide does for the first and the last.
"""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

from sft.sources.raster import valid_mpp

__all__ = ["read_mpp"]

_UNIT_UM = {2: 25_400.0, 3: 10_000.0}  # inch, centimetre
_OME_UM = {"µm": 1.0, "μm": 1.0, "um": 1.0, "pm": 1e-6, "Å": 1e-4, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "dm": 1e5, "m": 1e6}
_OME_UM |= {"thou": 25.4, "in": 25_400.0, "ft": 304_800.0}


def read_mpp(tiff: Any, page: Any) -> tuple[float, float] | None:
    """Micrometres per pixel of a page, (x, y); None where the file does not say, or says nonsense.

    Args:
        tiff: a ``tifffile.TiffFile``.
        page: its largest level.
    """
    if tiff.is_svs:
        found = re.search(r"\|\s*MPP\s*=\s*([0-9.eE+-]+)", page.description or "")
        value = _number(found[1]) if found else None
        return valid_mpp(value, value)
    if tiff.is_ome:
        sizes = _ome_sizes(tiff.ome_metadata)
        if None not in sizes:  # where OME has sizes of a unit of no length ("pixel"), the tags are a program's defaults
            return valid_mpp(*(size * _OME_UM.get(unit, math.nan) for size, unit in filter(None, sizes)))
    unit_um = _UNIT_UM.get(int(page.tags.valueof(296, 2)))
    resolutions = [page.tags.valueof(tag) for tag in (282, 283)]
    if unit_um is None or any(value is None or value[0] == 0 or value[1] == 0 for value in resolutions):
        return None
    x, y = (unit_um * denominator / numerator for numerator, denominator in resolutions)
    return valid_mpp(x, y)


def _ome_sizes(text: str | None) -> list[tuple[float, str] | None]:
    """The size of a pixel along x and y, and its unit, where OME says so."""
    try:
        root = ElementTree.fromstring(text or "")
    except ElementTree.ParseError:
        return [None]
    pixels = next((element for element in root.iter() if element.tag.endswith("}Pixels")), None)
    if pixels is None:
        return [None]
    sizes = [(_number(pixels.get(f"PhysicalSize{axis}")), pixels.get(f"PhysicalSize{axis}Unit", "µm")) for axis in "XY"]
    return [None if not size else (size, unit) for size, unit in sizes]


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
