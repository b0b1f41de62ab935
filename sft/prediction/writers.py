"""Choice of a writer by the suffix of a path."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sft.common.atomic_files import is_text_path
from sft.common.errors import InputError, typed
from sft.prediction.cog import CogWriter
from sft.prediction.image_frame import ImageFrame
from sft.prediction.npy import NpyWriter
from sft.prediction.ome_tiff import OmeTiffWriter
from sft.prediction.ome_zarr import OmeZarrWriter
from sft.prediction.polygons import PolygonWriter
from sft.prediction.raster import RasterWriter

__all__ = ["writer_of"]

_WRITERS: dict[str, Callable[[Any], RasterWriter]] = {
    ".ome.tif": OmeTiffWriter,
    ".ome.tiff": OmeTiffWriter,
    ".zarr": OmeZarrWriter,
    ".npy": NpyWriter,
    ".geojson": PolygonWriter,
}
_TIFF = (".tif", ".tiff")


def writer_of(value: Any, frame: ImageFrame) -> RasterWriter:
    """A writer as it is, or the writer of a path's format.

    >>> writer_of("map.ome.tif", ImageFrame()), writer_of("map.npy", ImageFrame())
    (OmeTiffWriter('map.ome.tif'), NpyWriter('map.npy'))

    Args:
        value: a writer, or a path.
        frame: of the image: a ``.tif`` of an image with map coordinates is a COG.

    Raises:
        InputError: neither a writer nor a path with a known suffix.
    """
    if isinstance(value, RasterWriter):
        return value
    known = f"{', '.join((*_WRITERS, _TIFF[0]))}"
    if not is_text_path(value):
        raise InputError(f"writer {value!r} is {typed(value)}: give a path that ends in {known}, or a writer of sft.prediction")
    name = os.path.basename(os.fspath(value)).lower()
    for suffix, make in _WRITERS.items():
        if name.endswith(suffix):
            return make(value)
    if name.endswith(_TIFF):
        return OmeTiffWriter(value) if frame.georeference is None else CogWriter(value)
    raise InputError(
        f"writer {os.fspath(value)!r}: its suffix names no format; give a path that ends in {known}, or a writer of sft.prediction"
    )
