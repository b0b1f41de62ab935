"""Transposed convolutions: exact in strips, panels and tiles, along one to three axes, without a redundant product."""

from __future__ import annotations

import copy
import statistics
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sft
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.exactness import assert_exact, assert_within_budget
from tests.helpers.examples import at_most
from tests.helpers.models import chain, image, seeded
from tests.helpers.plans import assert_tiled

captures = one_capture_a_model("tiles", "rows")

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SHAPES = {1: (2, 3, 23), 2: (2, 3, 11, 9), 3: (1, 3, 6, 7, 4)}
_TILES = {
    "strips": sft.Options(tile=(2, None), state_every=2),
    "one row": sft.Options(tile=(1, None), batch_tile=1),
    "panels": sft.Options(tile=(3, 6)),
    "tiles": sft.Options(tile=(3, 4), halo="recompute"),
}


class _Between(nn.Module):
    """Layers between two convolutions, with a shortcut if they keep the size."""

    def __init__(self, count: int, *layers: nn.Module, channels: int = 4, out_channels: int | None = None) -> None:
        super().__init__()
        conv = _CONVS[count - 1]
        self.before = conv(3, channels, 3, padding=1)
        self.layers = chain(*layers)
        self.after = conv(channels if out_channels is None else out_channels, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y = self.layers(x)
        z: Tensor = self.after(y + x if y.shape == x.shape else y)
        return z


def _flops(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """FLOPs of a training step, and of its forward pass alone, in plain PyTorch."""
    with FlopCounterMode(display=False) as forward:
        out = model(x.clone().requires_grad_())
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops() + backward.get_total_flops(), forward.get_total_flops()


_USES: dict[str, dict[str, Any]] = {
    "unet": {"kernel_size": 2, "stride": 2},
    "monai": {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    "dcgan": {"kernel_size": 4, "stride": 2, "padding": 1, "bias": False},
    "stride 1": {"kernel_size": 3, "padding": 1},
    "full": {"kernel_size": 4},
    "gaps": {"kernel_size": 2, "stride": 3, "padding": 1, "output_padding": 2},
    "far behind": {"kernel_size": 1, "dilation": 3, "output_padding": 2},
    "dilated": {"kernel_size": 3, "stride": 2, "dilation": 3, "output_padding": 2, "groups": 2},
    "depthwise": {"kernel_size": 4, "stride": 2, "padding": 1, "groups": 4},
    "cropped": {"kernel_size": 5, "padding": 3},
    "apart": {"kernel_size": 2, "stride": 2, "padding": 2, "output_padding": 1},
}


@pytest.mark.parametrize(("count", "tiles"), [(1, "one row"), (1, "tiles"), (2, "strips"), (2, "panels"), (2, "tiles"), (3, "panels")])
@pytest.mark.parametrize("use", _USES)
def test_every_use(use: str, count: int, tiles: str) -> None:
    model = seeded(lambda: _Between(count, _TRANSPOSED[count - 1](4, 8, **_USES[use]), out_channels=8))
    report = assert_exact(model, image(*_SHAPES[count]), options=_TILES[tiles], steps=1)
    assert_tiled(report, f"conv_transpose{count}d")


def test_kernels_that_are_not_square() -> None:
    up = (
        nn.ConvTranspose2d(4, 5, (3, 2), (2, 3), (1, 0), (1, 2)),
        nn.ConvTranspose2d(5, 4, (1, 4), (1, 2), (0, 1)),
        nn.ConvTranspose2d(4, 4, (5, 1), (2, 1), (2, 0), dilation=(2, 1)),
    )
    for tiles in _TILES.values():
        assert_exact(seeded(lambda: _Between(2, *up)), image(1, 3, 9, 8), options=tiles, steps=1)


@pytest.mark.parametrize("frozen", ["weight", "bias", "both", "input"])
@pytest.mark.parametrize("kernel", [2, 3])
def test_frozen(kernel: int, frozen: str) -> None:
    up = nn.ConvTranspose2d(4, 4, kernel, 2)
    model = seeded(lambda: _Between(2, up))
    if frozen == "input":
        model.before.requires_grad_(False)
    for name, parameter in up.named_parameters():
        parameter.requires_grad_(frozen not in (name, "both"))
    assert_exact(model, image(*_SHAPES[2]), options=_TILES["strips"], input_grad=frozen != "input")


class _OutputSize(nn.Module):
    """Down, and up again to the original size."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, 2, 1) if kernel == 3 else chain(nn.Conv2d(3, 4, 3, 1, 1), nn.MaxPool2d(2))
        self.up = nn.ConvTranspose2d(4, 3, kernel, 2, (kernel - 1) // 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.up(self.down(x), output_size=x.shape[-2:])
        return y


@pytest.mark.parametrize("size", [(14, 10), (13, 9), (14, 9)])
@pytest.mark.parametrize("tiles", _TILES)
@pytest.mark.parametrize("kernel", [2, 3])  # without and with overlapping rows
def test_output_size_of_the_caller(kernel: int, tiles: str, size: tuple[int, int]) -> None:
    report = assert_exact(seeded(lambda: _OutputSize(kernel)), image(1, 3, *size), options=_TILES[tiles], steps=1)
    assert_tiled(report, "conv_transpose2d")


class _UNet(nn.Module):
    """Two levels, transposed convolutions going up, skips by concatenation (Ronneberger et al. 2015)."""

    def __init__(self, count: int = 2, **up: Any) -> None:
        super().__init__()
        conv, transposed = _CONVS[count - 1], _TRANSPOSED[count - 1]
        self.pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[count - 1](2)
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[count - 1]
        self.down1 = chain(conv(3, 4, 3, padding=1), norm(4), nn.ReLU(inplace=True))
        self.down2, self.bottom = chain(conv(4, 6, 3, padding=1), nn.SiLU()), chain(conv(6, 8, 3, padding=1), nn.SiLU())
        self.grow2, self.grow1 = transposed(8, 6, **up), transposed(6, 4, **up)
        self.up2, self.up1 = chain(conv(12, 6, 3, padding=1), nn.ReLU()), conv(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.bottom(self.pool(b))
        b = self.up2(torch.cat([self.grow2(c), b], 1))
        y: Tensor = self.up1(torch.cat([self.grow1(b), a], 1))
        return y


@pytest.mark.parametrize("tiles", ["strips", "tiles"])
@pytest.mark.parametrize("use", ["unet", "monai", "dcgan"])
def test_unet(use: str, tiles: str) -> None:
    report = assert_exact(seeded(lambda: _UNet(2, **_USES[use]).eval()), image(2, 3, 24, 16), options=_TILES[tiles], steps=1)
    assert_tiled(report, "conv_transpose2d")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_unet_in_training(count: int) -> None:
    shape = {1: (2, 3, 40), 2: (2, 3, 24, 16), 3: (2, 3, 12, 8, 4)}[count]
    assert_exact(seeded(lambda: _UNet(count, **_USES["monai"])), image(*shape), options=_TILES["strips"], steps=1)


def _dcgan() -> nn.Module:
    """The generator of Radford et al. (2016), from a map of latent vectors of any size."""
    return chain(
        nn.ConvTranspose2d(5, 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 6, 4, 2, 1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(True),
        nn.ConvTranspose2d(6, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


@pytest.mark.parametrize("size", [(1, 1), (6, 5)])
@pytest.mark.parametrize("tiles", ["strips", "panels"])
def test_dcgan(tiles: str, size: tuple[int, int]) -> None:
    report = assert_exact(seeded(_dcgan), image(2, 5, *size), options=_TILES[tiles])
    assert_tiled(report, "conv_transpose2d")


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("use", _USES)
def test_no_product_is_computed_twice(use: str, rows: int) -> None:
    model = seeded(lambda: _Between(2, _TRANSPOSED[1](4, 4, **_USES[use])))
    x = image(2, 3, 16, 9)
    options = sft.Options(tile=(rows, None), state_every=1)
    net = sft.compile(model, tuple(x.shape), budget="4GiB", options=options)
    _, flops, plan = assert_within_budget(net, x, budget="4GiB")
    plain, forward = _flops(model, x)
    # The backward pass recomputes each strip from kept rows; nothing else is computed twice.
    assert flops == plan.flops <= plain + forward


@pytest.mark.parametrize("use", ["unet", "dcgan"])
def test_autocast(use: str) -> None:
    """Products are rounded to half precision one by one, their sums once: about the error of eager PyTorch against float64."""
    ratios = []
    for seed in range(5):  # a network may round to one side or to the other
        model = seeded(lambda: _UNet(2, **_USES[use]).eval(), seed=seed).float()
        x = image(1, 3, 32, 24).float()
        net = sft.compile(model, tuple(x.shape), budget="4GiB", options=sft.Options(tile=(8, None)))
        exact = copy.deepcopy(model).double()(x.double()).detach()
        with torch.autocast("cpu", torch.bfloat16):
            errors = [float((m(x).detach().double() - exact).norm()) for m in (net, model)]
            assert_within_budget(net, x, budget="4GiB")
        ratios.append(errors[0] / errors[1])
    assert statistics.median(ratios) <= 1.1


@st.composite
def _uses(draw: st.DrawFn) -> dict[str, Any]:
    kernel, stride, dilation = (draw(st.integers(1, most)) for most in (5, 4, 3))
    return {
        "kernel_size": kernel,
        "stride": stride,
        "dilation": dilation,
        "padding": draw(st.integers(0, 4)),
        "output_padding": draw(st.integers(0, max(stride, dilation) - 1)),
        "groups": draw(st.sampled_from([1, 2])),
        "bias": draw(st.booleans()),
    }


@at_most(8)
@given(data=st.data(), count=st.sampled_from([1, 2, 2, 3]), use=_uses())
def test_any_use(data: st.DataObject, count: int, use: dict[str, Any]) -> None:
    most = {1: 40, 2: 14, 3: 5}[count]
    extents = [data.draw(st.integers(1, most)) for _ in range(count)]
    span = use["dilation"] * (use["kernel_size"] - 1) + 1
    assume(all((n - 1) * use["stride"] - 2 * use["padding"] + span + use["output_padding"] > 0 for n in extents))
    model = seeded(lambda: _Between(count, _TRANSPOSED[count - 1](4, 6, **use), nn.SiLU(), out_channels=6))
    options = sft.Options(
        tile=(data.draw(st.integers(1, 9)), data.draw(st.none() | st.integers(1, 7))),
        halo=data.draw(st.sampled_from(["carry", "recompute"])),
        state_every=data.draw(st.none() | st.integers(1, 4)),
        batch_tile=data.draw(st.none() | st.just(1)),
    )
    report = assert_exact(model, image(data.draw(st.integers(1, 2)), 3, *extents), options=options, steps=1)
    assert_tiled(report, f"conv_transpose{count}d")
