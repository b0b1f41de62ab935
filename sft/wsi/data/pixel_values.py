"""Pixel values of images with any channels: ranges that become 0 and 1 in a run, and pictures as RGB of 8 bits, for maps and crops."""

from __future__ import annotations

from typing import Any

import numpy as np

from sft.common.errors import InputError
from sft.sources import Raster, percentile_range
from sft.sources.image import Image, Pixels, Rectangle, dtype_range, pixel_dtype
from sft.sources.readers.composite import ChannelSelection
from sft.sources.value_range import ValueRange
from sft.sources.views import RasterView
from sft.wsi.config_checks import value_pairs
from sft.wsi.data_config import DataConfig

__all__ = ["ChannelPicture", "as_picture", "fixed_range", "measured_range"]

_PERCENTILES = (1.0, 99.0)


def fixed_range(data: DataConfig, num_channels: int) -> ValueRange | None:
    """Range of ``data.value_range``; ``None`` for that of the pixels' type."""
    return None if data.value_range is None else value_pairs(data.value_range, num_channels)


def measured_range(data: DataConfig, image: Raster) -> ValueRange:
    """Percentiles of each channel of a slide.

    Raises:
        InputError: a channel has one value.
        SourceError: the slide cannot be read.
    """
    assert data.percentiles is not None
    return percentile_range(image, *data.percentiles)


def as_picture(image: Image) -> Image:
    """The image itself if it is RGB of 8 bits, otherwise a `ChannelPicture`."""
    return image if RasterView(image).num_channels == 3 and pixel_dtype(image) == np.uint8 else ChannelPicture(image)


class ChannelPicture(RasterView):
    """The first three channels of an image as red, green and blue, or the first alone as grey.

    Percentiles 1 and 99 of each channel are black and white; NaN is black.

    >>> from sft.sources import ArrayImage
    >>> image = ArrayImage(np.array([[100, 100, 200, 200]], np.uint16))
    >>> ChannelPicture(image).read(1, 0, 2, 1).tolist()
    [[[0, 0, 0], [255, 255, 255]]]

    Raises:
        SourceError: the image cannot be read.
    """

    def __init__(self, image: Image) -> None:
        super().__init__(image)
        self._shown = [0, 1, 2] if super().num_channels >= 3 else [0, 0, 0]
        ranges = {channel: _range(image, channel) for channel in dict.fromkeys(self._shown)}
        self._low, self._high = (np.array([ranges[channel][end] for channel in self._shown]) for end in (0, 1))

    @property
    def num_channels(self) -> int:
        """Three: red, green and blue."""
        return 3

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Colours have no names."""
        return ()

    @property
    def dtype(self) -> np.dtype[Any]:
        """8 bits."""
        return np.dtype(np.uint8)

    @property
    def background(self) -> tuple[Any, ...]:
        """Colour of pixels that were not recorded."""
        colours = np.array(super().background, np.float64)[None, None]
        return tuple(self._scaled(colours)[0, 0].tolist())

    def _read(self, rectangle: Rectangle) -> Pixels:
        return self._scaled(rectangle.read(self.image))

    def _scaled(self, pixels: Pixels) -> Pixels:
        shares = (pixels[..., self._shown].astype(np.float64) - self._low) / (self._high - self._low)
        picture: Pixels = np.rint(255 * np.clip(np.nan_to_num(shares, nan=0.0), 0, 1)).astype(np.uint8)
        return picture


def _range(image: Image, channel: int) -> tuple[float, float]:
    """Values that are black and white: percentiles of a channel, or the ends of its type where all pixels have one value."""
    try:
        return percentile_range(ChannelSelection(image, [channel]), *_PERCENTILES)[0]
    except InputError:
        low, high = dtype_range(pixel_dtype(image))
        return (low, high) if np.isfinite(high) else (0.0, 1.0)
