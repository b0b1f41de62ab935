"""Noise inside compiled models: numbers by position, for any strips, with the distributions of torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sft
from sft.kernels.rng.dropout import Distribution, positional_noise, write_noise
from sft.kernels.rng.mask_tile import MaskTile
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_Function = Callable[["_Noisy", Tensor], Tensor]
_IN_STRIPS: dict[str, _Function] = {
    "added": lambda m, x: x + 0.3 * torch.randn_like(x),
    "scaled": lambda m, x: x * (1 + torch.rand_like(x)),
    "one for all channels": lambda m, x: x + m.weight * torch.randn_like(x[:, :1]),  # as in StyleGAN
    "reparametrised": lambda m, x: x[:, :2] + torch.exp(0.5 * x[:, 2:]) * torch.randn_like(x[:, 2:]),
    "written": lambda m, x: x + torch.empty_like(x).normal_(0.1, 0.2) + torch.zeros_like(x).uniform_(-1, 2),
    "Gumbel softmax": lambda m, x: (x - torch.empty_like(x).exponential_().log()).softmax(1),
    "exponential": lambda m, x: x * torch.empty_like(x).exponential_(2.0),
    "beside masks": lambda m, x: F.dropout(F.dropout(x, 0.3) + torch.randn_like(x), 0.5) + torch.rand_like(x),
}
_OF_A_SHAPE: dict[str, _Function] = {
    "for each sample": lambda m, x: x * torch.randn_like(x.mean((2, 3), keepdim=True)),
    "of a vector": lambda m, x: x.mean((2, 3)) + torch.randn_like(x.mean((2, 3))),
}


class _Noisy(nn.Module):
    def __init__(self, function: _Function) -> None:
        super().__init__()
        self.function, self.first = function, nn.Conv2d(3, 4, 3, padding=1)
        self.weight: nn.Parameter = nn.Parameter(torch.randn(1, 4, 1, 1))
        self.last = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(self, self.first(x))
        return self.last(y[:, :2]) if y.dim() == 4 else y


@pytest.mark.parametrize(
    "options",
    [
        sft.Options(strategy="none"),
        sft.Options(tile=(5, None), state_every=2),
        sft.Options(tile=(7, 6), batch_tile=1),
        sft.Options(tile=(8, 9), halo="recompute"),
    ],
)
@pytest.mark.parametrize("name", _IN_STRIPS)
def test_noise_is_the_same_at_every_tiling(name: str, options: sft.Options) -> None:
    assert_exact(seeded(lambda: _Noisy(_IN_STRIPS[name])).train(), image(2, 3, 21, 17), options=options)


@pytest.mark.parametrize("name", _OF_A_SHAPE)
def test_noise_on_whole_tensors(name: str) -> None:
    model = seeded(lambda: _Noisy(_OF_A_SHAPE[name])).train()
    assert_exact(model, image(2, 3, 21, 17))
    assert_exact(model, image(3, 3, 21, 17), options=sft.Options(tile=(5, None), batch_tile=1), steps=1)


@pytest.mark.parametrize("inplace", [False, True])
def test_randomized_leaky_relu_is_noise(inplace: bool) -> None:
    """Its slopes are uniform numbers, equal to those of separate operators."""

    def by_hand(m: _Noisy, x: Tensor) -> Tensor:
        return x * torch.where(x <= 0, torch.empty_like(x).uniform_(0.1, 0.4), 1.0)

    values = []
    for function in (lambda m, x: F.rrelu(x, 0.1, 0.4, True, inplace), by_hand):
        model = seeded(lambda: _Noisy(function)).train()  # noqa: B023
        net = sft.compile(model, (2, 3, 20, 17), options=sft.Options(tile=(6, 7)))
        assert not sft.check(model, (2, 3, 20, 17)).whole_reasons
        torch.manual_seed(4)
        y = net(image(2, 3, 20, 17))
        y.square().sum().backward()
        values.append([y.detach(), *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)])
    assert all(map(torch.equal, *values))


@pytest.mark.parametrize("name", _IN_STRIPS)
def test_noise_streams(name: str) -> None:
    report = sft.check(_Noisy(_IN_STRIPS[name]).train(), (2, 3, 24, 16))
    assert report.ok, report
    assert not report.whole_reasons, report


def _block(y: Tensor, drawn: Tensor) -> Tensor:
    """DropBlock (Ghiasi et al., 2018) with uniform numbers for each pixel."""
    keep = 1 - F.max_pool2d((drawn < 0.05).to(y.dtype), 3, 1, 1)
    return y * keep * keep.numel() / keep.sum()


#: Draws for an image without channels, and for the same image with one.
_WITHOUT_CHANNELS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "DropBlock": (lambda y: _block(y, torch.rand_like(y[:, 0])[:, None]), lambda y: _block(y, torch.rand_like(y[:, :1]))),
    "of a mean": (lambda y: y + torch.randn_like(y.mean(1)).unsqueeze(1), lambda y: y + torch.randn_like(y.mean(1, keepdim=True))),
    "dropout": (lambda y: y + F.dropout(y[:, 0], 0.3).unsqueeze(1), lambda y: y + F.dropout(y[:, :1], 0.3)),
    "mask": (
        lambda y: y * torch.empty_like(y[:, 0]).bernoulli_(0.7).unsqueeze(1),
        lambda y: y * torch.empty_like(y[:, :1]).bernoulli_(0.7),
    ),
}


@pytest.mark.parametrize("tile", [None, (5, None), (6, 7)])
@pytest.mark.parametrize("name", _WITHOUT_CHANNELS)
def test_an_image_without_channels_counts_as_one_with_one(name: str, tile: tuple[int, int | None] | None) -> None:
    class Drawing(nn.Module):
        def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.function, self.conv = function, nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.function(self.conv(x))

    results = []
    for function in _WITHOUT_CHANNELS[name]:
        model = seeded(lambda: Drawing(function)).double()  # noqa: B023
        net = sft.compile(model, (2, 3, 20, 17), options=sft.Options(tile=tile))
        torch.manual_seed(4)
        y = net(image(2, 3, 20, 17))
        y.square().sum().backward()
        results.append((y.detach(), model.conv.weight.grad))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("tile", [(5, None), (6, 7)])
def test_draws_for_several_dimensions_of_channels_run_whole(tile: tuple[int, int | None]) -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            z: Tensor = y.view(2, 2, 2, *y.shape[2:])
            return (z + torch.randn_like(z)).flatten(1, 2)

    nets = [sft.compile(seeded(Stacked), (2, 3, 20, 17), options=sft.Options(tile=net_tile)) for net_tile in (None, tile)]
    outputs = []
    for net in nets:
        torch.manual_seed(4)
        outputs.append(net(image(2, 3, 20, 17)))
    torch.testing.assert_close(outputs[0], outputs[1])
    assert any("several dimensions of channels" in reason for reason in sft.check(seeded(Stacked), (2, 3, 20, 17)).whole_reasons)


def test_noise_of_signals_and_volumes() -> None:
    class Noise(nn.Module):
        def __init__(self, conv: nn.Module) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x)
            return y + torch.randn_like(y)

    assert_exact(seeded(lambda: Noise(nn.Conv1d(3, 5, 3))).train(), image(2, 3, 40), options=sft.Options(tile=(7, None)))
    assert_exact(seeded(lambda: Noise(nn.Conv3d(2, 3, 3))).train(), image(1, 2, 9, 8, 7), options=sft.Options(tile=(3, 4)))


def test_each_call_draws_anew_and_a_seed_draws_the_same() -> None:
    net, x = sft.compile(_Noisy(_IN_STRIPS["added"]), (1, 3, 16, 16)), torch.zeros(1, 3, 16, 16)
    torch.manual_seed(3)
    first, second = net(x), net(x)
    torch.manual_seed(3)
    assert torch.equal(net(x), first)
    assert not torch.equal(first, second)


def test_noise_that_follows_the_image_without_its_value_is_refused() -> None:
    class Free(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(x.shape[0], 1, *x.shape[2:])

    with pytest.raises(sft.UnsupportedError, match=r"noise of shape .* follows the image's size; draw it with torch.randn_like\(image\)"):
        sft.compile(Free(), (1, 3, 16, 16))
    fixed = sft.compile(nn.Sequential(_OfAShape(), nn.Conv2d(3, 2, 3)), (1, 3, 16, 16))
    assert not torch.equal(fixed(torch.zeros(1, 3, 16, 16)), fixed(torch.zeros(1, 3, 16, 16)))


class _OfAShape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(1, 3, 1, 1)


_MOMENTS: dict[Distribution, tuple[float, float, float]] = {
    "uniform": (1 / 2, 1 / 12, 1 / 80),  # mean, variance, fourth central moment
    "normal": (0.0, 1.0, 3.0),
    "exponential": (1.0, 1.0, 9.0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("distribution", _MOMENTS)
def test_numbers_are_of_their_distribution(distribution: Distribution, dtype: torch.dtype) -> None:
    noise = positional_noise(torch.empty(2, 6, 128, 96, dtype=dtype), distribution, site=1, seed=5)
    numbers, (mean, variance, fourth) = noise.double(), _MOMENTS[distribution]
    close = 5 / math.sqrt(numbers.numel())  # deviations of the mean
    rounding = 2 * torch.finfo(dtype).eps
    assert abs(numbers.mean() - mean) < close * math.sqrt(variance) + rounding
    assert abs((numbers - mean).square().mean() - variance) < close * math.sqrt(fourth - variance**2) + rounding
    assert numbers.isfinite().all()
    if distribution == "uniform":
        assert 0 <= numbers.min() <= numbers.max() < 1
    elif distribution == "exponential":
        assert numbers.min() > 0
    else:
        assert numbers.min() < -3.5 < 3.5 < numbers.max()
    # Neighbours along each axis, and the two numbers of one call, are uncorrelated.
    centred = (numbers - mean) / math.sqrt(variance)
    for axis in (1, 2, 3):
        length = centred.shape[axis] - 1
        assert abs((centred.narrow(axis, 0, length) * centred.narrow(axis, 1, length)).mean()) < close + rounding


@pytest.mark.parametrize("distribution", _MOMENTS)
def test_a_tile_is_a_part_of_the_whole(distribution: Distribution) -> None:
    whole = positional_noise(torch.empty(2, 5, 9, 11, dtype=torch.float64), distribution, site=2, seed=-1)
    tile = MaskTile(shape=(1, 5, 4, 6), extents=(2, 5, 9, 11), origin=(1, 3, 5), seed=-1, site=2, draw=0, p=0.0, kind="element")
    values = torch.empty(tile.shape, dtype=torch.float64)
    write_noise(tile, distribution, values)
    torch.testing.assert_close(values, whole[1:, :, 3:7, 5:], rtol=1e-14, atol=1e-15)


def test_unknown_distributions_and_integers_are_refused() -> None:
    with pytest.raises(sft.InputError, match="no 'cauchy' noise"):
        positional_noise(torch.empty(1, 2, 3), "cauchy", site=0, seed=0)  # type: ignore[arg-type]
    with pytest.raises(sft.InputError, match="int64"):
        positional_noise(torch.empty(1, 2, 3, dtype=torch.int64), "normal", site=0, seed=0)
