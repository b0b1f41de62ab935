"""Polygons traced strip by strip equal those of the full map: scikit-image's components, rasterio's shapes, and the map itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from skimage.measure import label as skimage_label
from skimage.measure import regionprops as skimage_regions

from sft.prediction import LabelPolygon, PolygonTracer
from sft.tissue import Regions

LabelMap = npt.NDArray[Any]
label: Any = skimage_label
regionprops: Any = skimage_regions
#: Maps of few classes have many components that touch at corners, and holes in holes.
MAPS = st.integers(2, 4).flatmap(
    lambda num_classes: arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=14), elements=st.integers(0, num_classes - 1))
)


def trace(classes: LabelMap, heights: list[int]) -> list[LabelPolygon]:
    """Polygons of a map in strips of some heights, in turn."""
    tracer = PolygonTracer(width_px=classes.shape[1])
    polygons, top, number = [], 0, 0
    while top < len(classes):
        polygons += tracer.add(classes[top : top + heights[number % len(heights)]])
        top, number = top + heights[number % len(heights)], number + 1
    return polygons + tracer.finish()


@settings(max_examples=60)
@given(MAPS, st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_polygons_are_the_components_of_scikit_image(classes: LabelMap, heights: list[int]) -> None:
    polygons = trace(classes, heights)
    for number in range(1, int(classes.max()) + 1):
        regions = regionprops(label(classes == number, connectivity=1))
        expected = sorted((int(region.area), _num_holes(region.image)) for region in regions)
        assert sorted((each.area_px, len(each.rings) - 1) for each in polygons if each.label == number) == expected
        painted = Regions([[ring.astype(float) for ring in each.rings] for each in polygons if each.label == number])
        assert np.array_equal(painted.region(0, 0, classes.shape[1], classes.shape[0]), classes == number)


@settings(max_examples=40)
@given(MAPS, st.integers(1, 6))
def test_polygons_are_those_of_rasterio(classes: LabelMap, height: int) -> None:
    features = pytest.importorskip("rasterio.features")
    shapely = pytest.importorskip("shapely")
    mine = sorted((each.label, shapely.Polygon(each.rings[0], each.rings[1:]).normalize().wkt) for each in trace(classes, [height]))
    shapes = features.shapes(classes, mask=classes > 0, connectivity=4)
    assert mine == sorted((int(value), shapely.geometry.shape(shape).normalize().wkt) for shape, value in shapes)


def test_polygons_do_not_depend_on_the_strips() -> None:
    y, x = np.mgrid[:97, :120]
    classes = (np.hypot(y - 48, x - 60) // 7 % 3).astype(np.uint8)
    expected = {(each.label, each.area_px, *map(bytes, each.rings)) for each in trace(classes, [97])}
    for height in (1, 5, 96):
        assert {(each.label, each.area_px, *map(bytes, each.rings)) for each in trace(classes, [height])} == expected


def test_complete_polygons_are_released() -> None:
    tracer = PolygonTracer(width_px=4)
    square = np.array([[0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]])
    for _ in range(50):
        assert [each.area_px for each in tracer.add(square)] == [2]
    assert tracer.finish() == []


def _num_holes(image: LabelMap) -> int:
    """Holes of a component: 4-connected areas of other pixels, without the area around it. Holes that touch at a corner are two."""
    return int(label(np.pad(~image, 1, constant_values=True), connectivity=1).max()) - 1
