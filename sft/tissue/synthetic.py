"""Synthetic slides: tiled pyramids of drawn tissue, for documentation and first trials without a scanner's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sft.common.errors import InputError
from sft.sources.image import missing_extra

__all__ = ["write_synthetic_slide"]

_GLASS: Final = np.array([243, 243, 245], np.float32)
_STROMA: Final = np.array([226, 160, 196], np.float32)
_NUCLEUS: Final = np.array([94, 62, 140], np.float32)
_MIN_SIDE_PX: Final = 64


def write_synthetic_slide(
    path: str | Path,
    *,
    width_px: int = 2220,
    height_px: int = 2967,
    mpp: float = 0.499,
    tile_px: int = 240,
    num_levels: int = 2,
    seed: int = 0,
) -> None:
    """Write a tiled TIFF pyramid with one drawn section of stained tissue on glass.

    The tissue is an ellipse with a wavy border, in the colours of haematoxylin and eosin. The file has JPEG tiles, like
    those of scanners; every level halves the previous one.

    Args:
        path: file to write. It is replaced.
        width_px: width of the largest level.
        height_px: height of the largest level.
        mpp: micrometres per pixel of the largest level.
        tile_px: side of a tile; a multiple of 16.
        num_levels: levels of the pyramid.
        seed: seed of the random shapes.

    Raises:
        InputError: if a size is too small for a slide, or ``tile_px`` is not a multiple of 16.
    """
    if min(width_px, height_px) < _MIN_SIDE_PX << num_levels or num_levels < 1:
        raise InputError(
            f"a slide of {width_px} x {height_px} px with {num_levels} levels was requested; give at least one level, and sides of at "
            f"least {_MIN_SIDE_PX} px times 2 for each level"
        )
    if tile_px < 16 or tile_px % 16:
        raise InputError(f"tile_px is {tile_px}; JPEG tiles have sides that are multiples of 16")
    try:
        import imagecodecs  # noqa: F401 - tifffile encodes JPEG with it
        import tifffile
    except ImportError as error:
        raise missing_extra(f"write the slide {path}", "fast", error) from error
    pixels = _section(width_px, height_px, np.random.default_rng(seed))
    per_centimetre = 10_000 / mpp
    with tifffile.TiffWriter(path) as writer:
        for level in range(num_levels):
            options: dict[str, Any] = {"subfiletype": 1} if level else {"software": "sft synthetic slide"}
            scale = 2**level
            writer.write(
                pixels,
                photometric="rgb",
                tile=(tile_px, tile_px),
                compression="jpeg",
                resolution=(per_centimetre / scale, per_centimetre / scale),
                resolutionunit="CENTIMETER",
                metadata=None,
                **options,
            )
            pixels = pixels[::2, ::2]


def _section(width_px: int, height_px: int, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Pixels of one tissue section, uint8 ``[height, width, 3]``."""
    y = np.linspace(-1, 1, height_px, dtype=np.float32)[:, None]
    x = np.linspace(-1, 1, width_px, dtype=np.float32)[None, :]
    angle = np.arctan2(y, x)
    border = np.full_like(angle, 0.78)
    for frequency in (2, 3, 5, 9):
        border = border + np.float32(random.uniform(0.02, 0.06)) * np.sin(frequency * angle + np.float32(random.uniform(0, 6.3)))
    tissue = np.hypot(x, y) < border
    fibres = np.sin(np.float32(random.uniform(20, 30)) * x + 6 * np.sin(9 * y)) * np.cos(np.float32(random.uniform(15, 25)) * y)
    noise = random.standard_normal((height_px, width_px), dtype=np.float32)
    image = np.broadcast_to(_GLASS, (height_px, width_px, 3)) + 1.5 * noise[..., None]
    stroma = _STROMA + (12 * fibres + 5 * noise)[..., None]
    image = np.where(tissue[..., None], stroma, image)
    nuclei = _nuclei(width_px, height_px, random) & tissue
    image[nuclei] = _NUCLEUS + 8 * noise[nuclei][:, None]
    return np.clip(image, 0, 255).astype(np.uint8)


def _nuclei(width_px: int, height_px: int, random: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Mask of round nuclei of 3 to 6 px radius, about one for each 900 px of area."""
    mask = np.zeros((height_px, width_px), bool)
    count = max(1, width_px * height_px // 900)
    columns, rows = random.integers(6, width_px - 6, count), random.integers(6, height_px - 6, count)
    radii = random.integers(3, 7, count)
    for radius in range(3, 7):
        dy, dx = np.nonzero(np.hypot(*np.mgrid[-radius : radius + 1, -radius : radius + 1]) <= radius)
        chosen = radii == radius
        mask[rows[chosen][:, None] + dy - radius, columns[chosen][:, None] + dx - radius] = True
    return mask
