"""Resolution by micrometres per pixel: the right level, the exact mean over the right area, the same bits in any order."""

from __future__ import annotations

import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sft.common.errors import InputError
from sft.sources import ArrayImage, AtLevel, Raster, Resampled, Slide, TiffImage, WithMpp, at_mpp, open_image, read_strips
from sft.sources.resample import level_scale
from tests.helpers.slides import SLIDE, tissue_like, write_slide

for _library in ("tifffile", "simplejpeg", "openslide"):
    pytest.importorskip(_library)

Exact = npt.NDArray[np.float64]


def area_weights(num_out: int, num_in: int, scale: Fraction) -> Exact:
    """Row i: the share of output pixel i that each input pixel covers."""
    weights = np.zeros((num_out, num_in))
    for row in range(num_out):
        for column in range(num_in):
            covered = min((row + 1) * scale, Fraction(column + 1)) - max(row * scale, Fraction(column))
            weights[row, column] = float(max(covered, Fraction(0)) / scale)
    return weights


def area_means(pixels: npt.NDArray[np.uint8], scale_x: Fraction, scale_y: Fraction) -> Exact:
    """The oracle: means over areas in float64."""
    height, width = pixels.shape[:2]
    rows = area_weights(int(height / scale_y), height, scale_y)
    columns = area_weights(int(width / scale_x), width, scale_x)
    means: Exact = np.einsum("ih,hwc,jw->ijc", rows, pixels.astype(np.float64), columns, optimize=True)
    return means


scales = st.one_of(st.integers(1, 9).map(Fraction), st.fractions(1, 12, max_denominator=1000), st.fractions(1, 3, max_denominator=7))


@given(st.integers(1, 60), st.integers(1, 60), scales, scales, st.sampled_from([1, 3]), st.data())
def test_every_pixel_is_the_mean_of_its_area(
    height: int, width: int, scale_x: Fraction, scale_y: Fraction, channels: int, data: Any
) -> None:
    pixels = np.random.default_rng(height * 61 + width).integers(0, 256, (height, width, channels), dtype=np.uint8)
    image = ArrayImage(pixels, layout="HWC")
    if int(width / scale_x) < 1 or int(height / scale_y) < 1:
        with pytest.raises(InputError, match="at least one pixel"):
            Resampled(image, scale_x, scale_y)
        return
    small = Resampled(image, scale_x, scale_y)
    whole = small.read(0, 0, small.width_px, small.height_px)
    expected = area_means(pixels, scale_x, scale_y)
    assert whole.shape == expected.shape
    # Half up; the oracle's sums of up to 150 products are off by less than 1e-10.
    assert (np.abs(whole - expected) <= 0.5 + 1e-10).all()
    x, y = data.draw(st.integers(0, small.width_px - 1)), data.draw(st.integers(0, small.height_px - 1))
    w, h = data.draw(st.integers(1, small.width_px - x)), data.draw(st.integers(1, small.height_px - y))
    assert np.array_equal(small.read(x, y, w, h), whole[y : y + h, x : x + w]), "a rectangle alone is that part of the whole"


def test_halves_round_up() -> None:
    image = ArrayImage(np.array([[[0], [1], [1], [2], [254], [255]]], np.uint8), layout="HWC")
    assert Resampled(image, Fraction(2), Fraction(1)).read(0, 0, 3, 1).ravel().tolist() == [1, 2, 255]


@pytest.mark.parametrize("order", ["down", "up", "shuffled"])
def test_strips_in_any_order_are_the_whole_and_decode_each_tile_once(order: str) -> None:
    tiff = TiffImage(SLIDE, num_threads=1)
    small = at_mpp(tiff, 1.3)
    assert small.mpp == pytest.approx((1.3, 1.3)) and (small.width_px, small.height_px) == (852, 1138)
    whole = at_mpp(TiffImage(SLIDE), 1.3).read(0, 0, 852, 1138)
    tops = list(range(0, 1138, 70))
    if order == "shuffled":
        np.random.default_rng(0).shuffle(tops)
    for top in tops[:: -1 if order == "up" else 1]:
        rows = min(70, 1138 - top)
        assert np.array_equal(small.read(0, top, 852, rows), whole[top : top + rows])
    if order != "shuffled":
        assert tiff.num_tiles_decoded == 130


