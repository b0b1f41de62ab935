"""Bags of any number of samples: one search and two traces for all of them, exact at each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft
from tests.helpers.bags import AttentionBag, VisionTransformer
from tests.helpers.exactness import assert_within_budget, gradient_errors, relative_error
from tests.helpers.positional_rng import reseed, seed_of, with_positional_dropout


@dataclass(slots=True)
class _Work:
    """Numbers of samples for which stages of planning ran."""

    traces: list[int] = field(default_factory=list)
    searches: list[int] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)

    def clear(self) -> None:
        for numbers in (self.traces, self.searches, self.programs):
            numbers.clear()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> _Work:
    counted = _Work()
    names = ("sft.api.capture_cache", "sft.api.plan_search", "sft.runtime.sample_segment")
    captures, searching, segments = map(import_module, names)
    capture, plan_segments, lower_samples = captures.capture, searching.plan_segments, segments.lower_samples

    def count_capture(model: nn.Module, shapes: Sequence[tuple[int, ...]], *arguments: Any, **keywords: Any) -> Any:
        counted.traces.append(shapes[0][0])
        return capture(model, shapes, *arguments, **keywords)

    def count_search(problem: Any, *arguments: Any) -> Any:
        counted.searches.append(problem.sized.num_batch)
        return plan_segments(problem, *arguments)

    def count_program(scope: Any, *arguments: Any) -> Any:
        counted.programs.append(scope.batch)
        return lower_samples(scope, *arguments)

    monkeypatch.setattr(captures, "capture", count_capture)
    monkeypatch.setattr(searching, "plan_segments", count_search)
    monkeypatch.setattr(segments, "lower_samples", count_program)
    return counted


class _Bag(AttentionBag):
    """Attention pooling with a weight of each tile from outside."""

    def forward(self, tiles: Tensor, weights: Tensor | None = None) -> Tensor:
        vectors = self.encoder(tiles)
        scores = self.score(vectors) if weights is None else self.score(vectors) + weights.log().unsqueeze(1)
        return self.head((scores.softmax(0) * vectors).sum(0, keepdim=True))  # type: ignore[no-any-return]


def _bag(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return _Bag(VisionTransformer(8, 2, 1, 4, 32, dropout=dropout), 8).double()


def _tiles(num_tiles: int) -> Any:
    return np.random.default_rng(num_tiles).standard_normal((num_tiles, 3, 32, 32))


def _assert_equal(net: Any, model: nn.Module, tiles: Any, *others: Tensor) -> None:
    """Compare a step with one of eager PyTorch: outputs and gradients of parameters."""
    eager = with_positional_dropout(copy.deepcopy(model))
    reseed(eager, seed_of(0))
    net.zero_grad()
    torch.manual_seed(0)
    y = net(tiles, *others)
    expected = eager(torch.as_tensor(tiles), *others)
    y.sum().backward()
    expected.sum().backward()
    assert relative_error(y, expected) < 1e-12
    gradients = [{name: parameter.grad for name, parameter in module.named_parameters()} for module in (net, eager)]
    assert max(gradient_errors(*gradients).values()) < 1e-10


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_bags_of_many_sizes_are_planned_once(dropout: float, work: _Work) -> None:
    model = _bag(dropout)
    net: Any = sft.compile(copy.deepcopy(model), [_tiles(5)], budget="430KiB")
    (run,) = [segment for segment in net.plan.segments if segment.takes_samples]
    assert not net.plan.transferred_from and "transferred" not in net.plan.explain()
    assert work.searches == [5] and work.traces == [5]
    for num_tiles in (17, 64, 130, 2):
        work.clear()
        tiles = _tiles(num_tiles)
        _assert_equal(net, model, tiles)
        plan: sft.Plan = net.plan_for(tiles)
        assert work.searches == [] and work.traces == ([17] if num_tiles == 17 else [])
        assert plan.input_shapes == (tiles.shape,) and plan.total_bytes <= plan.budget_bytes
        if num_tiles == 2:  # the untiled model fits
            assert not plan.transferred_from and plan.redundancy == 1.0
            continue
        assert plan.transferred_from == ((5, 3, 32, 32),)
        assert "decisions of the plan for 5x3x32x32" in " ".join(plan.explain(full=False).split())
        assert [segment.batch_tile for segment in plan.segments if segment.takes_samples] == [run.batch_tile]
        if not dropout:  # a mask has the extents of all samples
            assert run.batch_tile not in work.programs
        assert sft.Plan.from_json(plan.to_json()).transferred_from == plan.transferred_from


def test_chunks_shrink_for_more_samples_and_several_inputs(work: _Work) -> None:
    """Resident tiles with gradients and weights of tiles: bytes grow with the samples; bytes and FLOPs are as projected."""
    model, chunks = _bag(), []
    net: Any = sft.compile(copy.deepcopy(model), [_resident(64), torch.rand(64).double()], budget="6MiB")
    for num_tiles in (64, 97):
        inputs = _resident(num_tiles), torch.rand(num_tiles).double()
        _, _, plan = assert_within_budget(net, *inputs, budget="6MiB", to_the_byte=True)
        _assert_equal(net, model, *inputs)
        chunks.append(max(segment.batch_tile for segment in plan.segments if segment.takes_samples))
    assert work.searches == [64] and chunks[0] > chunks[1] >= 1


def _resident(num_tiles: int) -> Tensor:
    return torch.from_numpy(_tiles(num_tiles)).requires_grad_()


class _Counting(nn.Module):
    """A model that computes with the number of samples, and branches on it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.norm(self.linear(x.flatten(1)).relu())
        places = torch.arange(x.shape[0], dtype=x.dtype).unsqueeze(1)
        pooled = (vectors.square() * places).sum(0) / x.shape[0] + vectors.amax(0) * (1 / x.shape[0])
        return pooled * 2 if x.shape[0] > 40 else pooled  # type: ignore[no-any-return]


def test_numbers_and_branches_follow_the_samples(work: _Work) -> None:
    torch.manual_seed(0)
    model = _Counting().double()
    net: Any = sft.compile(copy.deepcopy(model), (5, 3, 2, 2), budget="64MiB")
    for num_samples in (7, 33, 64, 12, 90, 2, 70):
        _assert_equal(net, model, np.random.default_rng(0).standard_normal((num_samples, 3, 2, 2)))
    assert work.traces == [5, 7, 64, 90]  # two for each branch


def test_a_plan_from_a_file_serves_other_numbers_of_samples(work: _Work) -> None:
    model, budget = _bag(), "430KiB"
    plan: sft.Plan = sft.compile(copy.deepcopy(model), [_tiles(5)], budget=budget).plan  # type: ignore[assignment]
    work.clear()
    net: Any = sft.compile(copy.deepcopy(model), [_tiles(17)], budget=budget, plan=sft.Plan.from_json(plan.to_json()))
    assert work.searches == [] and net.plan.transferred_from == plan.input_shapes


def test_a_plan_for_a_gpu_has_its_number_of_samples(monkeypatch: pytest.MonkeyPatch, work: _Work) -> None:
    """With the overhead of the device, too; so only the first plan is transferred."""
    monkeypatch.setattr("sft.api.plan_search.PlanSearch._is_for_gpu", property(lambda _: True))
    net: Any = sft.compile(_bag(), [_tiles(200)], budget="24MiB")
    for num_tiles in (300, 310):
        plan: sft.Plan = net.plan_for(_tiles(num_tiles))
        assert plan.transferred_from == ((200, 3, 32, 32),) and 0 < plan.overhead_bytes < plan.total_bytes <= plan.budget_bytes
    assert work.searches and set(work.searches) == {200}
