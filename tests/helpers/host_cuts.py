"""Plans with all possible cuts on the host, staged by a thread or copied directly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import sft
from sft.api.plan_search import PlanSearch
from sft.planner.measured.fitted_plan import FittedPlan
from sft.planner.problem import PlanningProblem
from sft.planner.projection import Projection, project_step
from sft.planner.streamed_cuts import streamable_values, with_streamed
from sft.runtime.tiled_segment import TiledSegment
from sft.torch_runtime.host.host_memory import HostAllocator, HostSlabPool

__all__ = ["Normed", "compile_with_cuts", "copy_directly"]


class Normed(nn.Module):
    """Train-mode norms between convolutions, a skip past one of them, a gate, and a pool: five barriers."""

    def __init__(self, axes: int = 2) -> None:
        super().__init__()
        conv: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        norm: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes - 1]
        self.stem = nn.Sequential(conv(3, 4, 3, padding=1), norm(4), nn.ReLU())
        self.body = nn.Sequential(conv(4, 4, 3, padding=1), norm(4))
        self.down = nn.Sequential(conv(4, 5, 3, stride=2, padding=1), nn.GroupNorm(1, 5), nn.ReLU())
        self.last = conv(5, 3, 1)
        self.dims = tuple(range(2, 2 + axes))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = torch.relu(self.body(y) + y)
        y = y * torch.sigmoid(y.mean(self.dims, keepdim=True))
        output: Tensor = self.last(self.down(y)).mean(self.dims)
        return output


def compile_with_cuts(model: nn.Module, x: Tensor, options: sft.Options) -> tuple[Any, PlanningProblem]:
    """A compiled model of which all cuts between tiled segments are on the host, and its planning problem for an input."""
    problems: list[PlanningProblem] = []
    fit = PlanSearch.fit

    def recorded(search: PlanSearch, problem: PlanningProblem) -> FittedPlan:
        problems.append(problem)
        return fit(search, problem)

    with patch.object(PlanSearch, "fit", recorded):
        plan = sft.plan(model, tuple(x.shape), budget="4GiB", options=options)
        choices = [segment.choice for segment in plan.segments]
        chosen = with_streamed(choices, streamable_values(problems[-1], choices))
        segments = tuple(replace(segment, streamed=choice.streamed) for segment, choice in zip(plan.segments, chosen, strict=True))
        made = sft.Plan.from_json(replace(plan, segments=segments).to_json())
        net: Any = sft.compile(model, tuple(x.shape), budget="4GiB", plan=made)
        net.plan_for(x)
    return net, problems[-1]


def copy_directly(net: Any, problem: PlanningProblem) -> Projection:
    """Change the latest prepared plan of a compiled model as for a GPU: its cuts are direct ones. The projection for a GPU."""
    prepared = net._sft_engine.plan_cache.prepared
    key = next(reversed(prepared))
    ready = prepared[key]
    direct = ready.region.streamed
    segments = [
        replace(each, direct=direct & (each.from_source | each.to_host)) if isinstance(each, TiledSegment) else each
        for each in ready.region.segments
    ]
    region = replace(ready.region, direct=direct, segments=segments)
    projection = project_step(replace(problem, resources=replace(problem.resources, on_host=False)), region)
    pool = HostSlabPool(projection.slab_bytes, torch.device("cpu"), HostAllocator())
    prepared[key] = replace(ready, region=region, resources=replace(ready.resources, slab_pool=pool))
    return projection
