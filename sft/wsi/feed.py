"""From a row of the table to what the network reads: slide, mask, stain normalisation, augmentation, normalisation of pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image as PillowImage

from sft.errors import InputError, SftError, SourceError
from sft.sources import LabelSource, Normalized
from sft.sources.image import Image
from sft.wsi.augment import UNCHANGED, Augmentation
from sft.wsi.config import Config
from sft.wsi.slides import open_slide, thumbnail
from sft.wsi.stain import macenko
from sft.wsi.table import SlideRecord
from sft.wsi.views import IDENTITY, Affine, Masked, Recoloured

__all__ = ["IGNORED_LABEL", "SlideFeed"]

#: Pixels of a label map that count for nothing.
IGNORED_LABEL = 255
_STAIN_PX = 1024


class SlideFeed:
    """Opens the slides of a run. Keeps each slide's size and stains, and nothing else.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        #: (width, height) in px of the slides that were checked and found good
        self.sizes: dict[str, tuple[int, int]] = {}
        self._stains: dict[str, Affine] = {}

    def image(self, record: SlideRecord) -> Image:
        """The slide at the run's resolution, with what its tissue mask leaves out painted over.

        Raises:
            InputError: its resolution is unknown or not near the one wanted, or its mask does not fit.
            SourceError: it cannot be read.
        """
        data = self._config.data
        opened = open_slide(record.path, mpp=data.mpp, slide_mpp=record.mpp, tolerance=data.mpp_tolerance)
        if record.mask is None or self._config.task.kind == "segmentation":
            return opened.image
        return Masked(opened.image, read_mask(record.mask), opened.background)

    def source(self, record: SlideRecord, augmentation: Augmentation = UNCHANGED) -> Normalized:
        """What the network reads.

        Raises:
            InputError, SourceError: as :meth:`image`.
        """
        image = augmentation.apply(self.image(record), stain=self._stain(record))
        return Normalized(image, mean=self._config.model.mean, std=self._config.model.std, dtype=torch.float32)

    def coloured(self, record: SlideRecord) -> Image:
        """The slide as the network sees it, before its pixels are normalised.

        Raises:
            InputError, SourceError: as :meth:`image`.
        """
        image, stain = self.image(record), self._stain(record)
        return image if stain == IDENTITY else Recoloured(image, density=stain)

    def labels(self, record: SlideRecord, augmentation: Augmentation = UNCHANGED) -> LabelSource:
        """The label map of a slide, turned with it.

        Raises:
            InputError: it has another size than the slide.
            SourceError: it cannot be read.
        """
        assert record.mask is not None  # the table was read for segmentation
        mask, image = read_mask(record.mask), self.image(record)
        if mask.shape != (image.height_px, image.width_px):
            raise InputError(
                f"label map {record.mask} has {mask.shape[1]} x {mask.shape[0]} px, its slide {image.width_px} x {image.height_px} at this "
                "resolution. Give one label for each pixel."
            )
        turned = np.rot90(mask[:, ::-1] if augmentation.mirrored else mask, augmentation.quarters)
        return LabelSource(turned)

    def check(self, record: SlideRecord) -> str | None:
        """What is wrong with a slide, as far as its header, its mask and its stains tell; None if nothing is."""
        try:
            image = self.image(record)
            if min(image.width_px, image.height_px) < 1:
                return f"slide {record.path} has no pixels; leave it out"
            self._stain(record)
            if self._config.task.kind == "segmentation" and record.mask is not None:
                self.labels(record)
                mask, count = read_mask(record.mask), len(self._config.task.classes or ())
                wrong = (mask >= count) & (mask != IGNORED_LABEL)
                if wrong.any():
                    return f"label map {record.mask} holds {int(mask[wrong][0])}; labels are 0 to {count - 1}, and {IGNORED_LABEL} for none"
        except SftError as error:
            return " ".join(str(error).split())
        self.sizes[record.name] = (image.width_px, image.height_px)
        return None

    def _stain(self, record: SlideRecord) -> Affine:
        if self._config.augment.stain == "none":
            return IDENTITY
        if record.name not in self._stains:
            self._stains[record.name] = macenko(thumbnail(self.image(record), _STAIN_PX)[0], record.name)
        return self._stains[record.name]


def read_mask(path: Path) -> npt.NDArray[Any]:
    """A mask or label map ``[height, width]``: a mapped ``.npy`` file, or an image of one channel.

    Raises:
        SourceError: it cannot be read.
        InputError: it has channels.
    """
    try:
        if path.suffix == ".npy":
            mask: npt.NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
        else:
            with PillowImage.open(path) as opened:
                mask = np.asarray(opened)
    except Exception as error:  # a damaged file raises almost anything
        raise SourceError(f"cannot read mask {path}: {error}. Give a .npy file or an image.") from error
    if mask.ndim != 2 or mask.dtype.kind not in "bui":
        raise InputError(f"mask {path} has shape {mask.shape} of {mask.dtype}. Give whole numbers [height, width].")
    return mask
