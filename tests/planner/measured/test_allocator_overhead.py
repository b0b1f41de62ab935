"""Allocator overhead is measured before a plan is accepted; a simulated GPU on the CPU has blocks and workspaces."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.common.memory import _CountedStorage, _DispatchMeter
from sft.common.torch_internals import pytree
from sft.planner.measured.allocator_overhead import AllocatorMachine, AllocatorRounding, OverheadEstimator, blas_workspace_bytes
from sft.planner.problem import PlanningProblem
from sft.planner.projection import run_step
from sft.runtime.region import Region
from sft.torch_runtime.profiling import CACHE_VARIABLE, ProgramBenchmark, run_on_autograd_thread
from tests.helpers.exactness import assert_exact
from tests.helpers.models import ConvNet, Residual, image, seeded
from tests.helpers.planned_networks import PLANNED_NETWORKS

_EXACTLY = AllocatorRounding(splits_finely=True)
#: A small workspace of cuBLAS, so that it does not hide all else.
_BLAS_BYTES = 3 * 4 * 1024
_SHAPE = (2, 3, 48, 40)


class _GpuMeter(_DispatchMeter):
    """Simulated GPU memory: storages as blocks, and a workspace of a quarter of the image for every convolution."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.blocks_now = self.blocks_peak = self.adopted = self.adopted_blocks = 0

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what is older than the block, so that its end is seen: CUDA's counters fall below their start."""
        for storage in {id(each.untyped_storage()): each.untyped_storage() for each in tensors}.values():
            self._count(storage, base_bytes=0)
        self.adopted, self.adopted_blocks = self.current_bytes, self.blocks_now

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call(func, args, kwargs)
        if func.__name__.startswith(("convolution", "mkldnn_convolution")):
            workspace = max(each.numel() * each.element_size() for each in args if isinstance(each, torch.Tensor)) // 4
            self.peak_bytes = max(self.peak_bytes, self.current_bytes + workspace)
            self.blocks_peak = max(self.blocks_peak, self.blocks_now + _EXACTLY.size(workspace))
        return result

    def _count(self, storage: torch.UntypedStorage, *, base_bytes: int) -> None:
        known = self._counted.get(id(storage))
        before = 0 if known is None else known.num_bytes
        super()._count(storage, base_bytes=base_bytes)
        self.blocks_now += _EXACTLY.size(self._counted[id(storage)].num_bytes) - _EXACTLY.size(before)
        self.blocks_peak = max(self.blocks_peak, self.blocks_now)

    def _release(self, counted: _CountedStorage) -> None:
        self.blocks_now -= _EXACTLY.size(counted.num_bytes)
        super()._release(counted)


@dataclass
class _GpuPeak:
    meter: _GpuMeter

    @property
    def num_bytes(self) -> int:
        return self.meter.blocks_peak - self.meter.adopted_blocks

    @property
    def requested_bytes(self) -> int:
        return self.meter.peak_bytes - self.meter.adopted


@contextmanager
def _measured() -> Iterator[_GpuPeak]:
    with _GpuMeter() as meter:
        yield _GpuPeak(meter)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.api.plan_search._has_device_overhead", lambda _: True)
    meters: list[_GpuMeter] = []
    run = ProgramBenchmark.run

    @contextmanager
    def measured(device: object) -> Iterator[_GpuPeak]:
        with _measured() as peak:
            meters.append(peak.meter)
            yield peak
            meters.pop()

    def run_seen(trial: ProgramBenchmark, *, is_last: bool = False) -> None:
        if meters:
            meters[-1].adopt(each for each in trial._saved.values() if isinstance(each, torch.Tensor))
        run(trial, is_last=is_last)

    monkeypatch.setattr(ProgramBenchmark, "run", run_seen)
    monkeypatch.setattr("sft.planner.measured.allocator_overhead.measure_peak", measured)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4:3")


def _step(net: nn.Module, x: torch.Tensor) -> Any:
    out = net(x)
    outs = [each for each in pytree.tree_leaves(out) if isinstance(each, torch.Tensor)]
    torch.autograd.backward(outs, [torch.ones_like(each) for each in outs])


