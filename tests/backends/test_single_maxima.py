"""Maximum pools of one channel to one pixel in float64 on a GPU, where ATen's kernel for images channels last fails."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

import sft
from sft.backends.convolution_relu import FusionDevice
from sft.backends.rewriter import KernelBackend
from sft.common.torch_internals import TorchDispatchMode
from sft.lower.custom_ops.windows import max_pool_of_one_channel
from tests.helpers.models import seeded

_aten = torch.ops.aten
_BACKEND = KernelBackend(selector=None, fusion_device=FusionDevice(None))


class _Formats(TorchDispatchMode):
    """Recorder of the memory formats that maximum pools see."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.formats: list[torch.memory_format] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.max_pool2d_with_indices.default:
            self.formats.append(suggest_memory_format(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(1, 1, 3, 5), (3, 1, 5, 2), (2, 1, 1, 1), (2, 1, 1, 4), (1, 1, 6, 1)])
def test_the_pool_reads_a_contiguous_image(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=torch.channels_last)
    arguments = (list(shape[2:]), [1, 1], [0, 0], [1, 1], False)
    with _Formats() as recorder:
        values, indices = max_pool_of_one_channel(x, *arguments)
    expected, positions = _aten.max_pool2d_with_indices(x, *arguments)
    assert recorder.formats == [torch.contiguous_format]
    assert torch.equal(values, expected) and torch.equal(indices, positions)


class _Pooled(nn.Module):
    """A map of one channel, the maximum of all but its border, and maxima of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.map = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.map(torch.relu(self.stem(x)))
        return F.max_pool2d(y, (x.shape[2] - 1, x.shape[3] - 1)), F.max_pool2d(y, (4, x.shape[3]))


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    outputs = model(x)
    sum(y.square().sum() for y in outputs).backward()
    assert x.grad is not None
    return [*(y.detach() for y in outputs), x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


_OPTIONS = {"plain": sft.Options(strategy="none"), "strips": sft.Options(tile=(4, None))}


@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_no_pool_to_a_single_pixel_is_left_to_aten(options: sft.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.api.problem_builder.backend_for", lambda *arguments: _BACKEND)
    model = seeded(_Pooled)
    x = torch.randn(2, 3, 24, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    net: Any = sft.compile(copy.deepcopy(model), x.clone().requires_grad_(), budget="1GiB", options=options)
    for mine, other in zip(_step(net, x), _step(model, x), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    (prepared,) = net._sft_engine.plan_cache.prepared.values()
    programs = [program for segment in prepared.region.segments for program in getattr(segment, "lowered_programs", ())]
    calls = [call for program in programs for call in program.instructions]
    assert any(call.function is max_pool_of_one_channel for call in calls)
    pooled = [call.outputs[0] for call in calls if call.function is _aten.max_pool2d_with_indices.default]
    assert all(out is None or out.shape[1:] != (1, 1, 1) for out in pooled)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_single_maxima_on_a_gpu(options: sft.Options) -> None:
    model = seeded(_Pooled)
    x = torch.randn(2, 3, 24, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    net = sft.compile(copy.deepcopy(model).cuda(), x.cuda().requires_grad_(), budget="1GiB", options=options)
    for mine, other in zip(_step(net, x.cuda()), _step(model, x), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-10, atol=1e-10)
