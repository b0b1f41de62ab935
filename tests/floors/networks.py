"""Networks of the tables of floors: those that need no other package, and the zoo."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models import darknet19, resnet18, unet, vgg16
from tests.helpers.random_networks import KINDS, Wild, WildNet, Wish

__all__ = ["SETS", "SMALL", "Network", "zoo_networks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network of a table.

    Attributes:
        make: builds it.
        shape: shape of its input.
        other_shape: shape for a network that refuses the first one; ``None`` if there is none.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    other_shape: tuple[int, ...] | None = None

    def built(self) -> nn.Module:
        """The network, of one initialization; torch's generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().float()


class _Block(nn.Module):
    """A function of an image between convolutions, with a skip past it."""

    def __init__(self, function: Callable[[Tensor], Tensor], *, axes: int = 2, channels: int = 16) -> None:
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        self.function, self.stem = function, convolution(3, channels, 3, padding=1)
        self.last = convolution(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        out: Tensor = y + self.last(self.function(y))
        return out.relu()


class _HighRes(nn.Module):
    """Small HighRes3DNet (Li et al., 2017): dilated residual blocks with shortcuts that are padded by channels of zeros."""

    def __init__(self) -> None:
        super().__init__()
        widths = [1, 8, 8, 16, 16, 32]
        pairs = zip(widths[:-1], widths[1:], (1, 1, 2, 2, 4), strict=True)
        self.layers = nn.ModuleList(nn.Conv3d(a, b, 3, padding=d, dilation=d) for a, b, d in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x.relu())
            added = (y.shape[1] - x.shape[1]) // 2
            x = y + F.pad(x, (0, 0, 0, 0, 0, 0, added, y.shape[1] - x.shape[1] - added, 0, 0))
        return x


class _Projection(nn.Module):
    """Projection of a volume to a plane."""

    def __init__(self) -> None:
        super().__init__()
        self.volume, self.plane = nn.Conv3d(1, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.plane(self.volume(x).relu().mean(2))
        return out


class _Gated(nn.Module):
    """A residual block with norms over the image and a gate from its mean."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm, self.gate = nn.GroupNorm(4, channels), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.norm(self.first(x)).relu())
        out: Tensor = (x + y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid()).relu()
        return out


def _shifted(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :4, :-1] = x[:, :4, 1:]
    out[:, 4:, 1:] = x[:, 4:, :-1]
    return out


def _bordered(x: Tensor) -> Tensor:
    out = x * 1.5
    out[:, :, :1] = 0
    out[..., -1:] = 0
    return out


def _written(x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape)
    out[:, :8] = x[:, 8:]
    return out


def _wild(seed: int) -> nn.Module:
    """A random network of the fuzzer."""
    draw = random.Random(seed)
    wishes = [Wish(draw.choice(KINDS), draw.choice((0, 0, 0, 1, 2, 4)), tuple(draw.randrange(60) for _ in range(6))) for _ in range(8)]
    return WildNet(Wild(shape=(1, 3, 32, 32), wishes=(Wish("conv", 0, (2, 5, 1, 3, 0, 0)), *wishes), head=seed % 2 == 0))


_IMAGE, _VOLUME = (1, 3, 512, 512), (1, 1, 64, 96, 96)
#: Networks of `make test`.
SMALL: dict[str, Network] = {
    "examples/resnet18": Network(make=lambda: resnet18(10), shape=_IMAGE),
    "examples/vgg16": Network(make=lambda: vgg16(10), shape=_IMAGE),
    "examples/unet": Network(make=lambda: unet(2, levels=4, width=16), shape=_IMAGE),
    "examples/darknet19": Network(make=lambda: darknet19(10), shape=_IMAGE),
    "padding/highres": Network(make=_HighRes, shape=_VOLUME),
    "padding/channels": Network(make=lambda: _Block(lambda x: F.pad(x[:, :8], (0, 0, 0, 0, 4, 4, 0, 0))), shape=_IMAGE),
    "padding/written": Network(make=lambda: _Block(_written), shape=_IMAGE),
    "axes/rolled": Network(make=lambda: _Block(lambda x: x.roll((4, -4), (2, 3))), shape=_IMAGE),
    "axes/pooled rows and columns": Network(
        make=lambda: _Block(lambda x: x * x.mean(2, keepdim=True).sigmoid() * x.amax(3, keepdim=True).sigmoid()), shape=_IMAGE
    ),
    "axes/shifted": Network(make=lambda: _Block(_shifted), shape=_IMAGE),
    "axes/bordered": Network(make=lambda: _Block(_bordered), shape=_IMAGE),
    "axes/joined": Network(make=lambda: _Block(lambda x: torch.cat([x[:, :, 8:], x[:, :, :8].sin()], 2)), shape=_IMAGE),
    "gates/squeeze and excite": Network(make=lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), _Gated(), _Gated()), shape=_IMAGE),
    "axes/projected volume": Network(make=_Projection, shape=_VOLUME),
    "padding/indexed": Network(make=lambda: _Block(lambda x: x[:, list(range(15, -1, -1))]), shape=_IMAGE),
    **{f"random/{seed}": Network(make=partial(_wild, seed), shape=_IMAGE) for seed in range(6)},
}

#: Multiples of a zoo case's extents, by its number of axes, and the largest resulting extent.
_FACTORS, _LARGEST = {1: 16, 2: 8, 3: 4}, 1024


def zoo_networks() -> dict[str, Network]:
    """The cases of the zoo, at several times the size on which they are compared with eager PyTorch."""
    from tests.zoo.models import CASES
    from tests.zoo.warm import warm_up

    warm_up()  # imports of the packages, also of a torchvision for another torch
    networks = {}
    for case in CASES:
        factor = _FACTORS[len(case.shape) - 2] if len(case.shape) < 5 or case.shape[1] == 1 else 1
        extents = tuple(min(factor * extent, max(extent, _LARGEST)) for extent in case.shape[2:])
        networks[case.label] = Network(make=case.make, shape=(*case.shape[:2], *extents), other_shape=case.shape)
    return networks


SETS: dict[str, Callable[[], dict[str, Network]]] = {"small": lambda: SMALL, "zoo": zoo_networks}
