"""Image files for benchmarks of reading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tifffile

from sft.sources import TiffImage

__all__ = ["TILE_PX", "write_image", "write_slide"]

#: Side of the compressed tiles of a slide.
TILE_PX = 256

_WRITE_ROWS = 256
_REAL_SLIDE = Path(__file__).resolve().parents[2] / "examples" / "data" / "CMU-1-Small-Region.svs"
_LEVEL_STEP = 4
_NUM_LEVELS = 3
_MPP = 0.25

Pixels = npt.NDArray[np.uint8]


def write_image(path: Path, height: int, width: int) -> None:
    """An ``.npy`` file of random uint8 pixels, height x width x 3, written a few rows at a time."""
    generator = np.random.default_rng(0)
    image = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(height, width, 3))
    for top in range(0, height, _WRITE_ROWS):
        rows = image[top : top + _WRITE_ROWS]
        rows[:] = generator.integers(0, 256, rows.shape, dtype=np.uint8)
    image.flush()


def write_slide(path: Path, height: int, width: int) -> None:
    """A pyramid of JPEG tiles, its content a mosaic of a real slide; memory stays at a few tiles."""
    mosaic = TiffImage(_REAL_SLIDE).read(0, 0, 2048, 2048)
    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        for level in range(_NUM_LEVELS):
            step = _LEVEL_STEP**level
            size = height // step, width // step
            writer.write(
                _tiles(mosaic[::step, ::step], *size),
                shape=(*size, 3),
                dtype=np.uint8,
                tile=(TILE_PX, TILE_PX),
                photometric="rgb",
                compression="jpeg",
                compressionargs={"level": 85},
                subfiletype=0 if level == 0 else 1,
                resolution=(10_000 / _MPP / step, 10_000 / _MPP / step),
                resolutionunit="CENTIMETER",
                metadata=None,
            )


def _tiles(mosaic: Pixels, height: int, width: int) -> Iterator[Pixels]:
    """Tiles from all over the mosaic, each turned one way or another, so that the file is not a repetition."""
    generator = np.random.default_rng(0)
    room = max(1, len(mosaic) - TILE_PX + 1)
    filled = np.pad(mosaic, [(0, max(0, TILE_PX - extent)) for extent in mosaic.shape[:2]] + [(0, 0)], mode="symmetric")
    for _ in range(-(-height // TILE_PX) * -(-width // TILE_PX)):
        y, x, turns = (int(generator.integers(limit)) for limit in (room, room, 4))
        yield np.ascontiguousarray(np.rot90(filled[y : y + TILE_PX, x : x + TILE_PX], turns))
