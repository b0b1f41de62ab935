"""Tissue areas of a run: masks of the table, or tissue found by colour, at the resolution of the run.

A mask file is a small picture of the whole slide (PNG or another image format, ``.npy``; zero is background), or polygons in px of the
largest level (GeoJSON, as QuPath exports them). Both are evaluated in rectangles, so neither is ever as large as the slide.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image as PillowImage

from sft.common.errors import InputError, SftError
from sft.sources import ArrayImage, Raster
from sft.sources.image import Pixels
from sft.sources.labels import size_problem
from sft.sources.readers.label_alignment import check_same_field
from sft.sources.readers.label_images import open_label_image
from sft.sources.views import RasterView
from sft.tissue import Masked, Regions, TissueMask, find_tissue, read_geojson
from sft.tissue.mask import Box
from sft.tissue.polygons import check_overlap
from sft.wsi.run.files import atomic_write_with_parents

__all__ = [
    "PackedMask",
    "TissueArea",
    "area_bounding_box",
    "draw_tissue",
    "find_area",
    "paint_outside",
    "read_area",
    "read_mask",
    "rescale_area",
]

#: Area of tissue, in px of some image.
TissueArea: TypeAlias = TissueMask | Regions
_GEOJSON = (".geojson", ".json")
_MASK_MPP = 8.0
_OUTLINE_RGB = (20, 150, 40)


def read_mask(path: Path) -> npt.NDArray[Any]:
    """A tissue mask ``[height, width]``: a ``.npy`` file, or an image of one channel.

    Raises:
        SourceError: it cannot be read.
        InputError: it has channels, or several images of one size.
    """
    try:
        labels = open_label_image(path)
        return labels.read(0, 0, labels.width_px, labels.height_px)[..., 0]
    except SftError as error:
        raise type(error)(f"cannot read mask {path}: {error} Give a .npy file or an image of integers [height, width].") from error


def read_area(path: Path, slide: Raster, *, crs: str | None = None) -> TissueArea:
    """A mask file of a slide, in px of its largest level.

    Args:
        path: of a picture, ``.npy`` or GeoJSON file.
        slide: its largest level.
        crs: coordinate system of GeoJSON, in place of the file's; see `sft.tissue.read_geojson`. Default: `None`

    Raises:
        InputError: it has channels, its size is that of no resolution of the slide (`sft.sources.labels.size_problem`), or its map
            coordinates are those of another field.
        SourceError: it cannot be read, or a library for it is missing.
    """
    if path.suffix.lower() in _GEOJSON:
        return read_geojson(path, georeference=RasterView(slide).georeference, crs=crs)
    mask, width_px, height_px = read_mask(path), slide.width_px, slide.height_px
    check_same_field(open_label_image(path), slide, f"mask {path}")
    problem = size_problem((mask.shape[1], mask.shape[0]), (width_px, height_px))
    if problem is not None:
        raise InputError(
            f"mask {path} of {mask.shape[1]} x {mask.shape[0]} px for {slide!r} of {width_px} x {height_px} px: {problem}. Give the mask "
            "of this slide."
        )
    return TissueMask(pixels=_resample_mask(mask != 0, width_px, height_px), width_px=width_px, height_px=height_px)


def find_area(slide: Raster, *, mpp: float | None = None) -> TissueMask:
    """Tissue by its colour at 8 um/px, or at the run's coarser ``mpp``; see `sft.tissue.find_tissue`.

    Raises:
        InputError: no tissue.
        SourceError: the slide cannot be read, or scikit-image is not installed.
    """
    mask = find_tissue(slide, mpp=max(_MASK_MPP, mpp or 0.0))
    if not mask.pixels.any():
        raise InputError(f"no tissue is found on {slide!r}. Look at it; leave it out, or give a mask in the column mask of the table.")
    return mask


def rescale_area(area: TissueArea, image: Raster, scale: tuple[float, float]) -> TissueArea:
    """The area in px of the same slide at another resolution.

    Args:
        area: in px of the largest level.
        image: the slide at the other resolution.
        scale: px of the largest level per px of the image, (x, y).
    """
    if isinstance(area, Regions):
        return area if scale == (1.0, 1.0) else area.scaled(1 / scale[0], 1 / scale[1])
    width_px, height_px = image.width_px, image.height_px
    return TissueMask(pixels=_resample_mask(area.pixels, width_px, height_px), width_px=width_px, height_px=height_px)


def area_bounding_box(area: TissueArea, image: Raster) -> Box:
    """Bounding box of an area inside an image, in px of the image.

    Raises:
        InputError: the area does not overlap the image.
    """
    if isinstance(area, TissueMask):
        box = area.bounding_box()
    else:
        purpose = f"cannot crop {image!r} to its tissue, or mask it: the mask has none there"
        check_overlap([area], width_px=image.width_px, height_px=image.height_px, purpose=purpose)
        left, top, right, bottom = area.bounding_box() or (0.0, 0.0, 0.0, 0.0)
        x, y = max(0, math.floor(left)), max(0, math.floor(top))
        box = Box(x=x, y=y, w=min(image.width_px, math.ceil(right)) - x, h=min(image.height_px, math.ceil(bottom)) - y)
    if box is None or min(box.w, box.h) < 1 or (isinstance(area, Regions) and area.area_px < 1):
        raise InputError(
            f"cannot crop {image!r} to its tissue, or mask it: the mask has none there. Correct the mask (its units are px of the largest "
            "level), or leave the slide out."
        )
    return box


def paint_outside(small: Pixels, area: TissueArea, factor: int, background: tuple[float, ...]) -> Pixels:
    """Thumbnail, smaller by ``factor``, with the pixels outside the area (in px of the largest level) painted over."""
    image = ArrayImage(small, layout="HWC", background=background)
    return Masked(image, rescale_area(area, image, (factor, factor))).read(0, 0, image.width_px, image.height_px)


def draw_tissue(path: Path, small: Pixels, mask: TissueMask) -> None:
    """Draw a slide with its background paler, and the border of the tissue as a line.

    Args:
        path: of the picture.
        small: the slide, uint8 ``[height, width, 3]``.
        mask: of the slide, of any resolution.

    Raises:
        RunFolderError: it cannot be written.
    """
    height, width = small.shape[:2]
    inside = _gather_pixels(mask.pixels, height, width)
    border = np.zeros_like(inside)
    border[1:] |= inside[1:] != inside[:-1]
    border[:, 1:] |= inside[:, 1:] != inside[:, :-1]
    picture = np.where(inside[..., None], small, small // 2 + 128).astype(np.uint8)
    picture[border] = _OUTLINE_RGB
    with atomic_write_with_parents(path) as temporary:
        PillowImage.fromarray(picture).save(temporary)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMask:
    """A mask that waits to be used again: some ten kilobytes for a slide, where a bit for each px would be a megabyte."""

    shape: tuple[int, int]  #: (rows, columns)
    width_px: int
    height_px: int
    data: bytes  #: bits, compressed

    @classmethod
    def of(cls, mask: TissueMask) -> PackedMask:
        """Pack."""
        rows, columns = mask.pixels.shape
        packed = zlib.compress(np.packbits(mask.pixels).tobytes(), 1)
        return cls(shape=(rows, columns), width_px=mask.width_px, height_px=mask.height_px, data=packed)

    def mask(self) -> TissueMask:
        """Unpack."""
        bits = np.unpackbits(np.frombuffer(zlib.decompress(self.data), np.uint8), count=self.shape[0] * self.shape[1])
        return TissueMask(pixels=bits.astype(bool).reshape(self.shape), width_px=self.width_px, height_px=self.height_px)


def _resample_mask(pixels: npt.NDArray[np.bool_], width_px: int, height_px: int) -> npt.NDArray[np.bool_]:
    """The mask with no more px than the image has: those under the centres of the image's."""
    rows, columns = min(height_px, pixels.shape[0]), min(width_px, pixels.shape[1])
    return pixels if (rows, columns) == pixels.shape else _gather_pixels(pixels, rows, columns)


def _gather_pixels(pixels: npt.NDArray[np.bool_], rows: int, columns: int) -> npt.NDArray[np.bool_]:
    row, column = ((2 * np.arange(count) + 1) * extent // (2 * count) for count, extent in zip((rows, columns), pixels.shape, strict=True))
    inside: npt.NDArray[np.bool_] = pixels[row[:, None], column]
    return inside
