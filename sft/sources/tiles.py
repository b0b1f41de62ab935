"""Tiles of an image as a bag: a source ``[N, C, h, w]`` that is read and decoded a few tiles at a time.

A compressed file can only be decoded by its own tiles, *cells* here, and the tiles of a bag rarely coincide with them: neighbours share
cells. Decoded cells are therefore kept within a byte budget, the least recently used ones dropped first. In the order of rows, forward or
backward, two rows of cells suffice to decode each cell once a pass. A bag of tissue decodes no cell without tissue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from fractions import Fraction
from math import gcd
from typing import Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sft.common.array_types import BoolArray
from sft.common.byte_units import parse_bytes
from sft.common.errors import InputError, SourceError, typed
from sft.common.interval import Interval
from sft.sources.image import Image, Pixels, Rectangle, Size, pixel_dtype
from sft.sources.normalize import normalizer_of
from sft.sources.resample import Resampled
from sft.sources.source import PixelRows, check_rows, check_samples
from sft.sources.value_range import ValueRange
from sft.sources.views import RasterView

__all__ = ["Tiles"]

Positions: TypeAlias = npt.NDArray[np.int64]
#: Size of a cell of views whose tiles are not known: rectangles that are large for a tile, so that few tiles are decoded again.
_VIEW_CELL_PX = 512
#: Column and row of a cell.
_Cell: TypeAlias = tuple[int, int]


@runtime_checkable
class _Mask(Protocol):
    def region(self, x: int, y: int, w: int, h: int) -> BoolArray: ...


class Tiles(PixelRows):
    """Tiles of an image: a `sft.sources.Source` of shape ``[N, C, h, w]``.

    Only tiles inside the image count; an incomplete one at the right or lower border is left out.

    >>> from sft.sources import ArrayImage
    >>> image = ArrayImage(np.arange(24, dtype=np.uint8).reshape(4, 6))
    >>> tiles = Tiles(image, 2)
    >>> tiles.shape, tiles.positions_px.tolist()
    ((6, 1, 2, 2), [[0, 0], [2, 0], [4, 0], [0, 2], [2, 2], [4, 2]])
    >>> tiles.take([5, 0]).positions_px.tolist()
    [[4, 2], [0, 0]]

    Args:
        image: of any kind, such as `sft.sources.open_image` returns; its level 0 is read.
        tile_px: height and width of a tile, in px; one number, or ``(h, w)``.
        tissue: mask of the image, a `sft.tissue.TissueMask` or an object with ``region(x, y, w, h)``. Default: `None` (all tiles)
        min_tissue: least share of a tile's px that is tissue. Default: 0.5
        stride_px: px from a tile to the next, one number or ``(y, x)``. Default: `None` (the size of a tile)
        order: ``"rows"`` or ``"columns"``: neighbours along rows, or columns, follow one another. Default: ``"rows"``
        mean: of each channel, as in `sft.sources.Normalized`. Default: `None` (0)
        std: of each channel, likewise. Default: `None` (1)
        dtype: floating-point type of the tiles. Default: `torch.float32`
        value_range: of the pixels, as in `sft.sources.Normalized`. Default: `None` (that of their type)
        clip: True to limit pixels to the value range. Default: `False`
        host_budget_bytes: host memory for decoded cells, bytes or text. Default: ``"256MiB"``

    Attributes:
        positions_px: column and row of the upper left px of each tile, int64 ``[N, 2]``.

    Raises:
        InputError: an argument is wrong, or no tile has enough tissue.
        SourceError: the image cannot be opened.
    """

    def __init__(
        self,
        image: Image,
        tile_px: int | tuple[int, int],
        *,
        tissue: _Mask | None = None,
        min_tissue: float = 0.5,
        stride_px: int | tuple[int, int] | None = None,
        order: Literal["rows", "columns"] = "rows",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype = torch.float32,
        value_range: ValueRange | None = None,
        clip: bool = False,
        host_budget_bytes: int | str = "256MiB",
    ) -> None:
        if not isinstance(image, Image):
            raise InputError(f"cannot take tiles of {typed(image)}: expected width_px, height_px and read(). See sft.sources.Image.")
        height, width = _pair("tile_px", tile_px)
        stride = (height, width) if stride_px is None else _pair("stride_px", stride_px)
        if height > image.height_px or width > image.width_px:
            raise InputError(
                f"cannot take tiles of {width} x {height} px of {image}: it has {image.width_px} x {image.height_px} px. "
                "Take smaller tiles, or read it at a finer resolution."
            )
        if order not in ("rows", "columns"):
            raise InputError(f"cannot take tiles in the order {order!r}: choose 'rows' or 'columns', or take(indices) afterwards.")
        num_channels, self._normalizer = normalizer_of(image, width, mean, std, dtype=dtype, value_range=value_range, clip=clip)
        self.image, self.dtype = image, dtype
        self.positions_px = _positions(image, (height, width), stride, tissue, min_tissue, order)
        self.shape: tuple[int, int, int, int] = (len(self.positions_px), num_channels, height, width)
        self._cells = _Cells(image, num_channels, parse_bytes(host_budget_bytes))

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Tiles({self.image!r}, shape={self.shape})"

    @property
    def num_cells_decoded(self) -> int:
        """Cells of the image that were decoded so far, repetitions included; 0 for an image without a known grid of cells."""
        return self._cells.num_decoded

    def take(self, indices: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Self:
        """The bag of some tiles, in this order, without a copy; decoded cells are shared.

        Raises:
            InputError: no index, or one outside of the bag.
        """
        index = np.asarray(indices)
        if index.ndim != 1 or not len(index) or index.dtype.kind not in "iu" or index.min() < 0 or index.max() >= len(self):
            raise InputError(f"cannot take tiles {indices!r} of {self}: give a list of integers from 0 to {len(self) - 1}.")
        return self.at(self.positions_px[index])

    def at(self, positions_px: npt.ArrayLike) -> Self:
        """The bag of the tiles at other positions of the image, such as coordinates of another tool; decoded cells are shared.

        Args:
            positions_px: column and row of the upper left px of each tile, integers ``[N, 2]``.

        Raises:
            InputError: no tile, or one that is not inside the image.
        """
        positions = np.asarray(positions_px)
        if positions.ndim != 2 or positions.shape[1] != 2 or not len(positions) or positions.dtype.kind not in "iu":
            raise InputError(f"cannot take tiles at positions of shape {positions.shape} and {positions.dtype}: give integers [N, 2].")
        height, width = self.shape[2:]
        last = np.array([self.image.width_px - width, self.image.height_px - height])
        outside = np.flatnonzero((positions < 0).any(1) | (positions > last).any(1))
        if len(outside):
            raise InputError(
                f"cannot take the tile of {width} x {height} px at {positions[outside[0]].tolist()} of {self.image} "
                f"({self.image.width_px} x {self.image.height_px} px): it is not inside the image ({len(outside)} of {len(positions)} are "
                "not). Give column and row of the upper left px."
            )
        bag = copy(self)
        bag.positions_px = positions.astype(np.int64)
        bag.shape = (len(positions), *self.shape[1:])
        return bag

    def samples(self, batch: Interval) -> Self:
        """The bag of the tiles ``batch``; see `sft.sources.select_samples`."""
        check_samples(self, batch)
        return self.take(np.arange(batch.start, batch.stop))

    def rows(self, interval: Interval, out: Tensor) -> None:
        """Fill ``out`` with rows of every tile; see `sft.sources.Source`.

        Raises:
            InputError: the interval or ``out`` does not fit, or the image has another number of channels.
            SourceError: pixels cannot be read.
        """
        check_rows(repr(self), self.shape, interval, out)
        self._deliver(interval, out, self._normalizer.fill)

    def _deliver(self, interval: Interval, out: Tensor, fill: Callable[[Pixels, Tensor], None]) -> None:
        if not interval:
            return
        rectangles = [Rectangle.of(x, y + interval.start, self.shape[3], len(interval)) for x, y in self.positions_px]
        for index, pixels in enumerate(self._cells.read_all(rectangles)):
            fill(pixels, out[index])

    def forget(self) -> None:
        """Drop all decoded cells."""
        self._cells.forget()

    def close(self) -> None:
        """Close the underlying file and drop all decoded cells."""
        self.forget()
        close = getattr(self.image, "close", None)
        if close is not None:
            close()


def _pair(name: str, value: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width of an argument that is one number or two."""
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, Sequence) else ()
    if len(pair) != 2 or any(not isinstance(number, (int, np.integer)) or number < 1 for number in pair):
        raise InputError(f"cannot take tiles with {name}={value!r}: give an integer number of px, at least 1, or (height, width).")
    return int(pair[0]), int(pair[1])


