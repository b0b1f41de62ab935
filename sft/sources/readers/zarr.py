"""Zarr arrays and OME-Zarr pyramids as images.

An OME-Zarr group (versions 0.4 and 0.5) names its levels, its axes and its resolution; a plain Zarr array has one level and axes that are
its dimension names, or inferred, or given, as for any array. A group of bioformats2raw holds several images (series). All may be packed in
one ZIP file. A chunk is the smallest unit that is decoded, so chunks are the tiles. A missing chunk has the array's fill value, which is
the background: Zarr stores empty regions this way, and a lost chunk looks the same. A lost array (an unmounted drive, a cleaned folder) is
detected: each read checks that its metadata exist. Damage inside a chunk is found as far as its codec detects it: Zstandard (the default of
format 3) notices a chunk that was cut short, Blosc (of format 2) does not.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sft.common.errors import InputError, SourceError, reason_text, some_names
from sft.sources.file_image import FileImage
from sft.sources.host_arrays import Layout, resolve_layout
from sft.sources.image import ImageFacts, Pixels, Rectangle, Size, missing_extra, valid_mpp
from sft.sources.normalize import PIXEL_DTYPES
from sft.sources.readers.remote import RemotePath, remote_path

__all__ = ["ZARR_FILES", "ZarrImage", "is_zarr_folder", "zip_root"]

_UNIT_UM = {"micrometer": 1.0, "nanometer": 1e-3, "millimeter": 1e3, "centimeter": 1e4, "meter": 1e6}
_IMAGE_AXES = "cyx"
#: Axes by the names that programs write.
_AXIS_NAMES = {
    **dict.fromkeys(("channel", "channels", "band", "bands"), "c"),
    **dict.fromkeys(("row", "rows", "height", "lat", "latitude"), "y"),
    **dict.fromkeys(("column", "columns", "col", "width", "lon", "longitude"), "x"),
    **dict.fromkeys(("depth", "slice"), "z"),
    "time": "t",
}
#: Files that describe an array, in formats 3 and 2, and a group.
_DESCRIPTIONS = ("zarr.json", ".zarray")
ZARR_FILES = (*_DESCRIPTIONS, ".zgroup", ".zattrs")
_ZIP_MAGIC = b"PK\x03\x04"
#: Attribute of a group of several images.
_BIOFORMATS = "bioformats2raw.layout"
#: Codecs of pixels. Others are refused: "pickle" runs code, and some belong to packages that happen to be installed.
_CODECS = frozenset(
    [
        "adler32",
        "astype",
        "bitround",
        "blosc",
        "bytes",
        "bz2",
        "crc32",
        "crc32c",
        "delta",
        "endian",
        "fixedscaleoffset",
        "fletcher32",
        "gzip",
        "jenkins_lookup3",
        "jpegxl",
        "lz4",
        "lzma",
        "packbits",
        "pcodec",
        "quantize",
        "sharding_indexed",
        "shuffle",
        "transpose",
        "zfpy",
        "zlib",
        "zstd",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ZarrLevels:
    """An open store."""

    arrays: tuple[Any, ...]
    axes: str  #: a letter for each axis of the arrays
    mpp: tuple[float, float] | None
    descriptions: tuple[Path | None, ...]  #: the file that describes each array, where it is one
    channel_names: tuple[str, ...] = ()


class ZarrImage(FileImage[_ZarrLevels]):
    """A Zarr array or an OME-Zarr group as a `sft.sources.Raster`: uint8, uint16, int16 or floating-point pixels, any number of channels.

    Args:
        path: of the folder, of a ZIP file of one, or its URL (extra ``remote``).
        layout: axes of a plain array. Default: `None` (inferred if only one is possible)
        at: index along every axis other than channels, height and width that has more than one entry, such as ``{"t": 0, "z": 12}``.
            Default: `None`
        series: number of the image in a group of several (bioformats2raw). Default: `None` (the only one)
        labels: True to read integers of any size as well: label maps. Default: `False`

    Raises:
        SourceError: the folder does not exist. Other errors are raised at the first use.
    """

    # Defaults for pickles of older releases.
    series: int | None = None
    labels: bool = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layout: Layout | None = None,
        at: Mapping[str, int] | None = None,
        series: int | None = None,
        labels: bool = False,
    ) -> None:
        super().__init__(path)
        self.layout, self.at, self.series, self.labels = layout, dict(at or {}), series, labels

    def _open(self) -> _ZarrLevels:
        try:
            import zarr
        except ImportError as error:
            raise missing_extra(f"open {self.path}", "zarr", error) from error
        url = remote_path(self.path)
        if _is_zip_file(self.path):
            root = zip_root(self.path)
            if root is None:
                raise SourceError(f"cannot open {self.path}: it is a ZIP archive without Zarr metadata. Give the image in it.")
            store = zarr.storage.ZipStore(self.path, mode="r") if url is None else _remote_zip_store(url)
            node = zarr.open(store, path=root, mode="r")
        else:
            node = zarr.open(str(self.path) if url is None else zarr.storage.FsspecStore.from_url(str(url), read_only=True), mode="r")
        described_by: Any = dict(node.attrs)
        if isinstance(node, zarr.Group) and _BIOFORMATS in described_by.get("ome", described_by):
            node = self._series_group(node)
        elif self.series not in (None, 0):
            raise InputError(f"cannot use series {self.series} of {self.path}: it is one image. Leave series out.")
        if isinstance(node, zarr.Array):
            self._check_codecs(node)
            return _ZarrLevels(arrays=(node,), axes=self._array_axes(node), mpp=None, descriptions=(self._description(node),))
        attributes: dict[str, Any] = dict(node.attrs)
        multiscales = attributes.get("ome", attributes).get("multiscales")
        if not multiscales:
            raise SourceError(
                f"cannot use {self.path} as an image: it is a Zarr group without OME multiscales. Give the path of one of its arrays: "
                f"{some_names(sorted(node.keys())) or 'it has none'}."
            )
        described = multiscales[0]
        axes = "".join(axis if isinstance(axis, str) else axis["name"] for axis in described["axes"])
        arrays = _pyramid_levels([node[dataset["path"]] for dataset in described["datasets"]], axes)
        for array in arrays:
            self._check_codecs(array)
        return _ZarrLevels(
            arrays=arrays,
            axes=axes,
            mpp=_ome_mpp(described, axes),
            descriptions=tuple(map(self._description, arrays)),
            channel_names=_channel_names(attributes.get("ome", attributes).get("omero")),
        )

    def _series_group(self, node: Any) -> Any:
        """Group of one series of bioformats2raw.

        Raises:
            InputError: the series does not exist, or none is chosen of several.
        """
        names = sorted((name for name, _ in node.groups() if name.isdigit()), key=int)
        series = 0 if self.series is None and len(names) == 1 else self.series
        if series is None or str(series) not in names:
            problem = "no series is chosen" if series is None else f"it has no series {series}"
            raise InputError(f"cannot open {self.path}: {problem}, and it holds series {some_names(names) or 'none'}. Give series=0.")
        return node[str(series)]

    def _check_codecs(self, array: Any) -> None:
        """Refuse codecs that do not encode pixels, before a chunk is read.

        Raises:
            SourceError: there are some.
        """
        unknown = sorted(name for name in _codec_names(array.metadata.to_dict()) - _CODECS if not name.startswith("imagecodecs_"))
        if unknown:
            raise SourceError(
                f"cannot use {self.path} as an image: its codecs {', '.join(unknown)} do not encode pixels, and may run code. Write it "
                "again with a codec such as zstd or blosc."
            )

    def _description(self, array: Any) -> Path | None:
        files = (self.path / array.path / name for name in _DESCRIPTIONS)
        return next((file for file in files if file.is_file()), None)

    def _array_axes(self, array: Any) -> str:
        named = _named_axes(array)
        if named is not None and self.layout is None:
            return named
        if array.ndim == 2:
            return "yx"
        try:
            layout = resolve_layout(str(self.path), tuple(array.shape), self.layout)
        except InputError as error:
            raise InputError(
                f"{error} With a Zarr array: sft.sources.ZarrImage(path, layout=...), or write its dimension_names, such as c, y, x."
            ) from error
        return layout.replace("H", "y").replace("W", "x").replace("C", "c").replace("N", "n")

    def _describe(self, handle: _ZarrLevels) -> ImageFacts:
        first, axes = handle.arrays[0], handle.axes
        if not {"y", "x"} <= set(axes) or len(axes) != first.ndim:
            raise SourceError(f"cannot use {self.path} as an image: its axes are {axes!r} for shape {first.shape}. Give an image.")
        is_label = self.labels and first.dtype.kind in "uib"
        if (first.dtype.name not in PIXEL_DTYPES and not is_label) or any(array.dtype != first.dtype for array in handle.arrays):
            types = ", ".join(sorted({array.dtype.name for array in handle.arrays}))
            raise SourceError(
                f"cannot use {self.path} as an image: it holds {types}; pixels are one of {', '.join(PIXEL_DTYPES)}. Convert it; labels "
                "are read by sft.sources.open_labels."
            )
        unknown = sorted(axis for axis in self.at if axis not in axes or axis in _IMAGE_AXES)
        if unknown:
            others = [axis for axis in axes if axis not in _IMAGE_AXES]
            raise InputError(
                f"cannot use {self.path} as an image: at={self.at!r} names {', '.join(map(repr, unknown))}, and one index is chosen along "
                f"{', '.join(map(repr, others)) or 'no axis'} (its axes are {axes!r}). Correct at."
            )
        for axis, extent in zip(axes, first.shape, strict=True):
            if axis not in _IMAGE_AXES and not 0 <= self.at.get(axis, 0 if extent == 1 else -1) < extent:
                raise InputError(f"cannot use {self.path} as an image: axis {axis!r} has {extent} entries. Choose one: at={{{axis!r}: 0}}.")
        num_channels = first.shape[axes.index("c")] if "c" in axes else 1
        return ImageFacts(
            level_dimensions=tuple(_size(array.shape, axes) for array in handle.arrays),
            tiles_px=tuple(_size(array.chunks, axes) for array in handle.arrays),
            num_channels=num_channels,
            mpp=handle.mpp,
            background=(_as_pixels(np.asarray(first.fill_value or 0, first.dtype)).item(),) * num_channels,
            dtype=_as_pixels(np.empty(0, first.dtype)).dtype.name,
            channel_names=handle.channel_names if len(handle.channel_names) == num_channels else (),
        )

    def _read_channels(self, handle: _ZarrLevels, rectangle: Rectangle, channels: Sequence[int]) -> Pixels:
        """Chunks of other channels are not decoded, if each channel has its own."""
        if "c" not in handle.axes or handle.arrays[rectangle.level].chunks[handle.axes.index("c")] > 1:
            return super()._read_channels(handle, rectangle, channels)
        return np.concatenate([self._read_slice(handle, rectangle, slice(channel, channel + 1)) for channel in channels], axis=2)

    def _read(self, handle: _ZarrLevels, rectangle: Rectangle) -> Pixels:
        return self._read_slice(handle, rectangle, slice(None))

    def _read_slice(self, handle: _ZarrLevels, rectangle: Rectangle, channels: slice) -> Pixels:
        index, level = {**dict(zip("yx", rectangle.slices, strict=True)), "c": channels}, rectangle.level
        pixels = _as_pixels(np.asarray(handle.arrays[level][tuple(index.get(axis, self.at.get(axis, 0)) for axis in handle.axes)]))
        description = handle.descriptions[level]
        if description is not None and not description.is_file():
            raise SourceError(f"cannot read {self.path}: {description} is missing, and its pixels would be the fill value. Restore it.")
        axes = [axis for axis in handle.axes if axis in _IMAGE_AXES]
        if "c" not in axes:
            pixels, axes = pixels[..., None], [*axes, "c"]
        return np.ascontiguousarray(pixels.transpose([axes.index(axis) for axis in "yxc"]), pixels.dtype.newbyteorder("="))


def _as_pixels(values: Pixels) -> Pixels:
    """Values of labels as numbers: false is 0, true is 1."""
    return values.astype(np.uint8) if values.dtype.kind == "b" else values


def _named_axes(array: Any) -> str | None:
    """Axes of an array by its dimension names (format 3, or xarray's attribute); ``None`` without names, or with unknown ones."""
    names = getattr(array.metadata, "dimension_names", None) or dict(array.attrs).get("_ARRAY_DIMENSIONS")
    if not isinstance(names, (list, tuple)) or len(names) != array.ndim or not all(isinstance(name, str) for name in names):
        return None
    axes = "".join(_AXIS_NAMES.get(name.lower(), name.lower() if len(name) == 1 else "?") for name in names)
    return axes if "?" not in axes and len(set(axes)) == len(axes) and {"y", "x"} <= set(axes) else None


def is_zarr_folder(path: Path | RemotePath) -> bool:
    """True for a folder with Zarr metadata; a folder of a web server may look like a file."""
    may_be_folder = isinstance(path, RemotePath) and path.suffix.lower() in ("", ".zarr")
    return (may_be_folder or not path.is_file()) and any((path / name).exists() for name in ZARR_FILES)


def _is_zip_file(path: Path | RemotePath) -> bool:
    """True for a ZIP file; a folder on a web server, which may look like a file, has no such first bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return bool(file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC)


def _remote_zip_store(url: RemotePath) -> Any:
    """Store of the files in a remote ZIP file, of which only the directory and the chunks that are read are fetched."""
    import zarr
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
    from fsspec.implementations.zip import ZipFileSystem

    archive = AsyncFileSystemWrapper(ZipFileSystem(url.open("rb")), asynchronous=True)
    return zarr.storage.FsspecStore(archive, read_only=True, path="")


def zip_root(path: Path | RemotePath) -> str | None:
    """Folder of a Zarr array or group in a ZIP file, empty for its top; None for a file without one."""
    try:
        with path.open("rb") as data, zipfile.ZipFile(data) as file:
            folders = [name.rpartition("/")[0] for name in file.namelist() if name.rpartition("/")[2] in ZARR_FILES]
    except zipfile.BadZipFile as error:
        raise SourceError(
            f"cannot open {path}: {reason_text(error)}. It is not a ZIP archive, or it is cut short; copy it again."
        ) from error
    return min(folders, key=lambda folder: (folder.count("/") + bool(folder), folder), default=None)


def _channel_names(omero: Any) -> tuple[str, ...]:
    """Names of the channels in the rendering settings of OMERO; empty where one lacks a name."""
    channels = omero.get("channels") if isinstance(omero, Mapping) else None
    labels = [channel.get("label") for channel in channels or () if isinstance(channel, Mapping)]
    names = tuple(label for label in labels if isinstance(label, str) and label)
    return names if len(names) == len(channels or ()) else ()


def _pyramid_levels(arrays: Sequence[Any], axes: str) -> tuple[Any, ...]:
    """The levels that differ from the first in height and width alone: where planes were merged, an index is another plane's."""

    def others(array: Any) -> list[int]:
        return [extent for axis, extent in zip(axes, array.shape, strict=False) if axis not in "yx"]

    first = arrays[0]
    return tuple(array for array in arrays if array.ndim == first.ndim and others(array) == others(first))


def _codec_names(metadata: Mapping[str, Any]) -> set[str]:
    """Names of the codecs of an array in format 2 or 3, those inside of shards included."""
    names = set()
    waiting = [metadata.get("compressor"), *(metadata.get("filters") or ()), *(metadata.get("codecs") or ())]
    while waiting:
        codec = waiting.pop()
        if codec is None:
            continue
        described = codec if isinstance(codec, Mapping) else codec.get_config() if hasattr(codec, "get_config") else codec.to_dict()
        names.add(str(described.get("id") or described.get("name")).removeprefix("numcodecs."))
        settings = described.get("configuration") or {}
        waiting += [*(settings.get("codecs") or ()), *(settings.get("index_codecs") or ())]
    return names


def _size(extents: tuple[int, ...], axes: str) -> Size:
    return int(extents[axes.index("x")]), int(extents[axes.index("y")])


def _ome_mpp(described: Mapping[str, Any], axes: str) -> tuple[float, float] | None:
    """Micrometres per px of the first level: its own scale times the pyramid's."""
    units = {axis["name"]: axis.get("unit") for axis in described["axes"] if not isinstance(axis, str)}
    sizes = []
    for axis in "xy":
        unit_um = _UNIT_UM.get(units.get(axis) or "")
        scale = 1.0
        for transformations in (
            described["datasets"][0].get("coordinateTransformations", ()),
            described.get("coordinateTransformations", ()),
        ):
            for transformation in transformations:
                if transformation.get("type") == "scale":
                    scale *= float(transformation["scale"][axes.index(axis)])
        sizes.append(None if unit_um is None else scale * unit_um)
    return valid_mpp(*sizes)
