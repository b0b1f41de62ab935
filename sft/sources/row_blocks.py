"""Row cache: rows of an image in blocks of full tiles, each decoded once a pass, and kept for later passes within a byte budget.

A compressed file can only be decoded by full tiles. Requests for rows (strips, crops, output rows of a resampling) rarely end at tile
borders. Rows are therefore read in blocks aligned to the tiles, and the two blocks at the edges of the last request are kept: a sweep
needs one of them next, in either direction.

*With a byte budget*, blocks are also kept for later passes until the budget is full. None is evicted: every later pass then finds the same
share of the image decoded, forward and backward alike. (LRU eviction would find no block at all in a second pass in the same direction.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sft.common.errors import InputError, SourceError
from sft.common.interval import Interval
from sft.sources.image import Image, Pixels

__all__ = ["RowBlocks"]

#: Some formats have tiles of eight rows. A block is a multiple of the tile height with at least this number of rows, since each read costs.
_MIN_BLOCK_ROWS = 64


class RowBlocks:
    """Row cache of some columns of an image.

    Args:
        image: of any kind; its level 0 is read. If it has ``tile_height_px``, blocks are full tiles.
        columns: columns of each row.
        host_budget_bytes: bytes kept for later passes; on top of it up to three blocks, and a fourth while it is used.
            Default: 0

    Raises:
        InputError: a negative budget.
    """

    def __init__(self, image: Image, columns: Interval, *, host_budget_bytes: int = 0) -> None:
        if host_budget_bytes < 0:
            raise InputError(f"cannot keep decoded rows in {host_budget_bytes} bytes. Give 0 or more.")
        self.image, self.columns, self.host_budget_bytes = image, columns, host_budget_bytes
        tile_rows = getattr(image, "tile_height_px", None)
        #: rows of a block; None: rows are read exactly as requested
        self.block_rows: int | None = None
        if tile_rows is not None:
            self.block_rows = tile_rows * -(-_MIN_BLOCK_ROWS // tile_rows)
        elif host_budget_bytes:
            self.block_rows = _MIN_BLOCK_ROWS
        #: blocks that were read from the image, and that were found among those kept
        self.num_blocks_read = self.num_blocks_reused = 0
        # The edges are replaced as a whole, never changed: threads that race here decode a block twice and nothing worse. A lock could be
        # inherited, held forever, by a process forked at the wrong moment.
        self._edges: Mapping[int, Pixels] = {}
        self._kept: dict[int, Pixels] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_edges": {}, "_kept": {}}

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for later passes."""
        return sum(pixels.nbytes for pixels in list(self._kept.values()))

    def forget(self) -> None:
        """Drop all cached blocks."""
        self._edges = {}
        self._kept = {}

    def rows(self, wanted: Interval, *, within: Interval | None = None) -> Pixels:
        """The rows ``wanted`` (inside the image) of the columns, in a new array.

        Args:
            wanted: rows.
            within: of a request that is taken in parts, all rows: the blocks at its edges are kept, not those of each part. Default: `None`

        Raises:
            SourceError: they cannot be read.
        """
        if self.block_rows is None:
            return self._read(wanted)
        numbers, span = self._numbers(wanted), self._numbers(within or wanted)
        edge_numbers = {span[0], span[-1], numbers[-1]}
        # Blocks outside this request are dropped before the read.
        edges = self._edges = {number: pixels for number, pixels in self._edges.items() if number in span}
        out: Pixels | None = None
        for number in numbers:
            block = self._rows_of(number)
            pixels = self._block(number, edges, self.host_budget_bytes)
            if out is None:
                out = np.empty((len(wanted), *pixels.shape[1:]), pixels.dtype)
            overlap = block.intersect(wanted)
            out[overlap.start - wanted.start : overlap.stop - wanted.start] = pixels[
                overlap.start - block.start : overlap.stop - block.start
            ]
            edges = {known: edges[known] for known in edges if known > number or known in edge_numbers}
            if number in edge_numbers:
                edges[number] = pixels
            self._edges = edges
            del pixels  # before the next block is read
        assert out is not None
        return out

    def decode(self, most_bytes: int) -> Iterator[None]:
        """Prefetch blocks from the top, one per iteration, until ``most_bytes`` are used.

        Raises:
            SourceError: they cannot be read.
        """
        if self.block_rows is None:
            return
        for number in self._numbers(Interval(0, self.image.height_px)):
            if number not in self._kept:
                like_it = max((pixels.nbytes for pixels in list(self._kept.values())), default=0)
                if self.kept_bytes + like_it <= most_bytes:
                    self._block(number, self._edges, min(most_bytes, self.host_budget_bytes))
                if number not in self._kept:
                    return
            yield

    def _numbers(self, rows: Interval) -> range:
        """The blocks that rows lie in."""
        assert self.block_rows is not None
        return range(rows.start // self.block_rows, (rows.stop - 1) // self.block_rows + 1)

    def _rows_of(self, number: int) -> Interval:
        assert self.block_rows is not None
        return Interval(number * self.block_rows, min((number + 1) * self.block_rows, self.image.height_px))

    def _block(self, number: int, edges: Mapping[int, Pixels], most_bytes: int) -> Pixels:
        """A block, kept from now on if all that is kept takes no more than ``most_bytes``."""
        block = self._kept.get(number)
        if block is None:
            block = edges.get(number)
        if block is not None:
            self.num_blocks_reused += 1
            return block
        pixels = self._read(self._rows_of(number))
        self.num_blocks_read += 1
        if pixels.nbytes <= most_bytes:
            self._kept[number] = pixels
            if self.kept_bytes > most_bytes:
                self._kept.pop(number, None)
        return pixels

    def _read(self, rows: Interval) -> Pixels:
        pixels = self.image.read(self.columns.start, rows.start, len(self.columns), len(rows))
        if pixels.ndim != 3 or pixels.shape[:2] != (len(rows), len(self.columns)):
            raise SourceError(
                f"cannot use rows [{rows.start}, {rows.stop}) of {self.image}: it returned shape {pixels.shape} instead of {len(rows)} x "
                f"{len(self.columns)} px. Its read() must return the rectangle of its arguments."
            )
        return pixels
