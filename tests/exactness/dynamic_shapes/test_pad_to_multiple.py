"""Images padded to a multiple, as in wrappers of U-Nets, and cropped back: amounts that depend on sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_MODES = ("constant", "reflect", "replicate", "circular")


class _Multiple(nn.Module):
    def __init__(self, mode: str, *, both: bool) -> None:
        super().__init__()
        self.first, self.down, self.mode, self.both = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 8, stride=8), mode, both

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, w = x.shape[2:]
        bottom, right = -h % 8, -w % 8
        top, left = (bottom // 2, right // 2) if self.both else (0, 0)
        y = self.first(F.pad(x, (left, right - left, top, bottom - top), mode=self.mode))
        return y[:, :, top : top + h, left : left + w], self.down(y)


@pytest.mark.parametrize("both", [False, True], ids=["behind", "around"])
@pytest.mark.parametrize("mode", _MODES)
def test_to_a_multiple(mode: str, both: bool) -> None:
    model = seeded(lambda: _Multiple(mode, both=both))
    net: Any = sft.compile(model, (1, 3, None, None), options=sft.Options(tile=(8, None)))
    for size in ((22, 18), (24, 32), (17, 24)):  # padded, not padded, and padded along one axis
        x = image(1, 3, *size)
        for ours, theirs in zip(net(x), model(x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert "tiled" in {segment.mode for segment in net.plan_for(x).segments}
    assert_exact(model, image(2, 3, 22, 19), options=sft.Options(tile=(5, 8), batch_tile=1), steps=1)
    assert_exact(model, image(1, 3, 24, 24), options=sft.Options(tile=(5, None)), steps=1)


@pytest.mark.parametrize("mode", _MODES)
def test_to_a_least_size(mode: str) -> None:
    """A larger image is cropped."""

    class Least(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.conv(F.pad(x, (0, 20 - x.shape[-1], 0, 24 - x.shape[-2]), mode=mode))
            return out

    model = seeded(Least)
    net = sft.compile(model, (1, 3, None, None), options=sft.Options(tile=(5, None)))
    for size in ((18, 18), (24, 20), (30, 22), (20, 26)):
        x = image(1, 3, *size)
        torch.testing.assert_close(net(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", _MODES)
def test_a_capture_for_one_size_is_the_last_resort(mode: str) -> None:
    """Amounts of circular padding determine the values before the first strip; all others are functions of the size."""
    net: Any = sft.compile(seeded(lambda: _Multiple(mode, both=True)), (1, 3, 22, 18))
    net.plan_for(image(1, 3, 30, 18))
    assert len(net._sft_engine.plan_cache.captures) == (2 if mode == "circular" else 1)