def _positions(
    image: Image, tile: tuple[int, int], stride: tuple[int, int], tissue: _Mask | None, min_tissue: float, order: str
) -> Positions:
    """Columns and rows of the upper left px of the tiles with enough tissue."""
    tops, lefts = (np.arange(0, extent - size + 1, step) for extent, size, step in zip(_size(image), tile, stride, strict=True))
    is_taken = np.ones((len(tops), len(lefts)), bool)
    if tissue is not None:
        if not isinstance(tissue, _Mask) or not 0 <= min_tissue <= 1:
            raise InputError(f"cannot take tiles with tissue={typed(tissue)}, min_tissue={min_tissue}: give a mask, and a share of 0 to 1.")
        mask_size = (getattr(tissue, "height_px", image.height_px), getattr(tissue, "width_px", image.width_px))
        if mask_size != _size(image):
            raise InputError(
                f"cannot take tiles of {image} ({image.width_px} x {image.height_px} px): the mask is of a slide of {mask_size[1]} x "
                f"{mask_size[0]} px. At another resolution of the same slide, give mask.at(width_px, height_px)."
            )
        shares = np.stack([_tissue_px(tissue, image.width_px, int(top), tile, lefts) for top in tops]) / (tile[0] * tile[1])
        is_taken = shares >= min_tissue if min_tissue else shares > 0
        if not is_taken.any():
            raise InputError(
                f"cannot take tiles of {image}: of {is_taken.size} tiles of {tile[1]} x {tile[0]} px none has a share of {min_tissue:g} of "
                f"tissue; the largest share is {shares.max():.3g}. Lower min_tissue, or look at the mask."
            )
    rows, columns = np.nonzero(is_taken) if order == "rows" else np.nonzero(is_taken.T)[::-1]
    return np.stack([lefts[columns], tops[rows]], axis=1).astype(np.int64)


