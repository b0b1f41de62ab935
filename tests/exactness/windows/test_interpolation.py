"""Interpolation to any size, between convolutions and joins, in strips, panels and tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, note
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.analysis.ir.ops.resize_matrix import AxisResampling
from sft.common.interval import Interval
from sft.lower.rules.resampled_range import ResampledRange
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most
from tests.helpers.models import chain, image, seeded
from tests.helpers.tilings import is_tiled, tiled_options

_CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@dataclass(frozen=True, kw_only=True)
class Resample:
    """Arguments of ``F.interpolate``."""

    mode: str
    size: tuple[int, ...] | None = None
    scale_factor: tuple[float, ...] | None = None
    align_corners: bool | None = None
    recompute: bool | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.interpolate(
            x,
            size=self.size,
            scale_factor=self.scale_factor,
            mode=self.mode,
            align_corners=self.align_corners,
            recompute_scale_factor=self.recompute,
        )


class Net(nn.Module):
    """A convolution, a resampling, another convolution; the resampled skip is added."""

    def __init__(self, how: Resample, axes: int, kernel: int, *, skip: bool) -> None:
        super().__init__()
        self.how, self.skip = how, skip
        self.before = _CONVOLUTIONS[axes](2, 3, kernel, padding=kernel // 2)
        self.after = _CONVOLUTIONS[axes](3, 2, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(torch.tanh(self.how(self.before(x))))
        return y + self.how(x) if self.skip else y


@st.composite
def _ways(draw: st.DrawFn, extents: tuple[int, ...]) -> Resample:
    axes = len(extents)
    mode = draw(st.sampled_from(["nearest", "nearest-exact", _LINEAR[axes], *(["bicubic", "area"] if axes == 2 else [])]))
    align = draw(st.booleans()) if mode in ("bicubic", _LINEAR[axes]) else None
    if draw(st.booleans()):
        return Resample(mode=mode, size=tuple(draw(st.integers(1, 45)) for _ in extents), align_corners=align)
    common = st.sampled_from([0.5, 1.5, 1.7, 2.0, 3.0, 2.5, 4 / 3, 1.0])
    scales = tuple(draw(st.floats(1.01 / extent, 3.0) | common) for extent in extents)
    recompute = draw(st.booleans()) and mode != "area"
    return Resample(mode=mode, scale_factor=scales, align_corners=None if mode == "area" else align, recompute=recompute or None)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Net, Tensor, sft.Options]:
    axes = draw(st.sampled_from([1, 2, 2, 2, 3]))
    extents = tuple(draw(st.integers(2, (40, 40, 24, 7)[axes])) for _ in range(axes))
    how, kernel, skip = draw(_ways(extents)), draw(st.sampled_from([1, 3])), draw(st.booleans())
    note(f"{how}, {extents}")
    x = image(draw(st.integers(1, 3)), 2, *extents)
    return seeded(lambda: Net(how, axes, kernel, skip=skip)), x, draw(tiled_options(extents))


@at_most(7)
@given(case=_cases())
def test_any_resampling_any_tiling(case: tuple[Net, Tensor, sft.Options]) -> None:
    model, x, options = case
    how = model.how
    report = assert_exact(model, x, options=options, steps=1)
    if how.mode == "area":
        return  # fixed sizes are grids of sums, few rows run whole
    if tuple(how(x).shape) != tuple(x.shape):
        assert is_tiled(report.plan, "upsample"), report.plan


@pytest.mark.parametrize("options", [sft.Options(tile=(4, 5))], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        Resample(mode="bilinear", scale_factor=(2.0, 2.0)),
        Resample(mode="bilinear", scale_factor=(1.7, 0.6), align_corners=True),
        Resample(mode="bicubic", size=(31, 7), align_corners=False),
        Resample(mode="bilinear", scale_factor=(1.3, 1.3), recompute=True),
        Resample(mode="nearest", scale_factor=(1.5, 2.0)),
        Resample(mode="nearest", scale_factor=(2.0, 3.0)),
        Resample(mode="nearest-exact", scale_factor=(2.0, 2.0)),
        Resample(mode="nearest-exact", size=(9, 40)),
        Resample(mode="area", scale_factor=(0.45, 0.3)),
    ],
    ids=str,
)
def test_resampling_between_convolutions(how: Resample, options: sft.Options) -> None:
    report = assert_exact(seeded(lambda: Net(how, 2, 3, skip=True)), image(2, 2, 23, 11), options=options, steps=1)
    assert is_tiled(report.plan, "upsample", "adaptive")


@st.composite
def _powers(draw: st.DrawFn) -> tuple[Net, Tensor, sft.Options]:
    axes = draw(st.sampled_from([1, 2, 2, 3]))
    extents = tuple(draw(st.integers(2, (20, 20, 12, 5)[axes])) for _ in range(axes))
    factors = tuple(draw(st.sampled_from([1.0, 2.0, 2.0, 4.0])) for _ in extents)
    assume(max(factors) > 1)
    by_size = draw(st.booleans())
    sizes = tuple(int(factor) * extent for factor, extent in zip(factors, extents, strict=True))
    target = {"size": sizes} if by_size else {"scale_factor": factors}
    how = Resample(mode=_LINEAR[axes], align_corners=False, **target)
    x = image(draw(st.integers(1, 3)), 2, *extents)
    return seeded(lambda: Net(how, axes, draw(st.sampled_from([1, 3])), skip=draw(st.booleans()))), x, draw(tiled_options(sizes))


@at_most(10)
@given(case=_powers())
def test_powers_of_two_are_interpolated_by_aten(case: tuple[Net, Tensor, sft.Options]) -> None:
    """In strips, panels and tiles of any number of samples; nothing is gathered."""
    model, x, options = case
    with patch.object(ResampledRange, "__call__", side_effect=AssertionError("gathered")):
        assert_exact(model, x, options=options, steps=1)


class UNet(nn.Module):
    """Decoder stages with the size of their skip, as necessary at odd sizes."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how
        self.down = nn.ModuleList([nn.Conv2d(3 if not i else 4, 4, 3, padding=1) for i in range(3)])
        self.bottom = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(8, 4, 3, padding=1) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = torch.relu(layer(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            x = torch.relu(layer(torch.cat([F.interpolate(x, size=skip.shape[-2:], **self.how), skip], dim=1)))
        return x


class Pyramid(nn.Module):
    """A feature pyramid: top-down sums of coarse maps resized to the finer ones (Lin et al. 2017)."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.stages = nn.ModuleList([nn.Conv2d(4, 4, 3, stride=2, padding=1) for _ in range(3)])
        self.lateral = nn.ModuleList([nn.Conv2d(4, 3, 1) for _ in range(4)])
        self.smooth = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = [torch.relu(self.stem(x))]
        for stage in self.stages:
            maps.append(torch.relu(stage(maps[-1])))
        levels = [self.lateral[3](maps[3])]
        for level in (2, 1, 0):
            lateral = self.lateral[level](maps[level])
            levels.append(lateral + F.interpolate(levels[-1], size=lateral.shape[-2:], mode=self.mode))
        return [self.smooth(value) for value in levels]


class Dilated(nn.Module):
    """Parallel dilations and the image's mean, resized to the image at the end (DeepLab; Chen et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = chain(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ReLU())
        self.rates = nn.ModuleList([nn.Conv2d(4, 3, 3, padding=rate, dilation=rate) for rate in (1, 2, 3)])
        self.pooled = nn.Conv2d(4, 3, 1)
        self.head = nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        pooled = F.interpolate(self.pooled(F.adaptive_avg_pool2d(y, 1)), size=y.shape[-2:], mode="bilinear", align_corners=False)
        y = self.head(torch.cat([*(rate(y) for rate in self.rates), pooled], dim=1))
        return F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


_TILES = [sft.Options(tile=(9, None)), sft.Options(tile=(16, 11)), sft.Options(tile=(14, 16), halo="recompute")]


@pytest.mark.parametrize("options", _TILES)
@pytest.mark.parametrize(
    "how", [{"mode": "bilinear", "align_corners": False}, {"mode": "bilinear", "align_corners": True}, {"mode": "nearest"}], ids=str
)
def test_unet_at_odd_sizes(how: dict[str, Any], options: sft.Options) -> None:
    report = assert_exact(seeded(lambda: UNet(**how)), image(1, 3, 29, 21), options=options, steps=1)
    assert [segment.mode for segment in report.plan.segments] == ["tiled"]


@pytest.mark.parametrize("options", _TILES)
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_feature_pyramid_at_odd_sizes(mode: str, options: sft.Options) -> None:
    report = assert_exact(seeded(lambda: Pyramid(mode)), image(2, 3, 27, 21), options=options, steps=1)
    assert [segment.mode for segment in report.plan.segments] == ["tiled"]


@pytest.mark.parametrize("options", _TILES)
def test_dilated_head_at_odd_sizes(options: sft.Options) -> None:
    report = assert_exact(seeded(Dilated), image(2, 3, 29, 23), options=options, steps=1)
    assert [segment.mode for segment in report.plan.segments] == ["tiled", "whole", "tiled"]
    assert is_tiled(report.plan, "upsample")


@at_most(12)
@given(
    kind=st.sampled_from(["nearest", "nearest exact", "linear", "cubic", "window"]),
    extent=st.integers(1, 200),
    length=st.integers(1, 200),
    align_corners=st.booleans(),
    is_double=st.booleans(),
)
def test_access_map_covers_every_window(kind: Any, extent: int, length: int, align_corners: bool, is_double: bool) -> None:
    sampling = AxisResampling(kind=kind, extent=extent, length=length, align_corners=align_corners, is_double=is_double)
    access, forward, adjoint = sampling.access, sampling.forward, sampling.adjoint
    for row in range(length):
        read = access.read(Interval(row, row + 1))
        assert read.start <= forward.start[row] < forward.stop[row] <= read.stop
    for column in range(extent):
        for row in range(adjoint.start[column], adjoint.stop[column]):
            assert column in range(*_span(access.read(Interval(row, row + 1))))


def _span(interval: Interval) -> tuple[int, int]:
    return interval.start, interval.stop


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((1, 1, 54, 18), {"size": (38, 18)}),  # row 19 of 38 begins at 27 of 54; in double precision just below
        ((1, 1, 54, 18), {"size": (38, 100)}),
        ((1, 2, 54, 100), {"size": (38, 90)}),
        ((1, 2, 54, 100), {"size": (38, 91)}),
        ((1, 1, 50, 6), {"scale_factor": 2.3, "mode": "nearest-exact"}),
        ((1, 2, 56, 7, 6), {"size": (46, 6, 6)}),
        ((1, 2, 56), {"size": (46,)}),
    ],
    ids=str,
)
def test_nearest_pixels_are_those_that_aten_finds(shape: tuple[int, ...], how: dict[str, Any]) -> None:
    """ATen has a loop in single precision for images with rows plus columns of 128, and one in the image's precision for others."""
    model, x = nn.Sequential(nn.Upsample(**how), nn.Identity()), image(*shape)
    for tile in ((5, None), None):
        net = sft.compile(model, shape, options=sft.Options(tile=tile))
        assert torch.equal(net(x), model(x)), tile


@pytest.mark.parametrize("factors", [(2.0, 1.0), (1.0, 3.0), (2.0, 2.0)])
@pytest.mark.parametrize("activation", [nn.ReLU(True), nn.LeakyReLU(0.1, True), nn.SiLU(True)])
def test_a_tile_of_an_upsampled_image_is_activated_in_place(factors: tuple[float, float], activation: nn.Module) -> None:
    """A tile has complete input rows of upsampled values, and only the needed rows of later ones: they share no buffer."""
    model = nn.Sequential(
        *(nn.Conv2d(2, 2, (1, 5), (1, 2)), nn.Upsample(scale_factor=factors), activation, nn.Conv2d(2, 1, 1), nn.Conv2d(1, 3, (4, 2)))
    )
    for tile in ((10, 20), (7, 5)):
        assert_exact(model, image(2, 2, 37, 20), options=sft.Options(tile=tile, halo="recompute"), steps=1)
