"""Image files to read from."""

from __future__ import annotations

from pathlib import Path

import numpy as np

__all__ = ["write_image"]

_WRITE_ROWS = 256


def write_image(path: Path, height: int, width: int) -> None:
    """An ``.npy`` file of random uint8 pixels, height x width x 3, written a few rows at a time."""
    generator = np.random.default_rng(0)
    image = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(height, width, 3))
    for top in range(0, height, _WRITE_ROWS):
        rows = image[top : top + _WRITE_ROWS]
        rows[:] = generator.integers(0, 256, rows.shape, dtype=np.uint8)
    image.flush()
