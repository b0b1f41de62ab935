"""Fractional numbers that a model computes from sizes follow the size, equal Python's, and do not prevent tiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_Function = Callable[[Tensor, int, int], Tensor]
#: Of a value, its height and its width.
_IN_TILES: dict[str, _Function] = {
    "ratio": lambda x, h, w: x * (h / w),
    "of differences": lambda x, h, w: x + (h - 1) / (w - 1),
    "root": lambda x, h, w: x / (h * w) ** 0.5,
    "half, as a whole number": lambda x, h, w: x * (h / 2),
    "chain of calls": lambda x, h, w: x * (h / 49 * 49 / 10 - 0.1 * w),
    "larger of two": lambda x, h, w: x * max(h / 3, w / 2),
    "alpha": lambda x, h, w: torch.add(x, x.square(), alpha=1 / w),
    "bound": lambda x, h, w: x.clamp(min=-1 / h, max=1 / w),
    "exponent": lambda x, h, w: (x.abs() + 1) ** (1 / w),
    "weight of two": lambda x, h, w: torch.lerp(x, x.square(), w / 100),
    "slope": lambda x, h, w: F.leaky_relu(x, 1 / h),
    "compared with": lambda x, h, w: torch.where(x > 1 / w, x, x * 0.5),
    "filled with": lambda x, h, w: x + torch.full_like(x, h / 3),
    "scale": lambda x, h, w: F.interpolate(F.avg_pool2d(x, 2), scale_factor=(h / (h // 2), w / (w // 2))),
}
_IN_PART_WHOLE: dict[str, _Function] = {
    "mean by hand": lambda x, h, w: x.sum((2, 3), keepdim=True) / (h * w) * x,
    "coordinates": lambda x, h, w: x * (torch.arange(h, dtype=x.dtype) / (h - 1))[:, None],
    "a constant image": lambda x, h, w: x + torch.full((h, w), 1 / w, dtype=x.dtype),
    "a constant": lambda x, h, w: x * torch.tensor([w / h], dtype=x.dtype),
    "a truth value": lambda x, h, w: x + torch.tensor(h > w),
    "ends of a range": lambda x, h, w: x * torch.linspace(0.5 / w, 1 - 0.5 / w, w, dtype=x.dtype),
}


class _Sized(nn.Module):
    def __init__(self, function: _Function) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3), function

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        out: Tensor = self.last(self.function(y, y.shape[-2], y.shape[-1]))
        return out


@pytest.mark.parametrize("name", [*_IN_TILES, *_IN_PART_WHOLE])
def test_numbers_follow_the_size(name: str) -> None:
    model = seeded(lambda: _Sized({**_IN_TILES, **_IN_PART_WHOLE}[name]))
    assert_exact(model, image(1, 3, 20, 30))
    assert_exact(model, image(2, 3, 20, 30), options=sft.Options(tile=(5, 8)), steps=1)
    net: Any = sft.compile(model, (1, 3, None, None), options=sft.Options(tile=(5, 8)))
    for size in ((20, 30), (24, 26), (35, 17)):  # from one capture
        x = image(1, 3, *size)
        torch.testing.assert_close(net(x), model(x), rtol=1e-12, atol=1e-12)
        assert name not in _IN_TILES or {segment.mode for segment in net.plan_for(x).segments} == {"tiled"}


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_types_follow_from_numbers_as_in_eager(dtype: torch.dtype) -> None:
    class Labels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask: Tensor = (x > 0).to(dtype) * (x.shape[-2] / 10)  # 2.0, which makes integers floats
            return mask

    x = image(1, 3, 20, 16).float()
    out, expected = sft.compile(Labels(), x)(x), Labels()(x)
    assert out.dtype == expected.dtype == torch.float32
    assert torch.equal(out, expected)


def test_numbers_are_those_of_python_to_the_last_bit() -> None:
    """49 / 49 * 49 is 49, and 1 / 49 * 49 is not 1."""

    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            size = x.shape[-1]
            return self.one * x * (1 / size * 49)

    x = torch.ones(1, 1, 8, 49, dtype=torch.float64)
    assert 1 / 49 * 49 != 1
    assert torch.equal(sft.compile(Count(), x)(x), x * (1 / 49 * 49))
