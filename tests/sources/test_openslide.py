"""Slides are read exactly, and messages about damaged files name the position."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.common.errors import InputError, SourceError
from sft.sources import Image, Normalized, Slide, load_tensor, read_strips
from sft.sources.image import Pixels
from sft.sources.readers import openslide as slide_module

pytest.importorskip("openslide")
PIL_Image = pytest.importorskip("PIL.Image")

SLIDE = Path(__file__).resolve().parents[2] / "examples" / "data" / "CMU-1-Small-Region.svs"
WIDTH_PX, HEIGHT_PX, TILE_PX = 2220, 2967, 240
MEAN, STD = (0.7, 0.5, 0.6), (0.2, 0.3, 0.25)


@pytest.fixture
def slide() -> Iterator[Slide]:
    with Slide(SLIDE) as opened:
        yield opened


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, int, int]:
    """The slide with one compressed tile overwritten; the path, and the tile's column and row."""
    with PIL_Image.open(SLIDE) as tiff:
        offsets, sizes = tiff.tag_v2[324], tiff.tag_v2[325]
    column, row = 5, 2
    tile = row * -(-WIDTH_PX // TILE_PX) + column
    content = bytearray(SLIDE.read_bytes())
    content[offsets[tile] : offsets[tile] + sizes[tile]] = bytes(sizes[tile])
    path = tmp_path / "damaged.svs"
    path.write_bytes(content)
    return path, column, row


class FakeHandle:
    """An OpenSlide handle on two levels of one colour and one transparency."""

    def __init__(self, colour: tuple[int, int, int, int], background: str | None) -> None:
        self.level_dimensions = ((4000, 3000), (999, 749))
        self.level_downsamples = (1.0, 4.005)
        self.properties: Mapping[str, str] = {"openslide.mpp-x": "0.25", "openslide.mpp-y": "0.5"} | (
            {} if background is None else {"openslide.background-color": background}
        )
        self.colour = colour
        self.calls: list[tuple[tuple[int, int], int, tuple[int, int]]] = []

    def read_region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Any:
        self.calls.append((location, level, size))
        return PIL_Image.new("RGBA", size, self.colour)

    def close(self) -> None:
        pass


def use_handle(monkeypatch: pytest.MonkeyPatch, handle: FakeHandle) -> None:
    monkeypatch.setattr(slide_module, "_open_handle", lambda path: handle)


def test_metadata_of_a_slide(slide: Slide) -> None:
    assert isinstance(slide, Image)
    assert slide.dimensions == (slide.width_px, slide.height_px) == (WIDTH_PX, HEIGHT_PX)
    assert slide.level_downsamples == (1.0,)
    assert slide.mpp == (0.499, 0.499)
    assert slide.background == (255, 255, 255)


def test_known_pixels(slide: Slide) -> None:
    pixels = slide.read(1000, 1400, 64, 48)
    assert pixels.shape == (48, 64, 3) and pixels.dtype == np.uint8 and pixels.flags.c_contiguous
    assert hashlib.sha256(pixels.tobytes()).hexdigest() == "b0c811b7858784030e9920044b4873a2f26086a5a8f378c84a2dae33f59fcc4e"


@pytest.mark.parametrize("seed", range(5))
def test_overlapping_reads_agree(slide: Slide, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = int(rng.integers(0, WIDTH_PX - 700)), int(rng.integers(0, HEIGHT_PX - 700))
    dx, dy = (int(shift) for shift in rng.integers(1, 300, size=2))
    first = slide.read(x, y, 400, 400)
    second = slide.read(x + dx, y + dy, 400, 400)
    assert np.array_equal(first[dy:, dx:], second[: 400 - dy, : 400 - dx])


@pytest.mark.parametrize("rows", [97, 240, 5000])
def test_strips_join_to_the_whole(slide: Slide, rows: int) -> None:
    strips = list(slide.read_strips(rows))
    assert [len(strip) for strip in strips[:-1]] == [rows] * (len(strips) - 1)
    assert np.array_equal(np.concatenate(strips), slide.read(0, 0, WIDTH_PX, HEIGHT_PX))


@pytest.mark.parametrize(
    ("x", "y", "w", "h"),
    [
        (-1, 0, 10, 10),
        (0, -1, 10, 10),
        (WIDTH_PX - 9, 0, 10, 10),
        (0, HEIGHT_PX - 9, 10, 10),
        (0, 0, 0, 10),
        (0, 0, 10, -1),
    ],
)
def test_out_of_bounds_is_refused(slide: Slide, x: int, y: int, w: int, h: int) -> None:
    with pytest.raises(InputError, match=r"CMU-1-Small-Region\.svs"):
        slide.read(x, y, w, h)


def test_the_last_pixel_is_in_bounds(slide: Slide) -> None:
    assert slide.read(WIDTH_PX - 1, HEIGHT_PX - 1, 1, 1).shape == (1, 1, 3)


def test_wrong_levels_and_strips_are_refused(slide: Slide) -> None:
    with pytest.raises(InputError, match="levels 0 to 0"):
        slide.read(0, 0, 1, 1, level=1)
    with pytest.raises(InputError, match="levels 0 to 0"):
        slide.read(0, 0, 1, 1, level=-1)
    with pytest.raises(InputError, match="levels 0 to 0"):
        _ = Slide(SLIDE, level=3).dimensions
    with pytest.raises(InputError, match="at least one row"):
        slide.read_strips(0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nowhere\.svs.*no such file"):
        Slide(tmp_path / "nowhere.svs")


@pytest.mark.parametrize("content", [b"", b"no slide", SLIDE.read_bytes()[: 1 << 20], SLIDE.read_bytes()[:-2000]])
def test_truncated_and_foreign_files_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "scan.svs"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=rf"scan\.svs \({len(content)} bytes\).*copy it again"):
        _ = Slide(path).dimensions


def test_a_file_that_disappears_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scan.svs"
    path.write_bytes(SLIDE.read_bytes())
    slide = Slide(path)
    path.unlink()
    with pytest.raises(SourceError, match=r"scan\.svs.*no such file"):
        slide.read(0, 0, 1, 1)


def test_a_corrupt_tile_is_named_and_the_rest_stays_readable(damaged: tuple[Path, int, int]) -> None:
    path, column, row = damaged
    x, y = column * TILE_PX, row * TILE_PX
    good = Slide(SLIDE)
    with Slide(path) as slide:
        for _ in range(2):
            with pytest.raises(SourceError, match=rf"columns \[{x + 7}, {x + 17}\) and rows \[{y + 3}, {y + 8}\).*damaged"):
                slide.read(x + 7, y + 3, 10, 5)
            # OpenSlide latches the error; a fresh handle must serve the next read.
            assert np.array_equal(slide.read(x - 50, y, 50, 300), good.read(x - 50, y, 50, 300))
        with pytest.raises(SourceError, match=r"damaged\.svs"):
            load_tensor(slide, mean=MEAN, std=STD)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openslide", None)
    with pytest.raises(SourceError, match=r"pip install .*\[slide\]"):
        _ = Slide(SLIDE).dimensions


@pytest.mark.parametrize(
    ("colour", "background", "expected"),
    [
        ((0, 0, 0, 0), None, (255, 255, 255)),
        ((0, 0, 0, 0), "102030", (16, 32, 48)),
        ((200, 100, 0, 51), "0A0A0A", (48, 28, 8)),  # one fifth of the pixel, four fifths of the background
        ((1, 2, 3, 255), "FFFFFF", (1, 2, 3)),
        ((255, 255, 255, 254), "FFFFFF", (255, 255, 255)),  # the largest sums do not overflow
    ],
)
def test_transparency_shows_the_background(
    monkeypatch: pytest.MonkeyPatch,
    colour: tuple[int, int, int, int],
    background: str | None,
    expected: tuple[int, int, int],
) -> None:
    use_handle(monkeypatch, FakeHandle(colour, background))
    pixels = Slide(SLIDE).read(5, 6, 4, 3)
    assert pixels.shape == (3, 4, 3) and pixels.dtype == np.uint8
    assert (pixels == np.array(expected)).all()


def test_levels_count_from_the_largest_level_of_the_slide(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = FakeHandle((1, 2, 3, 255), None)
    use_handle(monkeypatch, handle)
    full, small = Slide(SLIDE), Slide(SLIDE, level=1)
    assert full.dimensions == (4000, 3000) and small.dimensions == (999, 749)
    assert full.level_downsamples == (1.0, 4.005) and small.level_downsamples == (1.0,)
    assert full.mpp == (0.25, 0.5) and small.mpp == pytest.approx((0.25 * 4.005, 0.5 * 4.005))
    full.read(100, 10, 3, 2, level=1)
    small.read(100, 10, 3, 2)
    full.read(100, 10, 3, 2)
    # OpenSlide takes the origin in pixels of the largest level.
    assert handle.calls == [((400, 40), 1, (3, 2)), ((400, 40), 1, (3, 2)), ((100, 10), 0, (3, 2))]


def test_pickling_carries_no_handle(slide: Slide) -> None:
    expected = slide.read(300, 200, 20, 10)
    assert np.array_equal(expected, slide.read(*np.array([300, 200, 20, 10])))
    copy: Slide = pickle.loads(pickle.dumps(slide))
    assert copy._opened is None and copy.dimensions == slide.dimensions
    assert np.array_equal(copy.read(300, 200, 20, 10), expected)


def test_another_process_opens_its_own_handle(slide: Slide, monkeypatch: pytest.MonkeyPatch) -> None:
    slide.read(0, 0, 1, 1)
    inherited = slide._opened
    monkeypatch.setattr(os, "getpid", lambda: -2)  # the state in a forked child
    slide.read(0, 0, 1, 1)
    assert slide._opened is not None and inherited is not None and slide._opened[1] is not inherited[1]


def test_a_closed_slide_opens_again(slide: Slide) -> None:
    expected = slide.read(0, 0, 5, 5)
    slide.close()
    slide.close()
    assert np.array_equal(slide.read(0, 0, 5, 5), expected)


class Array:
    """An array as an image, to show that a source needs no base class."""

    def __init__(self, pixels: Pixels) -> None:
        self.pixels = pixels
        self.height_px, self.width_px = pixels.shape[:2]

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        return self.pixels[y : y + h, x : x + w]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_load_tensor_normalises_every_strip(dtype: torch.dtype) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (37, 23, 3), dtype=np.uint8)
    reported: list[tuple[int, int]] = []
    tensor = load_tensor(
        Array(pixels),
        mean=MEAN,
        std=STD,
        dtype=dtype,
        rows=10,
        progress=lambda done, all_: reported.append((done, all_)),
    )
    expected = ((pixels / 255 - np.array(MEAN)) / np.array(STD)).transpose(2, 0, 1)[None]
    assert tensor.shape == (1, 3, 37, 23) and tensor.dtype == dtype and tensor.is_contiguous()
    # A few roundings to the nearest, of numbers below 5.
    torch.testing.assert_close(tensor.double(), torch.from_numpy(expected), rtol=0, atol=4 * 5 * torch.finfo(dtype).eps)
    assert reported == [(10, 37), (20, 37), (30, 37), (37, 37)]


def test_load_tensor_reads_the_real_slide(slide: Slide) -> None:
    tensor = load_tensor(slide, mean=(0, 0, 0), std=(1, 1, 1))
    assert tensor.shape == (1, 3, HEIGHT_PX, WIDTH_PX)
    restored = tensor[0, :, 1400:1448, 1000:1064].mul(255).round().byte().permute(1, 2, 0).numpy()
    assert np.array_equal(restored, slide.read(1000, 1400, 64, 48))


def test_load_tensor_refuses_images_that_it_cannot_normalise() -> None:
    colour = Array(np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(InputError, match="fractions"):
        load_tensor(colour, mean=MEAN, std=STD, dtype=torch.uint8)
    with pytest.raises(InputError, match="one of each for every channel"):
        load_tensor(colour, mean=(0.5,), std=STD)
    with pytest.raises(InputError, match="above 0"):
        load_tensor(colour, mean=MEAN, std=(1, 0, 1))
    with pytest.raises(InputError, match="source, which normalises by itself"):
        load_tensor(Normalized(colour), mean=MEAN, std=STD)
    with pytest.raises(InputError, match="at least one row"):
        load_tensor(colour, rows=0)
    with pytest.raises(InputError, match="at least one row"):
        read_strips(colour, -1)
