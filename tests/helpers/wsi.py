"""Small whole-slide files of real pixels, tables of them, and networks that train on them in seconds."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import yaml
from torch import Tensor, nn

from sft.sources import Slide
from sft.sources.image import Pixels
from sft.wsi.cli import main

__all__ = [
    "TileNet",
    "TinyNet",
    "damage_tile",
    "read_rows",
    "real_pixels",
    "run_wsi",
    "tile_net",
    "tiny_net",
    "tissue_places",
    "write_config",
    "write_slide",
    "write_table",
    "write_task",
]


_SLIDE = Path(__file__).resolve().parents[2] / "examples" / "data" / "CMU-1-Small-Region.svs"


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file by the names of their columns."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class TinyNet(nn.Module):
    """Three convolutions with norms, a dropout, and a pooled classifier, which the backbone leaves out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 5, stride=4, padding=2), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Dropout2d(0.1),
        )  # fmt: skip
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(width, 5)

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.pool(self.features(image)).flatten(1))
        return scores


class TileNet(nn.Module):
    """Encoder of tiles: a convolution with a norm, and linear layers on its mean."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 5, stride=4, padding=2), nn.BatchNorm2d(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width))

    def forward(self, tiles: Tensor) -> Tensor:
        vectors: Tensor = self.mlp(self.norm(self.stem(tiles)).relu().mean((2, 3)))
        return vectors


def tile_net(width: int = 8, dropout: float = 0.0) -> nn.Module:
    """Encoder that configurations name: ``tests.helpers.wsi:tile_net``."""
    return TileNet(width, dropout)


def run_wsi(arguments: Sequence[str]) -> int:
    """``python -m sft.wsi`` in this process, with the networks of the tests trusted; returns the exit code."""
    return main(arguments, trust="tests")


def tiny_net(width: int = 8) -> nn.Module:
    """Backbone that configurations name: ``tests.helpers.wsi:tiny_net``."""
    return TinyNet(width)


@cache
def real_pixels() -> Pixels:
    """The example slide: stained skin."""
    with Slide(_SLIDE) as slide:
        return slide.read(0, 0, slide.width_px, slide.height_px)


@cache
def tissue_places(size_px: int) -> list[tuple[int, int]]:
    """(top, left) of squares of the example slide that do not overlap, the darkest first."""
    pixels = real_pixels()
    places = [(top, left) for top in range(0, pixels.shape[0] - size_px, size_px) for left in range(0, pixels.shape[1] - size_px, size_px)]
    return sorted(places, key=lambda place: float(pixels[place[0] : place[0] + size_px : 4, place[1] : place[1] + size_px : 4].mean()))


def write_slide(path: Path, pixels: Pixels, *, mpp: float | None = 0.5, num_levels: int = 2) -> None:
    """Write a pyramidal tiled TIFF that OpenSlide reads."""
    options: dict[str, Any] = {"tile": (128, 128), "compression": "adobe_deflate", "photometric": "rgb", "metadata": None}
    with tifffile.TiffWriter(path) as file:
        for level in range(num_levels):
            resolution = None if mpp is None else (1e4 / (mpp * 2**level),) * 2
            level_pixels = np.ascontiguousarray(pixels[:: 2**level, :: 2**level])
            kind = 1 if level else 0
            unit: dict[str, Any] = {} if resolution is None else {"resolution": resolution, "resolutionunit": "CENTIMETER"}
            file.write(level_pixels, subfiletype=kind, **unit, **options)


def damage_tile(path: Path, number: int = -1) -> None:
    """Make one compressed tile of a slide's largest level unreadable."""
    with tifffile.TiffFile(path) as file:
        offset, num_bytes = file.pages[0].dataoffsets[number], file.pages[0].databytecounts[number]
    with path.open("r+b") as opened:
        opened.seek(offset)
        opened.write(bytes(num_bytes))


def write_task(folder: Path, *, num_slides: int = 8, size_px: int = 160) -> Path:
    """Slides of two classes (unchanged, and with red and blue exchanged) of several patients, and their table."""
    rows = []
    for number, (top, left) in enumerate(tissue_places(size_px + 8)[:num_slides]):
        height, width = size_px + 8 * (number % 2), size_px
        crop = real_pixels()[top : top + height, left : left + width]
        write_slide(folder / f"s{number}.tif", crop[..., ::-1] if number % 2 else crop)
        split = "test" if number >= num_slides - 2 else "val" if number >= num_slides - 4 else "train"
        rows.append({"slide": f"s{number}.tif", "label": ("plain", "swapped")[number % 2], "patient": f"p{number}", "split": split})
    return write_table(folder / "slides.csv", rows)


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_config(path: Path, table: Path, run: Path, **groups: dict[str, Any]) -> Path:
    """Configuration of the tiny network, with overrides of the defaults."""
    settings: dict[str, Any] = {
        "data": {"csv": str(table)},
        "task": {"kind": "classification"},
        "model": {"backbone": "tests.helpers.wsi:tiny_net", "budget": "64MiB"},
        "augment": {"brightness": 0.1, "saturation": 0.1, "hed": 0.05},
        "train": {"epochs": 2, "lr": 0.01, "accumulate": 2},
        "run": str(run),
    }
    for name, group in groups.items():
        settings[name] = {**settings[name], **group}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path
