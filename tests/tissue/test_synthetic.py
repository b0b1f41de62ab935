"""Synthetic slides: files that readers and the tissue detection accept as slides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import sft
from sft.sources import TiffImage, open_image
from sft.tissue import find_tissue, write_synthetic_slide

pytest.importorskip("tifffile")
pytest.importorskip("imagecodecs")


def test_a_synthetic_slide_is_a_pyramid_with_a_resolution_and_tissue(tmp_path: Path) -> None:
    pytest.importorskip("skimage")
    path = tmp_path / "slide.svs"
    write_synthetic_slide(path, width_px=800, height_px=600, mpp=2.0, num_levels=3)
    image = open_image(path)
    assert isinstance(image, TiffImage)
    assert (image.width_px, image.height_px) == (800, 600) and image.mpp == pytest.approx((2.0, 2.0))
    assert image.level_dimensions == ((800, 600), (400, 300), (200, 150))
    mask = find_tissue(image)
    assert 0.3 < mask.share < 0.7
    assert (image.read(0, 0, 40, 40) > 220).all()


def test_the_seed_decides_the_pixels(tmp_path: Path) -> None:
    for name, seed in (("a.tif", 1), ("b.tif", 1), ("c.tif", 2)):
        write_synthetic_slide(tmp_path / name, width_px=256, height_px=256, seed=seed)
    a, b, c = (open_image(tmp_path / name).read(0, 0, 256, 256) for name in ("a.tif", "b.tif", "c.tif"))
    assert np.array_equal(a, b) and not np.array_equal(a, c)


@pytest.mark.parametrize("sizes", [{"width_px": 20}, {"num_levels": 0}, {"height_px": 255, "num_levels": 2}, {"tile_px": 100}])
def test_impossible_sizes_are_refused_before_a_file_exists(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(sft.InputError, match="px"):
        write_synthetic_slide(tmp_path / "slide.tif", **sizes)
    assert not list(tmp_path.iterdir())
