"""Convolutions that take channels as samples: blurs and gradients of each channel, filters of pairs of channels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded


class _Filtered(nn.Module):
    def __init__(self, function: Callable[[_Filtered, Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.function = nn.Conv2d(3, 4, 3, padding=1), function
        self.of_one: nn.Parameter = nn.Parameter(torch.randn(2, 1, 3, 3))
        self.of_two: nn.Parameter = nn.Parameter(torch.randn(3, 2, 3, 3))
        self.bias: nn.Parameter = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.before(x))


def _blur(model: _Filtered, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return F.conv2d(x.reshape(n * c, 1, h, w), model.of_one[:1], padding=1).view(n, c, h, w) * 2


def _magnitude(model: _Filtered, x: Tensor) -> Tensor:
    """The length of a gradient, as kornia computes it: two filters for each channel, on a replicated border."""
    n, c, h, w = x.shape
    gradient = F.conv2d(F.pad(x.view(n * c, 1, h, w), (1, 1, 1, 1), "replicate"), model.of_one, model.bias).view(n, c, 2, h, w)
    return (gradient.square().sum(2) + 1e-3).sqrt()


def _pairs(model: _Filtered, x: Tensor) -> Tensor:
    n, _, h, w = x.shape
    return F.conv2d(x.view(n * 2, 2, h, w), model.of_two, padding=1, stride=2).view(n, 6, -1, w // 2).tanh()


def _flattened(model: _Filtered, x: Tensor) -> Tensor:
    filtered: Tensor = F.conv2d(x.flatten(0, 1).unsqueeze(1), model.of_one, padding="same").unflatten(0, x.shape[:2])
    return filtered.flatten(1, 2) * 3


def _groups(model: _Filtered, x: Tensor) -> Tensor:
    n, _, h, w = x.shape
    return F.conv2d(x.view(n * 2, 2, h, w), model.of_one, model.bias, padding=1, groups=2).relu().view(n, 4, h, w)


def _interleaved(model: _Filtered, x: Tensor) -> Tensor:
    n, _, h, w = x.shape
    pairs = x.view(n, 2, 2, h, w).transpose(1, 2).reshape(n * 2, 2, h, w)
    return F.conv2d(pairs, model.of_two, dilation=2).view(n, 2, 3, h - 4, w - 4).sum(1)


def _twice(model: _Filtered, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    y = F.conv2d(x.reshape(n * c, 1, h, w), model.of_one, padding=1).relu()
    return F.conv2d(y, model.of_two, padding=1).view(n, c, 3, h, w).amax(2)


def _made(model: _Filtered, x: Tensor) -> Tensor:
    """A filter that is computed from the image."""
    n, c, h, w = x.shape
    return F.conv2d(x.reshape(n * c, 1, h, w), model.of_one[:1] * x.mean(), padding=1).view(n, c, h, w)


_FUNCTIONS = (_blur, _magnitude, _pairs, _flattened, _groups, _interleaved, _twice, _made)


@pytest.mark.parametrize("function", _FUNCTIONS)
def test_filters_of_channels_stream(function: Callable[[_Filtered, Tensor], Tensor]) -> None:
    model = seeded(lambda: _Filtered(function))
    assert sft.check(model, (2, 3, 24, 20)).whole_reasons == ()
    assert_exact(model, image(2, 3, 13, 10), options=sft.Options(tile=(4, 3), batch_tile=1, state_every=2), steps=1)
    net = sft.compile(model, (None, 3, None, None), options=sft.Options(tile=(5, None)))
    x = image(3, 3, 11, 12)
    torch.testing.assert_close(net(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("axes", "convolve"), [(1, F.conv1d), (3, F.conv3d)])
def test_signals_and_volumes(axes: int, convolve: Callable[..., Tensor]) -> None:
    class Blurred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1, 1, *[3] * axes))

        def forward(self, x: Tensor) -> Tensor:
            return convolve(x.flatten(0, 1)[:, None], self.weight, padding=1).view(x.shape).sin()

    assert_exact(seeded(Blurred), image(2, 3, *(9, 5, 4)[:axes]), options=sft.Options(tile=(2, None)), steps=1)


@pytest.mark.parametrize(("function", "per_pixel"), [(_blur, 4 * 9), (_groups, 4 * 9), (_twice, 8 * 9 + 12 * 2 * 9)])
def test_no_multiplication_more_than_eager(function: Callable[[_Filtered, Tensor], Tensor], per_pixel: int) -> None:
    """In the forward pass; torch counts the weight gradient of groups as that of all pairs of channels."""

    def flops(function: Callable[[_Filtered, Tensor], Tensor]) -> int:
        with torch.no_grad():
            return sft.plan(seeded(lambda: _Filtered(function)), (2, 3, 24, 20), options=sft.Options(tile=(5, None))).flops

    assert flops(function) == flops(lambda _, x: x * 2) + 2 * per_pixel * 2 * 24 * 20