@pytest.mark.parametrize(("make", "options"), PLANNED_NETWORKS, ids=str)
def test_a_step_needs_no_more_than_projected(make: Callable[[], nn.Module], options: dict[str, Any], gpu: None) -> None:
    model = seeded(make)
    net: Any = sft.compile(model, _SHAPE, budget="64MiB", options=sft.Options(**options))
    x = image(*_SHAPE)
    net.plan_for(x)
    _step(net, x)
    net.zero_grad()
    with _measured() as peak:
        _step(net, x.clone())
    plan = net.plan
    assert 0 < plan.overhead_bytes < plan.projected_peak_bytes
    kept = 2 * _BLAS_BYTES if plan.overhead_bytes >= 2 * _BLAS_BYTES else 0
    assert peak.requested_bytes <= peak.num_bytes <= plan.projected_peak_bytes
    assert plan.projected_peak_bytes - kept <= 1.02 * peak.num_bytes + 16 * 1024
    assert "overhead" in plan.explain()
    assert sft.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("make", "options"), PLANNED_NETWORKS, ids=str)
def test_without_rounding_the_simulated_allocator_equals_the_projection(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    """Same simulation and same sums over programs; only sizes differ."""

    class Exactly(AllocatorRounding):
        def size(self, num_bytes: int) -> int:
            return num_bytes

    found = []
    note = OverheadEstimator.overhead_bytes

    def compare(overheads: OverheadEstimator, problem: PlanningProblem, region: Region, projected_bytes: int) -> int:
        machine = AllocatorMachine(on_host=problem.resources.on_host, blocks=Exactly())
        run_step(problem, region, machine)
        found.append((machine.memory.peak_bytes, projected_bytes))
        return note(overheads, problem, region, projected_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sft.api.plan_search._has_device_overhead", lambda _: True)
        patch.setattr(OverheadEstimator, "overhead_bytes", compare)
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4:3")
        sft.compile(seeded(make), _SHAPE, budget="64MiB", options=sft.Options(**options))
    assert found and all(ours == projected for ours, projected in found)


def test_the_plan_leaves_room_for_device_overhead(gpu: None) -> None:
    """A budget that the projection alone would fill: another plan is chosen, and it fits with its overhead and as measured."""
    model, x = seeded(ConvNet), image(*_SHAPE)
    plain = sft.plan(copy.deepcopy(model), _SHAPE, options=sft.Options(strategy="none"))
    budget_bytes = plain.total_bytes - 1  # all whole and its overhead do not fit
    net: Any = sft.compile(model, _SHAPE, budget=budget_bytes)
    assert plain.total_bytes - plain.overhead_bytes < budget_bytes
    assert net.plan.total_bytes <= budget_bytes and net.plan.segments != plain.segments
    with _measured() as peak:
        _step(net, x)
    assert peak.num_bytes <= net.plan.projected_peak_bytes
    assert_exact(seeded(ConvNet), x, budget=budget_bytes)


def test_refusals_name_device_overhead(gpu: None) -> None:
    with pytest.raises(sft.BudgetError, match="On a GPU the allocator's blocks and libraries' workspaces come on top") as first:
        sft.compile(seeded(ConvNet), _SHAPE, budget=1)
    with pytest.raises(sft.BudgetError, match=r"for blocks and workspaces of the device") as second:
        sft.compile(seeded(ConvNet), _SHAPE, budget=first.value.needed_bytes)
    net: Any = sft.compile(seeded(ConvNet), _SHAPE, budget=second.value.needed_bytes)
    assert first.value.needed_bytes < net.plan.total_bytes <= second.value.needed_bytes


def test_a_given_plan_is_tried_on_this_device(gpu: None) -> None:
    model = seeded(Residual)
    net: Any = sft.compile(copy.deepcopy(model), _SHAPE)
    handed_in = sft.Plan.from_json(net.plan.to_json())
    again: Any = sft.compile(copy.deepcopy(model), _SHAPE, plan=handed_in, budget=net.plan.total_bytes)
    assert again.plan.overhead_bytes == net.plan.overhead_bytes
    with pytest.raises(sft.BudgetError, match="the plan that was given needs"):
        sft.compile(copy.deepcopy(model), _SHAPE, plan=handed_in, budget=net.plan.total_bytes - 1)


def test_timed_alternatives_have_their_overhead(gpu: None) -> None:
    net: Any = sft.compile(seeded(ConvNet), _SHAPE, budget="1MiB", options=sft.Options(profile="measure"))
    assert net.plan.projected_seconds is not None
    assert net.plan.overhead_bytes > 0 and net.plan.total_bytes <= 2**20


def test_programs_are_tried_once(gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    tried = []
    measure = OverheadEstimator._measure

    def count(overheads: OverheadEstimator, *programs: Any) -> Any:
        tried.append(programs)
        return measure(overheads, *programs)

    monkeypatch.setattr(OverheadEstimator, "_measure", count)
    plans = [sft.compile(seeded(Residual), _SHAPE, options=sft.Options(tile=(16, None))).plan for _ in range(2)]
    assert plans[0] == plans[1]
    num_first = len(tried)
    assert num_first > 0
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)  # algorithms are searched in each process
    sft.compile(seeded(Residual), _SHAPE, options=sft.Options(tile=(16, None)))
    sft.compile(seeded(Residual), _SHAPE, options=sft.Options(tile=(16, None)))
    assert len(tried) == 3 * num_first


def test_trials_read_the_models_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial with its own weights would need memory for a second copy."""
    monkeypatch.setattr("sft.api.plan_search._has_device_overhead", lambda _: True)
    bound = []
    make = ProgramBenchmark._input_for

    def note(trial: ProgramBenchmark, program: Any, port: Any, slot: Any) -> Any:
        made = make(trial, program, port, slot)
        if port.role == "side" and port.name in trial.weights:
            bound.append((made.data_ptr(), trial.weights[port.name].data_ptr()))
        return made

    monkeypatch.setattr(ProgramBenchmark, "_input_for", note)
    model = seeded(Residual)
    before = copy.deepcopy(model.state_dict())
    sft.compile(model, _SHAPE, options=sft.Options(tile=(16, None)))
    assert bound and all(ours == theirs for ours, theirs in bound)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_device_filled_by_other_processes(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(trial: ProgramBenchmark, *, is_last: bool = False) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(ProgramBenchmark, "run", full)
    monkeypatch.setenv(CACHE_VARIABLE, "")
    with pytest.raises(sft.BudgetError, match=r"cpu has less free.*Tried to allocate 2\.00 GiB.*lower the budget to what is free"):
        sft.compile(seeded(Residual), _SHAPE)


def test_allocator_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [AllocatorRounding().size(n) for n in (0, 1, 512, 513, 2**20, 2**20 + 1)] == [0, 512, 512, 1024, 2**20, 2**20 + 512 + 2**20]
    assert _EXACTLY.size(2**20 + 1) == 2**20 + 512
    for name, value, splits in (
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments: true", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", False),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert AllocatorRounding.of_settings() == AllocatorRounding(splits_finely=splits)


def test_workspaces_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    for capability, num_bytes in (((8, 6), 8 * 2**20 + 128 * 2**10), ((9, 0), 32 * 2**20)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert blas_workspace_bytes(device) == num_bytes
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert blas_workspace_bytes(device) == (2 * 4096 + 8 * 16) * 2**10


@pytest.mark.parametrize("training", [True, False])
def test_trials_are_made_where_backward_passes_run(gpu: None, monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    """Libraries search for algorithms on each thread, and the memory of that search is not part of a plan."""
    there: list[torch.device] = []
    tried = []
    measure = OverheadEstimator._measure

    def note(device: torch.device, work: Callable[[], None]) -> None:
        there.append(device)
        run_on_autograd_thread(device, work)

    def count(overheads: OverheadEstimator, *programs: Any) -> Any:
        tried.append(programs)
        return measure(overheads, *programs)

    monkeypatch.setattr("sft.planner.measured.allocator_overhead.run_on_autograd_thread", note)
    monkeypatch.setattr(OverheadEstimator, "_measure", count)
    with torch.set_grad_enabled(training):
        sft.compile(seeded(Residual), _SHAPE, options=sft.Options(tile=(16, None)))
    assert tried and len(there) == (len(tried) if training else 0)


def test_errors_on_autograds_thread_are_the_callers() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("no room")

    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="no room"):
        run_on_autograd_thread(torch.device("cpu"), fail)
