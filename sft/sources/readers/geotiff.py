"""Rasters of GDAL (GeoTIFF, COG, VRT, JPEG 2000), read through rasterio (extra ``geo``): CRS and transform, nodata, masks, overviews.

`sft.sources.open_image` decodes GeoTIFFs with `sft.sources.TiffImage`, and takes this reader for files that only GDAL reads, and for calls
with ``mask=``. Policies:

- *Invalid pixels.* GDAL marks pixels as invalid by a nodata value, an internal mask or an alpha band. With ``mask=None`` a nodata value is
  a value like others, and a file with an internal mask or an alpha band is refused, since its invalid pixels would count.
  ``mask="fill"`` sets invalid pixels to ``fill_value``. ``mask="channel"`` appends a channel, the largest value of the type (1 in
  floating-point types) where all bands are valid and 0 elsewhere; invalid NaN get ``fill_value``. ``mask="ignore"`` reads the bands but
  alpha as they are stored, ``mask="band"`` all of them: GDAL declares the fourth band of 8 bits as alpha, near infrared as well.
- *Missing tiles* have the nodata value, and are invalid; without one they are 0.
- *Overviews* are the levels. A file without overviews has one.
- *Georeference.* Any affine transform, also a rotated one. A file with ground control points only has none.
- *Values* are those that are stored: scales and offsets of bands are not applied, indices of colour tables are refused.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import hypot
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from sft.common.errors import InputError, SourceError
from sft.sources.file_image import FileImage, check_decode_bytes
from sft.sources.georeference import Georeference
from sft.sources.image import ImageFacts, Pixels, Rectangle, dtype_range, missing_extra, valid_mpp
from sft.sources.normalize import PIXEL_DTYPES
from sft.sources.readers.remote import RemotePath
from sft.sources.readers.thread_pool import resolve_threads

__all__ = ["ALPHA_CHOICES", "GeoImage", "MaskMode", "georeference_mpp", "has_rasterio", "read_georeference", "same_coordinate_system"]

MaskMode: TypeAlias = Literal["fill", "channel", "ignore", "band"]
#: Choices for a file with an alpha band, for messages.
ALPHA_CHOICES = (
    'If it marks valid pixels, choose mask="fill" (invalid ones get fill_value), mask="channel" (an additional channel) or mask="ignore"; '
    'if it has values, as near infrared does in many files of four bands, choose mask="band".'
)
_UM_PER_M = 1e6


@dataclass(slots=True, kw_only=True)
class _GeoHandle:
    """Open datasets of one file, one for each level. GDAL's datasets are not safe for threads, so reads take turns."""

    levels: tuple[Any, ...]
    bands: list[int]  #: that are pixels, counted from 1
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __del__(self) -> None:
        for level in self.levels:
            level.close()


