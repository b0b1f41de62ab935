"""PNG, JPEG and JPEG 2000 as images: decoded completely at the first read, within a host budget.

These formats have no tiles that could be decoded alone (JPEG 2000 may have them, but its decoders read the file as one). The pixels stay in
memory until the image is closed, so later reads cost nothing; `cost_note` states the bytes. Policies:

- PNG of 8 and 16 bits, grey or RGB; palettes become RGB; transparency is laid over white, as in slides.
- JPEG of 8 bits, grey or RGB. libjpeg's warnings (noise in place of damaged data) are errors. CMYK is refused.
- A world file next to the image (``a.pgw``) is its georeference (extra ``geo``). JPEG 2000 with map coordinates, such as Sentinel-2 has, is
  read in its tiles by `sft.sources.GeoImage`.
- An image that its EXIF data say is to be turned is refused: its rows are not rows of the scene.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sft.common.byte_units import format_bytes
from sft.common.errors import SourceError
from sft.sources.file_image import DecodedFile
from sft.sources.image import ImageFacts, Pixels, Rectangle, missing_extra
from sft.sources.readers.geotiff import georeference_mpp, read_georeference

__all__ = ["EncodedImage", "encoded_format"]

_PNG, _JPEG, _JP2, _J2K = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"
#: PNG: channels in the file by colour type.
_PNG_CHANNELS: Mapping[int, int] = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
#: Bytes in which a header must lie.
_HEAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """Facts of a file before it is decoded."""

    kind: str
    width_px: int
    height_px: int
    stored_channels: int  #: in the decoder's result
    bits: int

    @property
    def num_channels(self) -> int:
        """Channels of the image: without alpha."""
        return {2: 1, 4: 3}.get(self.stored_channels, self.stored_channels) if self.kind == "PNG" else self.stored_channels

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.bits > 8 else np.uint8)

    @property
    def decoded_bytes(self) -> int:
        return self.width_px * self.height_px * self.stored_channels * self.dtype.itemsize


def encoded_format(head: bytes) -> str:
    """``"PNG"``, ``"JPEG"`` or ``"JPEG 2000"`` by the first bytes of a file; empty for other files."""
    signatures = {_PNG: "PNG", _JPEG: "JPEG", _JP2: "JPEG 2000", _J2K: "JPEG 2000"}
    return next((name for magic, name in signatures.items() if head.startswith(magic)), "")


@dataclass(slots=True, kw_only=True)
class _Decoded:
    """Header and, after the first read, pixels."""

    header: _Header
    pixels: Pixels | None = None


class EncodedImage(DecodedFile[_Decoded]):
    """PNG, JPEG or JPEG 2000 file as an `sft.sources.Raster`.

    Args:
        path: of the file, or its URL (extra ``remote``).
        host_budget_bytes: limit of the decoded image. Default: `None` (1 GiB)

    Raises:
        SourceError: the file does not exist. Other errors are raised at the first use.
    """

    def _open(self) -> _Decoded:
        with self.path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        kind = encoded_format(head)
        if not kind:
            raise SourceError(f"cannot open {self.path}: it is not a PNG, JPEG or JPEG 2000 image. Give one, or leave reader out.")
        try:
            header = {"PNG": _png_header, "JPEG": _jpeg_header, "JPEG 2000": _jpeg_2000_header}[kind](head)
        except (struct.error, IndexError) as error:
            raise SourceError(f"cannot open {self.path}: its header is cut short. Copy it again.") from error
        except ValueError as error:
            raise SourceError(f"cannot open {self.path}: {error}. Write it again as RGB or grey, or as a tiled TIFF.") from error
        self._check_bytes("the image", header.decoded_bytes)
        return _Decoded(header=header)

    def _describe(self, handle: _Decoded) -> ImageFacts:
        header = handle.header
        white = 65535 if header.bits > 8 else 255
        georeference = read_georeference(self.path) if isinstance(self.path, Path) and _has_georeference_file(self.path) else None
        return ImageFacts(
            level_dimensions=((header.width_px, header.height_px),),
            tiles_px=(None,),
            num_channels=header.num_channels,
            mpp=georeference_mpp(georeference),
            background=(white,) * header.num_channels,
            georeference=georeference,
            dtype=header.dtype.name,
            cost_note=f"a {header.kind} image is decoded completely at its first read, into {format_bytes(header.decoded_bytes)} of memory",
        )

    def _read(self, handle: _Decoded, rectangle: Rectangle) -> Pixels:
        if handle.pixels is None:  # threads that race here decode it twice, and keep one
            handle.pixels = _decode(self.path, handle.header)
        return handle.pixels[rectangle.slices].copy()


def _has_georeference_file(path: Path) -> bool:
    """True if a world file of the image, or metadata of GDAL, lie next to it.

    >>> _has_georeference_file(Path("none.png"))
    False
    """
    suffix = path.suffix or ".wld"
    world_files = [path.with_suffix(name) for name in (".wld", f"{suffix}w", f"{suffix[:2]}{suffix[-1]}w")]
    return any(file.is_file() for file in (*world_files, path.with_name(f"{path.name}.aux.xml")))


def _decode(path: Path, header: _Header) -> Pixels:
    try:
        import imagecodecs
        import simplejpeg
    except ImportError as error:
        raise missing_extra(f"decode {path}", "fast", error) from error
    with path.open("rb") as file:
        data = file.read()
    if header.kind == "PNG":
        pixels: Any = imagecodecs.png_decode(data)
    elif header.kind == "JPEG":
        pixels = simplejpeg.decode_jpeg(data, colorspace="RGB" if header.stored_channels == 3 else "GRAY")
    else:
        pixels = imagecodecs.jpeg2k_decode(data)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.shape[:2] != (header.height_px, header.width_px) or pixels.dtype != header.dtype:
        raise ValueError(f"it decodes to {pixels.dtype} of shape {pixels.shape}, its header says {header.width_px} x {header.height_px} px")
    if pixels.shape[2] == header.num_channels:
        return np.ascontiguousarray(pixels)
    if pixels.shape[2] != header.num_channels + 1:
        raise ValueError(f"it decodes to {pixels.shape[2]} channels, its header says {header.num_channels}")
    return _over_white(pixels)


def _over_white(pixels: Pixels) -> Pixels:
    """Colours laid over white by their alpha, the last channel; rounded to nearest, in place of a second image a few rows at a time."""
    white = int(np.iinfo(pixels.dtype).max)
    out = np.ascontiguousarray(pixels[..., :-1])
    for top in range(0, len(out), 64):
        rows, alpha = out[top : top + 64], pixels[top : top + 64, :, -1:].astype(np.uint64)
        rows[...] = (rows * alpha + (white - alpha) * np.uint64(white) + np.uint64(white // 2)) // np.uint64(white)
    return out


def _png_header(head: bytes) -> _Header:
    width, height, bits, colours = struct.unpack(">IIBB", head[16:26])
    if head[12:16] != b"IHDR" or colours not in _PNG_CHANNELS or not width or not height:
        raise ValueError("its PNG header is damaged")
    has_alpha = colours in (0, 2, 3) and b"tRNS" in head[: head.find(b"IDAT") % (len(head) + 1)]
    return _Header(kind="PNG", width_px=width, height_px=height, stored_channels=_PNG_CHANNELS[colours] + has_alpha, bits=bits)


def _jpeg_header(head: bytes) -> _Header:
    position = 2
    while True:
        if head[position] != 0xFF:
            raise ValueError("its JPEG markers are damaged")
        marker = head[position + 1]
        if marker == 0xFF:
            position += 1
            continue
        (length,) = struct.unpack(">H", head[position + 2 : position + 4])
        segment = head[position + 4 : position + 2 + length]
        if marker == 0xE1 and segment.startswith(b"Exif\0\0"):
            turned = _exif_orientation(segment[6:])
            if turned != 1:
                raise ValueError(f"it is stored turned (orientation {turned} of its EXIF data)")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            bits, height, width, channels = struct.unpack(">BHHB", segment[:6])
            if bits != 8 or channels not in (1, 3) or not width or not height:
                raise ValueError(f"it is a JPEG of {channels} channels of {bits} bits")
            return _Header(kind="JPEG", width_px=width, height_px=height, stored_channels=channels, bits=bits)
        position += 2 + length


def _exif_orientation(data: bytes) -> int:
    """Orientation of EXIF data; 1 where they do not say, or are damaged."""
    order = {b"II": "<", b"MM": ">"}.get(data[:2])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack(order + "I", data[4:8])
        (count,) = struct.unpack(order + "H", data[directory : directory + 2])
        for number in range(count):
            start = directory + 2 + 12 * number
            tag, _, _, value = struct.unpack(order + "HHIH", data[start : start + 10])
            if tag == 0x0112:
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def _jpeg_2000_header(head: bytes) -> _Header:
    start = head.find(_J2K)
    if start < 0:
        raise ValueError("its JPEG 2000 codestream is missing")
    right, bottom, left, top = struct.unpack(">IIII", head[start + 8 : start + 24])
    (channels,) = struct.unpack(">H", head[start + 40 : start + 42])
    components = [head[start + 42 + 3 * number] for number in range(channels)]
    bits = {(component & 0x7F) + 1 for component in components}
    if len(bits) != 1 or any(component & 0x80 for component in components) or right <= left or bottom <= top:
        raise ValueError("its JPEG 2000 components are signed, or differ in their bits")
    return _Header(kind="JPEG 2000", width_px=right - left, height_px=bottom - top, stored_channels=channels, bits=bits.pop())
