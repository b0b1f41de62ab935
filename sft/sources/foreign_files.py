"""Files that are no slides, by their first bytes: what they are, and how to make an image of them.

`sft.sources.open_image` asks here about a file that no reader knows. A photograph, an archive or a page of HTML otherwise ends in the
message of a slide library, "unsupported or missing image file", which is about another mistake.
"""

from __future__ import annotations

import re
from pathlib import Path

from sft.common.errors import SourceError

__all__ = ["describe_folder", "foreign_file", "is_url", "refuse_url"]

_HEAD_BYTES = 512
#: Scheme of a URL; pathlib leaves one of its slashes. A drive of Windows has one letter.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_PICTURE_REMEDY = (
    "Convert it to a tiled TIFF (vips tiffsave IN OUT.tif --tile --pyramid --compression deflate); or, where it fits into memory, give its "
    "pixels: sft.sources.ArrayImage(numpy.asarray(PIL.Image.open(path).convert('RGB')), layout='HWC')"
)
_ARCHIVE_REMEDY = "Unpack it, and give what is in it"
#: First bytes, name, remedy.
_KINDS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "a PNG picture", _PICTURE_REMEDY),
    (b"\xff\xd8\xff", "a JPEG picture", _PICTURE_REMEDY),
    (b"\0\0\0\x0cjP  \r\n", "a JPEG 2000 picture", _PICTURE_REMEDY),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 codestream", _PICTURE_REMEDY),
    (b"\0\0\0\x0cJXL ", "a JPEG XL picture", _PICTURE_REMEDY),
    (b"GIF8", "a GIF picture", _PICTURE_REMEDY),
    (b"BM", "a BMP picture", _PICTURE_REMEDY),
    (b"RIFF", "a WebP picture", _PICTURE_REMEDY),
    (b"PK\x03\x04", "a ZIP archive", _ARCHIVE_REMEDY),
    (b"PK\x05\x06", "an empty ZIP archive", _ARCHIVE_REMEDY),
    (b"\x1f\x8b", "compressed with gzip", _ARCHIVE_REMEDY),
    (b"BZh", "compressed with bzip2", _ARCHIVE_REMEDY),
    (b"\xfd7zXZ\0", "compressed with xz", _ARCHIVE_REMEDY),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _ARCHIVE_REMEDY),
    (b"Rar!\x1a\x07", "a RAR archive", _ARCHIVE_REMEDY),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "Read the pixels with h5py, and give the array to sft.sources.ArrayImage or ArraySource"),
    (b"%PDF", "a PDF document", "Give the picture that it was made from"),
    (b"version https://git-lfs", "a pointer of Git LFS", "Get the file that it stands for: git lfs pull"),
)  # fmt: skip
_HTML = (b"<!doctype html", b"<html", b"<?xml")


def refuse_url(text: str) -> None:
    """Refuse an address on the network.

    >>> refuse_url("https://example.org/slide.svs")
    Traceback (most recent call last):
        ...
    sft.common.errors.SourceError: cannot open https://example.org/slide.svs: it is a URL; files are read from disk. Download it first, ...

    Raises:
        SourceError: it is a URL.
    """
    if is_url(text):
        url = _URL.sub(r"\1://", text, count=1)
        raise SourceError(f"cannot open {url}: it is a URL; files are read from disk. Download it first, or mount its storage as a folder.")


def is_url(text: str) -> bool:
    """True for an address such as ``https://example.org/slide.svs``, also after ``pathlib`` has shortened it."""
    return _URL.match(text) is not None


def foreign_file(path: Path) -> str | None:
    """Description and remedy of a file of a known kind that is no slide; None for other files.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    for magic, name, remedy in _KINDS:
        if head.startswith(magic):
            if magic == b"RIFF" and head[8:12] != b"WEBP":
                continue
            if name == "a ZIP archive" and _is_zarr(path, head):
                return f"it is a zipped Zarr. Unpack it into a folder (unzip {path.name} -d {path.stem}), and give that"
            return f"it is {name}. {remedy}"
    if head.lstrip().lower().startswith(_HTML):
        return "it is a page of HTML or XML, not an image; a download that failed leaves such a page. Download it again"
    return None


def describe_folder(path: Path) -> str:
    """Description and remedy of a folder that is no Zarr image.

    Raises:
        OSError: it cannot be read.
    """
    slides = sorted(entry for entry in path.iterdir() if _is_dicom(entry))
    if slides:
        first = slides[0].name
        return (
            f"it is a folder of {len(slides)} DICOM files. Give one of the .dcm files, such as {first}; the slide's other levels are found"
        )
    return "it is a folder without Zarr metadata. Give a file in it, or a Zarr array or group"


def _is_zarr(path: Path, head: bytes) -> bool:
    return (
        ".zarr" in path.name.lower()
        or path.suffix.lower() == ".ozx"
        or any(name in head for name in (b".zattrs", b".zgroup", b"zarr.json"))
    )


def _is_dicom(path: Path) -> bool:
    """True for a file with DICOM's mark after its preamble of 128 bytes."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return False
