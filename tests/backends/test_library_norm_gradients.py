"""Programs for a GPU compute the input gradient of a frozen norm as a norm without mean and shift."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.backends.convolution_relu import FusionDevice
from sft.backends.rewriter import KernelBackend
from tests.helpers.exactness import relative_error

_aten = torch.ops.aten
_BACKEND = KernelBackend(selector=None, fusion_device=FusionDevice(None))


class _Norms(nn.Module):
    """Frozen norms that follow no convolution: with a weight, without one, and with a fixed one."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(6, affine=affine) for affine in (True, False, True)])
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        for norm in self.norms:
            assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None and norm.running_var is not None
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            for parameter in norm.parameters():
                nn.init.normal_(parameter)
                parameter.requires_grad_(trains)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.conv(x))
        for norm in self.norms:
            x = torch.relu(norm(x))
        return x

    def train(self, mode: bool = True) -> _Norms:
        super().train(mode)
        self.norms.eval()
        return self


def _calls(net: Any) -> Counter[Any]:
    (prepared,) = net._sft_engine.plan_cache.prepared.values()
    programs = {id(program): program for segment in prepared.region.segments for program in segment.lowered_programs}
    return Counter(call.function for program in programs.values() for call in program.instructions)


@pytest.mark.parametrize("trains", [True, False], ids=["trained", "fixed"])
@pytest.mark.parametrize("options", [{"tile": (8, None)}, {"strategy": "none"}], ids=["strips", "whole"])
def test_gradients_are_those_of_the_model(options: dict[str, Any], trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = _Norms(trains=trains).double().train()
    x = torch.randn(2, 3, 24, 12, dtype=torch.float64, requires_grad=True)
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    y = model(x)
    direction = torch.randn_like(y)
    expected = torch.autograd.grad((y * direction).sum(), wanted)
    peaks, counts = [], []
    for backend in (None, _BACKEND):
        monkeypatch.setattr("sft.api.problem_builder.backend_for", lambda *_, chosen=backend: chosen)
        net: Any = sft.compile(model, [x], budget="1GiB", options=sft.Options(**options))
        out = net(x)
        gradients = torch.autograd.grad((out * direction).sum(), wanted)
        assert max(relative_error(ours, theirs) for ours, theirs in zip((out, *gradients), (y, *expected), strict=True)) <= 1e-12
        peaks.append(net.plan.projected_peak_bytes)
        counts.append(_calls(net))
    assert peaks[1] <= peaks[0] + 2 * 6 * 8  # zeros in place of the mean
    norm, gradient = _aten._native_batch_norm_legit_no_training.default, _aten.native_batch_norm_backward.default
    assert counts[1][norm] == counts[0][norm] + counts[0][gradient]
    assert counts[1][gradient] == (counts[0][gradient] * 2 // 3 if trains else 0)  # one norm has no weight
    for call in (call for segment in _segments(net) for program in segment.lowered_programs for call in program.instructions):
        if call.function is _aten.native_batch_norm_backward.default:
            assert not call.arguments[-1][0] and call.outputs[0] is None


def _segments(net: Any) -> Any:
    (prepared,) = net._sft_engine.plan_cache.prepared.values()
    return prepared.region.segments
