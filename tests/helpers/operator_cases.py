"""Functions of images of one to three axes between convolutions, and tilings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact

__all__ = ["AroundFunction", "assert_exact_in_strips", "assert_streams", "cases"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class AroundFunction(nn.Module):
    """A layer between two convolutions of images with so many axes, and a skip past it."""

    def __init__(self, layer: Callable[[Tensor], Tensor], *, axes: int, channels: int = 4) -> None:
        super().__init__()
        convolution = _CONVOLUTIONS[axes - 1]
        self.before = convolution(3, channels, 3, padding=1)
        self.layer = layer
        self.after = convolution(channels, 2, 3, padding=1)

    def extra_repr(self) -> str:
        return repr(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        out: Tensor = self.after(y + self.layer(y))
        return out


@st.composite
def cases(draw: st.DrawFn, *, axes: int, least: int = 3, most: int = 14) -> tuple[tuple[int, ...], sft.Options]:
    """A shape with 3 channels, and a tiling of it."""
    extents = [draw(st.integers(least, most if axis < 2 else 4)) for axis in range(axes)]
    batch = draw(st.integers(1, 3))
    width = draw(st.none() | st.integers(2, extents[1])) if axes > 1 else None
    options = sft.Options(
        tile=(draw(st.integers(1, extents[0])), width),
        batch_tile=draw(st.none() | st.integers(1, batch)),
        halo=draw(st.sampled_from(("carry", "recompute"))),
        state_every=draw(st.integers(1, 3)),
    )
    if options.halo == "recompute":
        options = sft.Options(tile=options.tile, batch_tile=options.batch_tile, halo="recompute")
    return (batch, 3, *extents), options


def assert_streams(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Assert that all operators on images run in strips."""
    net: Any = sft.compile(model, shape, options=sft.Options(tile=(2, None)))
    assert not net._sft_engine.phases().whole_reasons


def assert_exact_in_strips(model: nn.Module, shape: tuple[int, ...], options: sft.Options, *, steps: int = 2) -> None:
    """Assert that the model is exact, and that something ran in strips."""
    report = assert_exact(model, torch.randn(shape, generator=torch.Generator().manual_seed(0)), options=options, steps=steps)
    assert any(segment.choice.mode == "tiled" for segment in report.plan.segments), "nothing ran in strips"
