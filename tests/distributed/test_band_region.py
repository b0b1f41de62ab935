"""One image over several ranks: outputs, gradients and running statistics equal those of eager PyTorch on full images, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sft
from sft.api import memory_limits
from sft.common.free_memory import FreeMemory
from sft.distributed import all_reduce as sums
from tests.helpers.band_checks import check_bands, mesh_of
from tests.helpers.models import Branches, ConvNet, Residual, image, seeded
from tests.helpers.ranks import Ranks

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")


class Vgg(nn.Module):
    """Convolutions and pools, and a classifier after a global pool."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        widths = (3, 4, 6, 8)
        self.body = nn.Sequential()
        for before, after in pairwise(widths):
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


class ResNet18(nn.Module):
    """The network of He et al. (2016), narrow."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential()
        before = width
        for level in range(4):
            for index in range(2):
                after = width + 2 * level
                self.blocks.append(Block(before, after, 2 if level and not index else 1))
                before = after
        self.head = nn.Linear(before, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.flatten(self.blocks(self.stem(x)).mean((2, 3), keepdim=True), 1))
        return y


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        self.shortcut: nn.Module = nn.Identity()
        if before != after or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


class UNet(nn.Module):
    """Two levels with norms over the image, linear upsampling to the skip's size, dropout at the bottom, and an image as output."""

    def __init__(self, axes: int = 2) -> None:
        super().__init__()
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if axes == 2 else (nn.Conv3d, nn.InstanceNorm3d)
        self.mode = "bilinear" if axes == 2 else "trilinear"
        self.down = nn.ModuleList(nn.Sequential(conv(a, b, 3, padding=1), norm(b), nn.ReLU()) for a, b in ((3, 4), (4, 5), (5, 6)))
        self.drop = nn.Dropout(0.3)
        self.pool = nn.MaxPool2d(2) if axes == 2 else nn.MaxPool3d(2)
        self.up = nn.ModuleList([conv(11, 4, 3, padding=1), conv(8, 2, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for index, level in enumerate(self.down):
            x = level(x if not index else self.pool(x))
            skips.append(x)
        x = self.drop(skips.pop())
        for layer in self.up:
            skip = skips.pop()
            x = nn.functional.interpolate(x, size=skip.shape[2:], mode=self.mode, align_corners=False)
            x = layer(torch.cat([x, skip], 1))
        return x


class UNet3d(UNet):
    def __init__(self) -> None:
        super().__init__(3)


class Gated(nn.Module):
    """Squeeze-and-excite, a group norm, a global maximum, and a softmax over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)
        self.score = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        x = self.norm(x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True))))
        weights = torch.softmax(self.score(x).flatten(2), -1).view(x.shape[0], 1, *x.shape[2:])
        return (x * weights).sum((2, 3)), torch.amax(x, (2, 3))


class Noisy(nn.Module):
    """Noise by position, dropout after it, and an image of one column next to the full one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = nn.functional.dropout(x + torch.randn_like(x), 0.3) * torch.rand_like(x[:, :1])
        out: Tensor = self.last(x * x[..., :1] / (x.shape[2] / 7))
        return out


class Mixed(nn.Module):
    """A value read by strips and by untiled operators, which give its gradient another memory layout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.stem(x)
        flow = torch.tanh(self.last(y)).permute(0, 2, 3, 1)
        warped = nn.functional.grid_sample(y, flow, align_corners=False)
        return flow, y.cumsum(2), torch.einsum("nchw,nchv->nhwv", y, y), warped


class Spread(nn.Module):
    """Pixels and vectors that are broadcast over the image, transformed, and combined with it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pools = nn.Conv2d(3, 4, 3, padding=1), nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y, size = self.stem(x), x.shape[2:]
        pooled = (pool(nn.functional.adaptive_avg_pool2d(y, cells)) for pool, cells in zip(self.pools, (1, 2, 3), strict=True))
        y = y + sum(nn.functional.interpolate(each, size, mode="bilinear") for each in pooled)
        mean = y.mean((2, 3), keepdim=True).expand_as(y)
        out: Tensor = nn.functional.gelu(mean) * y + torch.relu(y.amax((2, 3))[:, :, None, None].expand(-1, -1, *size))
        return out


class Small(nn.Module):
    """A norm in training, a stride, an overlapping pool, dropout, an image and a vector as outputs."""

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 5, stride=2, padding=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(p))
        self.body = nn.Sequential(nn.MaxPool2d(3, 2, 0), nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5), nn.SiLU())
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(self.stem(x))
        return x, self.head(x.mean((2, 3)))


class Deep(nn.Sequential):
    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, after in ((3, 4), (4, 5), (5, 4)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.AvgPool2d(2, ceil_mode=True)]
        super().__init__(*layers[:-1], nn.Conv2d(4, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1))


class NormedVgg(Vgg):
    def __init__(self) -> None:
        super().__init__(norm=True)


class NormedDense(Dense):
    def __init__(self) -> None:
        super().__init__(norm=True)


_TILED = sft.Options(tile=(4, None))
_CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "vgg": (Vgg, (1, 3, 40, 16), {}),
    "dense": (Dense, (2, 3, 37, 20), {}),
    "pooled": (ConvNet, (2, 3, 33, 12), {}),
    "residual": (Residual, (1, 3, 45, 20), {}),
    "branches": (Branches, (1, 3, 19, 11), {"output": "band"}),
    "vgg-norm": (NormedVgg, (1, 3, 40, 16), {}),
    "dense-norm": (NormedDense, (2, 3, 37, 20), {}),
    "unet": (UNet, (1, 3, 35, 13), {}),
    "unet-bands": (UNet, (2, 3, 35, 13), {"output": "band"}),
    "unet3d": (UNet3d, (1, 3, 18, 9, 10), {"output": "band"}),
    "gated": (Gated, (2, 3, 21, 10), {}),
    "noisy": (Noisy, (2, 3, 21, 10), {}),
    "mixed": (Mixed, (1, 3, 19, 22), {}),
    "spread": (Spread, (1, 3, 19, 22), {}),
    "spread-batch": (Spread, (2, 3, 19, 10), {"output": "band"}),
    "mixed-batch": (Mixed, (2, 3, 19, 12), {}),
}


