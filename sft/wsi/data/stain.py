"""Stain normalisation and augmentation: Macenko, HED jitter, Reinhard.

*Stains.* Colours of the stains are estimated once per slide at low resolution, mapped to a reference (Macenko et al., 2009), or varied.
These maps are affine in optical density, so normalisation and augmentation of a slide are one `ColourAffine`, applied pixel by pixel.

*Colour transfer* (Reinhard, Ashikhmin, Gooch and Shirley, "Color transfer between images", 2001) matches means and standard deviations in
the space l-alpha-beta, whose axes vary nearly independently: pixels become the responses of three cones, those their logarithms, and these
are rotated (equations 4 and 6). Matching is a scale and a shift of each axis, so it is one affine map of the logarithms. It needs no
second stain in a slide, which Macenko's method does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sft.common.array_types import FloatArray
from sft.common.errors import SourceError
from sft.sources.image import Image, Pixels
from sft.wsi.data.transforms import ColourAffine, PixelwiseColours

__all__ = ["ColourTransferred", "fit_macenko", "fit_reinhard", "hed_shift"]

_Float32s = npt.NDArray[np.float32]

#: Red, green and blue to the responses of three cones (equation 4); each row sums to nearly 1.
_CONES = np.array([[0.3811, 0.5783, 0.0402], [0.1967, 0.7244, 0.0782], [0.0241, 0.1288, 0.8444]])
#: Logarithms of these to l-alpha-beta (equation 6).
_ROTATION = np.diag(1 / np.sqrt([3.0, 6.0, 2.0])) @ np.array([[1.0, 1.0, 1.0], [1.0, 1.0, -2.0], [1.0, -1.0, 0.0]])
#: Target of the normalisation: the tissue of the example slide (H&E, Aperio).
_REFERENCE_MEAN = np.array([-0.643, -0.064, 0.025])
_REFERENCE_DEVIATION = np.array([0.330, 0.057, 0.015])
_MIN_DENSITY = 0.15  # lighter pixels are background
_MIN_TISSUE_PX = 256
_MIN_DEVIATION = 1e-3

#: Entries of the table of responses; the darkest pixel's is the 256th part of the largest.
_RESPONSES = 1 << 16
#: Steps of the table of logarithms to responses, per unit of the logarithm.
_LOG_STEPS = 8192
_MIN_LOG = -4.0


def fit_reinhard(thumbnail: Pixels, name: str) -> ColourAffine:
    """Map of a slide's colours to the reference, on the logarithms of the cones' responses.

    Args:
        thumbnail: the slide at low resolution.
        name: of the slide, for messages.

    Raises:
        SourceError: too little tissue for an estimate.
    """
    shares = (thumbnail.reshape(-1, 3).astype(np.float64) + 1) / 256
    tissue = shares[(-np.log(shares) > _MIN_DENSITY).all(1)]
    if len(tissue) < _MIN_TISSUE_PX:
        raise SourceError(
            f"cannot estimate the colours of {name}: {len(tissue)} px of its thumbnail are stained, {_MIN_TISSUE_PX} are needed. Leave the "
            "slide out, or train with augment.stain none."
        )
    rotated = np.log10(tissue @ _CONES.T) @ _ROTATION.T
    mean, deviation = rotated.mean(0), np.maximum(rotated.std(0), _MIN_DEVIATION)
    scale = np.diag(_REFERENCE_DEVIATION / deviation)
    back = np.linalg.inv(_ROTATION)
    return ColourAffine.of(back @ scale @ _ROTATION, back @ (_REFERENCE_MEAN - scale @ mean))


class ColourTransferred(PixelwiseColours):
    """An image with an affine map of the logarithms of its cones' responses.

    A pixel's bits must not depend on its neighbours in the same call, so logarithms and exponentials come from tables.

    Args:
        image: the image.
        transfer: of :func:`fit_reinhard`.
    """

    def __init__(self, image: Image, transfer: ColourAffine) -> None:
        super().__init__(image)
        self.transfer = transfer

    def _recolour(self, pixels: Pixels) -> Pixels:
        responses = _TO_CONES.apply([_SHARES[pixels[..., channel]] for channel in range(3)])
        logs = [_LOGS[_nearest_entries(response * np.float32(_RESPONSES), _RESPONSES)] for response in responses]
        moved = self.transfer.apply(logs)
        changed = [_POWERS[_nearest_entries((log - np.float32(_MIN_LOG)) * np.float32(_LOG_STEPS), len(_POWERS) - 1)] for log in moved]
        planes = _FROM_CONES.apply(changed)
        return np.stack([np.clip(np.rint(plane * np.float32(256)) - 1, 0, 255) for plane in planes], axis=-1).astype(np.uint8)


def _nearest_entries(numbers: _Float32s, last: int) -> npt.NDArray[np.int32]:
    """The nearest entries of a table."""
    return np.rint(np.clip(numbers, 0, last)).astype(np.int32)


_TO_CONES, _FROM_CONES = ColourAffine.of(_CONES), ColourAffine.of(np.linalg.inv(_CONES))
_SHARES: _Float32s = ((np.arange(256) + 1) / 256).astype(np.float32)
_LOGS: _Float32s = np.log10(np.maximum(np.arange(_RESPONSES + 1), 1) / _RESPONSES).astype(np.float32)
#: Up to ten times the largest response; brighter pixels are white.
_POWERS: _Float32s = (10 ** (_MIN_LOG + np.arange(int((1 - _MIN_LOG) * _LOG_STEPS) + 1) / _LOG_STEPS)).astype(np.float32)


#: Densities of haematoxylin, eosin and DAB in red, green and blue (Ruifrok and Johnston, 2001).
_HED: FloatArray = np.array([[0.650, 0.704, 0.286], [0.072, 0.990, 0.105], [0.268, 0.570, 0.776]])
#: Target of the normalisation: directions of haematoxylin and eosin, and the 99th percentile of their amounts (Macenko et al., 2009).
_REFERENCE: FloatArray = np.array([[0.5626, 0.7201, 0.4062], [0.2159, 0.8012, 0.5581]])
_REFERENCE_MAX: FloatArray = np.array([1.9705, 1.0308])


def fit_macenko(thumbnail: Pixels, name: str) -> ColourAffine:
    """Map of a slide's stains to the reference (Macenko et al., 2009).

    The two stains span a plane in optical density, found from tissue pixels; the extreme directions in it are the stains. The component
    normal to the plane is unchanged.

    Args:
        thumbnail: the slide at low resolution.
        name: of the slide, for messages.

    Raises:
        SourceError: too little tissue for an estimate.
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


def _with_normal(stains: FloatArray) -> FloatArray:
    """Two unit stains, and the direction normal to both."""
    unit = stains / np.linalg.norm(stains, axis=1, keepdims=True)
    normal = np.cross(unit[0], unit[1])
    result: FloatArray = np.vstack([unit, normal / max(float(np.linalg.norm(normal)), 1e-12)])
    return result
