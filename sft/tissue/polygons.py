"""Polygons in pixels of a slide, rasterised for any rectangle without a mask of the full slide.

A pixel belongs to a region if its centre does. A centre is inside a polygon if a ray to the left crosses its border (outer ring and holes
alike) an odd number of times; a border through a centre belongs to the pixels right of it. So polygons that share a border share no pixel
and leave none out. Borders are crossed row by row (scan conversion; Foley and van Dam, 1982), in float64 and with the same arithmetic for
every rectangle: a rectangle alone has the bits of that part of the full mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from sft.common.errors import InputError

__all__ = ["MaskArray", "Polygon", "Regions", "Ring", "check_overlap"]

MaskArray = npt.NDArray[np.bool_]
#: Corners ``[n, 2]`` of a closed line, (x, y); the last need not repeat the first.
Ring = npt.NDArray[np.float64]
#: Outer ring, then holes.
Polygon = tuple[Ring, ...]


class Regions:
    """Polygons with holes, in px of level 0 of a slide; where they overlap, both count.

    >>> square = np.array([[0, 0], [4, 0], [4, 4], [0, 4]], float)
    >>> Regions([(square, square / 2 + 1)]).region(0, 0, 4, 4).astype(int).tolist()
    [[1, 1, 1, 1], [1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]]

    Args:
        polygons: each an outer ring, then its holes.

    Raises:
        InputError: a ring with fewer than three corners, or corners that are not numbers.
    """

    def __init__(self, polygons: Sequence[Sequence[npt.ArrayLike]]) -> None:
        self.polygons: tuple[Polygon, ...] = tuple(tuple(_ring(ring) for ring in polygon) for polygon in polygons)
        # For each polygon the edges of all its rings: x and y at the upper end, x and y at the lower end.
        self._edges = [np.concatenate([_edges(ring) for ring in polygon]) for polygon in self.polygons if polygon]
        # Left, top, right and bottom of each, so that a strip tests only polygons near it.
        corners = [np.concatenate(polygon) for polygon in self.polygons if polygon]
        self._bounds = np.array([[*each.min(axis=0), *each.max(axis=0)] for each in corners]).reshape(-1, 4)

    def __repr__(self) -> str:
        return f"Regions({len(self.polygons)} polygons)"

    def scaled(self, x: float, y: float) -> Regions:
        """The same regions in px of an image that has `x` by `y` px for each of these: for a slide opened at another resolution."""
        return Regions([[ring * (x, y) for ring in polygon] for polygon in self.polygons])

    @property
    def area_px(self) -> float:
        """Sum of the polygons' areas."""
        return float(sum(abs(_area(rings[0])) - sum(abs(_area(hole)) for hole in rings[1:]) for rings in self.polygons if rings))

    @property
    def bounds(self) -> npt.NDArray[np.float64]:
        """Left, top, right and bottom of each polygon, ``[n, 4]``."""
        return self._bounds

    def bounding_box(self) -> tuple[float, float, float, float] | None:
        """``(left, top, right, bottom)`` of all polygons; None without polygons."""
        if not len(self._bounds):
            return None
        left, top = self._bounds[:, :2].min(axis=0)
        right, bottom = self._bounds[:, 2:].max(axis=0)
        return float(left), float(top), float(right), float(bottom)

    def region(self, x: int, y: int, w: int, h: int, *, step: tuple[float, float] = (1.0, 1.0)) -> MaskArray:
        """Mask of a rectangle, bool ``[h, w]``.

        Args:
            x: column of the top left pixel.
            y: row of the top left pixel.
            w: number of columns.
            h: number of rows.
            step: px of level 0 per px of the grid of the rectangle, (x, y). Default: level 0 itself
        """
        inside = np.zeros((h, w), bool)
        left, top, right, bottom = (self._bounds / np.tile(step, 2)).T
        for near in np.flatnonzero((left < x + w) & (right > x) & (top < y + h) & (bottom > y)):
            # In px of the grid, not of the rectangle, so that every rectangle rounds alike.
            x0, y0, x1, y1 = (self._edges[near] / np.tile(step, 2)).T
            # Rows whose centre lies in [y0, y1): an edge owns its upper end, so that a corner counts once.
            first = np.clip(np.ceil(y0 - 0.5), y, y + h).astype(np.int64)
            counts = np.clip(np.ceil(y1 - 0.5), y, y + h).astype(np.int64) - first
            used = np.flatnonzero(counts > 0)
            if not len(used):
                continue
            edge = np.repeat(used, counts[used])
            starts = np.repeat(np.cumsum(counts[used]) - counts[used], counts[used])
            row = first[edge] + np.arange(len(edge)) - starts
            at = x0[edge] + (row + 0.5 - y0[edge]) * ((x1[edge] - x0[edge]) / (y1[edge] - y0[edge]))
            column = np.clip(np.ceil(at - 0.5), x, x + w).astype(np.int64)
            # Each crossing changes everything right of it; left of the first and right of the last is outside.
            first_row, first_column, num_columns = row.min(), column.min(), np.ptp(column)
            crossings = np.zeros((row.max() + 1 - first_row, num_columns + 1), np.uint32)
            np.add.at(crossings, (row - first_row, column - first_column), 1)
            odd = np.cumsum(crossings[:, :-1], axis=1, dtype=np.uint32) % 2 == 1
            window = inside[first_row - y :, first_column - x :][: len(odd), :num_columns]
            window |= odd
        return inside


