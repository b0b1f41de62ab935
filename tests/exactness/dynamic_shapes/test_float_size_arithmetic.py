"""Sizes that a model multiplies by a float are rounded as in PyTorch, at every size that one capture serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sft
from tests.helpers.models import image, seeded


class _Scaled(nn.Module):
    """An image of ``2 * n - 1`` rows, scaled on full tensors because of the flip."""

    def __init__(self, factor: float, mode: str) -> None:
        super().__init__()
        self.factor, self.mode = factor, mode
        self.down = nn.Conv2d(3, 3, 3, 2, 1)
        self.up = nn.ConvTranspose2d(3, 3, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = functional.interpolate(self.up(self.down(x)), scale_factor=self.factor, mode=self.mode)
        return torch.flip(y, (2,))


class _Resized(_Scaled):
    """Resizing to a size computed by the model."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.down(x))
        size = [int(self.factor * y.shape[2]), int(y.shape[3] * self.factor)]
        return torch.flip(functional.interpolate(y, size=size, mode=self.mode), (2,))


@pytest.mark.parametrize("make", [_Scaled, _Resized])
@pytest.mark.parametrize(("factor", "mode"), [(0.6, "nearest"), (1 / 3, "bilinear"), (0.7, "bicubic"), (1.1, "nearest"), (2.0, "nearest")])
def test_sizes_are_rounded_once(make: type[_Scaled], factor: float, mode: str) -> None:
    """0.6 * (2 * 23 - 1) is 27; as 1.2 * 23 - 0.6 it would be just below."""
    model = seeded(lambda: make(factor, mode))
    net: Any = sft.compile(model, (1, 3, 31, 33))
    for rows in range(20, 50, 3):
        x = image(1, 3, rows, rows + 1)
        ours, expected = net(x), model(x)
        assert ours.shape == expected.shape
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    if make is _Scaled:  # a number converted by Python's int is a constant for the exporter
        assert len(net._sft_engine.plan_cache.captures) == 1


class _Cropped(nn.Module):
    def __init__(self, rows: Callable[[int], int]) -> None:
        super().__init__()
        self.conv, self.rows = nn.Conv2d(1, 1, 3), rows

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y[:, :, : self.rows(y.shape[2])]


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (lambda h: int(0.6 * h), (56, 57)),
        (lambda h: int(h / 49 * 49), (50, 51, 52)),
        (lambda h: 1 + abs(int((h - 40) * 0.3)), (12, 13, 14)),  # towards zero
        (lambda h: int(h // 1.5), (13, 14)),
        (lambda h: 3 if 0.6 * h >= 27 else 2, (46, 47)),
    ],
)
def test_python_arithmetic_on_sizes(rows: Callable[[int], int], sizes: tuple[int, ...]) -> None:
    """A capture is not used for a size with other numbers."""
    model = seeded(lambda: _Cropped(rows))
    net = sft.compile(model, (1, 1, sizes[0], 20))
    for height in sizes:
        x = image(1, 1, height, 20)
        ours, expected = net(x), model(x)
        assert ours.shape == expected.shape
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
