"""Programs for a GPU compute moments of channels and gradients of biases in wide rows."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.backends import library_fusion
from sft.backends.convolution_relu import FusionDevice
from sft.backends.rewriter import KernelBackend
from sft.lower.custom_ops import row_reductions, statistics
from sft.lower.custom_ops.row_reductions import _WideRows, row_moments, row_moments_bytes, sum_rows, sum_rows_bytes
from sft.lower.custom_ops.statistics import (
    biased_var_mean,
    channel_sums,
    channel_var_mean,
)

_BACKEND = KernelBackend(selector=None, fusion_device=FusionDevice(None))


@st.composite
def _images(draw: st.DrawFn) -> Tensor:
    """Random images, contiguous or channels last."""
    channels, extent = draw(st.sampled_from([1, 3, 64, 1000])), st.integers(1, 90)
    x = torch.randn(draw(st.integers(1, 3)), channels, draw(extent), draw(extent))
    return x.contiguous(memory_format=torch.channels_last) if draw(st.booleans()) else x


@contextmanager
def _limits(most_rows: int) -> Iterator[None]:
    """Limits of matrices that are reduced by wide rows, for small images."""
    _WideRows.of.cache_clear()
    widths = patch.multiple(row_reductions, _MOST_WIDE_ROWS=max(2, most_rows // 2), _LEAST_WIDTH=max(2, most_rows // 8))
    with widths, patch.object(row_reductions, "_MOST_ROWS", most_rows), patch.object(statistics, "_LEAST_ELEMENTS", 0):
        yield
    _WideRows.of.cache_clear()


_MOST_ROWS = st.sampled_from([2, 7, 64, 1024])


@settings(max_examples=25)
@given(x=_images(), most_rows=_MOST_ROWS)
def test_sums_of_channels_are_those_of_wide_rows(x: Tensor, most_rows: int) -> None:
    with _limits(most_rows):
        torch.testing.assert_close(channel_sums(x, torch.float64), x.double().sum((0, 2, 3)))


@settings(max_examples=25)
@given(x=_images(), most_rows=_MOST_ROWS, offset=st.sampled_from([0.0, 1000.0]))
def test_moments_of_channels_are_those_of_wide_rows(x: Tensor, most_rows: int, offset: float) -> None:
    channels = x.shape[1]
    x = x + offset + torch.arange(channels)[:, None, None]
    with _limits(most_rows):
        results = channel_var_mean(x.double(), (1, channels)), channel_var_mean(x, (channels,))
    expected = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    for (mine, single), other in zip(zip(*results, strict=True), expected, strict=True):
        torch.testing.assert_close(mine[0], other, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(single.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_moments_of_strips_are_those_of_wide_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.api.problem_builder.backend_for", lambda *arguments: _BACKEND)
    monkeypatch.setattr(library_fusion, "_LEAST_MOMENT_ELEMENTS", 1)
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4)
    model = nn.Sequential(*layers).to(dtype)
    x = torch.randn(1, 3, 33, 21).to(dtype).contiguous(memory_format=torch.channels_last)
    with _limits(16):
        net: Any = sft.compile(copy.deepcopy(model), x, budget="1GiB", options=sft.Options(tile=(8, None)))
        _compare_strips(net, model, x, dtype)


def _compare_strips(net: Any, model: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
    (y := net(x)).double().square().sum().backward()
    (prepared,) = net._sft_engine.plan_cache.prepared.values()
    programs = [program for segment in prepared.region.segments for program in segment.lowered_programs]
    calls = Counter(instruction.function for program in programs for instruction in program.instructions)
    assert calls[channel_var_mean] and not calls[biased_var_mean]
    exact = model.double()
    (expected := exact(x.double())).square().sum().backward()
    if dtype == torch.bfloat16:  # gradients of biases before a norm are rounding errors
        torch.testing.assert_close(y.double(), expected, rtol=0.1, atol=0.1)
        return
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    for mine, other in zip(net.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_moments_of_wide_rows_on_a_gpu(dtype: torch.dtype) -> None:
    x = torch.randn(1, 64, 200, 333, dtype=dtype, device="cuda").contiguous(memory_format=torch.channels_last)
    expected = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    for mine, other in zip(channel_var_mean(x, (64,)), expected, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 512, 1024, 1025, 2049, 30_011, 131_072, 524_288, 4 * 2**20, 2**20 + 7])
def test_few_wide_rows_are_reduced_at_once(num_rows: int) -> None:
    """ATen's reductions of at most 512 wide rows have no staging buffers, and few rows are left."""
    rows = _WideRows.of(num_rows)
    assert (rows is None) is (num_rows <= 1024)
    if rows is not None:
        assert rows.num_wide * rows.width + rows.num_left == num_rows
        assert 2 <= rows.num_wide <= 512 and rows.width >= 128 and rows.num_left < rows.num_wide
        assert rows.num_left == 0 or num_rows % 128


@settings(max_examples=20)
@given(num_rows=st.integers(1, 3000), columns=st.sampled_from([1, 5, 64]), most_rows=_MOST_ROWS)
def test_row_reductions_take_at_most_the_bytes_that_plans_count(num_rows: int, columns: int, most_rows: int) -> None:
    matrix = torch.randn(num_rows, columns, dtype=torch.float64)
    with _limits(most_rows):
        for function, bound, num_results in (
            (lambda: sum_rows(matrix, torch.float64), sum_rows_bytes(num_rows, columns, 8), 1),
            (lambda: row_moments(matrix), row_moments_bytes(num_rows, columns, 8), 2),
        ):
            function()
            with sft.measure_peak("cpu") as peak:
                result = function()
            assert peak.requested_bytes <= bound + num_results * 8 * columns + (0 if bound else 8 * columns), (num_rows, columns, bound)
            del result


def test_sums_of_half_precision_are_rounded_once() -> None:
    """Columns of large sums that cancel."""
    x = torch.ones(1, 4, 256, 512, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    x[..., 1::2] = -1.0
    x[..., 0] += 2**-7
    with _limits(256):
        assert channel_sums(x, torch.bfloat16).tolist() == [256 * 2**-7] * 4


@pytest.mark.parametrize("options", [{"strategy": "none"}, {"tile": (8, None)}], ids=["whole", "strips"])
def test_gradients_of_biases_are_sums_of_channels(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.api.problem_builder.backend_for", lambda *arguments: _BACKEND)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(2)).bfloat16()
    x = torch.randn(1, 3, 32, 20).bfloat16().contiguous(memory_format=torch.channels_last)
    net: Any = sft.compile(model, x, budget="1GiB", options=sft.Options(**options))
    net(x).float().square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    (prepared,) = net._sft_engine.plan_cache.prepared.values()
    programs = [program for segment in prepared.region.segments for program in segment.lowered_programs]
    calls = Counter(instruction.function for program in programs for instruction in program.instructions)
    assert calls[channel_sums] and not calls[torch.ops.aten.sum.dim_IntList]
    exact = model.double()
    exact.zero_grad(set_to_none=True)
    exact(x.double()).square().sum().backward()
    for name, parameter in exact.named_parameters():
        gradient, truth = gradients[name], parameter.grad
        assert gradient is not None and truth is not None
        assert float((gradient.double() - truth).norm()) <= 2e-2 * float(truth.norm()), name
