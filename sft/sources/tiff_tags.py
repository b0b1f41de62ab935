"""The resolution that a TIFF states, in micrometres per pixel.

Aperio writes it into the description and leaves the resolution tags to chance; OME has it in its XML; other writers use the tags. This is
what OpenSlide does for the first and the last.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from sft.sources.raster import valid_mpp

__all__ = ["read_mpp"]

_UNIT_UM = {2: 25_400.0, 3: 10_000.0}  # inch, centimetre
_OME_UM = {"µm": 1.0, "μm": 1.0, "um": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "m": 1e6}


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
        mpp = _ome_mpp(tiff.ome_metadata)
        if mpp is not None:
            return mpp
    unit_um = _UNIT_UM.get(int(page.tags.valueof(296, 2)))
    resolutions = [page.tags.valueof(tag) for tag in (282, 283)]
    if unit_um is None or any(value is None or value[0] == 0 or value[1] == 0 for value in resolutions):
        return None
    x, y = (unit_um * denominator / numerator for numerator, denominator in resolutions)
    return valid_mpp(x, y)


def _ome_mpp(text: str | None) -> tuple[float, float] | None:
    try:
        root = ElementTree.fromstring(text or "")
    except ElementTree.ParseError:
        return None
    pixels = next((element for element in root.iter() if element.tag.endswith("}Pixels")), None)
    if pixels is None:
        return None
    sizes = []
    for axis in "XY":
        size, unit_um = _number(pixels.get(f"PhysicalSize{axis}")), _OME_UM.get(pixels.get(f"PhysicalSize{axis}Unit", "µm"))
        sizes.append(None if size is None or unit_um is None else size * unit_um)
    return valid_mpp(*sizes)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
