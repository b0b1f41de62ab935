"""Label maps as images of one channel of integers, read in rectangles: tiled TIFF, COG, OME-Zarr, ``.npy``, PNG.

A label map has the types of pixels and further integers. Policies:

- *Colours.* A map of several channels needs ``channel=`` (PANDA has the label in red) or ``colours=``, a table from RGB to labels; a colour
  outside of the table is an error. Palettes are read as their indices.
- *Missing tiles* have the nodata value, otherwise 0.
- *PNG and other pictures* are decoded completely, within a host budget; Pillow's limit on the number of pixels does not count.
- *Values* are those that are stored, as tifffile and GDAL read them: grey of 2 and 4 bits is not scaled to 255, and a TIFF with white as
  0 (miniswhite, as tifffile writes Boolean arrays) is not inverted.
- *Another place or resolution* (`sft.sources.readers.label_alignment`): the label under the centre of each pixel.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sft.common.errors import InputError, SourceError
from sft.common.untrusted.foreign_files import file_format, format_remedy
from sft.sources.arrays import ArrayImage
from sft.sources.file_image import DecodedFile
from sft.sources.image import Image, ImageFacts, Pixels, Raster, Rectangle, Size, missing_extra, pixel_dtype
from sft.sources.labels import ImageLabels
from sft.sources.readers.composite import ChannelSelection, Mosaic
from sft.sources.readers.geotiff import GeoImage, has_rasterio
from sft.sources.readers.label_alignment import align_labels
from sft.sources.readers.remote import naming_remote_errors, source_path
from sft.sources.readers.zarr import ZarrImage, is_zarr_folder, zip_root
from sft.sources.tiff import NotTiledError, TiffImage, read_geo_tags
from sft.sources.views import RasterView

__all__ = ["ColourTable", "open_label_image", "open_labels"]

#: ``(red, green, blue)`` to label.
ColourTable: TypeAlias = Mapping[tuple[int, int, int], int]

_NPY_MAGIC, _ZIP_MAGIC = b"\x93NUMPY", b"PK\x03\x04"
_TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_ANNOTATIONS = (".geojson", ".json", ".xml", ".shp", ".gpkg")
_PICTURE_DTYPES = {
    **dict.fromkeys(("1", "L", "P", "LA", "RGB", "RGBA"), np.uint8),
    "I;16": np.uint16,
    "I": np.int32,
}
#: Pillow's names of stored grey values of 1, 2, 4 and 8 bits, and with an I of inverted ones.
_GREY_LAYOUT = re.compile(r"[L1](?:;(?P<bits>2|4))?(?P<flags>;?I?R?)")
_pillow_lock = threading.Lock()


def open_labels(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    like: Image | None = None,
    outside: int | None = None,
    values: Mapping[int, int] | None = None,
    channel: int | None = None,
    colours: ColourTable | None = None,
    series: int | None = None,
    at: Mapping[str, int] | None = None,
    host_budget_bytes: int | str | None = None,
) -> ImageLabels:
    """Open a label map as a `sft.sources.Source` of ``torch.int64``, which is read strip by strip.

    Args:
        path: of a TIFF, COG, Zarr, ``.npy`` or picture file, or a URL of a TIFF or Zarr image. A list of paths is a mosaic of files
            with map coordinates on one grid, as in `sft.sources.open_image`; between the files the value is the nodata value, or 0.
        like: image that the labels belong to. Each pixel has the label under its centre: by map coordinates if both have them, otherwise
            by the quotient of the sizes (`sft.sources.label_cells`). Default: `None` (the size of the label map)
        outside: value of pixels that by map coordinates lie outside of the label map, such as 255 for a loss that ignores it. Default:
            `None` (they are an error)
        values: label of each value. Default: `None` (the values are the labels)
        channel: number of the channel that holds the labels, in a map of several: 0 in PANDA. Default: `None`
        colours: label of each colour, in a map of RGB. Default: `None`
        series: number of the image in a file of several. Default: `None`
        at: index along every axis other than channels, height and width. Default: `None`
        host_budget_bytes: limit of a picture, tile or strip that is decoded at once. Default: `None` (1 GiB)

    Raises:
        BudgetError: a picture, tile or strip exceeds the host budget.
        InputError: several channels without a choice, values that are not integers, sides of another ratio than the image's, or map
            coordinates that do not cover the image.
        SourceError: it cannot be read.
    """
    paths: list[Any] = list(path) if isinstance(path, (list, tuple)) else [path]
    if not paths:
        raise InputError("cannot read labels from an empty list: give a path, or the paths of a mosaic.")
    options: dict[str, Any] = {"channel": channel, "colours": colours, "series": series, "at": at, "host_budget_bytes": host_budget_bytes}
    files = [open_label_image(each, **options) for each in paths]
    labels: Image = files[0] if len(files) == 1 else Mosaic(files, list(map(str, paths)))
    if like is not None:
        name, size_px = ", ".join(map(str, paths)), (like.width_px, like.height_px)
        labels = align_labels(labels, like, image_size=size_px, scale=(1.0, 1.0), name=name, outside=outside)
    return ImageLabels(labels, values=values)


def open_label_image(
    path: str | os.PathLike[str],
    *,
    channel: int | None = None,
    colours: ColourTable | None = None,
    series: int | None = None,
    at: Mapping[str, int] | None = None,
    host_budget_bytes: int | str | None = None,
) -> Raster:
    """Open a label map as an image of one channel of integers.

    Args:
        path: of the file or folder, or a URL of a TIFF or Zarr image.
        channel: number of the channel that holds the labels, in a map of several. Default: `None`
        colours: label of each colour, in a map of RGB. Default: `None`
        series: number of the image in a file of several. Default: `None`
        at: index along every axis other than channels, height and width. Default: `None`
        host_budget_bytes: limit of a picture, tile or strip that is decoded at once. Default: `None` (1 GiB)

    Raises:
        BudgetError: a picture, tile or strip exceeds the host budget.
        InputError: several channels without a choice, or values that are not integers.
        SourceError: it cannot be read.
    """
    where = source_path(path)
    with naming_remote_errors(where):
        image = _open(where, series, at, host_budget_bytes)
    num_channels, dtype = image.num_channels, pixel_dtype(image)
    if dtype.kind not in "ui":
        raise InputError(f"cannot read labels from {where}: it holds {dtype}, labels are integers. Convert it, or use open_image.")
    if colours is not None:
        return ColourLabels(image, colours)
    if channel is None and num_channels > 1:
        raise InputError(
            f"cannot read labels from {where}: it has {num_channels} channels. Choose channel=0 (in PANDA the label is in red), or give "
            "colours={(r, g, b): label}; or save one channel of it."
        )
    if not 0 <= (channel or 0) < num_channels:
        raise InputError(
            f"cannot read labels from channel {channel} of {where}: it has channels 0 to {num_channels - 1}. Choose one of them."
        )
    return image if num_channels == 1 else ChannelSelection(image, [channel or 0])


def _open(path: Any, series: int | None, at: Mapping[str, int] | None, host_budget_bytes: int | str | None) -> Raster:
    if not path.exists():
        raise SourceError(f"cannot read labels from {path}: there is no such file. Check the path.")
    if is_zarr_folder(path):
        return ZarrImage(path, series=series, at=at, labels=True)
    if not path.is_file():
        raise SourceError(f"cannot read labels from {path}: it is a folder without Zarr metadata. Give a file, or a Zarr array or group.")
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise SourceError(f"cannot read labels from {path}: {error.strerror or error}. Make it readable.") from error
    if head.startswith(_NPY_MAGIC):
        return LabelArray(path)
    if head.startswith(_ZIP_MAGIC) and zip_root(path) is not None:
        return ZarrImage(path, series=series, at=at, labels=True)
    if head.startswith(_TIFF_MAGIC):
        image = TiffImage(path, series=series, at=at, host_budget_bytes=host_budget_bytes, labels=True)
        try:
            _ = image.facts
        except NotTiledError:
            return PictureLabels(path, host_budget_bytes=host_budget_bytes)
        except SourceError as error:
            if isinstance(error.__cause__, ImportError) and has_rasterio() and read_geo_tags(path).is_geo:
                return GeoImage(path, palette=True, mask="ignore")
            raise
        image.check_complete()
        return image
    if head.startswith(b"<VRTDataset"):
        return GeoImage(path, palette=True, mask="ignore")
    return PictureLabels(path, host_budget_bytes=host_budget_bytes)


class LabelArray(ArrayImage):
    """Mapped ``.npy`` file of integers or booleans as a label image."""

    dtypes = ("uint8", "uint16", "int16", "uint32", "int32", "int64", "bool")
    purpose, remedy = "a label map: labels", "Convert it: numpy.save(path, array.astype(numpy.uint8))."


class PictureLabels(DecodedFile[Pixels]):
    """PNG or another picture as a label image, decoded completely by Pillow when it is opened.

    Args:
        path: of the file.
        host_budget_bytes: limit of the decoded picture. Default: `None` (1 GiB)

    Raises:
        SourceError: the file does not exist. Other errors are raised at the first use.
    """

    def _open(self) -> Pixels:
        try:
            from PIL import Image as PillowImage
            from PIL import UnidentifiedImageError
        except ImportError as error:
            raise missing_extra(f"read labels from {self.path}", "tissue", error) from error
        with _pillow_lock, self.path.open("rb") as file:
            limit, PillowImage.MAX_IMAGE_PIXELS = PillowImage.MAX_IMAGE_PIXELS, None  # the host budget is the limit
            try:
                pixels = self._decode(PillowImage.open(file))
            except UnidentifiedImageError as error:
                if self.path.suffix.lower() in _ANNOTATIONS:
                    raise SourceError(
                        f"cannot read labels from {self.path}: it has polygons, no pixels. Paint them: "
                        "sft.tissue.AnnotationLabels(sft.tissue.read_annotations(path, classes), width_px=..., height_px=...)."
                    ) from error
                format_name = file_format(self.path)
                kind = format_name or "no format of an image that is known"
                remedy = format_remedy(format_name) or "Give a label map."
                raise SourceError(f"cannot read labels from {self.path}: it is {kind}, or it is damaged. {remedy}") from error
            finally:
                PillowImage.MAX_IMAGE_PIXELS = limit
        return pixels[..., None] if pixels.ndim == 2 else pixels

    def _decode(self, picture: Any) -> npt.NDArray[Any]:
        dtype = _PICTURE_DTYPES.get("I;16" if picture.mode.startswith("I;16") else picture.mode)
        size = f"{picture.width} x {picture.height} px"
        if dtype is None:
            raise SourceError(f"cannot read labels from {self.path}: its pixels have the mode {picture.mode}. Save one channel of it.")
        num_bytes = picture.width * picture.height * len(picture.getbands()) * np.dtype(dtype).itemsize
        self._check_bytes("the picture", num_bytes)
        num_frames = getattr(picture, "n_frames", 1)
        num_same = sum(_frame_size(picture, number) == picture.size for number in range(1, num_frames))
        if num_same:
            raise InputError(f"cannot read labels from {self.path}: it has {num_same + 1} images of {size}. Give the one that is the mask.")
        layout = _layout(picture)
        pixels: npt.NDArray[Any] = np.asarray(picture).astype(dtype, copy=False)
        return pixels if layout is None else _stored(pixels, layout, largest=1 if picture.mode == "1" else 255)

    def _describe(self, handle: Pixels) -> ImageFacts:
        height, width, num_channels = handle.shape
        return ImageFacts(
            level_dimensions=((width, height),),
            tiles_px=(None,),
            num_channels=num_channels,
            background=(0,) * num_channels,
            dtype=handle.dtype.name,
        )

    def _read(self, handle: Pixels, rectangle: Rectangle) -> Pixels:
        return handle[rectangle.slices].copy()


def _layout(picture: Any) -> re.Match[str] | None:
    """Layout of the stored values of a picture that is not decoded yet; None if Pillow returns them as they are stored."""
    arguments = picture.tile[0][3] if picture.tile and picture.mode in ("L", "1") else None
    name = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return _GREY_LAYOUT.fullmatch(name) if isinstance(name, str) else None


def _stored(pixels: npt.NDArray[Any], layout: re.Match[str], *, largest: int) -> npt.NDArray[Any]:
    """Stored values of grey pixels, which Pillow scales to ``largest`` and turns so that 0 is black.

    >>> _stored(np.array([0, 85, 255], np.uint8), _GREY_LAYOUT.fullmatch("L;2"), largest=255).tolist()
    [0, 1, 3]
    """
    values = largest - pixels if "I" in layout["flags"] else pixels
    step = 255 // (2 ** int(layout["bits"]) - 1) if layout["bits"] else 1
    stored: npt.NDArray[Any] = values // step
    return stored


def _frame_size(picture: Any, number: int) -> Size:
    """Size of a frame: the levels of a pyramid are smaller."""
    size = picture.size
    picture.seek(number)
    frame: Size = picture.size
    picture.seek(0)
    assert picture.size == size
    return frame


class ColourLabels(RasterView):
    """Labels of an RGB image by a table of colours.

    Args:
        image: RGB of uint8, or RGBA of opaque colours.
        colours: label of each colour.

    Raises:
        InputError: no RGB image of uint8, or a table that is none.
    """

    def __init__(self, image: Image, colours: ColourTable) -> None:
        super().__init__(image)
        if super().num_channels not in (3, 4) or super().dtype != np.uint8:
            raise InputError(
                f"cannot look up colours of {image}: it has {super().num_channels} channels of {super().dtype}. Give RGB of uint8."
            )
        for colour, label in colours.items():
            if len(colour) != 3 or not all(0 <= value <= 255 for value in colour) or int(label) != label:
                raise InputError(
                    f"cannot read labels with colours {{{colour}: {label}}}: give {{(r, g, b): label}} with r, g, b of 0 to 255."
                )
        self.colours = {tuple(colour): int(label) for colour, label in colours.items()}
        codes = {(red << 16) | (green << 8) | blue: label for (red, green, blue), label in colours.items()}
        self._codes = np.array(sorted(codes), np.uint32)
        self._labels = np.array([codes[int(code)] for code in self._codes], np.int64)

    @property
    def dtype(self) -> np.dtype[Any]:
        """int64."""
        return np.dtype(np.int64)

    @property
    def num_channels(self) -> int:
        """1."""
        return 1

    @property
    def background(self) -> tuple[Any, ...]:
        """0: tiles that are not stored have the colour of the file."""
        return (0,)

    def _read(self, rectangle: Rectangle) -> Pixels:
        pixels = rectangle.read(self.image).astype(np.uint32)
        if pixels.shape[2] == 4 and (pixels[..., 3] < 255).any():
            raise InputError(f"cannot look up colours of {self.image}: pixels are transparent. Give RGB, or opaque colours.")
        codes = (pixels[..., 0] << 16) | (pixels[..., 1] << 8) | pixels[..., 2]
        places = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        unknown = self._codes[places] != codes
        if unknown.any():
            row, column = np.argwhere(unknown)[0].tolist()
            colour = tuple(int(value) for value in pixels[row, column])
            raise InputError(
                f"cannot read labels from {self.image}: the colour {colour} at column {rectangle.columns.start + column}, row "
                f"{rectangle.rows.start + row} is not in the table, which has {sorted(self.colours)}. Add it to colours."
            )
        labels: Pixels = self._labels[places][..., None]
        return labels
