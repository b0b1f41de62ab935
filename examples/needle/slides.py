"""Slides of real tissue of which a thousandth decides, written as pyramidal TIFF files with a table.

Each slide is a mosaic of squares of a real H&E slide, turned and mirrored, of its calmer tissue. Somewhere on it lies one small square of
its roughest tissue. On positive slides the pixels inside each of its 8 x 8 blocks are shuffled, on negative ones it is as it was. A block
keeps its pixels and so its mean: at the level of the pyramid where a pixel is the mean of 8 x 8, a slide is the same, bit for bit,
for both classes. The deciding texture exists at full resolution only, at one unmarked position.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import tifffile

from sft.sources import Slide
from sft.sources.image import Pixels

__all__ = ["BLOCK_PX", "make_slides"]

SOURCE = Path(__file__).resolve().parents[1] / "data" / "CMU-1-Small-Region.svs"
#: Side of the shuffled blocks in px, and the downsampling at which the shuffle has no effect.
BLOCK_PX = 8
_MOSAIC_PX = 128
_MPP = 0.5


def make_slides(folder: Path, *, num_slides: int, size_px: int, needle_px: int, seed: int) -> Path:
    """Write slides and their table; half of them are positive, a half is for training, a sixth for validation, a third for testing.

    Args:
        folder: folder of the files; created if necessary.
        num_slides: number of slides.
        size_px: side of a slide; a multiple of 128.
        needle_px: side of the deciding square; a multiple of 8.
        seed: of all random numbers.

    Returns:
        The table, a CSV file.
    """
    if size_px % _MOSAIC_PX or needle_px % BLOCK_PX or needle_px > _MOSAIC_PX:
        raise ValueError(
            f"size_px {size_px} and needle_px {needle_px}: give multiples of {_MOSAIC_PX} and {BLOCK_PX}, a needle of {_MOSAIC_PX} at most"
        )
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    with Slide(SOURCE) as source:
        pixels = source.read(0, 0, source.width_px, source.height_px)
    tissue = _tissue(pixels)
    calm, rough = tissue[: len(tissue) // 3], tissue[-(len(tissue) // 10) :]
    rows = []
    for number in range(num_slides):
        slide, is_positive = _mosaic(pixels, calm, size_px, draw), number % 2 == 1
        needle = _square(pixels, rough, needle_px, draw)
        top, left = (draw.integers(0, (size_px - needle_px) // BLOCK_PX + 1, 2) * BLOCK_PX).tolist()
        slide[top : top + needle_px, left : left + needle_px] = _shuffled(needle, draw) if is_positive else needle
        name = f"slide-{number:03d}.tif"
        _write(folder / name, slide)
        split = "train" if number < num_slides // 2 else "val" if number < num_slides * 2 // 3 else "test"
        rows.append([name, "shuffled" if is_positive else "intact", split, _MPP, top, left])
    table = folder / "slides.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["slide", "label", "split", "mpp", "needle_top_px", "needle_left_px"], *rows])
    return table


def _tissue(pixels: Pixels) -> list[tuple[int, int]]:
    """(top, left) of overlapping squares with almost no glass, sorted by the variation inside their blocks, lowest first."""
    side, step, count = _MOSAIC_PX, _MOSAIC_PX // 2, _MOSAIC_PX // BLOCK_PX
    squares = []
    for top in range(0, pixels.shape[0] - side, step):
        for left in range(0, pixels.shape[1] - side, step):
            grey = pixels[top : top + side, left : left + side].mean(2)
            if (grey < 220).mean() > 0.95:
                squares.append((float(grey.reshape(count, BLOCK_PX, count, BLOCK_PX).std((1, 3)).mean()), (top, left)))
    return [place for _, place in sorted(squares)]


def _square(pixels: Pixels, tissue: list[tuple[int, int]], side_px: int, draw: np.random.Generator) -> Pixels:
    """A square of tissue, turned and mirrored."""
    top, left = tissue[int(draw.integers(len(tissue)))]
    down, right = draw.integers(0, _MOSAIC_PX - side_px + 1, 2).tolist()
    square = pixels[top + down : top + down + side_px, left + right : left + right + side_px]
    turned: Pixels = np.rot90(square[:, :: 1 - 2 * int(draw.integers(2))], int(draw.integers(4)))
    return turned


def _mosaic(pixels: Pixels, tissue: list[tuple[int, int]], size_px: int, draw: np.random.Generator) -> Pixels:
    count = size_px // _MOSAIC_PX
    return np.concatenate([np.concatenate([_square(pixels, tissue, _MOSAIC_PX, draw) for _ in range(count)], 1) for _ in range(count)])


def _shuffled(square: Pixels, draw: np.random.Generator) -> Pixels:
    """The pixels of each block in another order."""
    count = square.shape[0] // BLOCK_PX
    blocks = square.reshape(count, BLOCK_PX, count, BLOCK_PX, 3).transpose(0, 2, 1, 3, 4).reshape(count, count, BLOCK_PX**2, 3)
    orders = draw.random((count, count, BLOCK_PX**2)).argsort(2)[..., None]
    mixed = np.take_along_axis(blocks, orders, 2)
    return mixed.reshape(count, count, BLOCK_PX, BLOCK_PX, 3).transpose(0, 2, 1, 3, 4).reshape(square.shape)


def _write(path: Path, pixels: Pixels) -> None:
    """Write a tiled TIFF with levels of the means of 2 x 2, 4 x 4 and 8 x 8 pixels of the first."""
    with tifffile.TiffWriter(path) as file:
        for factor in (1, 2, 4, BLOCK_PX):
            side_px = pixels.shape[0] // factor
            sums = pixels.reshape(side_px, factor, side_px, factor, 3).sum((1, 3), dtype=np.uint32)
            level = ((sums + factor**2 // 2) // factor**2).astype(np.uint8)
            resolution = 1e4 / (_MPP * factor)
            file.write(
                level,
                tile=(128, 128),
                compression="adobe_deflate",
                compressionargs={"level": 1},
                photometric="rgb",
                metadata=None,
                subfiletype=0 if factor == 1 else 1,
                resolution=(resolution, resolution),
                resolutionunit="CENTIMETER",
            )
