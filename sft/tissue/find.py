"""Tissue found by its colour: stained tissue is saturated, glass is grey.

Saturation ((max - min) / max of red, green and blue) of the slide at a low resolution, split at Otsu's threshold (Otsu 1979, which
maximises the variance between both classes), small holes closed and specks removed. It is a mask for leaving out glass, not a
segmentation: pen marks and coloured dirt count as tissue, pale fat may not.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from sft.common.errors import InputError
from sft.sources.image import Image, missing_extra, pixel_dtype, read_strips
from sft.sources.resample import Resampled, level_scale
from sft.sources.views import AtLevel, RasterView
from sft.tissue.mask import TissueMask

__all__ = ["find_tissue", "saturation"]

_STRIP_ROWS = 64
#: Specks and holes are smaller than the mask's area divided by this number.
_SMALL_SHARE = 16
#: Saturation below which nothing is tissue, of 255: the noise of glass, which Otsu would split on a slide without tissue.
_MIN_SATURATION = 8


def find_tissue(
    image: Image,
    *,
    mpp: float = 8.0,
    downsample: int | None = None,
    min_object_px: int = 64,
    max_hole_px: int = 64,
    closing_px: int = 2,
) -> TissueMask:
    """Find the tissue on a slide. It is read once, strip by strip, from the nearest level that is fine enough.

    Args:
        image: RGB, of any size.
        mpp: micrometres per px of the mask; where the image does not say its resolution, 32 px make one. Default: 8
        downsample: px of the image per px of the mask, instead of `mpp`. Default: `None`
        min_object_px: specks of fewer px of the mask are removed; of a mask below 1024 px, specks of fewer than a sixteenth. Default: 64
        max_hole_px: holes of up to so many px of the mask are filled; of a small mask, likewise. Default: 64
        closing_px: gaps up to twice so wide are closed before. Default: 2

    Raises:
        InputError: an argument is wrong, or the image is not RGB.
        SourceError: it cannot be read, or scikit-image is not installed.
    """
    if min(min_object_px, max_hole_px, closing_px) < 0:
        raise InputError(f"cannot clean a mask with sizes {(min_object_px, max_hole_px, closing_px)}: give 0 or more px of the mask.")
    if pixel_dtype(image) != np.uint8:
        raise InputError(
            f"cannot find tissue on {image} of {pixel_dtype(image)}: its colour is compared, in RGB of uint8. Draw a mask (read_geojson)."
        )
    try:
        from skimage import filters, morphology
    except ImportError as error:
        raise missing_extra("find tissue", "tissue", error) from error
    otsu: Any = filters.threshold_otsu
    disk: Any = morphology.disk
    small = _thumbnail(image, _downsample(image, mpp, downsample))
    saturations = np.concatenate([saturation(strip) for strip in read_strips(small, _STRIP_ROWS)])
    threshold = max(int(otsu(saturations)) if saturations.min() < saturations.max() else 0, _MIN_SATURATION)
    pixels = saturations > threshold
    if closing_px:
        # Padded with edge values: the border of the slide is not a border of tissue.
        padded = np.pad(pixels, 2 * closing_px, mode="edge")
        pixels = morphology.closing(padded, disk(closing_px))[2 * closing_px : -2 * closing_px, 2 * closing_px : -2 * closing_px]
    # Of a slide of a few px all tissue would be a speck, and all glass a hole.
    min_object_px, max_hole_px = (min(count, pixels.size // _SMALL_SHARE) for count in (min_object_px, max_hole_px))
    if min_object_px > 1:
        pixels = morphology.remove_small_objects(pixels, max_size=min_object_px - 1)
    if max_hole_px and pixels.any():  # a slide without tissue is not a hole
        pixels = morphology.remove_small_holes(pixels, max_size=max_hole_px)
    return TissueMask(pixels=np.ascontiguousarray(pixels, bool), width_px=image.width_px, height_px=image.height_px)


def saturation(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Saturation of RGB pixels, rounded down to 0..255; 0 for black.

    >>> saturation(np.array([[[255, 255, 255], [0, 0, 0], [200, 100, 150]]], np.uint8)).tolist()
    [[0, 0, 127]]

    Raises:
        InputError: these are not three channels.
    """
    if pixels.shape[-1] != 3:
        raise InputError(f"cannot find tissue by colour in pixels of shape {pixels.shape}: they must be RGB. Give a mask instead.")
    high = pixels.max(axis=-1).astype(np.int32)
    low = pixels.min(axis=-1).astype(np.int32)
    values: npt.NDArray[np.uint8] = ((high - low) * 255 // np.maximum(high, 1)).astype(np.uint8)
    return values


def _downsample(image: Image, mpp: float, downsample: int | None) -> int:
    if downsample is None:
        image_mpp = getattr(image, "mpp", None)
        downsample = 32 if image_mpp is None else max(1, round(mpp / max(image_mpp)))
    downsample = min(downsample, image.width_px, image.height_px)
    if downsample < 1:
        raise InputError(f"cannot make a mask at 1/{downsample} of a slide: give a downsample of at least 1.")
    return downsample


def _thumbnail(image: Image, downsample: int) -> Image:
    """The image reduced by about ``downsample``, as a whole: the mask covers the last rows and columns, too.

    Any level will do, also one that OpenSlide interpolates: a mask is coarser than that.
    """
    view = RasterView(image)
    whole, best = view.level_dimensions[0], 0
    for level, size in enumerate(view.level_dimensions):
        if max(level_scale(whole, size)) <= downsample:
            best = level
    base = AtLevel(view, best)
    # Not an integer number of px in general: the mask's last pixel ends where the slide does.
    columns, rows = max(1, whole[0] // downsample), max(1, whole[1] // downsample)
    scale = Fraction(base.width_px, columns), Fraction(base.height_px, rows)
    return base if max(scale) == 1 else Resampled(base, *scale)
