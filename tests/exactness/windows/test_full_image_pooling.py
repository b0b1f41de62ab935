"""Pooling with a window of the image's size, ``F.avg_pool2d(x, x.shape[2:])``: global pooling in older networks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: F.avg_pool2d(x, x.size()[2:]),
    "mean, any stride": lambda x: F.avg_pool2d(x, x.size()[2:], 3, ceil_mode=True),
    "mean of channels last": lambda x: F.avg_pool2d(x.permute(0, 2, 3, 1).exp().permute(0, 3, 1, 2), x.shape[2:]),
    "largest": lambda x: F.max_pool2d(x, (x.size(2), x.size(3)), stride=(x.size(2), x.size(3))),
    "another divisor": lambda x: F.avg_pool2d(x, x.shape[2:], divisor_override=7),
    "with its border": lambda x: F.avg_pool2d(x, (x.shape[2] + 2, x.shape[3] + 2), padding=1),
    "norm": lambda x: F.lp_pool2d(x, 2, (x.size(2), x.size(3))),
    "convolution": lambda x: F.conv2d(x, torch.full((4, 1, *x.shape[2:]), 0.1, dtype=x.dtype), groups=4),
    "interpolation": lambda x: F.interpolate(x, size=(1, 1), mode="bilinear"),
    "its middle": lambda x: F.interpolate(x, size=1),
}
#: Poolings that are sums over the image: no strip waits for all others.
_STREAMED = ("mean", "mean, any stride", "mean of channels last", "largest")


class _Gated(nn.Module):
    """A gate for each channel, as of Hu et al., CVPR 2018."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.first = function, nn.Conv2d(3, 4, 3, padding=1)
        self.mix, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.last(x * self.mix(self.function(x)).sigmoid())
        return out


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_gates_of_single_pixels_are_exact(name: str) -> None:
    model = seeded(lambda: _Gated(_FUNCTIONS[name]))
    assert_exact(model, image(2, 3, 13, 10), options=sft.Options(tile=(4, None)))
    net = sft.compile(model, (1, 3, None, None), options=sft.Options(tile=(4, 6)))
    for size in ((9, 12), (13, 10)):
        x = image(1, 3, *size)
        torch.testing.assert_close(net(x), model(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", _STREAMED)
def test_pools_of_the_whole_image_are_global_values(name: str) -> None:
    model = seeded(lambda: _Gated(_FUNCTIONS[name]))
    plan = sft.plan(model, (1, 3, 64, 32), budget="1GiB", options=sft.Options(tile=(4, None)))
    first = plan.segments[0]
    assert first.mode == "tiled"
    assert any("pool" in node for node in first.nodes)
    assert first.state_bytes == 0


def test_signals_and_volumes() -> None:
    class Signal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv1d(2, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return x * F.avg_pool1d(x, x.shape[2]) + F.max_pool1d(x, x.shape[2:])

    class Volume(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv3d(2, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return x * F.avg_pool3d(x, x.shape[2:]) + F.max_pool3d(x, x.shape[2:])

    assert_exact(seeded(Signal), image(2, 2, 17), options=sft.Options(tile=(4, None)))
    assert_exact(seeded(Volume), image(1, 2, 9, 5, 6), options=sft.Options(tile=(3, None)))
