"""Georeferences of images, and of views of them."""

from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest

from sft.sources import ArrayImage, AtLevel, Cached, Cropped, Georeference, Image, Normalized, Resampled, Tolerant
from sft.sources.views import RasterView
from sft.wsi.data.transforms import Turned

#: Columns go east and south, rows go south and west: a rotated grid.
_SCENE = Georeference(crs_wkt="LOCAL_CS[]", transform=(8.0, -2.0, 500.0, -2.0, -8.0, 900.0))


class _Scene(RasterView):
    @property
    def georeference(self) -> Georeference | None:
        return _SCENE


def _scene() -> Image:
    """A scene of 12 x 8 px; the values of a pixel are its column and row."""
    columns, rows = np.meshgrid(np.arange(12, dtype=np.uint8), np.arange(8, dtype=np.uint8))
    return _Scene(ArrayImage(np.stack([columns, rows, rows], axis=-1)))


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("quarters", range(4))
def test_every_pixel_of_a_view_has_the_coordinates_of_the_pixel_below(quarters: int, mirrored: bool) -> None:
    crop = Cropped(Cached(Tolerant(_scene(), "raise"), host_budget_bytes=64), x=3, y=2, w=6, h=5)
    view = Turned(crop, quarters=quarters, mirrored=mirrored)
    assert view.georeference is not None
    for y in range(view.height_px):
        for x in range(view.width_px):
            column, row, _ = view.read(x, y, 1, 1)[0, 0].tolist()
            assert view.georeference.point(x + 0.5, y + 0.5) == _SCENE.point(column + 0.5, row + 0.5)


def test_reduced_images_cover_the_same_ground() -> None:
    reduced = Resampled(_scene(), Fraction(3), Fraction(2))
    level = AtLevel(_scene(), 0, downsample=(3.0, 2.0))
    for view in (reduced, level):
        assert view.georeference is not None
        assert view.georeference.point(4, 4) == _SCENE.point(12, 8) and view.georeference.point(0, 0) == _SCENE.point(0, 0)


def test_sources_and_images_without_one() -> None:
    source = Normalized(_scene(), mean=(0.5,) * 3, std=(0.5,) * 3)
    assert source.georeference == _SCENE == pickle.loads(pickle.dumps(_SCENE))
    plain = ArrayImage(np.zeros((4, 4, 3), np.uint8), layout="HWC")
    assert Normalized(Turned(Cropped(plain, x=0, y=0, w=2, h=2)), mean=(0.5,) * 3, std=(0.5,) * 3).georeference is None
