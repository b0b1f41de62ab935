"""The common network of whole slides, downsampled slides and patches: two convolutions, 8 x 8 px to a position.

The first convolution's filters start with zero mean. What they answer to at first is then texture and not brightness, which varies more all
over a slide than anything small does: with a maximum over positions, the gradient of a slide goes to the position that answers most, and
filters that see brightness send it to the darkest or the brightest place, where nothing is to be learnt. There are many filters for the
same reason: some of them should answer to what decides before anything is learnt. With half as many, one start of several found none.
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
