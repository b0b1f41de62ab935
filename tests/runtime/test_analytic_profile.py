"""The analytic profile of a sweep equals the sweep on the simulated machine, byte for byte and FLOP for FLOP."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.planner.problem import PlanningProblem
from sft.planner.projection import Projection, project_step
from sft.runtime.region import Region
from tests.helpers.capture_cache import one_capture_a_model

captures = one_capture_a_model("halo", "cols", "rows", "every", "slots", "grad")


class _Skip(nn.Module):
    """A long skip (carried over many strips), strides, pools and a global value."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 5, padding=2)
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1))
        self.up = nn.Upsample(scale_factor=2)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = torch.relu(self.stem(x))
        joined = torch.cat([self.up(self.down(stem)), stem], 1)
        out: torch.Tensor = self.head(joined.mean((2, 3)))
        return out


#: Number of strips for each state, or number of slots.
_POLICIES = [(1, None), (2, None), (3, None), (7, None), (None, 1), (None, 2), (None, 4)]
_CARRIED = [(cols, rows, every, slots) for cols in (None, 4) for rows in (1, 3, 8, 64) for every, slots in _POLICIES]
_RECOMPUTED = [(6, rows, 1, None) for rows in (3, 8, 64)]


class _Dense(_Skip):
    """Outputs: an image at full resolution, one that a later segment reads, and a global value."""

    def forward(self, x: torch.Tensor) -> Any:
        stem = torch.relu(self.stem(x))
        joined = torch.cat([self.up(self.down(stem)), stem], 1)
        return joined, stem, joined.mean((2, 3))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Projection]:
    """Compare each projection that planning makes with the sweep."""
    seen: list[Projection] = []

    def both(problem: PlanningProblem, region: Region, **keywords: Any) -> Projection:
        summed, walked = project_step(problem, region), project_step(problem, region, exactly=True)
        assert summed == walked
        seen.append(summed)
        return summed

    # `sft.plan` is the function; the package of that name is reached by import alone.
    monkeypatch.setattr(import_module("sft.planner.materialize"), "project_step", both)
    return seen


@pytest.mark.parametrize(
    ("halo", "cols", "rows", "every", "slots"), [*(("carry", *c) for c in _CARRIED), *(("recompute", *c) for c in _RECOMPUTED)]
)
@pytest.mark.parametrize("grad", [True, False])
def test_profile_equals_the_simulated_sweep(
    halo: str, cols: int | None, rows: int, every: int | None, slots: int | None, grad: bool, compared: list[Projection]
) -> None:
    options = sft.Options(tile=(rows, cols), batch_tile=2, halo=halo, state_every=every, state_slots=slots)
    with torch.set_grad_enabled(grad):
        sft.compile(_Skip(), (3, 3, 44, 10), options=options)
    assert compared


@pytest.mark.parametrize(
    ("halo", "cols", "rows", "every", "slots"), [("carry", None, 3, 2, None), ("carry", 4, 8, None, 2), ("recompute", 6, 3, 1, None)]
)
@pytest.mark.parametrize("output", ["device", "host"])
def test_profile_where_strips_may_be_left_out(
    halo: str, cols: int | None, rows: int, every: int | None, slots: int | None, output: str, compared: list[Projection]
) -> None:
    """Both count the comparison of rows and the separate gradients of sources."""
    options = sft.Options(tile=(rows, cols), halo=halo, state_every=every, state_slots=slots, skip_repeats=True)
    net: Any = sft.compile(_Dense(), torch.empty(3, 3, 44, 10, requires_grad=True), options=options, output=output)
    assert compared and net.plan.skips_repeats


_OF_OUTPUTS = [
    ("carry", None, 3, 2, None, True),
    ("carry", 4, 8, None, 2, True),
    ("carry", 4, 3, 1, None, False),
    ("recompute", 6, 8, 1, None, True),
]


@pytest.mark.parametrize(("halo", "cols", "rows", "every", "slots", "grad"), _OF_OUTPUTS)
def test_profile_of_outputs_on_the_host(
    halo: str, cols: int | None, rows: int, every: int | None, slots: int | None, grad: bool, compared: list[Projection]
) -> None:
    options = sft.Options(tile=(rows, cols), batch_tile=2, halo=halo, state_every=every, state_slots=slots)
    with torch.set_grad_enabled(grad):
        net: Any = sft.compile(_Dense(), (3, 3, 44, 10), options=options, output="host")
    assert compared and net.plan.segments[0].placement == "device and host"
