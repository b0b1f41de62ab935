"""Work of the exporter that a capture leaves out: code of graphs, lists and kernels of operators, ranges of sizes, stacks of modes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sft.analysis.frontend.capture import Capture, capture
from tests.helpers.capture_cache import numbered
from tests.helpers.torch_patches import skip_patch

_ROWS = ("generated_code", "composite_operators", "composite_kernels", "ranges_of_sizes", "mode_stacks")


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


def test_kernels_of_composite_operators_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _captured(_Written())
    owner = importlib.import_module("torch._ops").OperatorBase
    fake_kernels = importlib.import_module("torch._subclasses.fake_impls").op_implementations_dict
    linear = torch.ops.aten.linear.default
    before = dict(linear.py_kernels), dict(fake_kernels)
    register, registered = owner.py_impl, []

    def counted(self: Any, k: Any) -> Any:
        registered.append((self, k))
        return register(self, k)

    monkeypatch.setattr(owner, "py_impl", counted)
    assert numbered(_captured(_Written()).graph) == numbered(expected.graph)
    assert not registered
    assert (linear.py_kernels, fake_kernels) == before

    # Kernels of another context are made anew.
    linear.py_kernels[torch._C.DispatchKey.PreDispatch] = linear
    assert numbered(_captured(_Written()).graph) == numbered(expected.graph)
    assert {operator for operator, _ in registered} == {linear}
    assert linear.py_kernels.pop(torch._C.DispatchKey.PreDispatch) is linear
    assert (linear.py_kernels, fake_kernels) == before


def test_ranges_of_sizes_are_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("inequalities were solved")

    monkeypatch.setattr(importlib.import_module("sympy.solvers.inequalities"), "reduce_inequalities", solve)
    captured = _captured(_Strips())
    assert captured.bind([(2, 3, 40, 31)]) is not None
    assert captured.bind([(2, 3, 2, 31)]) is None, "smaller than the kernel"