def test_the_mean_of_the_real_slide() -> None:
    pixels = TiffImage(SLIDE).read(600, 700, 300, 280)
    small = at_mpp(ArrayImage(pixels, mpp=0.499), 1.25)
    scale = Fraction(1.25 / 0.499).limit_denominator(1000)
    expected = area_means(pixels, scale, scale)
    assert (np.abs(small.read(0, 0, small.width_px, small.height_px) - expected) <= 0.5 + 1e-10).all()


# --- selection of a level --------------------------------------------------------------------------------------------


class Pyramid(ArrayImage):
    """Levels with sizes only."""

    def __init__(self, *sizes: tuple[int, int], mpp: Any) -> None:
        super().__init__(np.zeros((sizes[0][1], sizes[0][0], 3), np.uint8), mpp=mpp)
        self.sizes = sizes

    @property
    def level_dimensions(self) -> tuple[tuple[int, int], ...]:
        return self.sizes

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        return tuple(self.sizes[0][0] / width for width, _ in self.sizes)

    @property
    def level_tiles_px(self) -> tuple[None, ...]:
        return (None,) * len(self.sizes)


@pytest.mark.parametrize(
    ("mpp", "level", "scale"),
    [
        (0.25, 0, None),
        (0.2480, 0, None),  # within 1 %
        (0.3, 0, Fraction(6, 5)),
        (0.5, 0, Fraction(2)),
        (0.504, 0, Fraction(2)),  # 2 brings it within 1 %
        (0.51, 0, Fraction(51, 25)),
        (0.985, 0, Fraction(197, 50)),
        (0.995, 1, None),
        (1.0, 1, None),
        (1.005, 1, None),
        (1.5, 1, Fraction(3, 2)),
        (4.0, 2, None),
        (10.0, 2, Fraction(5, 2)),
    ],
)
def test_the_nearest_level_that_is_fine_enough(mpp: float, level: int, scale: Fraction | None) -> None:
    # 1/4 and 1/16, as many scanners write them, sizes rounded down
    slide = Pyramid((4001, 3003), (1000, 750), (250, 187), mpp=0.25)
    image: Any = at_mpp(slide, mpp)
    base = image if scale is None else image.image
    assert isinstance(base, AtLevel) and base.level == level
    if scale is not None:
        assert isinstance(image, Resampled) and image.scale == (scale, scale)
    assert image.mpp == pytest.approx((mpp, mpp), rel=0.01)


def test_pixels_become_square() -> None:
    image: Any = at_mpp(Pyramid((400, 400), (200, 200), mpp=(0.25, 0.5)), 1.0)
    assert isinstance(image, Resampled) and image.scale == (Fraction(2), Fraction(1)) and repr(image.image).endswith(", 1)")
    assert image.mpp == (1.0, 1.0) and (image.width_px, image.height_px) == (100, 200)


def test_levels_of_odd_sizes() -> None:
    assert level_scale((2221, 2967), (555, 741)) == (Fraction(4), Fraction(4))
    assert level_scale((2221, 2967), (556, 742)) == (Fraction(4), Fraction(4))
    assert level_scale((2000, 1000), (666, 400)) == (Fraction(2000, 666), Fraction(5, 2))


def test_a_level_is_read_where_it_serves(tmp_path: Path) -> None:
    path = tmp_path / "slide.tif"
    levels = write_slide(path, tissue_like(260, 300), num_levels=3, compression="deflate", mpp=0.25)
    image = open_image(path, mpp=1.0)
    assert np.array_equal(image.read(0, 0, image.width_px, image.height_px), levels[2])
    image = open_image(path, mpp=1.5)
    scale = Fraction(3, 2)
    assert (np.abs(np.concatenate(list(read_strips(image, 7))) - area_means(levels[2], scale, scale)) <= 0.5 + 1e-10).all()


