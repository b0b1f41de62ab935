"""Reserved memory of plans: the replay requests the bytes that the projection has, for every kind of plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.api.call_signature import signature_of
from sft.api.capture_cache import capture_model
from sft.api.inputs import InputSpec
from sft.api.pipeline import search
from sft.api.plan_search import PlanSearch
from sft.api.problem_builder import build_problem
from sft.api.settings import CompileSettings, PlanningRequest
from sft.common.interval import Interval
from sft.common.module_snapshot import ModuleSnapshot
from sft.planner.measured.allocation_trace import _RecordingMachine, record_step
from sft.planner.measured.event_sequence import AllocationTrace, EventSequence
from sft.planner.measured.fitted_plan import FittedPlan
from sft.planner.measured.reserved_memory import recorded_tensors, reserved_bytes, resident_sizes, simulate_reserved_memory
from sft.planner.measured.segment_search import choose_segments
from sft.planner.projection import run_step
from sft.runtime.caching_allocator import AllocatorSettings
from tests.helpers.models import seeded
from tests.helpers.planned_networks import PLANNED_NETWORKS

_MIB = 2**20

_SHAPE = (2, 3, 48, 40)


def _fitted(model: nn.Module, shape: tuple[int, ...], budget: str, **options: Any) -> FittedPlan:
    dtype = next(model.parameters()).dtype
    signature = signature_of(ModuleSnapshot(model), [InputSpec(shape=shape, dtype=dtype)], (False,), next(model.parameters()).device)
    settings = CompileSettings(budget_bytes=sft.parse_bytes(budget), options=sft.Options(**options))
    specialized = capture_model(model, signature).specialize(signature.shapes)
    assert specialized is not None
    request = PlanningRequest(model=model, signature=signature, settings=settings)
    return search(PlanSearch(request=request), build_problem(request, specialized))


class _NoMemory(dict[Any, Any]):
    """Dictionary that stores nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def _instruction_by_instruction(fitted: FittedPlan) -> AllocationTrace:
    """The trace of a step, with all programs run instruction by instruction."""
    machine = _RecordingMachine(on_host=fitted.problem.resources.on_host, _known=_NoMemory())
    run_step(fitted.problem, fitted.projected.region, machine)
    return machine.recorder.trace()


@pytest.mark.parametrize(("make", "options"), PLANNED_NETWORKS, ids=str)
def test_the_trace_requests_the_projected_bytes(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    fitted = _fitted(seeded(make), _SHAPE, "64MiB", **options)
    trace, settings = record_step(fitted.problem, fitted.projected.region), AllocatorSettings()
    assert trace.events == _instruction_by_instruction(fitted).events
    assert trace.peak_bytes == fitted.projected.projection.peak_bytes
    without_pool = simulate_reserved_memory(trace, settings)
    assert trace.peak_bytes == without_pool.requested_bytes <= without_pool.allocated_bytes <= without_pool.reserved_bytes
    assert without_pool.num_failures == without_pool.num_released == 0
    segments = choose_segments(trace, settings)
    pooled = simulate_reserved_memory(trace, settings, segments=segments)
    assert trace.peak_bytes <= pooled.requested_bytes <= pooled.allocated_bytes <= pooled.reserved_bytes
    # A device of exactly this size does not run out, and returns no segment in a step that repeats.
    exact = simulate_reserved_memory(trace, settings, segments=segments, limit_bytes=pooled.reserved_bytes)
    assert exact.num_failures == exact.num_released == 0
    for each, simulated in ((None, without_pool), (segments, pooled)):
        assert reserved_bytes(trace, settings, segments=each, resident=()) == simulated.reserved_bytes


def test_sweeps_of_equal_panels_are_recorded_once() -> None:
    """Of six panels the first one, and four of one kind. The last one keeps its states, so its strips are recorded one by one."""
    model = nn.Sequential(*[layer for _ in range(2) for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())]).double()
    fitted = _fitted(model, (1, 3, 40, 96), "64MiB", tile=(4, 16))
    trace = record_step(fitted.problem, fitted.projected.region)
    sweeps = [value for _, value in trace.sequence.items if isinstance(value, EventSequence) and value.num_events > 100]
    assert sorted(Counter(sweeps).values()) == [1, 1, 4, 4], "forward and backward"
    assert trace.events == _instruction_by_instruction(fitted).events


