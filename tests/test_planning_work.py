"""What planning does, counted: captures, programs that are lowered, steps that are projected."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.analysis.barenodes import bare_nodes
from sft.analysis.capture import capture
from sft.pausing import cycles_kept
from tests.helpers.captured import numbered
from tests.helpers.models import Residual, chain, image, seeded

_SHAPE = (1, 3, 64, 48)


def test_planning_does_not_look_for_cycles_and_leaves_the_collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    preparing = import_module("sft.preparing")
    plan_segments, seen = preparing.plan_segments, []

    def watched(*arguments: Any) -> Any:
        seen.append(gc.isenabled())
        return plan_segments(*arguments)

    monkeypatch.setattr(preparing, "plan_segments", watched)
    model = seeded(Residual)
    assert gc.isenabled()
    sft.plan(model, _SHAPE, budget="1GiB")
    assert gc.isenabled()
    with pytest.raises(sft.BudgetError):
        sft.plan(model, _SHAPE, budget=1)
    assert gc.isenabled()
    gc.disable()
    try:
        sft.plan(model, _SHAPE, budget="1GiB")
        assert not gc.isenabled()  # who switched it off wants it to stay so
        with cycles_kept():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert seen == [False, False, False]


class _Mixture(nn.Module):
    """In-place forms, norms, views: what the exporter writes down in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, stride=2)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return nn.functional.interpolate(torch.cat([y, y.transpose(2, 3).transpose(2, 3)], 1), scale_factor=2).flatten(2).mean(2)


@contextmanager
def _nothing_left_out() -> Iterator[None]:
    yield


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["plain", "decomposed"])
def test_bare_nodes_make_the_graph_of_full_ones(monkeypatch: pytest.MonkeyPatch, autocast: torch.dtype | None) -> None:
    module = import_module("sft.analysis.capture")
    functional, stacks = module.functional, []

    def watched(exported: Any, **options: Any) -> Any:
        stacks.append(sum("stack_trace" in node.meta for node in exported.graph.nodes))
        return functional(exported, **options)

    monkeypatch.setattr(module, "functional", watched)
    found = []
    for context in (_nothing_left_out, bare_nodes):
        monkeypatch.setattr(module, "bare_nodes", context)
        made = capture(_Mixture(), [_SHAPE], [torch.float32], torch.device("cpu"), autocast=autocast)
        found.append(made)
    full, bare = found
    assert (numbered(bare.graph), bare.bounds) == (numbered(full.graph), full.bounds)
    assert set(bare.guards) < set(full.guards)  # memory formats hold for more than one pixel only
    assert stacks[0] > 0 and stacks[1] == 0


def test_a_size_of_which_a_pixel_is_left_is_not_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    preparing, num_captures = import_module("sft.preparing"), 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_captures
        num_captures += 1
        return capture(*arguments, **options)

    monkeypatch.setattr(preparing, "capture", counted)
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.AvgPool2d(2))
    model = seeded(lambda: chain(*layers, nn.Conv2d(4, 5, 3, padding=1))).double()
    net = sft.compile(model, _SHAPE, budget="1GiB")
    for shape in ((1, 3, 4, 5), (1, 3, 5, 4), (1, 3, 7, 40)):
        x, own = image(*shape), image(*shape)
        expected = torch.autograd.grad(model(own.requires_grad_()).square().sum(), [own, *model.parameters()])
        found = torch.autograd.grad(net(x.requires_grad_()).square().sum(), [x, *net.parameters()])
        torch.testing.assert_close(net(x), model(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert num_captures == 1
