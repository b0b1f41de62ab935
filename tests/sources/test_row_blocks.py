"""Compressed images in strips: no tile is decoded twice in a pass, in either direction, and the numbers are those of the full image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sft import InputError, SourceError
from sft.common.interval import Interval
from sft.sources import Normalized, Slide, StripReader, load_tensor
from sft.sources.image import Pixels
from sft.sources.readers import openslide as slide_module

MEAN, STD = (0.7, 0.5, 0.6), (0.2, 0.3, 0.25)
SLIDE = Path(__file__).resolve().parents[2] / "examples" / "data" / "CMU-1-Small-Region.svs"


def strips_of(height_px: int, rows: int, halo: int) -> list[Interval]:
    """Strips of a convolution, which overlap by twice the halo."""
    return [Interval(top - halo, top + rows + halo).clip(height_px) for top in range(0, height_px, rows)]


class Tiled:
    """An image in compressed tiles that counts the rows that it decodes."""

    def __init__(self, pixels: Pixels, tile_height_px: int | None) -> None:
        self.pixels, self.tile_height_px = pixels, tile_height_px
        self.height_px, self.width_px = pixels.shape[:2]
        self.calls: list[tuple[int, int]] = []

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        assert (x, w) == (0, self.width_px)
        self.calls.append((y, y + h))
        return self.pixels[y : y + h]


@given(st.integers(1, 400), st.integers(1, 90), st.integers(0, 40), st.sampled_from([None, 1, 8, 60, 64, 100, 1000]), st.booleans())
def test_each_tile_is_decoded_once_in_either_direction(
    height_px: int, rows: int, halo: int, tile_height_px: int | None, backwards: bool
) -> None:
    image = Tiled(np.random.default_rng(0).integers(0, 256, (height_px, 2, 3), dtype=np.uint8), tile_height_px)
    expected = load_tensor(image, mean=MEAN, std=STD)
    image.calls.clear()
    source = Normalized(image, mean=MEAN, std=STD)
    intervals = strips_of(height_px, rows, halo)[:: -1 if backwards else 1]
    for interval, strip in zip(intervals, StripReader(source, intervals), strict=True):
        assert torch.equal(strip, expected[:, :, interval.start : interval.stop])
    assert sorted(row for start, stop in image.calls for row in range(start, stop)) == list(range(height_px)), "a row was decoded twice"
    if tile_height_px is not None:
        assert all(start % tile_height_px == 0 and (stop % tile_height_px == 0 or stop == height_px) for start, stop in image.calls)
        assert len(source._blocks) <= 2


def test_blocks_are_forgotten_on_request_and_not_pickled() -> None:
    image = Tiled(np.zeros((200, 5, 3), np.uint8), 64)
    source = Normalized(image, mean=MEAN, std=STD)
    out = torch.empty(1, 3, 10, 5)
    for _ in range(3):
        source.rows(Interval(60, 70), out)
    assert image.calls == [(0, 64), (64, 128)] and source.__getstate__()["_blocks"] == {}
    source.forget()
    source.rows(Interval(60, 70), out)
    assert len(image.calls) == 4
    with pytest.raises(InputError, match="0 rows"):
        Normalized(Tiled(np.zeros((200, 5, 3), np.uint8), 0), mean=MEAN, std=STD)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_slide_is_decoded_once_a_pass(monkeypatch: pytest.MonkeyPatch, backwards: bool) -> None:
    pytest.importorskip("openslide")
    open_handle, calls = slide_module._open_handle, list[tuple[int, int]]()

    class Watched:
        def __init__(self, path: Path) -> None:
            self.handle = open_handle(path)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.handle, name)

        def read_region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Any:
            calls.append((location[1], location[1] + size[1]))
            return self.handle.read_region(location, level, size)

    with Slide(SLIDE) as plain:
        expected = load_tensor(plain, mean=MEAN, std=STD)
    monkeypatch.setattr(slide_module, "_open_handle", Watched)
    with Slide(SLIDE) as slide:
        assert slide.tile_height_px == 240
        intervals = strips_of(slide.height_px, 64, 3)[:: -1 if backwards else 1]
        with StripReader(Normalized(slide, mean=MEAN, std=STD), intervals) as reader:
            for interval in intervals:
                assert torch.equal(reader.take(interval), expected[:, :, interval.start : interval.stop])
    blocks = [(top, min(top + 240, 2967)) for top in range(0, 2967, 240)]
    assert calls == (blocks[::-1] if backwards else blocks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image": np.zeros((4, 4, 3))}, "width_px"),
        ({"dtype": torch.int8}, "fractions"),
        ({"mean": (0.5,)}, "one of each"),
        ({"mean": (), "std": ()}, "one of each"),
        ({"std": (1, 1, -1)}, "above 0"),
        ({"image": Tiled(np.zeros((0, 4, 3), np.uint8), None)}, "0 px high"),
    ],
)
def test_wrong_images_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Normalized(**{"image": Tiled(np.zeros((4, 4, 3), np.uint8), None), "mean": MEAN, "std": STD, **arguments})


def test_wrong_answers_of_an_image_are_refused() -> None:
    out = torch.empty(1, 3, 4, 4)
    with pytest.raises(InputError, match=r"\(4, 4, 1\).*channel"):
        Normalized(Tiled(np.zeros((4, 4, 1), np.uint8), None), mean=MEAN, std=STD).rows(Interval(0, 4), out)
    short = Tiled(np.zeros((4, 4, 3), np.uint8), None)
    short.height_px = 8  # a reader that clips silently
    with pytest.raises(SourceError, match=r"rows \[2, 6\).*2 x 4 px instead of 4 x 4"):
        Normalized(short, mean=MEAN, std=STD).rows(Interval(2, 6), out)
