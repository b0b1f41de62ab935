"""Programs for a GPU compute moments of channels and gradients of biases in wide rows."""

from __future__ import annotations

import copy
from collections import Counter
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
from sft.lower.custom_ops import statistics
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


_ROW_ELEMENTS = st.sampled_from([8, 256, 2**15])


@settings(max_examples=15)
@given(x=_images(), row_elements=_ROW_ELEMENTS)
def test_sums_of_channels_are_those_of_wide_rows(x: Tensor, row_elements: int) -> None:
    with patch.object(statistics, "_WIDE_ROW", row_elements), patch.object(statistics, "_LEAST_ELEMENTS", 0):
        torch.testing.assert_close(channel_sums(x, torch.float64), x.double().sum((0, 2, 3)))


@settings(max_examples=15)
@given(x=_images(), row_elements=_ROW_ELEMENTS, offset=st.sampled_from([0.0, 1000.0]))
def test_moments_of_channels_are_those_of_wide_rows(x: Tensor, row_elements: int, offset: float) -> None:
    channels = x.shape[1]
    x = x + offset + torch.arange(channels)[:, None, None]
    with patch.object(statistics, "_WIDE_ROW", row_elements):
        results = channel_var_mean(x.double(), (1, channels)), channel_var_mean(x, (channels,))
    expected = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    for (mine, single), other in zip(zip(*results, strict=True), expected, strict=True):
        torch.testing.assert_close(mine[0], other, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(single.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_moments_of_strips_are_those_of_wide_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.api.problem_builder.backend_for", lambda *arguments: _BACKEND)
    monkeypatch.setattr(statistics, "_WIDE_ROW", 64)
    monkeypatch.setattr(library_fusion, "_LEAST_MOMENT_ELEMENTS", 1)
    monkeypatch.setattr(library_fusion, "_MOMENT_ROW_BYTES", 2**13)
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4)
    model = nn.Sequential(*layers).to(dtype)
    x = torch.randn(1, 3, 33, 21).to(dtype).contiguous(memory_format=torch.channels_last)
    net: Any = sft.compile(copy.deepcopy(model), x, budget="1GiB", options=sft.Options(tile=(8, None)))
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


def test_sums_of_half_precision_are_rounded_once() -> None:
    """Columns of large sums that cancel."""
    x = torch.ones(1, 4, 256, 512, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    x[..., 1::2] = -1.0
    x[..., 0] += 2**-7
    with patch.multiple(statistics, _WIDE_ROW=256, _LEAST_ELEMENTS=0):
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
