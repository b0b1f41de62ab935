"""Captures with the shape function of `grid_sample` equal captures with its decomposition."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decompositions
from torch.nn import functional as F

import sft
from sft.analysis.frontend.capture import Capture, capture
from sft.analysis.frontend.torch_patches import apply_patches
from sft.common.errors import InputError
from tests.helpers.capture_cache import numbered
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded
from tests.helpers.torch_patches import skip_patch

_SHAPE = (2, 3, 20, 24)


class _Warped(nn.Module):
    """A convolution sampled at the positions of another one, in several modes and on a grid of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.places = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.values(x)
        grid = self.places(x).permute(0, 2, 3, 1).tanh()
        y = F.grid_sample(y, grid, align_corners=True)
        y = F.grid_sample(y, grid, mode="nearest", padding_mode="border", align_corners=False)
        return F.grid_sample(y, grid, mode="bicubic", padding_mode="reflection", align_corners=False)


class _Volume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values, self.places = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(2, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.grid_sample(self.values(x), self.places(x).permute(0, 2, 3, 4, 1).tanh(), align_corners=False)


def _captured(model: nn.Module) -> Capture:
    return capture(model.float(), [_SHAPE], [torch.float32], torch.device("cpu"))


def test_the_graph_is_that_of_the_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Warped()
    ours = _captured(model)
    skip_patch(monkeypatch, "grid_sample_shapes")
    monkeypatch.setattr(
        importlib.import_module("sft.analysis.frontend.functionalize"), "functionalize_by_rewriting", lambda *arguments: None
    )
    assert numbered(ours.graph) == numbered(_captured(model).graph)
    assert [node.target for node in ours.graph.operators].count("aten.grid_sampler.default") == 3


def test_the_decomposition_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def decomposition(*arguments: object) -> None:
        raise AssertionError("the decomposition was run")

    decomposition.__signature__ = inspect.signature(decompositions._grid_sampler_2d)  # type: ignore[attr-defined]
    monkeypatch.setattr(decompositions, "_grid_sampler_2d", decomposition)
    monkeypatch.setattr(
        importlib.import_module("sft.analysis.frontend.functionalize"), "_functionalize_by_decomposition", decomposition
    )  # it needs no decomposition
    assert _captured(_Warped()).graph.operators


def test_an_unknown_decomposition_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def decomposition(values: object) -> None:
        raise AssertionError

    monkeypatch.setattr(decompositions, "_grid_sampler_2d", decomposition)
    with apply_patches("grid_sample_shapes"):
        assert getattr(decompositions, "_grid_sampler_2d") is decomposition  # noqa: B009 (mypy believes its declared type)


@pytest.mark.parametrize(("batch", "coordinates"), [(1, 2), (2, 3)])
def test_a_grid_that_does_not_fit_is_refused(batch: int, coordinates: int) -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.grid_sample(x, x[:batch, :coordinates].permute(0, 2, 3, 1), align_corners=False)

    with pytest.raises(InputError, match="refuses"):
        _captured(Wrong())


@pytest.mark.parametrize("make", [_Warped, _Volume])
def test_samples_are_exact(make: type[nn.Module]) -> None:
    x = image(2, 2, 6, 9, 8) if make is _Volume else image(*_SHAPE)
    assert_exact(seeded(make), x)
    assert_exact(seeded(make), x, options=sft.Options(tile=(4, None)))
