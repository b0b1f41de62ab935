"""Levels of a pyramid, built while the rows of the largest level arrive: each level halves the one above, in blocks of full tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from sft.prediction.raster import PredictedRaster, RasterRows

__all__ = ["Pyramid", "level_sizes", "padded_tiles"]


def level_sizes(height_px: int, width_px: int, *, tile_px: int) -> tuple[tuple[int, int], ...]:
    """(height, width) of the levels of a pyramid: halves, rounded up, until a level fits into one tile.

    >>> level_sizes(1000, 700, tile_px=256)
    ((1000, 700), (500, 350), (250, 175))
    """
    sizes = [(height_px, width_px)]
    while max(sizes[-1]) > tile_px:
        sizes.append(((sizes[-1][0] + 1) // 2, (sizes[-1][1] + 1) // 2))
    return tuple(sizes)


class Pyramid:
    """Buffers of the levels. Each level collects rows up to the height of a block, and passes the reduced block on to the next level.

    A pixel of a reduced level is the top left one of its four pixels for classes, and their mean otherwise (integers: rounded to the
    nearest, halves up).

    Args:
        raster: the largest level.
        sizes: (height, width) of each level.
        block_rows: rows of a block; even.
        emit: called with the level, the first row and the rows of each block, from the top in each level; only the last block of a level is
            lower than ``block_rows``.
    """

    def __init__(
        self,
        raster: PredictedRaster,
        sizes: tuple[tuple[int, int], ...],
        *,
        block_rows: int,
        emit: Callable[[int, int, RasterRows], None],
    ) -> None:
        assert block_rows % 2 == 0
        self._is_classes, self._sizes, self._block_rows, self._emit = raster.is_classes, sizes, block_rows, emit
        self._buffers = [np.empty((raster.num_channels, min(block_rows, height), width), raster.dtype) for height, width in sizes]
        self._tops = [0] * len(sizes)
        self._filled = [0] * len(sizes)

    def add(self, rows: RasterRows, level: int = 0) -> None:
        """Add the next rows of a level."""
        start, height = 0, self._sizes[level][0]
        while start < rows.shape[1]:
            buffer, filled = self._buffers[level], self._filled[level]
            count = min(buffer.shape[1] - filled, rows.shape[1] - start)
            buffer[:, filled : filled + count] = rows[:, start : start + count]
            start += count
            self._filled[level] = filled = filled + count
            if filled == self._block_rows or self._tops[level] + filled == height:
                block = buffer[:, :filled]
                self._emit(level, self._tops[level], block)
                if level + 1 < len(self._sizes):
                    self.add(_halved(block, average=not self._is_classes), level + 1)
                self._tops[level] += filled
                self._filled[level] = 0


def _halved(rows: RasterRows, *, average: bool) -> RasterRows:
    """Every second row and column, or the mean of two by two pixels; the last row and column count twice if their number is odd."""
    if not average:
        return rows[:, ::2, ::2]
    pad = ((0, 0), (0, rows.shape[1] % 2), (0, rows.shape[2] % 2))
    even = np.pad(rows, pad, mode="edge") if pad[1][1] or pad[2][1] else rows
    total = np.zeros((even.shape[0], even.shape[1] // 2, even.shape[2] // 2), np.promote_types(rows.dtype, np.float32))
    for row in (0, 1):
        for column in (0, 1):
            total += even[:, row::2, column::2]
    total /= 4
    return np.floor(total + 0.5).astype(rows.dtype) if rows.dtype.kind in "ui" else total.astype(rows.dtype)


def padded_tiles(block: RasterRows, tile_px: int) -> Iterator[tuple[int, RasterRows]]:
    """The tiles ``[tile_px, tile_px]`` of a block that is at most one tile high, channel after channel, padded with zeros."""
    for channel, plane in enumerate(block):
        for left in range(0, plane.shape[1], tile_px):
            piece = plane[:, left : left + tile_px]
            if piece.shape == (tile_px, tile_px):
                yield channel, np.ascontiguousarray(piece)
            else:
                tile = np.zeros((tile_px, tile_px), block.dtype)
                tile[: piece.shape[0], : piece.shape[1]] = piece
                yield channel, tile
