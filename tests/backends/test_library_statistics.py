"""Programs for a GPU update the running statistics of all norms in one instruction, and sum gradients of biases in wide rows."""

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
from sft.analysis.passes.pipeline import run_passes
from sft.backends import library_fusion
from sft.backends.convolution_relu import FusionDevice
from sft.backends.rewriter import KernelBackend
from sft.lower.custom_ops import statistics
from sft.lower.custom_ops.statistics import (
    biased_var_mean,
    channel_sums,
    channel_var_mean,
    running_mean,
    running_var,
    update_counters,
    update_running_statistics,
)
from sft.planner.projection import plain_programs
from tests.helpers.exactness import assert_exact
from tests.helpers.problems import problem_of, with_resources

_BACKEND = KernelBackend(selector=None, fusion_device=FusionDevice(None))


class _Norms(nn.Module):
    """Convolutions with norms; the norms in ``shared`` run twice."""

    def __init__(self, *norms: nn.Module, shared: int | None = None) -> None:
        super().__init__()
        self.norms, self.shared = nn.ModuleList(norms), shared
        self.convs = nn.ModuleList([nn.Conv2d(4 if number else 3, 4, 3, padding=1) for number in range(len(norms))])

    def forward(self, x: Tensor) -> Tensor:
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x))
            x = norm(x).relu() if number == self.shared else x.relu()
        return x


def _calls(model: nn.Module) -> Counter[Any]:
    """Functions of the forward program of an untiled step, with their numbers."""
    problem = with_resources(problem_of(model, (2, 3, 16, 12), training=True, passes=run_passes), backend=_BACKEND)
    return Counter(instruction.function for instruction in plain_programs(problem)[0].instructions)


def _plain(count: int, **options: Any) -> list[nn.Module]:
    return [nn.BatchNorm2d(4, **options) for _ in range(count)]


@pytest.mark.parametrize(
    ("norms", "shared", "num_grouped", "num_separate"),
    [
        pytest.param(_plain(3), None, 1, 0, id="three norms"),
        pytest.param([*_plain(2), *_plain(2, momentum=0.3)], None, 2, 0, id="two momenta"),
        pytest.param([*_plain(3), *_plain(1, momentum=0.3)], None, 1, 2, id="one norm of another momentum"),
        pytest.param([*_plain(3), *_plain(2, momentum=None)], None, 1, 4, id="cumulative averages"),
        pytest.param([*_plain(3), *_plain(2, track_running_stats=False)], None, 1, 0, id="without statistics"),
        pytest.param(_plain(1), None, 0, 2, id="one norm"),
        pytest.param(_plain(3), 1, 1, 2, id="a norm that runs twice"),
    ],
)
def test_statistics_of_one_momentum_are_updated_together(
    norms: list[nn.Module], shared: int | None, num_grouped: int, num_separate: int
) -> None:
    calls = _calls(_Norms(*norms, shared=shared))
    assert calls[update_running_statistics] == num_grouped
    assert calls[running_mean] + calls[running_var] == num_separate
    assert calls[update_counters] == (1 if len(norms) >= 3 else 0)


@pytest.mark.parametrize("options", [{"strategy": "none"}, {"tile": (8, None)}], ids=["whole", "strips"])
@pytest.mark.parametrize("shared", [None, 1])
def test_buffers_outputs_and_gradients_are_those_of_the_model(
    options: dict[str, Any], shared: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sft.api.problem_builder.backend_for", lambda *arguments: _BACKEND)
    torch.manual_seed(0)
    norms = [*_plain(3), *_plain(2, momentum=None), *_plain(3, momentum=0.3, affine=False)]
    assert_exact(_Norms(*norms, shared=shared), torch.randn(2, 3, 16, 12), options=sft.Options(**options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_update_takes_no_more_memory_than_projected(dtype: torch.dtype) -> None:
    channels = 4096
    moments = [torch.rand(1, channels, 3) + 1 for _ in range(3)]
    running = [torch.rand(channels, dtype=dtype) for _ in range(6)]
    targets = [torch.empty_like(each) for each in running]
    with sft.measure_peak("cpu") as peak:
        update_running_statistics(targets, moments, moments, running, 0.1)
    assert 0 < peak.num_bytes <= 8 * 6 * channels * 4
    for number, (target, before) in enumerate(zip(targets, running, strict=True)):
        alone = (running_mean if number < 3 else running_var)(moments[number % 3], before, 0.1)
        torch.testing.assert_close(target, alone)


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
