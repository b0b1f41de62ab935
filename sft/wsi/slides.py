"""Every access to slide files: the one place that knows how a slide is opened, at which resolution, and what it looks like small."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sft.errors import InputError
from sft.sources import Slide
from sft.sources.image import Image, Pixels, read_strips

__all__ = ["OpenedSlide", "SlideInfo", "open_slide", "slide_info", "thumbnail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideInfo:
    """What a slide file says.

    Attributes:
        path: of the file.
        num_bytes: of the file.
        levels: (width, height) of each level, in px.
        mpp: micrometres per px of the largest level; None where the file does not say.
        level_mpp: of each level.
        background: RGB colour of what was not scanned.
    """

    path: Path
    num_bytes: int
    levels: tuple[tuple[int, int], ...]
    mpp: float | None
    level_mpp: tuple[float | None, ...]
    background: tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSlide:
    """A slide at one resolution.

    Attributes:
        image: its pixels.
        mpp: micrometres per px; None where nobody says.
        background: RGB colour of what was not scanned.
    """

    image: Image
    mpp: float | None
    background: tuple[int, int, int]


def slide_info(path: Path) -> SlideInfo:
    """Read what a slide file says of itself.

    Raises:
        SourceError: it is no slide.
    """
    with Slide(path) as slide:
        downsamples = slide.level_downsamples
        levels = tuple(Slide(path, level=level).dimensions for level in range(len(downsamples)))
        mpp = None if slide.mpp is None else math.sqrt(slide.mpp[0] * slide.mpp[1])
        return SlideInfo(
            path=path,
            num_bytes=path.stat().st_size,
            levels=levels,
            mpp=mpp,
            level_mpp=tuple(None if mpp is None else mpp * downsample for downsample in downsamples),
            background=slide.background,
        )


def open_slide(path: Path, *, mpp: float | None = None, slide_mpp: float | None = None, tolerance: float = 0.2) -> OpenedSlide:
    """Open a slide at the pyramid level nearest to a resolution.

    Args:
        path: of the file.
        mpp: micrometres per px wanted. Default: `None` (the largest level)
        slide_mpp: micrometres per px of the largest level, where the file is wrong or silent. Default: `None`
        tolerance: how far the nearest level may be from ``mpp``, as a share of it.

    Raises:
        InputError: ``mpp`` is wanted and the file does not say its own, or no level is near.
        SourceError: it is no slide.
    """
    slide = Slide(path)
    found = slide_mpp
    if found is None and slide.mpp is not None:
        found = math.sqrt(slide.mpp[0] * slide.mpp[1])
    level = 0
    if mpp is not None:
        if found is None:
            raise InputError(f"cannot open {path} at {mpp} um/px: the file has no resolution. Give it in the column mpp of the table.")
        resolutions = [found * downsample for downsample in slide.level_downsamples]
        level = min(range(len(resolutions)), key=lambda number: abs(math.log(resolutions[number] / mpp)))
        if abs(resolutions[level] / mpp - 1) > tolerance:
            listed = ", ".join(f"{resolution:.4g}" for resolution in resolutions)
            raise InputError(
                f"cannot open {path} at {mpp} um/px: its levels have {listed} um/px. Give one of these as data.mpp, or a larger "
                "data.mpp_tolerance."
            )
        found = resolutions[level]
    if level:
        slide.close()
        slide = Slide(path, level=level)
    return OpenedSlide(image=slide, mpp=found, background=slide.background)


def thumbnail(image: Image, max_px: int) -> tuple[Pixels, int]:
    """The image averaged down by a whole factor, so that no side is longer than ``max_px``.

    Averages of whole blocks, read in strips; where the image has a pyramid, of its smallest level that is large enough. Incomplete blocks
    at the lower and right border are averages of what there is.

    Returns:
        uint8 ``[height, width, 3]``, and the factor.
    """
    least = max(1, math.ceil(max(image.height_px, image.width_px) / max_px))
    smaller, downsample = _smaller(image, least)
    step = -(-least // downsample)
    rows = step * max(1, 256 // step)
    return np.concatenate([_averaged(strip, step) for strip in read_strips(smaller, rows)]), step * downsample


def _smaller(image: Image, factor: int) -> tuple[Image, int]:
    """The smallest level that is not smaller than by the factor, and its downsample; the image itself where it has no pyramid."""
    if not isinstance(image, Slide):
        return image, 1
    best = (0, 1)
    for level, downsample in enumerate(image.level_downsamples):
        whole = round(downsample)
        # 4.0001 is what becomes of 4 where the last tile of a level is cut; 4.3 would shift everything.
        if abs(downsample / whole - 1) < 1e-3 and best[1] < whole <= factor:
            best = (level, whole)
    return (Slide(image.path, level=image.level + best[0]) if best[0] else image), best[1]


def _averaged(pixels: Pixels, factor: int) -> Pixels:
    """Means of blocks, rounded."""
    if factor == 1:
        return pixels
    rows = np.arange(0, pixels.shape[0], factor)
    cols = np.arange(0, pixels.shape[1], factor)
    sums = np.add.reduceat(np.add.reduceat(pixels.astype(np.uint32), rows, axis=0), cols, axis=1)
    heights = np.minimum(factor, pixels.shape[0] - rows)
    widths = np.minimum(factor, pixels.shape[1] - cols)
    counts = (heights[:, None] * widths[None, :])[..., None]
    means: Pixels = ((sums + counts // 2) // counts).astype(np.uint8)
    return means
