"""Alignment of a label map with an image: for each pixel the label under its centre, by map coordinates or by sizes.

Two files with map coordinates are aligned by them: with ``(x, y)`` the centre of a pixel on the map, its label is the one whose cell
contains ``(x, y)``, so a label map may begin elsewhere, extend beyond the image, and have another resolution. The axes of both must be
parallel. Otherwise the label map shows the field of the whole image, and the quotient of the sizes is its resolution
(`sft.sources.label_cells`).
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from sft.common.errors import InputError
from sft.sources.georeference import Georeference
from sft.sources.image import Image, Pixels, Rectangle, Size, dtype_range, pixel_dtype
from sft.sources.labels import IndexArray, label_cells
from sft.sources.readers.composite import GRID_TOLERANCE_PX
from sft.sources.readers.geotiff import same_coordinate_system
from sft.sources.views import OneLevelView, RasterView

__all__ = ["CellView", "align_labels", "check_same_field", "map_cells"]

#: Denominators of label pixels per image pixel: of resolutions that are written as decimals, and of any other.
_DENOMINATORS = (1000, 1_000_000)
#: Corners of a label map are rounded to this part of a label.
_PARTS_OF_A_LABEL = 1000


class CellView(OneLevelView):
    """Label image on the pixels of another: for each row and column, the row and column of the image below.

    Args:
        image: of one channel.
        rows: row of the image for each row of the view.
        columns: column of the image for each column of the view.
        outside: value at rows and columns that the image does not have. Default: `None` (there are none)
    """

    def __init__(self, image: Image, rows: IndexArray, columns: IndexArray, outside: int | None = None) -> None:
        super().__init__(image)
        self.rows, self.columns, self.outside = rows, columns, outside

    def _size_px(self) -> Size:
        return len(self.columns), len(self.rows)

    def _tile_px(self) -> None:
        """None: tiles of the image below lie at other places."""

    @property
    def mpp(self) -> tuple[float, float] | None:
        """None: the image that the labels belong to states it."""
        return None

    @property
    def georeference(self) -> Georeference | None:
        """None: the image that the labels belong to states it."""
        return None

    def _read(self, rectangle: Rectangle) -> Pixels:
        of_rows, of_columns = rectangle.slices
        rows, columns = self.rows[of_rows], self.columns[of_columns]
        if self.outside is not None:
            return self._read_inside(rows, columns, self.outside)
        return self._read_cells(rows, columns)

    def _read_inside(self, rows: IndexArray, columns: IndexArray, outside: int) -> Pixels:
        has_row = (rows >= 0) & (rows < self.image.height_px)
        has_column = (columns >= 0) & (columns < self.image.width_px)
        out = np.full((len(rows), len(columns), 1), outside, self.dtype)
        if has_row.any() and has_column.any():
            out[np.ix_(has_row, has_column)] = self._read_cells(rows[has_row], columns[has_column])
        return out

    def _read_cells(self, rows: IndexArray, columns: IndexArray) -> Pixels:
        top, left = int(rows.min()), int(columns.min())
        block = self.image.read(left, top, int(columns.max()) + 1 - left, int(rows.max()) + 1 - top)
        return np.ascontiguousarray(block[(rows - top)[:, None], columns - left])


def align_labels(
    labels: Image, slide: Image, *, image_size: Size, scale: tuple[float, float], name: str, outside: int | None = None
) -> Image:
    """Labels of an image, from a label map of any resolution.

    Args:
        labels: one channel.
        slide: largest level of the image.
        image_size: (width, height) of the image, in px.
        scale: px of the largest level for a pixel of the image, (x, y).
        name: of the label map, for messages.
        outside: value of pixels that by map coordinates lie outside of the label map. Default: `None` (they are an error)

    Raises:
        InputError: by map coordinates it does not cover the image, or its axes or coordinate system differ. By sizes its sides have
            another ratio. Or its type does not have the value of pixels outside.
    """
    low, high = dtype_range(pixel_dtype(labels))
    if outside is not None and not low <= outside <= high:
        raise InputError(f"cannot give pixels outside of {name} the value {outside}: its {pixel_dtype(labels)} has {low} to {high}.")
    labels_size = (labels.width_px, labels.height_px)
    place, labels_place = RasterView(slide).georeference, RasterView(labels).georeference
    if place is not None and labels_place is not None:
        cells = map_cells(
            labels_size, labels_place, image_size=image_size, image_place=place.scaled(*scale), name=name, has_outside=outside is not None
        )
    else:
        slide_size = (slide.width_px, slide.height_px)
        cells = label_cells(labels_size, slide_size=slide_size, image_size=image_size, scale=scale, name=name)
    return labels if cells is None else CellView(labels, *cells, outside)


def check_same_field(labels: Image, slide: Image, name: str) -> None:
    """Refuse a label map whose map coordinates are those of another field than the slide's, by a pixel of the label map or more.

    Raises:
        InputError: it is one. Images without map coordinates are accepted.
    """
    place, labels_place = RasterView(slide).georeference, RasterView(labels).georeference
    if place is None or labels_place is None:
        return
    slide_size, labels_size = (slide.width_px, slide.height_px), (labels.width_px, labels.height_px)
    map_cells(labels_size, labels_place, image_size=slide_size, image_place=place, name=name)
    steps, corner = labels_place.pixels_of(place)
    ends = [corner[axis] + abs(steps[axis][axis]) * slide_size[axis] for axis in (0, 1)]
    if max(map(abs, corner)) >= 1 or any(count - end >= 1 for count, end in zip(labels_size, ends, strict=True)):
        raise InputError(
            f"{name} has {labels_size[0]} x {labels_size[1]} px, of which by their map coordinates the image has columns {corner[0]:.6g} "
            f"to {ends[0]:.6g} and rows {corner[1]:.6g} to {ends[1]:.6g}. Cut it to the field of the image (gdalwarp -te)."
        )


def map_cells(
    labels_size: Size, labels_place: Georeference, *, image_size: Size, image_place: Georeference, name: str, has_outside: bool = False
) -> tuple[IndexArray, IndexArray] | None:
    """Row and column of a label map for each row and column of an image, by map coordinates; None for one label a pixel.

    >>> image, labels = (Georeference(crs_wkt="", transform=(10.0, 0.0, x, 0.0, -10.0, 900.0)) for x in (500.0, 480.0))
    >>> rows, columns = map_cells((8, 2), labels, image_size=(4, 2), image_place=image, name="map")
    >>> rows.tolist(), columns.tolist()
    ([0, 1], [2, 3, 4, 5])

    Args:
        labels_size: (width, height) of the label map, in px.
        labels_place: its map coordinates.
        image_size: (width, height) of the image, in px.
        image_place: its map coordinates.
        name: of the label map, for messages.
        has_outside: True if rows and columns outside of the label map are allowed, as long as it overlaps the image. Default: `False`

    Raises:
        InputError: the coordinate systems differ, the axes are not parallel, or pixels of the image lie outside of the label map.
    """
    if not same_coordinate_system(labels_place.crs_wkt, image_place.crs_wkt):
        raise InputError(
            f"cannot align label map {name} with its image: their coordinate systems differ. Convert one of them (gdalwarp -t_srs)."
        )
    steps, corner = labels_place.pixels_of(image_place)
    skew_px = max(abs(steps[0][1]) * image_size[1], abs(steps[1][0]) * image_size[0])
    if skew_px > GRID_TOLERANCE_PX:
        raise InputError(
            f"cannot align label map {name} with its image: its rows are not parallel to those of the image ({skew_px:.4g} labels over "
            "the image). Give it the grid of the image (gdalwarp)."
        )
    axes = [
        _axis_cells(image_px, steps[axis][axis], corner[axis], num_labels)
        for axis, (image_px, num_labels) in enumerate(zip(image_size, labels_size, strict=True))
    ]
    missing = [int(((cells < 0) | (cells >= count)).sum()) for cells, count in zip(axes, labels_size, strict=True)]
    if any(missing) and not (has_outside and missing[0] < image_size[0] and missing[1] < image_size[1]):
        left, top = (f"{-shift / step[axis] + 0.0:.6g}" for axis, (shift, step) in enumerate(zip(corner, steps, strict=True)))
        width, height = (f"{count / abs(step[axis]):.6g}" for axis, (count, step) in enumerate(zip(labels_size, steps, strict=True)))
        raise InputError(
            f"label map {name} does not cover its image of {image_size[0]} x {image_size[1]} px: by their map coordinates it begins at "
            f"column {left}, row {top} of the image and has {width} x {height} px of it, so {missing[0]} columns and {missing[1]} rows "
            "have no label. Give the label map of this image, choose a value for them (outside=255), or crop the image."
        )
    columns, rows = axes
    is_same = labels_size == image_size and all((cells == np.arange(len(cells))).all() for cells in axes)
    return None if is_same else (rows, columns)


def _axis_cells(image_px: int, labels_per_px: float, first_label: float, num_labels: int) -> IndexArray:
    """Label under the centre of each pixel along an axis.

    A label map that is an image reduced by a whole number leaves out an incomplete label at the end: its pixels have the last one.
    """
    step = Fraction(labels_per_px)
    for denominator in _DENOMINATORS:
        step = Fraction(labels_per_px).limit_denominator(denominator)
        if abs(float(step) - labels_per_px) * image_px <= GRID_TOLERANCE_PX:
            break
    start = Fraction(round(first_label * _PARTS_OF_A_LABEL), _PARTS_OF_A_LABEL)
    centres = (2 * np.arange(image_px) + 1) * (step.numerator * start.denominator) + 2 * start.numerator * step.denominator
    cells: IndexArray = centres // (2 * step.denominator * start.denominator)
    if 0 < step < 1 and start + step * image_px < num_labels + 1:
        cells = np.minimum(cells, num_labels - 1)
    return cells
