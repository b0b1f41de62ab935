"""One image over several ranks: outputs, gradients and running statistics equal eager PyTorch's on whole images, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sft

from .helpers.banded import check_bands
from .helpers.models import Branches, ConvNet, Residual, TinyUNet, chain
from .helpers.ranks import Ranks, ranks_of

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder: Path = tmp_path_factory.mktemp("pair")
    with ranks_of(2, folder) as ranks:
        yield ranks


class Vgg(nn.Module):
    """Convolutions and pools, and a classifier behind a global pool."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        widths = (3, 4, 6, 8)
        self.body = nn.Sequential()
        for before, after in zip(widths, widths[1:], strict=False):
            self.body.extend([nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after) if norm else nn.Identity(), nn.ReLU()])
            self.body.extend([nn.Conv2d(after, after, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x).mean((2, 3)))
        return y


class Dense(nn.Module):
    """A dense block, a transition, another block."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 7, stride=2, padding=3)
        self.layers = nn.ModuleList()
        channels = 4
        for index in range(4):
            self.layers.append(
                nn.Sequential(nn.BatchNorm2d(channels) if norm else nn.Identity(), nn.ReLU(), nn.Conv2d(channels, 3, 3, padding=1))
            )
            channels += 3
            if index == 1:
                self.transition = nn.Sequential(nn.Conv2d(channels, 5, 1), nn.AvgPool2d(2))
                channels = 5
        self.head = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, layer in enumerate(self.layers):
            x = torch.cat([x, layer(x)], 1)
            if index == 1:
                x = self.transition(x)
        y: Tensor = self.head(x.mean((2, 3)))
        return y


_CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vgg": (Vgg, (1, 3, 40, 16)),
    "dense": (Dense, (2, 3, 37, 20)),
    "pooled": (ConvNet, (2, 3, 33, 12)),
    "residual": (Residual, (1, 3, 45, 20)),
    "unet": (TinyUNet, (1, 3, 32, 12)),
    "branches": (Branches, (1, 3, 19, 11)),
}


@pytest.mark.parametrize("name", _CASES)
def test_two_bands_equal_eager(pair: Ranks, name: str) -> None:
    make, shape = _CASES[name]
    pair.run(check_bands, 1, make, shape, sft.Options(tile=(4, None)))


_ = chain
