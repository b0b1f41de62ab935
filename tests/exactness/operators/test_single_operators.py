"""Each operator alone, between two convolutions, at indivisible sizes and strips."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most
from tests.helpers.models import Around, chain, image, seeded

captures = one_capture_a_model("tiles", "rows", "state_every", "batch_tile")

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

_SHAPE = (2, 3, 23, 11)
"""(batch, channels, height, width)"""

_CONVS: dict[str, Callable[[], nn.Module]] = {
    "3x3": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "valid": lambda: nn.Conv2d(4, 4, 3),
    "1x1": lambda: nn.Conv2d(4, 4, 1),
    "even_kernel": lambda: nn.Conv2d(4, 4, 4, padding=1),
    "not_square": lambda: nn.Conv2d(4, 4, (5, 2), stride=(2, 1), padding=(2, 0)),
    "wide": lambda: nn.Conv2d(4, 4, (1, 7), padding=(0, 3)),
    "tall": lambda: nn.Conv2d(4, 4, (7, 1), padding=(3, 0)),
    "stride_2": lambda: nn.Conv2d(4, 4, 3, stride=2, padding=1),
    "stride_above_kernel": lambda: nn.Conv2d(4, 4, 2, stride=3),
    "strided_1x1": lambda: nn.Conv2d(4, 4, 1, stride=2),
    "dilated": lambda: nn.Conv2d(4, 4, 3, padding=3, dilation=3),
    "dilated_strided": lambda: nn.Conv2d(4, 4, 3, stride=2, padding=(1, 2), dilation=(2, 1)),
    "padding_above_half": lambda: nn.Conv2d(4, 4, 3, padding=2),
    "padding_above_kernel": lambda: nn.Conv2d(4, 4, 2, padding=3),
    "same": lambda: nn.Conv2d(4, 4, 3, padding="same", dilation=2),
    "same_even": lambda: nn.Conv2d(4, 4, (4, 2), padding="same"),
    "padding_valid_text": lambda: nn.Conv2d(4, 4, 3, padding="valid"),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "grouped": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2),
    "no_bias": lambda: nn.Conv2d(4, 4, 3, padding=1, bias=False),
    "frozen": lambda: nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False),
}

_POOLS: dict[str, Callable[[], nn.Module]] = {
    "max_2": lambda: nn.MaxPool2d(2),
    "max_overlapping": lambda: nn.MaxPool2d(3, 2, 1),
    "max_not_square": lambda: nn.MaxPool2d((3, 2), (1, 3), (1, 0)),
    "max_gaps": lambda: nn.MaxPool2d(2, 3),
    "max_dilated": lambda: nn.MaxPool2d(2, 1, dilation=(3, 2)),
    "max_dilated_padded": lambda: nn.MaxPool2d(3, 2, 1, dilation=2),
    "max_ceil": lambda: nn.MaxPool2d(2, 2, ceil_mode=True),
    "max_ceil_overlapping": lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "avg_2": lambda: nn.AvgPool2d(2),
    "avg_overlapping": lambda: nn.AvgPool2d(3, 2, 1),
    "avg_not_square": lambda: nn.AvgPool2d((2, 3), (3, 1), (1, 0)),
    "avg_ceil": lambda: nn.AvgPool2d(3, 2, ceil_mode=True),
    "avg_ceil_padded": lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    "avg_without_pad": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "avg_ceil_without_pad": lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg_divisor": lambda: nn.AvgPool2d(3, 2, 1, divisor_override=5),
}

_POINTWISE: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu_inplace": lambda: nn.ReLU(inplace=True),
    "leaky_relu_inplace": lambda: nn.LeakyReLU(0.2, inplace=True),
    "rrelu": lambda: nn.RReLU(0.1, 0.4).eval(),
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "silu_inplace": lambda: nn.SiLU(inplace=True),
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "hardswish": nn.Hardswish,
    "hardswish_inplace": lambda: nn.Hardswish(inplace=True),
    "norm": lambda: nn.BatchNorm2d(4).eval(),
    "norm_not_affine": lambda: nn.BatchNorm2d(4, affine=False).eval(),
    "norm_frozen": lambda: nn.BatchNorm2d(4).eval().requires_grad_(False),
    "norm_relu_inplace": lambda: chain(nn.BatchNorm2d(4).eval(), nn.ReLU(inplace=True)),
}

_UPSAMPLINGS: dict[str, Callable[[], nn.Module]] = {
    "nearest_2": lambda: nn.Upsample(scale_factor=2, mode="nearest"),
    "nearest_3": lambda: nn.Upsample(scale_factor=3, mode="nearest"),
    "nearest_2_1": lambda: nn.Upsample(scale_factor=(2.0, 1.0), mode="nearest"),
}


class _Join(nn.Module):
    """Two branches of different depth, joined."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.deep = chain(nn.Conv2d(4, 4, 5, padding=2), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1))
        self.shallow = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.deep(x), self.shallow(x)
        match self.how:
            case "add":
                return torch.add(a, b)
            case "add_alpha":
                return torch.add(a, b, alpha=0.5)
            case "add_inplace":
                a += b
                return torch.as_tensor(a)
            case "sub":
                return torch.sub(a, b)
            case "mul":
                return torch.mul(a, b)
            case "mul_self":
                return torch.mul(a, a)
            case "scalar":
                return torch.as_tensor(2.5 * a - 1.0)
            case "cat":
                return torch.cat([a, x, b], dim=1)
            case _:
                return torch.cat([b, a, x, x], dim=-3)


