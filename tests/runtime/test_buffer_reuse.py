"""Outputs that reuse the buffers of sources after their last read: the same results, fewer bytes, and excluded cases."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.analysis.passes.pipeline import run_passes
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.materialize import materialize
from sft.planner.search.tiled import CandidateGrid
from sft.runtime.tiled_segment import TiledSegment
from tests.helpers.examples import at_most
from tests.helpers.models import image, seeded
from tests.helpers.plans import least_budget
from tests.helpers.problems import problem_of
from tests.helpers.random_networks import KINDS, Wild, WildNet, wilds

_Function = Callable[[Tensor], Tensor]


class _Gated(nn.Module):
    """A residual block with a norm over the image and a gate from its mean (Hu et al., 2018)."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm, self.gate = nn.GroupNorm(2, channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.norm(self.first(x)).relu())
        gate = torch.sigmoid(self.gate(y.mean((2, 3))))[:, :, None, None]
        out: Tensor = (x + y * gate).relu()
        return out


class _AfterStatistics(nn.Module):
    """A function of an image and of its mean, in the sweep after that of the mean."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.before, self.after = function, nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        z = self.function(y, y.mean((2, 3), keepdim=True))
        out: Tensor = self.after(z * z.mean((2, 3), keepdim=True))
        return out


_TILES = ((3, None), (4, 5), (1, 3), (30, None))
_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scaled": lambda y, m: (y * m).relu() + 1.0,
    "read twice": lambda y, m: y * m + (y - m).sigmoid(),
    "moved down by padding": lambda y, m: F.pad((y * m)[:, :, :-3], (0, 0, 3, 0)),
    "moved up by padding": lambda y, m: F.pad((y * m)[:, :, 2:], (0, 0, 0, 2)),
    "rolled": lambda y, m: (y * m).roll((2, -3), (2, 3)),
    "convolved and added": lambda y, m: F.avg_pool2d(y, 3, 1, 1) * m + y,
    "after a convolution": lambda y, m: F.avg_pool2d(y * m, 3, 1, 1),
    "pooled with its own rows": lambda y, m: F.max_pool2d(y * m, 3, 1, 1) - y,
}


def _assert_same(model: nn.Module, x: Tensor, options: sft.Options, budget: int | str = "4GiB") -> Any:
    net = sft.compile(model, tuple(x.shape), budget=budget, options=options)
    with torch.no_grad():
        for _ in range(2):
            for ours, reference in zip(_tensors(net(x)), _tensors(model(x)), strict=True):
                torch.testing.assert_close(ours, reference, rtol=1e-11, atol=1e-11)
    return net


def _tensors(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else output


def _reuses(net: Any) -> bool:
    """True if an output of the latest plan may take a source's buffer."""
    _, prepared = net._sft_engine.plan_cache.latest
    segments = prepared.region.segments
    return any(segment.reusable_sources for segment in segments if isinstance(segment, TiledSegment))


@pytest.mark.parametrize(("name", "tile"), list(product(_FUNCTIONS, _TILES)))
def test_results_do_not_change(name: str, tile: tuple[int, int | None]) -> None:
    model = seeded(lambda: _AfterStatistics(_FUNCTIONS[name]))
    _assert_same(model, image(2, 3, 13, 11), sft.Options(tile=tile))


@pytest.mark.parametrize(
    ("name", "reuses"), [("scaled", True), ("read twice", True), ("moved down by padding", False), ("convolved and added", False)]
)
def test_outputs_that_lag_their_source_reuse_it(name: str, reuses: bool) -> None:
    model = seeded(lambda: _AfterStatistics(_FUNCTIONS[name]))
    assert _reuses(_assert_same(model, image(1, 3, 13, 11), sft.Options(tile=(3, None)))) == reuses


def test_skipped_strips_compare_sources_that_are_not_overwritten() -> None:
    model = seeded(lambda: _AfterStatistics(_FUNCTIONS["scaled"]))
    x = image(1, 3, 40, 11)
    x[:, :, 8:] = 0.25
    _assert_same(model, x, sft.Options(tile=(3, None), skip_repeats=True))


def test_gated_blocks_fit_less_than_three_activations_and_keep_to_the_plan() -> None:
    shape, activation_bytes = (1, 8, 96, 80), 8 * 96 * 80 * 8
    model = seeded(lambda: nn.Sequential(_Gated(), _Gated(), nn.Conv2d(8, 2, 1)))
    x = image(*shape)
    with torch.no_grad():
        least_bytes = least_budget(model, x)
        net: Any = sft.compile(model, x, budget=least_bytes)
        plan = net._sft_engine.last_plan
        with sft.measure_peak() as peak:
            own = x.clone()
            out = net(own)
        torch.testing.assert_close(out, model(x), rtol=1e-11, atol=1e-11)
    assert plan.total_bytes <= least_bytes
    assert peak.num_bytes <= plan.projected_peak_bytes
    assert plan.projected_peak_bytes < 3.5 * activation_bytes  # the input included


def test_estimates_without_a_backward_pass_free_values_after_their_last_reader() -> None:
    problem = problem_of(nn.Sequential(*(_Gated() for _ in range(4))), (1, 8, 256, 192), training=False, passes=run_passes)
    grid = CandidateGrid(problem, sft.Options(), DeviceRates("cpu"))
    exact = materialize(problem, grid.choices(grid.last)).projection.peak_bytes
    assert grid.last.peak_bytes == pytest.approx(exact, rel=0.35)


@at_most(10)
@given(
    wild=wilds(max_wishes=6, kinds=tuple(kind for kind in KINDS if kind != "norm")),
    rows=st.integers(1, 9),
    cols=st.none() | st.integers(3, 9),
)
def test_any_network_is_the_same_without_gradients(wild: Wild, rows: int, cols: int | None) -> None:
    _assert_same(WildNet(wild), wild.image(), sft.Options(tile=(rows, cols if wild.num_axes > 1 else None)))