def check_overlap(
    regions: Iterable[Regions], *, width_px: int, height_px: int, scale: tuple[float, float] = (1.0, 1.0), purpose: str
) -> None:
    """Refuse polygons of which none overlaps the image, such as those of another image or in other units; no polygons are accepted.

    Args:
        regions: polygons in px of level 0.
        width_px: of the image.
        height_px: of the image.
        scale: px of level 0 for a pixel of the image, (x, y). Default: 1
        purpose: beginning of the message, such as ``"cannot mask a.tif"``.

    Raises:
        InputError: the bounding box of every polygon is outside of the image.
    """
    boxes = np.concatenate([np.empty((0, 4)), *(each.bounds for each in regions)])
    right, bottom = width_px * scale[0], height_px * scale[1]
    if not len(boxes) or ((boxes[:, 0] < right) & (boxes[:, 1] < bottom) & (boxes[:, 2] > 0) & (boxes[:, 3] > 0)).any():
        return
    x0, y0, x1, y1 = (f"{value:,.7g}" for value in (*boxes[:, :2].min(axis=0), *boxes[:, 2:].max(axis=0)))
    raise InputError(
        f"{purpose}: all {len(boxes)} polygons are outside of the image. They span columns {x0} to {x1} and rows {y0} to {y1}, the image "
        f"columns 0 to {right:,.7g} and rows 0 to {bottom:,.7g} (px of level 0). Give the polygons of this image; map coordinates become "
        "pixels by the georeference of the image."
    )


def _ring(corners: npt.ArrayLike) -> Ring:
    ring = np.asarray(corners, np.float64)
    if ring.ndim != 2 or ring.shape[1] < 2 or not np.isfinite(ring).all():
        raise InputError(f"cannot use a ring of shape {ring.shape}: give finite corners (x, y).")
    ring = ring[:, :2]
    if len(ring) > 1 and (ring[0] == ring[-1]).all():
        ring = ring[:-1]
    if len(ring) < 3:
        raise InputError(f"cannot use a ring of {len(ring)} corners: a polygon has at least three.")
    return ring


def _edges(ring: Ring) -> npt.NDArray[np.float64]:
    """Edges from their upper to their lower end, without level ones."""
    pairs: npt.NDArray[np.float64] = np.concatenate([ring, np.roll(ring, -1, axis=0)], axis=1)
    pairs = pairs[pairs[:, 1] != pairs[:, 3]]
    turned = pairs[:, 1] > pairs[:, 3]
    pairs[turned] = pairs[turned][:, [2, 3, 0, 1]]
    return pairs


def _area(ring: Ring) -> float:
    x, y = ring.T
    return float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2
