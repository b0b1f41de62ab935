"""Models with size formulas of their own, which agree with the operators' at some sizes only."""

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


class _Tokens(nn.Module):
    """A stem with overlapping patches, then tokens put back as ``height // stride`` rows (as PVT; Wang et al., ICCV 2021)."""

    def __init__(self, kernel: int, stride: int) -> None:
        super().__init__()
        self.stride, self.stem = stride, nn.Conv2d(3, 8, kernel, stride, kernel // 2)
        self.norm, self.mix, self.last = nn.LayerNorm(8), nn.Linear(8, 8), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        tokens = self.mix(self.norm(self.stem(x).flatten(2).transpose(1, 2)))
        back = tokens.transpose(1, 2).reshape(batch, 8, height // self.stride, width // self.stride)
        output: Tensor = self.last(back)
        return output


class _Involution(nn.Module):
    """Kernels computed from the pooled image, applied to windows of the full one (Li et al., CVPR 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool, self.kernels = nn.Conv2d(3, 4, 3, padding=1), nn.AvgPool2d(2), nn.Conv2d(4, 18, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        weight = self.kernels(self.pool(x))
        batch, _, height, width = weight.shape
        windows = F.unfold(x, 3, 1, 1, 2).view(batch, 2, 2, 9, height, width)
        output: Tensor = (weight.view(batch, 2, 1, 9, height, width) * windows).sum(3).view(batch, 4, height, width)
        return output


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "halved": lambda: _Tokens(3, 2),
    "quartered": lambda: _Tokens(7, 4),
    "involution": _Involution,
}


@pytest.mark.parametrize("name", _MODELS)
def test_images_stay_images_where_sizes_agree(name: str) -> None:
    model = seeded(_MODELS[name])
    assert not sft.check(model, (1, 3, 32, 24)).whole_reasons
    assert_exact(model, image(2, 3, 32, 24), options=sft.Options(tile=(8, None)), steps=1)
    assert_exact(model, image(1, 3, 32, 24), options=sft.Options(tile=(4, 5)), steps=1)


@pytest.mark.parametrize("name", _MODELS)
def test_each_size_is_analysed_separately(name: str) -> None:
    model = seeded(_MODELS[name]).eval()
    net: Any = sft.compile(model, (1, 3, None, None), options=sft.Options(tile=(8, None)))
    for size in ((32, 24), (40, 28), (24, 44)):
        x = image(1, 3, *size)
        with torch.no_grad():
            torch.testing.assert_close(net(x), model(x), rtol=1e-11, atol=1e-11)
        assert not net._sft_engine.phases().whole_reasons
    with pytest.raises(sft.InputError, match="the model refuses an input of shape 1x3x37x24"):
        net(image(1, 3, 37, 24))
