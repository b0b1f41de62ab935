"""Tiles of an image as a bag: positions, values, and cells that are decoded once a pass."""

from __future__ import annotations

import pickle
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sft
from sft.common.interval import Interval
from sft.sources import ArrayImage, AtLevel, Normalized, Resampled, TiffImage, Tiles
from sft.sources.image import Pixels
from sft.tissue import TissueMask
from tests.helpers.bags import AttentionBag, VisionTransformer
from tests.helpers.plans import least_budget
from tests.helpers.sources import write_tiled_tiff

MEAN, STD = (0.7, 0.5, 0.6), (0.2, 0.3, 0.25)


class _Compressed(ArrayImage):
    """An image in compressed tiles that counts the decodes of each."""

    def __init__(self, pixels: Pixels, cell_px: tuple[int, int]) -> None:
        super().__init__(pixels, layout="HWC")
        self.cell_px, self.decoded = cell_px, Counter[tuple[int, int]]()

    @property
    def level_tiles_px(self) -> tuple[tuple[int, int] | None, ...]:
        return (self.cell_px,)

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        width, height = self.cell_px
        self.decoded.update((c, r) for c in range(x // width, -(-(x + w) // width)) for r in range(y // height, -(-(y + h) // height)))
        return super().read(x, y, w, h, level)


def _pixels(height: int, width: int) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def _read(source: Any, chunk: int, *, backwards: bool = False) -> Tensor:
    """All tiles, some at a time."""
    out = torch.empty(source.shape)
    for start in range(0, len(source), chunk)[:: -1 if backwards else 1]:
        batch = Interval(start, min(start + chunk, len(source)))
        source.samples(batch).rows(Interval(0, source.shape[2]), out[batch.start : batch.stop])
    return out


@settings(max_examples=20)
@given(
    tile=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    stride=st.tuples(st.integers(1, 11), st.integers(1, 11)),
    cell=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    budget=st.sampled_from([1, 200, 10_000]),
    order=st.sampled_from(["rows", "columns"]),
    chunk=st.integers(1, 5),
)
def test_tiles_are_rectangles_of_the_normalised_image(
    tile: tuple[int, int], stride: tuple[int, int], cell: tuple[int, int], budget: int, order: Any, chunk: int
) -> None:
    image = _Compressed(_pixels(14, 19), cell)
    full = torch.empty(1, 3, 14, 19)
    Normalized(image, mean=MEAN, std=STD).rows(Interval(0, 14), full)
    tiles = Tiles(image, tile, stride_px=stride, order=order, mean=MEAN, std=STD, host_budget_bytes=budget)
    corners = [(x, y) for y in range(0, 15 - tile[0], stride[0]) for x in range(0, 20 - tile[1], stride[1])]
    assert sorted(map(tuple, tiles.positions_px.tolist())) == sorted(corners)
    assert order == "columns" or tiles.positions_px.tolist() == [list(corner) for corner in corners]
    expected = torch.cat([full[:, :, y : y + tile[0], x : x + tile[1]] for x, y in tiles.positions_px])
    assert torch.equal(_read(tiles, chunk), expected)
    row = torch.empty(len(tiles), 3, 1, tile[1])
    tiles.rows(Interval(tile[0] - 1, tile[0]), row)
    assert torch.equal(row, expected[:, :, -1:])


@pytest.mark.parametrize("chunk", [1, 4])
def test_each_cell_is_decoded_once_a_pass(chunk: int) -> None:
    """Tiles of 22 px on cells of 16: a budget of three rows of cells suffices, forward and backward; glass is not decoded."""
    image = _Compressed(_pixels(200, 130), (16, 16))
    pixels = np.zeros((20, 13), bool)
    pixels[4:15, :6] = True
    mask = TissueMask(pixels=pixels, width_px=130, height_px=200)
    tiles = Tiles(image, 22, tissue=mask, host_budget_bytes=3 * 9 * 16 * 16 * 3)
    for number, backwards in enumerate((False, True, False)):
        image.decoded.clear()
        decoded = tiles.num_cells_decoded
        _read(tiles, chunk, backwards=backwards)
        assert max(image.decoded.values()) == 1, number
        assert tiles.num_cells_decoded - decoded == len(image.decoded)
        # Only cells under tiles with tissue.
        xs, ys = tiles.positions_px.T
        assert all(any(x < 16 * c + 16 and x + 22 > 16 * c and y < 16 * r + 16 and y + 22 > 16 * r for x, y in zip(xs, ys, strict=True))
                   for c, r in image.decoded)  # fmt: skip
    assert len(image.decoded) < 9 * 13


def test_cells_of_a_reduced_image_are_full_tiles() -> None:
    """A slide at half of its resolution: its compressed tiles are decoded once, too."""
    image = _Compressed(_pixels(96, 128), (16, 16))
    reduced = Resampled(image, Fraction(2), Fraction(2))
    tiles = Tiles(reduced, 12)
    pixels = _read(tiles, 2)
    assert max(image.decoded.values()) == 1
    expected = torch.from_numpy(reduced.read(12, 24, 12, 12)).permute(2, 0, 1) / 255
    assert torch.equal(pixels[tiles.positions_px.tolist().index([12, 24])], expected)
    assert torch.equal(_read(Tiles(AtLevel(reduced, 0), 12), 3), pixels)


@pytest.mark.parametrize("with_counts", [True, False])
def test_tiles_with_tissue(with_counts: bool) -> None:
    """Tiles with enough tissue, by the mask's counts or by its region alone."""
    pixels = np.random.default_rng(1).random((7, 9)) < 0.5
    mask = TissueMask(pixels=pixels, width_px=60, height_px=44)

    class _Region:
        region = staticmethod(mask.region)

    image = ArrayImage(_pixels(44, 60), layout="HWC")
    tiles = Tiles(image, (8, 10), stride_px=6, tissue=mask if with_counts else _Region(), min_tissue=0.6)
    expected = [[x, y] for y in range(0, 37, 6) for x in range(0, 51, 6) if mask.region(x, y, 10, 8).mean() >= 0.6]
    assert 0 < len(expected) < 63
    assert tiles.positions_px.tolist() == expected


def test_a_bag_trains_like_its_stacked_tiles(tmp_path: Path) -> None:
    """Tiles of a TIFF, read chunk by chunk by a compiled model, in any order; a pickled bag has no decoded cells."""
    path = tmp_path / "slide.tif"
    write_tiled_tiff(path, _pixels(40, 56))
    tiles = Tiles(TiffImage(path), 8, stride_px=16, mean=MEAN, std=STD).take([3, 0, 5, 8, 1])
    assert len(pickle.dumps(tiles)) < 8_000
    torch.manual_seed(0)
    model = AttentionBag(VisionTransformer(24, 2, 1, 4, 8), 24)
    stacked = _read(tiles, 5)
    model(stacked).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    net = sft.compile(model, [tiles], budget=least_budget(model, [tiles]))
    net(tiles).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    tiles.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_px": 0}, "tile_px=0"),
        ({"tile_px": (4, 2.5)}, "tile_px"),
        ({"stride_px": (1, 2, 3)}, "stride_px"),
        ({"tile_px": 30}, "it has 19 x 14 px"),
        ({"order": "spiral"}, "'rows' or 'columns'"),
        ({"dtype": torch.int64}, "floating-point"),
        ({"mean": (1.0,), "std": (1.0, 2.0)}, "one of each"),
        ({"mean": 0.5}, "a number for every channel"),
        ({"min_tissue": 2.0, "tissue": TissueMask(pixels=np.ones((1, 1), bool), width_px=19, height_px=14)}, "share of 0 to 1"),
        ({"tissue": 3}, "give a mask"),
        ({"tissue": TissueMask(pixels=np.ones((1, 1), bool), width_px=10, height_px=14)}, "10 x 14 px.*mask.at"),
        ({"tissue": TissueMask(pixels=np.zeros((1, 1), bool), width_px=19, height_px=14)}, "largest share is 0"),
        ({"image": np.zeros((3, 4, 4))}, "cannot take tiles of"),
        ({"host_budget_bytes": "many"}, "many"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"image": ArrayImage(_pixels(14, 19), layout="HWC"), "tile_px": 4} | changes
    with pytest.raises(sft.InputError, match=message):
        Tiles(arguments.pop("image"), arguments.pop("tile_px"), **arguments)


@pytest.mark.parametrize("indices", [[], [9], [-1], [0.5], [[0]]])
def test_wrong_indices(indices: Any) -> None:
    with pytest.raises(sft.InputError, match="integers from 0 to 8"):
        Tiles(ArrayImage(_pixels(12, 12), layout="HWC"), 4).take(indices)


def test_tiles_at_positions_of_another_tool() -> None:
    image = ArrayImage(np.arange(48, dtype=np.uint8).reshape(6, 8))
    tiles = Tiles(image, (2, 3)).at([[5, 4], [1, 0]])
    assert tiles.shape == (2, 1, 2, 3) and tiles.positions_px.tolist() == [[5, 4], [1, 0]]
    out = torch.empty(2, 1, 2, 3)
    tiles.rows(Interval(0, 2), out)
    assert (255 * out[:, 0, 0, 0]).round().tolist() == [37, 1]
    for positions, message in (
        ([[6, 0]], r"cannot take the tile of 3 x 2 px at \[6, 0\] .*it is not inside the image \(1 of 1 are not\)"),
        ([[0, -1]], "it is not inside the image"),
        ([], r"positions of shape \(0,\)"),
        ([[0.5, 1]], "float64: give integers"),
    ):
        with pytest.raises(sft.InputError, match=message):
            tiles.at(positions)