class GeoImage(FileImage[_GeoHandle]):
    """Raster of GDAL as an `sft.sources.Raster`.

    Args:
        path: of the file: GeoTIFF, COG, VRT, and the other formats of rasterio.
        mask: use of pixels that the file marks as invalid: ``"fill"``, ``"channel"`` or ``"ignore"``; ``"band"`` for an alpha band that
            has values. Default: `None` (refuse files with a mask or an alpha band)
        fill_value: of invalid pixels with ``mask="fill"``, and of invalid NaN with ``mask="channel"``. Default: 0
        num_threads: number of tiles that GDAL decodes in parallel. Default: `None` (the cores of this process, at most four)
        host_budget_bytes: limit of a decoded tile or strip. Default: `None` (1 GiB)
        palette: True to read indices of a colour table as pixels. Default: `False`

    Raises:
        InputError: no such mode, or a fill value that the type does not have.
        SourceError: the file does not exist. Other errors are raised at the first use.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mask: MaskMode | None = None,
        fill_value: float = 0,
        num_threads: int | None = None,
        host_budget_bytes: int | str | None = None,
        palette: bool = False,
    ) -> None:
        super().__init__(path)
        if mask is not None and mask not in get_args(MaskMode):
            raise InputError(f"cannot use mask={mask!r}: choose one of {', '.join(map(repr, get_args(MaskMode)))}.")
        self.mask, self.fill_value, self.num_threads = mask, fill_value, resolve_threads(num_threads)
        self.host_budget_bytes, self.palette = host_budget_bytes, palette

    @property
    def mask_channels(self) -> tuple[int, ...]:
        """Number of the channel of valid pixels, with ``mask="channel"``."""
        return (self.num_channels - 1,) if self.mask == "channel" else ()

    @contextmanager
    def _environment(self) -> Iterator[Any]:
        rasterio = _import_rasterio(f"open {self.path}")
        with rasterio.Env(GDAL_NUM_THREADS=str(self.num_threads)), warnings.catch_warnings():
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            yield rasterio

    def _open(self) -> _GeoHandle:
        with self._environment():
            opened = [open_dataset(self.path)]
            first = opened[0]
            overviews = first.overviews(1) if first.count else []
            if all(first.overviews(band) == overviews for band in first.indexes):
                opened += [open_dataset(self.path, overview_level=number) for number in range(len(overviews))]
        colours = zip(first.indexes, first.colorinterp, strict=True)
        bands = [band for band, colour in colours if colour.name != "alpha" or self.mask == "band"]
        return _GeoHandle(levels=tuple(opened), bands=bands)

    def _describe(self, handle: _GeoHandle) -> ImageFacts:
        first = handle.levels[0]
        if not handle.bands:
            raise SourceError(f"cannot use {self.path} as an image: it has no bands. Give one of its subdatasets: {first.subdatasets}.")
        types = sorted(set(first.dtypes))
        if len(types) > 1 or types[0] not in PIXEL_DTYPES:
            pixel_types = ", ".join(PIXEL_DTYPES)
            raise SourceError(
                f"cannot use {self.path} as an image: its bands are {', '.join(types)}; pixels are one of {pixel_types}. Convert it."
            )
        dtype = np.dtype(types[0])
        self._check_masks(first, dtype)
        tiles = tuple(min(level.block_shapes, key=lambda shape: shape[0] * shape[1]) for level in handle.levels)
        for rows, columns in tiles:
            check_decode_bytes(self.path, "a tile", rows * columns * len(handle.bands) * dtype.itemsize, self.host_budget_bytes)
        num_channels = len(handle.bands) + (self.mask == "channel")
        missing = _clamped(first.nodata, dtype)
        names = tuple(first.descriptions[band - 1] or "" for band in handle.bands) + (("mask",) if self.mask == "channel" else ())
        georeference = _georeference(first)
        return ImageFacts(
            level_dimensions=tuple((level.width, level.height) for level in handle.levels),
            tiles_px=tuple((columns, rows) for rows, columns in tiles),
            num_channels=num_channels,
            mpp=georeference_mpp(georeference),
            background=(missing,) * num_channels,
            nodata=first.nodata,
            georeference=georeference,
            dtype=dtype.name,
            channel_names=names if all(names) else (),
        )

    def _check_masks(self, dataset: Any, dtype: np.dtype[Any]) -> None:
        """Refuse invalid pixels without a policy, and fill values that are none of the type.

        Raises:
            InputError: a fill value that the type does not have.
            SourceError: no policy for invalid pixels, or indices of a colour table.
        """
        low, high = dtype_range(dtype)
        if self.mask == "fill" and not (low <= self.fill_value <= high or dtype.kind == "f"):
            raise InputError(
                f"cannot fill pixels of {self.path} with {self.fill_value}: its type {dtype} has {low} to {high}. Change fill_value."
            )
        flags = {flag.name for band in dataset.mask_flag_enums for flag in band}
        if self.mask is None and "per_dataset" in flags:
            if "alpha" in flags:
                raise SourceError(f"cannot read {self.path}: one of its {dataset.count} bands is declared as alpha. {ALPHA_CHOICES}")
            raise SourceError(
                f"cannot read {self.path}: it has an internal mask of valid pixels ({dataset.width} x {dataset.height} px), and invalid "
                'pixels would count. Choose mask="fill" (they get fill_value), mask="channel" (an additional channel) or mask="ignore"; or '
                "write a copy without it (gdal_translate -mask none)."
            )
        if not self.palette and any(colour.name == "palette" for colour in dataset.colorinterp):
            raise SourceError(
                f"cannot read {self.path} as an image: its values are indices of a colour table. Read labels with sft.sources.open_labels, "
                "or convert it to RGB (gdal_translate -expand rgb)."
            )

    def _read_channels(self, handle: _GeoHandle, rectangle: Rectangle, channels: Sequence[int]) -> Pixels:
        if self.mask in ("fill", "channel"):  # a pixel is invalid by all of its bands
            return super()._read_channels(handle, rectangle, channels)
        out = np.empty((len(channels), *rectangle.shape), self.dtype)
        with self._environment() as rasterio, handle.lock:
            bands = [handle.bands[channel] for channel in channels]
            handle.levels[rectangle.level].read(indexes=bands, window=rasterio.windows.Window(*rectangle.arguments), out=out)
        return np.ascontiguousarray(out.transpose(1, 2, 0))

    def _read(self, handle: _GeoHandle, rectangle: Rectangle) -> Pixels:
        dataset = handle.levels[rectangle.level]
        num_bands = len(handle.bands)
        out = np.empty((num_bands + (self.mask == "channel"), *rectangle.shape), self.dtype)
        with self._environment() as rasterio, handle.lock:
            window = rasterio.windows.Window(*rectangle.arguments)
            dataset.read(indexes=handle.bands, window=window, out=out[:num_bands])
            if self.mask in ("fill", "channel"):
                valid = dataset.read_masks(indexes=handle.bands, window=window) > 0
                if self.mask == "fill":
                    out[~valid] = self.fill_value
                else:
                    if out.dtype.kind == "f":  # a NaN next to a mask of 0 would still reach every result of the network
                        bands = out[:num_bands]
                        bands[np.isnan(bands) & ~valid] = self.fill_value
                    largest = 1 if out.dtype.kind == "f" else np.iinfo(out.dtype).max
                    out[num_bands] = np.where(valid.all(axis=0), largest, 0)
        return np.ascontiguousarray(out.transpose(1, 2, 0))


def read_georeference(path: Path | RemotePath) -> Georeference | None:
    """Georeference of a file; None for a file without one, or without rasterio."""
    if not has_rasterio():
        return None
    rasterio = _import_rasterio(f"open {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            with open_dataset(path) as dataset:
                return _georeference(dataset)
    except rasterio.errors.RasterioIOError:  # of a kind of TIFF that GDAL does not read
        return None


def georeference_mpp(georeference: Georeference | None) -> tuple[float, float] | None:
    """Micrometres per px, (x, y), of a georeference in a projected coordinate system; None otherwise."""
    if georeference is None or not georeference.crs_wkt:
        return None
    crs = _import_rasterio("read a coordinate system").crs.CRS.from_wkt(georeference.crs_wkt)
    if not crs.is_projected:
        return None
    (a, b, _, d, e, _), (_, factor) = georeference.transform, crs.linear_units_factor
    return valid_mpp(hypot(a, d) * factor * _UM_PER_M, hypot(b, e) * factor * _UM_PER_M)


def same_coordinate_system(first_wkt: str, second_wkt: str) -> bool:
    """True if two texts describe one coordinate reference system; a missing one is that of the other."""
    if not first_wkt or not second_wkt or first_wkt == second_wkt:
        return True
    systems = _import_rasterio("compare coordinate systems").crs.CRS
    return bool(systems.from_wkt(first_wkt) == systems.from_wkt(second_wkt))


def has_rasterio() -> bool:
    """True if rasterio can be imported."""
    try:
        import rasterio  # noqa: F401
    except ImportError:
        return False
    return True


def open_dataset(path: Path | RemotePath, **options: Any) -> Any:
    """Open a dataset of rasterio; a remote one through its file system."""
    rasterio = _import_rasterio(f"open {path}")
    return rasterio.open(path.open("rb") if isinstance(path, RemotePath) else str(path), **options)


def _georeference(dataset: Any) -> Georeference | None:
    crs_wkt = dataset.crs.to_wkt() if dataset.crs else ""
    if not crs_wkt and dataset.transform.is_identity:
        return None
    a, b, c, d, e, f = map(float, dataset.transform[:6])
    return Georeference(crs_wkt=crs_wkt, transform=(a, b, c, d, e, f))


def _clamped(nodata: float | None, dtype: np.dtype[Any]) -> float:
    """Value of missing tiles: the nodata value as the type has it, otherwise 0."""
    if nodata is None or dtype.kind == "f":
        return 0 if nodata is None else float(nodata)
    low, high = dtype_range(dtype)
    return 0 if nodata != nodata else int(min(max(nodata, low), high))


def _import_rasterio(purpose: str) -> Any:
    try:
        import rasterio
        import rasterio.crs
        import rasterio.errors
        import rasterio.windows
    except ImportError as error:
        raise missing_extra(purpose, "geo", error) from error
    return rasterio