@pytest.mark.parametrize("name", _CASES)
def test_two_bands_equal_eager(pair: Ranks, name: str) -> None:
    make, shape, extra = _CASES[name]
    pair.run(partial(check_bands, **extra), 1, make, shape, _TILED)


def _in_small_windows(rank: int) -> None:
    """Check that gradients of parameters in many windows have the same bits in each step, for any windows, and on both ranks."""
    mesh, x, gradients = mesh_of(1, 2), image(2, 3, 40, 16), []
    for window_bytes in (sums.WINDOW_BYTES, 512, 512):
        with patch.object(sums, "WINDOW_BYTES", window_bytes):
            net: Any = sft.compile(seeded(NormedVgg).train(), tuple(x.shape), mesh=mesh, options=_TILED)
            net(x).square().sum().backward()
        assert net._sft_engine.rank_context.traffic.overlapped_sent_bytes["parameters"] > 0
        gradients.append([parameter.grad for parameter in net.parameters()])
    for grads in zip(*gradients, strict=True):
        both = [torch.empty_like(grads[0]) for _ in range(2)]
        dist.all_gather(both, grads[0])
        assert all(torch.equal(grads[0], other) for other in (*grads, *both))
    with patch.object(sums, "WINDOW_BYTES", 512):
        check_bands(rank, 1, NormedVgg, (2, 3, 40, 16), _TILED, steps=1)


def test_sums_of_gradients_in_many_windows(pair: Ranks) -> None:
    pair.run(_in_small_windows)


def test_resnet18_with_norms_in_training(pair: Ranks) -> None:
    pair.run(partial(check_bands, steps=1), 1, ResNet18, (1, 3, 67, 32), sft.Options(tile=(16, None)))


@pytest.mark.parametrize(("num_replicas", "synchronized"), [(1, False), (2, False), (2, True), (4, False)])
def test_every_split_of_four_ranks(four: Ranks, num_replicas: int, synchronized: bool) -> None:
    # 21 rows, 11 after the stem, 5 after the pool: uneven bands, some of which own one row of the last image.
    case = partial(check_bands, num_ranks=4, synchronized=synchronized)
    # A joint batch in eager PyTorch draws other masks than separate batches.
    four.run(case, num_replicas, partial(Small, 0.0) if synchronized else Small, (1, 3, 21, 9), sft.Options(tile=(2, None)))


def test_bands_that_own_no_row_of_small_images(four: Ranks) -> None:
    # 9 rows become 5, 2 and 1: three of four bands own no row of the last image, and wait.
    four.run(partial(check_bands, num_ranks=4, steps=1), 1, Deep, (2, 3, 9, 8), sft.Options(tile=(2, None)))


def _automatic_budget(rank: int, free_gib: tuple[float, ...]) -> tuple[int, str, bool]:
    free = FreeMemory(free_bytes=int(free_gib[rank] * 2**30), total_bytes=2**34)
    with patch.object(memory_limits, "free_host_memory", lambda: free):
        net: Any = sft.compile(seeded(lambda: Vgg(norm=False)), (1, 3, 32, 24), mesh=mesh_of(1, 2))
    net(image(1, 3, 32, 24))
    return net.plan.budget_bytes, net.plan.budget_note, net.plan.mesh is not None


def test_ranks_agree_on_an_automatic_budget(pair: Ranks) -> None:
    """The smallest free memory of all ranks counts, so that all of them make the same plan."""
    results = pair.run(_automatic_budget, (12.5, 10.8))
    assert [budget for budget, _, _ in results] == [sft.parse_bytes("9.5GiB")] * 2
    assert results[0][1] == "budget auto: 9.50 GiB, the least of 2 ranks" and "of 10.80 GiB free" in results[1][1]
    assert all(is_split for _, _, is_split in results)
