"""Drawing of maps over slides: each value over the cell of its position, with a colour bar."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from PIL import Image as PillowImage

import sft
from sft.sources.image import Pixels
from sft.wsi.eval.report import PLAIN_TEXT
from sft.wsi.run.files import atomic_write_with_parents

__all__ = ["Grids", "cells_extent", "draw_overlay"]

#: Grids of the rows and of the columns of a map, in px of the image.
Grids = tuple[sft.PositionGrid, sft.PositionGrid]


@rc_context(PLAIN_TEXT)
def draw_overlay(
    path: Path,
    small: Pixels,
    values: npt.NDArray[np.floating[Any]],
    grids: Grids,
    factor: int,
    *,
    title: str,
    label: str,
    centred: bool,
) -> None:
    """Draw values over a slide, each over the cell of its position, with a colour bar.

    Args:
        path: of the image.
        small: the slide, ``[height, width, 3]``.
        values: ``[rows, cols]``.
        grids: of the rows and columns, in px of the slide.
        factor: px of the slide per px of ``small``.
        title: above.
        label: of the colour bar.
        centred: whether zero is the middle of the colours.

    Raises:
        RunFolderError: it cannot be written.
    """
    height, width = small.shape[:2]
    figure = Figure(figsize=(12, 1.2 + 5.2 * min(1.6, height / width)), layout="constrained")
    plain, overlaid = figure.subplots(1, 2)
    for axis in (plain, overlaid):
        axis.imshow(small, extent=(0, width, height, 0))
        axis.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    # A few positions at the border see mostly padding and would take the whole range of colours.
    low, high = (float(value) for value in np.nanpercentile(values, (1, 99)))
    if centred:
        low, high = -max(abs(low), abs(high), 1e-12), max(abs(low), abs(high), 1e-12)
    scale = ScalarMappable(Normalize(low, max(high, low + 1e-12)), "coolwarm" if centred else "viridis")
    overlaid.imshow(
        values, extent=cells_extent(grids, values.shape, factor), norm=scale.norm, cmap=scale.cmap, alpha=0.5, interpolation="nearest"
    )
    overlaid.set(xlim=(0, width), ylim=(height, 0))
    figure.colorbar(scale, ax=overlaid, shrink=0.8, extend="both", label=label)
    figure.suptitle(title)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100, format="png")
    with atomic_write_with_parents(path) as temporary, PillowImage.open(drawn) as picture:
        picture.convert("RGB").save(temporary, optimize=True)  # opaque: without alpha the file is smaller


def cells_extent(grids: Grids, positions: tuple[int, ...], factor: int) -> tuple[float, float, float, float]:
    """Edges of all cells of a map (left, right, bottom, top), in px of a picture of 1/``factor``.

    >>> from fractions import Fraction
    >>> grid = sft.PositionGrid(stride_px=Fraction(32), first_centre_px=Fraction(1, 2))
    >>> cells_extent((grid, grid), (3, 4), 2)
    (-7.75, 56.25, 40.25, -7.75)
    """
    (top, bottom), (left, right) = (
        (float(grid.start_px / factor), float((grid.start_px + count * grid.stride_px) / factor))
        for grid, count in zip(grids, positions, strict=True)
    )
    return left, right, bottom, top