def _strips(height: int) -> FittedPlan:
    """Plan of strips of 64 rows of a network on 1024 x 1024 px."""
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())], nn.Conv2d(16, 1, 1))
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), model)
    return _fitted(model, (1, 3, height, 1024), "200MiB", tile=(64, None))


def test_fragmentation_is_seen_and_a_device_of_the_budget_runs_out() -> None:
    """Without a pool the step reserves more than it requests, and fails on a device that is just as large as its tensors."""
    fitted, settings = _strips(1024), AllocatorSettings()
    trace = record_step(fitted.problem, fitted.projected.region)
    ample = simulate_reserved_memory(trace, settings)
    assert 1.05 * ample.requested_bytes < ample.reserved_bytes < 3 * ample.requested_bytes
    assert simulate_reserved_memory(trace, settings, limit_bytes=ample.requested_bytes + 2 * _MIB).num_failures > 0
    enough = simulate_reserved_memory(trace, settings, limit_bytes=ample.reserved_bytes)
    assert enough.num_failures == enough.num_released == 0


@pytest.mark.parametrize("height", [1024, 1000])
def test_planned_segments_never_reserve_more(height: int) -> None:
    fitted, settings = _strips(height), AllocatorSettings()
    trace = record_step(fitted.problem, fitted.projected.region)
    pooled = simulate_reserved_memory(trace, settings, segments=choose_segments(trace, settings))
    assert pooled.reserved_bytes <= simulate_reserved_memory(trace, settings).reserved_bytes


def test_planned_segments_of_a_large_network() -> None:
    """Pyramid on 4096 x 4096 px in half precision: half of the excess is avoided."""
    layers = [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)]
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Conv2d(i, o, 3, 1 + (i != o and i > 3), 1), nn.ReLU(inplace=True)) for i, o in layers]
        model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1)).to(torch.bfloat16)
    fitted = _fitted(model, (1, 3, 4096, 4096), "1GiB")
    trace, settings = record_step(fitted.problem, fitted.projected.region), AllocatorSettings()
    pooled = simulate_reserved_memory(trace, settings, segments=choose_segments(trace, settings))
    without_pool = simulate_reserved_memory(trace, settings)
    assert pooled.reserved_bytes - trace.peak_bytes < 0.6 * (without_pool.reserved_bytes - trace.peak_bytes)
    assert without_pool.reserved_bytes > 1.15 * trace.peak_bytes


def _random_trace(seed: int) -> AllocationTrace:
    """Forty tensors of 10 to 60 MiB that live for up to twelve allocations."""
    random = Random(seed)
    events: list[tuple[int, int]] = []
    frees: dict[int, list[int]] = {}
    for number in range(40):
        events += [(dead, 0) for dead in frees.pop(number, [])] + [(number, random.randint(10, 60) * _MIB)]
        frees.setdefault(min(40, number + random.randint(1, 12)), []).append(number)
    events += [(dead, 0) for dead in frees.pop(40)]
    return AllocationTrace.of(events)


