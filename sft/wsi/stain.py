"""Stains: their colours estimated once per slide at low resolution, brought to a reference, or varied.

All of it is affine in optical density, so a slide's normalisation and its augmentation are one `ColourAffine`, applied pixel by pixel.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sft.errors import SourceError
from sft.sources.image import Pixels
from sft.wsi.views import ColourAffine

__all__ = ["hed_shift", "fit_macenko"]

_Floats = npt.NDArray[np.float64]

#: Densities of haematoxylin, eosin and DAB in red, green and blue (Ruifrok and Johnston, 2001).
_HED: _Floats = np.array([[0.650, 0.704, 0.286], [0.072, 0.990, 0.105], [0.268, 0.570, 0.776]])
#: What slides are brought to: directions of haematoxylin and eosin, and the 99th percentile of their amounts (Macenko et al., 2009).
_REFERENCE: _Floats = np.array([[0.5626, 0.7201, 0.4062], [0.2159, 0.8012, 0.5581]])
_REFERENCE_MAX: _Floats = np.array([1.9705, 1.0308])
_MIN_DENSITY = 0.15  # lighter pixels are background
_MIN_TISSUE_PX = 256


def fit_macenko(thumbnail: Pixels, name: str) -> ColourAffine:
    """What brings a slide's stains to the reference (Macenko et al., 2009).

    The two stains span a plane in optical density, found from tissue pixels; the extreme directions in it are the stains. What lies
    beside the plane stays as it is.

    Args:
        thumbnail: the slide at low resolution.
        name: of the slide, for messages.

    Raises:
        SourceError: there is too little tissue to tell.
    """
    densities = -np.log((thumbnail.reshape(-1, 3).astype(np.float64) + 1) / 256)
    tissue = densities[(densities > _MIN_DENSITY).all(1)]
    if len(tissue) < _MIN_TISSUE_PX:
        raise SourceError(
            f"cannot estimate the stains of {name}: {len(tissue)} px of its thumbnail are stained, {_MIN_TISSUE_PX} are needed. Leave the "
            "slide out, or train with augment.stain none."
        )
    _, vectors = np.linalg.eigh(np.cov(tissue.T))
    plane = vectors[:, 1:] * np.where(vectors[:, 1:].sum(0) < 0, -1.0, 1.0)
    angles = np.arctan2(tissue @ plane[:, 0], tissue @ plane[:, 1])
    extremes = [plane @ np.array([np.sin(angle), np.cos(angle)]) for angle in np.percentile(angles, (1, 99))]
    stains = np.array(sorted(extremes, key=lambda stain: -stain[0]))  # haematoxylin absorbs more red
    source, target = _with_normal(stains), _with_normal(_REFERENCE)
    if not np.linalg.cond(source) < 1e3:
        raise SourceError(f"cannot estimate the stains of {name}: it seems to have one alone. Train with augment.stain none.")
    amounts = tissue @ np.linalg.inv(source)
    largest = np.maximum(np.percentile(amounts[:, :2], 99, axis=0), 1e-3)
    scale = np.diag([*(_REFERENCE_MAX / largest), 1.0])
    return ColourAffine.of((np.linalg.inv(source) @ scale @ target).T)


def hed_shift(scales: npt.ArrayLike, shifts: npt.ArrayLike) -> ColourAffine:
    """Amounts of haematoxylin, eosin and DAB times ``1 + scale``, plus ``shift`` (Tellez et al., 2018)."""
    mixing = _HED / np.linalg.norm(_HED, axis=1, keepdims=True)
    factors = np.diag(1 + np.asarray(scales, np.float64))
    return ColourAffine.of((np.linalg.inv(mixing) @ factors @ mixing).T, np.asarray(shifts, np.float64) @ mixing)


def _with_normal(stains: _Floats) -> _Floats:
    """Two unit stains, and the direction beside both."""
    unit = stains / np.linalg.norm(stains, axis=1, keepdims=True)
    normal = np.cross(unit[0], unit[1])
    result: _Floats = np.vstack([unit, normal / max(float(np.linalg.norm(normal)), 1e-12)])
    return result
