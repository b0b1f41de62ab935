"""Turned and recoloured slides: strips have the bits of the full slide, and colours follow the stated maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sft
from sft.common.errors import InputError, SourceError
from sft.sources import Normalized, Raster, Slide, open_image
from sft.sources.image import Image, Pixels, check_region
from sft.wsi.config import AugmentConfig
from sft.wsi.data.augment import draw_augmentation
from sft.wsi.data.slides import make_thumbnail, open_slide, slide_info
from sft.wsi.data.stain import ColourTransferred, fit_macenko, fit_reinhard, hed_shift
from sft.wsi.data.transforms import IDENTITY, ColourAffine, Recoloured, Turned
from tests.helpers.wsi import TinyNet, real_pixels, tissue_places, write_slide


class _Array:
    """An image in memory."""

    def __init__(self, pixels: Pixels) -> None:
        self.pixels = pixels
        self.height_px, self.width_px = pixels.shape[:2]

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        check_region("array", x, y, w, h, self.width_px, self.height_px)
        return self.pixels[y : y + h, x : x + w]


def _crop(height: int, width: int) -> Pixels:
    top, left = tissue_places(168)[0]
    return real_pixels()[top : top + height, left : left + width]


def _whole(image: Image) -> Pixels:
    return image.read(0, 0, image.width_px, image.height_px)


@given(st.integers(0, 2**31), st.integers(1, 60), st.integers(1, 60), st.data())
def test_any_rectangle_of_an_augmented_slide_has_the_bits_of_the_whole(seed: int, height: int, width: int, data: st.DataObject) -> None:
    config = AugmentConfig(brightness=0.3, contrast=0.3, saturation=0.5, hed=0.2)
    augmentation = draw_augmentation(config, seed, 3, "slide")
    stain = fit_macenko(make_thumbnail(_Array(_crop(168, 160)), 1024)[0], "slide")
    image = augmentation.apply(_Array(_crop(height, width)), stain=stain)
    whole = _whole(image)
    assert whole.shape == (image.height_px, image.width_px, 3) and whole.dtype == np.uint8
    top, left = data.draw(st.integers(0, image.height_px - 1)), data.draw(st.integers(0, image.width_px - 1))
    rows, cols = data.draw(st.integers(1, image.height_px - top)), data.draw(st.integers(1, image.width_px - left))
    assert np.array_equal(image.read(left, top, cols, rows), whole[top : top + rows, left : left + cols])


@pytest.mark.parametrize("quarters", range(4))
@pytest.mark.parametrize("mirrored", [False, True])
def test_turning_equals_numpy(quarters: int, mirrored: bool) -> None:
    pixels = _crop(20, 33)
    expected = np.rot90(pixels[:, ::-1] if mirrored else pixels, quarters)
    assert np.array_equal(_whole(Turned(_Array(pixels), quarters=quarters, mirrored=mirrored)), expected)
    with pytest.raises(InputError):
        Turned(_Array(pixels), quarters=quarters).read(0, 0, 34, 34)


def test_recolouring_is_its_colour_map() -> None:
    pixels = _crop(40, 40)
    density = hed_shift((0.1, -0.2, 0.05), (0.02, 0.0, -0.01))
    intensity = ColourAffine.of(np.eye(3) * 1.1, (-0.05, 0.0, 0.02))
    recoloured = _whole(Recoloured(_Array(pixels), density=density, intensity=intensity)).astype(np.float64)
    densities = -np.log((pixels.astype(np.float64) + 1) / 256) @ np.array(density.matrix).T + density.offset
    shares = np.clip(256 * np.exp(-densities) - 1, 0, 255) / 255
    expected = np.clip((shares @ np.array(intensity.matrix).T + intensity.offset) * 255, 0, 255)
    # Half a step of the table is 0.06 grey levels; then a rounding, which is scaled by 1.1, and another.
    assert np.abs(recoloured - expected).max() <= (0.0625 + 0.5) * 1.1 + 0.5
    assert np.array_equal(_whole(Recoloured(_Array(pixels))), pixels)


def test_augmentations_follow_from_seed_epoch_and_slide_alone() -> None:
    config = AugmentConfig(hed=0.1)
    drawn = [draw_augmentation(config, seed, epoch, slide) for seed in (0, 1) for epoch in (0, 1) for slide in ("a", "b")]
    assert drawn == [draw_augmentation(config, seed, epoch, slide) for seed in (0, 1) for epoch in (0, 1) for slide in ("a", "b")]
    assert len({augmentation.density for augmentation in drawn}) == len(drawn)
    turned = [draw_augmentation(AugmentConfig(), 0, epoch, "a") for epoch in range(64)]
    assert {(augmentation.quarters, augmentation.mirrored) for augmentation in turned} == {(q, m) for q in range(4) for m in (False, True)}
    plain = draw_augmentation(AugmentConfig(flips=False, rotations=False), 0, 0, "a")
    assert plain.quarters == 0 and not plain.mirrored and plain.density == plain.intensity == IDENTITY


def test_macenko_undoes_another_stain() -> None:
    pixels = _crop(160, 160)
    changed = _whole(Recoloured(_Array(pixels), density=hed_shift((0.3, -0.2, 0.0), (0.0, 0.0, 0.0))))
    plain, restored = (_whole(Recoloured(_Array(image), density=fit_macenko(image, "s"))).astype(float) for image in (pixels, changed))
    before = np.abs(pixels.astype(float) - changed).mean()
    assert np.abs(plain - restored).mean() < before / 2
    with pytest.raises(SourceError, match="0 px of its thumbnail are stained"):
        fit_macenko(np.full((50, 50, 3), 255, np.uint8), "glass")


def test_reinhard_matches_means_and_spreads_and_undoes_another_stain() -> None:
    pixels = _crop(160, 160)
    changed = _whole(Recoloured(_Array(pixels), density=hed_shift((0.3, -0.2, 0.0), (0.0, 0.0, 0.0))))
    plain, restored = (_whole(ColourTransferred(_Array(image), fit_reinhard(image, "s"))).astype(float) for image in (pixels, changed))
    assert np.abs(plain - restored).mean() < np.abs(pixels.astype(float) - changed).mean() / 2
    # A transfer fitted to the result is the identity, except for clipping and rounding.
    again = np.array(fit_reinhard(plain.astype(np.uint8), "s").matrix)
    assert np.abs(again - np.eye(3)).max() < 0.35
    with pytest.raises(SourceError, match="0 px of its thumbnail are stained"):
        fit_reinhard(np.full((50, 50, 3), 255, np.uint8), "glass")


def test_a_transfer_of_colours_is_its_map_and_bits_do_not_depend_on_the_rectangle() -> None:
    pixels = _crop(60, 70)
    nothing = ColourTransferred(_Array(pixels), IDENTITY)
    assert np.abs(_whole(nothing).astype(int) - pixels).max() <= 1
    image = ColourTransferred(_Array(pixels), fit_reinhard(_crop(160, 160), "s"))
    whole = _whole(image)
    for x, y, w, h in ((0, 0, 1, 1), (69, 59, 1, 1), (3, 5, 17, 31), (0, 20, 70, 3)):
        assert np.array_equal(image.read(x, y, w, h), whole[y : y + h, x : x + w])


def test_views_of_a_slide_are_rasters_with_its_facts(tmp_path: Path) -> None:
    write_slide(tmp_path / "s.tif", _crop(160, 144))
    slide = open_image(tmp_path / "s.tif", slide_mpp=(0.5, 0.25))
    turned, recoloured = Turned(slide, quarters=1), Recoloured(slide, intensity=ColourAffine.of(np.eye(3) * 0.5))
    assert isinstance(turned, Raster) and isinstance(recoloured, Raster)
    assert turned.level_dimensions == ((160, 144),) and turned.mpp == (0.25, 0.5) and turned.tile_height_px == 128
    # Rows of a turned slide are columns of the file: many of them at a time if tiles are unknown.
    assert Turned(open_image(tmp_path / "s.tif", mpp=0.75), quarters=3).tile_height_px == 256
    assert recoloured.level_dimensions == slide.level_dimensions and make_thumbnail(recoloured, 80)[0].shape == (80, 72, 3)
    assert np.abs(recoloured.read(3, 4, 5, 6, 1).astype(int) - slide.read(3, 4, 5, 6, 1) / 2).max() <= 0.5


def test_a_network_computes_the_same_in_strips_of_an_augmented_slide(tmp_path: Path) -> None:
    write_slide(tmp_path / "s.tif", _crop(160, 144))
    augmentation = draw_augmentation(AugmentConfig(hed=0.1, brightness=0.1), 5, 0, "s")
    image = augmentation.apply(open_slide(tmp_path / "s.tif").image)
    source = Normalized(image, mean=(0.5,) * 3, std=(0.25,) * 3, dtype=torch.float64)
    model = TinyNet().double().eval()
    net: Any = sft.compile(model, source, budget="8MiB", options=sft.Options(tile=(16, None)))
    tensor = (torch.from_numpy(_whole(image)).permute(2, 0, 1)[None] / 255.0 - 0.5).double() / 0.25
    plain = torch.autograd.grad(model(tensor).square().sum(), list(model.parameters()))
    assert max(segment.num_steps for segment in net.plan_for(source).segments) > 1
    streamed = torch.autograd.grad(net(source).square().sum(), list(model.parameters()))
    for a, b in zip(plain, streamed, strict=True):
        # The pixels are normalised in another order of operations, in float64: rounding of some thousand summands.
        assert (a - b).norm() <= 1e-6 * a.norm()


def test_slides_open_at_the_requested_resolution(tmp_path: Path) -> None:
    path = tmp_path / "s.tif"
    write_slide(path, _crop(160, 144), num_levels=3)
    info = slide_info(path)
    assert info.levels == ((144, 160), (72, 80), (36, 40)) and info.level_mpp == pytest.approx((0.5, 1.0, 2.0))
    assert open_slide(path, mpp=1.0).image.width_px == 72
    between = open_slide(path, mpp=1.5)  # no level has it: two px become one, three times four
    assert (between.image.width_px, between.image.height_px) == (48, 53) and between.image.mpp == pytest.approx((1.5, 1.5))
    assert between.scale == pytest.approx((3.0, 3.0)) and between.pyramid.width_px == 144
    assert open_slide(path, mpp=1.0, slide_mpp=0.25).image.width_px == 36  # the table overrides the file
    with pytest.raises(InputError, match="never enlarged"):
        open_slide(path, mpp=0.2)
    write_slide(path, _crop(160, 144), mpp=None)
    with pytest.raises(InputError, match="the file has no resolution"):
        open_slide(path, mpp=1.0)
    assert open_slide(path).image.mpp is None


def test_a_thumbnail_is_made_of_averages(tmp_path: Path) -> None:
    pixels = _crop(45, 60)
    small, factor = make_thumbnail(_Array(pixels), 16)
    assert factor == 4 and small.shape == (12, 15, 3)
    assert abs(float(small[0, 0, 0]) - pixels[:4, :4, 0].mean()) <= 0.5
    assert abs(float(small[11, 0, 0]) - pixels[44:, :4, 0].mean()) <= 0.5
    path = tmp_path / "s.tif"
    write_slide(path, np.repeat(np.repeat(pixels, 8, 0), 8, 1), num_levels=4)
    with Slide(path) as slide:
        assert np.array_equal(make_thumbnail(slide, 60)[0], pixels)
