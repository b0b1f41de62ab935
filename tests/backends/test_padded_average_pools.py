"""Gradients of padded average pools on a GPU, where ATen's are wrong for images that are channels last (pytorch/pytorch#188344)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.backends.convolution_relu import FusionDevice
from sft.backends.rewriter import KernelBackend
from sft.lower.custom_ops.windows import average_pool_gradient
from sft.lower.program import Program
from tests.helpers.models import seeded

_aten = torch.ops.aten
_BACKEND = KernelBackend(selector=None, fusion_device=FusionDevice(None))


@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    ceil_mode=st.booleans(),
    counts_padding=st.booleans(),
    divisor=st.sampled_from([None, 1, 5]),
)
def test_gradient_without_padding_is_that_of_autograd(
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    ceil_mode: bool,
    counts_padding: bool,
    divisor: int | None,
) -> None:
    assume(all(2 * pad <= extent for pad, extent in zip(padding, kernel, strict=True)))
    assume(all(length + 2 * pad >= extent for length, pad, extent in zip(size, padding, kernel, strict=True)))
    x = torch.zeros(2, 3, *size, dtype=torch.float64, requires_grad=True)
    y = F.avg_pool2d(x, kernel, stride, padding, ceil_mode, counts_padding, divisor)
    grad = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad(y, x, grad)
    result = average_pool_gradient(grad, x.detach(), kernel, stride, padding, ceil_mode, counts_padding, divisor)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert result.is_contiguous(memory_format=torch.channels_last)


class _Pools(nn.Module):
    """Padded average pools of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.pools = nn.Sequential(
            nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.AvgPool2d(5, 2, 2, ceil_mode=True, divisor_override=7)
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(self.pools(torch.relu(self.stem(x)))).square().mean((2, 3))
        return result


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def _programs(net: Any) -> list[Program]:
    (prepared,) = net._sft_engine.plan_cache.prepared.values()
    return [program for segment in prepared.region.segments for program in getattr(segment, "lowered_programs", ())]


@pytest.mark.parametrize(
    "options", [sft.Options(strategy="none"), sft.Options(tile=(4, None)), sft.Options(tile=(4, 12))], ids=["plain", "strips", "panels"]
)
def test_no_padded_gradient_is_left_to_aten(options: sft.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.api.problem_builder.backend_for", lambda *arguments: _BACKEND)
    model = seeded(_Pools)
    x = torch.randn(1, 3, 45, 38, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )
    net: Any = sft.compile(copy.deepcopy(model), x.requires_grad_(), budget="1GiB", options=options)
    for mine, other in zip(_step(net, x.detach()), _step(model, x.detach()), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    programs = _programs(net)
    calls = [call for program in programs for call in program.instructions]
    assert not any(call.function is _aten.avg_pool2d_backward.default and any(call.arguments[4]) for call in calls)
    is_in_panels = options.tile == (4, 12)  # they are padded by instructions of their own
    assert any(call.function is average_pool_gradient for call in calls) is not is_in_panels


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tile", [None, (4, None)], ids=["plain", "strips"])
def test_padded_pools_on_a_gpu(tile: tuple[int, None] | None) -> None:
    model = seeded(_Pools)
    x = torch.randn(1, 3, 45, 38, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = _step(model, x)
    options = sft.Options(tile=tile) if tile else sft.Options(strategy="none")
    for images in (x.cuda(), x.cuda().contiguous(memory_format=torch.channels_last)):
        net = sft.compile(copy.deepcopy(model).cuda(), images.clone().requires_grad_(), budget="1GiB", options=options)
        for mine, other in zip(_step(net, images), expected, strict=True):
            torch.testing.assert_close(mine.cpu(), other, rtol=1e-10, atol=1e-10)
