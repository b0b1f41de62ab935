"""Adaptive pooling to any size, in strips, panels and tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most
from tests.helpers.models import image, seeded
from tests.helpers.tilings import is_tiled, tiled_options

_CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Pooled(nn.Module):
    """Adaptive pooling between a convolution and another layer."""

    def __init__(self, pool: nn.Module, axes: int) -> None:
        super().__init__()
        self.body, self.pool, self.head = _CONVOLUTIONS[axes](2, 3, 3, padding=1), pool, _CONVOLUTIONS[axes](3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.pool(torch.relu(self.body(x))))
        return y


_AVERAGES: dict[int, Any] = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}


@at_most(7)
@given(data=st.data())
def test_any_adaptive_average(data: st.DataObject) -> None:
    axes = data.draw(st.sampled_from([1, 2, 2, 3]))
    extents = tuple(data.draw(st.integers(2, (40, 40, 24, 7)[axes])) for _ in range(axes))
    size = tuple(data.draw(st.integers(1, 12) | st.none()) if axes > 1 else data.draw(st.integers(1, 12)) for _ in range(axes))
    model = seeded(lambda: Pooled(_AVERAGES[axes](size), axes))
    options = data.draw(tiled_options(extents))
    report = assert_exact(model, image(data.draw(st.integers(1, 3)), 2, *extents), options=options, steps=1)
    if None not in size or (size[0] is None or size[0] >= 4):
        assert all(e is None for e in size) or is_tiled(report.plan, "adaptive", "mean"), report.plan


@pytest.mark.parametrize("options", [sft.Options(tile=(4, None)), sft.Options(tile=(6, 5), halo="recompute")], ids=str)
@pytest.mark.parametrize("size", [(7, 7), (1, 4), (None, 1), (7, None), (30, 2)], ids=str)
def test_adaptive_average(size: tuple[int | None, int | None], options: sft.Options) -> None:
    report = assert_exact(seeded(lambda: Pooled(nn.AdaptiveAvgPool2d(size), 2)), image(2, 2, 23, 11), options=options, steps=1)
    assert is_tiled(report.plan, "adaptive")


def test_windows_of_much_of_the_image_run_whole() -> None:
    model = seeded(lambda: Pooled(nn.AdaptiveAvgPool2d((2, None)), 2))
    report = assert_exact(model, image(2, 2, 23, 11), options=sft.Options(tile=(4, None)))
    assert not is_tiled(report.plan, "adaptive")


_MAXIMA: dict[int, Any] = {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d}


@at_most(7)
@given(data=st.data())
def test_any_adaptive_maximum(data: st.DataObject) -> None:
    """The convolution's ReLU makes ties, which the first element of a window wins."""
    axes = data.draw(st.sampled_from([1, 2, 2, 3]))
    extents = tuple(data.draw(st.integers(2, (40, 40, 24, 7)[axes])) for _ in range(axes))
    size = tuple(data.draw(st.integers(4, 12)) for _ in range(axes))
    model = seeded(lambda: Pooled(_MAXIMA[axes](size), axes))
    report = assert_exact(model, image(data.draw(st.integers(1, 3)), 2, *extents), options=data.draw(tiled_options(extents)), steps=1)
    assert is_tiled(report.plan, "getitem"), report.plan


@pytest.mark.parametrize("options", [sft.Options(tile=(4, None)), sft.Options(tile=(6, 5), halo="recompute")], ids=str)
@pytest.mark.parametrize("size", [(7, 7), (5, 1), (None, 3), (30, 2)], ids=str)
def test_adaptive_maximum(size: tuple[int | None, int], options: sft.Options) -> None:
    report = assert_exact(seeded(lambda: Pooled(nn.AdaptiveMaxPool2d(size), 2)), image(2, 2, 23, 11), options=options, steps=1)
    assert is_tiled(report.plan, "getitem")
