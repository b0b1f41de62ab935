"""Small models with the structures of large ones. Module-level classes, so that they pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

__all__ = ["Around", "Branches", "ConvNet", "Residual", "TinyUNet", "chain", "image", "seeded"]

ModelT = TypeVar("ModelT", bound=nn.Module)


def image(*shape: int, seed: int = 0) -> Tensor:
    """A random float64 image (batch, channels, height, width)."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seeded(make: Callable[[], ModelT], *, seed: int = 0) -> ModelT:
    """Build a float64 model with parameters and norm statistics fixed by ``seed``; torch's generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().double()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                assert module.running_var is not None
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2.0)
                if module.affine:
                    nn.init.uniform_(module.weight, 0.5, 1.5)
                    nn.init.normal_(module.bias)
    return model


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


class Around(nn.Module):
    """One layer between two convolutions, so that an error at its seams reaches weights and input on both sides."""

    def __init__(self, layer: nn.Module, *, in_channels: int = 4, out_channels: int | None = None) -> None:
        super().__init__()
        self.before = nn.Conv2d(3, in_channels, 3, padding=1)
        self.layer = layer
        self.after = nn.Conv2d(in_channels if out_channels is None else out_channels, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.layer(self.before(x)))
        return y


class ConvNet(nn.Module):
    """Convolutions, an overlapping pool, a frozen-able norm, and a classifier after a global pool."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width, 5)
        self.body.eval()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.flatten(self.pool(self.body(x)), 1))
        return y


class Residual(nn.Module):
    """A bottleneck as in ResNet: stride in the branch, a projected shortcut, in-place relu after the addition."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False)
        self.conv1 = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.shortcut = nn.Conv2d(4, 6, 1, stride=2)
        self.relu = nn.ReLU(inplace=True)
        self.norm1.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        y = self.conv2(self.relu(self.norm1(self.conv1(x))))
        y += self.shortcut(x)
        out: Tensor = self.relu(y)
        return out


class TinyUNet(nn.Module):
    """Two levels, nearest upsampling, skips by concatenation; sizes must be multiples of 4."""

    def __init__(self, upsampling: str = "nearest") -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 6, 3, padding=1)
        self.bottom = nn.Conv2d(6, 6, 3, padding=1)
        self.up2 = nn.Conv2d(12, 4, 3, padding=1)
        self.up1 = nn.Conv2d(8, 2, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2, mode=upsampling)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        a = self.relu(self.down1(x))
        b = self.relu(self.down2(self.pool(a)))
        c = self.relu(self.bottom(self.pool(b)))
        b = self.relu(self.up2(torch.cat([self.grow(c), b], dim=1)))
        y: Tensor = self.up1(torch.cat([self.grow(b), a], dim=1))
        return y


class Branches(nn.Module):
    """Outputs of three resolutions in a nested structure, one of them read again downstream."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Conv2d(3, 4, 3, padding=1)
        self.coarse = nn.Conv2d(4, 5, 3, stride=2, padding=1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, object]:
        fine = self.fine(x)
        coarse = self.coarse(torch.tanh(fine))
        return {"maps": (fine, [coarse]), "scores": self.head(coarse.mean((2, 3)))}
