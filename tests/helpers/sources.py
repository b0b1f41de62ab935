"""Sources for tests: one that counts and can fail, and slide files of known pixels."""

from __future__ import annotations

import gc
import struct
import threading
import zlib
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sft.common.interval import Interval
from sft.sources import Normalized, StripReader

__all__ = ["Watched", "mapped_bytes", "reader_threads", "walk", "write_tiled_tiff"]


def reader_threads() -> list[threading.Thread]:
    """Threads of readers; there must be none after a pass."""
    if _reading():
        gc.collect()  # which takes long, and ends unreferenced readers
    return _reading()


def _reading() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sft-strip-reader"]


def mapped_bytes(path: Path) -> int:
    """Bytes of a file that are mapped and in memory, as this process's share."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if ":" not in line.split()[0]:
            inside = str(path) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


class Watched:
    """A tensor as a source that counts the reads of each row of each batch element.

    ``fails_at`` is an unreadable row, which a test may set at any time.
    """

    def __init__(self, content: Tensor, *, counts: Counter[tuple[int, int]] | None = None, first: int = 0) -> None:
        num, channels, height, width = content.shape
        self.shape = (num, channels, height, width)
        self.dtype = content.dtype
        self.content = content
        self.counts: Counter[tuple[int, int]] = Counter() if counts is None else counts
        self.first = first
        self.fails_at: int | None = None

    def __repr__(self) -> str:
        return "Watched"

    def rows(self, interval: Interval, out: Tensor) -> None:
        assert not torch.is_grad_enabled()
        if self.fails_at is not None and interval.start <= self.fails_at < interval.stop:
            raise RuntimeError("the disk is on fire")
        self.counts.update((self.first + n, row) for n in range(self.shape[0]) for row in range(interval.start, interval.stop))
        out.copy_(self.content[:, :, interval.start : interval.stop])

    def samples(self, batch: Interval) -> Watched:
        batch_source = Watched(self.content[batch.start : batch.stop], counts=self.counts, first=self.first + batch.start)
        batch_source.fails_at = self.fails_at
        return batch_source


def write_tiled_tiff(path: Path, pixels: npt.NDArray[np.uint8], *, tile_px: int = 16, damaged_tile: int | None = None) -> None:
    """Write RGB pixels as a tiled TIFF (deflate), which OpenSlide reads.

    Args:
        path: of the file.
        pixels: ``[height, width, 3]``.
        tile_px: side of a tile, a multiple of 16.
        damaged_tile: number of a tile, by rows, with overwritten compressed bytes.
    """
    height, width, _ = pixels.shape
    down, across = -(-height // tile_px), -(-width // tile_px)
    assert down * across > 1, "the offsets of a single tile would stand in the directory"
    padded = np.zeros((down * tile_px, across * tile_px, 3), np.uint8)
    padded[:height, :width] = pixels
    corners = [(row * tile_px, column * tile_px) for row in range(down) for column in range(across)]
    tiles = [zlib.compress(padded[top : top + tile_px, left : left + tile_px].tobytes()) for top, left in corners]
    if damaged_tile is not None:
        tiles[damaged_tile] = bytes(len(tiles[damaged_tile]))
    num, sizes = len(tiles), [len(tile) for tile in tiles]
    offsets = [8 + before for before in accumulate(sizes, initial=0)]
    end = offsets.pop()
    extra = struct.pack(f"<3H{num}I{num}I", 8, 8, 8, *offsets, *sizes)
    short, long = 3, 4
    tags = [
        (256, long, 1, width),
        (257, long, 1, height),
        (258, short, 3, end),  # bits of a sample
        (259, short, 1, 8),  # deflate
        (262, short, 1, 2),  # RGB
        (277, short, 1, 3),
        (284, short, 1, 1),
        (322, long, 1, tile_px),
        (323, long, 1, tile_px),
        (324, long, num, end + 6),
        (325, long, num, end + 6 + 4 * num),
    ]
    content = struct.pack("<2sHI", b"II", 42, end + len(extra)) + b"".join(tiles) + extra + struct.pack("<H", len(tags))
    # Little-endian: a short value in the first half of its field reads as a long one.
    content += b"".join(struct.pack("<HHII", *tag) for tag in tags) + struct.pack("<I", 0)
    path.write_bytes(content)


def walk(image: Any, rows: int, halo: int, *, backwards: bool = False) -> list[Any]:
    """Rows that a network reads in one pass, joined."""
    height = image.height_px
    strips = [Interval(top - halo, top + rows + halo).clip(height) for top in range(0, height, rows)][:: -1 if backwards else 1]
    source = Normalized(image, mean=(0, 0, 0), std=(1, 1, 1))
    with StripReader(source, strips) as reader:
        return [
            (rows, strip.mul(255).round().byte()[0].permute(1, 2, 0).numpy().copy()) for rows, strip in zip(strips, reader, strict=True)
        ]
