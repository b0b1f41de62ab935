"""Crops, decoded rows kept in memory, and damage that is skipped or filled."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sft
from sft.common.errors import InputError, SkipSlideError, SourceError
from sft.sources import ArrayImage, BadTile, Cached, Cropped, Normalized, Raster, TiffImage, Tolerant, open_image, read_strips
from sft.sources.image import Pixels
from tests.helpers.slides import SLIDE, SLIDE_SIZE, overwrite_tile, tissue_like, write_slide
from tests.helpers.sources import walk

for _library in ("tifffile", "simplejpeg", "openslide"):
    pytest.importorskip(_library)

WIDTH_PX, HEIGHT_PX = SLIDE_SIZE
MEAN, STD = (0.7, 0.5, 0.6), (0.2, 0.3, 0.25)


# --- crops -----------------------------------------------------------------------------------------------------------


@given(st.data())
def test_a_crop_is_that_part(data: st.DataObject) -> None:
    pixels = tissue_like(70, 90)
    x, y = data.draw(st.integers(0, 89)), data.draw(st.integers(0, 69))
    w, h = data.draw(st.integers(1, 90 - x)), data.draw(st.integers(1, 70 - y))
    crop = Cropped(ArrayImage(pixels, mpp=0.5), x=x, y=y, w=w, h=h)
    assert isinstance(crop, Raster) and crop.level_dimensions == ((w, h),) and crop.mpp == (0.5, 0.5)
    left, top = data.draw(st.integers(0, w - 1)), data.draw(st.integers(0, h - 1))
    right, bottom = data.draw(st.integers(left + 1, w)), data.draw(st.integers(top + 1, h))
    assert np.array_equal(crop.read(left, top, right - left, bottom - top), pixels[y + top : y + bottom, x + left : x + right])


@pytest.mark.parametrize("backwards", [False, True])
def test_a_crop_decodes_its_tiles_once(backwards: bool) -> None:
    tiff = TiffImage(SLIDE, num_threads=1)
    crop = Cropped(tiff, x=250, y=100, w=1000, h=1500)  # tiles 1 to 5 across, 0 to 6 down
    expected = TiffImage(SLIDE).read(250, 100, 1000, 1500)
    for rows, strip in walk(crop, 64, 5, backwards=backwards):
        assert np.array_equal(strip, expected[rows.start : rows.stop])
    assert tiff.num_tiles_decoded == 5 * 7


def test_wrong_crops() -> None:
    image = ArrayImage(np.zeros((4, 5, 3), np.uint8), layout="HWC")
    for box in ({"x": 1, "y": 0, "w": 5, "h": 4}, {"x": 0, "y": -1, "w": 2, "h": 2}, {"x": 0, "y": 0, "w": 0, "h": 4}):
        with pytest.raises(InputError, match="cannot read"):
            Cropped(image, **box)
    nothing: Any = object()
    with pytest.raises(InputError, match="object"):
        Cropped(nothing, x=0, y=0, w=1, h=1)


# --- decoded rows kept -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "kept_blocks"), [("1GiB", 13), (2220 * 240 * 3 * 5, 5), (2220 * 240 * 3 * 5 - 1, 4), (1000, 0)])
def test_rows_that_fit_are_decoded_once_for_all_passes(budget: int | str, kept_blocks: int) -> None:
    tiff = TiffImage(SLIDE, num_threads=1)
    image = Cached(tiff, host_budget_bytes=budget)
    expected = TiffImage(SLIDE).read(0, 0, WIDTH_PX, HEIGHT_PX)
    for number, backwards in enumerate([False, True, False]):
        before = tiff.num_tiles_decoded
        for rows, strip in walk(image, 100, 3, backwards=backwards):
            assert np.array_equal(strip, expected[rows.start : rows.stop])
        decoded = tiff.num_tiles_decoded - before
        # Blocks at the turn of the sweep are still cached from the pass before.
        assert decoded == 130 if number == 0 else 130 - 10 * (kept_blocks + 2) <= decoded <= 130 - 10 * kept_blocks
        assert image.kept_bytes <= image.host_budget_bytes
    last_rows = HEIGHT_PX - 12 * 240
    whole = 2220 * 3 * (240 * kept_blocks if kept_blocks < 13 else 240 * 12 + last_rows)
    # Without memory for one more full block, the low one at the end may still fit.
    assert whole <= image.kept_bytes <= whole + 2220 * 3 * last_rows


def test_counters_of_a_cache() -> None:
    image = Cached(ArrayImage(tissue_like(200, 50)), host_budget_bytes="1MiB")
    assert np.array_equal(np.concatenate(list(read_strips(image, 64))), tissue_like(200, 50))
    assert (image.num_blocks_read, image.num_blocks_reused) == (4, 0)
    first = image.read(0, 60, 50, 10)
    assert (image.num_blocks_read, image.num_blocks_reused) == (4, 2)
    first[:] = 0
    assert np.array_equal(image.read(0, 60, 50, 10), tissue_like(200, 50)[60:70]), "the cache keeps its own copy"
    assert image.summary() == "4 blocks decoded, 4 reused, 29.30 KiB of 1.00 MiB kept"
    copy = pickle.loads(pickle.dumps(image))
    assert copy.kept_bytes == 0 and np.array_equal(copy.read(0, 0, 50, 200), image.read(0, 0, 50, 200))
    assert np.array_equal(image.read(1, 2, 3, 4), tissue_like(200, 50)[2:6, 1:4])
    image.close()
    assert image.kept_bytes == 0
    for wrong in (0, "a lot", -3):
        with pytest.raises(InputError, match="byte size"):
            Cached(ArrayImage(tissue_like(20, 50)), host_budget_bytes=wrong)


reads = st.lists(st.tuples(st.integers(0, 199), st.integers(0, 199)).map(sorted), min_size=1, max_size=12)


@given(reads, st.sampled_from([None, 8, 40, 64, 200]), st.integers(1, 200 * 6 * 3), st.integers(0, 3))
def test_any_reads_through_a_cache(reads: list[list[int]], tile_rows: int | None, budget: int, left: int) -> None:
    class Tiles(ArrayImage):
        @property
        def tile_height_px(self) -> int | None:
            return tile_rows

    pixels = tissue_like(200, 6)
    tiles = Tiles(pixels)
    cached = Cached(tiles, host_budget_bytes=budget)
    crop = Cropped(tiles, x=left, y=3, w=3, h=197)
    for top, bottom in reads:
        assert np.array_equal(cached.read(0, top, 6, bottom - top + 1), pixels[top : bottom + 1])
        assert cached.kept_bytes <= budget
        if top >= 3:
            assert np.array_equal(crop.read(0, top - 3, 3, bottom - top + 1), pixels[top : bottom + 1, left : left + 3])


def test_both_passes_of_a_step_decode_a_slide_once() -> None:
    """The cache below a compiled network: forward and backward pass together decode each tile once."""
    tiff = TiffImage(SLIDE, num_threads=1)
    image = Cached(Cropped(tiff, x=240, y=240, w=480, h=960), host_budget_bytes="8MiB")
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).double()
    source = Normalized(image, mean=MEAN, std=STD, dtype=torch.float64)
    net = sft.compile(model, source, options=sft.Options(tile=(96, None)))
    net(source).sum().backward()
    assert tiff.num_tiles_decoded == 2 * 4
    gradient = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    pixels = torch.from_numpy(TiffImage(SLIDE).read(240, 240, 480, 960)).permute(2, 0, 1)[None]
    mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (MEAN, STD))
    model((pixels.double() / 255 - mean) / std).sum().backward()
    for ours, parameter in zip(gradient, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)


@pytest.mark.parametrize("channels", [3, 1])
def test_any_raster_is_an_input(channels: int) -> None:
    pixels = tissue_like(40, 36)[..., :channels].copy()
    image = Cropped(ArrayImage(pixels, layout="HWC"), x=2, y=3, w=30, h=33)
    model = nn.Sequential(nn.Conv2d(channels, 2, 3), nn.ReLU(), nn.MaxPool2d(2)).double()
    net = sft.compile(model, image, options=sft.Options(tile=(8, None)))
    x = torch.from_numpy(pixels[3:36, 2:32]).permute(2, 0, 1)[None].double() / 255
    torch.testing.assert_close(net(image), model(x))


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Tile 25 of the slide: columns [1200, 1440), rows [480, 720)."""
    return overwrite_tile(SLIDE, tmp_path / "damaged.svs", 25)


