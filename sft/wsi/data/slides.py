"""Slide files: opening at a resolution, metadata, thumbnails. The only module of the application that opens them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sft.common.errors import InputError, some_names
from sft.sources import OnError, Raster, at_mpp, open_image
from sft.sources.image import Image, Pixels, pixel_dtype, read_strips
from sft.sources.views import AtLevel, RasterView
from sft.wsi.data.setting_names import naming_settings
from sft.wsi.data_config import DataConfig

__all__ = ["OpenedSlide", "SlideInfo", "make_thumbnail", "open_slide", "slide_info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideInfo:
    """Metadata of a slide file.

    Attributes:
        path: of the file, or of the folder of a Zarr.
        num_bytes: of all its files.
        levels: (width, height) of each level, in px.
        mpp: micrometres per px of the largest level; None if the file does not state it.
        level_mpp: of each level.
        background: colour of unscanned regions, one number a channel.
        mpp_note: reason against a resolution that the file states; empty otherwise.
        nodata: value of pixels without data; None if the file does not state it.
        num_channels: numbers of a pixel.
        dtype: element type of the pixels.
        channel_names: names of the channels; empty if the file has none.
    """

    path: Path
    num_bytes: int
    levels: tuple[tuple[int, int], ...]
    mpp: float | None
    level_mpp: tuple[float | None, ...]
    background: tuple[float, ...]
    mpp_note: str = ""
    nodata: float | None = None
    num_channels: int = 3
    dtype: str = "uint8"
    channel_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSlide:
    """A slide at one resolution.

    Attributes:
        image: its pixels at the requested resolution.
        pyramid: the same file with all of its levels, for thumbnails.
    """

    image: Raster
    pyramid: Raster

    @property
    def scale(self) -> tuple[float, float]:
        """Px of ``pyramid`` per px of ``image``, (x, y)."""
        if self.image.mpp is None or self.pyramid.mpp is None:
            return 1.0, 1.0
        return self.image.mpp[0] / self.pyramid.mpp[0], self.image.mpp[1] / self.pyramid.mpp[1]


def slide_info(path: Path) -> SlideInfo:
    """Read the metadata of a slide file.

    Raises:
        SourceError: not a slide.
    """
    slide = open_image(path)
    try:
        mpp = None if slide.mpp is None else math.sqrt(slide.mpp[0] * slide.mpp[1])
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        return SlideInfo(
            path=path,
            num_bytes=sum(file.stat().st_size for file in files),
            levels=slide.level_dimensions,
            mpp=mpp,
            level_mpp=tuple(None if mpp is None else mpp * downsample for downsample in slide.level_downsamples),
            background=slide.background,
            mpp_note=RasterView(slide).mpp_note,
            nodata=RasterView(slide).nodata,
            num_channels=slide.num_channels,
            dtype=pixel_dtype(slide).name,
            channel_names=RasterView(slide).channel_names,
        )
    finally:
        slide.close()


def open_slide(
    paths: Path | Sequence[Path],
    *,
    mpp: float | None = None,
    slide_mpp: float | None = None,
    on_error: OnError = "raise",
    data: DataConfig | None = None,
) -> OpenedSlide:
    """Open a slide at a resolution, independent of its levels; see `sft.sources.open_image`.

    Args:
        paths: of the file, or of several files that are one image. Several are opened at the resolution: files of other resolutions have
            no common largest level.
        mpp: micrometres per px. Default: `None` (the largest level)
        slide_mpp: micrometres per px of the largest level, if the file's value is wrong or missing. Default: `None`
        on_error: error policy; see `sft.sources.error_policy`. Default: ``"raise"``
        data: settings of channels, axes and invalid pixels. Default: `None` (RGB of uint8)

    Raises:
        InputError: the resolution is not available, a channel does not exist, or the image is not RGB where it must be.
        SourceError: it cannot be read; `sft.SkipSlideError` with ``on_error="skip"``.
    """
    files = [paths] if isinstance(paths, Path) else list(paths)
    options: dict[str, Any] = {}
    if data is not None:
        options = {"channels": data.channels, "at": data.at, "series": data.series}
        options |= {"mask": data.invalid_pixels, "fill_value": data.fill_value}
    with naming_settings():
        if len(files) > 1:
            pyramid = open_image(files, mpp=mpp, slide_mpp=slide_mpp, on_error=on_error, **options)
        else:
            pyramid = open_image(files[0], slide_mpp=slide_mpp, on_error=on_error, **options)
    if (data is None or data.channels is None) and (pyramid.num_channels != 3 or pixel_dtype(pyramid) != np.uint8):
        names = RasterView(pyramid).channel_names
        listed = f" ({some_names(names)})" if names else ""
        raise InputError(
            f"cannot use {some_names(list(map(str, files)))}: it has {pyramid.num_channels} channels of {pixel_dtype(pyramid)}{listed}, "
            "and slides are RGB of uint8. Give an RGB image, or say in data.channels which channels to use, such as "
            f"{list(range(min(pyramid.num_channels, 4)))}."
        )
    if mpp is not None and pyramid.mpp is None:
        note = RasterView(pyramid).mpp_note
        why = f"the file has no resolution ({note})" if note else "the file has no resolution"
        raise InputError(f"cannot open {files[0]} at {mpp} um/px: {why}. Give it in the column mpp of the table.")
    return OpenedSlide(image=pyramid if mpp is None or len(files) > 1 else at_mpp(pyramid, mpp), pyramid=pyramid)


def make_thumbnail(image: Image, max_px: int) -> tuple[Pixels, int]:
    """Image averaged down by an integer factor, so that no side is longer than ``max_px``.

    Averages of full blocks, read in strips; of the smallest level of a pyramid that is large enough. Partial blocks at the lower and right
    border are averages of their pixels.

    Returns:
        uint8 ``[height, width, channels]``, and the factor.
    """
    least = max(1, math.ceil(max(image.height_px, image.width_px) / max_px))
    smaller, downsample = _nearest_level(image, least)
    step = -(-least // downsample)
    rows = step * max(1, 256 // step)
    return np.concatenate([_block_average(strip, step) for strip in read_strips(smaller, rows)]), step * downsample


def _nearest_level(image: Image, factor: int) -> tuple[Image, int]:
    """The smallest level that is not smaller than by the factor, and its downsample; the image itself where it has no pyramid."""
    view, best = RasterView(image), (0, 1)
    for level in view.exact_levels:
        downsample = view.level_downsamples[level]
        whole = round(downsample)
        # A downsample of 4 becomes 4.0001 if the last tile of a level is cut; 4.3 would shift all pixels.
        if abs(downsample / whole - 1) < 1e-3 and best[1] < whole <= factor:
            best = (level, whole)
    return (AtLevel(image, best[0]) if best[0] else image), best[1]


def _block_average(pixels: Pixels, factor: int) -> Pixels:
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
