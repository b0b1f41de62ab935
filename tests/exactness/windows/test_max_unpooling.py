"""Max pooling with indices, and unpooling at these indices: exact in strips, ties included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most
from tests.helpers.models import image, seeded
from tests.helpers.tilings import is_tiled, tiled_options

_CONVOLUTIONS: tuple[Callable[..., nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POOLS: tuple[Callable[..., nn.Module], ...] = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_UNPOOLS: tuple[Callable[..., nn.Module], ...] = (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)


class _Places(nn.Module):
    """A pooling with readers of its indices; few distinct values, so that windows have many ties."""

    def __init__(self, axes: int, **how: Any) -> None:
        super().__init__()
        self.pool = _POOLS[axes - 1](return_indices=True, **how)
        self.after = _CONVOLUTIONS[axes - 1](3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pooled, places = self.pool(x.round())
        return self.after(pooled), places.to(x.dtype)


@st.composite
def _pooled(draw: st.DrawFn) -> tuple[nn.Module, Tensor, sft.Options]:
    axes = draw(st.sampled_from([1, 2, 2, 3]))
    extents = tuple(draw(st.integers(4, 15 if axis < 2 else 6)) for axis in range(axes))
    kernel = tuple(draw(st.integers(1, 3)) for _ in extents)
    how = {
        "kernel_size": kernel,
        "stride": tuple(draw(st.integers(1, 3)) for _ in extents),
        "padding": tuple(draw(st.integers(0, k // 2)) for k in kernel),
        "dilation": tuple(draw(st.integers(1, 2)) if k * 2 <= e else 1 for k, e in zip(kernel, extents, strict=True)),
        "ceil_mode": draw(st.booleans()),
    }
    note(f"{how} of {extents}")
    return seeded(lambda: _Places(axes, **how)), image(draw(st.integers(1, 2)), 3, *extents), draw(tiled_options(extents))


@at_most(4)
@given(case=_pooled())
def test_indices_are_those_of_the_full_image(case: tuple[nn.Module, Tensor, sft.Options]) -> None:
    model, x, options = case
    report = assert_exact(model, x, options=options, steps=1)
    assert all(segment.mode == "tiled" for segment in report.plan.segments)


@pytest.mark.parametrize("fill", [None, -torch.inf, torch.nan])
def test_indices_equal_those_of_eager_pytorch(fill: float | None) -> None:
    """Ties, windows of minus infinity only, and the last of several NaNs."""
    x = image(2, 3, 13, 9).round()
    if fill is not None:
        x[:, :, :5, :4] = fill
    pool = nn.MaxPool2d(3, 2, 1, return_indices=True)
    net = sft.compile(pool, tuple(x.shape), options=sft.Options(tile=(2, 4)))
    eager, ours = pool(x.float()), net(x.float())
    torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)
    assert ours[1].dtype == torch.int64


class _SegNet(nn.Module):
    """Encoder and decoder that share indices (Badrinarayanan, Kendall, Cipolla 2017), at any size."""

    def __init__(self, axes: int, kernels: tuple[Any, ...], *, norm: bool, ceil: bool) -> None:
        super().__init__()
        conv = _CONVOLUTIONS[axes - 1]
        self.pools = nn.ModuleList([_POOLS[axes - 1](k, return_indices=True, ceil_mode=ceil) for k in kernels])
        self.unpools = nn.ModuleList([_UNPOOLS[axes - 1](k) for k in kernels])
        self.down = nn.ModuleList([conv(3 if not i else 4, 4, 3, padding=1) for i in range(len(kernels))])
        self.up = nn.ModuleList([conv(4, 4 if i else 2, 3, padding=1) for i in range(len(kernels))])
        self.norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes - 1](4) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        pooled = []
        for conv, pool in zip(self.down, self.pools, strict=True):
            size = conv(x)
            x, places = pool(size)
            pooled.append((places, size.shape))
        x = self.norm(x).tanh()
        for conv, unpool, (places, shape) in zip(reversed(self.up), reversed(self.unpools), reversed(pooled), strict=True):
            x = conv(unpool(x, places, output_size=shape))
        return x


@st.composite
def _segnets(draw: st.DrawFn) -> tuple[nn.Module, Tensor, sft.Options]:
    axes = draw(st.sampled_from([1, 2, 2, 3]))
    kernels = tuple(tuple(draw(st.integers(1, 3)) for _ in range(axes)) for _ in range(draw(st.integers(1, 2))))
    extents = tuple(draw(st.integers(9, 20 if axis < 2 else 10)) for axis in range(axes))
    ceil, norm = draw(st.booleans()), draw(st.booleans())
    note(f"{kernels} of {extents}, {ceil=}")
    model = seeded(lambda: _SegNet(axes, kernels, norm=norm, ceil=ceil)).train()
    return model, image(draw(st.integers(1, 2)), 3, *extents), draw(tiled_options(extents))


@at_most(5)
@given(case=_segnets())
def test_any_unpooling_any_tiling(case: tuple[nn.Module, Tensor, sft.Options]) -> None:
    model, x, options = case
    report = assert_exact(model, x, options=options, steps=1)
    assert is_tiled(report.plan, "unpool")


def test_an_encoder_and_decoder_in_one_walk() -> None:
    options = sft.Options(tile=(3, None), state_every=2)
    model = seeded(lambda: _SegNet(2, (2, 2), norm=False, ceil=False))
    report = assert_exact(model, image(2, 3, 19, 13), options=options, steps=1)
    assert [segment.mode for segment in report.plan.segments] == ["tiled"]


class _Pair(nn.Module):
    """A pooling, and an unpooling to the size that torch chooses."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.pool, self.unpool = nn.MaxPool2d(return_indices=True, **how), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        pooled, places = self.pool(self.before(x))
        y: Tensor = self.after(self.unpool(pooled.tanh(), places))
        return y


def test_to_another_width_than_was_pooled_it_runs_whole() -> None:
    """Indices then count rows of another length: eager puts values elsewhere, or raises. One missing odd row has no effect."""
    model = seeded(lambda: _Pair({"kernel_size": 2}))
    options = sft.Options(tile=(4, None))
    report = assert_exact(model, image(1, 3, 13, 8), options=options, steps=1)
    assert is_tiled(report.plan, "unpool")
    net: Any = sft.compile(model, (1, 3, 12, 8), options=options)
    for width, streams in ((8, True), (9, False), (10, True)):
        plan = net.plan_for(image(1, 3, 12, width))
        assert is_tiled(plan, "unpool") == streams
        assert streams or "give output_size" in " ".join(plan.explain().split())


@pytest.mark.parametrize("how", [{"kernel_size": 3, "stride": 2}, {"kernel_size": 2, "padding": 1}], ids=str)
def test_windows_that_overlap_or_leave_the_image_run_whole(how: dict[str, Any]) -> None:
    net: Any = sft.compile(_Pair(how).double(), (1, 3, 14, 10), options=sft.Options(tile=(4, None)))
    (reason,) = net._sft_engine.phases().whole_reasons.values()
    assert "stride = kernel" in reason
