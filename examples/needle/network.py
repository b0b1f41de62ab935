"""The common network of whole slides, downsampled slides and patches: two convolutions, 8 x 8 px to a position.

The first convolution's filters start with zero mean, so that they respond to texture and not to brightness, which varies more over a slide
than any small structure. With a maximum over positions, the gradient of a slide goes to the position of the largest response. Filters that
respond to brightness send it to the darkest or the brightest position, which has no information. There are many filters for the same
reason: some should respond to the deciding texture before training. With half as many, one initialisation of several had none.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["needle_net"]


def needle_net(width: int = 32) -> nn.Module:
    """A backbone with ``2 * width`` features for every 8 x 8 px; named by ``model.backbone: examples.needle.network:needle_net``."""
    first = nn.Conv2d(3, width, 4, stride=4, bias=False)
    with torch.no_grad():
        first.weight -= first.weight.mean((2, 3), keepdim=True)
    return nn.Sequential(
        first, nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
    )  # fmt: skip
