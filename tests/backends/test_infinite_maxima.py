"""Indices of windows of minus infinity on a GPU, where ATen's kernel for images channels last has the index 0."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.backends.convolution_relu import FusionDevice
from sft.backends.def_use import DefUse
from sft.backends.rewriter import KernelBackend
from sft.lower.custom_ops.windows import raise_to_first_pixels
from sft.lower.program import Program
from tests.helpers.models import image

_aten = torch.ops.aten
_BACKEND = KernelBackend(selector=None, fusion_device=FusionDevice(None))


def _masked(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """An image with one sample of minus infinity, and most pixels of the others."""
    x = image(*shape, seed=seed)
    x[torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.8] = -torch.inf
    x[0] = -torch.inf
    return x


@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    ceil_mode=st.booleans(),
    seed=st.integers(0, 9),
)
def test_corrected_indices_of_the_cuda_kernel_are_those_of_the_cpu(
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    ceil_mode: bool,
    seed: int,
) -> None:
    assume(all(2 * pad <= extent for pad, extent in zip(padding, kernel, strict=True)))
    reach = [(extent - 1) * step + 1 for extent, step in zip(kernel, dilation, strict=True)]
    assume(all(length + 2 * pad >= extent for length, pad, extent in zip(size, padding, reach, strict=True)))
    # A window between the pixels of the image reads none of them.
    assume(all(length >= min(step, extent) for length, step, extent in zip(size, dilation, reach, strict=True)))
    x = _masked((2, 3, *size), seed)
    values, expected = F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode, return_indices=True)
    indices = torch.where(values == -torch.inf, 0, expected)  # as the kernel has them
    raise_to_first_pixels(indices, size[1], stride, padding, dilation)
    assert torch.equal(indices, expected)


class _Pools(nn.Module):
    """Maximum pools of each kind, and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, 1, ceil_mode=True), nn.MaxPool2d(3, 1, 1, dilation=2))
        self.last = nn.MaxPool2d(2, return_indices=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, indices = self.last(self.pools(x))
        return y, indices, F.adaptive_max_pool2d(x, (12, 9))


def _step(model: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y, indices, adaptive = model(x)
    for each in (y, adaptive):  # whole numbers: their sums are the same in any order
        each.backward(torch.arange(1.0, each.numel() + 1, dtype=x.dtype, device=x.device).view_as(each), retain_graph=True)
    assert x.grad is not None
    return [y.detach(), indices, adaptive.detach(), x.grad]


_OPTIONS = {"plain": sft.Options(strategy="none"), "strips": sft.Options(tile=(4, None)), "panels": sft.Options(tile=(8, 16))}


@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_indices_that_are_read_are_corrected(options: sft.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.api.problem_builder.backend_for", lambda *arguments: _BACKEND)
    x = _masked((2, 3, 45, 38)).contiguous(memory_format=torch.channels_last)
    net: Any = sft.compile(_Pools(), x.clone().requires_grad_(), budget="1GiB", options=options)
    for mine, other in zip(_step(net, x), _step(_Pools(), x), strict=True):
        assert torch.equal(mine, other)
    regions = [prepared.region for prepared in net._sft_engine.plan_cache.prepared.values()]
    programs = [program for region in regions for segment in region.segments for program in getattr(segment, "lowered_programs", ())]
    assert sum(map(_num_read_pools, programs))


def _num_read_pools(program: Program) -> int:
    """Number of pools with indices that an instruction reads; each is followed by their correction."""
    calls = program.instructions
    def_use, count = DefUse(instructions=calls, ports=program.ports, results=program.results), 0
    for at, call in enumerate(calls):
        if call.function is _aten.max_pool2d_with_indices.default and def_use.is_read(call.outputs[1]):
            assert calls[at + 1].function is raise_to_first_pixels and calls[at + 1].writes == (call.outputs[1],)
            count += 1
    return count


def _joined_again(x: Tensor, num_times: int) -> Tensor:
    """Each value is read twice, so there are 2**num_times paths to the first one."""
    for _ in range(num_times):
        x = torch.cat([x, x], 1)[:, :2]
    return x


_BOUNDED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "relu": (torch.relu, True),
    "of a pool": (lambda x: F.max_pool2d(F.relu6(x), 3, 1, 1), True),
    "joined": (lambda x: torch.cat([torch.tanh(x), F.silu(x), F.gelu(x), F.hardswish(x), F.hardsigmoid(x)], 1), True),
    "joined others": (lambda x: torch.cat([x.abs(), x.square(), x.exp(), x.softmax(1)], 1), True),
    "sum that may overflow": (lambda x: F.silu(x) + F.silu(x), False),
    "rows": (lambda x: torch.relu(x)[:, :, 1:-1], True),
    "enlarged": (lambda x: F.interpolate(torch.relu(x), scale_factor=2.0), True),
    "joined again and again": (lambda x: _joined_again(torch.relu(x), 40), True),
    "joined with the image": (lambda x: torch.cat([F.relu(x), x], 1), False),
    "difference": (lambda x: torch.sub(F.relu(x), F.relu(-x), alpha=2.0), False),
    "leaky": (lambda x: F.leaky_relu(x, 0.1), False),
    "clamped above": (lambda x: x.clamp(max=1.0), False),
    "clamped at minus infinity": (lambda x: F.hardtanh(x, -math.inf, 5.0), False),
    "shifted by minus infinity": (lambda x: torch.relu(x) - math.inf, False),
    "sum with minus infinity": (lambda x: torch.relu(x) + -math.inf, False),
}


@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
@pytest.mark.parametrize(("function", "is_bounded"), _BOUNDED.values(), ids=_BOUNDED)
def test_pools_of_bounded_values_are_not_corrected(
    function: Callable[[Tensor], Tensor], is_bounded: bool, options: sft.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of a ReLU, which has no window of minus infinity."""

    class Pooled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.max_pool2d(function(x), 2, 2)

    monkeypatch.setattr("sft.api.problem_builder.backend_for", lambda *arguments: _BACKEND)
    x = image(1, 2, 24, 18).contiguous(memory_format=torch.channels_last)
    net: Any = sft.compile(Pooled(), x.clone().requires_grad_(), budget="1GiB", options=options)
    net(x.clone().requires_grad_()).sum().backward()
    regions = [prepared.region for prepared in net._sft_engine.plan_cache.prepared.values()]
    programs = [program for region in regions for segment in region.segments for program in getattr(segment, "lowered_programs", ())]
    corrections = sum(call.function is raise_to_first_pixels for program in programs for call in program.instructions)
    assert bool(corrections) is not is_bounded


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["aten", "auto"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_windows_of_minus_infinity_on_a_gpu(options: sft.Options, dtype: torch.dtype, backend: str) -> None:
    x = _masked((2, 3, 45, 38)).to(dtype)
    expected, options = _step(_Pools(), x), dataclasses.replace(options, backend=backend)
    for images in (x.cuda(), x.cuda().contiguous(memory_format=torch.channels_last)):
        net: Any = sft.compile(_Pools().cuda(), images.clone().requires_grad_(), budget="1GiB", options=options)
        for mine, other in zip(_step(net, images), expected, strict=True):
            assert torch.equal(mine.cpu(), other)
