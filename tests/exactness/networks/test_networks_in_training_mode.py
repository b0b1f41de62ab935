"""Common networks in training mode over several steps: norms over the image, gates, dropout, running statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import sft
from examples.models import BasicBlock, PooledClassifier, resnet18, resnet50, unet, vgg16
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded
from tests.helpers.positional_rng import DropPath


class _Gate(nn.Module):
    """Squeeze and excitation (Hu et al., 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 2, 1), nn.ReLU(), nn.Conv2d(2, channels, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.squeeze(x)
        return y


class _DenseLayer(nn.Module):
    """Norm, ReLU, 1x1 convolution, norm, ReLU, 3x3 convolution, dropout, joined to the input (Huang et al., 2017)."""

    def __init__(self, channels: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, 2 * growth, 1, bias=False),
            nn.BatchNorm2d(2 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet(depths: Sequence[int] = (3, 4, 5, 3), growth: int = 1, dropout: float = 0.2) -> PooledClassifier:
    """DenseNet with blocks of these numbers of layers, halved in between; DenseNet-121 (6, 12, 24, 16) runs in the zoo."""
    channels = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for block, depth in enumerate(depths):
        if block:
            half = channels // 2
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, half, 1, bias=False), nn.AvgPool2d(2)]
            channels = half
        for _ in range(depth):
            layers.append(_DenseLayer(channels, growth, dropout))
            channels += growth
    return PooledClassifier(nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU()), channels, 3)


def se_resnet18() -> PooledClassifier:
    """ResNet-18 with a gate at the end of each block's body, followed by stochastic depth."""
    model = resnet18(3, width=2)
    for block in model.modules():
        if isinstance(block, BasicBlock):
            convolutions = [layer for layer in block.body if isinstance(layer, nn.Conv2d)]
            block.body = nn.Sequential(*block.body, _Gate(convolutions[-1].out_channels), DropPath(0.2))
    return model


def _unet(norm: Callable[[int], nn.Module]) -> nn.Module:
    """The five-level U-Net with a norm after each convolution, and channel dropout on the way down."""
    model = unet(2, levels=5, width=2)
    for blocks in (model.features.down, model.features.up):
        assert isinstance(blocks, nn.ModuleList)
        for index, pair in enumerate(blocks):
            layers: list[nn.Module] = []
            for layer in pair.children():
                layers.append(layer)
                if isinstance(layer, nn.Conv2d):
                    layers.append(norm(layer.out_channels))
            blocks[index] = nn.Sequential(*layers, *([nn.Dropout2d(0.1)] if blocks is model.features.down else []))
    return model


def _vgg16_bn() -> nn.Module:
    model = vgg16(3, width=2, batch_norm=True)
    model.classifier = nn.Sequential(nn.Dropout(0.5), model.classifier)  # type: ignore[assignment]
    return model


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "vgg16_bn": _vgg16_bn,
    "resnet18": lambda: resnet18(3, width=2),
    "resnet50": lambda: resnet50(3, width=2),
    "se_resnet18": se_resnet18,
    "densenet": densenet,
    "unet_batch_norm": lambda: _unet(nn.BatchNorm2d),
    "unet_group_norm": lambda: _unet(lambda channels: nn.GroupNorm(2, channels)),
}
_TILINGS = {
    "strips": sft.Options(tile=(24, None), state_every=2, batch_tile=2),
    "panels": sft.Options(tile=(32, 32), state_every=1),
}


#: Slow deep networks, each with one tiling; the other one is tested with this or a similar network.
_LONG = {("resnet50", "panels"), ("densenet", "strips"), ("resnet18", "panels"), ("unet_group_norm", "strips")}
_CASES = [(name, tiling) for name in _MODELS for tiling in _TILINGS if (name, tiling) not in _LONG]


@pytest.mark.parametrize(("name", "tiling"), _CASES)
def test_three_steps_in_training_mode(name: str, tiling: str) -> None:
    model = seeded(_MODELS[name]).train()
    report = assert_exact(model, image(2, 3, 64, 64), options=_TILINGS[tiling], steps=3)
    assert any(segment.mode == "tiled" for segment in report.plan.segments)
