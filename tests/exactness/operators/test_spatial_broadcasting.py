"""Narrow images: one row or one column that broadcasts to larger images (coordinate attention, broadcasting without `expand`), and
images as small as the statistics of a norm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_Function = Callable[["_Narrow", Tensor], Tensor]


def _coordinate_attention(m: _Narrow, x: Tensor) -> Tensor:
    """Hou et al., CVPR 2021: attention along each axis, from pooled rows and columns that pass one convolution together."""
    height, width = x.shape[2:]
    rows, columns = F.adaptive_avg_pool2d(x, (None, 1)), F.adaptive_avg_pool2d(x, (1, None)).permute(0, 1, 3, 2)
    rows, columns = torch.split(m.mix(torch.cat([rows, columns], 2)), [height, width], 2)
    return x * rows.sigmoid() * columns.permute(0, 1, 3, 2).sigmoid()


_FUNCTIONS: dict[str, _Function] = {
    "coordinate attention": _coordinate_attention,
    "first column": lambda m, x: x * x[..., :1],
    "first row, in front": lambda m, x: x[:, :, :1] - x.exp(),
    "mean of rows": lambda m, x: x + F.avg_pool2d(x, (1, x.shape[3])),
    "largest of columns": lambda m, x: x + F.max_pool2d(x, (x.shape[2], 1)),
    "strided": lambda m, x: x * m.mix(x[:, :, :: x.shape[2]]),
    "both": lambda m, x: x + x[..., -1:] + x[:, :, -1:],
    "outer product": lambda m, x: x * (x[..., :1] * x[:, :, :1]),
    "of three": lambda m, x: torch.where(x > x[..., :1], x, x[:, :, :1]),
    "row without channels": lambda m, x: x + x[:, :, 2:3].sum(1)[:, None],
    "row without channels, in front": lambda m, x: x.sum(1)[:, -1:][:, None].sin() * x,
    "row of some channels": lambda m, x: x * x[:, 1:3][:, :, 2].sum(1)[:, None, None],
    "column without channels": lambda m, x: x + x[..., 3].mean(1)[:, None, :, None],
    "added beside channels last": lambda m, x: (x.permute(0, 2, 3, 1) + x[..., :1].permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
}


class _Narrow(nn.Module):
    def __init__(self, function: _Function) -> None:
        super().__init__()
        self.function, self.first = function, nn.Conv2d(3, 4, 3, padding=1)
        self.mix: nn.Conv2d = nn.Conv2d(4, 4, 1)
        self.last = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.function(self, self.first(x)))
        return out


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_narrow_images_broadcast(name: str) -> None:
    model = seeded(lambda: _Narrow(_FUNCTIONS[name]))
    assert_exact(model, image(2, 3, 22, 18))
    assert_exact(model, image(2, 3, 22, 18), options=sft.Options(tile=(5, None)), steps=1)
    assert_exact(model, image(1, 3, 22, 18), options=sft.Options(tile=(4, 7)), steps=1)
    net: Any = sft.compile(model, (1, 3, None, None), options=sft.Options(tile=(5, None)))
    for size in ((22, 18), (30, 17)):
        x = image(1, 3, *size)
        torch.testing.assert_close(net(x), model(x), rtol=1e-11, atol=1e-11)
    assert {segment.mode for segment in net.plan.segments} >= {"tiled"}


def test_a_narrow_volume() -> None:
    class Volume(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(2, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            out: Tensor = y * y[:, :, :, :1] + y[..., :1]
            return out

    assert_exact(seeded(Volume), image(2, 2, 8, 7, 6), options=sft.Options(tile=(3, None)), steps=1)


#: By number of axes: a pooling to a few pixels, a layer to as many pixels as a norm has statistics, the norms.
_SMALL: dict[int, tuple[nn.Module, nn.Module, type[nn.Module]]] = {
    1: (nn.AdaptiveMaxPool1d(4), nn.Conv1d(3, 4, 3, 2, 1), nn.InstanceNorm1d),
    2: (nn.AdaptiveMaxPool2d((2, 4)), nn.Conv2d(3, 4, 3, 2, 1), nn.InstanceNorm2d),
    3: (nn.AdaptiveMaxPool3d((2, 2, 4)), nn.Conv3d(3, 4, 3, 2, 1), nn.InstanceNorm3d),
}


@pytest.mark.parametrize("axes", _SMALL)
@pytest.mark.parametrize("options", [sft.Options(), sft.Options(strategy="none"), sft.Options(tile=(2, None)), sft.Options(strategy="sft")])
def test_images_as_small_as_a_scale_and_a_shift(axes: int, options: sft.Options) -> None:
    pool, conv, instance_norm = _SMALL[axes]
    shape = (2, 3, *(32, 10, 6)[:axes])
    for norm in (nn.GroupNorm(1, 4), instance_norm(4, affine=True)):
        model = nn.Sequential(pool, conv, norm)
        assert_exact(model, image(*shape), options=options, steps=1)
    wanted = sft.plan(copy.deepcopy(model).double(), [image(*shape).double().requires_grad_()], options=options).total_bytes
    assert_exact(model, image(*shape), options=options, budget=wanted, steps=1)


def test_images_of_three_pixels_with_moments() -> None:
    """The moments of a value that is no image are three numbers for each group."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.linear, self.norm = nn.AdaptiveMaxPool1d(3), nn.Linear(3, 5), nn.GroupNorm(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.pool(x)
            out: Tensor = x + self.norm(self.linear(x)).mean(2, keepdim=True)
            return out

    assert_exact(seeded(Mixed), image(2, 4, 30), options=sft.Options(tile=(2, None)))
