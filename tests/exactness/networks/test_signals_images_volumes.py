"""Signals, images and volumes: one network for each, with all operators that treat axes differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact

_SHAPES = {1: (2, 2, 61), 2: (2, 2, 25, 22), 3: (2, 2, 13, 12, 10)}
_TILES: dict[str, dict[str, Any]] = {
    "strips": {"tile": (4, None)},
    "panels": {"tile": (3, 7)},
    "tiles": {"tile": (6, 7), "halo": "recompute"},
}


class _Net(nn.Module):
    """Two scales that are joined again, with norms, poolings and layers of one to three axes, and a classifier."""

    def __init__(self, num_axes: int) -> None:
        super().__init__()

        def layer(name: str, *arguments: Any, **keywords: Any) -> nn.Module:
            made: nn.Module = getattr(nn, f"{name}{num_axes}d")(*arguments, **keywords)
            return made

        self.first = nn.Sequential(layer("Conv", 2, 4, 3, padding=1), layer("BatchNorm", 4), nn.ReLU())
        self.down, self.mean = layer("MaxPool", 3, 2, 1), layer("AvgPool", 2, 2, ceil_mode=True)
        self.deep = nn.Sequential(layer("Conv", 4, 6, 3, padding="same", dilation=2), nn.GroupNorm(2, 6), nn.PReLU(6))
        self.drop = nn.Dropout(0.3)
        self.up = layer("ConvTranspose", 6, 4, 3, stride=2, padding=1, output_padding=1)
        self.last = nn.Sequential(layer("Conv", 8, 3, 3, stride=2), layer("InstanceNorm", 3))
        self.classifier = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine = self.first(x)
        coarse = self.drop(self.deep(self.down(fine)))
        grown = self.up(coarse)
        overlap = tuple(slice(0, min(a, b)) for a, b in zip(fine.shape[2:], grown.shape[2:], strict=True))
        both = torch.cat([fine[(..., *overlap)], grown[(..., *overlap)]], 1)
        features = self.last(both)
        return self.classifier(features.mean(tuple(range(2, x.dim())))), features, self.mean(fine)


@pytest.mark.parametrize(("num_axes", "how"), [*((n, how) for n in _SHAPES for how in ("strips", "panels")), (2, "tiles")])
def test_any_number_of_axes_is_exact(num_axes: int, how: str) -> None:
    torch.manual_seed(0)
    report = assert_exact(_Net(num_axes).double(), torch.randn(_SHAPES[num_axes], dtype=torch.float64), options=sft.Options(**_TILES[how]))
    assert sum(segment.mode == "tiled" for segment in report.plan.segments) > 1
    assert not report.plan.notes, "nothing runs whole that reads an image"


def test_a_volume_needs_the_bytes_of_its_slabs() -> None:
    """Depth is streamed: at a fixed slab the peak grows with the image and its gradient, which are complete, and little else."""
    model = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1))
    options = sft.Options(tile=(8, None))
    short, tall = (sft.plan(model, (1, 1, depth, 32, 32), budget="8GiB", options=options) for depth in (32, 256))
    plain = sft.plan(model, (1, 1, 256, 32, 32), budget="8GiB", options=sft.Options(strategy="none"))
    assert tall.projected_peak_bytes < 0.35 * plain.projected_peak_bytes
    assert tall.projected_peak_bytes < 4 * short.projected_peak_bytes


def test_a_size_for_each_rank() -> None:
    with pytest.raises(sft.InputError, match="batch it"):
        sft.compile(nn.Conv3d(2, 2, 3), (2, 8, 8, 8))
    assert [segment.mode for segment in sft.plan(nn.Linear(4, 2), (3, 4)).segments] == ["whole"]  # no image, so no strips
