"""JPEG tiles of a TIFF: abbreviated streams in a colour space that the TIFF names, decoded strictly.

A tile usually lacks its quantisation and Huffman tables, which stand once in the TIFF (TIFF technical note 2). The decoder wants one
stream, so each tile gets a prefix: start of image, an Adobe marker (ISO/IEC 10918-6) that names the colour space, the tables. Application
markers of the tile itself are taken out, since they may contradict the TIFF's tag, which is what counts.
"""

from __future__ import annotations

from collections.abc import Callable

from sft.common.errors import SourceError
from sft.sources.image import Pixels, missing_extra

__all__ = ["jpeg_decoder"]

_START, _END = b"\xff\xd8", b"\xff\xd9"
#: Adobe marker up to its last byte, the transform: 0 as stored, 1 YCbCr
_ADOBE = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00"


def jpeg_decoder(
    tables: bytes | None, shape: tuple[int, int, int], *, is_ycbcr: bool, fewer_rows: bool = False
) -> Callable[[bytes, int], Pixels]:
    """Decoder of JPEG tiles: a function from a tile's bytes (and its number) to its pixels.

    Args:
        tables: the TIFF's tag JPEGTables.
        shape: (rows, columns, channels) of a tile; three channels or one.
        is_ycbcr: True for YCbCr in the TIFF's tag, False for RGB or grey.
        fewer_rows: True to accept fewer rows: the last strip of an image. Default: `False`

    Raises:
        SourceError: simplejpeg is not installed. The function itself raises ValueError for invalid data.
    """
    try:
        from simplejpeg import decode_jpeg
    except ImportError as error:
        raise missing_extra("decode JPEG tiles", "fast", error) from error
    prefix = _START + _ADOBE + bytes([int(is_ycbcr)]) if shape[2] == 3 else _START
    if tables:
        if not (tables.startswith(_START) and tables.endswith(_END)):
            raise SourceError("cannot decode JPEG tiles: the file's JPEG tables are damaged. Copy the file again.")
        prefix += _without_application_markers(tables)[: -len(_END)]
    colours = "RGB" if shape[2] == 3 else "GRAY"

    def decode(data: bytes, position: int) -> Pixels:
        pixels: Pixels = decode_jpeg(prefix + _without_application_markers(data), colorspace=colours)
        if pixels.shape[1:] != shape[1:] or not (pixels.shape[0] == shape[0] or (fewer_rows and pixels.shape[0] < shape[0])):
            raise ValueError(f"it decodes to {pixels.shape} instead of {shape}")
        return pixels

    return decode


def _without_application_markers(data: bytes) -> bytes:
    """JPEG stream after its start and after its application markers (JFIF, Adobe, Exif)."""
    if not data.startswith(_START):
        raise ValueError("it is not JPEG data")
    position = len(_START)
    while data[position : position + 1] == b"\xff" and 0xE0 <= data[position + 1] <= 0xEF:
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return data[position:]