@pytest.mark.parametrize("reader", ["tiff", "openslide"])
def test_filling_loses_one_tile(damaged: Path, reader: Any) -> None:
    image = open_image(damaged, on_error="fill", reader=reader)
    assert isinstance(image, Tolerant) and not image.bad_tiles
    expected = TiffImage(SLIDE).read(0, 0, WIDTH_PX, HEIGHT_PX)
    expected[480:720, 1200:1440] = 255
    for rows, strip in walk(image, 100, 3):
        assert np.array_equal(strip, expected[rows.start : rows.stop])
    assert np.array_equal(image.read(1300, 500, 200, 300), expected[500:800, 1300:1500])
    (tile,) = image.bad_tiles
    assert isinstance(tile, BadTile) and str(tile) == "level 0, columns [1200, 1440), rows [480, 720)" and "damaged.svs" in tile.reason
    assert pickle.loads(pickle.dumps(image)).bad_tiles == image.bad_tiles


class _Flaky(ArrayImage):
    """Image with rows around 70 that sometimes cannot be read, as on a network drive."""

    is_down = False
    level_tiles_px = ((64, 64),)

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        if self.is_down and y <= 70 < y + h:
            raise SourceError("input/output error")
        return super().read(x, y, w, h, level)


@pytest.mark.parametrize("down", [(True, True), (True, False), (False, True)])
def test_both_passes_see_the_same_image_with_tiles_filled(down: tuple[bool, bool]) -> None:
    """Regression: tiles that were filled in one pass had pixels in the other, so gradients were those of another image."""
    file = _Flaky(np.random.default_rng(0).integers(0, 120, (256, 128, 3), np.uint8))
    source = Normalized(Tolerant(file, "fill"), mean=MEAN, std=STD)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    net = sft.compile(model, source, options=sft.Options(tile=(16, None)))
    file.is_down = down[0]
    output = net(source).sum()
    file.is_down = down[1]
    if not down[0]:
        with pytest.raises(SourceError, match="was read before and cannot be read any more"):
            output.backward()
        return
    output.backward()
    pixels = np.array(file.read(0, 0, 128, 64).tolist() + [[[255] * 3] * 128] * 64 + file.read(0, 128, 128, 128).tolist(), np.uint8)
    expected = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
    expected = (expected - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    wanted = torch.autograd.grad(model(expected).sum(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_bad_tiles_show_through_views(damaged: Path) -> None:
    image: Any = open_image(damaged, on_error="fill", mpp=1.0, host_budget_bytes="64MiB")
    image.read(0, 0, image.width_px, image.height_px)
    assert [(tile.x, tile.y) for tile in image.bad_tiles] == [(1200, 480)]


def test_skipping_names_the_slide_and_leaves_the_step_undone(damaged: Path) -> None:
    image = open_image(damaged, on_error="skip")
    model = nn.Sequential(nn.Conv2d(3, 2, 3, stride=8), nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1)).eval()
    source = Normalized(image, mean=MEAN, std=STD)
    net = sft.compile(model, source, options=sft.Options(tile=(240, None)))
    done = []
    for candidate in (source, Normalized(open_image(SLIDE, on_error="skip"), mean=MEAN, std=STD)):
        try:
            net(candidate).sum().backward()
        except SkipSlideError as error:
            assert "damaged.svs" in str(error) and "column 1200, row 480" in str(error)
            assert all(parameter.grad is None for parameter in model.parameters())
        else:
            done.append(candidate)
    assert len(done) == 1
    assert [thread for thread in threading.enumerate() if thread.name.startswith("sft-")] == []


def test_raising_is_the_default(damaged: Path) -> None:
    with pytest.raises(SourceError, match=r"damaged\.svs") as caught:
        open_image(damaged).read(1200, 480, 10, 10)
    assert not isinstance(caught.value, SkipSlideError)
    anything: Any = "ignore"
    with pytest.raises(InputError, match="'raise', 'skip', 'fill'"):
        open_image(damaged, on_error=anything)


def test_a_file_cut_short_can_be_used_as_far_as_it_goes(tmp_path: Path) -> None:
    path, pixels = tmp_path / "slide.tif", tissue_like(200, 264)
    write_slide(path, pixels, compression="deflate")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(SkipSlideError, match="cut short"):
        open_image(path, on_error="skip")
    image: Any = open_image(path, on_error="fill")
    read_pixels = image.read(0, 0, 264, 200)
    bad = {(tile.x, tile.y) for tile in image.bad_tiles}
    assert 0 < len(bad) < 20
    for top in range(0, 200, 64):
        for left in range(0, 264, 64):
            inner = slice(top, top + 64), slice(left, left + 64)
            assert np.array_equal(read_pixels[inner], np.full_like(pixels[inner], 255) if (left, top) in bad else pixels[inner])
