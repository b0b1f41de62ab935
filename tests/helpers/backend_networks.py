"""Small networks with operators for each family of kernels, and their training step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["relative_l2", "seeded_network", "training_step"]


class _Residual(nn.Module):
    """Two basic blocks: one that adds its input, one with stride and a projection."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False), norm(8)
        self.middle, self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8)
        self.down, self.third = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), norm(16)
        self.short = nn.Conv2d(8, 16, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(self.stem(x)))
        x = F.relu(x + self.second(self.middle(x)))
        return F.relu(self.third(self.down(x)) + self.short(x))


class _VolumeResidual(nn.Module):
    """A block on volumes that adds its input."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.norm = nn.Conv3d(2, 4, 1), nn.Conv3d(4, 4, 3, padding=1), nn.BatchNorm3d(4)
        self.norm.running_mean, self.norm.running_var = torch.tensor([0.5, -1.0, 0.0, 2.0]), torch.tensor([0.5, 1.0, 2.0, 3.0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return F.relu(x + self.norm(self.middle(x)))


class _Branches(nn.Module):
    """Sum of two convolutions: one kernel computes the sum and the ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(F.relu(self.left(x) + self.right(x)))
        return y


class _UNet(nn.Module):
    """One level: max pool down, bilinear interpolation up, the skip concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.join, self.leave = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.enter(x))
        deep = F.relu(self.deep(F.max_pool2d(skip, 2)))
        up = F.interpolate(deep, scale_factor=2.0, mode="bilinear", align_corners=False)
        y: Tensor = self.leave(F.relu(self.join(torch.cat([skip, up], 1))))
        return y


def _vgg() -> nn.Module:
    """Two blocks of VGG: convolutions, ReLUs, maxima of 2 x 2 pixels."""
    first = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def _windows() -> nn.Module:
    """Depthwise, dilated and strided convolutions, averages, overlapping maxima."""
    first = nn.Conv2d(3, 8, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.AvgPool2d(3, 1, 1)
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3, padding=2, dilation=2), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 4, 1))


def _volume() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, (2, 3, 1), padding=(0, 1, 0)))


def _network(name: str) -> nn.Module:
    if name == "residual, eval norm":
        return _Residual(nn.BatchNorm2d).eval()
    if name == "residual, train norm":
        return _Residual(nn.BatchNorm2d)
    if name == "volume, eval norm":
        return _VolumeResidual().eval()
    plain = {"vgg": _vgg, "branches": _Branches, "u-net": _UNet, "windows": _windows, "volume": _volume}
    return plain[name]()


def seeded_network(name: str, seed: int) -> nn.Module:
    """The network with weights of a seed."""
    torch.manual_seed(seed)
    return _network(name)


def training_step(module: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output, and the gradients of the input and of all parameters."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(gradient.to(y.dtype))
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def relative_l2(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The relative L2 error of all tensors together."""
    a, b = (torch.cat([value.double().flatten() for value in values]) for values in (ours, reference))
    return float((a - b).norm() / b.norm())
