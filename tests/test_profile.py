"""The closed form of a walk equals the walk on the phantom machine, byte for byte and FLOP for FLOP."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.plan.problem import Problem
from sft.plan.project import Projection, project
from sft.walk.region import Region


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


@pytest.mark.parametrize("every", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("rows", [1, 3, 8, 64])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("cols", "halo"), [(None, "carry"), (4, "carry"), (6, "recompute")])
def test_profile_equals_the_phantom_walk(
    rows: int, every: int, grad: bool, cols: int | None, halo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if halo == "recompute" and (every > 1 or rows < 3):
        pytest.skip("tiles keep no states")
    seen = []

    def both(problem: Problem, region: Region, **keywords: Any) -> Projection:
        summed, walked = project(problem, region), project(problem, region, exactly=True)
        assert summed == walked
        seen.append(summed)
        return summed

    # `sft.plan` is the function; the package of that name is reached by import alone.
    monkeypatch.setattr(import_module("sft.plan.planner"), "project", both)
    with torch.set_grad_enabled(grad):
        sft.compile(_Skip(), (3, 3, 44, 10), options=sft.Options(tile=(rows, cols), state_every=every, batch_tile=2, halo=halo))
    assert seen
