"""`unfold` and `fold`: exact in strips, and within the planned bytes untiled (ATen allocates more than their results need)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most
from tests.helpers.models import image, seeded
from tests.helpers.plans import assert_tiled

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "there and back": lambda x: F.fold(F.unfold(x, 3, padding=1, stride=2), x.shape[-2:], 3, padding=1, stride=2),
    "patches far apart": lambda x: F.unfold(x, 2, stride=7),
    "overlapping": lambda x: F.unfold(x, (5, 3), dilation=(1, 2)).mean(2, keepdim=True),
    "a mean of windows": lambda x: F.fold(F.unfold(x, 3), x.shape[-2:], 3) / F.fold(F.unfold(torch.ones_like(x), 3), x.shape[-2:], 3),
    "local attention": lambda x: (F.unfold(x, 3, padding=1).view(x.shape[0], 4, 9, *x.shape[2:]).softmax(2) * x[:, :, None]).sum(2),
}


class _Folded(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x))


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_patches_are_exact_and_within_the_budget(name: str) -> None:
    model = seeded(lambda: _Folded(_FUNCTIONS[name]))
    assert_exact(model, image(2, 3, 33, 27))
    assert_exact(model, image(1, 3, 64, 40), options=sft.Options(tile=(16, None)))


class _Windows(nn.Module):
    """Windows of an image between convolutions, each scaled by a function of its pixels; folded back, or left as channels."""

    def __init__(self, back: bool, geometry: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        size = math.prod(geometry["kernel_size"])
        self.back, self.geometry = back, geometry
        self.first, self.last = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(2 if back else 2 * size, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        windows = F.unfold(y, **self.geometry)
        windows = windows * windows.mean(1, keepdim=True).sigmoid()
        if self.back:
            made = F.fold(windows, y.shape[-2:], **self.geometry)
        else:
            names = ("kernel_size", "stride", "padding", "dilation")
            geometry = zip(y.shape[-2:], *(self.geometry[name] for name in names), strict=True)
            made = windows.unflatten(2, [(e + 2 * p - d * (k - 1) - 1) // s + 1 for e, k, s, p, d in geometry])
        output: Tensor = self.last(made)
        return output


_PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@at_most(12)
@given(
    back=st.booleans(),
    kernel=_PAIRS,
    stride=_PAIRS,
    padding=st.tuples(st.integers(0, 1), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    size=st.tuples(st.integers(7, 14), st.integers(7, 12)),
    batch=st.integers(1, 2),
    tile=st.tuples(st.integers(1, 6), st.sampled_from([None, 3, 5])),
)
def test_windows_in_strips(
    back: bool,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    size: tuple[int, int],
    batch: int,
    tile: tuple[int, int | None],
) -> None:
    geometry = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    report = assert_exact(seeded(lambda: _Windows(back, geometry)), image(batch, 3, *size), options=sft.Options(tile=tile), steps=1)
    assert_tiled(report, "im2col", *["col2im"] * back)


@at_most(6)
@given(
    kernel=_PAIRS,
    step=_PAIRS,
    size=st.tuples(st.integers(6, 14), st.integers(6, 12)),
    tile=st.tuples(st.integers(1, 6), st.sampled_from([None, 4])),
    is_last=st.booleans(),
)
def test_windows_along_one_axis_after_the_other(
    kernel: tuple[int, int], step: tuple[int, int], size: tuple[int, int], tile: tuple[int, int | None], is_last: bool
) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            if is_last:
                y = y.permute(0, 2, 3, 1)
            first = 1 if is_last else 2
            windows = y.unfold(first, kernel[0], step[0]).unfold(first + 1, kernel[1], step[1])
            y = (windows * windows.softmax(-1)).sum((-1, -2))
            output: Tensor = self.last(y.permute(0, 3, 1, 2) if is_last else y)
            return output

    report = assert_exact(seeded(Pooled), image(2, 3, *size), options=sft.Options(tile=tile, batch_tile=1), steps=1)
    assert_tiled(report, "unfold")


def test_windows_of_signals_and_volumes() -> None:
    class Smoothed(nn.Module):
        def __init__(self, conv: type[nn.Conv1d | nn.Conv3d], axes: tuple[int, ...]) -> None:
            super().__init__()
            self.first, self.last, self.axes = conv(2, 3, 3, padding=1), conv(3, 2, 3), axes

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            for axis in self.axes:
                y = y.unfold(axis, 3, 2).amax(-1)
            output: Tensor = self.last(y)
            return output

    for conv, axes, shape in ((nn.Conv1d, (2,), (2, 2, 45)), (nn.Conv3d, (2, 4), (1, 2, 13, 6, 11))):
        report = assert_exact(seeded(lambda: Smoothed(conv, axes)), image(*shape), options=sft.Options(tile=(3, None)), steps=1)  # noqa: B023
        assert_tiled(report, "unfold")


def test_windows_for_kernels_of_each_pixel() -> None:
    """An involution (Li et al., CVPR 2021): kernels computed from the image, shared by groups of channels, at half its size."""

    class Involution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.kernels = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2 * 9, 3, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            weight = self.kernels(x)
            batch, _, height, width = weight.shape
            windows = F.unfold(x, 3, 1, 1, 2).view(batch, 2, 2, 9, height, width)
            output: Tensor = (weight.view(batch, 2, 9, height, width).unsqueeze(2) * windows).sum(3).view(batch, 4, height, width)
            return output

    report = assert_exact(seeded(Involution), image(2, 3, 17, 14), options=sft.Options(tile=(2, None)), steps=1)
    assert_tiled(report, "im2col")
    assert not any(segment.mode == "whole" for segment in report.plan.segments)
