"""Reserved memory of plans: the replay requests the bytes that the projection has, for every kind of plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.api.call_signature import signature_of
from sft.api.capture_cache import capture_model
from sft.api.inputs import InputSpec
from sft.api.pipeline import search
from sft.api.plan_search import FittedPlan
from sft.api.problem_builder import build_problem
from sft.api.settings import CompileSettings
from sft.common.module_snapshot import ModuleSnapshot
from sft.planner.measured.reserved_memory import simulate_reserved_memory
from sft.runtime.caching_allocator import AllocatorSettings
from tests.helpers.models import seeded
from tests.helpers.planned_networks import PLANNED_NETWORKS

_MIB = 2**20

_SHAPE = (2, 3, 48, 40)


def _fitted(model: nn.Module, shape: tuple[int, ...], budget: str, **options: Any) -> FittedPlan:
    dtype = next(model.parameters()).dtype
    signature = signature_of(ModuleSnapshot(model), [InputSpec(shape=shape, dtype=dtype)], (False,), torch.device("cpu"))
    settings = CompileSettings(budget_bytes=sft.parse_bytes(budget), options=sft.Options(**options))
    specialized = capture_model(model, signature).specialize(signature.shapes)
    assert specialized is not None
    return search(build_problem(model, signature, settings, specialized), model, signature, settings)


@pytest.mark.parametrize(("make", "options"), PLANNED_NETWORKS, ids=str)
def test_the_replay_requests_the_projected_bytes(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    fitted = _fitted(seeded(make), _SHAPE, "64MiB", **options)
    reserved = simulate_reserved_memory(fitted.problem, fitted.projected.region, AllocatorSettings())
    assert reserved.requested_bytes == fitted.projected.projection.peak_bytes
    assert reserved.requested_bytes <= reserved.allocated_bytes <= reserved.reserved_bytes
    assert reserved.num_failures == reserved.num_released == 0


def test_fragmentation_is_seen_and_a_device_of_the_budget_runs_out() -> None:
    """Strips of 1024 px: the step reserves more than it requests, and fails on a device that is just as large as its tensors."""
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())], nn.Conv2d(16, 1, 1))
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), model)
    fitted = _fitted(model, (1, 3, 1024, 1024), "200MiB", tile=(64, None))
    ample = simulate_reserved_memory(fitted.problem, fitted.projected.region, AllocatorSettings())
    assert 1.05 * ample.requested_bytes < ample.reserved_bytes < 3 * ample.requested_bytes
    small = simulate_reserved_memory(
        fitted.problem, fitted.projected.region, AllocatorSettings(), limit_bytes=ample.requested_bytes + 2 * _MIB
    )
    assert small.num_failures > 0
    enough = simulate_reserved_memory(fitted.problem, fitted.projected.region, AllocatorSettings(), limit_bytes=ample.reserved_bytes)
    assert enough.num_failures == enough.num_released == 0
