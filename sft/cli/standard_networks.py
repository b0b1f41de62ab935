"""Networks whose layers most others have too: what ``python -m sft tune`` measures where nobody names a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["STANDARD_NETWORKS"]


def _vgg16() -> nn.Module:
    """The convolutions of VGG-16 (Simonyan and Zisserman, 2015)."""
    layers: list[nn.Module] = []
    num_in = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(num_in, width, 3, padding=1), nn.ReLU()]
            num_in = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


class _BasicBlock(nn.Module):
    """A basic block (He et al., 2016)."""

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_in, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.short: nn.Module = nn.Identity()
        if stride != 1 or num_in != width:
            self.short = nn.Sequential(nn.Conv2d(num_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


def _resnet18() -> nn.Module:
    """The convolutions of ResNet-18 (He et al., 2016), its norms frozen."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    num_in = 64
    for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(_BasicBlock(num_in, width, stride))
        num_in = width
    return nn.Sequential(*layers).eval()


def _resnet18_training() -> nn.Module:
    """The same with norms over the image."""
    return _resnet18().train()


class _UNet(nn.Module):
    """Four levels with bilinear interpolation (after Ronneberger, Fischer and Brox, 2015)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128, 256)
        pairs = zip((3, *widths[:-1]), widths, strict=True)
        self.down = nn.ModuleList([self._level(num_in, width) for num_in, width in pairs])
        self.up = nn.ModuleList([self._level(below + width, width) for below, width in zip(widths[1:], widths[:-1], strict=True)])
        self.leave = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def _level(num_in: int, width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(num_in, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level in self.down:
            x = level(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for level, skip in zip(reversed(self.up), reversed(skips[:-1]), strict=True):
            up = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = level(torch.cat([skip, up], 1))
        out: Tensor = self.leave(x)
        return out


#: Makers by name.
STANDARD_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "vgg16": _vgg16,
    "resnet18": _resnet18,
    "resnet18 in training": _resnet18_training,
    "u-net": _UNet,
}
