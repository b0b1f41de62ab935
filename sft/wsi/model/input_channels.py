"""Channels of a network's input other than red, green and blue: its first convolution takes as many as an image has.

The weights of RGB are repeated over the channels, times ``3 / channels``; for one channel they are added up. That is the rule of timm:
its networks have the option ``in_chans``. So published weights are a start for images of any channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["fit_input_weights", "timm_channels", "with_input_channels"]

_RGB = 3


def timm_channels(num_channels: int) -> dict[str, Any]:
    """Options of a network of timm for images with so many channels."""
    return {} if num_channels == _RGB else {"in_chans": num_channels}


def with_input_channels(network: nn.Module, num_channels: int) -> nn.Module:
    """Change the first convolution of a network, in place, from three to so many channels; returns the network.

    A first convolution of another number of channels stays as it is.

    >>> with_input_channels(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), 5)[0].weight.shape
    torch.Size([8, 5, 3, 3])
    """
    _, convolution = _first_convolution(network)
    if convolution is not None and convolution.in_channels == _RGB != num_channels and convolution.groups == 1:
        weight = convolution.weight
        convolution.in_channels = num_channels
        convolution.weight = nn.Parameter(_over_channels(weight.detach(), num_channels), requires_grad=weight.requires_grad)
    return network


def fit_input_weights(network: nn.Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Weights for the network: those of RGB in its first convolution become weights of the channels that it takes."""
    name, convolution = _first_convolution(network)
    key = f"{name}.weight" if name else "weight"
    weight = state.get(key)
    if convolution is None or weight is None or weight.dim() != convolution.weight.dim():
        return state
    own = convolution.weight.shape
    is_rgb = weight.shape[1] == _RGB != own[1] and weight.shape[0] == own[0] and weight.shape[2:] == own[2:] and convolution.groups == 1
    return {**state, key: _over_channels(weight, own[1])} if is_rgb else state


def _first_convolution(network: nn.Module) -> tuple[str, nn.Conv2d | None]:
    """Name and module of the first convolution, in the order of modules."""
    return next(((name, module) for name, module in network.named_modules() if isinstance(module, nn.Conv2d)), ("", None))


def _over_channels(weight: Tensor, num_channels: int) -> Tensor:
    """Weights of a convolution of three channels for another number."""
    if num_channels == 1:
        return weight.sum(1, keepdim=True)
    channels = torch.arange(num_channels, device=weight.device) % _RGB
    return weight[:, channels] * (_RGB / num_channels)