def _size(image: Image) -> tuple[int, int]:
    return image.height_px, image.width_px


def _tissue_px(tissue: _Mask, width_px: int, top: int, tile: tuple[int, int], lefts: Positions) -> Positions:
    """Px of tissue of the tiles of one row."""
    counts = getattr(tissue, "column_counts", None)
    rows = Interval(top, top + tile[0])
    per_column = counts(rows) if counts is not None else np.asarray(tissue.region(0, top, width_px, tile[0])).sum(axis=0)
    total = np.concatenate([[0], np.cumsum(per_column, dtype=np.int64)])
    tissue_px: Positions = total[lefts + tile[1]] - total[lefts]
    return tissue_px


class _Cells:
    """Decoded cells of an image, as many as a byte budget allows; for an image without a known grid of cells, nothing is kept."""

    def __init__(self, image: Image, num_channels: int, budget_bytes: int) -> None:
        self._image, self._num_channels, self._budget_bytes = image, num_channels, budget_bytes
        #: (width, height) of a cell
        self._cell_px = _cell_px(image)
        self.num_decoded = 0
        # Least recently used first. Replaced as a whole, never changed: threads that race here decode a cell twice and nothing worse. A
        # lock could be inherited, locked forever, by a process forked at the wrong moment.
        self._known: Mapping[_Cell, Pixels] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}

    def forget(self) -> None:
        """Drop all cells."""
        self._known = {}

    def read_all(self, rectangles: Sequence[Rectangle]) -> Iterator[Pixels]:
        """Pixels of rectangles, one after another."""
        if self._cell_px is None:
            yield from map(self._read, rectangles)
            return
        first = 0
        while first < len(rectangles):
            # Cells of several rectangles are decoded in one read, in parallel, as far as half of the budget goes.
            cells = dict.fromkeys(self._cells_of(rectangles[first]))
            last = first + 1
            while last < len(rectangles):
                more = cells | dict.fromkeys(self._cells_of(rectangles[last]))
                if sum(map(self._num_bytes, more)) > self._budget_bytes // 2:
                    break
                cells, last = more, last + 1
            pixels = self._decoded(cells)
            yield from (self._assembled(rectangle, pixels) for rectangle in rectangles[first:last])
            first = last

    def _cells_of(self, rectangle: Rectangle) -> list[_Cell]:
        rows, columns = rectangle.cells(self._grid)
        return [(column, row) for row in rows for column in columns]

    @property
    def _grid(self) -> Size:
        assert self._cell_px is not None
        return self._cell_px

    def _place(self, cell: _Cell, num_columns: int = 1) -> Rectangle:
        """Pixels of a cell, and of the next ones of its row, inside the image."""
        (column, row), (width, height) = cell, self._grid
        cells = Rectangle.of(column * width, row * height, num_columns * width, height)
        return cells.intersect(Rectangle.of(0, 0, self._image.width_px, self._image.height_px))

    def _num_bytes(self, cell: _Cell) -> int:
        height, width = self._place(cell).shape
        return width * height * self._num_channels * pixel_dtype(self._image).itemsize

    def _decoded(self, cells: Collection[_Cell]) -> Mapping[_Cell, Pixels]:
        """Pixels of cells; those decoded now are kept, in place of the least recently used ones."""
        cached = self._known
        pixels = {cell: cached[cell] for cell in cells if cell in cached}
        missing = sorted((cell for cell in cells if cell not in pixels), key=lambda cell: (cell[1], cell[0]))
        for run in _runs(missing):
            place = self._place(run[0], len(run))
            strip = self._read(place)
            for cell in run:
                cell_pixels = strip[self._place(cell).slices_in(place)]
                pixels[cell] = cell_pixels if len(run) == 1 else cell_pixels.copy()  # a view would keep the bytes of the full run
        self.num_decoded += len(missing)
        recent = {cell: kept for cell, kept in cached.items() if cell not in pixels} | pixels
        num_bytes = sum(kept.nbytes for kept in recent.values())
        for cell in list(recent):
            if num_bytes <= self._budget_bytes:
                break
            num_bytes -= recent.pop(cell).nbytes
        self._known = recent
        return pixels

    def _assembled(self, rectangle: Rectangle, cells: Mapping[_Cell, Pixels]) -> Pixels:
        """A rectangle of pixels of decoded cells."""
        out = np.empty((*rectangle.shape, self._num_channels), pixel_dtype(self._image))
        for cell in self._cells_of(rectangle):
            place = self._place(cell)
            overlap = place.intersect(rectangle)
            out[overlap.slices_in(rectangle)] = cells[cell][overlap.slices_in(place)]
        return out

    def _read(self, rectangle: Rectangle) -> Pixels:
        pixels = rectangle.read(self._image)
        expected = pixel_dtype(self._image)
        if pixels.ndim != 3 or pixels.shape[2] != self._num_channels or pixels.dtype.name != expected.name:
            raise InputError(
                f"cannot use pixels of shape {pixels.shape} and {pixels.dtype} from {self._image}: expected {expected} [height, width, "
                f"{self._num_channels}]. Convert the image, or give as many means as it has channels."
            )
        if pixels.shape[:2] != rectangle.shape:
            raise SourceError(
                f"cannot use tiles of {self._image}: it returned {pixels.shape[1]} x {pixels.shape[0]} px instead of "
                f"{len(rectangle.columns)} x {len(rectangle.rows)}. "
                "Its read() must return the rectangle of its arguments."
            )
        return pixels


