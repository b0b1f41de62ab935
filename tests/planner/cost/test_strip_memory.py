"""Memory profiles of strips at sizes for which they were not lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sft
from examples.models import freeze_norm, resnet18, unet, vgg16
from sft.common.weighted_lru import WeightedLRU
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.search.tiled import CandidateGrid
from tests.helpers.problems import problems_of

_BUILDS: dict[str, Callable[[], nn.Module]] = {
    "vgg16": lambda: vgg16(10),
    "resnet18": lambda: freeze_norm(resnet18(10)),
    "unet": lambda: unet(1),
}


@cache
def _model(name: str) -> nn.Module:
    return _BUILDS[name]()


def _grids(name: str, shapes: Sequence[tuple[int, int]], num_panels: int, shared: WeightedLRU) -> list[CandidateGrid]:
    """Candidate grids of a network at several sizes that share results."""
    problems = problems_of(_model(name), [(1, 3, *shape) for shape in shapes], training=True)
    return [CandidateGrid(replace(problem, shared=shared), sft.Options(), DeviceRates("cpu"), num_panels) for problem in problems]


@given(
    name=st.sampled_from(sorted(_BUILDS)),
    heights=st.tuples(st.integers(260, 900), st.integers(260, 900)),
    widths=st.tuples(st.integers(260, 700), st.integers(260, 700)),
    num_panels=st.sampled_from([1, 1, 2]),
)
def test_grids_of_any_other_size_equal_those_of_a_first_size(
    name: str, heights: tuple[int, int], widths: tuple[int, int], num_panels: int
) -> None:
    shapes = [(height // 32 * 32, width // 32 * 32) for height, width in zip(heights, widths, strict=True)]
    _compare(name, shapes, num_panels)


@pytest.mark.parametrize(("name", "num_panels"), [("vgg16", 1), ("resnet18", 2), ("unet", 1)])
def test_a_grid_of_another_size_equals_that_of_a_first_size(name: str, num_panels: int) -> None:
    _compare(name, [(864, 416), (352, 320)], num_panels)


def _compare(name: str, shapes: Sequence[tuple[int, int]], num_panels: int) -> None:
    """The grid of a second size equals the grid computed alone; otherwise plans would depend on the order of sizes."""
    _, second = _grids(name, shapes, num_panels, WeightedLRU())
    (alone,) = _grids(name, shapes[1:], num_panels, WeightedLRU())
    for ours, other in (
        (second.estimates.peak_bytes, alone.estimates.peak_bytes),
        (second.estimates.cost, alone.estimates.cost),
    ):
        finite = np.isfinite(other)
        assert (np.isfinite(ours) == finite).all()
        np.testing.assert_allclose(ours[finite], other[finite], rtol=1e-12)


def test_strips_of_tall_images_are_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = 0
    sampling = import_module("sft.planner.cost.height_sampling")
    emit_strip = sampling.emit_strip

    def counting(*arguments: object) -> object:
        nonlocal lowered
        lowered += 1
        return emit_strip(*arguments)

    monkeypatch.setattr(sampling, "emit_strip", counting)
    shared = WeightedLRU()
    _grids("vgg16", [(8192, 2048)], 1, shared)
    at_first, lowered = lowered, 0
    _grids("vgg16", [(8192, 1024), (9216, 1536)], 1, shared)
    assert at_first >= 4
    assert lowered == 0


def test_shared_results_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("sft.common.weighted_lru"), "_MAX_WEIGHT", 2)
    shared = WeightedLRU()
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name

    for name in ("a", "b", "a", "c", "a", "b"):
        assert shared.get_or_make(name, partial(make, name)) == name
    assert made == ["a", "b", "c", "b"]  # "b" was the least recently used entry when "c" was added
    assert len(shared) == 2
