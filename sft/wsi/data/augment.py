"""Augmentation of a training slide in an epoch: parameters drawn once for (seed, epoch, slide), applied as views of the image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sft.sources.image import Image
from sft.wsi.config import AugmentConfig
from sft.wsi.data.stain import hed_shift
from sft.wsi.data.transforms import IDENTITY, ColourAffine, Recoloured, Turned
from sft.wsi.train.optim import philox_generator

__all__ = ["IDENTITY_AUGMENTATION", "Augmentation", "draw_augmentation"]

_LUMA = np.array([0.299, 0.587, 0.114])
_GREY = 0.5  # fixed point of the change of contrast


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """The changes of one slide in one epoch.

    Attributes:
        quarters: turns, counter-clockwise.
        mirrored: whether it is mirrored before.
        density: map of optical densities.
        intensity: map of intensities.
    """

    quarters: int = 0
    mirrored: bool = False
    density: ColourAffine = IDENTITY
    intensity: ColourAffine = IDENTITY

    def apply(self, image: Image, *, stain: ColourAffine = IDENTITY) -> Image:
        """The changed image; ``stain`` is a normalisation that comes before the changes."""
        density = self.density.after(stain)
        if density != IDENTITY or self.intensity != IDENTITY:
            image = Recoloured(image, density=density, intensity=self.intensity)
        return self.turn(image)

    def turn(self, image: Image) -> Image:
        """The image moved, with its colours."""
        return Turned(image, quarters=self.quarters, mirrored=self.mirrored) if self.quarters or self.mirrored else image


IDENTITY_AUGMENTATION = Augmentation()


def draw_augmentation(config: AugmentConfig, seed: int, epoch: int, slide: str) -> Augmentation:
    """Augmentation of a slide in an epoch: a function of the arguments alone."""
    draw = philox_generator(seed, "augment", epoch, slide)
    # Every number is drawn whether it is used or not, so that switching one change on does not alter the others.
    quarters, mirrored = int(draw.integers(4)), bool(draw.integers(2))
    brightness, contrast, saturation = (1 + draw.uniform(-1, 1, 3) * (config.brightness, config.contrast, config.saturation)).tolist()
    scales, shifts = draw.uniform(-1, 1, 3) * config.hed, draw.uniform(-1, 1, 3) * config.hed
    intensity = IDENTITY
    if config.brightness or config.contrast or config.saturation:
        mixed = saturation * np.eye(3) + (1 - saturation) * np.tile(_LUMA, (3, 1))
        intensity = ColourAffine.of(brightness * contrast * mixed, np.full(3, _GREY * (1 - contrast)))
    return Augmentation(
        quarters=quarters if config.rotations else 0,
        mirrored=mirrored and config.flips,
        density=hed_shift(scales, shifts) if config.hed else IDENTITY,
        intensity=intensity,
    )
