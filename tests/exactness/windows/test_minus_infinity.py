"""Maxima of minus infinity only, as of masked log probabilities: the first element gets the gradient, never padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.distributed.merge_statistics import merge_statistics
from tests.helpers.models import image

_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_ADAPTIVE_POOLS = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)


def _masked(shape: tuple[int, ...], seed: int) -> Tensor:
    """An image with one sample masked, and most pixels of the others."""
    x = image(*shape, seed=seed)
    x[torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.8] = -torch.inf
    x[0] = -torch.inf
    return x


def _assert_same(pool: nn.Module, x: Tensor, options: sft.Options) -> None:
    ours, eager = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = sft.compile(pool, [ours], options=options)(ours), pool(eager)
    assert torch.equal(y, expected)
    # Whole numbers: their sums are the same in any order.
    gradient = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view_as(y)
    y.backward(gradient)
    expected.backward(gradient)
    assert ours.grad is not None and eager.grad is not None
    assert torch.equal(ours.grad, eager.grad)


@st.composite
def _pools(draw: st.DrawFn, axes: int) -> tuple[nn.Module, tuple[int, ...], sft.Options]:
    kernel, dilation = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    padding, stride = draw(st.integers(1, kernel // 2)), draw(st.integers(1, kernel))
    pool = _POOLS[axes - 1](kernel, stride, padding, dilation, ceil_mode=draw(st.booleans()))
    extents = [draw(st.integers(8, 14 if axis < 2 else 9)) for axis in range(axes)]
    width = draw(st.none() | st.integers(2, extents[1])) if axes > 1 else None
    in_strips = st.builds(lambda rows: sft.Options(tile=(rows, width)), st.integers(1, extents[0]))
    return pool, (2, 2, *extents), draw(in_strips | st.just(sft.Options(strategy="none")))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_windows_at_the_border(axes: int) -> None:
    @settings(max_examples=max(4, settings().max_examples // 25))
    @given(case=_pools(axes), seed=st.integers(0, 9))
    def check(case: tuple[nn.Module, tuple[int, ...], sft.Options], seed: int) -> None:
        pool, shape, options = case
        _assert_same(pool, _masked(shape, seed), options)

    check()


@pytest.mark.parametrize("tile", [(4, None), (5, 4)])
def test_a_border_in_strips(tile: tuple[int, int | None]) -> None:
    _assert_same(nn.MaxPool2d(3, 2, 1), torch.full((1, 1, 12, 6), -torch.inf, dtype=torch.float64), sft.Options(tile=tile))
    _assert_same(nn.MaxPool2d(4, 1, 2, dilation=2), torch.full((1, 1, 12, 9), -torch.inf, dtype=torch.float64), sft.Options(tile=tile))


@pytest.mark.parametrize("tile", [(3, None), (9, None)])
def test_indices_in_volumes(tile: tuple[int, int | None]) -> None:
    """Not channels last, where PyTorch's own operator ignores the slice."""
    pool = nn.MaxPool3d(3, 2, 1, return_indices=True)
    x = _masked((2, 2, 9, 7, 6), 0)
    ours, eager = sft.compile(pool, [x], options=sft.Options(tile=tile))(x), pool(x)
    assert torch.equal(ours[1], eager[1])


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_windows_of_an_adaptive_pool(axes: int, size: int) -> None:
    pool = _ADAPTIVE_POOLS[axes - 1](size)
    _assert_same(pool, _masked((2, 2, *(9, 6, 5)[:axes]), 0), sft.Options(tile=(2, None)))
    _assert_same(pool, _masked((2, 2, *(9, 6, 5)[:axes]), 0), sft.Options(strategy="none"))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_the_largest_of_an_image(axes: int) -> None:
    x = _masked((2, 2, *(9, 6, 5)[:axes]), 0)
    _assert_same(_ADAPTIVE_POOLS[axes - 1](1), x, sft.Options(tile=(2, None)))


def test_peaks_of_bands_merge() -> None:
    """Peaks of a band without rows, of the first rows, and of others."""
    nothing = [-torch.inf, -torch.inf]
    for bands in ([nothing, [-torch.inf, 3.0], [-torch.inf, 7.0]], [[-torch.inf, 7.0], [-torch.inf, 3.0], nothing]):
        merged = merge_statistics("argmax", [torch.tensor([band], dtype=torch.float64) for band in bands])
        assert merged.tolist() == [[-torch.inf, 3.0]]
