"""Captures with the shape functions of pointwise functions and of interpolation equal captures with their decompositions."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sft.analysis.frontend.capture import Capture, capture
from tests.helpers.capture_cache import numbered
from tests.helpers.torch_patches import skip_patch

_SHAPE = (2, 3, 20, 24)
_ROWS = ("pointwise_shapes", "upsample_linear_shapes", "upsample_nearest_shapes")


class _Functions(nn.Module):
    """Functions of images that are contiguous, permuted, cut and expanded, of integers, and with options."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(F.leaky_relu(x.relu(), 0.3)).sigmoid().tanh()
        y = F.silu(y.permute(0, 1, 3, 2)).neg().permute(0, 1, 3, 2)
        y = F.elu(y[:, :, 1:, ::2]) + F.gelu(y[:, :, 1:, ::2], approximate="tanh")
        y = y + F.softplus(y[:, :1].expand(-1, 3, -1, -1), beta=2) + y.mean((2, 3), keepdim=True).exp()
        return y + (y > 0).long().neg().relu().abs() + F.relu_(y * 2).sqrt()


class _Enlarged(nn.Module):
    """Interpolation of every kind, by factors and to sizes; of a permuted image, and of integers."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
        y = F.interpolate(y, scale_factor=0.5, mode="nearest-exact") + F.interpolate(y, size=x.shape[2:])
        z = F.interpolate(y.permute(0, 1, 3, 2), scale_factor=1.5, mode="bilinear", align_corners=False).permute(0, 1, 3, 2)
        return y.mean((2, 3)) + z.mean((2, 3)) + F.interpolate((x * 9).byte(), scale_factor=3).double().mean((2, 3))


class _Volume(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.unsqueeze(2)
        y = F.interpolate(y, scale_factor=(1, 2, 2), mode="trilinear") + F.interpolate(y, scale_factor=(1, 2, 2)).relu()
        return y.flatten(1, 2)


def _captured(model: nn.Module, dtype: torch.dtype) -> Capture:
    return capture(model, [_SHAPE], [dtype], torch.device("cpu"))


@pytest.mark.parametrize("model", [_Functions(), _Enlarged(), _Volume()], ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_graph_is_that_of_the_decompositions(monkeypatch: pytest.MonkeyPatch, model: nn.Module, dtype: torch.dtype) -> None:
    captured = _captured(model, dtype)
    skip_patch(monkeypatch, *_ROWS)
    expected = _captured(model, dtype)
    assert numbered(captured.graph) == numbered(expected.graph)
    assert captured.bounds == expected.bounds


def test_no_decomposition_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    table = importlib.import_module("torch._decomp").decomposition_table

    def decomposition(*arguments: object, **keywords: object) -> None:
        raise AssertionError("the decomposition was run")

    for operator in (torch.ops.aten.relu.default, torch.ops.aten.sigmoid.default):
        monkeypatch.setitem(table, operator, decomposition)
    assert _captured(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Sigmoid()), torch.float32).graph.operators
    kernels = importlib.import_module("torch._subclasses.fake_impls").get_fast_op_impls()
    assert torch.ops.aten.relu.default not in kernels, "other code has torch's kernels again"
