"""Work of the exporter that a capture leaves out: Python code of graphs, lists of operators, ranges of sizes, Python stacks of modes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sft.analysis.frontend.capture import Capture, capture
from tests.helpers.capture_cache import numbered
from tests.helpers.torch_patches import skip_patch

_ROWS = ("generated_code", "composite_operators", "ranges_of_sizes", "mode_stacks")


class _Strips(nn.Module):
    """A network with a rewritten program and sizes that halve."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class _Square(nn.Module):
    """A network for images as high as wide: an equality of two sizes."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.transpose(2, 3)


class _Fixed(nn.Module):
    """A network for images of one height."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.rows


class _Written(nn.Module):
    """A network that reads a view after a write to its base: the exporter decomposes its program, and so calls its graph."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        view = y[:, 1:]
        y.add_(1)
        return y[:, :1] + view


def _captured(model: nn.Module) -> Capture:
    return capture(model, [(2, 3, 16, 16)], [torch.float32], torch.device("cpu"))


@pytest.mark.parametrize("model", [_Strips(), _Square(), _Fixed(), _Written()], ids=lambda model: type(model).__name__)
def test_the_capture_is_the_same_without_the_rows(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    captured = _captured(model)
    skip_patch(monkeypatch, *_ROWS)
    expected = _captured(model)
    assert numbered(captured.graph) == numbered(expected.graph)
    assert (captured.bounds, captured.guards) == (expected.bounds, expected.guards)


def test_a_rewritten_program_has_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("code was generated")

    monkeypatch.setattr(torch.fx.graph.Graph, "python_code", generate)
    assert _captured(_Strips()).graph.operators


def test_composite_operators_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = importlib.import_module("torch._export.utils")
    look_up, calls = functions._materialize_cpp_cia_ops, []

    def counted() -> None:
        calls.append(1)
        look_up()

    monkeypatch.setattr(functions, "_materialize_cpp_cia_ops", counted)
    assert _captured(_Written()).graph.operators
    assert len(calls) == 1


def test_ranges_of_sizes_are_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("inequalities were solved")

    monkeypatch.setattr(importlib.import_module("sympy.solvers.inequalities"), "reduce_inequalities", solve)
    captured = _captured(_Strips())
    assert captured.bind([(2, 3, 40, 31)]) is not None
    assert captured.bind([(2, 3, 2, 31)]) is None, "smaller than the kernel"