def test_levels_that_openslide_interpolates_are_not_read(tmp_path: Path) -> None:
    """Its rectangles begin at integer pixels of level 0: at a level reduced by 1.998 the same rows have different colours."""
    path = tmp_path / "odd.tif"
    levels = write_slide(path, tissue_like(801, 1199), num_levels=3, compression="deflate", mpp=0.25)
    slide = Slide(path)
    height, width = levels[1].shape[:2]
    assert slide.exact_levels == (0,)
    assert not np.array_equal(slide.read(0, 7, width, 8, 1), slide.read(0, 0, width, height, 1)[7:15])
    image: Any = at_mpp(slide, 0.5)
    assert isinstance(image, Resampled) and image.scale == (Fraction(2), Fraction(2))
    strips = np.concatenate(list(read_strips(image, 37)))
    fours = levels[0][:800, :1198].reshape(400, 2, 599, 2, 3).sum(axis=(1, 3), dtype=int)
    assert np.array_equal(strips, (fours + 2) // 4)
    fast = at_mpp(TiffImage(path), 0.5)
    assert np.array_equal(np.concatenate(list(read_strips(fast, 37))), levels[1])
    write_slide(path, tissue_like(800, 1200), num_levels=3, compression="deflate", mpp=0.25)
    assert Slide(path).exact_levels == (0, 1, 2)
    assert np.array_equal(np.concatenate(list(read_strips(at_mpp(Slide(path), 0.5), 37))), tissue_like(800, 1200)[::2, ::2])


# --- resolution of a file --------------------------------------------------------------------------------------------


def test_a_missing_resolution_is_required(tmp_path: Path) -> None:
    path = tmp_path / "slide.tif"
    write_slide(path, tissue_like(128, 200), mpp=None)
    assert open_image(path).mpp is None
    with pytest.raises(InputError, match=r"slide\.tif.*does not say its resolution.*slide_mpp"):
        open_image(path, mpp=1.0)
    image = open_image(path, mpp=1.0, slide_mpp=0.25)
    assert (image.width_px, image.height_px) == (50, 32) and image.mpp == (1.0, 1.0)
    assert open_image(path, slide_mpp=(0.25, 0.5)).mpp == (0.25, 0.5)


def test_a_wrong_resolution_can_be_corrected() -> None:
    assert open_image(SLIDE).mpp == (0.499, 0.499)
    assert open_image(SLIDE, slide_mpp=0.25).mpp == (0.25, 0.25)


def test_nothing_is_enlarged() -> None:
    with pytest.raises(InputError, match=r"at 0\.25 µm/px: its finest level has 0\.499 x 0\.499"):
        open_image(SLIDE, mpp=0.25)


@pytest.mark.parametrize("mpp", [0, -1.0, float("nan"), "fine", (1.0, 2.0, 3.0), None])
def test_wrong_resolutions(mpp: Any) -> None:
    with pytest.raises(InputError, match="micrometres per pixel"):
        WithMpp(ArrayImage(np.zeros((4, 5, 3), np.uint8), layout="HWC"), mpp)


def test_views_pickle() -> None:
    small: Raster = open_image(SLIDE, mpp=2.0)
    expected = small.read(100, 50, 60, 70)
    assert np.array_equal(pickle.loads(pickle.dumps(small)).read(100, 50, 60, 70), expected)
    with pytest.raises(InputError, match="levels 0 to 0"):
        small.read(0, 0, 1, 1, 1)
    with pytest.raises(InputError, match="scales are at least 1"):
        Resampled(small, Fraction(1, 2), Fraction(1))


def test_a_resolution_at_which_no_pixel_is_left_is_refused() -> None:
    image = WithMpp(ArrayImage(np.zeros((64, 80, 3), np.uint8)), 0.5)
    with pytest.raises(InputError, match=r"of 80 x 64 px at 500 µm/px: no pixel would be left of its 32 µm\. Give a finer resolution"):
        at_mpp(image, 500)