def test_the_local_search_reserves_less_than_the_first_divisions(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, traces = AllocatorSettings(), [_random_trace(seed) for seed in range(4)]

    def excess_bytes() -> list[int]:
        chosen = [choose_segments(trace, settings) for trace in traces]
        assert chosen == [choose_segments(trace, settings) for trace in traces]
        pooled = [simulate_reserved_memory(trace, settings, segments=each) for trace, each in zip(traces, chosen, strict=True)]
        return [each.reserved_bytes - trace.peak_bytes for each, trace in zip(pooled, traces, strict=True)]

    searched = excess_bytes()
    monkeypatch.setattr("sft.planner.measured.segment_search._MAX_CHANGES", 0)
    divided = excess_bytes()
    assert all(0 <= after <= before for after, before in zip(searched, divided, strict=True))
    assert sum(searched) < 0.8 * sum(divided)


def test_a_step_that_fits_next_to_the_resident_tensors_has_no_pool() -> None:
    """A resident tensor leaves the rest of its segment to the step, which a pool would not use."""
    trace = AllocationTrace.of(((1, 8 * _MIB), (1, 0)))
    settings = AllocatorSettings()
    assert choose_segments(trace, settings, [9 * _MIB]) is None
    assert choose_segments(trace, settings) is not None


def test_workspaces_are_requested_with_the_results_of_operators() -> None:
    fitted = _strips(1024)
    plain = record_step(fitted.problem, fitted.projected.region)
    convolutions = lambda program, first: {at: 7 * _MIB for at, each in enumerate(program.instructions) if each.flops}  # noqa: E731
    trace = record_step(fitted.problem, fitted.projected.region, convolutions)
    assert plain.peak_bytes < trace.peak_bytes <= plain.peak_bytes + 7 * _MIB
    assert sum(num_bytes == 7 * _MIB for _, num_bytes in trace.events) > 10
    assert plain.events == _instruction_by_instruction(fitted).events


def test_resident_tensors_have_the_resident_bytes() -> None:
    fitted = _strips(256)
    sizes = resident_sizes(fitted.problem)
    assert sum(sizes) == fitted.problem.resources.resident_bytes
    assert simulate_reserved_memory(
        record_step(fitted.problem, fitted.projected.region), AllocatorSettings(), resident=sizes
    ).reserved_bytes


def test_gradients_of_trained_parameters_are_resident() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 7), nn.Conv2d(64, 2, 1, bias=False))
    model[0].requires_grad_(False)
    problem = _fitted(model, (1, 3, 32, 32), "64MiB").problem
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    assert sorted(resident_sizes(problem)) == sorted([*sizes, sizes[-1]])
    recorded = recorded_tensors(problem)
    assert recorded.copied == ((sizes[-1],),) and recorded.inputs == (4 * 3 * 32 * 32,)


def test_a_plan_for_a_gpu_of_another_machine_fits_by_its_reserved_bytes() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1))
    budget = 160 * _MIB
    plan = sft.plan(model, (1, 3, 1024, 1024), budget=budget, device="cuda")
    assert plan.projected_reserved_bytes == plan.total_bytes <= budget
    assert 0 < plan.overhead_bytes < plan.projected_peak_bytes
    assert "reserved" in plan.explain()
    assert sft.plan(model, (1, 3, 1024, 1024), budget=budget, device="cpu").projected_reserved_bytes == 0


def test_strips_of_an_input_are_freed_before_the_next_but_one_is_allocated() -> None:
    """As by the loader of tensors; in between, other tensors may take the memory of a strip."""
    machine = _RecordingMachine(on_host=False)
    order = [Interval(0, 4), Interval(4, 8), Interval(8, 12)]
    loader = machine.open_input(None, Interval(0, 1), order, 10, torch.float32)
    for rows in order:
        strip = loader.take(rows)
        del strip
    loader.close()
    assert machine.recorder.trace().events == ((1, 40), (2, 40), (1, 0), (3, 40), (2, 0), (3, 0))


def test_pixels_of_a_single_strip_are_freed_when_it_is_taken() -> None:
    """In float16 they have the bytes of the numbers, next to the numbers in float32."""
    machine, rows = _RecordingMachine(on_host=False), Interval(0, 4)
    loader = machine.open_input(None, Interval(0, 1), [rows], 10, torch.float16)
    strip = loader.take(rows)
    del strip
    loader.close()
    machine.read_input(None, (1, 5, 4, 1), torch.float32)
    assert machine.recorder.trace().events == ((1, 40), (2, 120), (2, 0), (1, 0), (3, 80), (4, 40), (4, 0), (3, 0))
