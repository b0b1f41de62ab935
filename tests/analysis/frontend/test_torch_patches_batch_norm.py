"""Captures with the shape function of batch norm equal captures with its decomposition."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decompositions

from sft.analysis.frontend.capture import Capture, capture
from sft.analysis.frontend.torch_patches import apply_patches
from sft.common.errors import InputError
from tests.helpers.capture_cache import numbered
from tests.helpers.torch_patches import skip_patch

_SHAPE = (2, 3, 32, 40)


class _Norms(nn.Module):
    """Batch norms of every kind that ``nn`` has."""

    def __init__(self) -> None:
        super().__init__()
        kinds: list[dict[str, bool]] = [
            {},
            {"affine": False},
            {"track_running_stats": False},
            {"affine": False, "track_running_stats": False},
        ]
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(3 if i == 0 else 4, 4, 3), nn.BatchNorm2d(4, **kind), nn.ReLU()) for i, kind in enumerate(kinds))
        )
        self.last = nn.InstanceNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.layers(x))
        return y


def _captured(model: nn.Module, device: str, autocast: torch.dtype | None) -> Capture:
    return capture(model, [_SHAPE], [torch.float32], torch.device(device), autocast=autocast)


@pytest.mark.parametrize(("device", "autocast", "training"), [("meta", None, True), ("cpu", None, False), ("cpu", torch.bfloat16, True)])
def test_the_graph_is_that_of_the_decomposition(
    monkeypatch: pytest.MonkeyPatch, device: str, autocast: torch.dtype | None, training: bool
) -> None:
    with torch.device(device):
        model = _Norms().train(training)
    ours = _captured(model, device, autocast)
    skip_patch(monkeypatch, "batch_norm_shapes")
    expected = _captured(model, device, autocast)
    assert numbered(ours.graph) == numbered(expected.graph)
    assert sum("norm" in node.target for node in ours.graph.operators) >= 3


def test_the_decomposition_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def decomposition(*arguments: object) -> None:
        raise AssertionError("the decomposition was run")

    decomposition.__signature__ = inspect.signature(decompositions.native_batch_norm_helper)  # type: ignore[attr-defined]
    monkeypatch.setattr(decompositions, "native_batch_norm_helper", decomposition)
    assert _captured(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "cpu", None).graph.operators
    assert getattr(decompositions, "native_batch_norm_helper") is decomposition  # noqa: B009 (mypy believes its declared type)


def test_an_unknown_decomposition_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def decomposition(values: object) -> None:
        raise AssertionError

    monkeypatch.setattr(decompositions, "native_batch_norm_helper", decomposition)
    with apply_patches("batch_norm_shapes"):
        assert getattr(decompositions, "native_batch_norm_helper") is decomposition  # noqa: B009


def test_a_norm_of_other_channels_is_refused() -> None:
    with pytest.raises(InputError, match="refuses"):
        _captured(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(5)), "cpu", None)


class _Halved(nn.Module):
    """Norms of concatenated tensors, whose strides PyTorch computes as products of ``max(1, size)``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, stride=2, padding=1)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        y = self.norms[0](torch.cat([y, y.relu()], 1))
        y = self.layers[1](y[:, :4])
        out: Tensor = self.norms[1](torch.cat([y, y.relu()], 1))
        return out


def test_visibly_contiguous_strides_need_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = _Halved()
    proved: list[torch.Size] = []

    def like(value: Tensor, **options: object) -> Tensor:
        proved.append(value.shape)
        return original(value, **options)  # type: ignore[arg-type]

    original = torch.empty_like
    module = importlib.import_module("sft.analysis.frontend.replacement_functions")
    monkeypatch.setattr(module.torch, "empty_like", like)
    ours = _captured(model, "meta", None)
    monkeypatch.undo()
    skip_patch(monkeypatch, "batch_norm_shapes")
    assert not proved
    assert numbered(ours.graph) == numbered(_captured(model, "meta", None).graph)
