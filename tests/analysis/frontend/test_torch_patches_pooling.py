"""Sizes of pooled images: one capture serves even and odd sizes, for each kind of pooling."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from sft.analysis.frontend.capture import capture

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: Poolings and their numbers of axes. `max_pool1d` is missing: it takes sizes as numbers in every release, a capture for each.
_POOLINGS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "max_pool2d": (lambda: nn.MaxPool2d(3, 2), 2),
    "max_pool3d": (lambda: nn.MaxPool3d(3, 2), 3),
    "avg_pool1d": (lambda: nn.AvgPool1d(3, 2), 1),
    "avg_pool2d": (lambda: nn.AvgPool2d(3, 2), 2),
    "avg_pool3d": (lambda: nn.AvgPool3d(3, 2), 3),
    "lp_pool1d": (lambda: nn.LPPool1d(2, 3, 2), 1),
    "lp_pool2d": (lambda: nn.LPPool2d(2, 3, 2), 2),
}


@pytest.mark.parametrize("name", _POOLINGS)
def test_a_capture_serves_even_and_odd_sizes(name: str) -> None:
    make, axes = _POOLINGS[name]
    convolution = _CONVOLUTIONS[axes - 1]
    layers = (convolution(2, 3, 3, padding=1), make(), convolution(3, 3, 1), make())
    captured = capture(nn.Sequential(*layers), [(1, 2, *[32] * axes)], [torch.float32], torch.device("cpu"))
    for extents in itertools.product((30, 31, 33), repeat=axes):
        assert captured.bind([(1, 2, *extents)]) is not None
