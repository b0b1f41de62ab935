"""The network that whole slides, downsampled slides and patches are given alike: three convolutions, each halving the image."""

from __future__ import annotations

from torch import nn

__all__ = ["needle_net"]


def needle_net(width: int = 8) -> nn.Module:
    """A backbone with ``4 * width`` features for every 8 x 8 px; what ``model.backbone: examples.needle.network:needle_net`` names."""
    layers: list[nn.Module] = []
    num_inputs = 3
    for num_outputs in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(num_inputs, num_outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(num_outputs), nn.ReLU()]
        num_inputs = num_outputs
    return nn.Sequential(*layers)