class _GlobalHead(nn.Module):
    """A streamed mean, then a small untiled tail."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.body = chain(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.SiLU())
        self.hidden = nn.Linear(4, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        match self.how:
            case "adaptive":
                y = nn.functional.adaptive_avg_pool2d(y, 1).flatten(1)
            case "adaptive_pair":
                y = torch.flatten(nn.functional.adaptive_avg_pool2d(y, (1, 1)), 1)
            case "mean":
                y = y.mean((2, 3))
            case "mean_negative":
                y = y.mean(dim=(-1, -2))
            case _:
                y = y.mean((2, 3), keepdim=True).squeeze(-1).squeeze(-1)
        z: Tensor = self.last(torch.relu(self.hidden(y)))
        return z


def _check(model: nn.Module, rows: int, state_every: int | None = None, batch_tile: int | None = None) -> None:
    options = sft.Options(tile=(rows, _SHAPE[3]), state_every=state_every, batch_tile=batch_tile)
    assert_exact(model, image(*_SHAPE), options=options)


_TILES = {
    "panels": sft.Options(tile=(4, 5)),
    "narrow panels": sft.Options(tile=(9, 2), state_every=2),
    "tiles": sft.Options(tile=(6, 5), halo="recompute"),
    "rows of tiles": sft.Options(tile=(5, None), halo="recompute", batch_tile=2),
}


@pytest.mark.parametrize("tiles", _TILES)
@pytest.mark.parametrize("name", _CONVS | _POOLS | _UPSAMPLINGS)
def test_panels_and_tiles(name: str, tiles: str) -> None:
    build = (_CONVS | _POOLS | _UPSAMPLINGS)[name]
    assert_exact(seeded(lambda: Around(build())), image(*_SHAPE), options=_TILES[tiles], steps=1)


@pytest.mark.parametrize("tiles", _TILES)
@pytest.mark.parametrize("how", ["add", "mul_self", "cat"])
def test_joins_in_panels_and_tiles(how: str, tiles: str) -> None:
    model = seeded(lambda: Around(_Join(how), out_channels=12 if how == "cat" else 4))
    assert_exact(model, image(*_SHAPE), options=_TILES[tiles], steps=1)


@pytest.mark.parametrize("tiles", _TILES)
def test_global_average_in_panels_and_tiles(tiles: str) -> None:
    assert_exact(seeded(lambda: _GlobalHead("mean")), image(*_SHAPE), options=_TILES[tiles], steps=1)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", _CONVS)
def test_conv(name: str, rows: int) -> None:
    _check(seeded(lambda: Around(_CONVS[name]())), rows, state_every=2)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", _POOLS)
def test_pool(name: str, rows: int) -> None:
    _check(seeded(lambda: Around(_POOLS[name]())), rows, state_every=3)


@pytest.mark.parametrize("name", _POINTWISE)
def test_pointwise(name: str) -> None:
    _check(seeded(lambda: Around(_POINTWISE[name]())), 3, state_every=1)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("name", _UPSAMPLINGS)
def test_upsampling(name: str, rows: int) -> None:
    _check(seeded(lambda: Around(_UPSAMPLINGS[name]())), rows)


@pytest.mark.parametrize("how", ["add", "add_alpha", "add_inplace", "sub", "mul", "mul_self", "scalar"])
def test_arithmetic_of_branches(how: str) -> None:
    _check(seeded(lambda: Around(_Join(how))), 2, state_every=2)


@pytest.mark.parametrize(("how", "out_channels"), [("cat", 12), ("cat_negative_dim", 16)])
def test_cat(how: str, out_channels: int) -> None:
    _check(seeded(lambda: Around(_Join(how), out_channels=out_channels)), 2, state_every=2)


@pytest.mark.parametrize("how", ["adaptive", "adaptive_pair", "mean", "mean_negative", "mean_keepdim"])
def test_global_average(how: str) -> None:
    _check(seeded(lambda: _GlobalHead(how)), 4)


@pytest.mark.parametrize("batch_tile", [1, 2])
@pytest.mark.parametrize("state_every", [1, 2, 7, None])
def test_state_every_and_batch_tile(state_every: int | None, batch_tile: int) -> None:
    _check(seeded(lambda: Around(nn.MaxPool2d(3, 2, 1))), 3, state_every, batch_tile)


@at_most(7)
@given(
    height=st.integers(7, 41),
    width=st.integers(7, 19),
    rows=st.integers(1, 44),
    state_every=st.none() | st.integers(1, 5),
)
def test_any_size_any_strip(height: int, width: int, rows: int, state_every: int | None) -> None:
    model = seeded(lambda: Around(chain(nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ReLU())))
    options = sft.Options(tile=(rows, width), state_every=state_every)
    assert_exact(model, image(1, 3, height, width), options=options)


def test_planner_s_own_choice() -> None:
    assert_exact(seeded(lambda: Around(nn.MaxPool2d(3, 2, 1))), image(*_SHAPE))
