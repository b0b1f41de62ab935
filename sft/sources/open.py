"""`open_image`: from a path to an image, with reader, resolution, error policy and cache.

The reader is chosen by the contents of a file, not by its name:

=============================================  =========================================================================================
path                                           reader
=============================================  =========================================================================================
TIFF                                           ``"tiff"`` if it decodes the same pixels as OpenSlide, which is the second choice
NumPy file                                     ``"npy"``
folder with Zarr metadata                      ``"zarr"``
other files                                    ``"openslide"``
=============================================  =========================================================================================

OpenSlide reads TIFFs of vendors with overlapping tiles or several areas, and those with missing tiles in reduced levels, which it draws
from the next finer level.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from sft.common.errors import InputError, SkipSlideError, SourceError
from sft.sources.arrays import ArrayImage
from sft.sources.cached import Cached
from sft.sources.error_policy import OnError, Tolerant, resolve_on_error
from sft.sources.image import Raster
from sft.sources.readers.openslide import Slide
from sft.sources.readers.zarr import ZarrImage
from sft.sources.resample import at_mpp
from sft.sources.tiff import NotTiledError, TiffImage
from sft.sources.views import WithMpp

__all__ = ["Reader", "open_image"]

Reader: TypeAlias = Literal["auto", "openslide", "tiff", "zarr", "npy"]

_TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_NPY_MAGIC = b"\x93NUMPY"
_ZARR_FILES = ("zarr.json", ".zgroup", ".zarray", ".zattrs")
#: OpenSlide's vendor name of files with a plain grid of tiles.
_PLAIN_VENDORS = ("aperio", "generic-tiff", None)
_VOLUME_SUFFIXES = (".nii", ".nii.gz", ".hdr", ".img")
_MISSING = "a library is missing"


def open_image(
    path: str | os.PathLike[str],
    *,
    mpp: float | None = None,
    slide_mpp: float | tuple[float, float] | None = None,
    reader: Reader = "auto",
    on_error: OnError = "raise",
    host_budget_bytes: int | str | None = None,
    num_threads: int | None = None,
) -> Raster:
    """Open a slide, an array or a Zarr image.

    Args:
        path: of the file or folder.
        mpp: resolution to read at, in micrometres per px; see `sft.sources.at_mpp`. Default: `None` (the largest level as it is)
        slide_mpp: resolution of the largest level, instead of the file's; one number, or (x, y). Default: `None`
        reader: by name. Default: ``"auto"`` (by the file's contents)
        on_error: error policy; see `sft.sources.error_policy`. Default: ``"raise"``
        host_budget_bytes: host memory in which decoded rows are kept for later passes; see `sft.sources.Cached`. Default: `None` (none)
        num_threads: tiles decoded in parallel by our own readers. Default: `None` (the cores of this process, at most four)

    Returns:
        An opened image at the requested resolution. `sft.sources.Normalized` makes it an input of a network.

    Raises:
        InputError: an argument is wrong, or the resolution is not available.
        SourceError: the file cannot be read; `sft.SkipSlideError` with ``on_error="skip"``.
    """
    if reader not in get_args(Reader):
        raise InputError(f"cannot use reader {reader!r}: choose one of {', '.join(map(repr, get_args(Reader)))}.")
    policy = resolve_on_error(on_error)
    try:
        image = _open(Path(path), reader, policy, num_threads)
    except SourceError as error:
        if policy == "skip":
            raise SkipSlideError(f"{error} (on_error='skip': leave this slide out)") from error
        raise
    if policy != "raise":
        image = Tolerant(image, policy)
    if slide_mpp is not None:
        image = WithMpp(image, slide_mpp)
    if mpp is not None:
        image = at_mpp(image, mpp)
    return image if host_budget_bytes is None else Cached(image, host_budget_bytes=host_budget_bytes)


def _open(path: Path, reader: Reader, policy: OnError, num_threads: int | None) -> Raster:
    try:
        path.stat()
    except OSError as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise SourceError(f"cannot open {path}: {why}. Check the path.") from error
    kind = _detect_reader(path) if reader == "auto" else reader
    image: Raster
    if kind == "zarr":
        image = ZarrImage(path)
    elif kind == "npy":
        return ArrayImage(path)
    elif kind == "openslide":
        image = Slide(path)
    else:
        image = _open_tiff(path, policy, num_threads, may_fall_back=reader == "auto")
    _ = image.level_dimensions  # that it is no image shows here, not in the middle of an epoch
    return image


def _detect_reader(path: Path) -> Reader:
    if path.is_dir():
        if any((path / name).exists() for name in _ZARR_FILES):
            return "zarr"
        raise SourceError(f"cannot open {path}: it is a folder without Zarr metadata. Give a file in it, or a Zarr array or group.")
    if not path.is_file():
        raise SourceError(f"cannot open {path}: it is neither a file nor a folder. Give one.")
    try:
        with open(path, "rb") as file:
            head = file.read(8)
    except OSError as error:
        raise SourceError(f"cannot open {path}: {error.strerror}. Make it readable, or copy it again.") from error
    if not head:
        raise SourceError(f"cannot open {path}: it has 0 bytes. Copy it again.")
    if path.name.lower().endswith(_VOLUME_SUFFIXES):
        raise SourceError(f"cannot open {path} as an image: it is a volume. Use sft.sources.NiftiVolume(path).")
    if head.startswith(_NPY_MAGIC):
        return "npy"
    return "tiff" if head.startswith(_TIFF_MAGIC) else "openslide"


def _open_tiff(path: Path, policy: OnError, num_threads: int | None, *, may_fall_back: bool) -> Raster:
    vendor = _vendor(path) if may_fall_back else None
    if vendor not in _PLAIN_VENDORS:
        return Slide(path)
    image = TiffImage(path, num_threads=num_threads)
    try:
        _ = image.facts
        if may_fall_back and vendor is not None and image.has_missing_tiles and not image.is_geotiff:
            return Slide(path)
    except SourceError as error:
        is_ours = isinstance(error, NotTiledError) or _MISSING in str(error)
        if may_fall_back and is_ours and (vendor is not None or not isinstance(error, NotTiledError)):
            return Slide(path)
        raise
    if policy != "fill":
        image.check_complete()
    return image


def _vendor(path: Path) -> Any:
    """Vendor of a slide file by OpenSlide; None for an unknown format, or without OpenSlide."""
    try:
        import openslide
    except (ImportError, OSError):
        return None
    try:
        return openslide.OpenSlide.detect_format(path)
    except Exception:  # whatever is wrong with the file, the reader that opens it will say so
        return None
