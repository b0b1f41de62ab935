"""Pixel shuffles and their inverses, by torch's operators and by reshapes: exact in strips."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.exactness import assert_exact
from tests.helpers.models import chain, image, seeded
from tests.helpers.plans import assert_tiled

captures = one_capture_a_model("tiles")

_TILES = {
    "strips": sft.Options(tile=(3, None), state_every=2),
    "one row": sft.Options(tile=(1, None), batch_tile=1),
    "panels": sft.Options(tile=(5, 3)),
    "tiles": sft.Options(tile=(5, 3), halo="recompute"),
}


class _Grow(nn.Module):
    """A pixel shuffle by reshapes, with a factor for each axis."""

    def __init__(self, *factors: int, channels_first: bool = False) -> None:
        super().__init__()
        self.factors, self.channels_first = factors, channels_first

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, *extents = x.shape
        count = len(self.factors)
        for factor in self.factors:
            channels //= factor
        split = (*self.factors, channels) if self.channels_first else (channels, *self.factors)
        x = x.reshape(batch, *split, *extents)
        place = 1 + count if self.channels_first else 1
        first = 1 if self.channels_first else 2
        pairs = [dim for axis in range(count) for dim in (2 + count + axis, first + axis)]
        x = x.permute(0, place, *pairs)
        return x.reshape(batch, channels, *(extent * factor for extent, factor in zip(extents, self.factors, strict=True)))


class _Shrink(nn.Module):
    """Inverse of :class:`_Grow`."""

    def __init__(self, *factors: int) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, *extents = x.shape
        count = len(self.factors)
        pairs = [size for extent, factor in zip(extents, self.factors, strict=True) for size in (extent // factor, factor)]
        x = x.view(batch, channels, *pairs)
        x = x.permute(0, 1, *range(3, 3 + 2 * count, 2), *range(2, 2 + 2 * count, 2))
        shrunk = [extent // factor for extent, factor in zip(extents, self.factors, strict=True)]
        for factor in self.factors:
            channels *= factor
        return x.reshape(batch, channels, *shrunk)


def _convs(count: int, *layers: nn.Module, inner: tuple[int, int]) -> nn.Module:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[count - 1]
    return chain(conv(3, inner[0], 3, padding=1), nn.SiLU(), *layers, nn.SiLU(), conv(inner[1], 2, 3, padding=1))


_CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "pixel_shuffle": (lambda: _convs(2, nn.PixelShuffle(2), inner=(8, 2)), (2, 3, 7, 5), "pixel_shuffle"),
    "pixel_shuffle by 3": (lambda: _convs(2, nn.PixelShuffle(3), inner=(9, 1)), (1, 3, 5, 4), "pixel_shuffle"),
    "pixel_unshuffle": (lambda: _convs(2, nn.PixelUnshuffle(2), inner=(2, 8)), (2, 3, 14, 10), "pixel_unshuffle"),
    "pixel_unshuffle by 3": (lambda: _convs(2, nn.PixelUnshuffle(3), inner=(1, 9)), (1, 3, 15, 12), "pixel_unshuffle"),
    "grow by hand": (lambda: _convs(2, _Grow(2, 2), inner=(8, 2)), (2, 3, 7, 5), "__unfolded"),
    "grow, channels last": (lambda: _convs(2, _Grow(2, 2, channels_first=True), inner=(8, 2)), (2, 3, 7, 5), "__unfolded"),
    "grow unevenly": (lambda: _convs(2, _Grow(3, 2), inner=(6, 1)), (1, 3, 5, 6), "__unfolded"),
    "grow rows": (lambda: _convs(2, _Grow(3, 1), inner=(6, 2)), (1, 3, 5, 6), "__unfolded"),
    "grow a signal": (lambda: _convs(1, _Grow(2), inner=(6, 3)), (2, 3, 13), "__unfolded"),
    "grow a volume": (lambda: _convs(3, _Grow(2, 1, 2), inner=(8, 2)), (1, 3, 5, 6, 3), "__unfolded"),
    "shrink by hand": (lambda: _convs(2, _Shrink(2, 2), inner=(2, 8)), (2, 3, 14, 10), "__folded"),
    "shrink unevenly": (lambda: _convs(2, _Shrink(3, 2), inner=(1, 6)), (1, 3, 15, 8), "__folded"),
    "shrink a signal": (lambda: _convs(1, _Shrink(4), inner=(2, 8)), (2, 3, 24), "__folded"),
    "shrink a volume": (lambda: _convs(3, _Shrink(2, 1, 3), inner=(1, 6)), (1, 3, 8, 5, 6), "__folded"),
}


@pytest.mark.parametrize("tiles", ["one row", "panels", "tiles"])
@pytest.mark.parametrize("name", _CASES)
def test_shuffles(name: str, tiles: str) -> None:
    build, shape, operator = _CASES[name]
    report = assert_exact(seeded(build), image(*shape), options=_TILES[tiles], steps=1)
    assert_tiled(report, operator)


class _Focus(nn.Module):
    """Down and up again with a shortcut (a U-Net with shuffles instead of strides)."""

    def __init__(self, down: nn.Module, up: nn.Module, factor: int) -> None:
        super().__init__()
        self.before = nn.Conv2d(3, 4, 3, padding=1)
        channels = 4 * factor**2
        self.inner = chain(down, nn.Conv2d(channels, channels, 3, padding=1), nn.SiLU(), up)
        self.after = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y: Tensor = self.after(x + self.inner(x))
        return y


@settings(max_examples=3)
@given(
    factor=st.integers(2, 3),
    by_hand=st.booleans(),
    size=st.tuples(st.integers(2, 6), st.integers(2, 5)),
    rows=st.integers(1, 13),
    columns=st.none() | st.integers(2, 9),
    halo=st.sampled_from(["carry", "recompute"]),
    batch=st.integers(1, 2),
)
def test_down_and_up(factor: int, by_hand: bool, size: tuple[int, int], rows: int, columns: int | None, halo: str, batch: int) -> None:
    down: nn.Module = _Shrink(factor, factor) if by_hand else nn.PixelUnshuffle(factor)
    up: nn.Module = _Grow(factor, factor) if by_hand else nn.PixelShuffle(factor)
    options = sft.Options(tile=(rows, columns), halo=halo, batch_tile=1)
    x = image(batch, 3, size[0] * factor, size[1] * factor)
    report = assert_exact(seeded(lambda: _Focus(down, up, factor)), x, options=options, steps=1)
    assert len([segment for segment in report.plan.segments if segment.mode == "tiled"]) == len(report.plan.segments)


class _Pooled(nn.Module):
    """Values of a pooling with indices."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        pooled, _ = self.pool(self.before(x))
        y: Tensor = self.after(pooled)
        return y


@pytest.mark.parametrize("tiles", _TILES)
def test_values_of_a_pooling_with_indices(tiles: str) -> None:
    model = seeded(lambda: _Pooled(nn.MaxPool2d(3, 2, 1, return_indices=True)))
    report = assert_exact(model, image(2, 3, 13, 9), options=_TILES[tiles], steps=1)
    assert [segment.mode for segment in report.plan.segments] == ["tiled"]
