"""`open_image`: from a path or URL to an image, with reader, resolution, error policy and cache.

The reader is chosen by the contents of a file, not by its name:

=============================================  =========================================================================================
path                                           reader
=============================================  =========================================================================================
TIFF                                           ``"tiff"``; ``"openslide"`` for TIFFs of vendors with overlapping tiles or several areas,
                                               and for missing tiles in reduced levels, which it draws from the next finer level;
                                               ``"geo"`` with ``mask=``, and for GeoTIFFs that only GDAL reads
VRT, JPEG 2000 with map coordinates            ``"geo"``
PNG, JPEG, JPEG 2000                           ``"encoded"``
NumPy file                                     ``"npy"``
folder or ZIP file with Zarr metadata          ``"zarr"``
folder of DICOM files, other files             ``"openslide"``
=============================================  =========================================================================================

Several paths are one image (`sft.sources.readers.composite`): files of one place are channels, files at other places a mosaic.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from sft.common.atomic_files import is_text_path
from sft.common.errors import InputError, SkipSlideError, SourceError
from sft.sources.arrays import ArrayImage
from sft.sources.cached import Cached
from sft.sources.error_policy import OnError, Tolerant, resolve_on_error
from sft.sources.file_image import COSTLY_BYTES, ReadCostWarning
from sft.sources.image import Raster, pixel_dtype
from sft.sources.readers.composite import Channel, ChannelSelection, ChannelStack, Mosaic, lie_at_one_place
from sft.sources.readers.dicom import find_dicom_file
from sft.sources.readers.encoded import EncodedImage, encoded_format
from sft.sources.readers.geotiff import GeoImage, MaskMode, has_rasterio, read_georeference
from sft.sources.readers.openslide import Slide
from sft.sources.readers.remote import RemotePath, naming_remote_errors, source_path
from sft.sources.readers.zarr import ZarrImage, is_zarr_folder, zip_root
from sft.sources.resample import at_mpp
from sft.sources.tiff import NotTiledError, TiffImage, has_colour_table_file, read_geo_tags, read_sample_tags
from sft.sources.views import RasterView, WithMpp

__all__ = ["Reader", "open_image"]

Reader: TypeAlias = Literal["auto", "openslide", "tiff", "zarr", "npy", "geo", "encoded"]

_TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_NPY_MAGIC = b"\x93NUMPY"
_ZIP_MAGIC = b"PK\x03\x04"
_VRT_MAGIC = b"<VRTDataset"
#: OpenSlide's vendor name of files with a plain grid of tiles.
_PLAIN_VENDORS = ("aperio", "generic-tiff", None)
_VOLUME_SUFFIXES = (".nii", ".nii.gz", ".hdr", ".img")
_MISSING = "a library is missing"
_HEAD_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """Arguments of a call that readers use."""

    reader: Reader
    policy: OnError
    num_threads: int | None
    series: int | None
    at: Mapping[str, int] | None
    mask: MaskMode | None
    fill_value: float
    host_budget_bytes: int | str | None

    def refuse(self, path: object, what: str, **arguments: Any) -> None:
        """Refuse arguments that a kind of image does not have.

        Raises:
            InputError: one of them is not None.
        """
        names = [f"{name}={value!r}" for name, value in arguments.items() if value is not None]
        if names:
            raise InputError(f"cannot open {path} with {', '.join(names)}: it is {what}, to which this does not apply. Leave it out.")


def open_image(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    mpp: float | None = None,
    slide_mpp: float | tuple[float, float] | None = None,
    reader: Reader = "auto",
    on_error: OnError = "raise",
    host_budget_bytes: int | str | None = None,
    num_threads: int | None = None,
    series: int | None = None,
    at: Mapping[str, int] | None = None,
    mask: MaskMode | None = None,
    fill_value: float = 0,
    channels: Sequence[Channel] | None = None,
) -> Raster:
    """Open a slide, a scene, an array or a Zarr image.

    Args:
        path: of the file or folder, or a URL of a TIFF, Zarr, PNG, JPEG or JPEG 2000 image (extra ``remote``). A list of paths is one
            image: files with the same upper left corner, or without map coordinates, are its channels one after another; files at other
            places of one grid of map coordinates are a mosaic, in which later files lie over earlier ones.
        mpp: resolution to read at, in micrometres per px; see `sft.sources.at_mpp`. Default: `None` (the largest level as it is)
        slide_mpp: resolution of the largest level, instead of the file's; one number, or (x, y). Default: `None`
        reader: by name. Default: ``"auto"`` (by the file's contents)
        on_error: error policy; see `sft.sources.error_policy`. Default: ``"raise"``
        host_budget_bytes: host memory in which decoded rows are kept for later passes; see `sft.sources.Cached`. It is also the limit of
            images, tiles and strips that are decoded at once. Default: `None` (no rows are kept; the limit is 1 GiB)
        num_threads: tiles decoded in parallel by our own readers. Default: `None` (the cores of this process, at most four)
        series: number of the image in a file or folder of several (OME-TIFF, bioformats2raw, DICOM). Default: `None` (the only one; of
            OME-TIFF the first)
        at: index along every axis other than channels, height and width, such as ``{"z": 12}`` (OME-TIFF, Zarr). Default: `None`
        mask: use of pixels that a GeoTIFF marks as invalid: ``"fill"``, ``"channel"`` or ``"ignore"``; ``"band"`` for an alpha band that
            has values, such as near infrared; see `sft.sources.GeoImage`. Default: `None` (a nodata value is a value like others; files
            with a mask or an alpha band are refused)
        fill_value: of invalid pixels, with ``mask="fill"``. Default: 0
        channels: numbers or names of the channels to read, in this order, such as ``["DAPI", "CD3"]`` or ``[3, 2, 1]``. Names are those of
            OME or the descriptions of bands. Default: `None` (all)

    Returns:
        An opened image at the requested resolution. `sft.sources.Normalized` makes it an input of a network.

    Raises:
        BudgetError: an image, tile or strip that is decoded at once exceeds the host budget.
        InputError: an argument is wrong, or the resolution is not available.
        SourceError: the file cannot be read; `sft.SkipSlideError` with ``on_error="skip"``.
    """
    if reader not in get_args(Reader):
        raise InputError(f"cannot use reader {reader!r}: choose one of {', '.join(map(repr, get_args(Reader)))}.")
    policy = resolve_on_error(on_error)
    request = _Request(
        reader=reader,
        policy=policy,
        num_threads=num_threads,
        series=series,
        at=at,
        mask=mask,
        fill_value=fill_value,
        host_budget_bytes=host_budget_bytes,
    )
    if is_text_path(path) or isinstance(path, RemotePath):
        image = _at_resolution(_open_one(path, request, channels), slide_mpp, mpp)
    elif isinstance(path, (list, tuple)) and path:
        image = _open_several(path, request, channels, slide_mpp, mpp)
    else:
        raise InputError(f"cannot open {path!r}: give a path, a URL, or a list of paths.")
    return image if host_budget_bytes is None else Cached(image, host_budget_bytes=host_budget_bytes)


def _open_one(path: Any, request: _Request, channels: Sequence[Channel] | None) -> Raster:
    """A file with its error policy."""
    where = source_path(path)
    try:
        with naming_remote_errors(where):
            image = _open(where, request)
    except SourceError as error:
        if request.policy == "skip":
            raise SkipSlideError(f"{error} (on_error='skip': leave this slide out)") from error
        raise
    _warn_of_cost(image)
    if channels is not None:
        image = ChannelSelection(image, channels)
    return image if request.policy == "raise" else Tolerant(image, request.policy)


def _open_several(
    paths: Sequence[Any],
    request: _Request,
    channels: Sequence[Channel] | None,
    slide_mpp: float | tuple[float, float] | None,
    mpp: float | None,
) -> Raster:
    """Several files as one image: a stack of channels, each read at the resolution, or a mosaic."""
    opened, names = [_open_one(path, request, None) for path in paths], list(map(str, paths))
    if not lie_at_one_place(opened):
        mosaic: Raster = Mosaic(opened, names)
        return _at_resolution(mosaic if channels is None else ChannelSelection(mosaic, channels), slide_mpp, mpp)
    stack = ChannelStack([_at_resolution(image, slide_mpp, mpp) for image in opened], names)
    return stack if channels is None else ChannelSelection(stack, channels)


def _at_resolution(image: Raster, slide_mpp: float | tuple[float, float] | None, mpp: float | None) -> Raster:
    if slide_mpp is not None:
        image = WithMpp(image, slide_mpp)
    return image if mpp is None else at_mpp(image, mpp)


def _warn_of_cost(image: Raster) -> None:
    """Warn of a file that is decoded in units of more than 64 MiB."""
    note = RasterView(image).cost_note
    tile_w, tile_h = image.level_tiles_px[0] or (image.width_px, image.height_px)
    if note and tile_w * tile_h * image.num_channels * pixel_dtype(image).itemsize >= COSTLY_BYTES:
        warnings.warn(f"{image}: {note}", ReadCostWarning, stacklevel=4)


def _open(path: Any, request: _Request) -> Raster:
    try:
        path.stat()
    except OSError as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        if not (isinstance(path, RemotePath) and path.exists()):  # a folder of an object store has no size
            raise SourceError(f"cannot open {path}: {why}. Check the path.") from error
    if isinstance(path, Path) and path.is_dir() and request.reader in ("auto", "openslide"):
        dicom = find_dicom_file(path, series=request.series)
        if dicom is not None:
            request.refuse(path, "a DICOM slide", at=request.at, mask=request.mask)
            return Slide(dicom)
    kind = _detect_reader(path) if request.reader == "auto" else request.reader
    if kind != "tiff" and kind != "geo":
        request.refuse(path, f"read by the reader {kind!r}", mask=request.mask)
    if kind not in ("tiff", "zarr"):
        request.refuse(path, f"read by the reader {kind!r}", series=request.series, at=request.at)
    image: Raster
    if kind == "zarr":
        image = ZarrImage(path, series=request.series, at=request.at)
    elif kind == "npy":
        return ArrayImage(_local(path))
    elif kind == "openslide":
        image = Slide(_local(path))
    elif kind == "geo":
        image = _geo_image(path, request)
    elif kind == "encoded":
        image = EncodedImage(path, host_budget_bytes=request.host_budget_bytes)
    else:
        image = _open_tiff(path, request)
    _ = image.level_dimensions  # that it is not an image shows here, not in the middle of an epoch
    return image


def _local(path: Any) -> Path:
    """The path, unless it is remote.

    Raises:
        SourceError: it is a URL of a format that is read from a disk only.
    """
    if isinstance(path, RemotePath):
        raise SourceError(f"cannot open {path}: of remote files, TIFF, Zarr, PNG, JPEG and JPEG 2000 are read. Copy it to a disk.")
    assert isinstance(path, Path)
    return path


def _geo_image(path: Any, request: _Request) -> GeoImage:
    return GeoImage(
        path,
        mask=request.mask,
        fill_value=request.fill_value,
        num_threads=request.num_threads,
        host_budget_bytes=request.host_budget_bytes,
    )


def _detect_reader(path: Any) -> Reader:
    if is_zarr_folder(path):
        return "zarr"
    if not path.is_file():
        if path.is_dir():
            raise SourceError(
                f"cannot open {path}: it is a folder without Zarr metadata or DICOM files. Give a file in it, or a Zarr array or group."
            )
        raise SourceError(f"cannot open {path}: it is neither a file nor a folder. Give one.")
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise SourceError(f"cannot open {path}: {error.strerror or error}. Make it readable, or copy it again.") from error
    if not head:
        raise SourceError(f"cannot open {path}: it has 0 bytes. Copy it again.")
    if path.name.lower().endswith(_VOLUME_SUFFIXES):
        raise SourceError(f"cannot open {path} as an image: it is a volume. Use sft.sources.NiftiVolume(path).")
    if head.startswith(_NPY_MAGIC):
        return "npy"
    if head.startswith(_VRT_MAGIC):
        return "geo"
    if head.startswith(_ZIP_MAGIC) and zip_root(path) is not None:
        return "zarr"
    if head.startswith(_TIFF_MAGIC):
        return "tiff"
    encoding = encoded_format(head)
    # A MIRAX slide is a JPEG image with a folder of the same name.
    if not encoding or not (isinstance(path, RemotePath) or _vendor(path) is None):
        return "openslide"
    return "geo" if encoding == "JPEG 2000" and isinstance(path, Path) and read_georeference(path) is not None else "encoded"


def _open_tiff(path: Any, request: _Request) -> Raster:
    may_fall_back = request.reader == "auto"
    if request.mask is not None:
        if not may_fall_back:
            raise InputError(
                f"cannot open {path} with mask={request.mask!r} and reader='tiff': masks are read by reader='geo'. Leave one out."
            )
        return _geo_image(path, request)
    mask_path = path.with_name(f"{path.name}.msk") if isinstance(path, Path) else None
    if mask_path is not None and mask_path.is_file():
        raise SourceError(
            f"cannot read {path}: {mask_path.name} next to it is a mask of valid pixels, and invalid pixels would count. Choose "
            'mask="fill" (they get fill_value), mask="channel" (an additional channel) or mask="ignore".'
        )
    if isinstance(path, Path) and has_colour_table_file(path):
        raise SourceError(
            f"cannot read {path} as an image: its values are indices of the colour table in {path.name}.aux.xml. Read labels with "
            "sft.sources.open_labels, convert it to RGB (gdal_translate -expand rgb), or move that file away to read grey values."
        )
    vendor = _vendor(path) if may_fall_back and isinstance(path, Path) else None
    if vendor not in _PLAIN_VENDORS:
        request.refuse(path, f"a slide of {vendor}", series=request.series, at=request.at)
        return Slide(path)
    image = TiffImage(
        path, num_threads=request.num_threads, series=request.series, at=request.at, host_budget_bytes=request.host_budget_bytes
    )
    is_colour = vendor is not None and request.series is None and not request.at
    try:
        facts = image.facts
        is_openslides = facts.dtype == "uint8" and facts.num_channels in (1, 3)
        if may_fall_back and is_colour and is_openslides and image.has_missing_tiles and not image.is_geotiff:
            return Slide(path)
    except SourceError as error:
        is_ours = isinstance(error, NotTiledError) or _MISSING in str(error)
        other = _other_reader(path, request, is_colour=is_colour) if may_fall_back and is_ours else None
        if other is not None:
            return other
        raise
    if request.policy != "fill":
        image.check_complete()
    return image


def _other_reader(path: Any, request: _Request, *, is_colour: bool) -> Raster | None:
    """Image of OpenSlide or GDAL for a TIFF that is not decoded directly; None where neither returns the samples as they are."""
    is_geo = read_geo_tags(path).is_geo
    if is_colour:
        samples = read_sample_tags(path)
        if samples.fit_openslide and not (is_geo and samples.extra_samples):
            return Slide(path)
    return _geo_image(path, request) if is_geo and has_rasterio() else None


def _vendor(path: Path) -> Any:
    """Vendor of a slide file by OpenSlide; None for an unknown format, or without OpenSlide."""
    try:
        import openslide
    except (ImportError, OSError):
        return None
    try:
        return openslide.OpenSlide.detect_format(path)
    except Exception:  # the reader that opens the file reports the problem
        return None