def _cell_px(image: Image) -> tuple[int, int] | None:
    """(width, height) of a cell: of a compressed tile, or of the pixels that full tiles make after a reduction; ``None`` if unknown."""
    if isinstance(image, Resampled):
        below = _cell_px(image.image)
        return None if below is None else (_reduced(below[0], image.scale[0]), _reduced(below[1], image.scale[1]))
    levels = getattr(image, "level_tiles_px", None)
    known: tuple[int, int] | None = levels[0] if levels else None
    return (_VIEW_CELL_PX, _VIEW_CELL_PX) if known is None and isinstance(image, RasterView) else known


def _reduced(tile_px: int, scale: Fraction) -> int:
    """Output px of the fewest full tiles that make an integer number of px; of a scale that needs many, a fixed number.

    >>> _reduced(256, Fraction(2)), _reduced(240, Fraction(3, 2)), _reduced(256, Fraction(3, 2)), _reduced(256, Fraction(1001, 1000))
    (128, 160, 512, 512)
    """
    cell_px = tile_px * scale.denominator // gcd(scale.numerator, tile_px * scale.denominator)
    return cell_px if cell_px <= _VIEW_CELL_PX else _VIEW_CELL_PX


def _runs(cells: Sequence[_Cell]) -> Iterator[list[_Cell]]:
    """Cells, sorted by rows, as runs of neighbours in a row."""
    run: list[_Cell] = []
    for cell in cells:
        if run and cell != (run[-1][0] + 1, run[-1][1]):
            yield run
            run = []
        run.append(cell)
    if run:
        yield run
