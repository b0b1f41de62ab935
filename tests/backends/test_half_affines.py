"""Affine maps of half-precision images on a GPU: one pass over the image, forward and back, and no image in fp32."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.backends.convolution_relu import FusionDevice
from sft.backends.rewriter import KernelBackend
from sft.lower.custom_ops.statistics import affine_channels, affine_gradient_sums
from sft.lower.program import Program

_aten = torch.ops.aten
_BACKEND = KernelBackend(selector=None, fusion_device=FusionDevice(None))
_STRIPS = sft.Options(tile=(8, None))
_HALF = (torch.bfloat16, torch.float16)


def _normed(norm: Callable[[int], nn.Module]) -> nn.Module:
    layers = (
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        norm(8),
        nn.SiLU(),
        nn.MaxPool2d(2),
    )
    return nn.Sequential(
        *layers, nn.Conv2d(8, 4, 3, padding=1, bias=False), norm(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


class _Skip(nn.Module):
    """A norm with a result that a sum reads, of an image that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        z = self.conv(torch.relu(self.norms[0](y)))
        result: Tensor = torch.relu(self.norms[1](z) + y).mean((2, 3))
        return result


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "batchnorm": lambda: _normed(nn.BatchNorm2d),
    "groupnorm": lambda: _normed(lambda channels: nn.GroupNorm(2, channels)),
    "instancenorm": lambda: _normed(lambda channels: nn.InstanceNorm2d(channels, affine=True)),
    "skip": _Skip,
}


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients of a step, in float64."""
    y = model(x)
    y.double().square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [y.detach().double(), *(gradient.double() for gradient in gradients if gradient is not None)]


def _compiled(model: nn.Module, x: Tensor, backend: KernelBackend | None, options: sft.Options) -> tuple[list[Tensor], list[Program], int]:
    """Step of a compiled copy; its programs, and its projected peak."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sft.api.problem_builder.backend_for", lambda *arguments: backend)
        net: Any = sft.compile(copy.deepcopy(model), x, budget="1GiB", options=options)
        values = _step(net, x)
    (prepared,) = net._sft_engine.plan_cache.prepared.values()
    programs = [program for segment in prepared.region.segments for program in getattr(segment, "lowered_programs", ())]
    return values, programs, net.plan.projected_peak_bytes


def _wide_images(programs: list[Program]) -> int:
    """Number of images in fp32 that programs allocate."""
    return sum(
        out is not None and out.dtype == torch.float32 and len(out.shape) == 4 and out.root == out.number and min(out.shape[2:]) > 4
        for program in programs
        for instruction in program.instructions
        for out in instruction.outputs
    )


@pytest.mark.parametrize("name", _MODELS)
@pytest.mark.parametrize("dtype", _HALF, ids=str)
def test_strips_are_as_accurate_as_without_and_take_less_memory(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = _MODELS[name]().to(dtype)
    x = torch.randn(1, 3, 48, 40).to(dtype).contiguous(memory_format=torch.channels_last)
    truth = _step(copy.deepcopy(model).double(), x.double())
    ours, programs, peak_bytes = _compiled(model, x, _BACKEND, _STRIPS)
    theirs, before, peak_before = _compiled(model, x, None, _STRIPS)
    calls, calls_before = (Counter(i.function for program in each for i in program.instructions) for each in (programs, before))
    assert calls[affine_channels] >= 3 and calls[affine_gradient_sums] >= 1
    assert not calls[_aten.addcmul.out] and calls_before[_aten.addcmul.out]
    assert _wide_images(programs) < 0.7 * _wide_images(before)  # moments still cast their image
    assert peak_bytes <= peak_before
    for exact, mine, other in zip(truth, ours, theirs, strict=True):
        scale = float(exact.norm()) + 1e-3
        rounding = 8 * torch.finfo(dtype).eps
        assert float((mine - exact).norm()) <= 1.25 * float((other - exact).norm()) + rounding * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wider_types_stay(dtype: torch.dtype) -> None:
    model = _MODELS["batchnorm"]().to(dtype)
    x = torch.randn(1, 3, 48, 40, dtype=dtype).contiguous(memory_format=torch.channels_last)
    _, programs, _ = _compiled(model, x, _BACKEND, _STRIPS)
    assert not any(i.function in (affine_channels, affine_gradient_sums) for program in programs for i in program.instructions)


def test_statistics_of_each_sample_stay_in_a_batch() -> None:
    """Scales of each sample are not scales of channels."""
    torch.manual_seed(0)
    model = _MODELS["groupnorm"]().bfloat16()
    x = torch.randn(2, 3, 48, 40).bfloat16().contiguous(memory_format=torch.channels_last)
    options = sft.Options(tile=(8, None), batch_tile=2)
    ours, programs, _ = _compiled(model, x, _BACKEND, options)
    theirs, _, _ = _compiled(model, x, None, options)
    assert not any(i.function is affine_channels for program in programs for i in program.instructions)
    truth = _step(copy.deepcopy(model).double(), x.double())
    for exact, mine, other in zip(truth, ours, theirs, strict=True):
        assert float((mine - exact).norm()) <= 1.25 * float((other - exact).norm()) + 0.03 * float(exact.norm()) + 1e-4


@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 12), st.integers(1, 12)),
    dtype=st.sampled_from(_HALF),
    is_channels_last=st.booleans(),
    has_shift=st.booleans(),
)
def test_the_map_is_rounded_once(shape: tuple[int, ...], dtype: torch.dtype, is_channels_last: bool, has_shift: bool) -> None:
    memory_format = torch.channels_last if is_channels_last else torch.contiguous_format
    x, grad = (torch.randn(shape).to(dtype).contiguous(memory_format=memory_format) for _ in range(2))
    scale, shift = (torch.randn(1, shape[1], 1, 1) for _ in range(2))
    mapped = affine_channels(x, scale, shift if has_shift else None)
    expected = x.float() * scale + (shift if has_shift else 0.0)
    torch.testing.assert_close(mapped, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert mapped.stride() == x.stride() or 1 in shape
    products, sums = affine_gradient_sums(grad, x)
    assert products.shape == sums.shape == scale.shape
    torch.testing.assert_close(products.double(), (grad.double() * x.double()).sum((0, 2, 3), True), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums.double(), grad.double().sum((0, 2, 3), True), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_rows", [1, 7, 300])
@pytest.mark.parametrize("dtype", _HALF, ids=str)
def test_a_gpu_computes_the_same(dtype: torch.dtype, num_rows: int) -> None:
    """Also rows of a larger buffer, as strips have them, and without a shift."""
    buffer, grad = (torch.randn(1, 64, num_rows + 2, 130).to(dtype).contiguous(memory_format=torch.channels_last) for _ in range(2))
    scale, shift = (torch.randn(1, 64, 1, 1) for _ in range(2))
    x, dy = buffer[:, :, 1 : num_rows + 1], grad[:, :, 1 : num_rows + 1]
    on_gpu = [value.cuda() for value in (buffer, grad, scale, shift)]
    gpu_x, gpu_dy = (value[:, :, 1 : num_rows + 1] for value in on_gpu[:2])
    for term, gpu_term in ((shift, on_gpu[3]), (None, None)):
        ours = affine_channels(gpu_x, on_gpu[2], gpu_term).cpu()
        torch.testing.assert_close(ours, affine_channels(x, scale, term), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    for ours, theirs in zip(affine_gradient_sums(gpu_dy, gpu_x), affine_gradient_sums(dy, x), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-2)
