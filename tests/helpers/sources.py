"""Sources for tests: one that counts and can fail, and slide files made of known pixels."""

from __future__ import annotations

import gc
import struct
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sft.analysis.interval import Interval

__all__ = ["Watched", "reader_threads", "write_tiled_tiff"]


def reader_threads() -> list[threading.Thread]:
    """Threads of readers that are still there; there must be none once a pass is over."""
    gc.collect()
    return [thread for thread in threading.enumerate() if thread.name == "sft-strip-reader"]


class Watched:
    """A tensor as a source that counts how often each row of each batch element is asked for.

    ``fails_at`` is a row that cannot be read any more, which a test may set at any time.
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
        part = Watched(self.content[batch.start : batch.stop], counts=self.counts, first=self.first + batch.start)
        part.fails_at = self.fails_at
        return part


def write_tiled_tiff(path: Path, pixels: npt.NDArray[np.uint8], *, tile_px: int = 16, missing_tile: int | None = None) -> None:
    """Write RGB pixels as an uncompressed tiled TIFF, which OpenSlide reads.

    Args:
        path: of the file.
        pixels: ``[height, width, 3]``.
        tile_px: side of a tile, a multiple of 16.
        missing_tile: a tile, counted by rows, whose place lies behind the end of the file: it cannot be read.
    """
    height, width, _ = pixels.shape
    down, across = -(-height // tile_px), -(-width // tile_px)
    padded = np.zeros((down * tile_px, across * tile_px, 3), np.uint8)
    padded[:height, :width] = pixels
    tiles = [padded[r * tile_px : (r + 1) * tile_px, c * tile_px : (c + 1) * tile_px].tobytes() for r in range(down) for c in range(across)]
    size, num = len(tiles[0]), len(tiles)
    offsets = [8 + index * size for index in range(num)]
    end = 8 + num * size
    if missing_tile is not None:
        offsets[missing_tile] = 2**30
    extra = struct.pack("<3H", 8, 8, 8) + struct.pack(f"<{num}I", *offsets) + struct.pack(f"<{num}I", *[size] * num)
    at_offsets, at_sizes, directory = end + 6, end + 6 + 4 * num, end + len(extra)
    short, long = 3, 4
    tags = [
        (256, long, 1, width),
        (257, long, 1, height),
        (258, short, 3, end),
        (259, short, 1, 1),
        (262, short, 1, 2),
        (277, short, 1, 3),
        (284, short, 1, 1),
        (322, long, 1, tile_px),
        (323, long, 1, tile_px),
        (324, long, num, at_offsets if num > 1 else offsets[0]),
        (325, long, num, at_sizes if num > 1 else size),
    ]
    entries = b"".join(
        struct.pack("<HHI", tag, kind, count) + (struct.pack("<HH", value, 0) if kind == short and count == 1 else struct.pack("<I", value))
        for tag, kind, count, value in tags
    )
    content = struct.pack("<2sHI", b"II", 42, directory) + b"".join(tiles) + extra
    path.write_bytes(content + struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0))
